"""Attention with a relative bias through a feature map, all at once or as a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.recurrent import Prepared, step_near
from kernelformer.attention.relative.bias_view import Layout, constant_beyond
from kernelformer.attention.relative.direct import relative_attention
from kernelformer.attention.relative.dispatch import biased_attention
from kernelformer.contract import PositiveSpec, compute_dtype
from kernelformer.errors import shape
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.bias import Bias, assert_constant, check_step_bias
from kernelformer.modules.checks import looks
from kernelformer.modules.core import AttentionCore, Call


class BiasedCore(AttentionCore):
    """What a core with a feature map does when a bias is given.

    A stream with a bias keeps the sums of all keys beyond the window, and the near keys and values as they are: window
    of them, or all where there is no window.
    """

    feature_map: FeatureMap
    normalize: bool

    @abstractmethod
    def _state(
        self,
        tensors: Sequence[Tensor],
        before: State | None,
        count: int,
        scale: float,
        fits: tuple[object, ...] = (),
    ) -> State:
        """The state with these tensors, ``count`` tokens after the one before."""

    @property
    def takes_bias(self) -> bool:  # type: ignore[override]
        """A bias multiplies weights, which must be divided by their sum again."""
        return self.normalize

    @property
    def units_inside(self) -> bool:  # type: ignore[override]
        """Unless landmarks have to be chosen among unit vectors."""
        return not self.feature_map.sees_sequence

    def _attend_with_bias(self, call: Call, prepared: Prepared) -> tuple[Tensor, State | None]:
        bias = call.bias
        assert bias is not None
        if self.units_inside and (call.streams or call.state is not None):
            query, unit_key = self._units(call.query, call.key, call.key_mask)
            call = replace(call, query=query, key=unit_key)
        key, value = (self._per_head(x) for x in (call.key, call.value))
        spec_id = self.feature_map.spread_spec_id
        common: dict[str, Any] = {"spec": spec_id, "tensors": prepared.tensors, "scale": call.scale}
        if not call.streams and call.state is None:
            out = biased_attention(
                call.query,
                key,
                value,
                bias.table,
                features=self.feature_map.feature_dim,
                layout=bias.layout,
                algorithm=bias.algorithm,
                window=bias.window,
                slope=bias.slope,
                key_mask=call.key_mask,
                is_causal=call.is_causal,
                unit=self.normalize_qk and self.units_inside,
                **common,
            )
            return out, None
        if bias.layout.rows:
            raise ValueError("a bias on a grid does not stream; give the whole grid in one call, without a state.")
        if bias.algorithm == "fft":
            raise ValueError("algorithm='fft' does not stream; leave it out, or take 'windowed'.")
        window = bias.window
        if call.state is not None:
            window = self._stream_window(call.state, bias.slope)
            if window is not None and bias.window is not None and bias.window != window:
                raise ValueError(f"the state keeps {window} keys one by one, got max_distance={bias.window}.")
            if window is not None and bias.slope is None:
                self._check_constant(bias, window)
        past = 0 if call.state is None else call.state.length
        near = 0 if call.state is None else call.state.tensors[-1].shape[1]
        return self._stream(call, (call.query, key, value), bias.table[:, past - near :], window, bias.slope, prepared)

    @staticmethod
    def _check_constant(bias: Bias, window: int) -> None:
        """That the bias is constant where the state has sums only."""
        said = f"the state keeps {window} keys one by one, so the bias must be constant beyond that distance, and it is"
        middle = bias.layout.L - 1 + bias.layout.offset
        assert_constant(bias.table, middle, window, True, f"{said} not; start anew with a larger max_distance.")
        reach = constant_beyond(bias.table, middle, True) if looks(bias.table) else 0
        if reach > window:
            raise ValueError(f"{said} beyond {reach} only; start anew with max_distance={reach}.")

    def _stream(
        self,
        call: Call,
        inputs: tuple[Tensor, Tensor, Tensor],
        table: Tensor,
        window: int | None,
        slope: Tensor | None,
        prepared: Prepared,
    ) -> tuple[Tensor, State]:
        """Causal attention with a bias (H, n + 2 L - 1) for n near keys, and what is kept of the keys."""
        query, key, value = inputs
        dtype = compute_dtype(query.dtype)
        key, value = key.to(dtype), value.to(dtype)
        count, sums = key.shape[2], []
        mask = key.new_ones(key.shape[0], count, dtype=torch.bool) if call.key_mask is None else call.key_mask
        if call.state is not None:
            *sums, near, near_values, near_mask = call.state.tensors
            if torch.is_grad_enabled() and (near.requires_grad or near_values.requires_grad):
                raise ValueError("gradients do not flow through a state with a bias; go on from state.detach().")
            key, value = torch.cat([near, key], 2), torch.cat([near_values, value], 2)
            mask = torch.cat([near_mask, mask], 1)
        hidden = call.key_mask is not None or call.state is not None
        if call.key_mask is not None:
            gone = ~mask[:, None, :, None]
            key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
        maps: Sequence[Tensor] = prepared.tensors
        common: dict[str, Any] = {"scale": call.scale, "slope": slope}
        quick = None
        if self._is_quick(query, key, sums, window):
            spec = cast(PositiveSpec, self.feature_map.spread_spec)
            rows = (query.to(dtype), key, value, mask, table.to(dtype), sums)
            quick = step_near(spec, maps, *rows, **common)
        out, after = quick or relative_attention(
            query,
            key,
            value,
            table,
            spec=self.feature_map.spread_spec_id,
            tensors=maps,
            key_mask=mask if hidden else None,
            is_causal=True,
            window=window,
            layout=Layout(count, key.shape[2], key.shape[2] - count),
            state=list(sums),
            keep=window,
            **common,
        )
        keep = slice(None) if window is None else slice(max(0, key.shape[2] - window), None)
        kept = [key[:, :, keep], value[:, :, keep], mask[:, keep]]
        if count > 1 and window is not None:  # views would keep all of a prompt; after a step they keep one token more
            kept = [x.clone() for x in kept]
        state = self._state((*after, *kept), call.state, count, call.scale)
        if call.state is None:
            how = (("near keys", "all" if window is None else window), ("fades", slope is not None))
            state = replace(state, made_by=(*state.made_by, *how))
        return out, state

    def _is_quick(self, query: Tensor, key: Tensor, sums: Sequence[Tensor], window: int | None) -> bool:
        """Whether it is one token of a stream with a full state, which a few whole operations do."""
        if query.shape[2] != 1 or not isinstance(self.feature_map.spec, PositiveSpec) or torch.is_grad_enabled():
            return False
        full = bool(sums) and window is not None and key.shape[2] == window + 1
        return full and not torch.compiler.is_compiling()

    @staticmethod
    def _stream_window(state: State, slope: Tensor | None) -> int | None:
        made = dict(state.made_by)
        if made["fades"] != (slope is not None):
            with_, here = ("with", "none") if made["fades"] else ("without", "one")
            raise ValueError(f"the state was made {with_} a slope, this call has {here}; start anew with state=None.")
        kept = made["near keys"]
        return None if kept == "all" else int(str(kept))

    def _per_head(self, x: Tensor) -> Tensor:
        """Keys of every query head: each has its own bias."""
        repeats = self.num_heads // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _step_with_bias(
        self, call: Call, table: Tensor, slope: Tensor | None, prepared: Prepared
    ) -> tuple[Tensor, State]:
        """One token; the table is (H, W + 1) over distances 0 to W."""
        check_step_bias(table, slope, self.num_heads)
        reach = table.shape[1] - 1
        window: int | None = reach
        near = 0
        if call.state is not None:
            window = self._stream_window(call.state, slope)
            near = call.state.tensors[-1].shape[1]
            if window is not None and window != reach:
                raise ValueError(
                    f"the state keeps {window} keys one by one, so bias must be (heads, {window + 1}), got "
                    f"{shape(table)}."
                )
        table = table.flip(1)[:, reach - min(near, reach) :]  # distances near .. 0
        if near > reach:  # all keys are kept: farther ones have the last entry
            table = torch.nn.functional.pad(table, (near - reach, 0), mode="replicate")
        key, value = (self._per_head(x) for x in (call.key, call.value))
        return self._stream(call, (call.query, key, value), table, window, slope, prepared)
