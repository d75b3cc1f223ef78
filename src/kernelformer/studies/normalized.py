"""Why queries and keys want unit length where attention is converted (kernelized-rpe Fig. 2).

Four causal language models over bytes are trained with exact softmax attention: standard and normalized, each without
and with a relative position bias. Then the attention of each is computed by random features of its own kernel, without
fine-tuning. Departures from the paper, which translates with an encoder-decoder: the task, the size, and a loss in
place of BLEU. As there, normalized means scale 1, so that q . k is within [-1, 1] and only a bias can make attention
sharp, and features are drawn independently (Eq. 5).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kernelformer.data.batching import spread_evenly
from kernelformer.errors import integer, number, positive_int
from kernelformer.modules import build_attention, parse_method
from kernelformer.pipelines.compare import Plan, check
from kernelformer.studies.normalized_models import Norms, kernel_norms, reattend
from kernelformer.tasks import Task, make_task
from kernelformer.training import Run, StoppedError, TrainingError, evaluate, load_run, train

METRIC = "bits_per_byte"
FEATURES = (16, 32, 64, 128, 256)
WINDOWS = 16  # of the validation split, in which norms are looked at
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """One of the four models."""

    name: str
    normalized: bool
    relative: bool

    def trained(self, setting: Setting) -> str:
        """The attention that it is trained with."""
        own = f":normalize_qk=True:scale={setting.scale:g}" if self.normalized else ""
        return f"softmax{own}{self._positions}"

    def converted(self, setting: Setting, features: int) -> str:
        """Random features of the same kernel."""
        return f"{self.method(setting, features)}{self._positions}"

    def method(self, setting: Setting, features: int) -> str:
        """The same without its positions."""
        own = f"nprf:scale={setting.scale:g}" if self.normalized else "favor+"
        return f"{own}:num_features={features}:draw={setting.draw}"

    @property
    def _positions(self) -> str:
        return ":relative=1d" if self.relative else ""


VARIANTS = (
    Variant("standard", normalized=False, relative=False),
    Variant("standard, relative", normalized=False, relative=True),
    Variant("normalized", normalized=True, relative=False),
    Variant("normalized, relative", normalized=True, relative=True),
)


@dataclass(frozen=True)
class Setting:
    """One size of the study; the defaults are for a CPU.

    Args:
        data: a file or folder of text; None: the standard library of Python.
        steps: of training, for each model.
        length: bytes of a sample.
        layers, width, heads: of the models.
        batch: samples per step.
        lr: the largest learning rate; tables of relative positions take ten times that.
        scale: of normalized attention; 1 is the paper's. The kernel sees vectors of length sqrt(scale): a larger one
            can attend more sharply, and needs more features.
        features: numbers of them to convert to.
        draws: of the features, for each number; at least 2.
        draw: how frequencies are drawn; the paper's are independent.
        samples: windows of the validation split that the models are evaluated on.
        seed: of the training.
    """

    data: str | None = None
    steps: int = 600
    length: int = 256
    layers: int = 2
    width: int = 128
    heads: int = 4
    batch: int = 8
    lr: float = 5e-3
    scale: float = 1.0
    features: tuple[int, ...] = FEATURES
    draws: int = 5
    draw: str = "iid"
    samples: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "length", "layers", "width", "heads", "batch", "samples"):
            positive_int(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        number("lr", self.lr, above=0)
        number("scale", self.scale, above=0)
        integer("draws", self.draws, at_least=2)
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"features must be different numbers, at least one, got {list(self.features)}.")
        object.__setattr__(self, "features", tuple(sorted(positive_int("features", m) for m in self.features)))
        for variant in VARIANTS:  # what a map refuses should be heard of before anything is trained
            method, options = parse_method(variant.method(self, self.features[0]))
            build_attention(method, head_dim=self.width // self.heads, num_heads=self.heads, **options)

    def run(self, variant: Variant) -> Run:
        """The training of one model."""
        data = {} if self.data is None else {"data": self.data}
        return Run(
            task="bytes",
            attention=variant.trained(self),
            task_options={"length": self.length, "validation_samples": self.samples, **data},
            model={
                "hidden_size": self.width,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
            },
            steps=self.steps,
            batch_size=self.batch,
            learning_rate=self.lr,
            bias_lr=10 * self.lr,
            warmup_steps=self.steps // 10,
            schedule="cosine",
            seed=self.seed,
            save_every=100,
            keep=1,
            log_every=25,
        )


@dataclass
class Converted:
    """One model: what it is, and its bits per byte before and after conversion."""

    attention: str
    before: float
    norms: Norms
    seconds: float  # of training
    after: dict[int, list[float]] = field(default_factory=dict)  # by features, one for each draw

    def mean(self, features: int) -> float:
        """Over the draws."""
        return statistics.fmean(self.after[features])

    def standard_error(self, features: int) -> float:
        """Of that mean."""
        return statistics.stdev(self.after[features]) / math.sqrt(len(self.after[features]))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        head = {"attention": self.attention, METRIC: self.before, "norms": asdict(self.norms), "seconds": self.seconds}
        after = [
            {"features": m, "mean": self.mean(m), "standard_error": self.standard_error(m), "draws": values}
            for m, values in self.after.items()
        ]
        return {**head, "converted": after}


@dataclass
class Found:
    """What the study has measured, by the name of the model."""

    setting: Setting
    models: dict[str, Converted] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        setting = {**asdict(self.setting), "data": None if self.setting.data is None else Path(self.setting.data).name}
        return {"setting": setting, "models": {name: x.as_json() for name, x in self.models.items()}}


class _Progress(TrainerCallback):
    """Tells the loss of every interval."""

    def __init__(self, name: str, tell: Tell) -> None:
        self.name, self.tell = name, tell

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Where training is."""
        if "loss" in logs:
            self.tell(f"{self.name}: step {state.global_step} of {state.max_steps}, loss {logs['loss']:.3f}")


def stages(setting: Setting) -> int:
    """How often `run` says that something is done."""
    return len(VARIANTS) * (1 + len(setting.features))


def run(
    setting: Setting,
    folder: Path,
    tell: Tell = lambda _: None,
    done: Callable[[], None] = lambda: None,
    *,
    again: str = "the same call",
) -> Found:
    """Train what is not trained yet, convert and measure.

    Args:
        setting: sizes and data.
        folder: of the trained models; a study in the same folder takes them, and goes on with an unfinished one.
        tell: hears what is being done.
        done: called after each of `stages` stages.
        again: what goes on with a study that was stopped, for the message.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has models of other settings or of other data, or one does not train.
    """
    plan = Plan("normalized", [setting.run(x) for x in VARIANTS], folder)
    check(plan, resume=True)
    found = Found(setting)
    for variant, training in zip(VARIANTS, plan.runs, strict=True):
        model, seconds = _trained(variant.name, training, plan.place(training), tell, again)
        done()
        task = make_task(training.task, **training.task_options)
        one = Converted(variant.trained(setting), _bits(model, task), kernel_norms(model, _tokens(task)), seconds)
        for m in setting.features:
            tell(f"{variant.name}: {m} features, {setting.draws} draws")
            spec = variant.converted(setting, m)
            one.after[m] = [_bits(reattend(model, spec, seed=draw), task) for draw in range(setting.draws)]
            done()
        found.models[variant.name] = one
    return found


def _trained(name: str, training: Run, place: Path, tell: Tell, again: str) -> tuple[Any, float]:
    """The model of a run, trained now or before, and the seconds that it took."""
    tell(f"{name}: training")
    try:
        result = train(training, place, resume=True, quiet=True, callbacks=[_Progress(name, tell)])
    except StoppedError:
        raise StoppedError(f"stopped in the training of the {name} model; {again} goes on from there.") from None
    if result.diverged:
        raise TrainingError(
            f"the {name} model diverged at step {result.steps} with lr={training.learning_rate:g}; take a smaller one, "
            f"and another folder than {place.parent}."
        )
    return load_run(place)[1].eval(), result.seconds


def _tokens(task: Task) -> Tensor:
    """Some windows of the validation split, spread evenly, (B, L)."""
    windows: Any = task.split("validation")
    return torch.stack([windows[int(i)]["input_ids"] for i in spread_evenly(len(windows), WINDOWS)])


def _bits(model: Any, task: Task) -> float:
    return evaluate(model, task, batch_size=16)[METRIC]


def tables(found: Found) -> list[Table]:
    """For the terminal."""
    setting = found.setting
    out = Table(
        title=f"Bits per byte of models trained with softmax attention, and what random features in its place add "
        f"without fine-tuning (mean over {setting.draws} draws, ± standard error)"
    )
    out.add_column("trained", no_wrap=True)
    for name in ("bits", "|q|", "|k|", "largest", "bias range"):
        out.add_column(name, justify="right", no_wrap=True)
    for m in setting.features:
        out.add_column(f"m = {m}", justify="right", no_wrap=True)
    for name, x in found.models.items():
        norms = x.norms
        values = [f"{norms.query:.2f}", f"{norms.key:.2f}", f"{norms.largest:.2f}", f"{norms.bias:.1f}"]
        losses = [f"{x.mean(m) - x.before:+.3f} ± {x.standard_error(m):.3f}" for m in setting.features]
        out.add_row(name, f"{x.before:.3f}", *values, *losses)
    out.caption = "|q|, |k|: mean norms of what the kernel sees, times sqrt(scale); bias range: of a head's table, mean"
    return [out]


def picture(found: Found, path: Path) -> None:
    """The paper's Fig. 2: after conversion over the number of features; dashed: before."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    features = found.setting.features
    figure, axis = plt.subplots(figsize=(7, 4.6), constrained_layout=True)
    for variant in VARIANTS:
        x = found.models[variant.name]
        color, style = "C3" if not variant.normalized else "C0", "-" if variant.relative else ":"
        label = f"{variant.name} (mean norm {(x.norms.query + x.norms.key) / 2:.1f})"
        spread: dict[str, Any] = {"yerr": [x.standard_error(m) for m in features], "capsize": 3, "label": label}
        look: dict[str, Any] = {"color": color, "linestyle": style, "marker": "o" if variant.relative else "s"}
        axis.errorbar(features, [x.mean(m) for m in features], **spread, **look)
        axis.axhline(x.before, color=color, linestyle="--", linewidth=1, alpha=1.0 if variant.relative else 0.45)
    axis.set_title("converted to random features without fine-tuning; dashed: as trained")
    axis.set_xlabel("features")
    axis.set_ylabel("bits per byte")
    axis.set_xscale("log", base=2)
    axis.set_xticks(features)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(True, alpha=0.2)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
