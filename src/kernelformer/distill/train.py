"""Distillation: maps are fitted to the attention of the original, then all weights to its outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.distill.losses import attention_loss, output_loss
from kernelformer.hf.attend import attend_exactly, causal_without_mask, read_mask
from kernelformer.hf.convert import conversion, cores
from kernelformer.hf.find import probing
from kernelformer.modules.evaluating import evaluating

Batches = Iterator[Mapping[str, Tensor]]
Log = Callable[[int, float], None]
WARM_UP = 20


@dataclass
class Progress:
    """Progress of a stage, with which a run that was stopped goes on as if it had not been.

    Args:
        losses: of the steps so far.
        saved: what `state` gave, to go on from.
    """

    losses: list[float] = field(default_factory=list)
    saved: dict[str, Any] | None = None
    optimizer: torch.optim.Optimizer | None = None  # of the run that is going on

    def state(self) -> dict[str, Any] | None:
        """State of the optimizer, as tensors and plain values; None before the first run."""
        return self.saved if self.optimizer is None else self.optimizer.state_dict()

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a run with this optimizer, from the state that was saved if there is one."""
        if self.saved is not None:
            optimizer.load_state_dict(self.saved)
        self.optimizer = optimizer


def learned(student: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Collect the parameters of the maps of a converted model, by the names of its attentions."""
    replaced = set(conversion(student).replaced)
    maps = {name: list(core.parameters()) for name, core in cores(student).items() if name in replaced}
    return {name: own for name, own in maps.items() if own}


def learns(student: nn.Module) -> bool:
    """Tell whether the maps of a converted model have parameters to fit."""
    return bool(learned(student))


class _Seen:
    """Attention of the original that records its queries, keys, values, mask and bias, call by call."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        name = self.names.get(id(module))
        if name is not None:
            wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in (query, key, value)]
            # Without padding the model leaves causality to the implementation and gives no mask at all.
            causal = causal_without_mask(module, options.get("is_causal"))
            seen = read_mask(mask, query, key, causal)
            self.calls.append((name, (*wide, *seen, options.get("scaling"), options.get("position_bias"))))
        return attend_exactly(module, query, key, value, mask, **options)


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
        progress: of a run to go on with, whose batches start where it stopped; ``steps`` counts all of them.
        log: called after each step with its number and the mean loss of the layers.

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
    parameters = [x for some in own.values() for x in some]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    inside = cores(student)
    names = {id(teacher.get_submodule(name)): name for name in own}
    progress = progress or Progress()
    progress.start(optimizer)
    losses = progress.losses
    with evaluating(student, teacher):
        for step, share in _clock(steps, seconds, len(losses)):
            _set_rate(optimizer, share, step)
            seen = _Seen(names)
            quick = torch.autocast(teacher.device.type, dtype=autocast, enabled=autocast is not None)
            with torch.no_grad(), probing(teacher, seen), quick:
                teacher(**next(batches))
            optimizer.zero_grad()
            total, count = 0.0, len(seen.calls)
            while seen.calls:  # one call at a time, so that one graph is alive at a time
                name, call = seen.calls.pop()
                loss = attention_loss(inside[name], *call, seed=step)
                loss.backward()
                total += float(loss.detach()) / count
            optimizer.step()
            losses.append(total)
            if log is not None:
                log(step + 1, total)
    optimizer.zero_grad()
    return losses


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
    progress = progress or Progress()
    progress.start(optimizer)
    losses = progress.losses
    with evaluating(student, teacher):
        for step, share in _clock(steps, seconds, len(losses)):
            _set_rate(optimizer, share, step)
            inputs = dict(next(batches))
            # Entered anew in each step: within one context autocast would go on with weights of its first pass.
            with torch.autocast(student.device.type, dtype=autocast, enabled=autocast is not None):
                with torch.no_grad():
                    wanted = teacher(**inputs, output_hidden_states=True)
                outputs = student(**inputs, output_hidden_states=True)
            loss = output_loss(outputs, wanted, inputs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if log is not None:
                log(step + 1, losses[-1])
    optimizer.zero_grad()
    return losses


def quick_dtype(device: torch.device) -> torch.dtype | None:
    """Choose bfloat16 where the device multiplies it natively, else None."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else None


def _clock(steps: int, seconds: float | None, first: int = 0) -> Iterator[tuple[int, float]]:
    """Yield numbers of steps from ``first`` on, with the share of the work that is done."""
    start = time.monotonic()
    for step in range(first, steps):
        gone = 0.0 if seconds is None else (time.monotonic() - start) / seconds
        if gone >= 1:
            return
        yield step, max(step / steps, gone)


def _set_rate(optimizer: torch.optim.Optimizer, share: float, step: int) -> None:
    factor = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    for group in optimizer.param_groups:
        group.setdefault("peak", group["lr"])
        group["lr"] = group["peak"] * max(factor, 0.01)
