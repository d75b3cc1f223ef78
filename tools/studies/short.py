"""Many short sequences, and one token at a time: what linear attention costs where SDPA costs little.

    python tools/studies/short.py --features 64 --budget 0.3

A batch of sequences of the same number of tokens in all, from many short ones to a few long ones; ours as it chooses by
size, the loop over chunks that it once was everywhere, and SDPA, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernelformer.attention import step
from kernelformer.formatting import human_time
from kernelformer.modules import KernelCore, build_attention
from kernelformer.settings import Settings, option
from kernelformer_lab.bench.attention import contender
from kernelformer_lab.bench.case import Case
from kernelformer_lab.bench.harness import time_bursts
from kernelformer_lab.bench.settings import PASSES
from kernelformer_lab.bench.timing import Step
from kernelformer_lab.cli.studies import main
from kernelformer_lab.figures import drawing, log_axis, table
from kernelformer_lab.studies.base import SCRIPT, Log, Progress, Record, Row, Study, unique

OURS, LOOP, SDPA = "favor+", "favor+:algorithm=chunked", "sdpa"
STEP, SLOW, COMPILED = "step", "step without its quick way", "its arithmetic compiled"
TASKS = ("bidirectional", "causal")
SIZES = ("512x8", "256x16", "128x32", "64x64", "32x128", "16x256", "8x512", "4x1024", "1x1024")


@dataclass(frozen=True, kw_only=True)
class ShortSettings(Settings):
    """Settings of this study."""

    sizes: tuple[str, ...] = option(SIZES, "sequences x tokens of a batch")
    features: tuple[int, ...] = option((64, 256), "random features of a head", least=1)
    heads: int = option(8, "of an attention", least=1)
    head_dim: int = option(64, "width of a head", least=1)
    step_heads: int = option(9, "heads of the step", least=1)
    step_features: int = option(64, "features of the step", least=1)
    contexts: tuple[int, ...] = option((256, 1024, 4096), "tokens in SDPA's cache beside the step", least=1)
    compiled: bool = option(False, "time the step compiled too, which needs a C++ compiler")
    budget: float = option(0.6, "seconds per contender and case", least=0.001)


def measure_steps(settings: ShortSettings, compiles: bool) -> dict[str, float]:
    """Seconds of one token of ``favor+``, and of SDPA with caches of so many tokens."""
    shape = {"heads": settings.step_heads, "head_dim": settings.head_dim}
    core = build_attention(
        OURS, head_dim=settings.head_dim, num_heads=settings.step_heads, num_features=settings.step_features
    )
    assert isinstance(core, KernelCore)
    q, k, v = Case("decode", 1, **shape).inputs()
    phi = core.feature_map

    def compiled(q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return step(phi.spec, phi.tensors(), q, k, v, state, scale=core.scale)

    steps = {STEP: _stream(core.step, (q, k, v)), SLOW: _stream(core.step, (q, k, v), lambda x: replace(x, fits=()))}
    if compiles:
        with torch.no_grad():
            first = core.step(q, k, v)[1].tensors
        steps[COMPILED] = _stream(torch.compile(compiled), (q, k, v), state=first)
    for context in settings.contexts:
        steps[f"{SDPA}, {context} tokens"] = Step(contender(SDPA).runner(Case("decode", context, **shape)))
    return {name: x["seconds"] for name, x in time_bursts(steps, settings.budget).items()}


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


def sizes(settings: ShortSettings) -> list[tuple[int, int]]:
    """Sequences and their length, from words as 512x8."""
    pairs = []
    for word in settings.sizes:
        parts = word.split("x")
        if len(parts) != 2 or not all(x.isdecimal() and int(x) for x in parts):
            raise ValueError(f"sizes are sequences x tokens, as 512x8, got {word!r}.")
        pairs.append((int(parts[0]), int(parts[1])))
    return pairs


def cases(settings: ShortSettings, features: int) -> Iterator[Case]:
    """All cases of one number of features."""
    for (batch, length), task, backward in product(sizes(settings), TASKS, (False, True)):
        how: dict[str, Any] = {"heads": settings.heads, "head_dim": settings.head_dim, "features": features}
        yield Case(task, length, backward, batch, **how)  # type: ignore[arg-type]


def steps(settings: ShortSettings) -> int:
    """A step for each number of features, and one for the tokens."""
    sizes(settings)
    return len(settings.features) + 1


def run(record: Record, log: Log, progress: Progress) -> None:
    """Time ours, the loop over chunks and SDPA in turns, case by case, then one token."""
    settings = record.settings
    record.figures = {"rows": [], "steps": {}, "note": ""}
    for features in settings.features:
        log(f"{features} features")
        for case in cases(settings, features):
            runs = {name: Step(contender(name).runner(case)) for name in (OURS, LOOP, SDPA)}
            seconds = {name: x["seconds"] for name, x in time_bursts(runs, settings.budget).items()}
            record.rows.append({"case": asdict(case), "seconds": seconds})
        progress()
    log("one token")
    try:
        record.figures["steps"] = measure_steps(settings, settings.compiled)
    except Exception as problem:
        if not settings.compiled:
            raise
        record.figures["note"] = f"not compiled: {problem}"  # a machine without a C++ compiler
        record.figures["steps"] = measure_steps(settings, False)
    progress()


def ratio(row: Row, name: str) -> float:
    """Time over that of SDPA."""
    found: float = row["seconds"][name] / row["seconds"][SDPA]
    return found


def tables(record: Record) -> list[Table]:
    """Times of sequences over SDPA's, and of a token."""
    cells: dict[tuple[int, int, int], list[str]] = {}
    for row in record.rows:
        size = tuple(row["case"][name] for name in ("features", "batch", "length"))
        cells.setdefault(size, []).append(f"{ratio(row, OURS):.2f} ({ratio(row, LOOP):.2f})")
    kinds = (f"{task} {kind}" for task in TASKS for kind in PASSES)
    return [
        table(
            "Time over that of SDPA: now (by the loop over chunks)",
            ("features", "sequences", "tokens", *kinds),
            [(*map(str, size), *mine) for size, mine in cells.items()],
            left=0,
        ),
        table(
            "A token, favor+ and SDPA with a cache",
            ("one token", "time"),
            [(name, human_time(x)) for name, x in record.figures["steps"].items()],
            caption=record.figures["note"] or None,
        ),
    ]


def picture(record: Record, path: Path) -> None:
    """Draw the time of a training step over SDPA's by length, now and by the loop over chunks."""
    counts = sorted(unique((x["case"] for x in record.rows), "features"))
    with drawing(path, (4 * len(counts), 3.4), columns=len(counts)) as (_, (axes,)):
        for axis, features in zip(axes, counts, strict=True):
            for task, (name, line) in product(TASKS, ((OURS, "-"), (LOOP, ":"))):
                key = {"features": features, "task": task, "backward": True}
                rows = [x for x in record.rows if key.items() <= x["case"].items()]
                points = {x["case"]["length"]: ratio(x, name) for x in rows}
                label = f"{task}, {'now' if name == OURS else 'chunks'}"
                axis.plot(list(points), list(points.values()), line, color=f"C{TASKS.index(task)}", label=label)
            axis.axhline(1, color="grey", linewidth=0.8)
            log_axis(axis)
            axis.set(title=f"{features} features", xlabel="tokens of a sequence")
        axes[0].set_ylabel("forward + backward, over SDPA")
        axes[0].legend(fontsize="small")


STUDY = Study("short", "", ShortSettings, steps, run, tables, picture, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Time many short sequences and one token at a time, beside SDPA and the loop over chunks.")
