"""Every core and every feature map by hand, as the papers write them: whole matrices, any dtype, no fast path.

What `AttentionCore.forward` must equal; the conformance tests compare the two, gradients included. Only draws,
parameters and settings are read off a core and its map. Maps take inputs as the kernel sees them, i.e. after
multiplication by ``sqrt(scale)``, with one row per query head: (B, H, L, D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from kernelformer.contract import Role
from kernelformer.feature_maps import (
    FastFoodMap,
    FeatureMap,
    FormulaMap,
    GeneralizedMap,
    GenerativeMap,
    HedgehogMap,
    LogLinearMap,
    MixtureMap,
    NystromMap,
    OptimalMap,
    PositiveMap,
    ScaledFourierMap,
    TrigonometricMap,
    WildcatMap,
)
from kernelformer.feature_maps.spectral import SpectralMap
from kernelformer.modules.baselines import LinformerCore, NystromformerCore
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, LocalCore, SoftmaxCore
from kernelformer.modules.gated import GatedCore
from kernelformer.modules.kernel import KernelCore


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
    """Compute the output of a core by the definition of its method.

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
        sizes = {"window": core.window or 0, "sinks": core.sinks}
        near = near_keys(query.shape[2], key.shape[2], **sizes, key_mask=key_mask, device=query.device)
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
    masks, clips = (key_mask, query_mask), isinstance(feature_map, WildcatMap)
    if near is not None and scores is not None:
        out = _near_far(core, (query, key, value), scores, (near, visible), masks, bias, scale)
        return _clip(out, value, key_mask) if clips else out
    if isinstance(feature_map, NystromMap | WildcatMap):
        if feature_map.aligns:
            query, key = aligned(query, key, *masks)
        weights, bound = _landmark_weights(feature_map, query, key, masks, visible, factor)
        out = weighted_attention(weights, value, visible, normalize, bound)
        return _clip(out, value, key_mask) if clips else out
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
    """Softmax for near keys, and the kernel times exp(beta + bias) for far ones."""
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


def _landmark_weights(
    feature_map: NystromMap | WildcatMap,
    query: Tensor,
    key: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    visible: Tensor,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute weights (*, L, S), and the lower bound of the denominator, (*, L, 1), or None.

    Skyformer: the Gaussian kernel through landmarks, or the softmax kernel as ``exp(|x|^2/2) kappa exp(|y|^2/2)``. The
    guard takes sqrt(gamma) for the length of the Gaussian part: less is not resolved.
    """
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
    """Clip outputs (B, H, L, E) to the range of the real values, which is constant for the gradient."""
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
    """Compute ``(1 - g_j) g_{j+1} ... g_i``, the weight of key j for query i, (B, H, L, S); hidden tokens have none."""
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


_ACTIVATIONS = {
    "relu": torch.relu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "gelu": F.gelu,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sign": torch.sign,
    "identity": torch.clone,
}
_NONNEGATIVE = ("relu", "exp", "sigmoid", "abs", "elu")


def log_phi(feature_map: FeatureMap, x: Tensor, role: Role, scale: float = 1.0) -> Tensor | None:
    """Compute ``log phi(x)``, (B, H, L, D) -> (B, H, L, M), of maps that are exponentials; None for the others.

    ``scale``, which x has in it already, is of the statistics of calibrated maps, which have not.

    favor+          w_i . x - |x|^2 / 2 - log(m) / 2            softmax kernel      (Performer, Eq. 7)
                    w_i . x - |x|^2 - log(m) / 2                Gaussian kernel
    hyperbolic      both signs of w_i, log(2m) instead of log(m)                    (Performer, Lemma 1)
    favor++, #      w_i^T A w_i + w_i^T (I - 4 A)^(1/2) y - |y|^2 / 2 + log det(I - 4 A) / 4 - log(m) / 2, y balanced
    prf             w_i . x - |x|^2 - log(M) / 2                                    (KL-Transformer, Eq. 9)
    loglinear       w_i . x + b_i, of keys less its log-sum-exp over i
    hedgehog        w_i . x less its log-sum-exp over i, then the same of -w_i . x
    """
    options = feature_map.options
    squares = x.square().sum(-1, keepdim=True)
    if isinstance(feature_map, FormulaMap):
        if type(feature_map).log_phi is FormulaMap.log_phi:
            return None
        return feature_map.log_phi(x, _formula_tensors(feature_map, x), role, **feature_map.formula_settings)
    if isinstance(feature_map, LogLinearMap):
        weight, bias = (feature_map.w_q, feature_map.b_q) if role == "query" else (feature_map.w_k, feature_map.b_k)
        logs = _project(x, weight) + _by_head(bias.to(x.dtype), x.shape[1]).unsqueeze(1)
        return logs.log_softmax(-1) if role == "key" and options["unit_keys"] else logs
    if isinstance(feature_map, HedgehogMap):
        z = _project(x, feature_map.w_q if role == "query" else feature_map.w_k)
        return torch.cat([z.log_softmax(-1), (-z).log_softmax(-1)], -1)
    if isinstance(feature_map, OptimalMap):
        return _optimal(feature_map, x, role, scale)
    if isinstance(feature_map, PositiveMap):
        z = _project(x, frequencies(feature_map, x.dtype))
        z = torch.cat([z, -z], -1) if options["hyperbolic"] else z
        half = 0.5 if options["kernel"] == "softmax" else 1.0
        return z - half * squares - 0.5 * math.log(z.shape[-1])
    if isinstance(feature_map, SpectralMap) and options["features"] == "prf":
        z = _project(x, frequencies(feature_map, x.dtype))
        return z - squares - 0.5 * math.log(z.shape[-1])
    return None


def phi(feature_map: FeatureMap, x: Tensor, role: Role, scale: float = 1.0) -> Tensor:
    """Compute ``phi(x)``, (B, H, L, D) -> (B, H, L, M).

        trigonometric   exp(|x|^2 / 2) / sqrt(m) [cos(w_i . x), sin(w_i . x)]           (Performer, Eq. 5)
        rks, rfa        1 / sqrt(M) [cos(w_i . x), sin(w_i . x)], and sqrt(s)           (KL-Transformer, Eq. 3)
        generalized     (f(w_i . x) + eps) / sqrt(m)                                    (Performer, Sec. 2.2)

    and the exponentials of `log_phi`.
    """
    logs = log_phi(feature_map, x, role, scale)
    if logs is not None:
        return logs.exp()
    options = feature_map.options
    if isinstance(feature_map, FormulaMap):
        return feature_map.phi(x, _formula_tensors(feature_map, x), role, **feature_map.formula_settings)
    if isinstance(feature_map, GeneralizedMap):
        z = _project(x, frequencies(feature_map, x.dtype)) if options["projection"] else x
        if options["activation"] == "elu":
            return (F.elu(z) + 1) / math.sqrt(z.shape[-1])
        eps = float(str(options["eps"]))
        return (_ACTIVATIONS[str(options["activation"])](z) + eps) / math.sqrt(z.shape[-1])
    z = _project(x, frequencies(feature_map, x.dtype))
    both = torch.cat([z.cos(), z.sin()], -1) / math.sqrt(z.shape[-1])
    if isinstance(feature_map, TrigonometricMap):
        return both * torch.exp(0.5 * x.square().sum(-1, keepdim=True)) if options["kernel"] == "softmax" else both
    if isinstance(feature_map, SpectralMap):
        smoothing = options["smoothing"]
        smoothing = (2 * feature_map.num_features) ** -0.5 if smoothing == "noise" else float(str(smoothing))
        return torch.cat([both, torch.full_like(both[..., :1], math.sqrt(smoothing))], -1) if smoothing else both
    raise TypeError(f"{type(feature_map).__name__} has no definition by hand.")


def is_signed(feature_map: FeatureMap) -> bool:
    """Return True if features can be negative, so that the denominator has a guard."""
    if isinstance(feature_map, FormulaMap):
        return type(feature_map).log_phi is FormulaMap.log_phi and not feature_map.nonnegative
    if isinstance(feature_map, GeneralizedMap):
        return feature_map.options["activation"] not in _NONNEGATIVE
    positive = PositiveMap | LogLinearMap | OptimalMap | HedgehogMap
    return not isinstance(feature_map, positive) and feature_map.options.get("features") != "prf"


def frequencies(feature_map: FeatureMap, dtype: torch.dtype) -> Tensor:
    """Compute the frequencies w of a map, (heads, M, D), as its paper writes them.

    gmm          w_{c,i} = S_c n_i + mu_c                                           (KL-Transformer, Eq. 5)
    fastfood     V = 1 / (sigma sqrt(d)) S H G P H B                                (KL-Transformer, Eq. 6)
    generative   w_i = g(n_i)                                                       (KL-Transformer, Eq. 8)
    rfa          w_i = sigma * n_i
    """
    if isinstance(feature_map, MixtureMap):
        return _mixture(feature_map, dtype)
    if isinstance(feature_map, FastFoodMap):
        return _fastfood(feature_map, dtype)
    if isinstance(feature_map, GenerativeMap):
        return _generated(feature_map, dtype)
    if isinstance(feature_map, ScaledFourierMap):
        return feature_map.noise.to(dtype) * feature_map.sigma.to(dtype)[:, None]
    assert feature_map.omega is not None
    return feature_map.omega.to(dtype)


def _optimal(feature_map: OptimalMap, x: Tensor, role: Role, scale: float) -> Tensor:
    """Features of OPRF and SDERF, with A as a function of the matrix M."""
    assert feature_map.statistics is not None
    assert feature_map.omega is not None
    squares = x.square().sum(-1, keepdim=True)
    moments, omega = feature_map.statistics.moments.to(x.dtype), feature_map.omega.to(x.dtype)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    constant = 0.5 * math.log(feature_map.num_features)
    if not bool(moments.any()):  # favor+
        return _project(x, omega) - 0.5 * squares - constant
    (q, k), (qq, kk) = ((moments / moments[..., -1:, -1:])[..., :-1, part] for part in (-1, slice(-1)))
    t = torch.diag_embed((kk / qq).diagonal(0, 1, 2) ** 0.25) if feature_map.options["balance"] else eye.expand_as(qq)
    q, k = t @ q.unsqueeze(2), t.inverse() @ k.unsqueeze(2)
    M = scale * (t @ qq @ t + t.inverse() @ kk @ t.inverse() + q @ k.mT + k @ q.mT)
    if not feature_map.options["dense"]:
        M = eye * M.diagonal(0, 1, 2).mean(1)[:, None, None]
    A = (eye - 2 * M - _root((2 * M + eye) @ (2 * M + eye) + 8 * M)) / 16
    y = torch.einsum("bhld,hde->bhle", x, _by_head(t if role == "query" else t.inverse(), x.shape[1]))
    constants = torch.einsum("hmd,hde,hme->hm", omega, A, omega) + 0.25 * torch.logdet(eye - 4 * A).unsqueeze(1)
    z = _project(y, omega @ _root(eye - 4 * A)) + _by_head(constants, x.shape[1]).unsqueeze(1)
    return z - 0.5 * y.square().sum(-1, keepdim=True) - constant


def _root(x: Tensor) -> Tensor:
    """Compute the square root of positive matrices by the iteration of Denman and Beavers."""
    root, inverse = x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    for _ in range(20):
        root, inverse = (root + inverse.inverse()) / 2, (inverse + root.inverse()) / 2
    return root


def _mixture(feature_map: MixtureMap, dtype: torch.dtype) -> Tensor:
    S, mu, noise = (x.to(dtype) for x in (feature_map.S, feature_map.mu, feature_map.noise))
    if S.dim() == 3:
        S = torch.diag_embed(S)
    if feature_map.options["tied"]:
        S, mu = torch.cat([S, S], 1), torch.cat([mu, -mu], 1)
    heads = [
        torch.cat([torch.stack([S[h, c] @ n + mu[h, c] for n in noise[h]]) for c in range(S.shape[1])])
        for h in range(S.shape[0])
    ]
    return torch.stack(heads)


def _fastfood(feature_map: FastFoodMap, dtype: torch.dtype) -> Tensor:
    heads, blocks, dim = feature_map.P.shape
    device = feature_map.P.device
    H, eye = hadamard_matrix(dim).to(device, dtype), torch.eye(dim, dtype=dtype, device=device)
    size = float(str(feature_map.options["sigma"])) * math.sqrt(dim)

    def block(h: int, b: int) -> Tensor:
        S, G, B = (torch.diag(x[h, b].to(dtype)) for x in (feature_map.S, feature_map.G, feature_map.B))
        product: Tensor = S @ H @ G @ eye[feature_map.P[h, b]] @ H @ B / size
        return product

    rows = [torch.cat([block(h, b) for b in range(blocks)]) for h in range(heads)]
    return torch.stack(rows)[:, :, : feature_map.head_dim]


def _generated(feature_map: GenerativeMap, dtype: torch.dtype) -> Tensor:
    net, h = feature_map.generator, feature_map.noise.to(dtype).flatten(0, 1)
    weights = [x.to(dtype) for x in net.weights]
    for weight, gain, shift in zip(weights, net.gains, net.shifts, strict=False):
        h = h @ weight.T
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
        h = h * gain.to(dtype) + shift.to(dtype)
        h = torch.where(h > 0, h, 0.01 * h)
    return torch.tanh(h @ weights[-1].T + net.bias.to(dtype)).view(feature_map.noise.shape)


def hadamard_matrix(dim: int) -> Tensor:
    """The Hadamard matrix (dim, dim) in float64: entries (-1)^(number of ones that i and j share)."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=torch.float64)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Repeat a tensor of each map, (heads of the map, ...), for each query head."""
    return x.repeat_interleave(heads // x.shape[0], 0)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """``w_i . x``, (B, H, L, D) by (heads, M, D) -> (B, H, L, M)."""
    return torch.einsum("bhld,hmd->bhlm", x, _by_head(weight.to(x.dtype), x.shape[1]))


def _formula_tensors(feature_map: FormulaMap, x: Tensor) -> list[Tensor]:
    return [_by_head(t[0], x.shape[1]).unsqueeze(0) for t in feature_map.tensors(x.dtype)]


BLOCK = 32  # proposals from the same residuals
FLOOR = 1e-10  # what is explained up to this, times the squared norm where it is above 1, is explained


def choose(x: Tensor, tokens: Sequence[int], count: int, salt: int | None, logs: Tensor) -> list[int]:
    """Choose the landmarks of one head.

    Proposals with probability in proportion to ``residual e^w`` as it was before them, accepted with probability
    ``residual now / residual then``; the greedy choice takes the largest.

    Args:
        x: (S, D), as the kernel sees it.
        tokens: the real ones.
        count: of landmarks, at most.
        salt: says what is drawn; None for the greedy choice.
        logs: w, (S).
    """
    floor = (FLOOR * x.square().sum(1).clamp_min(1)).tolist()
    chosen: list[int] = []
    number = 0
    while len(chosen) < count:
        before = {i: y for i, y in _residuals(x, tokens, chosen).items() if y > floor[i]}
        if not before:
            break
        if salt is None:
            chosen.append(max(before, key=lambda i: math.log(before[i]) + float(logs[i])))
            continue
        for c in range(BLOCK):
            token = _draw(before, logs, _uniform(salt, 2 * BLOCK * number + c))
            left = _residuals(x, tokens, chosen)[token]
            need = _uniform(salt, 2 * BLOCK * number + BLOCK + c) * before[token]
            if left > max(need, floor[token]) and len(chosen) < count:
                chosen.append(token)
        number += 1
    return chosen


def _uniform(salt: int, number: int) -> float:
    return (splitmix(number + salt) + 0.5) / 2**53


def _draw(residuals: dict[int, float], logs: Tensor, uniform: float) -> int:
    """Return the token at which the cumulative weight first exceeds its share ``uniform`` of the whole."""
    weights = {i: math.log(x) + float(logs[i]) for i, x in residuals.items()}
    shares = {i: math.exp(x - max(weights.values())) for i, x in weights.items()}
    left = uniform * sum(shares.values())
    for token, share in shares.items():
        left -= share
        if left < 0:
            return token
    return max(token for token, share in shares.items() if share > 0)


def _residuals(x: Tensor, tokens: Sequence[int], chosen: list[int]) -> dict[int, float]:
    """``1 - kappa(x_j, Z) kappa(Z, Z)^-1 kappa(Z, x_j)`` of the tokens that are not landmarks, and 0 of those."""
    if not chosen:
        return dict.fromkeys(tokens, 1.0)
    Z, rest = x[chosen], x[list(tokens)]
    cross = gaussian(rest, Z)
    left = 1 - (cross @ ridge_inverse(Z, 0) * cross).sum(1)
    return {i: 0.0 if i in chosen else max(0.0, float(y)) for i, y in zip(tokens, left, strict=True)}


def splitmix(x: int) -> int:
    """Last step of splitmix64, in 64 bits, of which 53 are kept."""
    mask = (1 << 64) - 1
    x = ((x & mask) ^ ((x & mask) >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return (x ^ (x >> 31)) & ((1 << 53) - 1)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """``exp(-|x_i - y_j|^2 / 2)`` by differences: (*, L, D), (*, S, D) -> (*, L, S)."""
    return torch.exp(-0.5 * (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1))


def ridge_inverse(x: Tensor, gamma: float) -> Tensor:
    """``(kappa(x, x) + gamma I)^-1`` of points (n, D)."""
    inverse: Tensor = torch.linalg.inv(gaussian(x, x) + gamma * torch.eye(len(x), dtype=x.dtype, device=x.device))
    return inverse


def nystrom_kernel(
    feature_map: NystromMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """``kappa(Q, Z) (kappa(Z, Z) + gamma I)^-1 kappa(Z, K)``, (B, H, L, S) (Skyformer, Eq. 5 and 6).

    Args:
        feature_map: whose landmarks and gamma are meant.
        query: (B, H, L, D), scaled.
        key: (B, H, S, D), scaled, one for each query head; hidden ones are finite.
        key_mask: (B, S) bool, or None.
        query_mask: (B, L) bool, or None.
    """
    rows = []
    for b, heads in enumerate(landmarks(feature_map, query, key, key_mask, query_mask)):
        for h, Z in enumerate(heads):
            rows.append(gaussian(query[b, h], Z) @ ridge_inverse(Z, feature_map.gamma) @ gaussian(Z, key[b, h]))
    return torch.stack(rows).view(*query.shape[:2], query.shape[2], key.shape[2])


def landmarks(
    feature_map: NystromMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> list[list[Tensor]]:
    """Return the landmarks of every sample and head, (s, D) each; arguments as `nystrom_kernel`."""
    batch, count = query.shape[:2]
    kind, slots = feature_map.landmarks, feature_map.num_landmarks
    if kind == "learned":
        Z = feature_map.Z.to(query.dtype).repeat_interleave(count // feature_map.Z.shape[0], 0)
        return [list(Z)] * batch
    out = []
    for b in range(batch):
        real_q, real_k = (
            x[b] if mask is None else x[b][:, mask[b]] for x, mask in ((query, query_mask), (key, key_mask))
        )
        tokens = [real_q, real_k]
        numbers = [min(slots // 2, query.shape[2]), min(slots - slots // 2, key.shape[2])]
        if kind == "pivoted":
            out.append([_pivoted(feature_map, x) for x in torch.cat(tokens, 1)])
            continue
        if kind == "segments":
            out.append([_segments([x[h] for x in tokens], numbers) for h in range(count)])
            continue
        hashes = [
            [splitmix(i + int(salt)) for i in range(x.shape[1])]
            for x, salt in zip(tokens, feature_map.salt, strict=True)
        ]
        heads = []
        for h in range(count):
            mine = [x[h] for x in tokens]
            orders: Sequence[Sequence[float]] = hashes
            if kind == "leverage":
                orders = _waiting_times(feature_map, mine, hashes, [n - n // 2 for n in numbers])
            heads.append(_smallest(mine, orders, numbers))
        out.append(heads)
    return out


def _waiting_times(
    feature_map: NystromMap, tokens: Sequence[Tensor], hashes: Sequence[Sequence[int]], kept: Sequence[int]
) -> list[list[float]]:
    """Compute ``-log(u) / score``: the smallest are a sample with probabilities in proportion to the scores.

    Scores are what the tokens of the smallest hashes, ``kept`` of queries and of keys, do not explain of a token;
    these tokens themselves are there already, and wait for 0.
    """
    Z = _smallest(tokens, hashes, kept)
    inverse = ridge_inverse(Z, feature_map.gamma)
    times = []
    for x, numbers, salt, count in zip(tokens, hashes, feature_map.salt, kept, strict=True):
        kappa = gaussian(x, Z)
        scores = (1 - (kappa @ inverse * kappa).sum(-1)).clamp_min(feature_map.gamma).tolist()
        last = sorted(numbers)[:count][-1:]
        times.append(
            [
                0.0 if [u] <= last else -math.log((splitmix(u + int(salt)) + 0.5) / 2**53) / r
                for u, r in zip(numbers, scores, strict=True)
            ]
        )
    return times


def _pivoted(feature_map: NystromMap, x: Tensor) -> Tensor:
    """Choose landmarks among the real queries and keys of one head (n, D) by pivoted Cholesky of their kernel."""
    count, salt = min(feature_map.num_landmarks, len(x)), int(feature_map.salt[0])
    return x[choose(x.detach(), range(len(x)), count, salt, torch.zeros_like(x[:, 0]))]


def _segments(tokens: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return torch.cat([segment_means(x, n) for x, n in zip(tokens, numbers, strict=True)])


def segment_means(x: Tensor, count: int) -> Tensor:
    """Means of ``count`` stretches of tokens (n, D), as equal as can be; without those that have no token."""
    which = torch.tensor([i * count // len(x) for i in range(len(x))], device=x.device)
    means = [x[which == i].mean(0) for i in range(count) if bool((which == i).any())]
    return torch.stack(means) if means else x.new_zeros(0, x.shape[-1])


def _smallest(tokens: Sequence[Tensor], orders: Sequence[Sequence[float]], numbers: Sequence[int]) -> Tensor:
    """Select of queries and of keys those with the smallest numbers, (s, D)."""
    parts = []
    for x, order, count in zip(tokens, orders, numbers, strict=True):
        parts.append(x[sorted(range(len(order)), key=lambda i: order[i])[:count]])
    return torch.cat(parts)


def aligned(query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move queries and keys towards each other, sample by sample and head by head.

    q' = t q,  k' = (k - mean k) / t + t mean q          t = (var k / var q)^(1/4), each coordinate by itself
    """
    moved_q, moved_k = [], []
    for b in range(query.shape[0]):
        real_q = query[b] if query_mask is None else query[b][:, query_mask[b]]
        real_k = key[b] if key_mask is None else key[b][:, key_mask[b]]
        if real_q.shape[1] == 0 or real_k.shape[1] == 0:
            moved_q.append(query[b])
            moved_k.append(key[b])
            continue
        var_q, var_k = (x.var(1, correction=0, keepdim=True) for x in (real_q, real_k))
        floor = 1e-2 * (var_q + var_k) + torch.finfo(query.dtype).tiny ** 0.5
        t = ((var_k + floor) / (var_q + floor)) ** 0.25
        moved_q.append(query[b] * t)
        moved_k.append((key[b] - real_k.mean(1, keepdim=True)) / t + t * real_q.mean(1, keepdim=True))
    return torch.stack(moved_q), torch.stack(moved_k)


def wildcat_kernel(
    feature_map: WildcatMap, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """``e^(q . Z) (kappa(Z, Z) + gamma I)^-1 kappa(Z, k) e^((|k|^2 - |Z|^2)/2)`` for centred keys, times
    ``e^(q . centre)``, which makes it that of the keys as they are.

    Args:
        feature_map: whose landmarks are meant.
        query: (B, H, L, D), scaled.
        key: (B, H, S, D), scaled, one for each query head; hidden ones are finite.
        key_mask: (B, S) bool, or None.
        query_mask: (B, L) bool, or None.

    Returns:
        (B, H, L, S).
    """
    rows = []
    for b in range(query.shape[0]):
        real, asked = (
            torch.ones(x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask[b]
            for x, mask in ((key, key_mask), (query, query_mask))
        )
        for h in range(query.shape[1]):
            centre = key[b, h][real].mean(0) if bool(real.any()) else key.new_zeros(key.shape[3])
            rows.append(_head(feature_map, query[b, h], key[b, h] - centre, centre, query[b, h][asked], real))
    return torch.stack(rows).view(*query.shape[:2], query.shape[2], key.shape[2])


def _head(feature_map: WildcatMap, query: Tensor, key: Tensor, centre: Tensor, asked: Tensor, real: Tensor) -> Tensor:
    """One head: queries (L, D), centred keys (S, D), the real queries (n, D), and which keys are real."""
    with torch.no_grad():
        largest = [float(x.norm(dim=-1).max()) if x.numel() else 0.0 for x in (key[real], asked)]
        tau = (3.946 * largest[0] / max(largest[1], 1e-6 / largest[0])) ** 0.5 if largest[0] > 0 else 1.0
    query, scaled = query * tau, key / tau
    tokens = [i for i in range(len(key)) if bool(real[i])]
    salt = int(feature_map.salt) if feature_map.is_random else None
    count = min(feature_map.num_landmarks, len(key))
    Z = scaled[choose(scaled.detach(), tokens, count, salt, scaled.detach().square().sum(1))]
    half_z, half_k = (0.5 * x.square().sum(-1) for x in (Z, scaled))
    mixed = ridge_inverse(Z, 1e-6) @ gaussian(Z, scaled) * torch.exp(half_k - half_z[:, None])
    away = (query / tau) @ centre
    weights: Tensor = torch.exp(query @ Z.T + away.unsqueeze(-1)) @ mixed
    return weights
