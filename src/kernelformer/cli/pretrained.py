"""``kernelformer advise | convert | judge | export``; heavy imports are inside, since transformers takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, Threads, console, following, goes_on, plain_errors, show_json, use_threads
from kernelformer.cli.options import takes
from kernelformer.commands import typed
from kernelformer.conversion.settings import AdviseSettings, ConvertSettings, ExportSettings, JudgeSettings
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
        from kernelformer.conversion import report

        with following() as job:
            result = converting.run(source, target, settings, force=force, log=job.log)
        if as_json:
            show_json(result.as_json())
        for table in report.tables(result):
            console.print(table)
        for what, used in result.texts.items():
            console.print(f"{what} {used}")
        for remark in result.remarks:
            console.print(f"note: {remark}")
        for line in report.remarks(result.judged):
            console.print(line)
        console.print(f"model: {target}   figures: {target / 'report.json'}")


def _next(target: Path) -> str:
    """Sentence for Ctrl-C on a conversion: a distillation that was saved continues."""
    from kernelformer.conversion.checkpoint import Checkpoint

    return goes_on() if Checkpoint.folder_for(target).exists() else f"{typed()} starts anew"


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


@takes(ExportSettings)
def export(
    settings: ExportSettings,
    folder: Annotated[Path, typer.Argument(help="of a run, of a saved model, or of a converted one")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make")],
    threads: Threads = None,
) -> None:
    """Write a model as ONNX, compared with torch, with a script that runs it without torch."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.export.job import export_folder
        from kernelformer.formatting import human_bytes

        with following() as job:
            result = export_folder(folder, out, settings, log=job.log)
        files = ", ".join(f"{name} ({human_bytes(size)})" for name, size in result.files.items() if ".onnx" in name)
        console.print(f"{result.kind} as ONNX, opset {result.opset}: {files}")
        found = result.differences
        steps = "" if found.steps is None else f", {settings.steps} steps {found.steps:.1e}"
        console.print(
            f"largest difference from torch, over the largest output: sequences {found.sequences:.1e}, padded "
            f"{found.padded:.1e}{steps}",
        )
        if result.grows:
            layers = ", ".join(map(str, result.grows))
            console.print(f"note: the state of layers {layers} keeps every key, and grows with the text")
        name = next(x for x in result.files if x in ("generate.py", "run.py"))
        console.print(f"without torch: python {result.folder / name}")
