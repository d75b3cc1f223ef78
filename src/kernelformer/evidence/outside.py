"""Items of the papers that are not in the queue: where else they stand, or why they were not attempted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outside:
    """An item of a paper that the queue does not measure.

    Args:
        paper: a key of `evidence.base.PAPERS`.
        where: table, figure or theorem.
        reason: the study or test that has it, or why nobody has tried.
    """

    paper: str
    where: str
    reason: str


GPU = "Not attempted: needs GPUs"
OUTSIDE: tuple[Outside, ...] = ()
