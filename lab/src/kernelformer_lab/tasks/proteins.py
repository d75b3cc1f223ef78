"""Language modelling of proteins, single or concatenated, in one direction or with masks (Performer, Sec. 4.4, 4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kernelformer.conversion.readers import hash_files
from kernelformer.errors import choice, flag, integer
from kernelformer.files import check_regular, existing
from kernelformer_lab.data.batching import IGNORED, PackedRows, Sample, padded, padded_segments, spread_evenly
from kernelformer_lab.data.proteins import (
    BOS,
    EOS,
    FIRST,
    MASKINGS,
    PAD,
    TOKENS,
    MaskedProteinSamples,
    Packed,
    ProteinSamples,
    Sequences,
    count_tokens,
    pack,
)
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.tasks.base import Location, Outcome, PackOption, RowOptions

_ROUND = 64  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class Proteins(PackOption, RowOptions):
    """Predict the next amino acid of a protein; scored by perplexity and accuracy (Performer, App. A.1, C).

    Tokens: `data.protein_samples.TOKENS`: the 20 standard amino acids, the 5 anomalous ones B, O, U, X and Z as in the
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

    Other options: see `tasks.options.PackOption` and `RowOptions`; of what deduplication leaves, ``train_samples`` and
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
