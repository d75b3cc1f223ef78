"""``kernelformer attention``: pictures of attention matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import (
    Json,
    Threads,
    console,
    following,
    literal_text,
    plain_errors,
    show_json,
    use_threads,
)
from kernelformer.cli.options import attentions
from kernelformer.settings import PICKLE, parse_layers
from kernelformer_lab.records import target

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def picture_in(out: Path, name: str) -> Path:
    """Path of a picture in the folder --out, which is made; raises if --out is itself a picture."""
    if out.suffix.lower() in PICTURES and not out.is_dir():
        raise ValueError(f"--out takes a folder, in which the picture is {name}, got the path of a picture: {out}.")
    return target(out / name)


def attention(
    original: Annotated[Path, typer.Argument(metavar="MODEL", help="folder of transformers")],
    converted: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="of the converted model; or give --attention")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="convert a copy of the original here: name or name:option=value", autocompletion=attentions),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="a sentence")] = None,
    text: Annotated[str | None, typer.Option(help="file with a sentence, instead of --prompt")] = None,
    sequence: Annotated[str | None, typer.Option(help="residues of a protein, instead of a text")] = None,
    layers: Annotated[str, typer.Option(help="numbers from 0, as 0-3,5; default: a few")] = "",
    heads: Annotated[str, typer.Option(help="the same of heads; one layer and one head show the difference")] = "",
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help=PICKLE)] = False,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="folder for attention.png")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Draw attention matrices of a model and of its converted copy, side by side (Performer, App. C.4)."""
    use_threads(threads)
    with plain_errors():
        from kernelformer_lab.analysis import attention_pictures as pictures

        file = picture_in(out, "attention.png")
        chosen = _selected("layers", layers), _selected("heads", heads)
        with following() as job:
            job.log(f"reading {original} and comparing its attention")
            matrices = pictures.run(
                original,
                converted,
                attention=attention,
                text=literal_text(prompt, text),
                sequence=sequence,
                allow_pickle=allow_pickle,
            )
            pictures.picture(matrices, file, *chosen)
        if as_json:
            show_json(pictures.record(matrices))
        console.print(pictures.table(matrices))
        console.print(f"picture: {file}")


def _selected(what: str, text: str) -> list[int] | None:
    """Numbers from 0 and ranges of them, as `convert --layers` takes them; None: not given."""
    chosen = [x for x in parse_layers(text) if isinstance(x, int) and x >= 0] if text else None
    if chosen is not None and len(chosen) < len(parse_layers(text)):
        raise ValueError(f"--{what} takes numbers from 0 and ranges, as 0-3,5, got {text!r}.")
    return chosen
