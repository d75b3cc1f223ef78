"""Instability score along training (Skyformer, 2111.00035, App. F).

    tau_i = |f(x_i; W_i) - f(x_i; W_(i-1))|^2 / |W_i - W_(i-1)|^2

with the logits f of a classifier for the batch x_i of step i, and all its weights W before and after that step. Scores
are taken over some consecutive steps, in evaluation mode and with the features that are drawn then. Departures from the
paper: the size of the model and of ListOps; it does not say at which steps it measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kernelformer.errors import integer
from kernelformer.settings import SEED, Settings, option
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.recipes.catalogue import change, find_recipe
from kernelformer_lab.recipes.papers.base import CPU
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Study
from kernelformer_lab.training import Run, TrainingError, train

MODELS = "instability"  # the folder of the runs


@dataclass(frozen=True, kw_only=True)
class InstabilitySettings(Settings):
    """Settings of this study."""

    attention: tuple[str, ...] = option(("softmax", "gaussian", "skyformer:num_landmarks=64"), SPECS)
    recipe: str = option("sky-listops", "of a classifier")
    steps: int = option(300, "of training", least=1)
    starts: tuple[int, ...] = option((40, 280), "steps after which scores are taken", least=0)
    window: int = option(20, "consecutive steps with scores", least=1)
    batch: int = option(32, "samples per step", least=1)
    lr: float = option(2e-3, "the largest", name="learning_rate")
    seed: int = option(0, SEED, least=0)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all trainable parameters by name."""
    return {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}


@torch.no_grad()
def instability_score(model: nn.Module, before: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> float:
    """``|f(x; W) - f(x; W_before)|^2 / |W - W_before|^2`` of a model whose outputs have logits, as its mode is."""
    now = weights_of(model)
    moved = sum(float((now[name] - x).double().square().sum()) for name, x in before.items())
    outputs = [functional_call(model, dict(w), kwargs=dict(inputs)).logits.double() for w in (now, before)]
    return float((outputs[0] - outputs[1]).square().sum()) / moved


class InstabilityRecorder(TrainerCallback):
    """Callback that takes the score of every step of some windows.

    Args:
        starts: steps after which a window begins.
        length: of a window, in steps.
    """

    def __init__(self, starts: Sequence[int], length: int) -> None:
        self.steps = {start + i: start for start in starts for i in range(length)}
        self.scores: dict[int, list[float]] = {start: [] for start in starts}
        self._inputs: dict[str, Any] = {}
        self._before: dict[str, Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Keep the inputs of every step."""

        def keep(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
            if model.training:
                self._inputs = given

        model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Keep the weights before a step of a window."""
        if state.global_step in self.steps:
            self._before = weights_of(model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the score of the step."""
        start = self.steps.get(state.global_step - 1)
        if start is not None:
            model.eval()
            self.scores[start].append(instability_score(model, self._before, self._inputs))
            model.train()


def run_of(settings: InstabilitySettings, attention: str) -> Run:
    """The training run of an attention, with a constant rate after a tenth of the steps, without clipping."""
    return change(
        find_recipe(settings.recipe).run(CPU),
        {
            "attention": attention,
            "steps": settings.steps,
            "batch_size": settings.batch,
            "learning_rate": settings.lr,
            "warmup_steps": settings.steps // 10,
            "schedule": "constant",
            "max_grad_norm": None,
            "eval_every": None,
            "save_every": None,
            "seed": settings.seed,
        },
    )


def steps(settings: InstabilitySettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return len(settings.attention)


def run(record: Record, log: Log, progress: Progress) -> None:
    """Train every attention and take its scores; what is on record is not trained again.

    Raises:
        ValueError: a window that ends after the training, or windows that overlap.
        TrainingError: a run diverged before its scores were taken.
    """
    settings = record.settings
    starts = sorted(settings.starts)
    for start, end in zip(starts, [*starts[1:], settings.steps], strict=True):
        integer("starts", start, at_least=0)
        if start + settings.window > end:
            raise ValueError(
                f"a window of {settings.window} steps after step {start} must end by step {end}, where the next one "
                f"begins or training ends; give other starts, a shorter window or more steps."
            )
    kept = record.earlier_of_same_settings()
    record.figures = {"rows": list(kept.get("rows", []))}
    for attention in settings.attention:
        if not record.where(attention=attention):
            log(f"{attention}: training")
            recorder = InstabilityRecorder(starts, settings.window)
            folder = record.folder / MODELS / f"{len(record.rows)}-seed{settings.seed}"
            result = train(run_of(settings, attention), folder, resume=True, quiet=True, callbacks=[recorder])
            if any(len(x) < settings.window for x in recorder.scores.values()):
                why = "diverged" if result.diverged else "was finished before without its scores; remove its folder"
                raise TrainingError(f"the run of {attention} in {folder} {why}.")
            record.rows.extend(
                {"attention": attention, "start": start, "mean": fmean(x), "scores": x, "value": result.value}
                for start, x in recorder.scores.items()
            )
            record.save()
        progress()


def tables(record: Record) -> list[Table]:
    """Mean scores by attention and window, and their ratio to the first attention's."""
    first = {x["start"]: x["mean"] for x in record.where(attention=record.settings.attention[0])}
    rows = [
        (x["attention"], str(x["start"]), f"{x['mean']:.4g}", f"{x['mean'] / first[x['start']]:.3g}")
        for x in record.rows
    ]
    window, other = record.settings.window, record.settings.attention[0]
    return [table(f"Mean instability over {window} steps", ("attention", "after step", "score", f"to {other}"), rows)]


def picture(record: Record, path: Path) -> None:
    """Draw the scores of every step, a panel for each window."""
    starts = sorted(record.settings.starts)
    with drawing(path, (3.6 * len(starts), 3.2), 1, len(starts)) as (figure, (axes,)):
        for axis, start in zip(axes, starts, strict=True):
            for x in record.where(start=start):
                axis.plot(range(start + 1, start + 1 + len(x["scores"])), x["scores"], label=x["attention"])
            axis.set(xlabel="step", ylabel="instability score")
            axis.set_yscale("log")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")


STUDY = Study(
    "instability",
    "Skyformer (2111.00035), App. F",
    InstabilitySettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    writes="the runs",
    examples=(("--steps 100 --starts 20,80", "scores of the first steps after warm-up, and of the last"),),
)
