"""``kernelformer bench``: methods against their peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelformer.cli.aliases import renamed
from kernelformer.cli.common import console, names, numbers, plain_errors, progress_bar, say, target, thread_count
from kernelformer.environment import environment
from kernelformer.files import write_json
from kernelformer.measure.settings import BenchSettings

if TYPE_CHECKING:
    from kernelformer.measure.benchmark import Row


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
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for bench.json and bench.png")] = Path("out"),
) -> None:
    """Time and weigh methods against their peers, after checking each against its definition."""
    from kernelformer.measure import benchmark, show

    with plain_errors():
        settings = BenchSettings(
            lengths=tuple(numbers("--lengths", lengths)),
            attention=tuple(names(attention)),
            peers=tuple(names(peers)),
            tasks=tuple(names(tasks)),
            passes=tuple(names(passes)),
            heaps=tuple(names(heaps)),
            batch=batch,
            heads=heads,
            head_dim=head_dim,
            features=features,
            bias=bias,
            max_distance=max_distance,
            budget=budget,
            memory=memory,
        )
        todo = len(list(benchmark.cases(settings)))
        first = benchmark.contenders(settings)[0]
        file = target(out / "bench.json")
        with progress_bar() as progress:
            bar = progress.add_task("", total=todo)
            rows = benchmark.run(
                settings, thread_count(threads), lambda x: say(progress, bar, x), lambda: progress.advance(bar)
            )
        _show(rows, first, settings.heaps)
        write_json(file, {"environment": environment(thread_count(threads)), "rows": [row.as_json() for row in rows]})
        picture = file.with_suffix(".png")
        show.plot(rows, picture, settings.heaps[0])
        console.print(f"figures: {file}   picture: {picture}")


def _show(rows: Sequence[Row], first: str, heaps: Sequence[str]) -> None:
    from kernelformer.measure import show

    for table in show.tables(rows, first, heaps):
        console.print(table)
        console.print()
    console.print(
        f"ratios: against {first}; above 1, {first} is faster or leaner. peak: memory beyond the inputs; "
        f"beyond: beyond outputs and gradients too.",
    )
