"""``kernelformer bench``: methods against their peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelformer.cli.aliases import renamed
from kernelformer.cli.common import Threads, console, plain_errors, progress_bar, say, target, thread_count
from kernelformer.environment import environment
from kernelformer.errors import choice
from kernelformer.files import write_json
from kernelformer.settings import integers
from kernelformer.settings import split_names as names

if TYPE_CHECKING:
    from kernelformer.measure.benchmark import Row
    from kernelformer.measure.case import Case


@renamed(methods="attention", window="max_distance")
def bench(
    lengths: Annotated[str, typer.Option(help="lengths, and contexts for decoding")] = "1024,4096,16384",
    attention: Annotated[
        str, typer.Option(help="of ours, name or name:option=value; ratios refer to the first")
    ] = "favor+",
    peers: Annotated[
        str, typer.Option(help="'auto' for SDPA, what is installed, and for a bias Algorithm 1; 'none'; or names")
    ] = "auto",
    tasks: Annotated[str, typer.Option(help="of bidirectional, causal, decode")] = "bidirectional,causal,decode",
    passes: Annotated[str, typer.Option(help="of forward, train (forward + backward)")] = "forward,train",
    heaps: Annotated[str, typer.Option(help="of default, kept: the allocator's settings")] = "default,kept",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    features: Annotated[int, typer.Option(min=1)] = 256,
    bias: Annotated[str, typer.Option(help="relative positions: none, full (all distances), window")] = "none",
    max_distance: Annotated[int, typer.Option(min=1, help="distance beyond which such a bias is constant")] = 128,
    budget: Annotated[float, typer.Option(min=0.01, help="seconds per contender and case")] = 2.0,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="folder for bench.json and bench.png")] = Path("out"),
) -> None:
    """Time and weigh methods against their peers, after checking each against its definition."""
    from kernelformer.measure import benchmark as bench_run
    from kernelformer.measure.attention import BIASES, TASKS, contender, yardsticks
    from kernelformer.reports import bench as show

    with plain_errors():
        chosen = names(attention)
        kind_of_bias = None if choice("bias", bias, ("none", *BIASES)) == "none" else bias
        backward = [choice("pass", x, ("forward", "train")) == "train" for x in names(passes)]
        if peers == "auto":
            chosen += yardsticks(bias=kind_of_bias is not None, backward=any(backward))
        elif peers != "none":
            chosen += names(peers)
        for name in chosen:
            contender(name)
        kinds = [choice("task", x, TASKS) for x in names(tasks)]
        heap_names = [choice("heap", x, bench_run.HEAPS) for x in names(heaps)]
        sizes = integers("--lengths", lengths)
        shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "features": features}
        todo = list(bench_run.cases(sizes, kinds, backward, **shape, bias=kind_of_bias, window=max_distance))
        file = target(out / "bench.json")
        rows = _measure(todo, chosen, heaps=heap_names, threads=thread_count(threads), budget=budget, memory=memory)
        _show(rows, chosen[0], heap_names)
        write_json(file, {"environment": environment(thread_count(threads)), "rows": [row.as_json() for row in rows]})
        picture = file.with_suffix(".png")
        show.plot(rows, picture, heap_names[0])
        console.print(f"figures: {file}   picture: {picture}")


def _measure(todo: Sequence[Case], chosen: Sequence[str], **settings: Any) -> list[Row]:
    from kernelformer.measure.benchmark import run_case

    rows: list[Row] = []
    with progress_bar() as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            rows += run_case(case, chosen, **settings, tell=lambda text: say(progress, bar, text))
            progress.advance(bar)
    return rows


def _show(rows: Sequence[Row], first: str, heaps: Sequence[str]) -> None:
    from kernelformer.reports import bench as show

    for table in show.tables(rows, first, heaps):
        console.print(table)
        console.print()
    console.print(
        f"ratios: against {first}; above 1, {first} is faster or leaner. peak: memory beyond the inputs; "
        f"beyond: beyond outputs and gradients too.",
    )
