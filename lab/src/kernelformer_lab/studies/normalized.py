"""Conversion of standard and of normalized attention without fine-tuning (NPRF with RPE, 2106.12566, Fig. 2).

Four causal language models over bytes are trained with exact softmax attention: standard and normalized, each without
and with a relative position bias. Then the attention of each is computed by random features of its own kernel, without
fine-tuning. Departures from the paper, which translates with an encoder-decoder: the task, the size, and a loss in
place of BLEU. As there, normalized means scale 1, so that q . k is within [-1, 1] and only a bias can make attention
sharp, and features are drawn independently (Eq. 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from kernelformer.errors import integer, number, shape
from kernelformer.models import KernelformerPreTrainedModel
from kernelformer.models.embeddings import Embeddings
from kernelformer.modules import RelativePositions, build_attention, parse_method
from kernelformer.modules.core import AttentionCore
from kernelformer.settings import option
from kernelformer_lab.analysis.statistics import mean_and_error
from kernelformer_lab.comparison import Plan, check
from kernelformer_lab.data.batching import spread_evenly
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import plain
from kernelformer_lab.studies.base import Log, Progress, Record, Row, Study
from kernelformer_lab.studies.runs import METRIC, ByteModelSettings, bits, byte_run, trained_model
from kernelformer_lab.tasks import Task, make_task

Model = TypeVar("Model", bound=KernelformerPreTrainedModel)
CORE = ".core."  # what a method itself has: draws, and what a learned kernel has learned


def reattend(model: Model, attention: str | list[str], *, seed: int | None = None) -> Model:
    """Copy a model with the same weights and another attention.

    All weights go over, biases and tables of relative positions too; draws are new, except with the same attention and
    no ``seed``, which is a copy. Absolute positions stay what they are, also where ``positions="auto"`` would choose
    others for the new attention. What a learned kernel of the new attention has to learn starts where it starts.

    Args:
        model: any but an encoder-decoder, which has three attentions; it stays as it is.
        attention: as in `KernelformerConfig`, relative positions included.
        seed: of the draws; default: the model's.

    Raises:
        ValueError: a weight that the new model has no place for, or one that it needs beside its kernels.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"reattend takes models with one kind of attention, got {type(model).__name__}, which has three; build it "
            f"with the ones you want."
        )
    config = deepcopy(model.config)
    config.attention = attention
    if seed is not None:
        config.seed = integer("seed", seed, at_least=0)
    for part in model.modules():
        if isinstance(part, Embeddings):
            config.positions = part.positions
    with torch.random.fork_rng(devices=[]):  # first weights that are thrown away should not move others' numbers
        new = type(model)(config)
    everything = model.state_dict(keep_vars=True)
    weights = {name: x for name, x in everything.items() if isinstance(x, nn.Parameter)}
    _check_places(weights, new.state_dict(keep_vars=True), model.config.attention, attention)
    same = attention == model.config.attention and seed is None
    new.load_state_dict(everything if same else weights, strict=False)
    module: nn.Module = new
    module.to(device=model.device, dtype=model.dtype)
    module.train(model.training)
    return new


def _check_places(
    weights: Mapping[str, Tensor], places: Mapping[str, Tensor], before: str | list[str], after: str | list[str]
) -> None:
    """Raise for the first weight of one of two models that the other does not have in the same shape."""
    for name, x in weights.items():
        if name not in places:
            raise ValueError(
                f"{name} of a model with {before!r} would be lost: one with {after!r} has no place for it; give an "
                f"attention with the same relative positions and learned parts."
            )
        if places[name].shape != x.shape:
            raise ValueError(
                f"{name} of a model with {before!r} is {shape(x)}, of one with {after!r} {shape(places[name])}; give "
                f"an attention with relative positions and learned parts of the same size."
            )
    for name, x in places.items():
        if isinstance(x, nn.Parameter) and CORE not in name and name not in weights:
            raise ValueError(
                f"{name} of a model with {after!r} would not be trained: one with {before!r} has no such weight; give "
                f"an attention with the same relative positions and gates."
            )


@torch.no_grad()
def kernel_norms(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Norms ``|x| sqrt(scale)`` of what the kernels of a model see, of unit length where it normalizes them.

    Args:
        tokens: (B, L).

    Returns:
        ``query`` and ``key``: means over layers, heads and tokens; ``largest`` of both; ``bias``: mean over layers and
        heads of the range of the table of relative positions, 0 without one.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def measure_norms(core: AttentionCore, given: tuple[Tensor, ...]) -> None:
        query, key = (F.normalize(x, dim=-1) if core.normalize_qk else x for x in given[:2])
        size = math.sqrt(core.scale)
        seen.append((size * query.norm(dim=-1).flatten(), size * key.norm(dim=-1).flatten()))

    hooks = [x.register_forward_pre_hook(measure_norms) for x in model.modules() if isinstance(x, AttentionCore)]
    try:
        model(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    query, key = (torch.cat(x).double() for x in zip(*seen, strict=True))
    positions = [x for x in model.modules() if isinstance(x, RelativePositions) and x.scheme != "alibi"]
    tables = [x.weight.flatten(1) for x in positions]
    ranges = torch.cat([x.amax(1) - x.amin(1) for x in tables]) if tables else query.new_zeros(1)
    largest = max(float(query.max()), float(key.max()))
    means = {"query": float(query.mean()), "key": float(key.mean())}
    return {**means, "largest": largest, "bias": float(ranges.mean())}


WINDOWS = 16  # of the validation split, in which norms are measured
MODELS = "normalized"  # the folder of the trained models


@dataclass(frozen=True, kw_only=True)
class NormalizedSettings(ByteModelSettings):
    """Settings of this study.

    ``scale`` is that of normalized attention: the kernel sees vectors of length sqrt(scale), so that a larger one can
    attend more sharply, and needs more features.
    """

    scale: float = option(1.0, "of normalized attention; the paper's is 1")
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of random features", least=1)
    draws: int = option(5, "of the features", least=2)
    draw: str = option("iid", "how they are drawn: iid as in the paper, orthogonal, ...")


@dataclass(frozen=True)
class Variant:
    """One of the four models."""

    name: str
    normalized: bool
    relative: bool

    def trained(self, settings: NormalizedSettings) -> str:
        """The attention that it is trained with."""
        own = f":normalize_qk=True:scale={settings.scale:g}" if self.normalized else ""
        return f"softmax{own}{self._positions}"

    def converted(self, settings: NormalizedSettings, features: int) -> str:
        """The attention that it is converted to: random features of the same kernel."""
        return f"{self.method(settings, features)}{self._positions}"

    def method(self, settings: NormalizedSettings, features: int) -> str:
        """The converted attention without its positions."""
        own = f"nprf:scale={settings.scale:g}" if self.normalized else "favor+"
        return f"{own}:num_features={features}:draw={settings.draw}"

    @property
    def _positions(self) -> str:
        return ":relative=1d" if self.relative else ""


VARIANTS = (
    Variant("standard", normalized=False, relative=False),
    Variant("standard, relative", normalized=False, relative=True),
    Variant("normalized", normalized=True, relative=False),
    Variant("normalized, relative", normalized=True, relative=True),
)


def check_settings(settings: NormalizedSettings) -> None:
    """Raise for settings that no model or no feature map takes, before anything is trained."""
    if settings.width % settings.heads:
        raise ValueError(f"width must be a multiple of heads, got {settings.width} and {settings.heads}.")
    number("lr", settings.lr, above=0)
    number("scale", settings.scale, above=0)
    features = settings.features
    if not features or len(set(features)) != len(features):
        raise ValueError(f"features must be different numbers, at least one, got {list(features)}.")
    for variant in VARIANTS:
        method, options = parse_method(variant.method(settings, min(features)))
        build_attention(method, head_dim=settings.width // settings.heads, num_heads=settings.heads, **options)


def steps(settings: NormalizedSettings) -> int:
    """A step for the training of each model, and one for each number of features."""
    return len(VARIANTS) * (1 + len(settings.features))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Train what is not trained yet, convert and measure; models in the folder "normalized" are resumed.

    Raises:
        StoppedError: Ctrl-C or SIGTERM in a training, which was saved.
        TrainingError: the folder has models of other settings or of other data, or one does not train.
    """
    settings = record.settings
    check_settings(settings)
    plan = Plan("normalized", [byte_run(settings, x.trained(settings)) for x in VARIANTS], record.folder / MODELS)
    check(plan, resume=True)
    models: dict[str, Row] = {}
    # The settings by their older key.
    record.figures = {"setting": {**plain(settings), "features": sorted(settings.features)}, "models": models}
    for variant, training in zip(VARIANTS, plan.runs, strict=True):
        model, seconds = trained_model(variant.name, training, plan.folder_of(training), log)
        progress()
        task = make_task(training.task, **training.task_options)
        one = {"attention": variant.trained(settings), METRIC: bits(model, task)}
        models[variant.name] = {**one, "norms": kernel_norms(model, _tokens(task)), "seconds": seconds, "converted": []}
        for m in sorted(settings.features):
            log(f"{variant.name}: {m} features, {settings.draws} draws")
            spec = variant.converted(settings, m)
            draws = [bits(reattend(model, spec, seed=draw), task) for draw in range(settings.draws)]
            mean, error = mean_and_error(draws)
            row = {"features": m, "mean": mean, "standard_error": error, "draws": draws}
            models[variant.name]["converted"].append(row)
            progress()


def _tokens(task: Task) -> Tensor:
    """Some windows of the validation split, spread evenly, (B, L)."""
    windows: Any = task.split("validation")
    return torch.stack([windows[int(i)]["input_ids"] for i in spread_evenly(len(windows), WINDOWS)])


def tables(record: Record) -> list[Table]:
    """Bits per byte, norms, and what each number of features adds."""
    rows = []
    for name, x in record.figures["models"].items():
        before, norms = x[METRIC], x["norms"]
        cells = [f"{before:.3f}", *(f"{norms[key]:.2f}" for key in ("query", "key", "largest")), f"{norms['bias']:.1f}"]
        losses = [f"{y['mean'] - before:+.3f} ± {y['standard_error']:.3f}" for y in x["converted"]]
        rows.append((name, *cells, *losses))
    features = [f"m = {m}" for m in sorted(record.settings.features)]
    return [
        table(
            f"Bits per byte of models trained with softmax attention, and what random features in its place add "
            f"without fine-tuning (mean over {record.settings.draws} draws, ± standard error)",
            ("trained", "bits", "|q|", "|k|", "largest", "bias range", *features),
            rows,
            caption="|q|, |k|: mean norms of what the kernel sees, times sqrt(scale); bias range: mean over heads",
        )
    ]


def picture(record: Record, path: Path) -> None:
    """Draw the paper's Fig. 2: after conversion over the number of features; dashed: before."""
    features = sorted(record.settings.features)
    with drawing(path, (7, 4.6)) as (figure, ((axis,),)):
        for variant in VARIANTS:
            x = record.figures["models"][variant.name]
            look: dict[str, Any] = {"color": "C0" if variant.normalized else "C3"}
            look |= {"linestyle": "-", "marker": "o"} if variant.relative else {"linestyle": ":", "marker": "s"}
            look["label"] = f"{variant.name} (mean norm {(x['norms']['query'] + x['norms']['key']) / 2:.1f})"
            means, errors = ([y[name] for y in x["converted"]] for name in ("mean", "standard_error"))
            axis.errorbar(features, means, yerr=errors, capsize=3, **look)
            alpha = 1.0 if variant.relative else 0.45
            axis.axhline(x[METRIC], color=look["color"], linestyle="--", linewidth=1, alpha=alpha)
        axis.set(title="converted to random features without fine-tuning; dashed: as trained", xlabel="features")
        axis.set_ylabel("bits per byte")
        axis.set_xscale("log", base=2)
        axis.set_xticks(features)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(True, alpha=0.2)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")


STUDY = Study(
    "normalized",
    "NPRF with RPE (2106.12566), Fig. 2",
    NormalizedSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    writes="the models",
    examples=(("--steps 600 --features 16,64,256", "four small models, made linear"),),
)
