"""Contenders for short sequences and for one token: timed in one process, since starting more would take longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import State
from kernelformer.measure.attention import contender
from kernelformer.measure.case import Case
from kernelformer.measure.harness import Figures, Step, time_bursts
from kernelformer.modules import build_attention

OURS, LOOP, SDPA = "favor+", "favor+:algorithm=chunked", "sdpa"
STEP, CHECKED, COMPILED = "step", "step, all checks", "step, compiled"


def measure_cases(cases: list[dict[str, Any]], budget: float) -> list[dict[str, Figures]]:
    """Time ours, the loop over chunks, which was all there was before, and SDPA, in turns, case by case.

    Args:
        cases: as plain values.
        budget: seconds for each contender in a case.
    """
    rows = []
    for given in cases:
        case = Case(**given)
        steps = {name: Step(contender(name).runner(case)) for name in (OURS, LOOP, SDPA)}
        rows.append(time_bursts(steps, budget))
    return rows


def measure_steps(
    heads: int, head_dim: int, features: int, contexts: list[int], compiles: bool, budget: float
) -> dict[str, Figures]:
    """Time one token of ``favor+`` and of SDPA with caches of so many tokens.

    Args:
        heads: H.
        head_dim: D.
        features: M.
        contexts: tokens of the caches.
        compiles: also time the step compiled by `torch.compile`, which needs a C++ compiler.
        budget: seconds for each.
    """
    core = build_attention(OURS, head_dim=head_dim, num_heads=heads, num_features=features)
    q, k, v = Case("decode", 1, heads=heads, head_dim=head_dim).inputs()

    def stream(step: Callable[..., Any], keep: Callable[[State], State] = lambda x: x) -> Step:
        state: list[State | None] = [None]

        def one() -> Tensor:
            with torch.no_grad():
                out, after = step(q, k, v, state[0])
            state[0] = keep(after)
            return out  # type: ignore[no-any-return]

        return Step(one)

    steps = {STEP: stream(core.step), CHECKED: stream(core.step, lambda x: replace(x, fits=(), quick=None))}
    if compiles:
        steps[COMPILED] = stream(torch.compile(core.step))
    for context in contexts:
        case = Case("decode", context, heads=heads, head_dim=head_dim)
        steps[f"{SDPA}, {context} tokens"] = Step(contender(SDPA).runner(case))
    return time_bursts(steps, budget)
