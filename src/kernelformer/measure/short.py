"""Contenders for short sequences and for one token: timed in one process, since starting more would take longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import step
from kernelformer.measure.attention import contender
from kernelformer.measure.case import Case
from kernelformer.measure.harness import time_bursts
from kernelformer.modules import KernelCore, build_attention
from kernelformer.timing import Figures, Step

OURS, LOOP, SDPA = "favor+", "favor+:algorithm=chunked", "sdpa"
STEP, SLOW, COMPILED = "step", "step without its quick way", "its arithmetic compiled"


def measure_cases(cases: list[dict[str, Any]], budget: float) -> dict[str, list[dict[str, Figures]]]:
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
    return {"rows": rows}


def measure_steps(
    heads: int, head_dim: int, features: int, contexts: list[int], compiles: bool, budget: float
) -> dict[str, Figures]:
    """Time one token of ``favor+`` and of SDPA with caches of so many tokens.

    Args:
        heads: H.
        head_dim: D.
        features: M.
        contexts: tokens of the caches.
        compiles: also time the step's arithmetic compiled by `torch.compile`, which needs a C++ compiler.
        budget: seconds for each.
    """
    core = build_attention(OURS, head_dim=head_dim, num_heads=heads, num_features=features)
    assert isinstance(core, KernelCore)
    q, k, v = Case("decode", 1, heads=heads, head_dim=head_dim).inputs()
    phi = core.feature_map

    def compiled(q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return step(phi.spec, phi.tensors(), q, k, v, state, scale=core.scale)

    steps = {STEP: _stream(core.step, (q, k, v)), SLOW: _stream(core.step, (q, k, v), lambda x: replace(x, quick=None))}
    if compiles:
        with torch.no_grad():
            first = core.step(q, k, v)[1].tensors
        steps[COMPILED] = _stream(torch.compile(compiled), (q, k, v), state=first)
    for context in contexts:
        case = Case("decode", context, heads=heads, head_dim=head_dim)
        steps[f"{SDPA}, {context} tokens"] = Step(contender(SDPA).runner(case))
    return time_bursts(steps, budget)


def _stream(
    take: Callable[..., Any], token: tuple[Tensor, ...], keep: Callable[[Any], Any] = lambda x: x, state: Any = None
) -> Step:
    """The same token over and over, from the state after the one before it; ``keep`` changes the state."""
    after = [state]

    def one() -> Any:
        with torch.no_grad():
            out, state = take(*token, after[0])
        after[0] = keep(state)
        return out

    return Step(one)
