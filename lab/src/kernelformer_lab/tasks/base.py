"""The interface of a task, and options that tasks share."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from kernelformer.errors import integer, positive_int
from kernelformer_lab.analysis.statistics import GROUPS, UNKNOWN, Numbers
from kernelformer_lab.data.arrays import cache_file, cache_folder
from kernelformer_lab.data.batching import Sample, check_limits
from kernelformer_lab.data.sources import SPLITS


@dataclass(frozen=True)
class Outcome:
    """Results of the evaluation of a model on a split.

    Args:
        loss: mean over all labels, in nats; of a regression the mean squared error.
        right: share of the labels that were the model's likeliest class or token; nan in regression.
        predictions: (N) classes or numbers, of models with one answer per sample.
        labels: (N), of the same.
        split: its name; "" if it is not known.
        top5: share of the samples whose label was among the five likeliest classes; nan where there are no more.
    """

    loss: float
    right: float = math.nan
    predictions: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    split: str = ""
    top5: float = math.nan


class Task(ABC):
    """A data set with its splits, its batches and its metric.

    A constructor takes keyword options with plain values. It checks them, but reads or makes no data: that is done by
    `split`. The tasks of the library are dataclasses, whose fields are the options; those that tasks share are
    inherited from `tasks.base`. Sample i of a split depends on the options and on what `fingerprint` tells apart, so
    every method sees the same samples in the same order.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line
    model: ClassVar[str]  # kind of model: "causal-lm", "classifier", ...
    metric: str  # of the class, or of a task whose options choose it
    higher_is_better: ClassVar[bool]
    metric_from_judge: ClassVar[bool] = False  # whether `judge` gives the metric, so that it is known at the end alone

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Required fields of the model's configuration: vocab_size, max_position_embeddings, ..."""

    @abstractmethod
    def split(self, name: str) -> Dataset[Sample]:
        """The samples of "train", "validation" or "test", by index."""

    def fingerprint(self) -> str:
        """Identify the data beyond the options, in a few words: the same text, the same samples."""
        return ""

    def remarks(self) -> list[str]:
        """Sentences for the user on the data read so far: rows left out, texts cut."""
        return []

    def judge(self, model: Any, data: Dataset[Sample], batch_size: int) -> dict[str, float]:
        """Scores that need more than the loss and one answer per sample: what the model writes by `generate`.

        They are made at the end of a run and by `evaluate`, not by each evaluation in between. The standard error of a
        score may stand beside it, as ``<score>_error``.

        Args:
            model: in evaluation mode.
            data: samples of a split.
            batch_size: samples at once.
        """
        return {}

    def judged_deviations(
        self, model: Any, data: Dataset[Sample], batch_size: int, most: int = GROUPS
    ) -> tuple[float, Numbers]:
        """The metric of `judge`, and what each of at most so many groups of samples adds to its standard error.

        Args:
            model: in evaluation mode.
            data: samples of a split.
            batch_size: samples at once.
            most: groups.

        Returns:
            The metric and (G), see `analysis.statistics.deviations`; NaN and `UNKNOWN` if they are not known.
        """
        return math.nan, UNKNOWN

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Make a batch: input_ids (B, L) int64, labels, and where it is padded attention_mask (B, L), 1 = real.

        By default torch's own: samples are of one length, their tensors are stacked.
        """
        batch: dict[str, Tensor] = default_collate(samples)
        return batch

    @abstractmethod
    def score(self, outcome: Outcome) -> dict[str, float]:
        """The metric by its name, and other scores; without the metric where `judge` gives it."""

    def extra_metrics(self) -> list[str]:
        """Names of those other scores that a comparison shows beside the metric, a column each."""
        return []

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Scores, by name, of what needs no model, such as guessing by frequency."""
        return {}

    def save_extra(self, folder: Path) -> None:  # noqa: B027  (most tasks have nothing to write)
        """Write what a saved model needs of the task beside it, such as a vocabulary."""

    def load_extra(self, folder: Path) -> None:  # noqa: B027
        """Take over what `save_extra` wrote, so that a saved model is never read with another vocabulary."""


class Classification(Task):
    """A task with one class per sample, scored by the share of right answers."""

    metric = "accuracy"
    higher_is_better = True

    def score(self, outcome: Outcome) -> dict[str, float]:
        """Share of right answers."""
        return {self.metric: outcome.right}


Location = str | os.PathLike[str] | None


@dataclass(kw_only=True, eq=False)
class SampleOptions(Task):
    """Sizes of the evaluation splits, and the seed: options of every task.

    Args:
        validation_samples: at most so many samples, spread evenly over the split; None: all.
        test_samples: the same for the test.
        seed: same seed, same samples.
    """

    validation_samples: int | None = None
    test_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.limits = check_limits({split: getattr(self, f"{split}_samples", None) for split in SPLITS})
        self.seed = integer("seed", self.seed, at_least=0)


@dataclass(kw_only=True, eq=False)
class FixedSamples(SampleOptions):
    """Sizes of all splits, for tasks whose training samples can be counted.

    Args:
        train_samples: at most so many samples, spread evenly over the split; None: all.
    """

    train_samples: int | None = None


@dataclass(kw_only=True, eq=False)
class MadeSamples(FixedSamples):
    """Sizes of all splits of samples that are made: how many, so that none of them may be None.

    The first samples are the test's, then come validation and training.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts = {
            split: positive_int(f"{split}_samples", getattr(self, f"{split}_samples")) for split in reversed(SPLITS)
        }


@dataclass(kw_only=True, eq=False)
class DataOption:
    """Location of the data.

    Args:
        data: path of a file or folder, or ``hub:NAME[:CONFIGURATION]``, a data set of the Hugging Face hub. Most tasks
            take None too until a split is asked for: it is enough to build a model.
    """

    data: Location = None


@dataclass(kw_only=True, eq=False)
class SkipOption:
    """Treatment of bad rows.

    Args:
        skip_bad: leave bad rows, images or files out, and say how many, instead of raising at the first.
    """

    skip_bad: bool = False


@dataclass(kw_only=True, eq=False)
class PackOption:
    """Packing of sequences that are shorter than a row.

    Args:
        pack: several of them share a row, without seeing each other, instead of one that is padded; ``batch_size``
            counts rows. For methods that take ``segment_ids``.
    """

    pack: bool = False


@dataclass(kw_only=True, eq=False)
class ShareOptions:
    """Shares by which data without splits of its own is divided.

    Args:
        validation_share: of the training rows where there is no validation split, or of one file.
        test_share: of one file, which is divided as a whole.
    """

    validation_share: float = 0.1
    test_share: float = 0.1


@dataclass(kw_only=True, eq=False)
class CacheOption(SampleOptions):
    """Cache folder for data that takes long to make.

    Args:
        cache: folder; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    cache: Location = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache_path = cache_folder(self.cache)


class MadeCache(CacheOption):
    """A cache of samples that are made, for all splits at once: a function of options, seed and format."""

    counts: dict[str, int]  # samples of each split, in the order in which they are made
    rules: Any  # a dataclass of plain values
    format: int  # to be raised when the same options come to mean other samples

    @property
    def record(self) -> str:
        """All that the samples depend on."""
        return json.dumps(
            {"format": self.format, "seed": self.seed, **self.counts, **asdict(self.rules)}, sort_keys=True
        )

    @property
    def path(self) -> Path:
        """The file of the samples in the cache."""
        return cache_file(self.cache_path, self.name, self.record)


@dataclass(kw_only=True, eq=False)
class RowOptions(DataOption, SkipOption, ShareOptions, FixedSamples):
    """All options of tasks that read rows: `DataOption`, `SkipOption`, `ShareOptions`, `FixedSamples`."""

    @property
    def reading(self) -> dict[str, Any]:
        """Options of a `data.sources.Source` beside the location."""
        return {
            "skip_bad": self.skip_bad,
            "validation_share": self.validation_share,
            "test_share": self.test_share,
            "seed": self.seed,
        }


@dataclass(kw_only=True, eq=False)
class NamedValidation(RowOptions):
    """`RowOptions`, and which split is the validation's.

    Args:
        validation_split: name of the split to validate on, such as "validation_mismatched" of GLUE's MNLI, or "test",
            as Long Range Arena does on IMDb: scores of validation are then the test's, nothing is held back from
            training, and whatever is chosen by validation is chosen on the test. None: the usual names.
    """

    validation_split: str | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """Options of a `data.sources.Source` beside the location."""
        names = None if self.validation_split is None else {"validation": self.validation_split}
        return {**super().reading, "names": names}
