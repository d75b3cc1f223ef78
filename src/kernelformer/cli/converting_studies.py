"""Studies of what conversion does to a trained model; `studies` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.aliases import renamed
from kernelformer.cli.common import (
    console,
    names,
    numbers,
    plain_errors,
    progress_bar,
    say,
    target,
    thread_count,
    use_threads,
)
from kernelformer.cli.resuming import goes_on
from kernelformer.commands import typed
from kernelformer.environment import environment
from kernelformer.files import write_json


def normalized(
    data: Annotated[Path | None, typer.Option(help="file or folder of text; default: Python's own sources")] = None,
    steps: Annotated[int, typer.Option(min=1, help="of training, for each of four models")] = 600,
    length: Annotated[int, typer.Option(min=2, help="bytes of a sample")] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    width: Annotated[int, typer.Option(min=1)] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 8,
    lr: Annotated[float, typer.Option(help="the largest; ten times that for position tables")] = 5e-3,
    scale: Annotated[float, typer.Option(help="of normalized attention; the paper's is 1")] = 1.0,
    features: Annotated[str, typer.Option(help="numbers of random features")] = "16,32,64,128,256",
    draws: Annotated[int, typer.Option(min=2, help="of the features")] = 5,
    draw: Annotated[str, typer.Option(help="how they are drawn: iid as in the paper, orthogonal, ...")] = "iid",
    samples: Annotated[int, typer.Option(min=1, help="validation windows")] = 64,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for normalized.json, normalized.png and the models")] = Path("out"),
) -> None:
    """Standard and normalized models made linear without fine-tuning (NPRF, Fig. 2); trained models are kept."""
    from kernelformer.studies import normalized as study

    use_threads(threads)
    with plain_errors(goes_on):
        file = target(out / "normalized.json")
        setting = study.Setting(
            data=None if data is None else str(data),
            steps=steps,
            length=length,
            layers=layers,
            width=width,
            heads=heads,
            batch=batch,
            lr=lr,
            scale=scale,
            features=numbers("--features", features),
            draws=draws,
            draw=draw,
            samples=samples,
            seed=seed,
        )
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.stages(setting))
            found = study.run(
                setting,
                out / "normalized",
                lambda x: say(progress, bar, x),
                lambda: progress.advance(bar),
                again=typed(),
            )
        for table in study.tables(found):
            console.print(table)
        write_json(file, {"environment": environment(thread_count(threads)), **found.as_json()})
        picture = file.with_suffix(".png")
        study.picture(found, picture)
        console.print(f"figures: {file}   picture: {picture}")


@renamed(methods="attention")
def conversion(
    model: Annotated[str, typer.Argument(help="folder of transformers, or name on the hub")],
    text: Annotated[Path, typer.Option(help="to distill on: .jsonl with 'text' in each line, or one text a line")],
    held_out: Annotated[Path, typer.Option(help="to measure on, of the same form")],
    attention: Annotated[str, typer.Option(help="name or name:option=value, separated by commas")] = "",
    features: Annotated[int, typer.Option(min=2, help="of each method, where --attention does not say")] = 128,
    seconds: Annotated[float, typer.Option(min=0, help="of distillation for each method")] = 300.0,
    length: Annotated[int, typer.Option(min=2, help="tokens of a text")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="texts of a step")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="held-out texts")] = 128,
    probe: Annotated[int, typer.Option(min=0, help="labelled texts for a linear probe; 0: none")] = 0,
    layers: Annotated[str, typer.Option(help="0-3,5 or patterns of names; default: all")] = "",
    task: Annotated[str, typer.Option(help="auto, encoder, masked or causal")] = "auto",
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="read pickled weights")] = False,
    save: Annotated[Path | None, typer.Option(help="folder that distilled models go to")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for conversion.json and conversion.png")] = Path("out"),
) -> None:
    """Which method converts a pretrained model best, as it is and after distillation; goes on where it stopped."""
    from kernelformer.pipelines.convert import parse_layers
    from kernelformer.studies import conversion as study
    from kernelformer.studies import conversion_show as show

    use_threads(threads)
    with plain_errors(goes_on):
        file = target(out / "conversion.json")
        chosen = names(attention) if attention else study.method_specs(features)
        wanted = tuple(parse_layers(layers)) if layers else None
        setting = study.Setting(length, batch, seconds, samples, probe, wanted, seed)
        with progress_bar() as progress:
            bar = progress.add_task("", total=None)
            rows = study.run(
                model,
                text,
                held_out,
                chosen,
                setting,
                file,
                allow_pickle=allow_pickle,
                task=task,
                save=save,
                tell=lambda x: say(progress, bar, x),
            )
        console.print(show.table(rows))
        picture = file.with_suffix(".png")
        show.picture(rows, picture)
        console.print(f"figures: {file}   picture: {picture}")
