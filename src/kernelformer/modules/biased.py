"""Attention with a relative bias through a feature map, all at once or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.recurrent import MadeBy, step_near
from kernelformer.attention.relative.bias_view import Layout, constant_beyond
from kernelformer.attention.relative.call import RelativeCall
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.dispatch import biased_attention
from kernelformer.contract import PositiveSpec, compute_dtype
from kernelformer.errors import shape
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.bias import assert_constant
from kernelformer.modules.call import Bias, Call
from kernelformer.modules.checks import can_read

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

    def attend(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Attend to all keys (B, G, S, D) of a call, and in a stream to those before them.

        Args:
            call: with a bias over all distances; in a stream its queries and keys are normalized already.
            tensors: of the map, as `FeatureMap.for_query_heads` gives them.

        Returns:
            (B, H, L, E), and in a stream the tensors of the state after the keys.
        """
        bias = call.bias
        assert bias is not None
        if not call.in_stream:
            key, value = (self._per_head(x) for x in (call.key, call.value))
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
            return biased_attention(relative, features=self.feature_map.feature_dim, algorithm=bias.algorithm), None
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
                _check_constant(bias, window)
        return self._stream(call, bias.table[:, past - near :], window, tensors)

    def step(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
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

    def _per_head(self, x: Tensor) -> Tensor:
        """Keys of every query head: each has its own bias."""
        repeats = self.feature_map.num_heads // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _stream(
        self, call: Call, table: Tensor, window: int | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Causal attention with a bias (H, n + 2 L - 1) for n near keys, and what is kept of the keys."""
        assert call.bias is not None
        dtype, count, slope = compute_dtype(call.query.dtype), call.key.shape[2], call.bias.slope
        key, value = (self._per_head(x).to(dtype) for x in (call.key, call.value))
        mask = key.new_ones(key.shape[0], count, dtype=torch.bool) if call.key_mask is None else call.key_mask
        sums: Sequence[Tensor] = []
        if call.state is not None:
            *sums, near, near_values, near_mask = call.state.tensors
            if torch.is_grad_enabled() and (near.requires_grad or near_values.requires_grad):
                raise ValueError("gradients do not flow through a state with a bias; go on from state.detach().")
            key, value = torch.cat([near, key], 2), torch.cat([near_values, value], 2)
            mask = torch.cat([near_mask, mask], 1)
        if call.key_mask is not None:
            gone = ~mask[:, None, :, None]
            key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
        quick = None
        if self._is_quick(call, key, sums, window):
            spec = cast(PositiveSpec, self.feature_map.spread_spec)
            rows = (call.query.to(dtype), key, value, mask, table.to(dtype), sums)
            quick = step_near(spec, tensors, *rows, scale=call.scale, slope=slope)
        if quick is None:
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
            quick = relative_attention(relative, keep=window)
        out, after = quick
        kept = slice(None) if window is None else slice(max(0, key.shape[2] - window), None)
        tokens = [key[:, :, kept], value[:, :, kept], mask[:, kept]]
        if count > 1 and window is not None:  # views would keep all of a prompt; after a step they keep one token more
            tokens = [x.clone() for x in tokens]
        return out, (*after, *tokens)

    def _is_quick(self, call: Call, key: Tensor, sums: Sequence[Tensor], window: int | None) -> bool:
        """Whether it is one token of a stream with a full state, which a few whole operations do."""
        one = call.query.shape[2] == 1 and isinstance(self.feature_map.spec, PositiveSpec)
        if not one or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return bool(sums) and window is not None and key.shape[2] == window + 1


def _near_keys(state: State) -> int:
    """The number of keys that a state holds one by one."""
    return state.tensors[-1].shape[1]


def _check_constant(bias: Bias, window: int) -> None:
    """Check that the bias is constant where the state has sums only."""
    said = f"the state keeps {window} keys one by one, so the bias must be constant beyond that distance, and it is"
    middle = bias.layout.L - 1 + bias.layout.offset
    assert_constant(bias.table, middle, window, True, f"{said} not; start anew with a larger max_distance.")
    reach = constant_beyond(bias.table, middle, True) if can_read(bias.table) else 0
    if reach > window:
        raise ValueError(f"{said} beyond {reach} only; start anew with max_distance={reach}.")
