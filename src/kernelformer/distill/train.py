"""Distillation: maps are fitted to the attention of the original, then all weights to its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.distill.losses import attention_loss, output_loss
from kernelformer.distill.progress import Log, Progress, Stage
from kernelformer.distill.seen import Reuse, Watched, real_tokens
from kernelformer.hf.capture import AttentionCall
from kernelformer.hf.convert import conversion, cores
from kernelformer.modules import AttentionCore
from kernelformer.modules.evaluating import evaluating

Batches = Iterator[Mapping[str, Tensor]]
ONCE = Reuse()


class BreakdownError(ValueError):
    """A loss that is no number."""


def learned(student: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Collect the parameters of the maps of a converted model, by the names of its attentions."""
    replaced = set(conversion(student).replaced)
    maps = {name: list(core.parameters()) for name, core in cores(student).items() if name in replaced}
    return {name: own for name, own in maps.items() if own}


def learns(student: nn.Module) -> bool:
    """Tell whether the maps of a converted model have parameters to fit."""
    return bool(learned(student))


def transfer(
    student: nn.Module,
    teacher: PreTrainedModel,
    batches: Batches,
    *,
    steps: int,
    lr: float = 5e-2,
    seconds: float | None = None,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    held_out: Sequence[Mapping[str, Tensor]] = (),
    reuse: Reuse = ONCE,
    window_dropout: float = 0.0,
) -> list[float]:
    """Attention transfer: fit the maps of a converted model to the original's attention; the backbone stays.

    All layers at once: one pass of the original shows the queries, keys and values of each. The loss of a layer is

        mean over rows i, heads of  KL(softmax(scale q_i k_j + b_ij) || phi(q_i) phi(k_j) exp(b_ij) / sum)

    with positive features, over some of the rows; near keys of a core with a window have their exact weights in it.
    With signed features, whose weights have no logarithm, it is the squared error of the outputs relative to their
    size.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: inputs of the models, without end.
        steps: at most.
        lr: of Adam, at its peak; it falls to nothing by a cosine.
        seconds: at most, if given; the schedule then follows the clock.
        autocast: the precision of the original's pass, such as ``torch.bfloat16``; maps are fitted in their own.
        progress: of a run to go on with; ``steps`` counts all of them, and ``batches`` start where it stopped, or
            with `Reuse.first_batch` of its steps.
        log: called after each step with its number and the mean loss of the layers.
        held_out: inputs to look at now and then; the maps of the best look are kept.
        reuse: how often what the original saw of a batch serves; each time other rows of it count.
        window_dropout: share of the rows in which near keys get the map's weights, see `attention_loss`.

    Returns:
        The mean loss of the layers, step by step.

    Raises:
        ValueError: there is nothing in the maps to learn.
    """
    own = learned(student)
    if not own:
        methods = ", ".join(sorted({x.method for x in conversion(student).layers if x.replaced})) or "nothing converted"
        raise ValueError(
            f"attention transfer fits what a map learns, and there is nothing to learn here ({methods}); use a learned "
            f"method such as 'loglinear', or fine-tune."
        )
    watched, inside = Watched(teacher, own, autocast), cores(student)
    parameters = [x for some in own.values() for x in some]
    options: dict[str, Any] = {"window_dropout": window_dropout}
    with evaluating(student, teacher):
        held = [watched(x) for x in held_out]
        look = partial(_held_loss, inside, held) if held else None
        stage = Stage(torch.optim.Adam(parameters, lr=lr), steps, seconds, progress, look, log)
        turns = reuse.steps(watched, batches, len(stage.progress.losses), steps)
        for step in stage:
            turn = next(turns)
            stage.optimizer.zero_grad()
            total = 0.0
            for call in turn.calls:  # one call at a time, so that one graph is alive at a time
                loss = attention_loss(inside[call.name], *call.inputs, seed=turn.seed, turn=turn.turn, **options)
                loss.backward()
                total += float(loss.detach()) / len(turn.calls)
            stage.update(_finite("transfer", step, total), turn.tokens)
    return stage.progress.losses


def _held_loss(inside: Mapping[str, AttentionCore], held: Sequence[Sequence[AttentionCall]]) -> float:
    with torch.no_grad():
        losses = [float(attention_loss(inside[x.name], *x.inputs)) for calls in held for x in calls]
    return sum(losses) / len(losses)


def _finite(stage: str, step: int, loss: float) -> float:
    if not math.isfinite(loss):
        raise BreakdownError(
            f"{stage} broke down: the loss of step {step + 1} is {loss}; use a smaller rate, or another method."
        )
    return loss


def tune(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Batches,
    *,
    steps: int,
    lr: float = 1.5e-4,
    map_lr: float = 1.5e-3,
    seconds: float | None = None,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    held_out: Sequence[Mapping[str, Tensor]] = (),
) -> list[float]:
    """Train everything but the word embeddings of a converted model against the original's hidden states and outputs.

        loss = mean over layers of |h - h'|^2 / |h' - mean|^2  +  KL(p' || p), or 5 (1 - cosine of the mean outputs)

    Dropout is off, as it is in the original's pass.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: inputs of the models, without end.
        steps: at most.
        lr: of AdamW for the backbone, at its peak; 0 leaves it as it is.
        map_lr: for what maps learn.
        seconds: at most, if given.
        autocast: the precision of the passes, such as ``torch.bfloat16``; weights and losses stay as they are.
        progress: see `transfer`.
        log: called after each step with its number and the loss.
        held_out: inputs to look at now and then; the weights of the best look are kept.

    Returns:
        The loss, step by step.
    """
    maps = [x for some in learned(student).values() for x in some]
    fixed = {id(x) for x in maps}
    for part in (student.get_input_embeddings(), student.get_output_embeddings()):
        fixed |= {id(x) for x in part.parameters()} if part is not None else set()
    rest = [x for x in student.parameters() if id(x) not in fixed and x.is_floating_point() and x.requires_grad]
    groups = [{"params": x, "lr": rate, "peak": rate} for x, rate in ((maps, map_lr), (rest, lr)) if x and rate]
    if not groups:
        raise ValueError(f"nothing to train: lr={lr:g}, map_lr={map_lr:g} and no map that learns.")
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    trained = [x for group in groups for x in group["params"]]  # type: ignore[attr-defined]

    def losses(inputs: Mapping[str, Tensor]) -> Tensor:
        # Entered anew in each step: within one context autocast would go on with weights of its first pass.
        with torch.autocast(student.device.type, dtype=autocast, enabled=autocast is not None):
            with torch.no_grad():
                wanted = teacher(**inputs, output_hidden_states=True)
            outputs = student(**inputs, output_hidden_states=True)
        return output_loss(outputs, wanted, inputs)

    def look() -> float:
        with torch.no_grad():
            return sum(float(losses(dict(x))) for x in held_out) / len(held_out)

    with evaluating(student, teacher):
        stage = Stage(optimizer, steps, seconds, progress, look if held_out else None, log)
        for step in stage:
            inputs = dict(next(batches))
            loss = losses(inputs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            stage.update(_finite("tune", step, float(loss.detach())), real_tokens(inputs))
    return stage.progress.losses


def quick_dtype(device: torch.device) -> torch.dtype | None:
    """Choose bfloat16 where the device multiplies it natively, else None."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else None
