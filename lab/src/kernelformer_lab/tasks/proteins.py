"""Language modelling of proteins, single or concatenated, in one direction or with masks (Performer, Sec. 4.4, 4.5)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.conversion.readers import Row, hash_files, not_utf8, read_lines
from kernelformer.errors import choice, flag, integer
from kernelformer.files import check_inside, check_regular
from kernelformer_lab.data.batching import IGNORED, PackedRows, Sample, Samples, padded, padded_segments, spread_evenly
from kernelformer_lab.data.files import EXTENSIONS, existing
from kernelformer_lab.data.sources import ALIASES, SPLITS, Rows, Source, mix_bits, text_value, uniform
from kernelformer_lab.tasks.base import Location, Outcome, PackOption, RowOptions

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BOUXZ"  # the standard ones, and those that the paper calls anomalous
FASTA = (".fasta", ".fa", ".faa")
SUFFIXES = (".txt", *FASTA, *EXTENSIONS)
ALLOWED = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
_FOREIGN = re.compile(f"[^{AMINO_ACIDS}{AMINO_ACIDS.lower()}]")  # not IGNORECASE, to which the Kelvin sign is a K


def letters(value: object) -> bytes:
    """Check for a sequence; gives it in capitals, without the stop at its end."""
    sequence = text_value(value).strip().removesuffix("*")
    if foreign := _FOREIGN.search(sequence):
        raise ValueError(
            f"has the letter {foreign.group()!r} at position {foreign.start() + 1}, which is none of {AMINO_ACIDS}; "
            f"X stands for an amino acid that is not known"
        )
    if not sequence:
        raise ValueError("has a stop '*' but no amino acids")
    return sequence.upper().encode()


def _plain(path: Path, field: str) -> Iterator[tuple[str, Row | str]]:
    """One sequence a line, as rows."""
    for position, line in read_lines(path):
        if not isinstance(line, str):
            yield position, not_utf8(line)
        elif line.startswith(">"):
            yield position, f"it is a header; a file with headers must end in {', '.join(FASTA)}"
        else:
            yield position, {field: line}


def _fasta(path: Path, field: str) -> Iterator[tuple[str, Row | str]]:
    """Sequences on any number of lines, as rows; of the headers nothing is used."""
    head, parts = "", list[str]()
    for position, line in chain(read_lines(path), [("", ">")]):
        # Old files have names in other encodings; as letters of a sequence they are refused in any.
        text = line if isinstance(line, str) else line.object.decode("latin-1")
        if text.startswith(">"):
            if head:
                yield f"record at {head}", {field: "".join(parts)}
            head, parts = position, []
        elif head:
            parts.append(text.strip())
        else:
            yield position, "a sequence without a header, a line that begins with '>', before it"


class Sequences(Source):
    """A source that also reads ``.txt`` and fasta files, and takes of each file or split every sequence once."""

    def __init__(self, data: str | os.PathLike[str] | None, field: str, deduplicate: bool, **options: Any) -> None:
        super().__init__(data, {field: letters}, layout=f"one sequence a line, fasta, or {field!r}", **options)
        self.field, self.deduplicate = field, flag("deduplicate", deduplicate)

    def files(self) -> list[Path]:
        """All files of a folder that are a split."""
        stems = set(chain(*ALIASES.values()))
        everything = sorted(self.path.iterdir())
        there = [x for x in everything if x.suffix in SUFFIXES and x.stem in stems]
        if not there:
            names = ", ".join(x.name for x in everything[:10]) or "nothing"
            raise ValueError(f"{self.path} must hold train, validation and test as {ALLOWED}, found {names}.")
        check_inside(self.path, there)
        return there

    def has(self, split: str) -> bool:
        """Return True if there is such a split, in the data itself or by a share."""
        if isinstance(self.location, Path) and not self.location.is_dir():
            return True
        names = set(self._hub()) if isinstance(self.location, str) else {x.stem for x in self.files()}
        return not names.isdisjoint(ALIASES[split]) or (split == "validation" and self.has("train"))

    def read(self, path: Path) -> list[bytes]:
        """All sequences of a file."""
        sequences: list[bytes] = self._of_file(path)[self.field]
        return sequences

    def _of_file(self, path: Path) -> Rows:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} must end in {ALLOWED}, got {path.suffix or 'nothing'!r}.")
        if path.suffix in EXTENSIONS:
            return super()._of_file(path)
        return self._good(_fasta(path, self.field) if path.suffix in FASTA else _plain(path, self.field), path)

    def _good(self, rows: Iterator[tuple[str, Row | str]], where: object) -> Rows:
        good = super()._good(rows, where)[self.field]
        once = list(dict.fromkeys(good)) if self.deduplicate else good
        self.remark(len(good) - len(once), len(good), f"of {where}, which has them more than once")
        return {self.field: once}

    def _full(self, rows: Rows, split: str, of: int = 0) -> Rows:
        return rows  # also if there are none: they are read to be compared, and callers that need some check it

    def remark(self, count: int, total: int, where: str) -> None:
        """Note how many sequences were left out, if any."""
        text = f"left out {count:,} of {total:,} sequences {where}"
        if count and text not in self.remarks:
            self.remarks.append(text)


TOKENS = ("<pad>", "<bos>", "<eos>", "<mask>", *AMINO_ACIDS)
PAD, BOS, EOS, MASK, FIRST = range(5)
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # of the amino acids; of the chosen ones
MASKINGS = 10  # of each training sample
_START, _END = b"<", b">"  # stand for BOS and EOS until letters become tokens
_TOKEN = np.zeros(256, np.uint8)
_TOKEN[list(AMINO_ACIDS.encode() + _START + _END)] = [*range(FIRST, len(TOKENS)), BOS, EOS]

Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Packed = tuple[Uint8, Int64]  # tokens of all samples (T), and offsets (N + 1): sample i is tokens[o[i] : o[i + 1]]


def pack(sequences: list[bytes], length: int, *, concatenate: bool, start: bool) -> Packed:
    """Tokens of sequences in capitals: each after a mark if ``start``, and cut; or all, with ends, in equal windows."""
    if concatenate:
        text = _END.join([*sequences, b""])
        return _TOKEN[np.frombuffer(text, np.uint8)], np.arange(0, len(text) + 1, length)
    mark = _START if start else b""
    parts = [mark + x[: length - len(mark)] for x in sequences]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return _TOKEN[np.frombuffer(b"".join(parts), np.uint8)], ends


class ProteinSamples(Samples):
    """Samples whose every token but the first is to be predicted from those before it."""

    def __init__(self, packed: Packed) -> None:
        self.tokens, self.offsets = packed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def take(self, chosen: Int64) -> list[Sample]:
        """Tokens and labels."""
        ids, labels, sizes = self.gather(chosen)
        rows = zip(*(torch.from_numpy(x).split(sizes.tolist()) for x in (ids, labels)), strict=True)
        return [{"input_ids": a, "labels": b} for a, b in rows]

    def gather(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """input_ids and labels of these samples, all in a row, and the length of each."""
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        flat = np.concatenate([self.tokens[a:b] for a, b in zip(starts, ends, strict=True)]).astype(np.int64)
        return flat, flat, ends - starts

    def label_counts(self) -> Int64:
        """Count each token among the labels, (vocabulary)."""
        return count_tokens(self.tokens[: self.offsets[-1]]) - count_tokens(self.tokens[self.offsets[:-1]])


class MaskedProteinSamples(ProteinSamples):
    """Samples some of whose amino acids are masked: a function of (seed, index, position).

    Args:
        packed: tokens and offsets of N sequences.
        seed: of the masks.
        maskings: versions of each sequence, so that there are N * maskings samples.
    """

    def __init__(self, packed: Packed, seed: int, maskings: int) -> None:
        super().__init__(packed)
        self.seed, self.maskings = seed, maskings

    def __len__(self) -> int:
        return super().__len__() * self.maskings

    @property
    def lengths(self) -> Int64:
        """(N * maskings) numbers of tokens."""
        return np.tile(super().lengths, self.maskings)

    def gather(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """One number in [0, 1) for each token says all: whether it is chosen, what becomes of it, which one comes."""
        flat, _, sizes = super().gather(indices % super().__len__())
        starts = np.cumsum(sizes) - sizes
        within = np.arange(len(flat)) - np.repeat(starts, sizes)
        keys = np.repeat(mix_bits(indices.astype(np.uint64)), sizes) + within.astype(np.uint64)
        chance = uniform(keys.view(np.int64), self.seed) / CHOSEN
        chance[flat < FIRST] = np.inf
        # Where chance chooses nothing, the nearest is masked: a sample without labels has no mean loss.
        nearest = chance == np.repeat(np.minimum.reduceat(chance, starts), sizes)
        labels = np.where((chance < 1) | nearest, flat, IGNORED)
        ids = np.where((chance < MASKED) | (nearest & (chance >= 1)), MASK, flat)
        other = np.flatnonzero((chance >= MASKED) & (chance < MASKED + REPLACED))
        drawn = ((chance[other] - MASKED) / REPLACED * len(AMINO_ACIDS)).astype(np.int64)
        ids[other] = FIRST + np.minimum(drawn, len(AMINO_ACIDS) - 1)
        return ids, labels, sizes

    def label_counts(self) -> Int64:
        """Count each token among those that are masked, (vocabulary)."""
        counts = np.zeros(len(TOKENS), np.int64)
        step = max(1, (1 << 20) // int(np.diff(self.offsets).max()))  # few enough for the memory
        for i in range(0, len(self), step):
            labels = self.gather(np.arange(i, min(i + step, len(self))))[1]
            counts += count_tokens(labels[labels != IGNORED])
        return counts


def count_tokens(tokens: NDArray[Any]) -> Int64:
    """Count each token of the vocabulary."""
    return np.bincount(tokens, minlength=len(TOKENS))


_ROUND = 64  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class Proteins(PackOption, RowOptions):
    """Predict the next amino acid of a protein; scored by perplexity and accuracy (Performer, App. A.1, C).

    Tokens: `TOKENS`: the 20 standard amino acids, the 5 anomalous ones B, O, U, X and Z as in the
    paper, and marks. Any other letter is an error, also J (leucine or isoleucine), which the paper's 25 do not have;
    lower case is raised.

    A sample is a start mark and the first ``length`` - 1 amino acids of a sequence, each of which is a label. Its end
    is none, as in the paper, whose baselines know 25 tokens: such a model does not learn where a protein ends.
    With ``concatenate`` all sequences of a split, each followed by an end mark and none cut, form a chain that is cut
    into windows of ``length`` tokens: nothing is padded, and every token but a window's first is a label, ends too.

    Data is one of these.

    - A file: ``.txt`` (a sequence a line), ``.fasta``, ``.fa``, ``.faa`` (headers with ">", a sequence on any number of
      lines), ``.jsonl``, ``.csv`` or ``.tsv`` (with ``field``). It is divided by the shares.
    - A folder with ``train``, ``validation`` and ``test`` files of these kinds; without validation a share of the
      training sequences is it.
    - ``hub:NAME``: a data set of the Hugging Face hub with ``field``.

    Blank lines are skipped, and "*" at the end of a sequence, the stop, is dropped.

    Args:
        field: of rows, for kinds of data that have some.
        test_file: another file for the test, such as proteins of other families. Training and validation stay what
            they are without it (so does their share of one file), and sequences they have are left out of it.
        length: tokens of a sample, at most; None: 1024, or 8192 when concatenated.
        concatenate: windows of a chain instead of single sequences.
        deduplicate: use each sequence once, in whichever split: the first of a file; of several splits the test's, then
            the validation's. Sequences are compared whole, before they are cut.

    Other options: see `tasks.base.PackOption` and `RowOptions`; of what deduplication leaves, ``train_samples`` and
    so on are taken, sequences also where rows are packed.

    Cost: 0.2 seconds for 20,000 sequences, and two bytes per amino acid.
    """

    field: str = "sequence"
    test_file: Location = None
    length: int | None = None
    concatenate: bool = False
    deduplicate: bool = True

    name = "proteins"
    about = "next amino acid of protein sequences, single or concatenated"
    model = "causal-lm"
    metric = "perplexity"
    higher_is_better = False
    marked: ClassVar[bool] = True  # whether a single sequence has a start mark

    def __post_init__(self) -> None:
        super().__post_init__()
        default = 8192 if flag("concatenate", self.concatenate) else 1024
        if flag("pack", self.pack) and self.concatenate:
            raise ValueError("concatenate=True fills all rows by itself, got pack=True too; choose one of them.")
        self.longest = integer("length", default if self.length is None else self.length, at_least=2)
        self.source = Sequences(self.data, str(self.field), self.deduplicate, **self.reading)
        self._test_path = None if self.test_file is None else Path(str(self.test_file)).expanduser()
        if self._test_path is not None:
            check_regular(existing(self._test_path, f"one with {self.source.layout}", option="test_file"))
        self._packed: dict[str, Packed] = {}
        self._rows: dict[str, PackedRows] = {}
        self._remarks: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """The vocabulary, and room for the longest sample."""
        marks = {"bos_token_id": BOS, "eos_token_id": EOS} if self.marked else {}
        sizes = {"vocab_size": len(TOKENS), "max_position_embeddings": self.longest}
        return {**sizes, "pad_token_id": PAD, **marks}

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows."""
        more = [] if self._test_path is None else [hash_files([self._test_path])]
        return "; ".join([self.source.fingerprint(), *more])

    def remarks(self) -> list[str]:
        """Sequences that were left out or cut."""
        return [*self.source.remarks, *self._remarks.values()]

    def split(self, name: str) -> ProteinSamples | PackedRows:
        """Samples; the other splits are read too, where sequences could be in both."""
        samples = self._single(name)
        if not self.pack:
            return samples
        if name not in self._rows:
            lengths = np.diff(samples.offsets).tolist()
            self._rows[name] = PackedRows(samples, lengths, self.longest, shifted=self.model == "causal-lm")
        return self._rows[name]

    def _single(self, name: str) -> ProteinSamples:
        """Samples of a split, before they are packed."""
        if choice("split", name, SPLITS) not in self._packed:
            rows = self._sequences(name)
            chosen = spread_evenly(len(rows), self.limits[name])
            self._packed[name] = self._pack(name, [rows[i] for i in chosen])
        return self._samples(name)

    def _samples(self, name: str) -> ProteinSamples:
        return ProteinSamples(self._packed[name])

    def _sequences(self, name: str) -> list[bytes]:
        """Sequences of a split, without those that others have."""
        source = self.source
        others = {"train": ("validation", "test"), "validation": ("test",), "test": ()}[name]
        if name == "test" and self._test_path is not None:
            others, rows = ("train", "validation"), source.read(self._test_path)
        else:
            rows = source.rows(name)[source.field]
        if not source.deduplicate:
            return rows
        known = {x for other in others if source.has(other) for x in source.rows(other)[source.field]}
        new = [x for x in rows if x not in known]
        source.remark(len(rows) - len(new), len(rows), f"of {name}, which {' or '.join(others)} has too")
        return new

    def _pack(self, name: str, rows: list[bytes]) -> Packed:
        start = self.marked and not self.concatenate
        tokens, offsets = pack(rows, self.longest, concatenate=self.concatenate, start=start)
        if len(offsets) < 2:
            size = f"{len(tokens):,} tokens, a sample {self.longest:,}" if self.concatenate else "no sequences left"
            raise ValueError(
                f"the {name} split of {self.source.location} has {size}; add sequences or enlarge its share."
            )
        many, most = f"of {len(rows):,} sequences of {name}", self.longest - start
        if rest := len(tokens) - int(offsets[-1]):
            self._remarks[name] = f"left out the last {rest:,} tokens {many}, too few for a sample"
        elif not self.concatenate and (cut := sum(len(x) > most for x in rows)):
            self._remarks[name] = f"{cut:,} {many} are longer than {most:,} amino acids and were cut"
        return tokens, offsets

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), labels (B, L), and of single sequences attention_mask (B, L), 1 = real, and labels -100.

        Packed rows also have segment_ids (B, L).
        """
        ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
        if self.concatenate:
            return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}
        tokens, mask = padded(ids, multiple=_ROUND, longest=self.longest, value=PAD)
        wanted, _ = padded(labels, multiple=_ROUND, longest=self.longest, value=IGNORED)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": wanted}
        if self.pack:
            batch["segment_ids"] = padded_segments(samples, multiple=_ROUND, longest=self.longest)
        return batch

    def score(self, outcome: Outcome) -> dict[str, float]:
        """exp(loss), and the share of labels that were likeliest."""
        with np.errstate(over="ignore"):
            return {self.metric: float(np.exp(outcome.loss)), "accuracy": outcome.right}

    def empirical_baseline(self, split: str) -> dict[str, float]:
        """Scores of guessing by frequency, over the labels by which a model is scored (Performer, App. C.2).

            p_a = (n_a + 1) / sum_b (n_b + 1),   perplexity = exp(-mean_i log p_(label i))

        n are counts in the training samples as cut; accuracy is that of always saying the most frequent. One is added,
        as the authors' code does, because the training set may lack what the test has.
        """
        labels, train = self._single(split).label_counts(), self._single("train")
        counts = count_tokens(train.tokens[: train.offsets[-1]])
        some = np.arange(len(TOKENS)) >= FIRST
        some[EOS] = labels[EOS] > 0
        chance = (counts[some] + 1) / (counts[some] + 1).sum()
        shares = labels[some] / labels[some].sum()
        return self.score(Outcome(-float(shares @ np.log(chance)), float(shares[chance.argmax()])))

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """`empirical_baseline` by its name in the paper."""
        return {"empirical baseline": self.empirical_baseline(split)}


@dataclass(kw_only=True, eq=False)
class MaskedProteins(Proteins):
    """Predict hidden amino acids of a protein from all others (Performer, App. A.1).

    Data, options and concatenation are those of `Proteins`; a single sequence has no start mark, so all of ``length``
    are amino acids. Each is chosen with probability 15%, at least one of a sample; of the chosen 80% become a mask, 10%
    any of the 25, 10% stay; they alone are labels. End marks are never chosen. What is chosen is a function of (seed,
    index, position): evaluation is always the same, and a training sequence is there ten times, masked differently.
    Copying what is no mask is right for 10% of the labels; the empirical baseline does not copy, so it is no floor.
    """

    name = "proteins-masked"
    about = "hidden amino acids of protein sequences, single or concatenated"
    model = "masked-lm"
    marked = False

    def _samples(self, name: str) -> ProteinSamples:
        return MaskedProteinSamples(self._packed[name], self.seed, MASKINGS if name == "train" else 1)
