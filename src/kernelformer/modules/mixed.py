"""Heads of two kinds in one layer: some attend exactly, the others through a feature map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.modules.checks import Call
from kernelformer.modules.core import AttentionCore


@dataclass(frozen=True, eq=False, repr=False)
class PairState(State):
    """States of both kinds; its tensors are those of the first, then those of the second."""

    parts: tuple[State, State] = ()  # type: ignore[assignment]

    @staticmethod
    def of(parts: tuple[State, State], last_id: Tensor | None = None) -> PairState:
        """Join two states of one stream; the segment ids are the pair's, not the parts'."""
        first, second = parts
        made_by = first.made_by + second.made_by
        return PairState(first.tensors + second.tensors, first.length, made_by, last_id=last_id, parts=parts)

    def to(self, device: torch.device | str) -> PairState:
        """Return the same state on another device."""
        last_id = None if self.last_id is None else self.last_id.to(device)
        return self.of((self.parts[0].to(device), self.parts[1].to(device)), last_id)

    def detach(self) -> PairState:
        """Return the same state, detached from the graph."""
        return self.of((self.parts[0].detach(), self.parts[1].detach()), self.last_id)

    def reorder(self, index: Tensor | Sequence[int]) -> PairState:
        """Select samples by their index, repeats allowed."""
        order = torch.as_tensor(index, dtype=torch.long)
        last_id = None if self.last_id is None else self.last_id[order.to(self.last_id.device)]
        return self.of((self.parts[0].reorder(index), self.parts[1].reorder(index)), last_id)


class MixedCore(AttentionCore):
    """Exact attention in some heads, another core in the others.

    Cost: quadratic for the exact heads; their state keeps every key.

    Args:
        exact: a core for the exact heads.
        linear: a core for the other heads.
        heads: numbers of the exact heads among all.
    """

    def __init__(self, exact: AttentionCore, linear: AttentionCore, heads: Sequence[int]) -> None:
        total = exact.num_heads + linear.num_heads
        chosen = sorted(set(heads))
        if len(chosen) != exact.num_heads or not all(0 <= x < total for x in chosen):
            raise ValueError(f"exact heads must be {exact.num_heads} different numbers below {total}, got {heads}.")
        if exact.head_dim != linear.head_dim:
            raise ValueError(f"both cores must have one head_dim, got {exact.head_dim} and {linear.head_dim}.")
        name = f"{linear.method} with {len(chosen)} exact heads"
        super().__init__(name, head_dim=linear.head_dim, num_heads=total, scale=exact.scale)
        self.exact, self.linear = exact, linear
        rest = [x for x in range(total) if x not in chosen]
        self.heads = (chosen, rest)
        order = torch.tensor([*chosen, *rest])
        self.register_buffer("back", torch.argsort(order), persistent=False)
        self.takes_bias = exact.takes_bias and linear.takes_bias
        self.takes_segments = exact.takes_segments and linear.takes_segments
        self.takes_loops, self.mixes_queries = linear.takes_loops, linear.mixes_queries
        self.has_near = linear.has_near

    @property
    def cores(self) -> tuple[AttentionCore, AttentionCore]:
        """Exact core and linear core."""
        return self.exact, self.linear

    @property
    def feature_dim(self) -> int | None:
        """M, the width of phi in the linear heads; None if they have none."""
        return self.linear.feature_dim

    def resample(self, draw: int | None = None) -> None:
        """Advance to the next draw of the linear heads, or to number ``draw``."""
        self.linear.resample(draw)

    def calibrate(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, *, query_mask: Tensor | None = None
    ) -> None:
        """Count queries and keys of the linear heads into the statistics of their map."""
        self._accept(Call(query=query, key=key, value=key, scale=self.scale, key_mask=key_mask, query_mask=query_mask))
        self.linear.calibrate(self._split(query, 1), self._split(key, 1), key_mask, query_mask=query_mask)

    def reset_calibration(self) -> None:
        """Forget the statistics of the linear heads."""
        self.linear.reset_calibration()

    def refusal(self, causal: bool) -> ValueError | None:
        """Return the error of the linear core for this causality, or None."""
        return self.linear.refusal(causal)

    def _resolve_scale(self, scale: float) -> float:
        if self.exact.scale != self.linear.scale:
            raise ValueError(
                f"the heads have scales of their own, {self.exact.scale:g} and {self.linear.scale:g}, got one for all "
                f"of them, {scale!r}; leave it out."
            )
        return super()._resolve_scale(scale)

    def _stream_refusal(self, what: str) -> ValueError | None:
        return self.linear._stream_refusal(what)

    def _misfit(self, call: Call, state: State) -> str | None:
        """Check only what concerns the whole state: each core checks its own part when it attends."""
        return None if isinstance(state, PairState) else f"state must be one of this core's, got {type(state).__name__}"

    def _forget(self, state: State, samples: Tensor) -> State:
        assert isinstance(state, PairState)
        first, second = (core._forget(x, samples) for core, x in zip(self.cores, state.parts, strict=True))
        return PairState.of((first, second), state.last_id)

    def _split(self, x: Tensor, which: int) -> Tensor:
        """Select the heads of one kind; grouped keys are repeated for each of their query heads."""
        repeats = self.num_heads // x.shape[1]
        return x[:, [head // repeats for head in self.heads[which]]]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        back: Tensor = self.back  # type: ignore[assignment]
        return torch.cat(list(parts), 1)[:, back]

    def _parts(self, call: Call) -> list[tuple[AttentionCore, list[Tensor], State | None]]:
        """Yield each core with its queries, keys and values, and its state."""
        parts = []
        for which, core in enumerate(self.cores):
            state = call.state.parts[which] if isinstance(call.state, PairState) else None
            parts.append((core, [self._split(x, which) for x in (call.query, call.key, call.value)], state))
        return parts

    def _common(self, call: Call) -> dict[str, Any]:
        """Arguments that calls and steps of both cores take."""
        return {"scale": None if call.scale == self.scale else call.scale, "key_mask": call.key_mask}

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        outs: list[Tensor] = []
        states: list[State] = []
        common = {**self._common(call), "is_causal": call.is_causal, "query_mask": call.real_queries}
        for core, inputs, state in self._parts(call):
            how = self._bias(call, core)
            if call.algorithm is not None and core is self.linear:
                how["algorithm"] = call.algorithm
            result = core(*inputs, state=state, return_state=call.streams, **common, **how)
            outs.append(result[0] if call.streams else result)
            states += [result[1]] if call.streams else []
        return self._join(outs), PairState.of((states[0], states[1])) if states else None

    def _step(self, call: Call) -> tuple[Tensor, State]:
        outs: list[Tensor] = []
        states: list[State] = []
        for core, (query, key, value), state in self._parts(call):
            bias = self._bias(call, core)
            if bias:  # a step takes it over distances 0 to W, in rising order
                bias = {"bias": bias["bias"].flip(1), "slope": bias["slope"]}
            out, after = core.step(query, key, value, state, **self._common(call), **bias)
            outs.append(out)
            states.append(after)
        return self._join(outs), PairState.of((states[0], states[1]))

    def _bias(self, call: Call, core: AttentionCore) -> dict[str, Any]:
        """Select the bias of the heads of one core, as its `forward` takes it."""
        bias = call.bias
        if bias is None:
            return {}
        rows = self.heads[0 if core is self.exact else 1]
        return {
            "bias": bias.table[rows],
            "max_distance": bias.window,
            "slope": None if bias.slope is None else bias.slope[rows],
            "algorithm": None if core is self.exact else bias.algorithm,
            "num_prefix": bias.layout.prefix,
        }

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """Summarize a context for `recall`, for both kinds."""
        first, second = (
            core.remember(self._split(key, i), self._split(value, i), key_mask=key_mask)
            for i, core in enumerate(self.cores)
        )
        return PairState.of((first, second))

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a context from `remember`, without a bias: (B, H, L, D) -> (B, H, L, E)."""
        if not isinstance(memory, PairState):
            raise ValueError(f"recall needs what remember of this core returned, got {type(memory).__name__}.")
        return self._join([core.recall(self._split(query, i), memory.parts[i]) for i, core in enumerate(self.cores)])
