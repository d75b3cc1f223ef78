"""What distillation makes small: how far attention, hidden states and outputs are from the original's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec
from kernelformer.hf.attend import bias_table
from kernelformer.modules import AttentionCore, KernelCore, MixedCore

ROWS = 128  # of a text's queries that a step of transfer looks at: more texts teach more than more rows of one
POOLED = 5.0  # weight of the mean output: small beside the errors of single tokens, and what embeddings are made of
TINY = 1e-30


def attention_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    *,
    seed: int = 0,
) -> Tensor:
    """How far a core is from exact attention at these inputs, see `transfer`.

    Args:
        core: to be fitted.
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        mask: bool, True = attend, broadcast to (B, 1, L, S); None: all.
        scaling: of the product q . k; default 1 / sqrt(D).
        position_bias: (1, H, L, S).
        seed: of the rows that are looked at.
    """
    if isinstance(core, MixedCore):
        which = core.heads[1]
        query, key, value = (core._split(x, 1) for x in (query, key, value))
        bias = None if position_bias is None else position_bias[:, which]
        return attention_loss(core.linear, query, key, value, mask, scaling, bias, seed=seed)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert isinstance(core, KernelCore)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if not isinstance(core.feature_map.spec, PositiveSpec) or core.feature_map.sees_sequence or not core.normalize:
        return _output_loss(core, query, key, value, mask, scale, position_bias)
    L = query.shape[2]
    order = torch.randperm(L, generator=torch.Generator().manual_seed(seed)) if L > ROWS else torch.arange(L)
    rows = order[:ROWS].sort().values.to(query.device)
    query = query[:, :, rows]
    seen = None if mask is None else (mask[:, :, rows] if mask.shape[2] > 1 else mask)
    extra = None if position_bias is None else position_bias[:, :, rows]
    with torch.no_grad():
        wanted = (query @ key.transpose(2, 3)) * scale
        wanted = wanted if extra is None else wanted + extra
        wanted = (wanted if seen is None else wanted.masked_fill(~seen, -torch.inf)).log_softmax(-1)
    weights = _weights(core, query, key)
    if extra is not None:
        weights = weights * (extra - extra.amax((2, 3), keepdim=True)).exp()
    weights = weights if seen is None else weights.masked_fill(~seen, 0)
    found = weights.clamp_min(TINY).log() - weights.sum(-1, keepdim=True).clamp_min(TINY).log()
    share = wanted.exp()
    terms = torch.where(share > 0, share * (wanted - found), 0).sum(-1)  # (B, H, rows)
    if seen is None:
        return terms.mean()
    # A padded query is nobody's: where queries and keys are the same tokens, the mask knows which are real.
    real = torch.isfinite(wanted).any(-1)
    if mask is not None and mask.shape[2] == 1 and mask.shape[3] == L:
        real = real & mask[:, :, 0, rows]
    return torch.where(real, terms, 0).sum() / real.sum().clamp_min(1)


def _weights(core: KernelCore, query: Tensor, key: Tensor) -> Tensor:
    """phi(q) phi(k) (B, H, L, S) up to a factor for each row."""
    phi, scale = core.feature_map, core.scale
    query, key = core._units(query, key, None)
    spec = phi.spec
    assert isinstance(spec, PositiveSpec)
    tensors = phi.prepare(query, key, None, scale)
    logs_q, logs_k = spec.log_shares(query, tensors, scale, "query"), spec.log_shares(key, tensors, scale, "key")
    top_k = logs_k.detach().amax(2, keepdim=True)  # of each feature, as the algorithms do
    logs_q = logs_q + top_k
    top_q = logs_q.detach().amax(3, keepdim=True)
    return (logs_q - top_q).exp() @ (logs_k - top_k).exp().transpose(2, 3)


def _output_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    position_bias: Tensor | None,
) -> Tensor:
    with torch.no_grad():
        added = position_bias
        if mask is not None:
            added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            added = added if position_bias is None else added + position_bias
        wanted = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
    key_mask, causal = None, False
    if mask is not None:
        causal = mask.shape[2] > 1
        key_mask = mask[:, 0, -1] if causal else mask[:, 0, 0]
        key_mask = key_mask.expand(query.shape[0], -1)
    table = bias_table(position_bias)
    found = core(query, key, value, is_causal=causal, key_mask=key_mask, **({} if table is None else {"bias": table}))
    off, size = (found - wanted).square(), wanted.square()
    if key_mask is not None and key_mask.shape[1] == query.shape[2]:
        real = key_mask[:, None, :, None]
        off, size = off * real, size * real
    loss: Tensor = off.sum() / size.sum().clamp_min(TINY)
    return loss


def output_loss(found: Any, wanted: Any, mask: Tensor | None) -> Tensor:
    """See `tune`; ``found`` and ``wanted`` are outputs of a model with its hidden states, mask (B, L) 1 = real."""
    total: Tensor | float = 0.0
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if wanted.get(name) is None:
            continue
        layers = list(zip(found[name], wanted[name], strict=True))[1:]
        real = mask if name != "decoder_hidden_states" else None
        total = total + sum((_relative(a, b, real) for a, b in layers), torch.tensor(0.0)) / max(1, len(layers))
    logits = wanted.get("logits")
    if logits is not None:
        real = mask if mask is not None and mask.shape[:2] == logits.shape[:2] else None
        kl = nn.functional.kl_div(
            found["logits"].float().log_softmax(-1), logits.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return total + (kl.mean() if real is None else (kl * real).sum() / real.sum())
    last = wanted["last_hidden_state"]
    real = mask if mask is not None and mask.shape[:2] == last.shape[:2] else None
    ours, theirs = (pooled(x.float(), real) for x in (found["last_hidden_state"], last))
    return total + POOLED * (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())


def _relative(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    found, wanted = found.float(), wanted.float()
    off, size = (found - wanted).square().sum(-1), (wanted - wanted.mean()).square().sum(-1)
    if mask is not None and mask.shape == off.shape:
        off, size = off * mask, size * mask
    return off.sum() / size.sum().clamp_min(TINY)


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens, (B, L, d) -> (B, d)."""
    if mask is None:
        return hidden.mean(1)
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)
