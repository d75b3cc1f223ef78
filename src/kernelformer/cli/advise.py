"""``kernelformer advise``; heavy imports are inside, since transformers takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, Threads, console, following, plain_errors, show_json, use_threads
from kernelformer.cli.options import takes
from kernelformer.conversion.settings import AdviseSettings
from kernelformer.settings import MODEL


@takes(AdviseSettings)
def advise(
    settings: AdviseSettings,
    source: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    out: Annotated[Path | None, typer.Option(help="folder for advice.json and advice.html")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Advise on converting a pretrained model: errors, times, what to keep exact, and the command to paste."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.conversion import advice_report as report
        from kernelformer.conversion import advise as advising

        with following(seconds=60 * settings.budget) as job:
            advice = advising.run(source, settings, out, log=job.log)
        if as_json:
            show_json(report.record(advice))
        for table in report.tables(advice):
            console.print(table)
        for remark in (*advice.remarks, *(f"left out for time: {x}" for x in advice.left_out)):
            console.print(f"note: {remark}")
        for line in report.verdict(advice):
            console.print(line)
        for line in report.paste_lines(advice):
            console.print(line, soft_wrap=True)
        if out is not None:
            console.print(f"page: {out / 'advice.html'}   figures: {out / 'advice.json'}")
