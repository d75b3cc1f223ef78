"""Exact softmax on the keys near a query and on the sinks, all blocks of queries at once.

    near(i) = { j : |i - j| < w } and the sinks          s_ij = scale q_i . k_j + b_(j-i)

A block of C queries meets the keys that the windows of its queries reach, C + 2 (w - 1) of them or, if causal, half as
many beyond its own, in whole blocks. The windows of all blocks are one strided view of the keys.

Memory: a number per query and key of a block's window, L (w + C) of them for a causal call, twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.near import NearBias, Sinks, near_blocks
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.parallel.layout import RowSums, in_chunks, with_ones
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import compute_dtype


def near_block(window: int) -> int:
    """Queries of a block: so many that windows overlap little, and that the rows of a block share most of theirs."""
    return 64 * max(1, -(-window // 128))


def near_numbers(call: NearFarCall) -> int:
    """Scores of a query."""
    size = near_block(call.window)
    left, right = near_blocks(call.window, size, call.is_causal)
    return size * (left + 1 + right)


def tokens_between(x: Tensor, low: int, high: int) -> Tensor:
    """Tokens low to high of (B, G, S, X), which may lie outside of the sequence: zeros there."""
    first, last = min(max(low, 0), x.shape[2]), max(0, min(high, x.shape[2]))
    last = max(first, last)
    inside = x[:, :, first:last]
    before = min(max(0, -low), high - low) if low < 0 else 0
    after = high - low - before - (last - first)
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def hidden_between(mask: Tensor | None, key: Tensor, low: int, high: int) -> Tensor | None:
    """Which tokens low to high do not count, (B or 1, 1, n, 1) bool: hidden by the mask (B, S), or not there."""
    if mask is None:
        if low >= 0 and high <= key.shape[2]:
            return None
        mask = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device)
    return ~tokens_between(mask[:, None, :, None], low, high)


def query_rows(query: Tensor, groups: int) -> Tensor:
    """(B, H, L, D) -> (N, L, R, D) in the dtype of the arithmetic."""
    batch, heads, length, width = query.shape
    rows = query.to(compute_dtype(query.dtype)).reshape(batch * groups, heads // groups, length, width)
    return rows.transpose(1, 2)


def near_part(call: NearFarCall, start: int, end: int) -> RowSums:
    """What queries from ``start`` to ``end`` get from near keys and sinks; -inf, or less than EMPTY / 2, hides."""
    groups, size = call.key.shape[1], near_block(call.window)
    queries = in_chunks(query_rows(call.query[:, :, start:end], groups) * call.scale, size)  # (N, n, C, R, D)
    rows, chunks, _, repeats, _ = queries.shape
    flat, logits, values = queries.flatten(2, 3), [], []
    if call.window:
        left, right = near_blocks(call.window, size, call.is_causal)
        low = start + call.offset - left * size
        high, width = low + (left + chunks + right) * size, (left + 1 + right) * size
        hidden = hidden_between(call.key_mask, call.key, low, high)
        key, value = (_rows(x, hidden, low, high) for x in (call.key, call.value))
        scores = (flat @ key.unfold(1, width, size)).view(rows, chunks, size, repeats, width)
        scores = scores + _band(call, size, left, width).to(scores.dtype)
        if hidden is not None:
            gone = hidden.flatten(1).unfold(1, width, size)[:, None, :, None, None]  # (B, 1, n, 1, 1, K)
            scores = scores.unflatten(0, (-1, groups)).masked_fill(gone, -torch.inf).flatten(0, 1)
        logits.append(scores)
        values.append(with_ones(value).unfold(1, width, size).mT)
    if call.sinks:
        sinks = _sinks(call)
        key, value = (x.to(flat.dtype).flatten(0, 1).unsqueeze(1) for x in sinks[:2])
        scores = (flat @ key.mT).unflatten(2, (size, repeats)).unflatten(0, (-1, groups))
        logits.append((scores + _sink_bias(call, sinks, start, chunks * size, chunks)).flatten(0, 1))
        values.append(with_ones(value))
    both = logits[0] if len(logits) == 1 else torch.cat(logits, -1)
    log = both.detach().amax(-1).clamp_min(EMPTY / 2)
    weights = (both - log.unsqueeze(-1)).exp_().flatten(2, 3).split([x.shape[-1] for x in logits], -1)
    sums = weights[0] @ values[0]
    for share, value in zip(weights[1:], values[1:], strict=True):
        sums = sums + share @ value
    length = end - start
    sums = sums.view(rows, chunks * size, repeats, sums.shape[-1])[:, :length]
    return RowSums(log.flatten(1, 2)[:, :length], sums)


def _rows(x: Tensor, hidden: Tensor | None, low: int, high: int) -> Tensor:
    """Keys or values (N, n, X); what is hidden may hold anything, NaN too."""
    x = tokens_between(x, low, high).to(compute_dtype(x.dtype))
    return (x if hidden is None else x.masked_fill(hidden, 0)).flatten(0, 1)


def _band(call: NearFarCall, size: int, left: int, width: int) -> Tensor:
    """What is added to the scores of every block: 0 or the bias, -inf outside of the window; (N or 1, 1, C, R, K)."""
    device, window = call.query.device, call.window
    places = torch.arange(width, device=device) - left * size
    distance = places - torch.arange(size, device=device).unsqueeze(1)
    outside = distance.abs() >= window
    if call.is_causal:
        outside = outside | (distance > 0)
    if not call.bias:
        zeros = torch.zeros(size, 1, width, dtype=compute_dtype(call.query.dtype), device=device)
        return zeros.masked_fill_(outside.unsqueeze(1), -torch.inf)
    table = NearBias(*call.bias).band
    index = (distance + window - 1).clamp_(0, 2 * window - 2)
    band = table.index_select(1, index.flatten()).view(-1, size, width).masked_fill(outside, -torch.inf)
    band = band.unflatten(0, (call.key.shape[1], -1)).transpose(1, 2)  # (G, C, R, K)
    return band.repeat(call.query.shape[0], 1, 1, 1).unsqueeze(1)


def _sinks(call: NearFarCall) -> Sinks:
    """The sinks; those that are keys of the call are picked again, so that they have gradients."""
    sinks = Sinks(*call.sinks)
    if not call.own_sinks:
        return sinks
    gone = ~sinks.visible[:, None, :, None]
    index = sinks.position.masked_fill(~sinks.visible, 0)[:, None, :, None]
    key, value = (
        x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).masked_fill(gone, 0) for x in (call.key, call.value)
    )
    return sinks._replace(key=key, value=value)


def _sink_bias(call: NearFarCall, sinks: Sinks, start: int, length: int, chunks: int) -> Tensor:
    """What is added to the scores of sinks, (B, G or 1, n, C, R or 1, s): -inf in the window and where hidden."""
    query = torch.arange(start, start + length, device=call.query.device) + call.offset
    distance = sinks.position.unsqueeze(1) - query.view(1, -1, 1)  # (B, n C, s)
    hidden = (distance.abs() < call.window) | ~sinks.visible.unsqueeze(1)
    if call.is_causal:
        hidden = hidden | (distance > 0)
    hidden = hidden.unflatten(1, (chunks, -1))[:, None, :, :, None]
    dtype = compute_dtype(call.query.dtype)
    if not call.bias:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    tails = NearBias(*call.bias).tails.to(dtype).view(2, 1, call.key.shape[1], 1, 1, -1, 1)  # (2, 1, G, 1, 1, R, 1)
    before = (distance <= 0).unflatten(1, (chunks, -1))[:, None, :, :, None]
    return torch.where(before, tails[0], tails[1]).masked_fill(hidden, -torch.inf)
