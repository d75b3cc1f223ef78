"""The ranks that sequences are split over at the moment, if they are.

Process-wide and not of a thread: activation checkpointing recomputes layers in the threads of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernelformer.attention.ranks import Ranks

_ACTIVE: list[Ranks] = []


def active_ranks() -> Ranks | None:
    """The ranks of the innermost `split_over`; None where every process has whole sequences."""
    return _ACTIVE[-1] if _ACTIVE else None


@contextmanager
def split_over(ranks: Ranks) -> Iterator[Ranks]:
    """Let every attention see the tokens of all ranks."""
    _ACTIVE.append(ranks)
    try:
        yield ranks
    finally:
        _ACTIVE.remove(ranks)


def tokens_before(length: int) -> int:
    """How many tokens the ranks before this one hold, where each holds ``length`` of its own; 0 if nothing is split."""
    ranks = active_ranks()
    if ranks is None:
        return 0
    return ranks.starts(length)[ranks.rank]
