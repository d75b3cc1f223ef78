"""Many short sequences, and one token at a time: what linear attention costs where SDPA costs little.

A batch of sequences of the same number of tokens in all, from many short ones to a few long ones; ours as it chooses by
size, the loop over chunks that it once was everywhere, and SDPA, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernelformer.attention import step
from kernelformer.errors import WorkerError
from kernelformer.formatting import human_time
from kernelformer.modules import KernelCore, build_attention
from kernelformer.timing import Figures, Step
from kernelformer_lab.bench.attention import contender
from kernelformer_lab.bench.case import Case
from kernelformer_lab.bench.harness import run_in_process, time_bursts
from kernelformer_lab.bench.settings import PASSES
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import ShortSettings as Settings

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


TASKS = ("bidirectional", "causal")


@dataclass
class Result:
    """Times of all cases, and of a token.

    Args:
        rows: of each case its ``case`` and the ``seconds`` of each contender.
        steps: seconds of a token by way.
        note: why no compiled step was timed.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    note: str = ""


def sizes(settings: Settings) -> list[tuple[int, int]]:
    """Sequences and their length, from words as 512x8."""
    pairs = []
    for word in settings.sizes:
        parts = word.split("x")
        if len(parts) != 2 or not all(x.isdecimal() and int(x) for x in parts):
            raise ValueError(f"sizes are sequences x tokens, as 512x8, got {word!r}.")
        pairs.append((int(parts[0]), int(parts[1])))
    return pairs


def cases(settings: Settings, features: int) -> Iterator[Case]:
    """All cases of one number of features."""
    for (batch, length), task, backward in product(sizes(settings), TASKS, (False, True)):
        how: dict[str, Any] = {"heads": settings.heads, "head_dim": settings.head_dim, "features": features}
        yield Case(task, length, backward, batch, **how)  # type: ignore[arg-type]


def steps(settings: Settings) -> int:
    """One process for each number of features, and one for the steps."""
    sizes(settings)
    return len(settings.features) + 1


def run(settings: Settings, folder: Path, log: Log, progress: Progress) -> Result:
    """Time everything."""
    sizes(settings)
    threads, result = torch.get_num_threads(), Result()
    for features in settings.features:
        log(f"{features} features")
        asked = [asdict(x) for x in cases(settings, features)]
        figures = run_in_process(measure_cases, threads=threads, cases=asked, budget=settings.budget)
        for case, row in zip(asked, figures["rows"], strict=True):
            result.rows.append({"case": case, "seconds": _seconds(row)})
        progress()
    log("one token")
    given: dict[str, Any] = {"heads": settings.step_heads, "head_dim": settings.head_dim, "budget": settings.budget}
    given |= {"features": settings.step_features, "contexts": list(settings.contexts)}
    try:
        figures = run_in_process(measure_steps, threads=threads, compiles=settings.compiled, **given)
    except WorkerError as problem:
        if not settings.compiled:
            raise
        result.note = f"not compiled: {problem}"  # a machine without a C++ compiler
        figures = run_in_process(measure_steps, threads=threads, compiles=False, **given)
    result.steps = _seconds(figures)
    progress()
    return result


def _seconds(figures: Figures) -> dict[str, float]:
    return {name: x["seconds"] for name, x in figures.items()}


def tables(result: Result) -> list[Table]:
    """Times of sequences over SDPA's, and of a token."""
    out = Table(title="Time over that of SDPA: now (by the loop over chunks)", title_justify="left")
    for name in ("features", "sequences", "tokens", *(f"{task} {kind}" for task in TASKS for kind in PASSES)):
        out.add_column(name, justify="right")
    cells: dict[tuple[int, int, int], list[str]] = {}
    for row in result.rows:
        case, seconds = row["case"], row["seconds"]
        now, before = (seconds[name] / seconds[SDPA] for name in (OURS, LOOP))
        size = (case["features"], case["batch"], case["length"])
        cells.setdefault(size, []).append(f"{now:.2f} ({before:.2f})")
    for size, mine in cells.items():
        out.add_row(*map(str, size), *mine)
    token = Table("one token", title="A token, favor+ and SDPA with a cache", title_justify="left", caption=result.note)
    token.add_column("time", justify="right")
    for name, seconds in result.steps.items():
        token.add_row(name, human_time(seconds))
    return [out, token]


def record(result: Result) -> dict[str, Any]:
    """Every figure."""
    return asdict(result)


def picture(result: Result, path: Path) -> None:
    """Draw the time of a training step over SDPA's by length, now and by the loop over chunks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    counts = sorted({row["case"]["features"] for row in result.rows})
    figure, axes = plt.subplots(1, len(counts), figsize=(4 * len(counts), 3.4), squeeze=False, constrained_layout=True)
    for axis, features in zip(axes[0], counts, strict=True):
        for task, (name, style) in product(TASKS, ((OURS, "-"), (LOOP, ":"))):
            rows = [x for x in result.rows if (x["case"]["features"], x["case"]["task"]) == (features, task)]
            points = {
                x["case"]["length"]: x["seconds"][name] / x["seconds"][SDPA] for x in rows if x["case"]["backward"]
            }
            label = f"{task}, {'now' if name == OURS else 'chunks'}"
            axis.plot(list(points), list(points.values()), style, color=f"C{TASKS.index(task)}", label=label)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{features} features")
        axis.set_xlabel("tokens of a sequence")
    axes[0][0].set_ylabel("forward + backward, over SDPA")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
