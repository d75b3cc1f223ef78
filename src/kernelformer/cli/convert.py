"""``kernelformer convert``; heavy imports are inside, since transformers takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, Threads, console, following, goes_on, plain_errors, show_json, use_threads
from kernelformer.cli.options import takes
from kernelformer.commands import typed
from kernelformer.conversion.settings import ConvertSettings
from kernelformer.settings import MODEL


@takes(ConvertSettings)
def convert(
    settings: ConvertSettings,
    source: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="for the converted model")],
    force: Annotated[bool, typer.Option("--force", help="replace a converted model that is there")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Make a pretrained model linear: convert its attention, measure, distill, and write it as a folder."""
    use_threads(threads)
    with plain_errors(lambda: _next(target)):
        from kernelformer.conversion import convert as converting
        from kernelformer.conversion import report as conversion_report
        from kernelformer.conversion import report as judgement

        with following() as job:
            result = converting.run(source, target, settings, force=force, log=job.log)
        if as_json:
            show_json(result.as_json())
        for table in conversion_report.tables(result):
            console.print(table)
        for what, used in result.texts.items():
            console.print(f"{what} {used}")
        for remark in result.remarks:
            console.print(f"note: {remark}")
        for line in judgement.remarks(result.judged):
            console.print(line)
        console.print(f"model: {target}   figures: {target / 'report.json'}")


def _next(target: Path) -> str:
    """Sentence for Ctrl-C on a conversion: a distillation that was saved continues."""
    from kernelformer.conversion.checkpoint import Checkpoint

    return goes_on() if Checkpoint.folder_for(target).exists() else f"{typed()} starts anew"
