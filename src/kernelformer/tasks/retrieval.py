"""Whether two texts belong together, byte by byte, as Long Range Arena's task Retrieval."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelformer.data.sources import Check, Rows, Source, label_value, spread, text_value
from kernelformer.errors import choice
from kernelformer.tasks.bytestrings import ByteTask, byte_value

PAIRS = ("rows", "halves")
_COLUMNS = {"rows": {"text1": "text1", "text2": "text2", "label": "label"}, "halves": {"text": "text"}}
_FORMAT = 1  # of the halves; to be raised when the same options come to mean other pairs


def halves(value: object) -> tuple[bytes, bytes]:
    """A check for texts of at least two characters; gives their halves in UTF-8.

    The cut is at the blank nearest to the middle, or in the middle itself if none is within a quarter of the text.
    """
    text = text_value(value).strip()
    if len(text) < 2:
        raise ValueError(f"must have at least two characters, one for each half, got {text!r}")
    middle = len(text) // 2
    near = (at for step in range(len(text) // 4 + 1) for at in (middle - step, middle + step))
    at = next((x for x in near if text[x].isspace()), middle)
    return text[:at].rstrip().encode(), text[at:].lstrip().encode()


def exchanged(lengths: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Whose second half goes with the first half of each text: its own, or that of a text as long.

    Texts are ordered by length, equal ones by a hash of (seed, row). Two neighbours are a couple, and of two couples in
    a row one, by a hash, exchanges second halves. So every half occurs once, and half of the texts keep their own.

    Args:
        lengths: (N), of the second halves.
        seed: of both hashes.

    Returns:
        (N) numbers of texts.
    """
    count = len(lengths)
    order = np.lexsort((spread(np.arange(count), seed), np.asarray(lengths)))
    couples = np.arange(count // 2)
    toss = spread(count + couples // 2, seed) < 0.5
    parted = couples[(couples + toss) % 2 == 1]
    one, other = order[2 * parted], order[2 * parted + 1]
    whose = np.arange(count)
    whose[one], whose[other] = other, one
    return whose


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
    first half of every text comes with a second half, its own (label 1) or another text's (label 0), as `exchanged`
    says. Neither a half nor its length tells the label: each occurs once, and texts that exchange halves are neighbours
    in length. Two texts with a half in common belong together, whoever's the other half is.

    Tokens: 0 is padding, byte b of the UTF-8 text is b + 1. Batches are padded to their longest text, not to
    ``length``, unless pad_to says so.

    Args:
        data: the place; None is enough to build a model.
        pairs: "rows", a pair a row, or "halves", of single texts.
        text1: name of the column with first texts.
        text2: name of the column with second texts.
        label: name of the column with labels.
        text: name of the column with single texts, for halves.
        labels: 2, for 0 and 1, or a list of two names.
        length: bytes of a text; longer ones are cut at the end, and `remarks` says how many.
        pad_to: length of every batch; None: the longest text's, rounded up to a multiple of 64, at most length.
        train_samples: at most so many rows, spread evenly over the split; None: all.
        validation_samples: the same for the validation.
        test_samples: the same for the test.
        validation_share: of the training rows where there is no validation split.
        test_share: of the rows of a single file.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        seed: of the division by shares, and of which halves are exchanged.
    """

    name = "retrieval"
    about = "whether two texts belong together, from their bytes, as Long Range Arena's Retrieval; needs data"
    model = "dual"
    inputs = ("input_ids", "other_input_ids")

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        pairs: str = "rows",
        text1: str = "text1",
        text2: str = "text2",
        label: str = "label",
        text: str = "text",
        labels: int | Sequence[str] = 2,
        length: int = 4000,
        pad_to: int | None = None,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        skip_bad: bool = False,
        seed: int = 0,
    ) -> None:
        self.pairs = choice("pairs", pairs, PAIRS)
        names = {"text1": text1, "text2": text2, "label": label, "text": text}
        self.columns = [names[x] for x in _COLUMNS[pairs]]
        for kind, own in _COLUMNS.items():
            for option, default in own.items():
                if kind != pairs and names[option] != default:
                    raise ValueError(
                        f"{option} names a column for pairs={kind!r}, got {option}={names[option]!r} and "
                        f"pairs={pairs!r}; leave it out, or give pairs={kind!r}."
                    )
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"text1, text2 and label must be three columns, got {', '.join(self.columns)}.")
        checks: list[Check] = [byte_value, byte_value, label_value(labels)] if pairs == "rows" else [halves]
        source = Source(
            data,
            dict(zip(self.columns, checks, strict=True)),
            layout=" and ".join(map(repr, self.columns)),
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
        )
        limits = {"train": train_samples, "validation": validation_samples, "test": test_samples}
        super().__init__(source, labels=labels, length=length, pad_to=pad_to, limits=limits)
        if self.classes != 2:
            raise ValueError(f"two texts belong together or not: labels must be 2 or two names, got {labels!r}.")

    def fingerprint(self) -> str:
        """Of the files, or of the hub's data set, and of the way halves are paired."""
        return super().fingerprint() + (f"; halves, format {_FORMAT}" if self.pairs == "halves" else "")

    def arrange(self, rows: Rows) -> tuple[list[list[bytes]], Sequence[int]]:
        """Two texts and a label a row, or two halves and whether they are of one text."""
        if self.pairs == "rows":
            first, second, labels = (rows[x] for x in self.columns)
            return [first, second], labels
        texts = rows[self.columns[0]]
        if len(texts) < 4:
            raise ValueError(
                f"pairs='halves' needs at least 4 texts in a split, so that there are both labels, got {len(texts)} in "
                f"{self.source.place}; add rows."
            )
        others = [texts[i] for i in exchanged([min(len(x), self.length) for _, x in texts], self.source.seed)]
        # Two copies of a text are as long as one another, so that they may well be a couple.
        labels = [int(mine[0] == other[0] or mine[1] == other[1]) for mine, other in zip(texts, others, strict=True)]
        return [[x for x, _ in texts], [x for _, x in others]], labels
