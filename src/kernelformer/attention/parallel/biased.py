"""Positive maps under a relative bias that is constant beyond a distance, all chunks at once.

    out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)      (NPRF with RPE, Eq. 10)

A chunk of queries meets the keys of its own chunk and of those around it that the window reaches one by one, and all
others by their sums, times the factor of the tail. Bidirectional rows see every key, so that one largest log feature
serves all of them, and sums are plain ones. Causal rows are those of `positive`, whose small products take the factors
``exp(b_{j-i} - max b)``.

Denominators are at least ``exp(min b - max b)``, so that entries of the table may differ by `SPREAD`, and none may be
-inf: such a bias, which can hide the largest key of a row, needs `windowed`, which computes rows again.

Memory beyond inputs and outputs, in numbers of mapped queries, U = B H L M: that of `attend`, and in a causal call
2 w / 64 U more for the chunks before a query's own. Samples go one after the other where all of them exceed `SEGMENT`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.parallel.attend import has_numbers
from kernelformer.attention.parallel.layout import CHUNK, in_chunks, of_samples, recomputed, spans
from kernelformer.attention.parallel.positive import PositiveMap
from kernelformer.attention.parallel.rows import CausalRows
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.contract import PositiveSpec, compute_dtype, lookup

SPREAD = 60.0  # of a table: exp(-60) times a key that float32 can hold is a number
LEAST = 1e-30  # between the denominator of a row that sees a key and 0


class Factors:
    """``exp(b_{j-i} - max b)`` of places i and j.

    Args:
        call: whose bias it is.
    """

    def __init__(self, call: RelativeCall) -> None:
        assert call.window is not None
        self.batch, self.middle = call.query.shape[0], call.layout.L - 1 + call.layout.offset
        table = call.bias.to(compute_dtype(call.query.dtype))
        last = table.shape[1] - 1
        ends = [min(max(self.middle + side * call.window, 0), last) for side in (-1, 1)]
        ends[1] = self.middle if call.is_causal else ends[1]
        self.first, used = ends[0], table[:, ends[0] : ends[1] + 1]  # (H, n): all that any pair has
        self.factors = (used - used.detach().amax(1, keepdim=True)).exp()

    def tile(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """(H, a, b) for queries and keys at these places."""
        device, last = self.factors.device, self.factors.shape[1] - 1
        distance = torch.arange(*columns, device=device) - torch.arange(*rows, device=device).unsqueeze(1)
        index = (distance + (self.middle - self.first)).clamp_(0, last)
        return self.factors.index_select(1, index.flatten()).view(-1, *index.shape)

    def weigh(self, scores: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Scores (B H X, a, b) times the factors of their places, which are those of all X."""
        tile = self.tile(rows, columns)
        heads = len(tile)
        by_head = scores.view(self.batch, heads, len(scores) // (self.batch * heads), *tile.shape[1:])
        return (by_head * tile.unsqueeze(1)).view(scores.shape)

    def tail(self, side: int) -> Tensor:
        """The factor of far keys before (-1) or after (1) a query, (B H, 1, 1, 1)."""
        return self.factors[:, 0 if side < 0 else -1].repeat(self.batch)[:, None, None, None]


def parallel_biased_attention(call: RelativeCall) -> Tensor:
    """Attend; the call is a whole sequence with a window, and has no slope.

    Returns:
        (B, H, L, E) in the dtype of the query, zero where no key is visible.
    """
    if not has_numbers(call.query, call.key, call.value):
        return relative_attention(call)[0]
    batch, heads, length, width = call.query.shape
    numbers = heads * max(length, call.key.shape[2]) * lookup(call.spec).feature_dim(call.tensors, width)
    learned = [call.query, call.key, call.value, call.bias, *call.tensors]
    outs = [recomputed(partial(_attend, _samples(call, *span)), learned=learned) for span in spans(batch, numbers, 1)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _samples(call: RelativeCall, first: int, last: int) -> RelativeCall:
    """Some samples of a call."""
    query, key, value = (x[first:last] for x in (call.query, call.key, call.value))
    mask = None if call.key_mask is None else call.key_mask[first:last]
    tensors = of_samples(call.tensors, slice(first, last))
    return replace(call, query=query, key=key, value=value, key_mask=mask, tensors=tensors)


def _attend(call: RelativeCall) -> Tensor:
    spec, window = lookup(call.spec), call.window
    assert isinstance(spec, PositiveSpec)
    assert window is not None
    phi, (query, key), value = PositiveMap(spec, call.tensors, call.scale, True), call.normalized(), call.value
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, :, None]
    if call.is_causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        hidden = None if hidden is None else hidden[:, :, : query.shape[2]]
    logs = phi.queries(query, query.shape[1]).squeeze(2)  # (N, L, M)
    keys = phi.keys(key, value, hidden)
    left = -(-max(0, window - 1) // CHUNK)  # chunks so far away have the tail's bias for all pairs
    sums = (_causal if call.is_causal else _bidirectional)(logs, keys, Factors(call), left)
    out = sums[..., :-1] / sums[..., -1:].clamp_min(LEAST)
    return out.view(*query.shape[:2], *out.shape[1:])[:, :, : query.shape[2]].to(call.query.dtype)


def _bidirectional(logs: Tensor, keys: tuple[Tensor, Tensor], factors: Factors, left: int) -> Tensor:
    """Sums (N, n C, E + 1) of rows that see all keys."""
    top = keys[0].detach().amax(1, keepdim=True).clamp_min(EMPTY)
    logs = logs + top
    rows = in_chunks((logs - logs.detach().amax(2, keepdim=True).clamp_min(EMPTY / 2)).exp_(), CHUNK)
    mapped, value = in_chunks((keys[0] - top).exp_(), CHUNK), in_chunks(keys[1], CHUNK)
    chunks, count = rows.shape[1], mapped.shape[1]
    sums = mapped.mT @ value
    before, after = F.pad(sums.cumsum(1), (0, 0, 0, 0, 1, 0)), F.pad(sums.flip(1).cumsum(1).flip(1), (0, 0, 0, 0, 0, 1))
    places = torch.arange(chunks, device=rows.device)
    far = before.index_select(1, (places - left).clamp_(0, count)) * factors.tail(-1)
    far = torch.addcmul(far, after.index_select(1, (places + left + 1).clamp_(0, count)), factors.tail(1))
    out = rows @ far
    reach, size = left * CHUNK, (2 * left + 1) * CHUNK
    ends = (0, 0, reach, max(0, chunks - count + left) * CHUNK)  # zeros: keys that add nothing
    near, near_value = (F.pad(x.flatten(1, 2), ends).unfold(1, size, CHUNK)[:, :chunks] for x in (mapped, value))
    scores = torch.bmm(rows.flatten(0, 1), near.flatten(0, 1))
    scores = factors.weigh(scores, (reach, reach + CHUNK), (0, size))
    return torch.baddbmm(out.flatten(0, 1), scores, near_value.flatten(0, 1).mT).view(len(rows), chunks * CHUNK, -1)


def _causal(logs: Tensor, keys: tuple[Tensor, Tensor], factors: Factors, left: int) -> Tensor:
    """Sums (N, L, E + 1) of rows that see the keys up to their own."""
    missing = logs.shape[1] - keys[0].shape[1]  # queries beyond the last key
    if missing:
        keys = F.pad(keys[0], (0, 0, 0, missing), value=-torch.inf), F.pad(keys[1], (0, 0, 0, missing))
    rows = CausalRows(logs.unsqueeze(2), keys, None, CHUNK)
    queries, chunks = rows.relative(), rows.chunks
    out = (rows.read(queries, rows.running(), lag=left) * factors.tail(-1)).flatten(0, 1)
    if left:
        size, edge = left * CHUNK, rows.edges[:, :chunks].unsqueeze(2)
        near, value = (
            F.pad(x[:, :-1].flatten(1, 2), (0, 0, size, 0), value=fill).unfold(1, size, CHUNK)
            for x, fill in ((rows.keys, -torch.inf), (rows.value, 0.0))
        )
        mapped = (near - edge.mT).exp_().flatten(0, 1)
        scores = torch.bmm((queries.squeeze(3) + edge).exp_().flatten(0, 1), mapped)
        scores = factors.weigh(scores, (size, size + CHUNK), (0, size))
        out = torch.baddbmm(out, scores, value.flatten(0, 1).mT)
    return rows.by_token(rows.inside(out, queries, factors.weigh)).squeeze(2)
