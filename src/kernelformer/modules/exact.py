"""Exact attention: to all tokens, quadratic in time, and to near ones alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State, gaussian_attention
from kernelformer.attention.dispatch import takes_plain
from kernelformer.attention.exact import gaussian_matrix_attention
from kernelformer.attention.relative.call import Layout
from kernelformer.attention.state import MadeBy
from kernelformer.contract import compute_dtype
from kernelformer.errors import flag, fraction, integer, positive_int, shape
from kernelformer.modules.bias import biased_sdpa, empty_attention
from kernelformer.modules.checks import Bias, Call, config_mismatch, tensor_mismatch
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.window import NearFarAttention, Stream


class GrowingCore(AttentionCore):
    """Base class of exact methods, which attend to every key.

    Their state holds all keys (B, G, S, D), values (B, G, S, E) and, once one was hidden, a mask (B, S).
    Cost of a stream: O(S) time and memory per token.

    Args:
        attention_dropout: the share of weights that training sets to 0, the others being divided by what is left;
            torch forms the whole (L, S) matrix then. The others are those of `AttentionCore`.
    """

    streams_all = True
    takes_dropout = True

    def __init__(self, method: str, *, attention_dropout: float = 0.0, **options: Any) -> None:
        super().__init__(method, **options)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)

    def _exact(self, call: Call) -> Tensor:
        """The method itself: query i sees keys up to ``call.past + i`` where it is causal."""
        raise TypeError(f"{type(self).__name__} does not say how it attends.")

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        if not call.in_stream:
            return self._exact(call), None
        joined = self._join(call)
        kept = (joined.key, joined.value, *(() if joined.key_mask is None else (joined.key_mask,)))
        return self._exact(joined), self._state(kept, call)

    @staticmethod
    def _join(call: Call) -> Call:
        """The call with the keys of the state before its own."""
        state = call.state
        if state is None or state.length == 0:
            return call
        key, value = (torch.cat([a, b], 2) for a, b in zip(state.tensors[:2], (call.key, call.value), strict=True))
        mask = None
        if len(state.tensors) > 2 or call.key_mask is not None:
            visible = key.new_ones(key.shape[0], key.shape[2], dtype=torch.bool)
            old = state.tensors[2] if len(state.tensors) > 2 else visible[:, : state.length]
            new = visible[:, state.length :] if call.key_mask is None else call.key_mask
            mask = torch.cat([old, new], 1)
        bias = call.bias
        if bias is not None:
            bias = replace(bias, layout=Layout(call.query.shape[2], key.shape[2], state.length))
        return replace(call, key=key, value=value, key_mask=mask, bias=bias, past=state.length)

    def _forget(self, state: State, samples: Tensor) -> State:
        """Keys stay where they are, for the sake of distances, and are hidden."""
        key, value, *mask = state.tensors
        visible = (~samples).unsqueeze(1).expand(-1, key.shape[2])
        return replace(state, tensors=(key, value, visible & mask[0] if mask else visible))

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        dropout = f", attention_dropout={self.attention_dropout:g}" if self.attention_dropout else ""
        return super().extra_repr() + dropout

    def _step(self, call: Call) -> tuple[Tensor, State]:
        if call.bias is not None:
            past = 0 if call.state is None else call.state.length
            call = replace(call, bias=_over_past(call.bias, past))
        return super()._step(call)

    def _misfit(self, call: Call, state: State) -> str | None:
        problem = config_mismatch(dict(state.made_by), dict(self._made_by(call.scale)))
        if problem:
            return problem
        key, value = call.key, call.value
        kept, here = state.tensors[1], (key.shape[0], key.shape[1], state.length, value.shape[-1])
        if tuple(kept.shape) != here:
            return f"the state has shape {shape(kept)}, these inputs need {here}"
        if kept.device != key.device or (kept.dtype != value.dtype and not self.normalize_qk):
            return f"the state is {kept.dtype} on {kept.device}, these inputs need {value.dtype} on {key.device}"
        return None


def _over_past(bias: Bias, past: int) -> Bias:
    """A step's bias over distances 0 to W as one over all keys: j - i from -past to 0, (H, past + 1)."""
    distances = torch.arange(-past, 1, device=bias.table.device)
    return Bias(NearFarAttention.at(bias, distances), Layout(1, past + 1, past))


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
        how: dict[str, Any] = {"scale": call.scale, "key_mask": key_mask, "is_causal": is_causal}
        if call.dropout or torch.compiler.is_exporting():
            return gaussian_matrix_attention(call.query, key, value, **how, dropout=call.dropout)
        return gaussian_attention(call.query, key, value, **how)

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


TILE = 512


def sdpa(call: Call) -> Tensor:
    """torch's attention with masks: rows that see nothing are zero, and no mask of L x S is made."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    key_mask, length = call.key_mask, call.query.shape[2]
    if key.shape[2] == 0:
        return empty_attention(query, key, value)
    grouped = query.shape[1] != key.shape[1]
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
    # by 0. A graph of any length has no loop over tiles.
    traced, parts = torch.compiler.is_exporting(), []
    for start in (0,) if traced else range(0, length, TILE):
        tile = query if traced else query[:, :, start : start + TILE]
        first, last = call.past + start, call.past + start + tile.shape[2]
        keys = min(key.shape[2], last)
        mask = torch.arange(keys, device=query.device) <= torch.arange(first, last, device=query.device).unsqueeze(1)
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, :keys]
        parts.append(rows(tile, keys, mask))
    return torch.cat(parts, 2)


class LocalCore(AttentionCore):
    """Exact softmax attention to the tokens nearby and to the first ones; all others are invisible.

        out_i = sum_near e^(s_ij) v_j / sum_near e^(s_ij)          near(i) = { j : |i - j| < window or j < sinks }

    Cost: O(L (window + sinks) (D + E)) time; a stream keeps ``window`` + ``sinks`` keys and values.

    Args:
        window: tokens on each side of a query, its own included, that it sees.
        sinks: number of first visible tokens that every query sees (StreamingLLM's attention sinks).
        attention_dropout: the share of weights that training sets to 0, the others being divided by what is left.

    The others are those of `AttentionCore`.
    """

    streams_all = True
    splits = True
    takes_bias = True
    has_near = True
    takes_dropout = True
    takes_loops = True

    def __init__(
        self, method: str, *, window: int = 64, sinks: int = 4, attention_dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(method, **options)
        self.window = positive_int("window", window)
        self.sinks = integer("sinks", sinks, at_least=0)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)
        self.near = NearFarAttention(method, window=self.window, sinks=self.sinks, scale=None)

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        plain = takes_plain(call.algorithm, (call.query, call.key, call.value))
        out, after = self.near.attend(call, None, plain=plain)
        return out, self._state(after, call) if call.streams and after is not None else None

    def _step(self, call: Call) -> tuple[Tensor, State]:
        out, after, near = self.near.step(call, None)
        return out, self._state(after, call, near)

    def _made_by(self, scale: float) -> MadeBy:
        return (*super()._made_by(scale), ("window", self.window), ("sinks", self.sinks))

    def _made_for(self, call: Call) -> MadeBy:
        return self._made_by(call.scale) + self.near.made_by(call)

    def _forget(self, state: State, samples: Tensor) -> State:
        return self.near.forget(state, samples)

    def _misfit(self, call: Call, state: State) -> str | None:
        problem = config_mismatch(dict(state.made_by), dict(self._made_for(call)))
        if problem:
            return problem
        kept = Stream.of(state, self.sinks > 0).tokens[1]
        needed = (call.key.shape[0], call.key.shape[1], kept.shape[2], call.value.shape[-1])
        return tensor_mismatch(kept, needed, call.query)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return f"{super().extra_repr()}, window={self.window}, sinks={self.sinks}"
