"""Translation of sentences, scored by BLEU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data.batching import check_limits, padded, spread_evenly
from kernelformer.data.sentence_pairs import Pairs, Parallel, Tokens
from kernelformer.data.sources import Rows, hash_files
from kernelformer.data.tokenization import (
    TOKENIZER,
    Special,
    Vocabulary,
    load_tokenizer,
    special,
    tokenizer_file,
    vocabulary,
    vocabulary_size,
)
from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task, cache_folder

VOCABULARY = 10_000
_ROUND = 8  # batches have a multiple of this length, so that there are few different shapes
_IGNORED = -100


class Guide:
    """What `generate` may write: no special tokens, and after so many tokens, a number for each sentence, the end.

    The ends are each sentence's own, so that what else is in the batch changes no translation.

    Args:
        limits: (B) tokens, the end counts.
        beams: rows of the scores for each sentence.
        tokens: the vocabulary.
    """

    def __init__(self, limits: Tensor, beams: int, tokens: Vocabulary) -> None:
        self.limits, self.first = limits.repeat_interleave(beams), int(limits.min())
        self.eos, self.size = tokens.eos, tokens.size
        never = np.setdiff1d(np.arange(tokens.size), [*tokens.ordinary(), tokens.eos])
        self.never = torch.from_numpy(never).to(limits.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B * beams, vocabulary) of what comes after input_ids (B * beams, 1 + written); changed in place."""
        scores[:, self.never] = -torch.inf
        scores[:, self.size :] = -torch.inf
        if input_ids.shape[1] >= self.first:  # the start token is not written, so this counts the next one
            over = self.limits <= input_ids.shape[1]
            scores[over] = -torch.inf
            scores[over, self.eos] = 0.0
        return scores


class Translation(Task):
    """Translate sentences; scored by BLEU (sacrebleu, plain text) of what beam search writes.

    Data: a folder with ``train``, ``validation`` and ``test``, each ``.jsonl``, ``.csv`` or ``.tsv`` with two columns,
    or each two plain files such as ``train.en`` and ``train.de``, line by line; one such table, divided by shares; or
    ``hub:NAME:CONFIGURATION``. A column ``translation`` with ``{"en": ..., "de": ...}`` counts as two.

    Both languages share one vocabulary, which is trained on the training split (kernelized-rpe Sec. 4.3: byte pair
    encoding, 10,000 tokens). A sample is the source's tokens and <eos>, with the target's tokens and <eos> for labels;
    the decoder starts with <bos>. Training pairs of more than ``length`` tokens on either side are left out. Others
    are never left out: the source is cut, and so are the labels, but BLEU compares with the whole reference.

    Each evaluation gives perplexity and accuracy, of tokens after the right ones. BLEU and chrF are made by `judge`, at
    the end: a search with 5 beams and a length penalty of 1.2 (kernelized-rpe App. A.3: score / length^1.2), that ends
    when as many translations as beams are finished, or else at 2 n + 10 tokens for a source of n.

    Departures: the paper's BLEU is of tokenized text; here texts are compared as they are, which gives other numbers.

    Args:
        data: the place; a sample has the columns ``source`` and ``target``.
        source: column, or ending of plain files, of what is translated.
        target: the same for what it is translated to.
        length: tokens of a source, and of a target, with <eos>.
        vocab_size: at most so many tokens; None: 10,000, or what ``tokenizer`` has.
        kind: of the vocabulary: "bpe", "wordpiece" or "bytes".
        tokenizer: a ``tokenizer.json`` to be used instead, or a folder with one.
        lowercase: capital letters become small, and BLEU does not see them.
        beams: of the search; 1 takes the likeliest token each time.
        length_penalty: above 0; larger ones prefer longer translations.
        bleu_samples: translate at most so many, spread evenly over the split; None: all.
        train_samples: at most so many pairs, spread evenly over the split; None: all. The vocabulary is theirs too.
        validation_samples: the same for the validation.
        test_samples: the same for the test.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        validation_share: of the training pairs where there is no validation split.
        test_share: of the rows of one file.
        seed: of the division.
        cache: folder for the vocabulary once trained; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    name = "translation"
    about = "translate sentences of parallel text, given as --data; BLEU by beam search"
    model = "seq2seq"
    metric = "bleu"
    higher_is_better = True

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        source: str = "en",
        target: str = "de",
        length: int = 256,
        vocab_size: int | None = None,
        kind: str = "bpe",
        tokenizer: str | os.PathLike[str] | None = None,
        lowercase: bool = False,
        beams: int = 5,
        length_penalty: float = 1.2,
        bleu_samples: int | None = None,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        skip_bad: bool = False,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in {"source": source, "target": target}.items():
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be the name of a column, such as 'en', got {value!r}.")
        if source == target:
            raise ValueError(f"source and target must be different columns, got {source!r} for both.")
        self.source, self.target = source, target
        self.length = integer("length", length, at_least=2)  # a token and <eos>
        place = None if tokenizer is None else os.fspath(tokenizer)
        if vocab_size is None and place is None and kind != "bytes":
            vocab_size = VOCABULARY
        self.words: dict[str, Any] = {"tokenizer": place, "kind": kind, "lowercase": lowercase}
        self.words["vocab_size"] = vocab_size
        self.size = vocabulary_size(**self.words)
        self.special = special(place)
        self.beams, self.bleu_samples = positive_int("beams", beams), bleu_samples
        self.length_penalty = number("length_penalty", length_penalty, above=0)
        if bleu_samples is not None:
            positive_int("bleu_samples", bleu_samples)
        self.limits = check_limits({"train": train_samples, "validation": validation_samples, "test": test_samples})
        shares = {"validation_share": validation_share, "test_share": test_share}
        self.pairs = Parallel(data, source, target, skip_bad=skip_bad, seed=seed, **shares)
        self.cache = cache_folder() if cache is None else Path(os.fspath(cache)).expanduser()
        self._vocabulary: Vocabulary | None = None
        self._splits: dict[str, Pairs] = {}
        self._remarks: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """An encoder-decoder with one table of tokens, that starts with <bos> and ends with <eos>."""
        return {
            "vocab_size": self.size,
            "max_position_embeddings": self.length,
            "pad_token_id": self.special.pad,
            "bos_token_id": self.special.bos,
            "eos_token_id": self.special.eos,
            "decoder_start_token_id": self.special.bos,
        }

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows; and of a user's vocabulary."""
        place = self.words["tokenizer"]
        return self.pairs.fingerprint() + ("" if place is None else f"; {hash_files([tokenizer_file(place)])}")

    def remarks(self) -> list[str]:
        """Bad rows, long pairs, and how BLEU was made, if it was."""
        return [*self.pairs.remarks, *self._remarks.values()]

    def vocabulary(self) -> Vocabulary:
        """Of both languages: that of a saved model after `load_extra`, else trained on the training split, or kept."""
        if self._vocabulary is None:
            sides = sorted([self.source, self.target])  # both directions have the same
            division = [self.pairs.shares, self.pairs.seed, self.pairs.skip_bad, self.limits["train"]]
            fixed = self.words["tokenizer"] is not None or self.words["kind"] == "bytes"
            record = "" if fixed else json.dumps(["translation", sides, division, self.fingerprint()])
            texts = (x for side in sides for x in self._rows("train")[side])
            self._vocabulary = vocabulary(texts, **self.words, cache=self.cache, record=record)
        return self._vocabulary

    def save_extra(self, folder: Path) -> None:
        """Write the vocabulary into the folder of a saved model, which needs it to read and write."""
        self.vocabulary().save(folder)

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model; neither the training data nor the cache need be there."""
        if not (folder / TOKENIZER).is_file():
            if self.words["kind"] == "bytes":  # which need no file
                return
            raise ValueError(f"{folder} has no {TOKENIZER}, without which its model cannot be used; train it anew.")
        found = load_tokenizer(str(folder))
        self._vocabulary, self._splits = found, {}
        self.special = Special(found.pad, found.bos, found.eos, found.mask, found.sep)

    def split(self, name: str) -> Pairs:
        """Pairs as tokens; read and encoded once."""
        if choice("split", name, SPLITS) not in self._splits:
            self._splits[name] = self._encoded(name)
        return self._splits[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, S), labels (B, T) with -100 where there is none."""
        ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
        wanted, _ = padded(labels, multiple=_ROUND, longest=self.length, value=_IGNORED)
        return {**self._batch(ids), "labels": wanted}

    def score(self, found: Outcome) -> dict[str, float]:
        """Of the next token, given the right ones before it; BLEU comes from `judge`."""
        return {"perplexity": math.exp(found.loss) if found.loss < 700 else math.inf, "accuracy": found.right}

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """BLEU and chrF of what beam search writes, both from 0 to 100."""
        samples: list[Sample] = [data[i] for i in self._judged(data)]  # type: ignore[arg-type]
        written = self.write(model, [x["input_ids"] for x in samples], batch_size)
        return self._compared(written, [x["reference"] for x in samples])

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """The source as if it were its translation: names and numbers are often right."""
        rows = self._rows(split)
        chosen = self._judged(rows[self.source])
        texts, wanted = ([rows[side][i] for i in chosen] for side in (self.source, self.target))
        return {"the source itself": self._compared(texts, wanted)}

    def encode(self, texts: Sequence[str]) -> tuple[list[Tensor], list[int]]:
        """Sources for `write`, and the numbers of those that had to be cut."""
        found = self._tokens(texts)
        sources = self._cut_sources(found)
        return [sources.text(i) for i in range(len(texts))], np.flatnonzero(found.lengths > self.length).tolist()

    @torch.no_grad()
    def write(self, model: Any, sources: Sequence[Tensor], batch_size: int) -> list[str]:
        """Translations, in order; neither padding nor the size of the batches changes them.

        Args:
            model: an encoder-decoder of `settings`; its mode stays.
            sources: tokens of each, with <eos>.
            batch_size: sentences at once, of similar length.
        """
        positive_int("batch_size", batch_size)
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        texts = [""] * len(sources)
        training = model.training
        model.eval()
        try:
            for first in range(0, len(order), batch_size):
                chosen = order[first : first + batch_size]
                rows = self._search(model, [sources[i] for i in chosen])
                for i, row in zip(chosen, rows, strict=True):
                    texts[i] = self._text(row)
        finally:
            model.train(training)
        return texts

    def _search(self, model: Any, sources: list[Tensor]) -> list[list[int]]:
        """Tokens of translations after the start token; whatever follows <eos> means nothing."""
        tokens = self.vocabulary()
        batch = {name: x.to(model.device) for name, x in self._batch(sources).items()}
        limits = torch.tensor([min(2 * len(x) + 10, self.length) for x in sources], device=model.device)
        search = {"length_penalty": self.length_penalty, "early_stopping": True} if self.beams > 1 else {}
        found = model.generate(
            **batch,
            max_new_tokens=int(limits.max()),
            num_beams=self.beams,
            do_sample=False,
            decoder_start_token_id=tokens.bos,
            eos_token_id=tokens.eos,
            pad_token_id=tokens.pad,
            logits_processor=[Guide(limits, self.beams, tokens)],
            **search,
        )
        rows: list[list[int]] = found[:, 1:].tolist()
        return rows

    def _text(self, row: list[int]) -> str:
        tokens = self.vocabulary()
        stop = row.index(tokens.eos) if tokens.eos in row else len(row)
        return " ".join(tokens.decode(row[:stop]).split())

    def _tokens(self, texts: Sequence[str]) -> Tokens:
        return Tokens(*self.vocabulary().encode_batch(texts)).ended(self.special.eos)

    def _cut_sources(self, found: Tokens) -> Tokens:
        """A source that was cut ends with <eos> too."""
        cut = found.cut(self.length)
        cut.flat[cut.offsets[1:] - 1] = self.special.eos
        return cut

    def _rows(self, name: str) -> Rows:
        """As many as are wanted."""
        rows = self.pairs.rows(name)
        chosen = spread_evenly(len(rows[self.source]), self.limits[name]).tolist()
        return {side: [texts[i] for i in chosen] for side, texts in rows.items()}

    def _judged(self, data: Sized) -> list[int]:
        """Numbers of those that are translated."""
        found: list[int] = spread_evenly(len(data), self.bleu_samples).tolist()
        return found

    def _encoded(self, name: str) -> Pairs:
        rows = self._rows(name)
        source, target = self._tokens(rows[self.source]), self._tokens(rows[self.target])
        lengths = np.maximum(source.lengths, target.lengths)
        long = lengths > self.length
        chosen = np.flatnonzero(~long) if name == "train" else np.arange(len(long))
        if long.any():
            done = "were left out" if name == "train" else "were cut, but not the references of BLEU"
            self._remarks[name] = (
                f"{long.sum():,} of {len(long):,} pairs of the {name} split have more than {self.length} tokens on "
                f"either side and {done}"
            )
        if not len(chosen):
            raise ValueError(
                f"all {len(long):,} training pairs of {self.pairs.place} have more than length={self.length} tokens, "
                f"the shortest {lengths.min()}; give a larger length."
            )
        return Pairs(self._cut_sources(source), target.cut(self.length), rows[self.target], chosen)

    def _batch(self, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        ids, mask = padded(sources, multiple=_ROUND, longest=self.length, value=self.special.pad)
        return {"input_ids": ids, "attention_mask": mask}

    def _compared(self, written: list[str], wanted: list[str]) -> dict[str, float]:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        small = bool(self.words["lowercase"])
        metrics = {"BLEU": BLEU(lowercase=small), "chrF": CHRF(lowercase=small)}
        found = {name.lower(): float(x.corpus_score(written, [wanted]).score) for name, x in metrics.items()}
        for name, metric in metrics.items():
            self._remarks[name] = f"{name} by sacrebleu of {len(wanted):,} sentences: {metric.get_signature()}"
        return found
