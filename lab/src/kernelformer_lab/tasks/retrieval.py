"""Classification of pairs of texts, byte by byte, as Long Range Arena's task Retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelformer.errors import choice
from kernelformer_lab.data.byte_texts import FORMAT, byte_value, exchange_halves, halves
from kernelformer_lab.data.sources import Check, Rows, label_value
from kernelformer_lab.tasks.kinds import ByteTask

# Options that name columns, by kind of pairs, with their defaults.
PAIRS = {"rows": {"text1": "text1", "text2": "text2", "label": "label"}, "halves": {"text": "text"}}


@dataclass(kw_only=True, eq=False)
class Retrieval(ByteTask):
    """Tell from their bytes whether two texts belong together, by one encoder for both.

    With pairs of papers of the ACL Anthology Network (AAN), of which one cites the other or not, this is Long Range
    Arena's Retrieval. Data: rows with two texts and a label, one of

    - a folder with ``train``, ``test`` and perhaps ``validation``, each ``.jsonl`` (an object a line), ``.csv`` or
      ``.tsv`` (with a head line): ``{"text1": "We parse ...", "text2": "Parsing is ...", "label": 1}``;
    - one such file, divided by the shares;
    - ``hub:NAME``, a data set of the Hugging Face hub.

    The files of Long Range Arena, new_aan_pairs.train.tsv and so on, lack a head line: put "label id1 id2 text1 text2",
    separated by tabs, in front, and call them train.tsv, validation.tsv (theirs is "eval") and test.tsv.

    ``pairs="halves"`` is ours, of no paper, for those who have no such pairs: rows are single texts, as of IMDb. The
    first half of every text comes with a second half, its own (label 1) or another text's (label 0), as
    `exchange_halves` says. Neither a half nor its length tells the label: each occurs once, and texts that exchange
    halves are neighbours in length. Two texts with a half in common belong together, independent of the other half.

    Args:
        pairs: "rows", a pair a row, or "halves", of single texts.
        text1: name of the column with first texts.
        text2: name of the column with second texts.
        label: name of the column with labels, of rows.
        text: name of the column with single texts, for halves.
        labels: 2, for 0 and 1, or a list of two names.
        seed: of the division by shares, and of which halves are exchanged.

    Other options: see `ByteTask`.
    """

    pairs: str = "rows"
    text1: str = "text1"
    text2: str = "text2"

    name = "retrieval"
    about = "whether two texts belong together, from their bytes, as Long Range Arena's Retrieval; needs data"
    model = "dual"
    inputs = ("input_ids", "other_input_ids")

    def __post_init__(self) -> None:
        choice("pairs", self.pairs, PAIRS)
        super().__post_init__()
        if self.classes != 2:
            raise ValueError(f"two texts belong together or not: labels must be 2 or two names, got {self.labels!r}.")

    def columns(self) -> dict[str, Check]:
        """Two texts and a label, or a text whose halves are used."""
        for kind, options in PAIRS.items():
            for option, default in options.items():
                if kind != self.pairs and getattr(self, option) != default:
                    raise ValueError(
                        f"{option} names a column for pairs={kind!r}, got {option}={getattr(self, option)!r} and "
                        f"pairs={self.pairs!r}; leave it out, or give pairs={kind!r}."
                    )
        if self.pairs == "halves":
            return {self.text: halves}
        columns = [self.text1, self.text2, self.label]
        if len(set(columns)) < len(columns):
            raise ValueError(f"text1, text2 and label must be three columns, got {', '.join(columns)}.")
        return dict(zip(columns, (byte_value, byte_value, label_value(self.labels)), strict=True))

    def fingerprint(self) -> str:
        """The fingerprint of the files, or of the hub's data set, and of the way halves are paired."""
        return super().fingerprint() + (f"; halves, format {FORMAT}" if self.pairs == "halves" else "")

    def arrange(self, rows: Rows) -> tuple[list[list[bytes]], Sequence[int]]:
        """Two texts and a label a row, or two halves and whether they are of one text."""
        if self.pairs == "rows":
            first, second, labels = (rows[x] for x in self.columns())
            return [first, second], labels
        texts = rows[self.text]
        if len(texts) < 4:
            raise ValueError(
                f"pairs='halves' needs at least 4 texts in a split, so that there are both labels, got {len(texts)} in "
                f"{self.source.location}; add rows."
            )
        others = [texts[i] for i in exchange_halves([min(len(x), self.length) for _, x in texts], self.seed)]
        # Two copies of a text are as long as one another, so that they may well be a couple.
        labels = [int(mine[0] == other[0] or mine[1] == other[1]) for mine, other in zip(texts, others, strict=True)]
        return [[x for x, _ in texts], [x for _, x in others]], labels
