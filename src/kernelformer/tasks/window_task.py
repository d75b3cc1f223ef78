"""Tasks on windows of text: what byte-level and sub-word language modelling have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from kernelformer.data.windows import ConsecutiveWindows, RandomWindows, Windows
from kernelformer.errors import integer, positive_int
from kernelformer.tasks.options import DataOption, SampleOptions, ShareOptions


@dataclass(kw_only=True, eq=False)
class WindowTask(DataOption, ShareOptions, SampleOptions):
    """A language model of windows of text: at random places for training, side by side for evaluation.

    Args:
        length: bytes or tokens of a sample.
        samples: training samples, at random places; sample i is a function of (seed, i).
        validation_share: of the bytes of a file, of the files of a folder, or of rows without splits.
        test_share: the same for the test; training has the rest.

    Options of all tasks, and where data is: see `tasks.options`.
    """

    length: int = 512
    samples: int = 1_000_000
    validation_share: float = 0.05
    test_share: float = 0.05

    shortest: ClassVar[int] = 2  # window from which something can be learnt: one token alone predicts none

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = integer("length", self.length, at_least=self.shortest)
        self.samples = positive_int("samples", self.samples)

    def cut(self, tokens: NDArray[Any], split: str, *, where: object, unit: str) -> Windows:
        """Windows of the tokens of a split.

        Args:
            tokens: (N), all of the split.
            split: its name.
            where: the data, for the message.
            unit: what tokens are, "bytes" or "tokens".
        """
        if len(tokens) < self.length:
            raise ValueError(
                f"the {split} split of {where} has {len(tokens)} {unit}, less than one sample of "
                f"length={self.length}; give more text, a smaller length"
                f"{'' if split == 'train' else f' or a larger {split}_share'}."
            )
        if split == "train":
            return RandomWindows(tokens, self.length, self.samples, self.seed)
        return ConsecutiveWindows(tokens, self.length, self.limits[split])
