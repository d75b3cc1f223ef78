"""Trials of attentions in a pretrained model before it is converted: their errors, a quick fit, the model's output."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernelformer.analysis.attention_profile import attention_weights
from kernelformer.distill.candidates import Candidate
from kernelformer.distill.figures import Batch, Figure, Reference
from kernelformer.distill.losses import attention_loss
from kernelformer.distill.predict import CEILING, predicted_error
from kernelformer.distill.start import start_maps
from kernelformer.hf.capture import AttentionCall, attention_calls
from kernelformer.hf.convert import convert, cores, undo
from kernelformer.hf.find import find_attentions
from kernelformer.modules import AttentionCore

RATE, WARM_UP = 2e-2, 5  # of the fit: above that of `transfer`, whose steps are many
QUERIES = 32  # of each text, evenly spread, on which closed forms are evaluated


@dataclass(frozen=True)
class Errors:
    """Errors of an attention in each call of a pass, at the original's queries, keys and values.

    Args:
        calls: name and number of each call.
        heads: ``|core - exact|_F / |exact|_F`` of the outputs of real tokens, of each call and head.
        layers: the same of all heads of a call together.
        predicted: of the weights, by closed forms, of each call; None where there is none.
    """

    calls: tuple[tuple[str, int], ...]
    heads: tuple[tuple[float, ...], ...]
    layers: tuple[float, ...]
    predicted: tuple[float, ...] | None

    @property
    def mean(self) -> float:
        """Mean over the calls."""
        return sum(self.layers) / len(self.layers)


@dataclass
class Trials:
    """A pretrained model, its attention on some texts, and a copy that is converted to one candidate after another.

    Args:
        model: the original, which is left as it is.
        measured: inputs on which candidates are measured.
        others: inputs on which maps are fitted and calibrated.
        predicts: it is a causal language model, see `Reference`.
        looked: how many of the measured batches have their attentions looked at one by one.
    """

    model: Any
    measured: Sequence[Batch]
    others: Sequence[Batch]
    predicts: bool
    looked: int = 1
    states: dict[Candidate, dict[str, Any]] = field(default_factory=dict)  # of what was fitted or calibrated

    def __post_init__(self) -> None:
        names = [x.name for x in find_attentions(self.model) if not x.reason]
        self.calls = [attention_calls(self.model, x, only=names) for x in self.measured[: self.looked]]
        self.other_calls = [attention_calls(self.model, x, outputs=False, only=names) for x in self.others]
        self.reference = Reference(self.model, self.measured, predicts=self.predicts)
        self.copy = copy.deepcopy(self.model).eval()

    @contextmanager
    def converted(
        self,
        candidate: Candidate,
        layers: Sequence[int | str] | None = None,
        exact_heads: Mapping[int | str, Sequence[int]] | None = None,
    ) -> Iterator[Any]:
        """Convert the copy for a block, calibrated and as it was fitted.

        Args:
            candidate: what to.
            layers: see `convert`.
            exact_heads: see `convert`.
        """
        convert(self.copy, candidate.name, layers, exact_heads=exact_heads, **candidate.options)
        try:
            self._prepare(candidate, whole=exact_heads is None)
            yield self.copy
        finally:
            undo(self.copy)

    def _prepare(self, candidate: Candidate, whole: bool) -> None:
        """Give the cores the statistics and weights that the candidate has, those of whole layers."""
        for name, core in cores(self.copy).items():
            if core.method != candidate.name:
                continue
            if candidate in self.states and whole:
                core.load_state_dict(self.states[candidate][name])
            elif core.calibrates:
                for calls in self.other_calls:
                    for call in (x for x in calls if x.name == name):
                        core.calibrate(call.query, call.key, call.visible()[0])
        if candidate.learned and not (candidate in self.states and whole):
            start_maps(cores(self.copy), self.other_calls)

    @torch.no_grad()
    def errors(self, candidate: Candidate) -> Errors:
        """Errors of a candidate in each attention.

        Raises:
            ValueError: the model's attention cannot be converted to it.
        """
        with self.converted(candidate) as student:
            inside = cores(student)
            sums: dict[tuple[str, int], list[Tensor]] = {}
            for calls in self.calls:
                for call in calls:
                    new, key = _errors(call, inside[call.name]), (call.name, call.call)
                    sums[key] = [a + b for a, b in zip(sums[key], new, strict=True)] if key in sums else new
            prepared = candidate.learned or any(x.calibrates for x in inside.values())
            if prepared and candidate not in self.states:
                self.states[candidate] = {name: x.state_dict() for name, x in inside.items()}
        return _gathered(sums)

    def figure(self, candidate: Candidate, **kept: Any) -> Figure:
        """The output of the model with a candidate in it; ``kept`` are ``layers`` and ``exact_heads`` of `convert`."""
        with self.converted(candidate, **kept) as student:
            return self.reference.figure(student)

    def fit(self, candidate: Candidate, *, steps: int, seconds: float = math.inf) -> int:
        """Fit the maps of a candidate to the attention on the other texts, a text a step; see `attention_loss`.

        Args:
            candidate: with maps that learn.
            steps: at most.
            seconds: at most; the learning rate falls by a cosine of whichever is over first.

        Returns:
            The number of steps that were done.
        """
        with self.converted(candidate) as student:
            inside = cores(student)
            done = fit_maps(inside, self.other_calls, steps=steps, seconds=seconds)
            self.states[candidate] = {name: copy.deepcopy(x.state_dict()) for name, x in inside.items()}
        return done


@torch.enable_grad()
def fit_maps(
    inside: Mapping[str, AttentionCore],
    calls: Sequence[Sequence[AttentionCall]],
    *,
    steps: int,
    seconds: float = math.inf,
) -> int:
    """Fit maps to recorded attention by Adam; returns the steps done.

    A step is one pass of the records.

    Args:
        inside: cores by the names of their attentions, started by `start_maps`.
        calls: of some passes of the original.
        steps: at most.
        seconds: at most.
    """
    parameters = [x for core in inside.values() for x in core.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    start = time.monotonic()
    for step in range(steps):
        share = max(step / steps, (time.monotonic() - start) / seconds)
        if share >= 1:
            return step
        rate = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = RATE * max(rate, 0.01)
        optimizer.zero_grad()
        for call in calls[step % len(calls)]:
            attention_loss(inside[call.name], *call.inputs, seed=step).backward()
        optimizer.step()
    return steps


def _errors(call: AttentionCall, core: AttentionCore) -> list[Tensor]:
    """Of one call, by head (H): squared error, squared size; variance and squared weights of the closed form."""
    mask, causal = call.visible()
    assert call.output is not None
    off = (call.attend(core).double() - call.output.double()).square().sum(-1)  # (B, L, H)
    size = call.output.double().square().sum(-1)
    kept = torch.ones(off.shape[:2], dtype=torch.bool, device=off.device) if mask is None else mask
    length = call.query.shape[2]
    rows = torch.linspace(0, length - 1, min(length, QUERIES)).long().unique()
    variance: Tensor | str = "near"
    weights = torch.zeros(())
    if not core.has_near:
        weights = attention_weights(
            call.query.double(),
            call.key.double(),
            scale=call.scale,
            causal=causal,
            key_mask=mask,
            position_bias=call.options.get("position_bias"),
            rows=rows,
        )
        weights = weights * kept[:, None, rows, None]
        groups = call.query.shape[1] // call.key.shape[1]
        variance = predicted_error(
            core, call.query[:, :, rows], call.key.repeat_interleave(groups, 1), weights, call.scale
        )
    sums = [off[kept].sum(0), size[kept].sum(0)]
    return sums if isinstance(variance, str) else [*sums, variance, weights.square().sum((0, 2, 3))]


def _gathered(sums: Mapping[tuple[str, int], Sequence[Tensor]]) -> Errors:
    def ratio(top: Tensor, bottom: Tensor) -> float:
        value = float((top / bottom.clamp(min=1e-300)).sqrt())
        return min(value, CEILING) if not math.isnan(value) else CEILING

    rows = list(sums.values())
    return Errors(
        calls=tuple(sums),
        heads=tuple(tuple(ratio(a, b) for a, b in zip(x[0], x[1], strict=True)) for x in rows),
        layers=tuple(ratio(x[0].sum(), x[1].sum()) for x in rows),
        predicted=tuple(ratio(x[2].sum(), x[3].sum()) for x in rows) if all(len(x) == 4 for x in rows) else None,
    )
