"""Byte-level language modelling of any file or folder of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kernelformer.errors import choice
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.data.text_files import TextFiles
from kernelformer_lab.data.windows import Windows
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.kinds import WindowTask


@dataclass(kw_only=True, eq=False)
class Bytes(WindowTask):
    """Predict the next byte; scored in bits per byte, over the predicted bytes.

    A window of n bytes predicts its last n - 1: bits per byte at length n have contexts of 1 to n - 1 bytes.

    Data: a file or folder, in splits as `data.text_files.TextFiles` says; None takes the standard library of the
    running Python. With the default shares enwik8 has the usual 90, 5 and 5 million bytes.

    Args:
        column: of ``.jsonl``, ``.csv`` and ``.tsv`` files, whose texts are modelled; None: the bytes as they are.
        pattern: which files of a folder, as a glob; default "**/*.py" for the standard library, else "**/*".

    Other options: see `WindowTask`.
    """

    column: str | None = None
    pattern: str | None = None

    name = "bytes"
    about = "byte-level language modelling of a file or folder; Python's own sources by default"
    model = "causal-lm"
    metric = "bits_per_byte"
    higher_is_better = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.files = TextFiles(
            self.data,
            column=self.column,
            pattern=self.pattern,
            validation_share=self.validation_share,
            test_share=self.test_share,
        )

    def settings(self) -> dict[str, Any]:
        """A byte is a token, and no token is padding."""
        return {"vocab_size": 256, "max_position_embeddings": self.length, "pad_token_id": None}

    def fingerprint(self) -> str:
        """Size and hash of all bytes, also of names in a folder."""
        return self.files.fingerprint()

    def remarks(self) -> list[str]:
        """Files left out, and tables that are modelled with their syntax."""
        return self.files.remarks()

    def split(self, name: str) -> Windows:
        """Windows of the split's bytes."""
        text = self.files.text(choice("split", name, SPLITS))
        return self.cut(text, name, where=self.files.path, unit="bytes")

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Bits per byte: the loss in bits instead of nats."""
        return {self.metric: outcome.loss / math.log(2)}
