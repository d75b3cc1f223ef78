"""Passages of a text that come again farther on, so that what stands far back has to be found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelformer.errors import positive_int

SHORTEST, LONGEST = 12, 40  # tokens of a passage
SPACING = 128  # tokens of a row for each passage
TRIES = 8  # to find a place for one
BEGINNING = 2  # tokens of a copy that are too few to know it by
NUMBERED = 0.5  # of the passages get a number, which nothing but the first passage tells


@dataclass(frozen=True)
class Copy:
    """A passage and its copy.

    Args:
        first: where the passage begins.
        second: where its copy begins.
        length: tokens of both.
    """

    first: int
    second: int
    length: int

    @property
    def places(self) -> tuple[int, int]:
        """Where each of the two begins."""
        return self.first, self.second


@dataclass(frozen=True)
class Repeats:
    """How rows of tokens get passages that come again.

    A model that copies attends from a token of the second passage to what followed the same token in the first one:
    the sharp and far attention that ordinary text has little of.

    Args:
        share: of the rows that get some.
        gap: tokens between a passage and its copy, at least.
        numbers: token ids of numbers to put into passages, see `passkey.number_tokens`.
    """

    share: float = 1.0
    gap: int = 64
    numbers: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share of the rows must be 0 to 1, got {self.share!r}.")
        positive_int("gap", self.gap)

    def fits(self, length: int) -> bool:
        """Whether a row of so many tokens has room for a passage and its copy."""
        return length >= self.gap + 2 * SHORTEST

    def row(self, ids: Tensor, seed: int) -> tuple[Tensor, list[Copy]]:
        """Repeat passages of a row, or leave it as it is.

        Args:
            ids: (L).
            seed: of everything that is drawn.

        Returns:
            As many ids, and the copies; none where the row is too short for one.
        """
        gen = torch.Generator().manual_seed(seed)
        if float(torch.rand((), generator=gen)) >= self.share:
            return ids, []
        ids, copies = ids.clone(), list[Copy]()
        for _ in range(max(1, len(ids) // SPACING)):
            copy = self._place(len(ids), copies, gen)
            if copy is None:
                continue
            passage = ids[copy.first : copy.first + copy.length]
            if self.numbers and float(torch.rand((), generator=gen)) < NUMBERED:
                number = self.numbers[_draw(0, len(self.numbers), gen)][: copy.length - 2]
                place = _draw(1, copy.length - len(number), gen)
                passage[place : place + len(number)] = torch.tensor(number)
            ids[copy.second : copy.second + copy.length] = passage
            copies.append(copy)
        return ids, copies

    def _place(self, length: int, others: Sequence[Copy], gen: torch.Generator) -> Copy | None:
        """Find room for a passage and its copy beside others; None where there is none."""
        if not self.fits(length):
            return None
        for _ in range(TRIES):
            tokens = _draw(SHORTEST, min(LONGEST, (length - self.gap) // 2) + 1, gen)
            least = tokens + self.gap
            second = _draw(least, length - tokens + 1, gen)
            copy = Copy(_draw(0, second - least + 1, gen), second, tokens)
            if all(_apart(copy, other) for other in others):
                return copy
        return None


def recall_row(ids: Tensor, gap: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat passages of a row, and say where a model that copies looks.

        i = b + t looks at j = a + t + 1        passage from a on, its copy from b on, t from `BEGINNING` on

    Args:
        ids: (L).
        gap: see `Repeats`.
        seed: of the passages.

    Returns:
        Token ids (L), queries i (N) and keys j (N); N is 0 where the row is too short.
    """
    ids, copies = Repeats(gap=gap).row(ids, seed)
    empty = torch.zeros(0, dtype=torch.long)
    inside = [(x, torch.arange(BEGINNING, x.length - 1)) for x in copies]
    queries = torch.cat([empty, *(x.second + t for x, t in inside)])
    return ids, queries, torch.cat([empty, *(x.first + t + 1 for x, t in inside)])


def _apart(one: Copy, other: Copy) -> bool:
    return all(x + one.length <= y or y + other.length <= x for x in one.places for y in other.places)


def _draw(first: int, end: int, gen: torch.Generator) -> int:
    return int(torch.randint(first, end, (), generator=gen))
