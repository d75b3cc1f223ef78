"""Translation of sentences, scored by BLEU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.conversion.readers import Row, hash_files, not_utf8, read_bytes
from kernelformer.errors import choice, integer, number, positive_int
from kernelformer.files import check_inside
from kernelformer_lab.analysis.statistics import GROUPS, Numbers, jackknife, standard_error
from kernelformer_lab.data.batching import IGNORED, Sample, Samples, padded, spread_evenly
from kernelformer_lab.data.files import EXTENSIONS, read_file_rows
from kernelformer_lab.data.sources import ALIASES, SPLITS, Rows, Source, text_value
from kernelformer_lab.data.tokenization import TOKENIZER, Vocabulary, load_vocabulary
from kernelformer_lab.tasks.base import Outcome, RowOptions
from kernelformer_lab.tasks.corpus import perplexity
from kernelformer_lab.tasks.kinds import VocabularyTask

NESTED = "translation"  # the column of the hub's data sets that holds a text for each language
STEMS = frozenset(chain(*ALIASES.values()))


def sentence(value: object) -> str:
    """Check for a text that is not empty; gives it without blanks around it."""
    return text_value(value).strip()


class Parallel(Source):
    """Pairs of texts from all locations that a `Source` reads, and from more.

    - In a folder, two plain files for a split, such as ``train.en`` and ``train.de``: line i of one is the translation
      of line i of the other. A line that is blank in both is skipped.
    - In files and data sets, a column ``translation`` with ``{"en": ..., "de": ...}``, as the hub has it.

    Args:
        data: the location.
        source: name of the column, or ending of the files, of what is translated.
        target: the same for what it is translated to.
        options: of a `Source`.
    """

    def __init__(self, data: str | os.PathLike[str] | None, source: str, target: str, **options: Any) -> None:
        layout = f'"{source}" and "{target}" (columns; or a folder with plain files train.{source} and train.{target})'
        super().__init__(data, {source: sentence, target: sentence}, layout=layout, **options)
        self.source, self.target = source, target

    def files(self) -> list[Path]:
        """All files of a folder that are a split; of plain ones those of the source."""
        return self._plain() or super().files()

    def fingerprint(self) -> str:
        """The fingerprint of a source; of plain files both sides count."""
        plain = self._plain() if isinstance(self.location, Path) and self.location.is_dir() else []
        return (
            hash_files([side for x in plain for side in (x, self._target_file(x))]) if plain else super().fingerprint()
        )

    def _target_file(self, path: Path) -> Path:
        return path.with_suffix(f".{self.target}")

    def _plain(self) -> list[Path]:
        """The source's side of all splits in plain files."""
        there = [x for x in self.path.iterdir() if x.stem in STEMS]
        sides = [{x.stem for x in there if x.suffix == f".{side}"} for side in (self.source, self.target)]
        if not any(sides):
            return []
        tables = sorted(x.name for x in there if x.suffix in EXTENSIONS)
        if tables:
            stem = min(sides[0] | sides[1])
            raise ValueError(
                f"the folder {self.path} has plain files, such as {stem}.{self.source}, and {', '.join(tables)}; "
                f"keep one kind."
            )
        alone = sorted(sides[0] ^ sides[1])
        if alone:
            has, lacks = (self.source, self.target) if alone[0] in sides[0] else (self.target, self.source)
            raise ValueError(
                f"the folder {self.path} has {alone[0]}.{has} but no {alone[0]}.{lacks}; the texts of a split are in "
                f"two files, one for each language."
            )
        plain = [self.path / f"{stem}.{self.source}" for stem in sorted(sides[0])]
        check_inside(self.path, [side for x in plain for side in (x, self._target_file(x))])
        return plain

    def _of_file(self, path: Path) -> Rows:
        if path.suffix not in EXTENSIONS and path.stem in STEMS and path.suffix == f".{self.source}":
            return self._good(self._aligned(path), f"{path} and {self._target_file(path).name}")
        rows = ((position, row if isinstance(row, str) else self._flat(row)) for position, row in read_file_rows(path))
        return self._good(rows, path)

    def _of_hub(self, dataset: Any) -> Rows:
        if NESTED in dataset.column_names and not all(x in dataset.column_names for x in self.fields):
            return self._good(((f"row {i}", self._flat(row)) for i, row in enumerate(dataset)), self.location)
        return super()._of_hub(dataset)

    def _flat(self, row: Row) -> Row:
        inner = row.get(NESTED)
        return inner if isinstance(inner, dict) and self.source not in row else row

    def _aligned(self, path: Path) -> Iterator[tuple[str, Row | str]]:
        sides = [_lines(side) for side in (path, self._target_file(path))]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{path} has {len(sides[0]):,} lines and {self._target_file(path)} has {len(sides[1]):,}; line i of "
                f"one must be the translation of line i of the other."
            )
        for line, pair in enumerate(zip(*sides, strict=True), 1):
            try:
                texts = [x.decode() for x in pair]
            except UnicodeDecodeError as problem:
                yield f"line {line}", not_utf8(problem)
                continue
            if any(x.strip() for x in texts):
                yield f"line {line}", {self.source: texts[0], self.target: texts[1]}


def _lines(path: Path) -> list[bytes]:
    """Split at line feeds alone: what else Unicode calls the end of a line may stand within a sentence."""
    lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if lines[-1] else lines[:-1]


class Tokens(NamedTuple):
    """Texts one after the other.

    Args:
        flat: (T) int32, of all texts.
        offsets: (N + 1) int64; text i is flat[offsets[i] : offsets[i + 1]].
    """

    flat: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def text(self, i: int) -> torch.Tensor:
        """Tokens of one text, (L) int64."""
        return torch.from_numpy(self.flat[self.offsets[i] : self.offsets[i + 1]].astype(np.int64))

    def ended(self, eos: int) -> Tokens:
        """The same texts with a token at the end of each."""
        flat = np.insert(self.flat, self.offsets[1:], np.int32(eos))
        return Tokens(flat, self.offsets + np.arange(len(self.offsets)))

    def cut(self, length: int) -> Tokens:
        """The first so many tokens of each text."""
        position = np.arange(len(self.flat)) - np.repeat(self.offsets[:-1], self.lengths)
        kept = np.minimum(self.lengths, length)
        return Tokens(self.flat[position < length], np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)]))


class Pairs(Samples):
    """Some of the pairs, by index: input_ids and labels, both (L) int64, and the reference, a text.

    Args:
        source: N texts.
        target: N texts.
        references: the N targets as they were written.
        chosen: which of them.
    """

    def __init__(self, source: Tokens, target: Tokens, references: Sequence[str], chosen: NDArray[np.int64]) -> None:
        self.source, self.target, self.references, self.chosen = source, target, references, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N) numbers of tokens, those of the longer side."""
        return np.maximum(self.source.lengths, self.target.lengths)[self.chosen]

    def take(self, chosen: NDArray[np.int64]) -> list[Sample]:
        """Both sides of pairs, and the targets as they were written."""
        return [
            {"input_ids": self.source.text(i), "labels": self.target.text(i), "reference": self.references[i]}
            for i in self.chosen[chosen].tolist()
        ]


_ROUND = 8  # batches have a multiple of this length, so that there are few different shapes


class AllowedTokens:
    """Logits processor for `generate`: no special tokens, and after so many tokens, for each sentence, the end.

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


@dataclass(kw_only=True, eq=False)
class Translation(VocabularyTask, RowOptions):
    """Translate sentences; scored by BLEU (sacrebleu, plain text) of what beam search writes.

    Data: a folder with ``train``, ``validation`` and ``test``, each ``.jsonl``, ``.csv`` or ``.tsv`` with two columns,
    or each two plain files such as ``train.en`` and ``train.de``, line by line; one such table, divided by shares; or
    ``hub:NAME:CONFIGURATION``. A column ``translation`` with ``{"en": ..., "de": ...}`` counts as two.

    Both languages share one vocabulary, which is trained on the training split (NPRF with RPE, Sec. 4.3: byte pair
    encoding, 10,000 tokens). A sample is the source's tokens and <eos>, with the target's tokens and <eos> for labels;
    the decoder starts with <bos>. Training pairs of more than ``length`` tokens on either side are left out. Others
    are never left out: the source is cut, and so are the labels, but BLEU compares with the whole reference.

    Each evaluation gives perplexity and accuracy, of tokens after the right ones. BLEU and chrF are made by `judge`, at
    the end: a search with 5 beams and a length penalty of 1.2 (NPRF with RPE, App. A.3: score / length^1.2), that ends
    when as many translations as beams are finished, or else at 2 n + 10 tokens for a source of n.

    Departures: the paper's BLEU is of tokenized text; here texts are compared as they are, which gives other numbers.

    Args:
        source: column, or ending of plain files, of what is translated.
        target: the same for what it is translated to.
        length: tokens of a source, and of a target, with <eos>.
        vocab_size: at most so many tokens; None: 10,000, or what ``tokenizer`` has.
        lowercase: capital letters become small, and BLEU does not see them.
        beams: of the search; 1 takes the likeliest token each time.
        length_penalty: above 0; larger ones prefer longer translations.
        bleu_samples: translate at most so many, spread evenly over the split; None: all.

    Other options: see `VocabularyTask` and `tasks.base.RowOptions`; the vocabulary is that of ``train_samples``.
    """

    source: str = "en"
    target: str = "de"
    length: int = 256
    beams: int = 5
    length_penalty: float = 1.2
    bleu_samples: int | None = None

    name = "translation"
    about = "translate sentences of parallel text, BLEU by beam search; needs data"
    model = "seq2seq"
    metric = "bleu"
    higher_is_better = True
    metric_from_judge = True
    trained_size = 10_000

    def __post_init__(self) -> None:
        for name, value in {"source": self.source, "target": self.target}.items():
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be the name of a column, such as 'en', got {value!r}.")
        if self.source == self.target:
            raise ValueError(f"source and target must be different columns, got {self.source!r} for both.")
        super().__post_init__()
        integer("length", self.length, at_least=2)  # a token and <eos>
        positive_int("beams", self.beams)
        self.length_penalty = number("length_penalty", self.length_penalty, above=0)
        if self.bleu_samples is not None:
            positive_int("bleu_samples", self.bleu_samples)
        self.pairs = Parallel(self.data, self.source, self.target, **self.reading)
        self._splits: dict[str, Pairs] = {}
        self._remarks: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """An encoder-decoder with one table of tokens, that starts with <bos> and ends with <eos>."""
        return {
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.length,
            "pad_token_id": self.special.pad,
            "bos_token_id": self.special.bos,
            "eos_token_id": self.special.eos,
            "decoder_start_token_id": self.special.bos,
        }

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows; and of a user's vocabulary."""
        return self.with_tokenizer(self.pairs.fingerprint())

    def remarks(self) -> list[str]:
        """Bad rows, long pairs, and how BLEU was made, if it was."""
        return [*self.pairs.remarks, *self._remarks.values()]

    @property
    def _sides(self) -> list[str]:
        """Both columns, in an order that is the same for both directions, as their vocabulary is."""
        return sorted([self.source, self.target])

    def train_texts(self) -> Iterator[str]:
        """All sentences of the training split, in both languages."""
        return (text for side in self._sides for text in self._rows("train")[side])

    def texts_record(self) -> str:
        """All that the training texts depend on."""
        division = [self.pairs.shares, self.pairs.seed, self.pairs.skip_bad, self.limits["train"]]
        return json.dumps(["translation", self._sides, division, self.fingerprint()])

    def load_extra(self, folder: Path) -> None:
        """Use the vocabulary of a saved model; neither the training data nor the cache need be there."""
        if not (folder / TOKENIZER).is_file():
            if self.kind == "bytes":  # which need no file
                return
            raise ValueError(f"{folder} has no {TOKENIZER}, without which its model cannot be used; train it anew.")
        self._vocabulary, self._splits = load_vocabulary(str(folder)), {}
        self.special = self._vocabulary.special

    def split(self, name: str) -> Pairs:
        """Pairs as tokens; read and encoded once."""
        if choice("split", name, SPLITS) not in self._splits:
            self._splits[name] = self._encoded(name)
        return self._splits[name]

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, S), labels (B, T) with -100 where there is none."""
        ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
        wanted, _ = padded(labels, multiple=_ROUND, longest=self.length, value=IGNORED)
        return {**self._batch(ids), "labels": wanted}

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Perplexity and accuracy of the next token, given the right ones before it; BLEU comes from `judge`."""
        return {"perplexity": perplexity(outcome.loss), "accuracy": outcome.right}

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """BLEU and chrF of what beam search writes, from 0 to 100, and the standard error of BLEU over sentences."""
        written, wanted = self._translated(model, data, batch_size)
        error = standard_error(self._deviations(written, wanted))
        return {**self._compared(written, wanted), **({} if math.isnan(error) else {"bleu_error": error})}

    def judged_deviations(
        self, model: Any, data: Dataset[Sample], batch_size: int, most: int = GROUPS
    ) -> tuple[float, Numbers]:
        """BLEU, and what groups of sentences add to its standard error."""
        written, wanted = self._translated(model, data, batch_size)
        return self._compared(written, wanted)[self.metric], self._deviations(written, wanted, most)

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores of the source as if it were its translation: names and numbers are often right."""
        rows = self._rows(split)
        chosen = self._judged(rows[self.source])
        texts, wanted = ([rows[side][i] for i in chosen] for side in (self.source, self.target))
        return {"the source itself": self._compared(texts, wanted)}

    def _translated(self, model: Any, data: Dataset[Sample], batch_size: int) -> tuple[list[str], list[str]]:
        """Translations and references of the samples that are judged."""
        samples: list[Sample] = [data[i] for i in self._judged(data)]  # type: ignore[arg-type]
        return self.write(model, [x["input_ids"] for x in samples], batch_size), [x["reference"] for x in samples]

    def _deviations(self, written: list[str], wanted: list[str], most: int = GROUPS) -> Numbers:

        counts = SentenceCounts(written, wanted, lowercase=bool(self.lowercase))
        return jackknife(counts.bleu, len(counts), most)

    def encode(self, texts: Sequence[str]) -> tuple[list[Tensor], list[int]]:
        """Sources for `write`, and the numbers of those that had to be cut."""
        tokens = self._tokens(texts)
        sources = self._cut_sources(tokens)
        return [sources.text(i) for i in range(len(texts))], np.flatnonzero(tokens.lengths > self.length).tolist()

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
        """Tokens of translations after the start token; those after <eos> have no meaning."""
        tokens = self.vocabulary()
        batch = {name: x.to(model.device) for name, x in self._batch(sources).items()}
        limits = torch.tensor([min(2 * len(x) + 10, self.length) for x in sources], device=model.device)
        search = {"length_penalty": self.length_penalty, "early_stopping": True} if self.beams > 1 else {}
        written = model.generate(
            **batch,
            max_new_tokens=int(limits.max()),
            num_beams=self.beams,
            do_sample=False,
            decoder_start_token_id=tokens.bos,
            eos_token_id=tokens.eos,
            pad_token_id=tokens.pad,
            logits_processor=[AllowedTokens(limits, self.beams, tokens)],
            **search,
        )
        rows: list[list[int]] = written[:, 1:].tolist()
        return rows

    def _text(self, row: list[int]) -> str:
        tokens = self.vocabulary()
        stop = row.index(tokens.eos) if tokens.eos in row else len(row)
        return " ".join(tokens.decode(row[:stop]).split())

    def _tokens(self, texts: Sequence[str]) -> Tokens:
        return Tokens(*self.vocabulary().encode_batch(texts)).ended(self.special.eos)

    def _cut_sources(self, sources: Tokens) -> Tokens:
        """Sources of at most ``length`` tokens; one that was cut ends with <eos> too."""
        cut = sources.cut(self.length)
        cut.flat[cut.offsets[1:] - 1] = self.special.eos
        return cut

    def _rows(self, name: str) -> Rows:
        """Pairs of a split, as many as are wanted."""
        rows = self.pairs.rows(name)
        chosen = spread_evenly(len(rows[self.source]), self.limits[name]).tolist()
        return {side: [texts[i] for i in chosen] for side, texts in rows.items()}

    def _judged(self, data: Sized) -> list[int]:
        """Numbers of the samples that are translated."""
        numbers: list[int] = spread_evenly(len(data), self.bleu_samples).tolist()
        return numbers

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
                f"all {len(long):,} training pairs of {self.pairs.location} have more than length={self.length} "
                f"tokens, the shortest {lengths.min()}; give a larger length."
            )
        return Pairs(self._cut_sources(source), target.cut(self.length), rows[self.target], chosen)

    def _batch(self, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        ids, mask = padded(sources, multiple=_ROUND, longest=self.length, value=self.special.pad)
        return {"input_ids": ids, "attention_mask": mask}

    def _compared(self, written: list[str], wanted: list[str]) -> dict[str, float]:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        small = bool(self.lowercase)
        metrics = {"BLEU": BLEU(lowercase=small), "chrF": CHRF(lowercase=small)}
        scores = {name.lower(): float(x.corpus_score(written, [wanted]).score) for name, x in metrics.items()}
        for name, metric in metrics.items():
            self._remarks[name] = f"{name} by sacrebleu of {len(wanted):,} sentences: {metric.get_signature()}"
        return scores


ORDER = 4  # of the longest n-grams


class SentenceCounts:
    """N-grams of translations that their references have too, sentence by sentence.

        BLEU = 100 min(1, e^(1 - r/c)) (prod_n p_n)^(1/4),   p_n = sum_i matches_in / sum_i total_in,   n = 1, ..., 4

    with c and r the tokens of all translations and of all references (Papineni et al. 2002), as sacrebleu has it.

    Args:
        written: (N) translations.
        wanted: (N) references.
        lowercase: capital letters are not seen.
    """

    def __init__(self, written: Sequence[str], wanted: Sequence[str], *, lowercase: bool = False) -> None:
        metric = BLEU(lowercase=lowercase, effective_order=True)  # counts are the same; without it sacrebleu warns
        each = [metric.sentence_score(text, [right]) for text, right in zip(written, wanted, strict=True)]
        rows = [[*x.counts, *x.totals, x.sys_len, x.ref_len] for x in each]
        self.rows = np.array(rows, dtype=np.int64).reshape(len(each), 2 * ORDER + 2)
        self.smoothing = metric.smooth_method

    def __len__(self) -> int:
        return len(self.rows)

    def bleu(self, chosen: NDArray[Any] | slice = slice(None)) -> float:
        """BLEU of some sentences, from 0 to 100."""
        *sums, length, wanted = self.rows[chosen].sum(0).tolist()
        made = BLEU.compute_bleu(sums[:ORDER], sums[ORDER:], length, wanted, smooth_method=self.smoothing)
        return float(made.score)
