"""The class of recipes, and settings that those of the papers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kernelformer.errors import choice, positive_int
from kernelformer_lab.training.config import Run

CPU, FULL = "cpu", "full"
FEATURES = 64  # of every method at the size for a CPU: features or landmarks
ANYWHERE = (
    "softmax",
    f"favor+:num_features={FEATURES}",
    f"relu:num_features={FEATURES}",
    "elu",
    f"fastfood-prf:num_features={FEATURES}",
    f"gmm-prf:num_features={FEATURES}",
    "gaussian",
)
BIASED = f"nprf:num_features={FEATURES}:relative=1d:max_distance=64"  # clipped, so that its cost is linear
GRID = f"nprf:num_features={FEATURES}:relative=2d"
CAUSAL = (*ANYWHERE, BIASED)
BIDIRECTIONAL = (*ANYWHERE, f"skyformer:num_landmarks={FEATURES}", f"nystromformer:num_landmarks={FEATURES}", BIASED)
IMAGES = (*BIDIRECTIONAL[:-1], GRID)
# Options of tasks, in the size for a CPU.
SHORT_TEXTS = {"length": 128, "vocab_size": 4000, "validation_samples": 128}
SHORT_SENTENCES = {"length": 128, "vocab_size": 4000, "validation_samples": 1000}
SHORT_WORDS = {"length": 256, "vocab_size": 4000, "validation_samples": 64}
SHORT_PAIRS = {"length": 256, "pairs": "halves", "validation_samples": 500}
SMALL_IMAGES = {"size": 16, "resize": True, "validation_samples": 64}
SHORT_LISTOPS = {
    "min_length": 10,
    "max_length": 128,
    "max_depth": 6,
    "max_args": 5,
    "train_samples": 50_000,
    "validation_samples": 1000,
    "test_samples": 1000,
}


@dataclass(frozen=True)
class Recipe:
    """Runs but for their attention and their seed, in one size or several.

    Args:
        about: one line.
        source: the paper and the table that it follows, or why it is as it is.
        sizes: "cpu", some minutes on a CPU, and where it follows a paper "full", as printed there; `run` makes the run,
            which checks its settings and needs torch for it. The attention of a run is the default of `train`.
        compared: what `compare` compares by default, by size; of a size that is not there softmax and the run's own.
        note: a line for each way in which the sizes differ from the paper, and for what of its setting cannot be said;
            one that begins with the name of a size and a colon is about that size alone.
    """

    about: str
    source: str
    sizes: Mapping[str, partial[Run]]
    compared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""

    def run(self, size: str = CPU) -> Run:
        """The settings of a size."""
        return self.sizes[choice("size of this recipe,", size, self.sizes)]()

    @property
    def task(self) -> str:
        """Name of the task, the same in all sizes."""
        return str(next(iter(self.sizes.values())).keywords["task"])

    def note_on(self, size: str = CPU) -> str:
        """The note on one size, in one paragraph."""
        others = tuple(f"{x}:" for x in self.sizes if x != choice("size of this recipe,", size, self.sizes))
        return " ".join(line for line in self.note.splitlines() if not line.startswith(others))

    def attentions(self, size: str = CPU) -> Sequence[str]:
        """Attentions that `compare` compares by default, in a size."""
        return self.compared.get(size) or ("softmax", str(self.run(size).attention))


def arena_rate(base: float, warmup: int, steps: int) -> dict[str, Any]:
    """The schedule of Long Range Arena as settings of a run.

        lr(i) = base min(1, i / warmup) / sqrt(max(i, warmup))

    It is largest after the warm-up, base / sqrt(warmup), which is the learning rate of a run with "inverse_sqrt". A run
    that ends before warms up on the same line, to where that has come.

    Args:
        base: what Long Range Arena calls the learning rate.
        warmup: steps.
        steps: of the run.
    """
    reached = min(positive_int("steps", steps), positive_int("warmup", warmup))
    rate = base * reached / warmup / math.sqrt(warmup)
    return {"learning_rate": rate, "schedule": "inverse_sqrt", "warmup_steps": reached, "steps": steps}


def steps_of(epochs: int, samples: int, batch_size: int) -> int:
    """Updates in so many epochs, each without the samples that do not fill a batch, but at least one."""
    return epochs * max(1, samples // batch_size)


def network(layers: int, heads: int, width: int, feed: int, **more: Any) -> dict[str, Any]:
    """Settings of a model by their names: blocks, heads, d, width of the feed-forward part."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": feed, **more}


def brief(steps: int, rate: float, every: int, **more: Any) -> dict[str, Any]:
    """Settings of a run of a few minutes, saved at its end alone; a tenth of the steps is warm-up.

    Args:
        steps: of the run.
        rate: the largest learning rate.
        every: so many steps it is evaluated.
        more: other settings.
    """
    sizes = {"steps": steps, "learning_rate": rate, "warmup_steps": steps // 10, "eval_every": every}
    return {**sizes, "save_every": None, **more}


def several(specs: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Every method with every number of features."""
    return [f"{spec}:num_features={count}" for count in counts for spec in specs]


def pair(
    about: str,
    source: str,
    *,
    full: partial[Run],
    compared: Sequence[str],
    cpu: Mapping[str, Any],
    small: Sequence[str] = BIDIRECTIONAL,
    note: Sequence[str],
) -> Recipe:
    """A paper's recipe: its full size, and the changes that make it one for a CPU.

    Args:
        about: one line.
        source: paper and table.
        full: as printed.
        compared: the attentions of the paper.
        cpu: settings that differ; what ``full`` says of the model or the task stays where ``model`` or
            ``task_options`` do not say otherwise.
        small: attentions of the size for a CPU.
        note: its lines.
    """
    own = {"attention": small[1], "decoder_attention": None, **cpu}
    for name in ("model", "task_options"):
        own[name] = {**full.keywords.get(name, {}), **own.get(name, {})}
    sizes = {FULL: full, CPU: partial(full, **own)}
    return Recipe(about, source, sizes, {FULL: list(compared), CPU: list(small)}, "\n".join(note))
