"""Attention with a relative bias through a feature map, all at once or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.near_keys import NearKeys, join
from kernelformer.attention.parallel.biased import SPREAD, parallel_biased_attention
from kernelformer.attention.recurrent import step_near
from kernelformer.attention.relative.bias_view import Layout, constant_beyond
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.dispatch import biased_attention, find_window
from kernelformer.attention.state import MadeBy
from kernelformer.contract import PositiveSpec, Role, Spec, compute_dtype
from kernelformer.errors import shape
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.bias import assert_constant, share_tail
from kernelformer.modules.call import Bias, Call
from kernelformer.modules.checks import can_look

NEAR, FADES = "near keys", "fades"  # what the maker of a state with a bias says of it, beside its settings


class BiasedAttention:
    """The part of a `KernelCore` that deals with a relative bias.

        out_i = sum_j exp(b_{j-i}) phi(q_i) . phi(k_j) v_j / sum_j exp(b_{j-i}) phi(q_i) . phi(k_j)

    It takes a call and the map's tensors for every query head, and returns the outputs and what a stream keeps: the
    sums of all keys beyond the window (shift, kv, ks and ns; nothing while there are none), then the near keys
    (B, H, n, D), values (B, H, n, E) and their mask (B, n) as they are: window of them, or all where there is none.

    Args:
        feature_map: phi; only its settings are used, since replicas of a model have maps of their own.
        normalize_qk: whether calls that are not streamed divide queries and keys by their L2 norm here, tile by tile.
    """

    def __init__(self, feature_map: FeatureMap, *, normalize_qk: bool) -> None:
        self.feature_map = feature_map
        self.normalize_qk = normalize_qk

    def attend(
        self, call: Call, tensors: Sequence[Tensor], *, parallel: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, NearKeys | None]:
        """Attend to all keys (B, G, S, D) of a call, and in a stream to those before them.

        Args:
            call: with a bias over all distances; in a stream its queries and keys are normalized already.
            tensors: of the map, as `FeatureMap.for_query_heads` gives them.
            parallel: by the algorithm for accelerators.

        Returns:
            (B, H, L, E), and in a stream the tensors of the state after the keys, and what the near ones are views of.
        """
        bias = call.bias
        assert bias is not None
        if not call.in_stream:
            key, value = (self.per_head(x) for x in (call.key, call.value))
            relative = RelativeCall(
                query=call.query,
                key=key,
                value=value,
                bias=bias.table,
                spec=self.feature_map.spread_spec_id,
                tensors=tensors,
                scale=call.scale,
                layout=bias.layout,
                key_mask=call.key_mask,
                is_causal=call.is_causal,
                window=bias.window,
                slope=bias.slope,
                normalize_qk=self.normalize_qk,
            )
            if parallel:
                window = bias_window(bias, call.is_causal)
                return parallel_biased_attention(replace(relative, window=window))[0], None, None
            out = biased_attention(relative, features=self.feature_map.feature_dim, algorithm=bias.algorithm)
            return out, None, None
        if bias.layout.rows:
            raise ValueError("a bias on a grid does not stream; give the whole grid in one call, without a state.")
        if bias.algorithm == "fft":
            raise ValueError("algorithm='fft' does not stream; leave it out, or take 'windowed'.")
        window, past, near = bias.window, 0, 0
        if call.state is not None:
            window, past, near = self._window(call.state, bias), call.state.length, _near_keys(call.state)
            if window is not None and bias.window is not None and bias.window != window:
                raise ValueError(f"the state keeps {window} keys one by one, got max_distance={bias.window}.")
            if window is not None and bias.slope is None:
                bias = _constant_beyond(bias, window)
        return self._stream(call, bias.table[:, past - near :], window, tensors, parallel=parallel)

    def step(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...], NearKeys | None]:
        """Attend with one token, whose bias is over distances 0 to W; arguments and results as those of `attend`."""
        bias = call.bias
        assert bias is not None
        assert bias.window is not None
        reach = bias.window
        window: int | None = reach
        near = 0
        if call.state is not None:
            window, near = self._window(call.state, bias), _near_keys(call.state)
            if window is not None and window != reach:
                raise ValueError(
                    f"the state keeps {window} keys one by one, so bias must be (heads, {window + 1}), got "
                    f"{shape(bias.table)}."
                )
        table = bias.table[:, reach - min(near, reach) :]  # distances near .. 0
        if near > reach:  # all keys are kept: farther ones have the last entry
            table = torch.nn.functional.pad(table, (near - reach, 0), mode="replicate")
        return self._stream(call, table, window, tensors)

    def made_by(self, call: Call) -> MadeBy:
        """What a stream that starts with this call keeps one by one, and whether its bias falls beyond."""
        assert call.bias is not None
        window = call.bias.window
        return ((NEAR, "all" if window is None else window), (FADES, call.bias.slope is not None))

    def values_of(self, call: Call, state: State) -> tuple[Tensor, tuple[int, ...]]:
        """The near values of a state, and the shape that they must have for a call."""
        values = state.tensors[-2]
        return values, (call.key.shape[0], self.feature_map.num_heads, values.shape[2], call.value.shape[-1])

    @staticmethod
    def _window(state: State, bias: Bias) -> int | None:
        """How many keys a state keeps one by one; None means all of them."""
        made = dict(state.made_by)
        if made[FADES] != (bias.slope is not None):
            with_, here = ("with", "none") if made[FADES] else ("without", "one")
            raise ValueError(f"the state was made {with_} a slope, this call has {here}; start anew with state=None.")
        return None if made[NEAR] == "all" else int(str(made[NEAR]))

    def per_head(self, x: Tensor) -> Tensor:
        """Keys of every query head: each has its own bias."""
        repeats = self.feature_map.num_heads // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _stream(
        self, call: Call, table: Tensor, window: int | None, tensors: Sequence[Tensor], *, parallel: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...], NearKeys | None]:
        """Causal attention with a bias (H, n + 2 L - 1) for n near keys, and what is kept of the keys."""
        assert call.bias is not None
        count, slope = call.key.shape[2], call.bias.slope
        sums, (key, value, mask, *logs), near = self._tokens(call, window, tensors)
        done = None
        if logs and sums and key.shape[2] - 1 == window:  # a token of a stream whose window is full
            logits = self._log_shares(call.query.to(key.dtype), tensors, call.scale, "query")
            done = step_near(logits, logs[0], value, table.to(key.dtype), sums, slope=slope)
        if done is None:
            relative = RelativeCall(
                query=call.query,
                key=key,
                value=value,
                bias=table,
                spec=self.feature_map.spread_spec_id,
                tensors=tensors,
                scale=call.scale,
                layout=Layout(count, key.shape[2], key.shape[2] - count),
                key_mask=None if call.key_mask is None and call.state is None else mask,
                is_causal=True,
                window=window,
                slope=slope,
                state=sums,
            )
            if parallel:
                done = parallel_biased_attention(relative, streams=True)
            else:
                done = relative_attention(relative, keep=window)
        out, after = done
        first = 0 if window is None else max(0, key.shape[2] - window)
        tokens = [key[:, :, first:], value[:, :, first:], mask[:, first:]]
        if count > 1 and window is not None:  # views would keep all of a prompt
            tokens = [x.clone() for x in tokens]
        return out, (*after, *tokens), near

    def _tokens(
        self, call: Call, window: int | None, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor], NearKeys | None]:
        """The sums of a call's state, its near tokens with those of the call (see `join`), and their buffers."""
        dtype = compute_dtype(call.query.dtype)
        key, value, mask = self.per_head(call.key).to(dtype), self.per_head(call.value).to(dtype), call.key_mask
        if mask is None:
            mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        else:
            gone = ~mask[:, None, :, None]
            key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
        if call.state is None:
            return (), [key, value, mask], None
        *sums, near_keys, near_values, near_mask = call.state.tensors

        def log_keys(keys: Tensor, visible: Tensor) -> Tensor:
            logs = self._log_shares(keys, tensors, call.scale, "key")
            return logs.masked_fill_(~visible[:, None, :, None], -torch.inf)

        mapping = log_keys if isinstance(self.feature_map.spec, PositiveSpec) else None
        kept = (near_keys, near_values, near_mask)
        near = call.state.near if isinstance(call.state.near, NearKeys) else None
        return sums, *join(kept, (key, value, mask), near, window=window, mapping=mapping)

    def _log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Log features (B, H, n, M) of queries or keys under a positive map."""
        return cast(PositiveSpec, self.feature_map.spread_spec).log_shares(x, tensors, scale, role)


def bias_window(bias: Bias, is_causal: bool) -> int | None:
    """The distance beyond which a bias is constant, as the caller says or by its values; None: nobody knows."""
    if bias.window is not None or not can_look(bias.table):
        return bias.window
    return find_window(bias.table, bias.layout, is_causal)


def bias_not_parallel(spec: Spec, call: Call) -> str | None:
    """What of a call with a bias the algorithm for accelerators does not cover; None where it covers all.

    Entries are looked at only where that is free; elsewhere see `attention.parallel.biased`.
    """
    bias = call.bias
    assert bias is not None
    if bias.layout.rows:
        return "a bias on a grid"
    if not isinstance(spec, PositiveSpec):
        return "a bias beside a signed map"
    if bias.slope is not None and not call.is_causal:
        return "a bias with a slope without causality"
    if call.in_stream:
        made = {} if call.state is None else dict(call.state.made_by)
        window = None if made.get(NEAR) == "all" else made.get(NEAR, bias.window)
    else:
        window = bias_window(bias, call.is_causal)
    if window is None:
        return "a bias of which no max_distance is known"
    if not can_look(bias.table):
        return None
    level = _level(bias, call.is_causal)
    if not level.numel():
        return None
    least, most = level.aminmax()
    wide = float(most - least) > SPREAD or not bool(least.isfinite())
    return f"a bias whose entries differ by more than {SPREAD:g}, or are -inf" if wide else None


def _level(bias: Bias, is_causal: bool) -> Tensor:
    """The entries that a call uses, without the slope."""
    table, middle = bias.table.detach(), bias.layout.L - 1 + bias.layout.offset
    table = table[:, : middle + 1] if is_causal else table
    if bias.slope is None:
        return table
    return table + bias.slope.unsqueeze(1) * (torch.arange(table.shape[1], device=table.device) - middle).abs()


def _near_keys(state: State) -> int:
    """The number of keys that a state holds one by one."""
    return state.tensors[-1].shape[1]


def _constant_beyond(bias: Bias, window: int) -> Bias:
    """The bias, checked to be constant where the state has sums only; see `share_tail`."""
    said = f"the state keeps {window} keys one by one, so the bias must be constant beyond that distance, and it is"
    middle = bias.layout.L - 1 + bias.layout.offset
    assert_constant(bias.table, middle, window, True, f"{said} not; start anew with a larger max_distance.")
    reach = constant_beyond(bias.table, middle, True) if can_look(bias.table) else 0
    if reach > window:
        raise ValueError(f"{said} beyond {reach} only; start anew with max_distance={reach}.")
    return replace(bias, table=share_tail(bias.table, middle, window, True))
