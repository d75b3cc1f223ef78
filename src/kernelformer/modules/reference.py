"""Every core by hand: whole matrices in whatever dtype the inputs have, apart from the fast paths.

What `AttentionCore.forward` must equal; the conformance tests compare the two, gradients included.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.reference import (
    GUARD,
    guard_bound,
    log_attention,
    log_kernel,
    near_far_attention,
    near_keys,
    positive_attention,
    signed_attention,
    visibility,
    weighted_attention,
)
from kernelformer.feature_maps.nystrom import NystromMap
from kernelformer.feature_maps.pivots import WildcatMap
from kernelformer.feature_maps.reference import (
    aligned,
    is_signed,
    log_phi,
    nystrom_kernel,
    phi,
    segment_means,
    wildcat_kernel,
)
from kernelformer.modules.baselines import LinformerCore, NystromformerCore
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, SoftmaxCore
from kernelformer.modules.gated import GatedCore
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.local import LocalCore


def reference_attention(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """What a core computes, by the definition of its method.

    Args:
        core: read for its method, settings, draws and parameters only.
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        value: (B, G, S, E).
        is_causal: key j is visible to query i iff j <= i.
        key_mask: (B, S) bool, True = attend.
        query_mask: (B, L) bool, which queries landmarks may come from; default as in `AttentionCore.forward`.
        bias: (H, L, S), added to the logarithms of the weights.
        scale: of the product q . k; default: the core's.
        gate: (B, H, S); default: the core's own, for a core that has one.

    Returns:
        (B, H, L, E). Cost: O(L S M) time and memory.
    """
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if key_mask is not None:  # what is hidden may hold anything, NaN too
        key, value = (torch.where(key_mask[:, None, :, None], x, 0.0) for x in (key, value))
    if core.normalize_qk:
        query, key = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (query, key))
    if isinstance(core, GatedCore) and gate is None:
        weight, own = core.gate_weight.to(key.dtype), core.gate_bias.to(key.dtype)
        gate = torch.sigmoid(torch.einsum("bhld,hd->bhl", key, weight) + own[:, None])
    scale = core.scale if scale is None else scale
    visible = visibility(query.shape[2], key.shape[2], is_causal=is_causal, key_mask=key_mask, device=query.device)
    near = scores = None
    if isinstance(core, KernelCore | LocalCore) and core.near is not None:
        near = near_keys(
            query.shape[2],
            key.shape[2],
            window=core.window or 0,
            sinks=core.sinks,
            key_mask=key_mask,
            device=query.device,
        )
        scores = core.near.scale_of(scale) * query @ key.transpose(-1, -2) + (0.0 if bias is None else bias)
        near, visible = visible & near, visible & ~near
        if isinstance(core, LocalCore):
            return log_attention(scores, value, near)
    query, key = query * math.sqrt(scale), key * math.sqrt(scale)
    if isinstance(core, SoftmaxCore):
        return log_attention(query @ key.transpose(-1, -2), value, visible, bias=bias)
    if isinstance(core, GaussianCore):
        distances = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)
        return log_attention(-0.5 * distances, value, visible, core.normalize, bias)
    if isinstance(core, NystromformerCore | LinformerCore):
        return _by_sample(core, query, key, value, key_mask, query_mask)
    if not isinstance(core, KernelCore):
        raise TypeError(f"{type(core).__name__} has no definition by hand.")
    factor = None if bias is None else bias.exp()
    if gate is not None:
        factor = _left_of(gate, query.shape[2], key_mask)
    feature_map, normalize = core.feature_map, core.normalize
    qkv, masks = (query, key, value), (key_mask, query_mask)
    if near is not None and scores is not None:
        out = _near_far(core, qkv, scores, (near, visible), masks, bias, scale)
        return _clip(out, value, key_mask) if isinstance(feature_map, WildcatMap) else out
    if isinstance(feature_map, WildcatMap):
        weights, bound = _landmark_weights(feature_map, query, key, masks, visible, factor)
        return _clip(weighted_attention(weights, value, visible, normalize, bound), value, key_mask)
    if isinstance(feature_map, NystromMap):
        return _nystrom(feature_map, qkv, visible, masks, factor, normalize)
    logs = log_phi(feature_map, query, "query", scale), log_phi(feature_map, key, "key", scale)
    if logs[0] is not None and logs[1] is not None:
        return positive_attention(logs[0], logs[1], value, visible, normalize, bias)
    phi_q, phi_k = phi(feature_map, query, "query"), phi(feature_map, key, "key")
    return signed_attention(phi_q, phi_k, value, visible, normalize, is_signed(feature_map), factor=factor)


def _near_far(
    core: KernelCore,
    qkv: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    near_and_far: tuple[Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Near keys by softmax, far ones by the kernel times exp(beta + bias)."""
    query, key, value = qkv
    near, far = near_and_far
    feature_map = core.feature_map
    extra = torch.zeros_like(scores) if bias is None else bias + torch.zeros_like(scores)
    if core.beta is not None:
        extra = extra + core.beta.to(scores.dtype)[:, None, None]
    if isinstance(feature_map, NystromMap | WildcatMap):
        weights, bound = _landmark_weights(feature_map, query, key, masks, far, extra.exp())
        return near_far_attention(scores, value, near, far, weights, None if bound is None else bound / GUARD)
    logs = log_phi(feature_map, query, "query", scale), log_phi(feature_map, key, "key", scale)
    if logs[0] is not None and logs[1] is not None:
        weights = log_kernel(logs[0], logs[1]) + extra
        return log_attention(torch.where(near, scores, weights), value, near | far)
    phi_q, phi_k = phi(feature_map, query, "query"), phi(feature_map, key, "key")
    guard = None
    if is_signed(feature_map):
        size_q, size_k = (x.norm(dim=-1, keepdim=True) for x in (phi_q, phi_k))
        guard = guard_bound(size_q, size_k, far, extra.exp()) / GUARD
    return near_far_attention(scores, value, near, far, phi_q @ phi_k.transpose(-1, -2) * extra.exp(), guard)


def _nystrom(
    feature_map: NystromMap,
    qkv: tuple[Tensor, Tensor, Tensor],
    visible: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    factor: Tensor | None,
    normalize: bool,
) -> Tensor:
    """Skyformer: the Gaussian kernel through landmarks, or the softmax kernel as ``exp(|x|^2/2) kappa exp(|y|^2/2)``.

    The guard takes sqrt(gamma) for the length of the Gaussian part: less is not resolved.
    """
    query, key, value = qkv
    if feature_map.options["align"]:
        query, key = aligned(query, key, *masks)
    weights, bound = _landmark_weights(feature_map, query, key, masks, visible, factor)
    return weighted_attention(weights, value, visible, normalize, bound)


def _landmark_weights(
    feature_map: NystromMap | WildcatMap,
    query: Tensor,
    key: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    visible: Tensor,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Weights (*, L, S), and the bound of the denominator from below, (*, L, 1), or None."""
    if isinstance(feature_map, WildcatMap):
        weights = wildcat_kernel(feature_map, query, key, *masks)
        return weights if factor is None else weights * factor, None
    weights = nystrom_kernel(feature_map, query, key, *masks)
    size_q, size_k = (torch.ones_like(x[..., :1]) for x in (query, key))
    if feature_map.options["kernel"] == "softmax":
        size_q, size_k = (torch.exp(0.5 * x.square().sum(-1, keepdim=True)) for x in (query, key))
    weights = size_q * weights * size_k.transpose(-1, -2)
    bound = feature_map.gamma * guard_bound(size_q, size_k, visible, factor)
    return weights if factor is None else weights * factor, bound


def _clip(out: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """Outputs (B, H, L, E) within the range of the real values, which is constant for the gradient."""
    clipped = []
    for b, x in enumerate(value.detach()):
        real = x if key_mask is None else x[:, key_mask[b]]
        if real.shape[1] == 0:
            clipped.append(torch.zeros_like(out[b]))
            continue
        low, high = real.amin(1, keepdim=True), real.amax(1, keepdim=True)
        rounding = 8 * torch.finfo(out.dtype).eps * torch.maximum(low.abs(), high.abs())
        low, high = low - rounding, high + rounding
        clipped.append(torch.where(out[b] < low, low, torch.where(out[b] > high, high, out[b])))
    return torch.stack(clipped)


def _left_of(gate: Tensor, length: int, key_mask: Tensor | None) -> Tensor:
    """``(1 - g_j) g_{j+1} ... g_i``, what query i finds of key j, (B, H, L, S); hidden tokens change nothing."""
    batch, heads, keys = gate.shape
    real = torch.ones(batch, keys, dtype=torch.bool, device=gate.device) if key_mask is None else key_mask
    keep = torch.where(real[:, None], gate, 1.0)
    rows, row = [gate.new_zeros(batch, heads, 0, keys)], gate.new_zeros(batch, heads, keys)
    for i in range(length):
        if i < keys:
            new = torch.where(real[:, None, i], 1 - gate[:, :, i], 0.0)
            row = row * keep[:, :, i : i + 1]
            row = torch.cat([row[:, :, :i], new.unsqueeze(-1), row[:, :, i + 1 :]], -1)
        rows.append(row.unsqueeze(2))
    return torch.cat(rows, 2)


def _by_sample(
    core: NystromformerCore | LinformerCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> Tensor:
    """Nystromformer and Linformer, sample by sample and head by head, with real keys only."""
    samples = []
    for b in range(query.shape[0]):
        real = torch.ones(key.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        heads = []
        for h in range(query.shape[1]):
            if not bool(real.any()):
                heads.append(query.new_zeros(query.shape[2], value.shape[-1]))
            elif isinstance(core, LinformerCore):
                heads.append(_linformer(core, query[b, h], key[b, h], value[b, h], real))
            else:
                asked = query[b, h] if query_mask is None else query[b, h][query_mask[b]]
                heads.append(_nystromformer(core, h, query[b, h], asked, key[b, h], value[b, h], real))
        samples.append(torch.stack(heads))
    return torch.stack(samples)


def _linformer(core: LinformerCore, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
    """``softmax(Q (E K)^T) F V``, (L, E)."""
    mix_k, mix_v = (x.to(query.dtype)[:, : len(key)][:, real] for x in (core.E, core.F))
    return torch.softmax(query @ (mix_k @ key[real]).T, -1) @ (mix_v @ value[real])


def _nystromformer(
    core: NystromformerCore, head: int, query: Tensor, asked: Tensor, key: Tensor, value: Tensor, real: Tensor
) -> Tensor:
    """``softmax(Q Kl^T) softmax(Ql Kl^T)^+ softmax(Ql K^T) V``, (L, E), and the convolution of V."""
    count = min(core.num_landmarks, len(asked), int(real.sum()))
    mean_q, mean_k = segment_means(asked, count), segment_means(key[real], count)
    middle = torch.softmax(mean_q @ mean_k.T, -1)
    inverse = middle.T / (middle.sum(0).max() * middle.sum(1).max())
    eye = torch.eye(len(middle), dtype=middle.dtype, device=middle.device)
    for _ in range(core.rounds):
        product = middle @ inverse
        inverse = 0.25 * inverse @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
    out = torch.softmax(query @ mean_k.T, -1) @ inverse @ torch.softmax(mean_q @ key[real].T, -1) @ value[real]
    if core.conv:
        padded = F.pad(value, (0, 0, core.conv // 2, core.conv // 2))
        taps = core.conv_weight[head].to(query.dtype)
        out = out + torch.stack([w * padded[i : i + len(value)] for i, w in enumerate(taps)]).sum(0)
    return out
