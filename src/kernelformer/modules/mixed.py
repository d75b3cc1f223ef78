"""Heads of two kinds in one layer: some attend exactly, the others through a feature map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.modules.core import AttentionCore, Call


@dataclass(frozen=True, eq=False, repr=False)
class PairState(State):
    """The states of both kinds; its tensors are those of the first, then those of the second."""

    parts: tuple[State, State] = ()  # type: ignore[assignment]

    @staticmethod
    def of(parts: tuple[State, State]) -> PairState:
        """Of two states of one stream."""
        first, second = parts
        return PairState(first.tensors + second.tensors, first.length, first.made_by + second.made_by, parts=parts)

    def to(self, device: torch.device | str) -> PairState:
        """The same on another device."""
        return self.of((self.parts[0].to(device), self.parts[1].to(device)))

    def detach(self) -> PairState:
        """The same, cut off from the graph."""
        return self.of((self.parts[0].detach(), self.parts[1].detach()))

    def reorder(self, index: Tensor | Sequence[int]) -> PairState:
        """Samples by their index, repeats allowed."""
        return self.of((self.parts[0].reorder(index), self.parts[1].reorder(index)))


class MixedCore(AttentionCore):
    """Exact attention in some heads, another core in the others.

    Cost: quadratic for the exact heads; their state keeps every key.

    Args:
        exact: a core for the exact heads.
        linear: a core for the other heads.
        heads: numbers of the exact heads among all.
    """

    delegates = True

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

    @property
    def cores(self) -> tuple[AttentionCore, AttentionCore]:
        """Exact, linear."""
        return self.exact, self.linear

    @property
    def feature_dim(self) -> int | None:
        """Of the linear heads."""
        return self.linear.feature_dim

    @property
    def mixes_queries(self) -> bool:  # type: ignore[override]
        """As the linear core does."""
        return self.linear.mixes_queries

    def resample(self, draw: int | None = None) -> None:
        """Of the linear heads."""
        self.linear.resample(draw)

    def refusal(self, causal: bool) -> ValueError | None:
        """What the linear core says."""
        return self.linear.refusal(causal)

    def forward(self, *args: Any, scale: float | None = None, **options: Any) -> Any:
        """Attend; see `AttentionCore.forward`."""
        self._check_one_scale(scale)
        return super().forward(*args, scale=scale, **options)

    def _check_one_scale(self, scale: float | None) -> None:
        if scale is not None and self.exact.scale != self.linear.scale:
            raise ValueError(
                f"the heads have scales of their own, {self.exact.scale:g} and {self.linear.scale:g}, got one for all "
                f"of them, {scale!r}; leave it out."
            )

    def _split(self, x: Tensor, which: int) -> Tensor:
        """The heads of one kind; of grouped keys, those that they look at, one for each query head."""
        repeats = self.num_heads // x.shape[1]
        return x[:, [head // repeats for head in self.heads[which]]]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        back: Tensor = self.back  # type: ignore[assignment]
        return torch.cat(list(parts), 1)[:, back]

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        own: dict[str, Any] = {
            "is_causal": call.is_causal,
            "key_mask": call.key_mask,
            "scale": None if call.scale == self.scale else call.scale,
            "query_mask": call.query_mask,
            "return_state": call.streams,
        }
        outs: list[Tensor] = []
        states: list[State] = []
        for which, core in enumerate(self.cores):
            query, key, value = (self._split(x, which) for x in (call.query, call.key, call.value))
            if call.state is not None:
                assert isinstance(call.state, PairState)
                own["state"] = call.state.parts[which]
            found = core(query, key, value, **own, **self._bias(call, which))
            if call.streams:
                outs.append(found[0])
                states.append(found[1])
            else:
                outs.append(found)
        return self._join(outs), PairState.of((states[0], states[1])) if states else None

    def _bias(self, call: Call, which: int) -> dict[str, Any]:
        """The bias of these heads, as a call takes it."""
        bias = call.bias
        if bias is None:
            return {}
        rows = self.heads[which]
        return {
            "bias": bias.table[rows],
            "max_distance": bias.window,
            "slope": None if bias.slope is None else bias.slope[rows],
            "algorithm": bias.algorithm if which else None,
            "num_prefix": bias.layout.prefix,
        }

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
        """One token; see `AttentionCore.step`."""
        self._check_gate(gate, key)
        self._check_one_scale(scale)
        self._check_state(state)
        outs, states = [], []
        for which, core in enumerate(self.cores):
            out, after = core.step(
                self._split(query, which),
                self._split(key, which),
                self._split(value, which),
                state.parts[which] if isinstance(state, PairState) else None,
                bias=None if bias is None else bias[self.heads[which]],
                slope=None if slope is None else slope[self.heads[which]],
                scale=scale,
                key_mask=key_mask,
            )
            outs.append(out)
            states.append(after)
        return self._join(outs), PairState.of((states[0], states[1]))

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """A memory of each kind."""
        first, second = (
            core.remember(self._split(key, i), self._split(value, i), key_mask=key_mask)
            for i, core in enumerate(self.cores)
        )
        return PairState.of((first, second))

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context."""
        if not isinstance(memory, PairState):
            raise ValueError(f"recall needs what remember of this core returned, got {type(memory).__name__}.")
        return self._join([core.recall(self._split(query, i), memory.parts[i]) for i, core in enumerate(self.cores)])

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
        """Each core checks its own part when it attends; here only what concerns the whole."""
        self._check_state(state)

    @staticmethod
    def _check_state(state: State | None) -> None:
        if state is not None and not isinstance(state, PairState):
            raise ValueError(f"state must be one of this core's, got {type(state).__name__}; start with state=None.")
