"""``kernelformer translate``.

What translates is imported by the command that needs it: transformers takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kernelformer.cli.common import Threads, errors, plain_errors, use_threads, warn, write
from kernelformer_lab.records import unfinished

BLOCKS = 16  # batches that are read before they are translated: sentences of similar length go together


def translate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a finished run on the task translation")],
    text: Annotated[Path | None, typer.Option(help="file with one text a line; default: standard input")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="of the search; default: the run's")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="above 0; default: the run's")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sentences at once")] = 32,
    threads: Threads = None,
) -> None:
    """Translate lines of text with a trained model, one line for each."""
    from kernelformer_lab.translation import load_translator

    use_threads(threads)
    with plain_errors():
        if text is not None and not text.is_file():
            raise ValueError(f"there is no file {text}; give one with a text in each line, or leave --text out.")
        translator = load_translator(folder, beams=beams, length_penalty=length_penalty)
        if (remark := unfinished(folder)) is not None:
            warn(remark)
        if text is None:
            _write(translator, sys.stdin.buffer, "standard input", batch, 1 if sys.stdin.isatty() else batch * BLOCKS)
        else:
            with text.open("rb") as lines:
                _write(translator, lines, str(text), batch, batch * BLOCKS)


def _write(translator: object, lines: BinaryIO, where: str, batch: int, block: int) -> None:
    from kernelformer_lab.translation import Translator, translate_texts

    assert isinstance(translator, Translator)
    texts, count, seconds = _texts(lines, where), 0, 0.0
    while some := list(islice(texts, block)):
        translated = translate_texts(translator, some, batch_size=batch)
        for text in translated.texts:
            write(text + "\n", keep="\n")
        for i in translated.cut:
            errors.print(
                f"line {count + i + 1} has more than {translator.task.length - 1} tokens and was cut", style="yellow"
            )
        count, seconds = count + len(some), seconds + translated.seconds
    if count:
        errors.print(f"{count} lines in {seconds:.1f} s, {count / seconds:.1f} a second", style="dim")


def _texts(lines: BinaryIO, where: str) -> Iterator[str]:
    """Lines of a text, blank ones too: line i of what is written belongs to line i of what was read."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{where}, line {number}: not UTF-8: {problem.reason}; save it as UTF-8.") from None
