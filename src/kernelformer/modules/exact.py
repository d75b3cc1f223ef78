"""Exact attention by the same interface, so that a comparison is one loop; quadratic in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import gaussian_attention
from kernelformer.attention.state import MadeBy
from kernelformer.contract import compute_dtype, no_autocast
from kernelformer.errors import flag
from kernelformer.kernels import gaussian_kernel
from kernelformer.modules.bias import biased_sdpa, empty_attention
from kernelformer.modules.call import Call
from kernelformer.modules.growing import GrowingCore


class SoftmaxCore(GrowingCore):
    """Exact softmax attention, by torch's `scaled_dot_product_attention`.

    out_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j)          (Performer, Eq. 1)
    """

    takes_bias = True

    def _exact(self, call: Call) -> Tensor:
        if call.bias is None:
            return sdpa(call)
        if call.bias.algorithm is not None:
            raise ValueError(
                f"algorithms are for methods with a feature map, got algorithm={call.bias.algorithm!r} for "
                f"{self.method!r}; leave it out."
            )
        repeat = call.query.shape[1] // call.key.shape[1]
        key, value = (x.repeat_interleave(repeat, 1) for x in (call.key, call.value))
        with no_autocast(call.query.device.type):
            return biased_sdpa(replace(call, key=key, value=value))


class GaussianCore(GrowingCore):
    """Exact Gaussian attention.

        out_i = sum_j exp(-scale |q_i - k_j|^2 / 2) v_j          (Skyformer, Eq. 3)

    Args:
        normalize: divide by the sum of the weights; the paper does not.

    The others are those of `GrowingCore`.
    """

    def __init__(self, method: str, *, normalize: bool = False, attention_dropout: float = 0.0, **options: Any) -> None:
        super().__init__(method, attention_dropout=attention_dropout, **options)
        self.normalize = flag("normalize", normalize)

    def _exact(self, call: Call) -> Tensor:
        with no_autocast(call.query.device.type):
            if self.normalize:
                return self._by_softmax(call)
            if not call.past:
                return self._sums(call, slice(None), call.is_causal)
            # Without a division the past and the present just add up; outputs are in the dtype of the queries.
            past, new = slice(0, call.past), slice(call.past, None)
            call = replace(call, query=call.query.to(compute_dtype(call.query.dtype)))
            return self._sums(call, past, False) + self._sums(call, new, call.is_causal)

    @staticmethod
    def _sums(call: Call, keys: slice, is_causal: bool) -> Tensor:
        """Attend to some of the keys, without a division."""
        key, value = call.key[:, :, keys], call.value[:, :, keys]
        key_mask = None if call.key_mask is None else call.key_mask[:, keys]
        if call.dropout or torch.compiler.is_exporting():
            return _dropped_sums(replace(call, key=key, value=value, key_mask=key_mask, is_causal=is_causal))
        return gaussian_attention(call.query, key, value, scale=call.scale, key_mask=key_mask, is_causal=is_causal)

    def _made_by(self, scale: float) -> MadeBy:
        return (*super()._made_by(scale), ("normalize", self.normalize))

    @staticmethod
    def _by_softmax(call: Call) -> Tensor:
        """Attend by softmax with one more coordinate: -|q - k|^2 / 2 is q.k - |k|^2 / 2 up to what all keys share."""
        dtype, width = call.query.dtype, call.value.shape[-1]
        # The coordinate is a sum of squares, so it takes the precision of sums.
        query, key, value = (x.to(compute_dtype(dtype)) for x in (call.query, call.key, call.value))
        if call.key_mask is not None:
            key = key.masked_fill(~call.key_mask[:, None, :, None], 0)
        key = torch.cat([key, -0.5 * key.square().sum(-1, keepdim=True)], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        # torch's tiled kernel wants one width; without it the whole matrix would be made.
        both = max(key.shape[-1], width)
        query, key, value = (F.pad(x, (0, both - x.shape[-1])) for x in (query, key, value))
        return sdpa(replace(call, query=query, key=key, value=value))[..., :width].to(dtype)


def _dropped_sums(call: Call) -> Tensor:
    """Gaussian attention by its whole matrix of weights, some of which may be dropped."""
    query, key_mask = call.query, call.key_mask
    repeat = query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (call.key, call.value))
    visible = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril() if call.is_causal else visible
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        visible = visible & key_mask[:, None, None, :]
    dtype = compute_dtype(query.dtype)
    weights = gaussian_kernel(*(call.scale**0.5 * x.to(dtype) for x in (query, key))).masked_fill(~visible, 0)
    return (F.dropout(weights, call.dropout) @ value.to(dtype)).to(query.dtype)


TILE = 512


def sdpa(call: Call) -> Tensor:
    """torch's attention with masks: rows that see nothing are zero, and no mask of L x S is made."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    key_mask, length = call.key_mask, call.query.shape[2]
    if key.shape[2] == 0:
        return empty_attention(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    if torch.compiler.is_exporting():
        return _traced_sdpa(call, grouped)
    is_causal = call.is_causal and call.past + 1 < key.shape[2]  # else the first query sees every key
    if key_mask is None and not (is_causal and call.past):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=call.dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)

    def rows(query: Tensor, keys: int, mask: Tensor) -> Tensor:
        # A row that sees nothing attends to everything and is zeroed after: no kernel of torch promises zeros there.
        seen = mask.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(
            query,
            key[:, :, :keys],
            value[:, :, :keys],
            attn_mask=mask | ~seen,
            dropout_p=call.dropout,
            scale=scale,
            enable_gqa=grouped,
        )
        return out.masked_fill(~seen, 0)

    if key_mask is not None and (not is_causal or length == 0):
        return rows(query, key.shape[2], key_mask[:, None, None, :])
    # In tiles of queries, each with the keys up to its end: no mask of L x S, and nothing from the future to multiply
    # by 0.
    parts = []
    for start in range(0, length, TILE):
        tile = query[:, :, start : start + TILE]
        first, last = call.past + start, call.past + start + tile.shape[2]
        keys = min(key.shape[2], last)
        mask = torch.arange(keys, device=query.device) <= torch.arange(first, last, device=query.device).unsqueeze(1)
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, :keys]
        parts.append(rows(tile, keys, mask))
    return torch.cat(parts, 2)


def _traced_sdpa(call: Call, grouped: bool) -> Tensor:
    """The same for a graph of any length, which has no loop over tiles: with a mask of L x S where there is one."""
    query, key, value, key_mask = call.query, call.key, call.value, call.key_mask
    common: dict[str, Any] = {"scale": call.scale, "enable_gqa": grouped}
    if key_mask is None and not (call.is_causal and call.past):
        return F.scaled_dot_product_attention(query, key, value, is_causal=call.is_causal, **common)
    length, seen = key.shape[2], None if key_mask is None else key_mask[:, None, None, :]
    if call.is_causal and query.shape[2] != 1:
        last = torch.arange(length - query.shape[2], length, device=query.device).unsqueeze(1)
        past = torch.arange(length, device=query.device) <= last
        seen = past if seen is None else seen & past
    if seen is None or key_mask is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **common)
    hidden = ~key_mask[:, None, :, None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    some = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen | ~some, **common)
    return out.masked_fill(~some, 0)
