"""Rows that cannot be used: the first is an error, or all are left out and counted."""

from __future__ import annotations

from kernelformer.errors import flag


class BadRows:
    """Handler of bad rows of one file or data set.

    Args:
        where: file or data set, for the message.
        skip: leave them out instead of raising at the first.
    """

    def __init__(self, where: object, skip: bool) -> None:
        self.where, self.skip = str(where), flag("skip_bad", skip)
        self.count, self.first = 0, ""

    def add(self, position: str, reason: str) -> None:
        """Count a bad row at a position, such as ``line 7``, or raise."""
        if not self.skip:
            raise ValueError(
                f"{self.where}, {position}: {reason.rstrip('.')}; mend it, or leave bad rows out by --skip-bad "
                f"(skip_bad=True)."
            )
        self.first = self.first or f"{position}: {reason}"
        self.count += 1

    def remarks(self, good: int) -> list[str]:
        """How many were left out beside so many good ones: one sentence, or none."""
        if not self.count:
            return []
        rows = f"{self.count:,} of {self.count + good:,} rows"
        return [f"left out {rows} of {self.where} as bad; the first: {self.first}"]
