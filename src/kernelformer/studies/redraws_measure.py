"""What `studies.redraws` measures of one finished run: its outputs over redraws, eigenvalues and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.analysis.redraws import (
    classifier_gradients,
    gradient_figures,
    predictions,
    redraw_figures,
)
from kernelformer.analysis.spectra import Spectrum, spectra, squared_log_variances
from kernelformer.data.batching import Sample, spread_evenly
from kernelformer.errors import TrainingError, integer, positive_int
from kernelformer.modules.redraw import random_maps
from kernelformer.records import MODEL, read_metrics
from kernelformer.tasks import Task, make_task
from kernelformer.training.checkpoints import checkpoints_of
from kernelformer.training.config import Run
from kernelformer.training.evaluation import load_model, load_run
from kernelformer.training.first_weights import start_from
from kernelformer.training.inspection import saved_run
from kernelformer.training.session import build_model

BATCH = 50  # samples at once
ACCURACY = "eval_accuracy"  # as the trainer calls it


@dataclass(frozen=True)
class Samples:
    """Samples of the validation split in batches of similar lengths, so that little is padding.

    Args:
        batches: inputs of the model.
        labels: (N), in the order of the batches.
    """

    batches: Sequence[dict[str, Tensor]]
    labels: Tensor


def redraw_statistics(
    folder: str | Path, *, draws: int = 100, samples: int = 200, first_draw: int | None = None
) -> dict[str, Any]:
    """Variance of a trained classifier over redraws of its random features (KL-Transformer, Fig. 5 and 9).

    Draw t of a map is a function of its seed and t, and every layer has a seed of its own: all layers get number t,
    none the numbers of another, as in training. A method that draws nothing is run once, and all its measures of
    variance are 0.

    Args:
        folder: of a finished run of a classification task; its data has to be there.
        draws: how many; the paper takes 100.
        samples: of the validation split, at most so many, spread evenly.
        first_draw: number of the first one; None: after the one that the model has, so that training has seen none.

    Returns:
        Plain values: the run (``attention``, ``seed``, ``task``), ``draws``, ``first_draw``, ``samples``,
        ``deterministic``, ``own_draw`` with the accuracy of the draw that the model was saved with, ``figures``, see
        `RedrawFigures`, and ``gradients`` at the classifier over the same draws, see `GradientFigures`.

    Cost: draws times one evaluation of the samples, without gradients.
    """
    positive_int("draws", draws)
    run, model, task = open_run(Path(folder))
    data = validation_samples(task, positive_int("samples", samples), run)
    maps = random_maps(model)
    own = max((x.draw_number for x in maps), default=0)
    first = own + 1 if first_draw is None else integer("first_draw", first_draw, at_least=0)
    with restored_draws(model):
        own_logits = logits_over_draws(model, data, None)
        numbers = range(first, first + draws)
        logits = logits_over_draws(model, data, numbers) if maps else own_logits
    return {
        "attention": run.label,
        "seed": run.seed,
        "task": run.task,
        "draws": len(logits),
        "first_draw": first if maps else None,
        "samples": len(data.labels),
        "deterministic": not maps,
        "own_draw": {
            "draw": own if maps else None,
            "accuracy": float((predictions(own_logits) == data.labels).double().mean()),
        },
        "figures": asdict(redraw_figures(logits, data.labels)),
        "gradients": _gradients(model, logits, data.labels),
    }


def eigenvalue_statistics(folder: str | Path) -> dict[str, Any]:
    """Eigenvalues of the spectral density's covariances, at the start and at the end of a run (Tables 4, 9-12).

    The start is the model as the run's settings and seed make it, weights of ``start`` included.

    Returns:
        ``start`` and ``end``, each None where no map has a density, or ``learned``, the ``minimum``, ``maximum`` and
        ``mean`` over all heads (Table 4) and the rows of ``heads`` (Tables 9-12), layers and heads numbered from 1. For
        diagonal mixtures ``squared_log_variance`` has the same of what Tables 10 and 12 seem to print.
    """
    run, model, task = open_run(Path(folder))
    with torch.random.fork_rng():
        first = build_model(run, task)
    if run.start is not None:
        start_from(first, Path(run.start))
    return {"attention": run.label, "seed": run.seed, "start": _spectrum(first), "end": _spectrum(model)}


def gradient_statistics(
    folder: str | Path,
    *,
    draws: int = 50,
    samples: int = 50,
    first_draw: int | None = None,
    levels: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Gradients at the classifier over redraws, at every checkpoint that is left and at the end (Table 14, App. E.3).

    As the paper has it: the first validation samples, 50 times. Checkpoints are those of ``save_every`` and ``keep``.

    Args:
        folder: of a finished run of a classification task.
        draws: how many.
        samples: the first so many of the validation split.
        first_draw: number of the first draw; None: after the one that the last model has.
        levels: of accuracy, as the paper has 0.2, 0.4, 0.6 and 0.8: only the first checkpoint at each, and the end;
            None: every checkpoint.

    Returns:
        A row for each, by step: ``step``, ``accuracy`` (of the validation split, where it was measured at that step)
        and the figures of `GradientFigures`.
    """
    home = Path(folder)
    run, last, task = open_run(home)
    data = validation_samples(task, positive_int("samples", samples), run, first=True)
    own = max((x.draw_number for x in random_maps(last)), default=0)
    first = own + 1 if first_draw is None else integer("first_draw", first_draw, at_least=0)
    numbers = range(first, first + positive_int("draws", draws))
    accuracy = {int(x["step"]): float(x[ACCURACY]) for x in read_metrics(home) if ACCURACY in x}
    paths = {step: path for path, step in reversed(checkpoints_of(home)) if step != run.steps}
    if levels is not None:
        reached = [next((x for x in paths if accuracy.get(x, 0.0) >= level), None) for level in levels]
        paths = {step: path for step, path in paths.items() if step in reached}
    out = []
    for step, path in [*paths.items(), (run.steps, None)]:
        model = last if path is None else load_model(task.model, path).eval()
        logits = logits_over_draws(model, data, numbers if random_maps(model) else None)
        figures = _gradients(model, logits, data.labels)
        out.append({"step": step, "accuracy": accuracy.get(step), **(figures or {})})
    return out


def open_run(folder: Path) -> tuple[Run, PreTrainedModel, Task]:
    """A finished run, its model in evaluation mode, and its task with what was saved beside the model.

    Raises:
        TrainingError: it is not finished, or its data is not that of training.
    """
    run, model = load_run(folder)
    task = make_task(run.task, **run.task_options)
    now, before = task.fingerprint(), saved_run(folder)[1].get("data")  # older runs did not say
    if before not in (None, now):
        raise TrainingError(f"{folder} was trained on other data: {before}, now {now}; bring the data back.")
    task.load_extra(folder / MODEL)  # a vocabulary too, with which the fingerprint would be another one
    return run, model.eval(), task


def validation_samples(task: Task, count: int, run: Run, first: bool = False) -> Samples:
    """At most so many samples of the validation split, spread evenly or the first ones.

    Raises:
        ValueError: the task has no classes, one for each sample.
    """
    split: Any = task.split("validation")
    numbers = range(min(count, len(split))) if first else spread_evenly(len(split), count).tolist()
    rows = sorted((split[i] for i in numbers), key=_size, reverse=True)
    batches = [task.collate(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
    labels = torch.cat([x.pop("labels") for x in batches])
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"redraws are measured on classifiers, one class for each sample; task {run.task!r} has labels of "
            f"{labels.dtype} in {labels.dim()} dimensions."
        )
    return Samples(batches, labels)


def _size(sample: Sample) -> int:
    return sum(x.numel() for x in sample.values() if isinstance(x, Tensor))


@contextmanager
def restored_draws(model: nn.Module) -> Iterator[None]:
    """All random maps have the draw afterwards that they have now, and its age."""
    kept = [(phi, phi.draw_number, int(phi.age)) for phi in random_maps(model)]
    try:
        yield
    finally:
        for phi, number, age in kept:
            phi.resample(number)
            phi.age.fill_(age)


@torch.no_grad()
def logits_over_draws(model: nn.Module, samples: Samples, draws: Iterable[int] | None) -> Tensor:
    """Logits (R, N, K) in float64, for draws of these numbers in all maps; None: once, as the model is."""

    def outputs() -> Tensor:
        return torch.cat([model(**x).logits for x in samples.batches]).double()

    if draws is None:
        return outputs().unsqueeze(0)
    rows = []
    for number in draws:
        for phi in random_maps(model):
            phi.resample(number)
        rows.append(outputs())
    return torch.stack(rows)


def _gradients(model: nn.Module, logits: Tensor, labels: Tensor) -> dict[str, float] | None:
    """Figures of the gradients at the units before the last layer; None where there is a single logit."""
    layers = [x for x in model.get_submodule("head").modules() if isinstance(x, nn.Linear)]
    if logits.shape[2] == 1:
        return None
    return asdict(gradient_figures(classifier_gradients(logits, labels, layers[-1].weight)))


def _spectrum(model: nn.Module) -> dict[str, Any] | None:
    rows = spectra(model)
    if not rows:
        return None
    logs = squared_log_variances(model)
    more = {"squared_log_variance": _summary(logs)} if logs else {}
    return {"learned": all(x.learned for x in rows), **_summary(rows), **more}


def _summary(rows: Sequence[Spectrum]) -> dict[str, Any]:
    """Over all heads, and the rows themselves."""
    layers = {name: number for number, name in enumerate(dict.fromkeys(x.layer for x in rows), 1)}
    heads = [
        {"layer": layers[x.layer], "head": x.head + 1, "minimum": x.minimum, "maximum": x.maximum, "mean": x.mean}
        for x in rows
    ]
    return {
        "minimum": min(x.minimum for x in rows),
        "maximum": max(x.maximum for x in rows),
        "mean": sum(x.mean for x in rows) / len(rows),
        "heads": heads,
    }
