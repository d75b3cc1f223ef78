"""Pictures of what conversion does: attention matrices, and the cost over the length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.aliases import literal_text, picture_in, renamed
from kernelformer.cli.common import (
    console,
    names,
    numbers,
    plain_errors,
    progress_bar,
    say,
    target,
    use_threads,
)
from kernelformer.cli.resuming import goes_on


@renamed(layer="layers", head="heads")
def attention(
    original: Annotated[Path, typer.Argument(help="folder of a pretrained model")],
    converted: Annotated[Path | None, typer.Argument(help="folder of the converted model; or give --attention")] = None,
    attention: Annotated[
        str | None, typer.Option(help="convert a copy of the original here: name or name:option=value")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="a sentence")] = None,
    text: Annotated[str | None, typer.Option(help="file with a sentence, instead of --prompt")] = None,
    sequence: Annotated[str | None, typer.Option(help="residues of a protein, instead of a text")] = None,
    layers: Annotated[str, typer.Option(help="numbers from 0, as 0-3,5; default: a few")] = "",
    heads: Annotated[str, typer.Option(help="the same of heads; one layer and one head show the difference")] = "",
    allow_pickle: Annotated[bool, typer.Option(help="read weights from a pickle, which can run code")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for attention.png")] = Path("out"),
) -> None:
    """Attention matrices of a model and of its converted self, side by side (Performer, App. C.4)."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.pipelines import attention as pictures

        file = picture_in(out, "attention.png")
        chosen = _selected("layers", layers), _selected("heads", heads)
        found = pictures.run(
            original,
            converted,
            attention=attention,
            text=literal_text(prompt, text),
            sequence=sequence,
            allow_pickle=allow_pickle,
        )
        pictures.picture(found, file, *chosen)
        console.print(pictures.table(found))
        console.print(f"picture: {file}")


def _selected(what: str, text: str) -> list[int] | None:
    """Numbers from 0 and ranges of them, as `convert --layers` takes them; None: not given."""
    from kernelformer.pipelines.convert import parse_layers

    chosen = [x for x in parse_layers(text) if isinstance(x, int) and x >= 0] if text else None
    if chosen is not None and len(chosen) < len(parse_layers(text)):
        raise ValueError(f"--{what} takes numbers from 0 and ranges, as 0-3,5, got {text!r}.")
    return chosen


def lengths(
    model: Annotated[Path, typer.Argument(help="folder of a pretrained model; --random needs its config.json alone")],
    attention: Annotated[
        str, typer.Option(help="what it is converted to, separated by commas")
    ] = "loglinear:num_features=128,favor+:num_features=128",
    baselines: Annotated[str, typer.Option(help="of the original: sdpa, eager")] = "sdpa,eager",
    lengths: Annotated[str, typer.Option(help="tokens")] = "256,512,1024,2048,4096,8192",
    task: Annotated[str, typer.Option(help="encoder or causal; auto: what the model is")] = "auto",
    random: Annotated[bool, typer.Option("--random", help="draw the weights")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="measure forward + backward too")] = False,
    generate: Annotated[int, typer.Option(min=0, help="the longest context to generate after; 0: none")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="sequences of a pass")] = 1,
    budget: Annotated[float, typer.Option(min=0.01, help="seconds for each length and pass")] = 10.0,
    limit: Annotated[float, typer.Option(min=0.01, help="seconds of one pass beyond which it is not run")] = 60.0,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    allow_pickle: Annotated[bool, typer.Option(help="read weights from a pickle, which can run code")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for lengths.json and lengths.png")] = Path("out"),
) -> None:
    """From which length on a converted model is faster and leaner than the original; goes on where it was stopped."""
    with plain_errors(goes_on):
        from kernelformer.studies import lengths as study
        from kernelformer.studies.settings import LengthsSettings

        use_threads(threads)
        file = target(out / "lengths.json")
        settings = LengthsSettings(
            model=model,
            attention=tuple(names(attention)),
            baselines=tuple(names(baselines)),
            lengths=tuple(numbers("--lengths", lengths)),
            task=task,
            random=random,
            backward=backward,
            generate=generate,
            batch=batch,
            budget=budget,
            limit=limit,
            memory=memory,
            allow_pickle=allow_pickle,
        )
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.steps(settings))
            result = study.run(settings, out, lambda x: say(progress, bar, x), lambda: progress.advance(bar))
        for table in study.tables(result):
            console.print(table)
        study.picture(result, file.with_suffix(".png"))
        console.print(f"figures: {file}   picture: {file.with_suffix('.png')}")
