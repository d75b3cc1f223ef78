"""Classification of texts byte by byte, as Long Range Arena's task Text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelformer_lab.data.byte_texts import byte_value
from kernelformer_lab.data.sources import Check, Rows, label_value
from kernelformer_lab.tasks.kinds import ByteTask


@dataclass(kw_only=True, eq=False)
class Text(ByteTask):
    """Tell the class of a text from its bytes; with the reviews of IMDb this is Long Range Arena's Text.

    Data: rows with a text and a label, one of

    - a folder with ``train``, ``test`` and perhaps ``validation``, each ``.jsonl`` (an object a line), ``.csv`` or
      ``.tsv`` (with a head line): ``{"text": "A fine film.", "label": 1}``;
    - one such file, divided by the shares;
    - ``hub:NAME``, a data set of the Hugging Face hub, such as ``hub:stanfordnlp/imdb``.

    IMDb has no validation split: a tenth of its training reviews is one, unless ``validation_split="test"``, which is
    what Long Range Arena does.

    Departure: batches are padded to their longest text, not to ``length``, unless pad_to says so. Samples keep their
    order, so 32 reviews of IMDb still make a batch of 3,800 positions, of which a third are real; with ``length=1024``
    83% are, and 47% of the reviews are cut.

    Options: see `ByteTask`.
    """

    name = "text"
    about = "class of a text from its bytes, as Long Range Arena's Text (IMDb); needs data"
    model = "classifier"

    def columns(self) -> dict[str, Check]:
        """A text and a label."""
        if self.text == self.label:
            raise ValueError(f"text and label must be two columns, got {self.text!r} for both.")
        return {self.text: byte_value, self.label: label_value(self.labels)}

    def arrange(self, rows: Rows) -> tuple[list[list[bytes]], Sequence[int]]:
        """One text and its label a row."""
        return [rows[self.text]], rows[self.label]
