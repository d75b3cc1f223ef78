"""Losses of distillation: distances of attention, hidden states and outputs from the original's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec
from kernelformer.hf.attend import bias_table
from kernelformer.modules import AttentionCore, KernelCore, MixedCore

ROWS = 128  # of a text's queries in a step of transfer: more texts teach more than more rows of one
POOLED = 5.0  # weight of the mean output: small beside the errors of single tokens, and what embeddings are made of
TINY = 1e-30
HIDDEN = -1e30  # the logarithm of a weight that is none; an infinity would make 0 * inf of it


def attention_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    *,
    seed: int = 0,
    turn: int = 0,
    window_dropout: float = 0.0,
) -> Tensor:
    """Distance of a core from exact attention at these inputs, a number; see `transfer` for the formula.

    Args:
        core: to be fitted.
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        key_mask: (B, S) bool, True = attend; where queries and keys are equally many, padded queries do not count.
        causal: whether query i sees keys up to i alone.
        scaling: of the product q . k; default 1 / sqrt(D).
        position_bias: (1, H, L, S).
        seed: of the order of rows.
        turn: which rows in that order: the first `ROWS`, the next ones, and so on, round and round.
        window_dropout: share of the rows in which near keys get the map's weights too, so that it learns all of them.
    """
    if isinstance(core, MixedCore):
        which = core.heads[1]
        query, key, value = (core._split(x, 1) for x in (query, key, value))
        bias = None if position_bias is None else position_bias[:, which]
        return attention_loss(
            core.linear,
            query,
            key,
            value,
            key_mask,
            causal,
            scaling,
            bias,
            seed=seed,
            turn=turn,
            window_dropout=window_dropout,
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert isinstance(core, KernelCore)
    groups = query.shape[1] // key.shape[1]
    inputs = (query, key, value)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    L, S = query.shape[2], key.shape[2]
    real = torch.ones(query.shape[0], L, dtype=torch.bool, device=query.device)
    if key_mask is not None and L == S:
        real = key_mask
    whole = not isinstance(core.feature_map.spec, PositiveSpec) or core.feature_map.sees_sequence or not core.normalize
    gen = torch.Generator().manual_seed(seed)
    rows = (torch.arange(L) if whole else _some_rows(L, turn, gen)).to(query.device)
    seen = torch.ones(1, 1, len(rows), S, dtype=torch.bool, device=query.device)
    if causal:
        seen = (torch.arange(S, device=query.device) <= rows.unsqueeze(1))[None, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    with torch.no_grad():
        scores = (query[:, :, rows] @ key.transpose(2, 3)) * scale
        logits = scores if position_bias is None else scores + position_bias[:, :, rows]
        wanted = logits.masked_fill(~seen, -torch.inf).log_softmax(-1)
        share = wanted.exp()
    if whole:
        return _output_loss(core, inputs, share @ value, key_mask, causal, position_bias, real)
    weights, row_logs = _weights(core, query[:, :, rows], key, key_mask)
    extra = None if position_bias is None else position_bias[:, :, rows]
    if core.has_near:
        far = weights.clamp_min(TINY).log() + row_logs
        alone = torch.rand(len(rows), generator=gen).to(query.device) < window_dropout
        assert core.near is not None
        if core.normalize_qk or core.near.scale_of(core.scale) != scale:
            scores = _near_scores(core, query, key, key_mask, rows)
        approximate = _near_and_far(core, scores, key_mask, rows, alone, far, extra).masked_fill(~seen, HIDDEN)
        mass = approximate.logsumexp(-1)
    else:
        weights = weights if extra is None else weights * (extra - extra.amax((2, 3), keepdim=True)).exp()
        weights = weights.masked_fill(~seen, 0)
        approximate, mass = weights.clamp_min(TINY).log(), weights.sum(-1).clamp_min(TINY).log()
    # sum_j p_j (log p_j - log w_j) + log sum_j w_j: each matrix is gone through as few times as can be.
    terms = mass - (share * approximate).sum(-1) + (share * wanted.clamp_min(HIDDEN)).sum(-1)  # (B, H, rows)
    counts = (real[:, None, rows] & seen.any(-1)).expand_as(terms)
    return torch.where(counts, terms, 0).sum() / counts.sum().clamp_min(1)


def _some_rows(length: int, turn: int, generator: torch.Generator) -> Tensor:
    """Numbers of some rows of a matrix, at most `ROWS`, others in each turn."""
    if length <= ROWS:
        return torch.arange(length)
    order = torch.randperm(length, generator=generator)
    return order[(torch.arange(ROWS) + turn * ROWS) % length].sort().values


def _near_scores(core: KernelCore, query: Tensor, key: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
    """Logarithms of the exact weights of some rows, (B, H, rows, S), as the core has them for near keys."""
    assert core.near is not None
    query, key = core._normalize_qk(query, key, key_mask)
    return query[:, :, rows] @ key.transpose(2, 3) * core.near.scale_of(core.scale)


def _near_and_far(
    core: KernelCore,
    scores: Tensor,
    key_mask: Tensor | None,
    rows: Tensor,
    alone: Tensor,
    far: Tensor,
    position_bias: Tensor | None,
) -> Tensor:
    """Logarithms of the weights of some rows, (B, H, rows, S): exact ones of near keys, those of the map elsewhere.

    Args:
        core: with a window or sinks.
        scores: of the near keys, (B, H, rows, S).
        key_mask: (B, S) bool or None.
        rows: which queries.
        alone: (rows) bool, those without near keys.
        far: log phi(q) phi(k), (B, H, rows, S).
        position_bias: (1, H, rows, S) or None.
    """
    places = torch.arange(scores.shape[-1], device=rows.device, dtype=torch.int32)
    near = (places - rows.unsqueeze(1).int()).abs() < (core.window or 0)
    if core.sinks:
        first = places < core.sinks if key_mask is None else key_mask & (key_mask.cumsum(-1) <= core.sinks)
        near = near | (first if key_mask is None else first[:, None, None])
    far = far if core.beta is None else far + core.beta[:, None, None]
    weights = torch.where(near & ~alone.unsqueeze(-1), scores, far)
    return weights if position_bias is None else weights + position_bias


def _weights(core: KernelCore, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights phi(q) phi(k) (B, H, L, S) up to a factor for each row, and its logarithm (B, H, L, 1).

    Keys are (B, H, S, D). What cancels under normalization is left out, unless near keys share it.
    """
    phi, scale = core.feature_map, core.scale
    query, key = core._normalize_qk(query, key, key_mask)
    spec = phi.spread_spec
    assert isinstance(spec, PositiveSpec)
    tensors = phi.for_query_heads(phi.prepare(query, key, key_mask, scale))
    features = spec.log_features if core.has_near else spec.log_shares
    logs_q, logs_k = features(query, tensors, scale, "query"), features(key, tensors, scale, "key")
    visible = logs_k.detach()
    if key_mask is not None:
        visible = visible.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    top_k = visible.amax(2, keepdim=True).clamp_min(-1e30)  # of each feature, as the algorithms do
    logs_q = logs_q + top_k
    top_q = logs_q.detach().amax(3, keepdim=True)
    return (logs_q - top_q).exp() @ (logs_k - top_k).clamp_max(0).exp().transpose(2, 3), top_q


def _output_loss(
    core: AttentionCore,
    inputs: tuple[Tensor, Tensor, Tensor],
    wanted: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    position_bias: Tensor | None,
    real: Tensor,
) -> Tensor:
    table = bias_table(position_bias)
    extra: dict[str, Any] = {} if table is None else {"bias": table}
    if table is not None and isinstance(core, KernelCore) and core.has_near:
        extra["max_distance"] = core.window or 0
    out = core(*inputs, is_causal=causal, key_mask=key_mask, **extra)
    counts = real[:, None, :, None]
    loss: Tensor = ((out - wanted.nan_to_num()).square() * counts).sum() / (
        (wanted.nan_to_num().square() * counts).sum().clamp_min(TINY)
    )
    return loss


def output_loss(outputs: Any, wanted: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Distance of outputs and hidden states from the original's, a number; see `tune` for the formula.

    Args:
        outputs: of the converted model.
        wanted: of the original.
        inputs: of both; their masks (1 = real) say which tokens count.
    """
    mask = inputs.get("attention_mask")
    masks = {"decoder_hidden_states": inputs.get("decoder_attention_mask")}
    total: Tensor | float = 0.0
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if wanted.get(name) is None:
            continue
        layers = list(zip(outputs[name], wanted[name], strict=True))[1:]
        real = masks.get(name, mask)
        total = total + sum((_relative(a, b, real) for a, b in layers), torch.tensor(0.0)) / max(1, len(layers))
    real = masks["decoder_hidden_states"] if wanted.get("decoder_hidden_states") is not None else mask
    name = next((x for x in ("logits", "prediction_logits") if wanted.get(x) is not None), "")
    if name:
        logits = wanted[name]
        kl = nn.functional.kl_div(
            outputs[name].float().log_softmax(-1), logits.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return total + (kl.mean() if real is None or real.shape != kl.shape else (kl * real).sum() / real.sum())
    last = wanted.get("last_hidden_state")
    if last is None:
        return torch.as_tensor(total)  # hidden states alone
    real = real if real is not None and real.shape == last.shape[:2] else None
    ours, theirs = (pooled(x.float(), real) for x in (outputs["last_hidden_state"], last))
    return total + POOLED * (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())


def _relative(hidden: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Squared error over the squared distance from the mean, of real tokens."""
    hidden, wanted = hidden.float(), wanted.float()
    off, size = (hidden - wanted).square().sum(-1), (wanted - wanted.mean()).square().sum(-1)
    if mask is not None and mask.shape == off.shape:
        off, size = off * mask, size * mask
    return off.sum() / size.sum().clamp_min(TINY)


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the hidden states of real tokens, (B, L, d) -> (B, d)."""
    if mask is None:
        return hidden.mean(1)
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)
