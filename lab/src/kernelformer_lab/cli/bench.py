"""``kernelformer bench``: methods against their peers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, Threads, console, following, plain_errors, show_json, thread_count
from kernelformer.cli.options import takes
from kernelformer.environment import environment
from kernelformer.files import write_json
from kernelformer_lab.bench.settings import BenchSettings
from kernelformer_lab.records import command_words, plain, target


@takes(BenchSettings)
def bench(
    settings: BenchSettings,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="folder for bench.json and bench.png")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Time and weigh methods against their peers, after checking each against its definition."""
    from kernelformer_lab.bench import benchmark
    from kernelformer_lab.bench import benchmark as show
    from kernelformer_lab.bench.devices import check_device, device_facts

    with plain_errors():
        device = check_device(settings.device)
        cases = len(list(benchmark.cases(settings)))
        first = benchmark.contenders(settings)[0]
        file, count = target(out / "bench.json"), thread_count(threads)
        with following(cases) as job:
            rows = benchmark.run(settings, count, job.log, job.advance)
        for table in show.tables(rows, first, benchmark.heaps(settings)):
            console.print(table)
            console.print()
        console.print(
            f"ratios: against {first}; above 1, {first} is faster or leaner. peak: memory beyond the inputs; "
            f"beyond: beyond outputs and gradients too."
        )
        head = {
            "command": shlex.join(["kernelformer", "bench", *command_words(settings)]),
            "environment": environment(count),
            "machine": device_facts(device),
            "settings": plain(settings),
        }
        record = {**head, "rows": [row.as_json() for row in rows]}
        write_json(file, record)
        picture = file.with_suffix(".png")
        show.plot(rows, picture, settings.heaps[0])
        console.print(f"figures: {file}   picture: {picture}")
        if as_json:
            show_json(record)
