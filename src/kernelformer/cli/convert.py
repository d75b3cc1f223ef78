"""``kernelformer convert``.

What converts is imported by the command: transformers takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import (
    Json,
    Threads,
    console,
    errors,
    following,
    literal_text,
    plain_errors,
    show_json,
    use_threads,
    write,
)
from kernelformer.cli.options import takes
from kernelformer.cli.training import goes_on
from kernelformer.commands import typed
from kernelformer.conversion.settings import ConvertSettings
from kernelformer.settings import MODEL, SEED


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
            console.print(f"{what} {used}", highlight=False, markup=False)
        for remark in result.remarks:
            console.print(f"note: {remark}")
        for line in judgement.remarks(result.judged):
            console.print(line, highlight=False, markup=False)
        console.print(f"model: {target}   figures: {target / 'report.json'}")


def _next(target: Path) -> str:
    """Sentence for Ctrl-C on a conversion: a distillation that was saved continues."""
    from kernelformer.conversion.checkpoint import Checkpoint

    return goes_on() if Checkpoint.folder_for(target).exists() else f"{typed()} starts anew"


def continue_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a converted decoder")],
    prompt: Annotated[str | None, typer.Option(help="what comes before")] = None,
    text: Annotated[str | None, typer.Option(help="file with what comes before, instead of --prompt")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest each time")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="likeliest tokens to draw from; 0: all")] = 50,
    seed: Annotated[int, typer.Option(min=0, help=f"{SEED} of the sampling")] = 0,
    threads: Threads = None,
) -> None:
    """Let a converted decoder go on with a text, in constant memory."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.generation import write_on

        before = literal_text(prompt, text)
        if before is None:
            raise ValueError("there is no text to go on with; give it by --prompt, or a file by --text.")
        options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        with following(tokens) as job:
            written = write_on(folder, before, **options, log=lambda _: job.advance())  # type: ignore[arg-type]
        write(f"{before}{written.text}\n")
        first, last = sorted(written.cache)[min(1, len(written.cache) - 1)], max(written.cache)
        errors.print(
            f"{written.tokens} tokens, {written.tokens / written.seconds:.1f} a second; "
            f"cache {written.cache[first]:,} bytes after {first} tokens and {written.cache[last]:,} after {last}"
            + ("" if written.constant else " (exact attention keeps every key)"),
            style="dim",
        )
