"""Near exactly and far by a kernel, by plain operations of torch: `near_far` for `torch.export`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.decomposed import by_token, causal_part, in_dtype, visible_tokens
from kernelformer.attention.decomposed_chunks import CHUNK, Chunking
from kernelformer.attention.engine import Part
from kernelformer.attention.merge import finish, merge
from kernelformer.attention.near import Sinks, near_blocks
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.positive import EMPTY
from kernelformer.contract import compute_dtype, lookup


def near_far(call: NearFarCall) -> tuple[Tensor, list[Tensor]]:
    """Attend to a whole sequence; see `near_far.near_far_attention`.

    Without a bias, dropout and sums of other keys: a graph starts its sequence.

    Cost: O(L (w + C) (D + E) + L M (D + E)) time and O(L (w + C + M)) memory.
    """
    query = in_dtype(call.query, compute_dtype(call.query.dtype))
    key, value = visible_tokens(call.key, call.value, call.key_mask)
    cut = Chunking(query)
    part, state = near_part(call, query, key, value, cut), list[Tensor]()
    if call.spec:
        sides, state = _far_parts(call, query, key, value, cut)
        for far in sides:
            part = merge(part, far)
    return in_dtype(finish(part)[0], call.query.dtype), state


def near_part(call: NearFarCall, query: Tensor, key: Tensor, value: Tensor, cut: Chunking) -> Part:
    """Exact softmax on the keys within the window and the sinks, rows (B, H, L, ...); see `near`."""
    groups = key.shape[1]
    rows = cut.by_chunk((query * call.scale).unflatten(1, (groups, -1)))  # (B, G, n, R C, D)
    repeats, count = query.shape[1] // groups, cut.count
    scores, values = list[Tensor](), list[Tensor]()
    if call.window:
        left, right = near_blocks(call.window, CHUNK, call.is_causal)
        k, v = (_blocks(cut.chunks(x), left, right, count) for x in (key, value))
        real = key.new_ones(key.shape[0], cut.length, dtype=torch.bool) if call.key_mask is None else call.key_mask
        real = _blocks(cut.chunks(by_token(real), False), left, right, count).transpose(3, 4)  # (B, 1, n, 1, W)
        seen = real & _band(call, left, right, query.device).repeat(repeats, 1)
        scores.append((rows @ k.transpose(3, 4)).masked_fill(~seen, EMPTY))
        values.append(v)
    if call.sinks:
        sinks = Sinks(*call.sinks)
        seen = _sees_sinks(call, sinks, count).repeat(1, 1, 1, repeats, 1)
        sink_key, sink_value = (in_dtype(x, query.dtype).unsqueeze(2) for x in sinks[:2])
        scores.append((rows @ sink_key.transpose(3, 4)).masked_fill(~seen, EMPTY))
        values.append(sink_value)
    logits = torch.cat(scores, 4)
    shares = logits.softmax(4).split([x.shape[4] for x in scores], 4)
    out = shares[0] @ values[0]
    for share, x in zip(shares[1:], values[1:], strict=True):
        out = out + share @ x
    log = logits.logsumexp(4, keepdim=True)
    log = log.masked_fill(log < EMPTY / 2, EMPTY)
    return cut.rows_by_head(Part(out, log.squeeze(4)))


def _blocks(chunks: Tensor, left: int, right: int, count: int) -> Tensor:
    """Each chunk with those around it, (B, G, n, C, X) -> (B, G, n, (left + 1 + right) C, X)."""
    padded = F.pad(chunks, (0, 0, 0, 0, left, right))
    return torch.cat([padded.narrow(2, i, count) for i in range(left + 1 + right)], 3)


def _band(call: NearFarCall, left: int, right: int, device: torch.device) -> Tensor:
    """(C, (left + 1 + right) C) bool, whether a key is within the window of a query."""
    i = torch.arange(CHUNK, device=device).unsqueeze(1) + left * CHUNK
    distance = torch.arange((left + 1 + right) * CHUNK, device=device) - i
    near = distance.abs() < call.window
    return near & (distance <= 0) if call.is_causal else near


def _sees_sinks(call: NearFarCall, sinks: Sinks, count: int) -> Tensor:
    """(B, 1, n, C, s) bool, whether a query sees a sink beyond its window."""
    i = torch.arange(count * CHUNK, device=sinks.position.device).view(1, 1, count, CHUNK, 1)
    distance = i - _by_row(sinks.position)
    beyond = distance >= call.window if call.is_causal else distance.abs() >= call.window
    return beyond & _by_row(sinks.visible)


def _by_row(x: Tensor) -> Tensor:
    """A number or mark per sink, (B, s) -> (B, 1, 1, 1, s)."""
    return x.unsqueeze(1).unsqueeze(1).unsqueeze(1)


def _far_parts(
    call: NearFarCall, query: Tensor, key: Tensor, value: Tensor, cut: Chunking
) -> tuple[list[Part], list[Tensor]]:
    """Sums of the keys beyond the window on each side, and the state after those on the left.

    A causal call with delayed keys; with its mirror image, where keys after the query count, as more samples of it.
    """
    real = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool) if call.far_mask is None else call.far_mask
    tokens = _delayed(key, value, real, call.window)
    if not call.is_causal:
        mirrored = _delayed(key.flip(2), value.flip(2), real.flip(1), max(call.window, 1))
        tokens = [torch.cat(pair, 0) for pair in zip(tokens, mirrored, strict=True)]
        query = torch.cat([query, query.flip(2)], 0)
    part, state = causal_part(
        lookup(call.spec), call.tensors, query, *tokens, scale=call.far_scale, normalize=False, cut=cut
    )
    if call.beta is not None:
        part = part._replace(log=part.log + in_dtype(call.beta, part.log.dtype).view(1, -1, 1))
    if call.is_causal:
        return [part], state
    count = key.shape[0]
    left = Part(*(None if x is None else x.narrow(0, 0, count) for x in part))  # type: ignore[arg-type]
    right = Part(*(None if x is None else x.narrow(0, count, count).flip(2) for x in part))  # type: ignore[arg-type]
    return [left, right], state


def _delayed(key: Tensor, value: Tensor, real: Tensor, delay: int) -> list[Tensor]:
    """Keys, values and which of them are hidden, all of them so many tokens later; hidden ones are 0."""
    length = key.shape[2]
    pair = (x.masked_fill(by_token(~real), 0) for x in (key, value))
    key, value = (F.pad(x, (0, 0, delay, 0)).narrow(2, 0, length) for x in pair)
    return [key, value, ~F.pad(real, (delay, 0)).narrow(1, 0, length)]
