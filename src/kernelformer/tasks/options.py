"""Options that tasks share, each declared and explained once; a task inherits those that it has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kernelformer.data.array_cache import cache_folder
from kernelformer.data.batching import check_limits
from kernelformer.data.splits import SPLITS
from kernelformer.errors import integer, positive_int
from kernelformer.tasks.base import Task

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
    """Where the data is.

    Args:
        data: path of a file or folder, or ``hub:NAME[:CONFIGURATION]``, a data set of the Hugging Face hub. Most tasks
            take None too until a split is asked for: it is enough to build a model.
    """

    data: Location = None


@dataclass(kw_only=True, eq=False)
class SkipOption:
    """What becomes of bad rows.

    Args:
        skip_bad: leave bad rows, images or files out, and say how many, instead of raising at the first.
    """

    skip_bad: bool = False


@dataclass(kw_only=True, eq=False)
class PackOption:
    """What becomes of sequences that are shorter than a row.

    Args:
        pack: several of them share a row, without seeing each other, instead of one that is padded; ``batch_size``
            counts rows. For methods that take ``segment_ids``.
    """

    pack: bool = False


@dataclass(kw_only=True, eq=False)
class ShareOptions:
    """How data without splits of its own is divided.

    Args:
        validation_share: of the training rows where there is no validation split, or of one file.
        test_share: of one file, which is divided as a whole.
    """

    validation_share: float = 0.1
    test_share: float = 0.1


@dataclass(kw_only=True, eq=False)
class CacheOption(SampleOptions):
    """Where what takes long to make is kept.

    Args:
        cache: folder; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    cache: Location = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache_path = cache_folder(self.cache)


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
