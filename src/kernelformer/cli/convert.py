"""``kernelformer convert``.

What converts is imported by the command: transformers takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.aliases import literal_text
from kernelformer.cli.common import Threads, console, plain_errors, progress_bar, say, use_threads, write
from kernelformer.cli.resuming import goes_on
from kernelformer.commands import typed


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="folder of transformers, .gguf file, or name on the hub")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="folder for the converted model")],
    attention: Annotated[str, typer.Option(help="method, or method:option=value; default: loglinear")] = "",
    features: Annotated[int | None, typer.Option(min=1, help="features, landmarks or rank; default: 128")] = None,
    layers: Annotated[str, typer.Option(help="0-3,5 or patterns of names; default: all")] = "",
    keep: Annotated[int, typer.Option(min=0, help="attentions that stay exact: those that the output needs most")] = 0,
    keep_heads: Annotated[int, typer.Option(min=0, help="heads with the largest errors that stay exact")] = 0,
    distill: Annotated[Path | None, typer.Option(help="texts to learn from: .jsonl with 'text', or one a line")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="of attention transfer; default: 300 with --distill")] = None,
    tune: Annotated[int, typer.Option(min=0, help="steps with all weights after that")] = 0,
    text: Annotated[Path | None, typer.Option(help="texts to measure on; default: some of --distill")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="tokens of a text; default: 256")] = None,
    samples: Annotated[int, typer.Option(min=1, help="texts to measure on; causal: windows")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="texts, or windows, at once")] = 4,
    task: Annotated[str, typer.Option(help="auto, masked, causal, seq2seq or encoder")] = "auto",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="read pickled weights of a trusted source")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace a converted model that is there")] = False,
    seed: Annotated[int, typer.Option(min=0, help="of draws and of the order of texts")] = 0,
    threads: Threads = None,
) -> None:
    """Make a pretrained model linear: convert its attention, measure, distill, and write it as a folder."""
    use_threads(threads)
    with plain_errors(lambda: _next(target)):
        from kernelformer.pipelines import convert as converting
        from kernelformer.reports import conversion as conversion_report

        setting = converting.Setting(
            attention=attention or converting.DEFAULT,
            features=features,
            layers=layers,
            keep=keep,
            keep_heads=keep_heads,
            distill=distill,
            steps=steps,
            tune=tune,
            text=text,
            length=length,
            samples=samples,
            batch=batch,
            task=task,
            allow_pickle=allow_pickle,
            seed=seed,
        )
        with progress_bar() as progress:
            bar = progress.add_task("", total=None)
            found = converting.run(source, target, setting, force=force, tell=lambda x: say(progress, bar, x))
        for table in conversion_report.tables(found):
            console.print(table)
        for what, used in found.texts.items():
            console.print(f"{what} {used}", highlight=False, markup=False)
        for remark in found.remarks:
            console.print(f"note: {remark}")
        console.print(f"model: {target}   figures: {target / 'report.json'}")


def _next(target: Path) -> str:
    """What to say after Ctrl-C: a distillation that has learned something goes on."""
    from kernelformer.distill.checkpoint import Checkpoint

    return goes_on() if Checkpoint.place(target).exists() else f"{typed()} starts anew"


def continue_(
    folder: Annotated[Path, typer.Argument(help="of a converted decoder")],
    prompt: Annotated[str | None, typer.Option(help="text to go on with")] = None,
    text: Annotated[str | None, typer.Option(help="file with such a text, instead of --prompt")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="to write")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="likeliest tokens to draw from")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Threads = None,
) -> None:
    """Let a converted decoder go on with a text, in constant memory."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.pipelines.continue_text import write_on

        before = literal_text(prompt, text)
        if before is None:
            raise ValueError("there is no text to go on with; give it by --prompt, or a file by --text.")
        options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        with progress_bar() as progress:
            bar = progress.add_task("writing", total=tokens)
            found = write_on(folder, before, **options, tell=lambda _: progress.advance(bar))  # type: ignore[arg-type]
        write(f"{before}{found.text}\n")
        first, last = sorted(found.cache)[min(1, len(found.cache) - 1)], max(found.cache)
        console.print(
            f"{found.tokens} tokens, {found.tokens / found.seconds:.1f} a second; cache {found.cache[first]:,} bytes "
            f"after {first} tokens and {found.cache[last]:,} after {last}"
            + ("" if found.constant else " (exact attention keeps every key)"),
            style="dim",
        )
