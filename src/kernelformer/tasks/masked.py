"""Masked language modelling of text: hidden tokens are to be found from both sides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.corpus import Corpus
from kernelformer.data.sources import mixed, spread
from kernelformer.data.tokenization import Vocabulary
from kernelformer.errors import number
from kernelformer.tasks.base import SPLITS, Outcome, Sample
from kernelformer.tasks.bytes import Windows

HIDDEN, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is
IGNORED = -100

Int64 = NDArray[np.int64]


class Hidden(Dataset[Sample]):
    """Windows of tokens, some of which are hidden; a batch is a few operations.

    Which tokens, and what becomes of them, is a function of (seed, split, index, position).

    Args:
        windows: where the windows are.
        tokens: (N) of the split.
        words: the vocabulary.
        share: of the tokens is chosen.
        keys: three numbers that the choices depend on.
    """

    def __init__(
        self, windows: Windows, tokens: NDArray[Any], words: Vocabulary, share: float, keys: list[int]
    ) -> None:
        self.windows, self.tokens, self.share, self.keys = windows, tokens, share, keys
        self.mask, self.ordinary = cast(int, words.mask), words.ordinary()
        self.fixed = np.ones(words.size, bool)
        self.fixed[self.ordinary] = False

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        ids, labels = self.batch(indices)
        rows = zip(torch.from_numpy(ids), torch.from_numpy(labels), strict=True)
        return [{"input_ids": x, "labels": y} for x, y in rows]

    def batch(self, indices: Sequence[int]) -> tuple[Int64, Int64]:
        """Tokens as the model sees them, and labels, both (B, L)."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"samples are numbered from 0 to {len(self) - 1}, got {list(indices)}.")
        place = np.arange(self.windows.length)
        whole = self.tokens[self.windows.places(chosen)[:, None] + place].astype(np.int64)
        return self.hide(whole, chosen[:, None] * self.windows.length + place)

    def hide(self, whole: Int64, number: Int64) -> tuple[Int64, Int64]:
        """Tokens (B, L), each with a number of its own; gives inputs and labels."""
        chance = spread(number, self.keys[0])
        chance[self.fixed[whole]] = 2.0  # special tokens are not hidden
        chosen = chance < self.share
        chosen[np.arange(len(whole)), chance.argmin(1)] = True  # at least one: no label, no mean loss
        labels = np.where(chosen, whole, IGNORED)
        number, wanted = number[chosen], whole[chosen]
        fate = spread(number, self.keys[1])
        seen = np.where(fate < HIDDEN, self.mask, wanted)
        other = (fate >= HIDDEN) & (fate < HIDDEN + REPLACED)
        seen[other] = self.ordinary[(spread(number[other], self.keys[2]) * len(self.ordinary)).astype(np.int64)]
        ids = whole.copy()
        ids[chosen] = seen
        return ids, labels


class Masked(Corpus):
    """Find the hidden tokens of a text; scored by perplexity, over the chosen tokens.

    Of the tokens of a window 15% are chosen; of these 80% become <mask>, 10% another token, any of the vocabulary with
    the same probability, and 10% stay. At least one is chosen in each window. Masks of validation and test are fixed.

    Data, and what it costs: see `data.corpus.Corpus`. Windows pay no heed to <eos>, but it is never hidden.

    Departures from BERT: there is no second task beside this one, and training windows are at random places instead of
    one after the other, so that no two epochs are alike.

    Args:
        mask_share: of the tokens is chosen.
        tokenizer: as all others in `Corpus`; it must have a token for masks.
        seed: of masks too.
    """

    name = "masked"
    about = "masked language modelling; --data is a text file, a folder of .txt, rows with texts, or hub:NAME"
    model = "masked-lm"

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        text: str = "text",
        pattern: str | None = None,
        length: int = 512,
        samples: int = 1_000_000,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        mask_share: float = 0.15,
        vocab_size: int | None = None,
        kind: str = "bpe",
        lowercase: bool = False,
        tokenizer: str | None = None,
        validation_share: float = 0.05,
        test_share: float = 0.05,
        skip_bad: bool = False,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.share = number("mask_share", mask_share, above=0)
        if self.share >= 1:
            raise ValueError(f"mask_share must be below 1, so that something is left to see, got {mask_share}.")
        super().__init__(
            data=data,
            text=text,
            pattern=pattern,
            length=length,
            samples=samples,
            validation_samples=validation_samples,
            test_samples=test_samples,
            vocab_size=vocab_size,
            kind=kind,
            lowercase=lowercase,
            tokenizer=tokenizer,
            validation_share=validation_share,
            test_share=test_share,
            skip_bad=skip_bad,
            seed=seed,
            cache=cache,
        )
        if self.special.mask is None:
            raise ValueError(f"{tokenizer} has no token for what is hidden; add <mask> or [MASK] to it.")

    def split(self, name: str) -> Hidden:
        """Windows of the split's tokens, some of them hidden."""
        windows = self.windows(name)
        seed = mixed(np.array([self.seed], np.uint64))
        keys = mixed(seed + np.arange(9).astype(np.uint64)).reshape(3, 3)
        return Hidden(windows, self.tokens(name), self.vocabulary(), self.share, keys[SPLITS.index(name)].tolist())

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and labels, both (B, L); labels are -100 where nothing was hidden."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """What comes of guessing by frequency in the training split, each token counted once more."""
        data, words = self.split(split), self.vocabulary()
        counts = np.bincount(self.tokens("train"), minlength=words.size)[words.ordinary()] + 1
        share = np.zeros(words.size)
        share[words.ordinary()] = counts / counts.sum()
        loss = right = total = 0.0
        for first in range(0, len(data), 256):
            labels = data.batch(range(first, min(first + 256, len(data))))[1]
            labels = labels[labels != IGNORED]
            loss -= float(np.log(share[labels]).sum())
            right += float((labels == share.argmax()).sum())
            total += len(labels)
        return {"frequency of tokens": self.score(Outcome(loss / total, right / total))}
