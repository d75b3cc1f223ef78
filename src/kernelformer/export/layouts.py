"""States as the flat lists of tensors that a graph takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from kernelformer.attention import State
from kernelformer.attention.state import MadeBy
from kernelformer.modules.growing import GrowingCore
from kernelformer.modules.mixed import PairState


@dataclass(frozen=True)
class Layout:
    """What a state is beside its tensors.

    Args:
        made_by: see `State`.
        count: of its tensors.
        grows: whether it keeps every key; its tensors are keys, values and mask then.
        parts: of heads of two kinds.
    """

    made_by: MadeBy
    count: int
    grows: bool
    parts: tuple[Layout, ...] = ()

    @staticmethod
    def of(state: State, core: nn.Module) -> Layout:
        """That of a state which this core has made."""
        parts: tuple[Layout, ...] = ()
        if isinstance(state, PairState):
            pairs = zip(state.parts, (core.exact, core.linear), strict=True)
            parts = tuple(Layout.of(x, part) for x, part in pairs)  # type: ignore[arg-type]
        return Layout(state.made_by, len(state.tensors), isinstance(core, GrowingCore), parts)

    def state(self, tensors: Sequence[Tensor], length: int) -> State:
        """A state of these tensors."""
        if not self.parts:
            return State(tuple(tensors), length, self.made_by)
        first, second = self.parts
        middle = first.count
        return PairState.of((first.state(tensors[:middle], length), second.state(tensors[middle:], length)))

    @property
    def token_axes(self) -> list[int | None]:
        """For each tensor the axis along which it grows, if it does."""
        if self.parts:
            return [axis for x in self.parts for axis in x.token_axes]
        axes: list[int | None] = [2, 2, 1]
        return axes[: self.count] if self.grows else [None] * self.count


@dataclass
class Seen:
    """What a traced call has found out; attributes of the module itself are as before after `torch.export`."""

    layouts: list[Layout] = field(default_factory=list)
    output: str = ""


def state_names(layouts: Sequence[Layout]) -> list[str]:
    """Names of the tensors that go from token to token: the position, and those of the states."""
    return ["position", *(f"state_{i}_{n}" for i, x in enumerate(layouts) for n in range(x.count))]


def state_axes(layouts: Sequence[Layout]) -> list[int | None]:
    """For each tensor of all states the axis along which it grows, if it does."""
    return [axis for x in layouts for axis in x.token_axes]


def past_length(layouts: Sequence[Layout], tensors: Sequence[Tensor]) -> int:
    """Tokens that states which keep every key hold; a state of constant size has no use for its length, which is 1."""
    pairs = zip(tensors, state_axes(layouts), strict=True)
    return next((x.shape[axis] for x, axis in pairs if axis is not None), 1)
