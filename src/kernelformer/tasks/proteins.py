"""Language modelling of proteins, single or concatenated, in one direction or with masks (performer Sec. 4.4, 4.5)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelformer.data import sources
from kernelformer.data.batching import check_indices, check_limits, padded, spread_evenly
from kernelformer.data.local_files import check_regular, existing
from kernelformer.data.proteins import AMINO_ACIDS, Sequences
from kernelformer.errors import choice, flag, integer
from kernelformer.tasks.base import SPLITS, Outcome, Sample, Task

TOKENS = ("<pad>", "<bos>", "<eos>", "<mask>", *AMINO_ACIDS)
PAD, BOS, EOS, MASK, FIRST = range(5)
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # of the amino acids; of the chosen ones
MASKINGS = 10  # of each training sample
_IGNORED = -100
_ROUND = 64  # batches have a multiple of this length, so that there are few different shapes
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


class Split(Dataset[Sample]):
    """Samples whose every token but the first is to be predicted from those before it."""

    def __init__(self, packed: Packed) -> None:
        self.tokens, self.offsets = packed

    def __len__(self) -> int:
        return len(self.offsets) - 1

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

    def labelled(self) -> Int64:
        """How often each token is a label that counts, (vocabulary)."""
        return _count(self.tokens[: self.offsets[-1]]) - _count(self.tokens[self.offsets[:-1]])


class Masks(Split):
    """Samples some of whose amino acids are hidden: a function of (seed, index, position), so many for each sample."""

    def __init__(self, packed: Packed, seed: int, maskings: int) -> None:
        super().__init__(packed)
        self.seed, self.maskings = seed, maskings

    def __len__(self) -> int:
        return super().__len__() * self.maskings

    def gather(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """One number in [0, 1) for each token says all: whether it is chosen, what becomes of it, which one comes."""
        flat, _, sizes = super().gather(indices % super().__len__())
        starts = np.cumsum(sizes) - sizes
        within = np.arange(len(flat)) - np.repeat(starts, sizes)
        keys = np.repeat(sources.mixed(indices.astype(np.uint64)), sizes) + within.astype(np.uint64)
        place = sources.spread(keys.view(np.int64), self.seed) / CHOSEN
        place[flat < FIRST] = np.inf
        # Where chance chooses nothing, the nearest is hidden: a sample without labels has no mean loss.
        nearest = place == np.repeat(np.minimum.reduceat(place, starts), sizes)
        labels = np.where((place < 1) | nearest, flat, _IGNORED)
        ids = np.where((place < MASKED) | (nearest & (place >= 1)), MASK, flat)
        other = np.flatnonzero((place >= MASKED) & (place < MASKED + REPLACED))
        drawn = ((place[other] - MASKED) / REPLACED * len(AMINO_ACIDS)).astype(np.int64)
        ids[other] = FIRST + np.minimum(drawn, len(AMINO_ACIDS) - 1)
        return ids, labels, sizes

    def labelled(self) -> Int64:
        """Those that are hidden."""
        found = np.zeros(len(TOKENS), np.int64)
        step = max(1, (1 << 20) // int(np.diff(self.offsets).max()))  # few enough for the memory
        for i in range(0, len(self), step):
            labels = self.gather(np.arange(i, min(i + step, len(self))))[1]
            found += _count(labels[labels != _IGNORED])
        return found


def _count(tokens: NDArray[Any]) -> Int64:
    return np.bincount(tokens, minlength=len(TOKENS))


class Proteins(Task):
    """Predict the next amino acid of a protein; scored by perplexity and accuracy (performer App. A.1, C).

    Tokens: `TOKENS`: the 20 standard amino acids, the 5 anomalous ones B, O, U, X and Z as in the paper, and marks. Any
    other letter is an error, also J (leucine or isoleucine), which the paper's 25 do not have; lower case is raised.

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
        data: path or ``hub:NAME``.
        field: of rows, for kinds of data that have some.
        test_file: another file for the test, such as proteins of other families. Training and validation stay what
            they are without it (so does their share of one file), and sequences they have are left out of it.
        length: tokens of a sample, at most; None: 1024, or 8192 when concatenated.
        concatenate: windows of a chain instead of single sequences.
        deduplicate: use each sequence once, in whichever split: the first of a file; of several splits the test's, then
            the validation's. Sequences are compared whole, before they are cut.
        train_samples: at most so many sequences, spread evenly over what is left of the split; None: all.
        validation_samples: the same for the validation.
        test_samples: the same for the test.
        skip_bad: leave bad sequences out, and say how many, instead of raising at the first.
        validation_share: of the sequences of one file, or of the training's.
        test_share: of the sequences of one file.
        seed: of the division, and of masks.

    Cost: 0.2 seconds for 20,000 sequences, and two bytes per amino acid.
    """

    name = "proteins"
    about = "next amino acid of protein sequences, single or concatenated"
    model = "causal-lm"
    metric = "perplexity"
    higher_is_better = False
    marked: ClassVar[bool] = True  # whether a single sequence has a start mark

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | None = None,
        field: str = "sequence",
        test_file: str | os.PathLike[str] | None = None,
        length: int | None = None,
        concatenate: bool = False,
        deduplicate: bool = True,
        train_samples: int | None = None,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        skip_bad: bool = False,
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.concatenate = flag("concatenate", concatenate)
        self.length = integer("length", (8192 if concatenate else 1024) if length is None else length, at_least=2)
        self.limits = check_limits({"train": train_samples, "validation": validation_samples, "test": test_samples})
        self.seed = integer("seed", seed, at_least=0)
        shares = {"validation_share": validation_share, "test_share": test_share}
        self.source = Sequences(data, str(field), deduplicate, skip_bad=skip_bad, seed=self.seed, **shares)
        self.test_file = None if test_file is None else Path(str(test_file)).expanduser()
        if self.test_file is not None:
            check_regular(existing(self.test_file, f"one with {self.source.layout}", option="test_file"))
        self._packed: dict[str, Packed] = {}
        self._remarks: dict[str, str] = {}

    def settings(self) -> dict[str, Any]:
        """The vocabulary, and room for the longest sample."""
        marks = {"bos_token_id": BOS, "eos_token_id": EOS} if self.marked else {}
        sizes = {"vocab_size": len(TOKENS), "max_position_embeddings": self.length}
        return {**sizes, "pad_token_id": PAD, **marks}

    def fingerprint(self) -> str:
        """Names and hash of all files, or what ``datasets`` calls the same rows."""
        more = [] if self.test_file is None else [sources.hash_files([self.test_file])]
        return "; ".join([self.source.fingerprint(), *more])

    def remarks(self) -> list[str]:
        """What was left out or cut."""
        return [*self.source.remarks, *self._remarks.values()]

    def split(self, name: str) -> Split:
        """Samples; the other splits are read too, where sequences could be in both."""
        if choice("split", name, SPLITS) not in self._packed:
            rows = self._sequences(name)
            chosen = spread_evenly(len(rows), self.limits[name])
            self._packed[name] = self._pack(name, [rows[i] for i in chosen])
        return self._samples(name)

    def _samples(self, name: str) -> Split:
        return Split(self._packed[name])

    def _sequences(self, name: str) -> list[bytes]:
        """Of a split, without those that others have."""
        source = self.source
        others = {"train": ("validation", "test"), "validation": ("test",), "test": ()}[name]
        if name == "test" and self.test_file is not None:
            others, rows = ("train", "validation"), source.read(self.test_file)
        else:
            rows = source.rows(name)[source.field]
        if not source.deduplicate:
            return rows
        known = {x for other in others if source.has(other) for x in source.rows(other)[source.field]}
        found = [x for x in rows if x not in known]
        source.remark(len(rows) - len(found), len(rows), f"of {name}, which {' or '.join(others)} has too")
        return found

    def _pack(self, name: str, rows: list[bytes]) -> Packed:
        start = self.marked and not self.concatenate
        tokens, offsets = pack(rows, self.length, concatenate=self.concatenate, start=start)
        if len(offsets) < 2:
            size = f"{len(tokens):,} tokens, a sample {self.length:,}" if self.concatenate else "no sequences left"
            raise ValueError(f"the {name} split of {self.source.place} has {size}; add sequences or enlarge its share.")
        many, most = f"of {len(rows):,} sequences of {name}", self.length - start
        if rest := len(tokens) - int(offsets[-1]):
            self._remarks[name] = f"left out the last {rest:,} tokens {many}, too few for a sample"
        elif not self.concatenate and (cut := sum(len(x) > most for x in rows)):
            self._remarks[name] = f"{cut:,} {many} are longer than {most:,} amino acids and were cut"
        return tokens, offsets

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), labels (B, L), and of single sequences attention_mask (B, L), 1 = real, and labels -100."""
        ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
        if self.concatenate:
            return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}
        tokens, mask = padded(ids, multiple=_ROUND, longest=self.length, value=PAD)
        wanted, _ = padded(labels, multiple=_ROUND, longest=self.length, value=_IGNORED)
        return {"input_ids": tokens, "attention_mask": mask, "labels": wanted}

    def score(self, found: Outcome) -> dict[str, float]:
        """exp(loss), and the share of labels that were likeliest."""
        with np.errstate(over="ignore"):
            return {self.metric: float(np.exp(found.loss)), "accuracy": found.right}

    def empirical_baseline(self, split: str) -> dict[str, float]:
        """Scores of guessing by frequency, over the labels by which a model is scored (performer App. C.2).

            p_a = (n_a + 1) / sum_b (n_b + 1),   perplexity = exp(-mean_i log p_(label i))

        n are counts in the training samples as cut; accuracy is that of always saying the most frequent. One is added,
        as the authors' code does, because the training set may lack what the test has.
        """
        labels, train = self.split(split).labelled(), self.split("train")
        counts = _count(train.tokens[: train.offsets[-1]])
        some = np.arange(len(TOKENS)) >= FIRST
        some[EOS] = labels[EOS] > 0
        chance = (counts[some] + 1) / (counts[some] + 1).sum()
        shares = labels[some] / labels[some].sum()
        return self.score(Outcome(-float(shares @ np.log(chance)), float(shares[chance.argmax()])))

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """`empirical_baseline` by its name in the paper."""
        return {"empirical baseline": self.empirical_baseline(split)}


class MaskedProteins(Proteins):
    """Predict hidden amino acids of a protein from all others (performer App. A.1).

    Data, options and concatenation are those of `Proteins`; a single sequence has no start mark, so all of ``length``
    are amino acids. Each is chosen with probability 15%, at least one of a sample; of the chosen 80% become a mask, 10%
    any of the 25, 10% stay; they alone are labels. End marks are never chosen. What is chosen is a function of (seed,
    index, position): evaluation is always the same, and a training sequence is there ten times, hidden differently.
    Copying what is no mask is right for 10% of the labels; the empirical baseline does not copy, so it is no floor.
    """

    name = "proteins-masked"
    about = "hidden amino acids of protein sequences, single or concatenated"
    model = "masked-lm"
    marked = False

    def _samples(self, name: str) -> Split:
        return Masks(self._packed[name], self.seed, MASKINGS if name == "train" else 1)
