"""``kernelformer judge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Threads, console, plain_errors, progress_bar, say, use_threads
from kernelformer.cli.derive import takes
from kernelformer.pipelines.judge_settings import JudgeSettings


@takes(JudgeSettings)
def judge(
    settings: JudgeSettings,
    folder: Annotated[Path, typer.Argument(help="of a converted model")],
    original: Annotated[str, typer.Option(metavar="SRC", help="the model that was converted, as convert takes it")],
    threads: Threads = None,
) -> None:
    """Judge a converted model beside its original: parts, recall, samples; into its report and model card."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.pipelines.judge import judge_folder
        from kernelformer.reports.judgement import remarks, tables

        with progress_bar() as progress:
            bar = progress.add_task("", total=None)
            result = judge_folder(folder, original, settings, log=lambda x: say(progress, bar, x))
        for table in tables(result):
            console.print(table)
        for line in remarks(result):
            console.print(line, highlight=False, markup=False)
        console.print(f"figures: {folder / 'report.json'}   model card: {folder / 'README.md'}")
