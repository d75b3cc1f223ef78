"""Distillation: maps are fitted to the attention of the original, then all weights to its outputs."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.losses import attention_loss, output_loss
from kernelformer.feature_maps.untied import LogLinearMap
from kernelformer.hf.convert import conversion, cores
from kernelformer.hf.find import AttentionCall, attention_calls
from kernelformer.modules import AttentionCore, KernelCore, MixedCore
from kernelformer.modules.calibration import evaluating

Batch = Mapping[str, Tensor]


Record = Callable[[Batch], list[AttentionCall]]  # the calls of the original's attentions on a batch


@dataclass(frozen=True)
class ReusePolicy:
    """Policy by which recorded batches are reused.

    Batches come in blocks of ``block``: first each once, as the original is run on it; then again, ``times`` in all, in
    an order that the step's number gives. So a step costs a pass of the original only now and then, and a run that
    was stopped resumes by its number of steps alone.
    """

    block: int = 1
    times: int = 1

    def first_batch(self, step: int) -> int:
        """Number of the first batch of the block that a step, counted from 0, belongs to."""
        return step // (self.block * self.times) * self.block

    def batches_of(self, steps: int) -> int:
        """Number of batches that the first steps use."""
        blocks, rest = divmod(steps, self.block * self.times)
        return blocks * self.block + min(rest, self.block)

    def steps(self, watched: Record, batches: Iterator[Batch], first: int, last: int) -> Iterator[StepBatch]:
        """Yield what each step from ``first`` on works with; ``batches`` begin with `first_batch` of ``first``.

        Args:
            last: number of the step before which to end: no batch is taken that would not be used.
        """
        whole = self.block * self.times
        start, kept = first // whole * whole, dict[int, tuple[list[AttentionCall], int]]()
        for step in range(start, last):
            turn, place = divmod(step % whole, self.block)
            if place == 0 and turn == 0:
                kept.clear()
            if place == 0:
                gen = torch.Generator().manual_seed(step)
                order = torch.randperm(self.block, generator=gen).tolist() if turn else list(range(self.block))
            number = order[place]
            if turn == 0:
                batch = next(batches)
                kept[number] = watched(batch), real_tokens(batch)
            if step >= first:
                calls, tokens = kept[number]
                yield StepBatch(step, calls, seed=(step // whole) * self.block + number, turn=turn, tokens=tokens)


@dataclass(frozen=True)
class StepBatch:
    """Recorded attention calls of one batch, as a step uses them."""

    step: int
    calls: list[AttentionCall]
    seed: int
    turn: int
    tokens: int


def real_tokens(batch: Batch) -> int:
    """Tokens of a batch that are no padding."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return batch["input_ids"].numel() if "input_ids" in batch else len(next(iter(batch.values())))


Log = Callable[[int, float], None]
WARM_UP = 20  # steps; a tenth of the stage where it has few
LOOKS = 20  # at the held-out texts, evenly over a stage; fewer where it has few steps
LOOKING = 0.15  # of the time at most, where a clock ends the stage
PATIENCE = 10  # looks without a better one after which a stage ends: rates at their peak often cost something at first
Point = tuple[int, float, int, float]  # step, seconds, tokens, held-out loss


@dataclass
class Progress:
    """Progress of a stage, from which a stopped run resumes exactly."""

    losses: list[float] = field(default_factory=list)
    saved: dict[str, Any] | None = None
    curve: list[Point] = field(default_factory=list)
    tokens: int = 0  # of all steps so far
    ended: bool = False  # whether held-out texts no longer gained
    over: bool = False  # whether the stage is done
    rates: list[float] = field(default_factory=list)  # of the groups, at their peak
    whole: bool = True  # whether weights and losses are of the same steps
    optimizer: torch.optim.Optimizer | None = None  # of the present run
    best: list[Tensor] | None = None  # trained tensors as they were at the best look
    _before: float = 0.0  # seconds of runs that were stopped
    _start: float = 0.0

    def state(self) -> dict[str, Any] | None:
        """State to resume from, as tensors and plain values; None before the first run."""
        if self.optimizer is None:
            return self.saved
        own = {x: getattr(self, x) for x in ("curve", "tokens", "ended", "over", "rates", "best", "seconds")}
        return {"optimizer": self.optimizer.state_dict(), **own}

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a run with this optimizer, from the state that was saved if there is one."""
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
        if self.saved is not None:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.curve = [tuple(x) for x in self.saved["curve"]]
            self.tokens, self.ended, self.best = (self.saved[x] for x in ("tokens", "ended", "best"))
            self._before = self.saved["seconds"]
        self.rates = [group["peak"] for group in optimizer.param_groups]
        self.optimizer = optimizer
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the stage has taken so far, in all runs."""
        return self._before + (time.monotonic() - self._start if self._start else 0.0)


class Stage:
    """A stage of training: steps until their number, the time or the patience is at its end.

    The rate rises over the first steps and falls to nothing by a cosine over the stage. Where there are held-out
    texts they are looked at before the first step and `LOOKS` times after, and the tensors of the best look are what
    stays in the end.

    Args:
        seconds: at most, if given; the schedule then follows the clock, of all runs together.
        look: gives the loss of the held-out texts; None: there are none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        seconds: float | None,
        progress: Progress | None = None,
        look: Callable[[], float] | None = None,
        log: Log | None = None,
    ) -> None:
        self.optimizer, self.steps, self.budget, self.look, self.log = optimizer, steps, seconds, look, log
        self.progress = progress or Progress()
        self.progress.start(optimizer)
        self.trained = [x for group in optimizer.param_groups for x in group["params"]]
        self.looking = 0.0  # seconds
        self.looks = max(1, min(LOOKS, steps // 4))

    @property
    def share(self) -> float:
        """The share of the work that is done."""
        gone = 0.0 if self.budget is None else self.progress.seconds / max(self.budget, 1e-9)
        return max(len(self.progress.losses) / max(1, self.steps), gone)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the steps, from the first one that was not done; each is to call `update`."""
        progress = self.progress
        while True:
            if self._look_is_due():  # here, so that a look during which a run was stopped is made up for
                self._look()
            if len(progress.losses) >= self.steps or self.share >= 1 or progress.ended:
                break
            step = len(progress.losses)
            self._set_rate(step)
            yield step
        if self.look is not None and progress.curve[-1][0] < len(progress.losses):
            self._look()
        self._finish()

    def update(self, loss: float, tokens: int) -> None:
        """Make a step of the optimizer, by the gradients that are there, and count it: both or neither."""
        progress = self.progress
        with uninterrupted():
            progress.whole = False
            self.optimizer.step()
            progress.losses.append(loss)
            progress.tokens += tokens
            progress.whole = True
        if self.log is not None:
            self.log(len(progress.losses), loss)

    def _look_is_due(self) -> bool:
        if self.look is None:
            return False
        quick = self.budget is None or self.looking <= LOOKING * self.progress.seconds
        return quick and min(1.0, self.share) * self.looks >= len(self.progress.curve)

    def _look(self) -> None:
        assert self.look is not None
        progress = self.progress
        start = time.monotonic()
        value = self.look()
        self.looking += time.monotonic() - start
        best = min((x[-1] for x in progress.curve), default=math.inf)
        progress.curve.append((len(progress.losses), progress.seconds, progress.tokens, value))
        if value < best:
            progress.best = [x.detach().clone() for x in self.trained]
        values = [x[-1] for x in progress.curve]
        progress.ended = len(values) - 1 - values.index(min(values)) >= PATIENCE

    @torch.no_grad()
    def _finish(self) -> None:
        if self.progress.best is not None:
            for x, best in zip(self.trained, self.progress.best, strict=True):
                x.copy_(best)
        self.optimizer.zero_grad()
        self.progress.over = True

    def _set_rate(self, step: int) -> None:
        rise = max(1, min(WARM_UP, self.steps // 10))
        factor = min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.share)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * max(factor, 0.01)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of a block; other threads than the main one never get it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def best_rate(
    tensors: Sequence[Tensor], rates: Sequence[float], trial: Callable[[float], float]
) -> tuple[float, dict[float, float]]:
    """Try rates one after the other, a few steps each, and put the tensors back after each.

    Returns:
        The rate with the smallest loss, and all losses; one that is no number counts as infinite.
    """
    before = [x.detach().clone() for x in tensors]
    losses = {}
    for rate in rates:
        value = trial(rate)
        losses[rate] = value if math.isfinite(value) else math.inf
        with torch.no_grad():
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)
    return min(losses, key=losses.__getitem__), losses


Batches = Iterator[Mapping[str, Tensor]]
ONCE = ReusePolicy()


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
    reuse: ReusePolicy = ONCE,
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
        progress: of a run to resume; ``steps`` counts all of them, and ``batches`` start where it stopped, or
            with `ReusePolicy.first_batch` of its steps.
        log: called after each step with its number and the mean loss of the layers.
        held_out: held-out inputs, evaluated regularly; the maps of the best evaluation are kept.
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
    watched, inside = partial(attention_calls, teacher, outputs=False, only=own, autocast=autocast), cores(student)
    parameters = [x for some in own.values() for x in some]
    options: dict[str, Any] = {"window_dropout": window_dropout}
    with evaluating(student, teacher):
        held = [watched(x) for x in held_out]

        @torch.no_grad()
        def look() -> float:
            losses = [float(attention_loss(inside[x.name], *x.inputs)) for calls in held for x in calls]
            return sum(losses) / len(losses)

        stage = Stage(torch.optim.Adam(parameters, lr=lr), steps, seconds, progress, look if held else None, log)
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
        student: converted; the others are those of `transfer`.
        lr: of AdamW for the backbone, at its peak; 0 leaves it as it is.
        map_lr: for what maps learn.
        autocast: the precision of the passes, such as ``torch.bfloat16``; weights and losses stay as they are.

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
        # Entered anew in each step: within one context autocast would keep using weights of its first pass.
        with torch.autocast(student.device.type, dtype=autocast, enabled=autocast is not None):
            with torch.no_grad():
                wanted = teacher(**inputs, output_hidden_states=True)
            outputs = student(**inputs, output_hidden_states=True)
        return output_loss(outputs, wanted, inputs)

    @torch.no_grad()
    def look() -> float:
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


KEYS = 4096  # of each head that centres are made of, at most
ROUNDS = 8  # of k-means
SAME, CENTRES = "as it was", "keys"


def start_student(
    student: PreTrainedModel, teacher: PreTrainedModel, batches: Iterable[Batch], *, autocast: torch.dtype | None = None
) -> dict[str, str]:
    """Initialize the maps of a converted model as `start_maps` finds best, by what its original sees on some batches.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: of inputs; the last is held out to compare by.
        autocast: the precision of the original's pass, such as ``torch.bfloat16``.

    Returns:
        Which start each map that could choose has taken; empty where no map learns.
    """
    own = {name: core for name, core in cores(student).items() if name in learned(student)}
    if not own:
        return {}
    with evaluating(teacher, student):
        how: dict[str, Any] = {"outputs": False, "only": own, "autocast": autocast}
        return start_maps(own, [attention_calls(teacher, x, **how) for x in batches])


@torch.no_grad()
def start_maps(cores: Mapping[str, AttentionCore], batches: Sequence[Sequence[AttentionCall]]) -> dict[str, str]:
    """Initialize loglinear maps, optionally at k-means centres of the original's keys, whichever loss is smaller.

    With centres c_1 ... c_M of the keys (k-means in the metric of the kernel), and x already times sqrt(scale),

        phi_i(q) = exp(q . c_i)        phi_i(k) = softmax_i(k . c_i - |c_i|^2 / 2)

    so that ``phi(q) . phi(k)`` is exp(q . c) for a key at a centre: softmax attention to clusters. The other start is
    what the map is now: drawn, calibrated, or learned.

    Args:
        batches: what the original's attentions saw; the last is held out to compare by, where there are several.
    """
    fitted, held = batches[:-1] or batches, batches[-1]
    chosen = {}
    for name, core in cores.items():
        linear = core.linear if isinstance(core, MixedCore) else core
        if not isinstance(linear, KernelCore) or not isinstance(linear.feature_map, LogLinearMap):
            continue
        phi = linear.feature_map
        calls = [x for some in fitted for x in some if x.name == name]
        tests = [x for x in held if x.name == name]
        if not phi.options.get("unit_keys", True) or not calls:
            continue
        before = [x.clone() for x in phi.parameters()]
        first = _loss(core, tests)
        _set_centres(core, linear, phi, calls)
        if not _loss(core, tests) < first:
            for x, old in zip(phi.parameters(), before, strict=True):
                x.copy_(old)
            chosen[name] = SAME
        else:
            chosen[name] = CENTRES
    return chosen


def _loss(core: AttentionCore, calls: Sequence[AttentionCall]) -> float:
    return sum(float(attention_loss(core, *x.inputs)) for x in calls) / max(1, len(calls))


def _set_centres(core: nn.Module, linear: KernelCore, phi: LogLinearMap, calls: Sequence[AttentionCall]) -> None:
    """Set w and b of a map to centres of the keys of some calls."""
    scale = linear.scale
    keys = []
    for call in calls:
        query, key, value, key_mask = call.inputs[:4]
        if isinstance(core, MixedCore):
            query, key, value = (core._split(x, 1) for x in (query, key, value))
        key = linear._normalize_qk(query, key, key_mask)[1] * scale**0.5
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        keys.append(key.transpose(1, 2)[real.to(key.device)])  # (N, G, D)
    every = torch.cat(keys).transpose(0, 1)
    maps = phi.w_k.shape[0]  # key heads, fewer or more than the keys have, or 1 where all share a map
    if maps == 1:
        every = every.flatten(0, 1)[None]
    elif maps != every.shape[0]:
        every = every.repeat_interleave(maps // every.shape[0], 0)
    gen = torch.Generator().manual_seed(phi.seed_number)
    centres = torch.stack([key_centres(x, phi.w_k.shape[1], gen) for x in every]).to(phi.w_k)
    groups = phi.w_q.shape[0] // maps
    phi.w_k.copy_(centres)
    phi.b_k.copy_(-0.5 * centres.square().sum(-1))
    phi.w_q.copy_(centres.repeat_interleave(groups, 0))
    phi.b_q.zero_()


def key_centres(keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centres of keys (N, D) by k-means, (count, D); where keys are fewer some centres are the same.

    First centres are keys, each drawn with a probability as the squared distance to those before it (k-means++).
    """
    order = torch.randperm(len(keys), generator=generator).to(keys.device)
    keys = keys[order[:KEYS]].float()
    chosen, distance = [0], (keys - keys[0]).square().sum(-1)
    for _ in range(count - 1):
        odds = distance.cpu() if float(distance.max()) > 0 else torch.ones(len(keys))
        chosen.append(int(torch.multinomial(odds, 1, generator=generator)))
        distance = torch.minimum(distance, (keys - keys[chosen[-1]]).square().sum(-1))
    centres = keys[chosen].clone()
    for _ in range(ROUNDS):
        nearest = (keys @ centres.T - 0.5 * centres.square().sum(-1)).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, keys)
        counts = torch.bincount(nearest, minlength=count).unsqueeze(-1)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres
