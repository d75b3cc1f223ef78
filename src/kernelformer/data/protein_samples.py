"""Proteins as tokens: sequences single or concatenated, with the next or with masked amino acids as labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from kernelformer.data.batching import IGNORED, Sample, check_indices
from kernelformer.data.proteins import AMINO_ACIDS
from kernelformer.data.splits import mix_bits, uniform

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
