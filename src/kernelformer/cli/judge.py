"""``kernelformer judge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, Threads, console, following, plain_errors, show_json, use_threads
from kernelformer.cli.options import takes
from kernelformer.conversion.settings import JudgeSettings
from kernelformer.settings import MODEL


@takes(JudgeSettings)
def judge(
    settings: JudgeSettings,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a converted model")],
    original: Annotated[str, typer.Option(metavar="MODEL", help=f"the model that was converted: {MODEL}")],
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Judge a converted model beside its original: parts, recall, samples; into its report and model card."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.conversion.judge import judge_folder
        from kernelformer.conversion.report import judgement_tables, remarks

        with following() as job:
            result = judge_folder(folder, original, settings, log=job.log)
        if as_json:
            show_json(result.as_json())
        for table in judgement_tables(result):
            console.print(table)
        for line in remarks(result):
            console.print(line)
        console.print(f"figures: {folder / 'report.json'}   model card: {folder / 'README.md'}")
