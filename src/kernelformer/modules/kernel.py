"""Linear-time attention: a feature map and the algorithms over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State, causal_attention, linear_attention, read, step
from kernelformer.attention.families import engine_class
from kernelformer.attention.recurrent import MadeBy, Prepared
from kernelformer.contract import autocasts, compute_dtype, no_autocast
from kernelformer.errors import flag, shape
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.checks import check_scale, check_step, check_stream, other_maker
from kernelformer.modules.core import Call
from kernelformer.modules.stream import BiasedCore


class KernelCore(BiasedCore):
    """Linear-time attention through a feature map.

    Args:
        feature_map: phi.
        normalize: divide by the sum of the weights; default as the map's paper does.

    The others are those of `AttentionCore`.
    """

    # The map's tensors of the last stream: parameters as they are, or what follows from them. They are here and not in
    # the states, of which there may be many.
    _prepared: Prepared | None = None

    def __init__(self, method: str, feature_map: FeatureMap, *, normalize: bool | None = None, **options: Any) -> None:
        super().__init__(method, head_dim=feature_map.head_dim, num_heads=feature_map.num_heads, **options)
        self.feature_map = feature_map
        self.normalize = feature_map.normalized if normalize is None else flag("normalize", normalize)
        if feature_map.aligns and not self.normalize:
            raise ValueError("align=True moves the keys, which only normalization undoes; got normalize=False.")

    @property
    def feature_dim(self) -> int:
        """M, the width of phi."""
        return self.feature_map.feature_dim

    @property
    def mixes_queries(self) -> bool:  # type: ignore[override]
        """Landmarks come from all of them."""
        return self.feature_map.sees_sequence

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw of the feature map, or to number ``draw``."""
        self.feature_map.resample(draw)

    def covariances(self) -> Tensor:
        """Covariance of the spectral distribution, (H, C, D, D) for C components (learned-kernels Tables 4, 9-12).

        A mixture's own where the map has one; of the frequencies as a sample, C = 1, where it has none.
        """
        return self.feature_map.covariances()

    def eigenvalues(self) -> Tensor:
        """Of the `covariances`, (H, C, D), ascending."""
        with no_autocast(self.feature_map.seed.device.type):
            values: Tensor = torch.linalg.eigvalsh(self.covariances())
        return values

    def _prepare(
        self,
        query: Tensor,
        key: Tensor,
        key_mask: Tensor | None,
        scale: float,
        state: State | None,
        query_mask: Tensor | None = None,
        *,
        biased: bool = False,
        streams: bool = True,
    ) -> Prepared:
        """The map's tensors: in a stream those of the call before where they are still right, else made anew.

        With a bias they are for keys that are repeated for every query head. With gradients they belong to a graph, and
        a compiled step cannot compare weights: both make them each time.
        """
        phi = self.feature_map
        keeps = streams and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        weights: list[Tensor] = []
        how: tuple[object, ...] = ()
        if keeps:
            weights, place = phi.learned_weights(), (compute_dtype(query.dtype), query.device)
            how = (*place, scale, biased, phi.seed_number, phi.draw_number, torch.is_inference_mode_enabled())
            kept = self._prepared  # read once: a stream in another thread may put its own here at any time
            if state is not None and kept is not None and kept.made_from(weights, how):
                return kept
        tensors = phi.prepare(query, key, key_mask, scale, query_mask)
        tensors = phi.for_query_heads(tensors) if biased else tensors
        if not keeps:
            return Prepared(tuple(tensors))
        self._prepared = prepared = Prepared.of(tensors, weights, how)
        return prepared

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_prepared"}

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        phi = self.feature_map
        with no_autocast(call.query.device.type):
            query, key = phi.align(call.query, call.key, call.key_mask, call.query_mask)
            inputs = (query, self._per_map_head(key), self._per_map_head(call.value))
            how = {"biased": call.bias is not None, "streams": call.streams or call.state is not None}
            prepared = self._prepare(query, key, call.key_mask, call.scale, call.state, call.query_mask, **how)
            if call.bias is not None:
                return self._attend_with_bias(replace(call, query=query, key=key), prepared)
            common: dict[str, Any] = {
                "spec": phi.spec_id,
                "tensors": prepared.tensors,
                "scale": call.scale,
                "key_mask": call.key_mask,
                "normalize": self.normalize,
            }
            if not call.is_causal:
                return linear_attention(*inputs, **common), None
            past = None if call.state is None else call.state.tensors
            out, after = causal_attention(*inputs, **common, state=past)
            return out, self._state(after, call.state, call.key.shape[2], call.scale)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        bias: Tensor | None = None,
        slope: Tensor | None = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One token: (B, H, 1, D), (B, G, 1, D), (B, G, 1, E) -> (B, H, 1, E) and the state after it; None starts.

        With a bias (H, W + 1) over distances 0 to W, beyond which it is constant (or falls by ``slope`` (H) per token),
        the state holds the last W keys and values and the sums of all older ones. A state that was made without a
        window keeps all keys: it grows with the context.
        """
        if bias is not None and not self.takes_bias:
            raise self._no_bias(f"bias of shape {shape(bias)}")
        if slope is not None and bias is None:
            raise ValueError("slope goes with a bias, and none was given.")
        if self.feature_map.sees_sequence:
            raise self._not_causal("step")
        scale = self.scale if scale is None else check_scale(scale)
        fits = self._fits(query, key, value, scale) if key_mask is None and bias is None else ()
        if not fits or not isinstance(state, State) or state.fits != fits:
            query, key, value = self._accept(query, key, value, key_mask)
            check_step(query, key)
            self._check_streaming(query, key, value, True, scale, state, bias is not None)
        self._check_gate(gate, key)
        dtype, work_dtype = query.dtype, compute_dtype(query.dtype)
        query, key = self._units(query, key, key_mask)
        if dtype != work_dtype:
            query, key, value = (x.to(work_dtype) for x in (query, key, value))
        if bias is not None:
            with no_autocast(query.device.type):
                prepared = self._prepare(query, key, key_mask, scale, state, biased=True)
                call = Call(query, key, value, True, key_mask, scale, state)
                out, after_bias = self._step_with_bias(call, bias, slope, prepared)
            return out.to(dtype), after_bias
        key, value = self._per_map_head(key), self._per_map_head(value)
        past = self._empty(key, value) if state is None else state.tensors
        with no_autocast(query.device.type):
            prepared = self._prepare(query, key, key_mask, scale, state)
            out, after = self._step(prepared, (query, key, value), past, scale, key_mask, gate)
        return out.to(dtype), self._state(after, state, 1, scale, fits)

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """What `recall` needs of a whole context: sums of constant size, or all of it where landmarks see queries."""
        if self.feature_map.sees_sequence:
            return super().remember(key, value, key_mask=key_mask)
        query = key.new_zeros(key.shape[0], self.num_heads, *key.shape[2:])
        state: State = self.forward(query, key, value, is_causal=True, key_mask=key_mask, return_state=True)[1]
        return replace(state, made_by=(*state.made_by, ("remembers", key.shape[2])))

    def _maker(self) -> MadeBy:
        return self._made_by(self.scale)

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context, without a bias: (B, H, L, D) -> (B, H, L, E). Cost: O(L M (D + E))."""
        if self.feature_map.sees_sequence:
            return super().recall(query, memory)
        self._check_memory(memory)
        sample = query[:, :1, :1]  # in place of keys, of which none are needed
        query, _, _ = self._accept(query, sample, sample, None)
        main = memory.tensors[1]
        if main.shape[0] != query.shape[0] or main.device != query.device:
            raise ValueError(
                f"the memory has {main.shape[0]} samples on {main.device}, got {query.shape[0]} on {query.device}."
            )
        dtype = query.dtype
        query, _ = self._units(query.to(main.dtype), sample, None)
        with no_autocast(query.device.type):
            prepared = self._prepare(query, sample, None, self.scale, memory)
            out = read(
                self.feature_map.spec,
                prepared.tensors,
                query,
                memory.tensors,
                scale=self.scale,
                normalize=self.normalize,
            )
        return out.to(dtype)

    def _step(
        self,
        prepared: Prepared,
        token: tuple[Tensor, Tensor, Tensor],
        past: Sequence[Tensor],
        scale: float,
        key_mask: Tensor | None,
        gate: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        spec, tensors = self.feature_map.spec, prepared.tensors
        return step(spec, tensors, *token, past, scale=scale, key_mask=key_mask, normalize=self.normalize)

    def refusal(self, causal: bool) -> ValueError | None:
        """Landmarks that see the whole sequence cannot be causal."""
        return self._not_causal("is_causal=True") if causal and self.feature_map.sees_sequence else None

    def _not_causal(self, what: str) -> ValueError:
        return ValueError(
            f"{self.method!r} takes its landmarks from the whole sequence, later tokens included, but {what} was asked "
            f"for; use landmarks='learned', which do not see it."
        )

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[object, ...]:
        """Everything that the checks of a step look at, or nothing where they have to look each time."""
        if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in (query, key, value)):
            return ()
        if autocasts(query.device.type):
            return ()
        kinds = (query.dtype, key.dtype, value.dtype, query.device, key.device, value.device)
        return (query.shape, key.shape, value.shape, *kinds, self._made_by(scale))

    def _accept(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._accept(query, key, value, key_mask)
        maps = self.feature_map.num_key_heads
        if maps % key.shape[1]:
            raise ValueError(
                f"this {self.method!r} core was built with num_key_heads={maps}, got keys of {key.shape[1]} heads "
                f"(shape {shape(key)}); build it with num_key_heads={key.shape[1]}, or without for any number."
            )
        return query, key, value

    def _key_heads(self, key: Tensor) -> int:
        """Heads of the state: those of the keys, or those of a map that differs from head to head."""
        return max(key.shape[1], self.feature_map.heads)

    def _per_map_head(self, x: Tensor) -> Tensor:
        """Grouped keys as many as the map has heads: a map per query head sees each key of its group anew."""
        repeats = self._key_heads(x) // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _empty(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        lead = (key.shape[0], key.shape[1])
        return tuple(engine_class(self.feature_map.spec).empty(lead, self.feature_dim, value.shape[-1], value))

    def _made_by(self, scale: float) -> MadeBy:
        own = {"normalize": self.normalize, "normalize_qk": self.normalize_qk, "scale": scale}
        return (("method", self.method), *self.feature_map.identity.items(), *own.items())

    def _state(
        self,
        tensors: Sequence[Tensor],
        before: State | None,
        count: int,
        scale: float,
        fits: tuple[object, ...] = (),
    ) -> State:
        made_by = self._made_by(scale) if before is None else before.made_by
        return State(tuple(tensors), count + (before.length if before else 0), made_by, fits)

    def _check_streaming(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float,
        state: State | None,
        biased: bool = False,
    ) -> None:
        check_stream(query, key, is_causal)
        if state is not None:
            problem = self._misfit(query, key, value, scale, state, biased)
            if problem:
                raise ValueError(f"{problem}; start anew with state=None.")

    def _misfit(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, state: State, biased: bool
    ) -> str | None:
        """Why a state cannot be gone on from, or None."""
        if not isinstance(state, State):
            return f"state must be a kernelformer State, got {type(state).__name__}"
        theirs, ours = dict(state.made_by), dict(self._made_by(scale))
        if theirs["method"] == self.method and ("near keys" in theirs) != biased:
            made, here = ("without", "one") if biased else ("with", "none")
            return f"the state was made {made} a bias, this call has {here}"
        for own in ("near keys", "fades"):
            theirs.pop(own, None)
        problem = other_maker(theirs, ours)
        if problem:
            return problem
        main, phi, dtype = state.tensors[-2 if biased else 1], self.feature_map, compute_dtype(query.dtype)
        shape_here = (key.shape[0], self._key_heads(key), phi.feature_dim, value.shape[-1])
        if biased:
            shape_here = (key.shape[0], self.num_heads, main.shape[2], value.shape[-1])
        if main.shape != shape_here:
            return f"the state has shape {shape(main)}, these inputs need {shape_here}"
        if main.dtype != dtype or main.device != query.device:
            return f"the state is {main.dtype} on {main.device}, these inputs need {dtype} on {query.device}"
        return None
