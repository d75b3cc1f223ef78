"""Proteins as tokens: sequences single or concatenated, with the next or with masked amino acids as labels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.conversion.readers import EXTENSIONS, Row, not_utf8, read_lines
from kernelformer.errors import flag
from kernelformer.files import check_inside
from kernelformer_lab.data.batching import IGNORED, Sample, check_indices
from kernelformer_lab.data.sources import ALIASES, Rows, Source, mix_bits, text_value, uniform

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
        """Whether there is such a split, in the data itself or by a share."""
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
        return rows  # also if there are none: they are read to be compared, and whoever needs some says so

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


class ProteinSamples(Dataset[Sample]):
    """Samples whose every token but the first is to be predicted from those before it."""

    def __init__(self, packed: Packed) -> None:
        self.tokens, self.offsets = packed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """(N) numbers of tokens."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        ids, labels, sizes = self.gather(check_indices(indices, len(self)))
        rows = zip(*(torch.from_numpy(x).split(sizes.tolist()) for x in (ids, labels)), strict=True)
        return [{"input_ids": a, "labels": b} for a, b in rows]

    def gather(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """input_ids and labels of these samples, all in a row, and the length of each."""
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        flat = np.concatenate([self.tokens[a:b] for a, b in zip(starts, ends, strict=True)]).astype(np.int64)
        return flat, flat, ends - starts

    def label_counts(self) -> Int64:
        """How often each token is a label that counts, (vocabulary)."""
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
        """How often each token is masked, (vocabulary)."""
        counts = np.zeros(len(TOKENS), np.int64)
        step = max(1, (1 << 20) // int(np.diff(self.offsets).max()))  # few enough for the memory
        for i in range(0, len(self), step):
            labels = self.gather(np.arange(i, min(i + step, len(self))))[1]
            counts += count_tokens(labels[labels != IGNORED])
        return counts


def count_tokens(tokens: NDArray[Any]) -> Int64:
    """How often each token of the vocabulary occurs."""
    return np.bincount(tokens, minlength=len(TOKENS))
