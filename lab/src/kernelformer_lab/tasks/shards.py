"""Language modelling of token shards that ``kernelformer prepare`` has written."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernelformer.errors import choice, flag, integer
from kernelformer.files import write_text
from kernelformer_lab.data.files import existing
from kernelformer_lab.data.shards import ShardIndex, ShardWindows, TokenShards, read_index, verify
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.data.tokenization import TOKENIZER
from kernelformer_lab.tasks.base import DataOption, Outcome, SampleOptions
from kernelformer_lab.tasks.corpus import perplexity


@dataclass(kw_only=True, eq=False)
class Shards(DataOption, SampleOptions):
    """Predict the next token; scored by perplexity, over the predicted tokens.

    Data: a folder of ``kernelformer prepare``, with its splits. It is mapped, not read, and may be larger than the
    memory. Windows of ``length`` tokens share one token with the next, so that each token is predicted once in an epoch
    (`data.shards.ShardWindows`). Training takes them in an order that is a function of the run's seed and of the
    position in it (`data.shards.order_at`): step t has windows t B to (t + 1) B - 1 of the order, on any number of
    processes and workers and after any resume.

    Per byte of the original text, and so for any vocabulary, as in the task "words":

        bits_per_byte = loss * tokens / bytes / ln 2

    Args:
        length: tokens of a sample, at least 2.
        documents: documents of a window do not see each other; for methods that take ``segment_ids``.
        verify: compare all files with their hashes before a run starts; False: only their sizes, where reading
            everything takes too long.

    Options of all tasks, and where data is: see `tasks.base`.
    """

    length: int = 512
    documents: bool = False
    verify: bool = True

    name = "shards"
    about = "language modelling of token shards, of any size; --data is a folder of `kernelformer prepare`"
    model = "causal-lm"
    metric = "perplexity"
    higher_is_better = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = integer("length", self.length, at_least=2)
        self.documents, self.verify = flag("documents", self.documents), flag("verify", self.verify)
        layout = "a folder of shards, of `kernelformer prepare`"
        self.folder = None if self.data is None else existing(Path(self.data).expanduser(), layout)

    @cached_property
    def index(self) -> ShardIndex:
        """Index of the folder."""
        return read_index(self._place())

    def settings(self) -> dict[str, Any]:
        """A token of the vocabulary at each position, of bytes where there is no data yet; none is padding."""
        size = 256 if self.folder is None else self.index.vocabulary_size
        return {"vocab_size": size, "max_position_embeddings": self.length, "pad_token_id": None}

    def fingerprint(self) -> str:
        """Hash of all files, as the index has it; they are compared with it first if ``verify`` says so."""
        if self.verify:
            verify(self._place(), self.index)
        return f"{self._place().name}: {self.index.fingerprint()}"

    def split(self, name: str) -> ShardWindows:
        """Windows of the split's tokens."""
        tokens = TokenShards(self._place(), self.index, choice("split", name, SPLITS))
        if len(tokens) < self.length:
            raise ValueError(
                f"the {name} split of {self.folder} has {len(tokens)} tokens, less than one sample of "
                f"length={self.length}; give a smaller length, or prepare more text"
                f"{'' if name == 'train' else f' or a larger {name}_share'}."
            )
        return ShardWindows(tokens, self.length, self.limits[name], documents=self.documents)

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Perplexity, accuracy, bits per token; per byte of text where the outcome says of which split it is."""
        bits = outcome.loss / math.log(2)
        scores = {self.metric: perplexity(outcome.loss), "accuracy": outcome.right, "bits_per_token": bits}
        if outcome.split:
            split = self.index.splits[outcome.split]
            scores["bits_per_byte"] = bits * split.tokens / split.text_bytes
        return scores

    def save_extra(self, folder: Path) -> None:
        """Write the tokenizer into the folder of a saved model, which needs it to read and write."""
        if self.index.tokenizer["file"] is not None:
            write_text(folder / TOKENIZER, (self._place() / self.index.tokenizer["file"]).read_bytes().decode())

    def load_extra(self, folder: Path) -> None:
        """Check that a saved model has the tokenizer of these shards.

        Raises:
            ValueError: it has another one.
        """
        path = folder / TOKENIZER
        text = path.read_bytes() if path.is_file() else b"bytes"
        if hashlib.sha256(text).hexdigest() != self.index.tokenizer["sha256"]:
            raise ValueError(
                f"the model in {folder} has another tokenizer than the shards in {self.folder}; prepare the texts with "
                f"--tokenizer {folder}."
            )

    def _place(self) -> Path:
        if self.folder is None:
            raise ValueError("this task needs data, got None; give a folder of `kernelformer prepare` by --data.")
        return self.folder
