"""Classification of texts byte by byte, as Long Range Arena's task Text."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kernelformer.data.sources import Rows, Source, label_value
from kernelformer.tasks.bytestrings import ByteTask, byte_value


class Text(ByteTask):
    """Tell the class of a text from its bytes; with the reviews of IMDb this is Long Range Arena's Text.

    Data: rows with a text and a label, one of

    - a folder with ``train``, ``test`` and perhaps ``validation``, each ``.jsonl`` (an object a line), ``.csv`` or
      ``.tsv`` (with a head line): ``{"text": "A fine film.", "label": 1}``;
    - one such file, divided by the shares;
    - ``hub:NAME``, a data set of the Hugging Face hub, such as ``hub:stanfordnlp/imdb``.

    Tokens: 0 is padding, byte b of the UTF-8 text is b + 1.

    Departure: batches are padded to their longest text, not to ``length``, unless pad_to says so. Samples keep their
    order, so 32 reviews of IMDb still make a batch of 3,800 positions, of which a third are real; with ``length=1024``
    83% are, and 47% of the reviews are cut.

    Args:
        data: the place; None is enough to build a model.
        text: name of the column with texts.
        label: name of the column with labels.
        labels: how many there are, numbered from 0, or a list of their names.
        length: bytes of a text; longer ones are cut at the end, and `remarks` says how many.
        pad_to: length of every batch; None: the longest text's, rounded up to a multiple of 64, at most length.
        train_samples: at most so many texts, spread evenly over the split; None: all.
        validation_samples: the same for the validation.
        test_samples: the same for the test.
        validation_share: of the training rows where there is no validation split.
        test_share: of the rows of a single file.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        seed: of the division by shares.
    """

    name = "text"
    about = "class of a text from its bytes, as Long Range Arena's Text (IMDb); needs data"
    model = "classifier"

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        text: str = "text",
        label: str = "label",
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
        if text == label:
            raise ValueError(f"text and label must be two columns, got {text!r} for both.")
        source = Source(
            data,
            {text: byte_value, label: label_value(labels)},
            layout=f"{text!r} and {label!r}",
            skip_bad=skip_bad,
            validation_share=validation_share,
            test_share=test_share,
            seed=seed,
        )
        limits = {"train": train_samples, "validation": validation_samples, "test": test_samples}
        super().__init__(source, labels=labels, length=length, pad_to=pad_to, limits=limits)
        self.text, self.label = text, label

    def arrange(self, rows: Rows) -> tuple[list[list[bytes]], Sequence[int]]:
        """One text and its label a row."""
        return [rows[self.text]], rows[self.label]
