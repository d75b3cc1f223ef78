"""Language modelling of text by sub-words, with scores per word that vocabularies can be compared by."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernelformer_lab.data.arrays import cache_file, cached_arrays
from kernelformer_lab.data.windows import Windows
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.tasks.corpus import Corpus, perplexity


class Sizes(NamedTuple):
    """Amount of text of a split.

    Args:
        words: separated by white space, in the text as it was before it was tokenized.
        size: bytes of the same text in UTF-8.
    """

    words: int
    size: int


@dataclass(kw_only=True, eq=False)
class Words(Corpus):
    """Predict the next token; scored by perplexity, over the predicted tokens.

    A window of n tokens predicts its last n - 1: none sees what is before it (NPRF with RPE, App. A.2).

    A perplexity per token says little of another vocabulary's. Therefore also, of the whole split that is scored
    (Performer, App. A.1.1),

        word_perplexity = exp(loss * tokens / words)
        bits_per_byte = loss * tokens / bytes / ln 2

    with tokens: all of the split, each document's <eos> included; words: what white space separates in the original
    text, where neither <eos> nor the end of a line is one; bytes: of the original text in UTF-8. The loss may be of
    fewer windows, the ratios never are. Where a vocabulary loses something (``lowercase``, "wordpiece"), both are of
    what is left, which is easier.

    Data, and what it costs: see `tasks.corpus.Corpus`. Rows without text, such as the blank lines of WikiText-103
    (``hub:Salesforce/wikitext:wikitext-103-raw-v1``), are passed over.

    Departures: training windows are at random places instead of one after the other; PG-19's vocabulary is by byte
    pairs, the paper's by unigrams, unless ``tokenizer`` brings one. Perplexities of WikiText-103 are usually published
    for a vocabulary of whole words, in which the end of a line is one more.

    Options: see `Corpus`; ``length`` is at least 2.
    """

    name = "words"
    about = "language modelling by sub-words; --data is a text file, a folder of .txt, rows with texts, or hub:NAME"
    model = "causal-lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes: dict[str, Sizes] = {}

    def split(self, name: str) -> Windows:
        """Windows of the split's tokens."""
        windows = self.windows(name)
        if name != "train":
            self.sizes(name)  # now, and not in the midst of a training; those of a large training split are not needed
        return windows

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Perplexity, accuracy, bits per token; per word and byte where the outcome says of which split it is."""
        scores = super().score(outcome)
        if not outcome.split:
            return scores
        total, sizes = outcome.loss * len(self.tokens(outcome.split)), self.sizes(outcome.split)
        per_word = perplexity(total / sizes.words) if sizes.words else math.inf
        return {**scores, "word_perplexity": per_word, "bits_per_byte": total / sizes.size / math.log(2)}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of guessing by frequency in the training split, each token counted once more."""
        data, size = self.windows(split), self.vocabulary().size
        share = np.bincount(self.tokens("train"), minlength=size) + 1.0
        share /= share.sum()
        labels = np.zeros(size)
        for first in range(0, len(data), 256):
            predicted = data.gather(np.arange(first, min(first + 256, len(data))))[:, 1:]
            labels += np.bincount(predicted.ravel(), minlength=size)
        labels /= labels.sum()
        outcome = Outcome(-float(labels @ np.log(share)), float(labels[share.argmax()]), split=split)
        return {"frequency of tokens": self.score(outcome)}

    def sizes(self, split: str) -> Sizes:
        """Words and bytes of a split; from the cache, or counted now."""
        if split not in self._sizes:
            record = json.dumps([split, self.texts_record()])
            self._sizes[split] = cached_arrays(
                cache_file(self.cache_path, "sizes", record),
                record,
                make=lambda: {"sizes": np.array(self._counted(split), np.int64)},
                read=lambda arrays: Sizes(*map(int, arrays["sizes"])),
            )
        return self._sizes[split]

    def _counted(self, split: str) -> Sizes:
        words = size = 0
        inside = False  # of a word that began in the piece before
        for text, ends in self.pieces(split):
            words += len(text.split()) - (inside and not text[0].isspace())
            size += len(text.encode())
            inside = not ends and not text[-1].isspace()
        return Sizes(words, size)
