"""``kernelformer study``: small studies of the papers, at a size for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelformer.cli import converting_studies, pictures
from kernelformer.cli.aliases import picture_in, renamed
from kernelformer.cli.common import (
    console,
    names,
    numbers,
    plain_errors,
    progress_bar,
    say,
    shares,
    target,
    thread_count,
    use_threads,
)
from kernelformer.cli.resuming import goes_on
from kernelformer.environment import environment
from kernelformer.files import write_json
from kernelformer.formatting import visible
from kernelformer.recipes.catalogue import find_recipe
from kernelformer.studies.settings import ENCODER_ATTENTIONS, POSITION_LENGTHS, SparsitySetting

app = typer.Typer(help="Small studies of the papers, at a size for a CPU.", no_args_is_help=True)
app.command()(converting_studies.conversion)
app.command()(converting_studies.normalized)
app.command()(pictures.lengths)


@app.command()
@renamed(methods="attention")
def sparsity(
    attention: Annotated[str, typer.Option(help="name or name:option=value, separated by commas")] = "",
    relevances: Annotated[str, typer.Option(help="probabilities that a position counts")] = "0.1,0.5,0.9",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each")] = 1,
    steps: Annotated[int, typer.Option(min=1)] = SparsitySetting.steps,
    length: Annotated[int, typer.Option(min=4)] = SparsitySetting.length,
    features: Annotated[int, typer.Option(min=1)] = SparsitySetting.num_features,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for sparsity.json and sparsity.png")] = Path("out"),
) -> None:
    """Which kernels learn to ignore (KL-Transformer, App. E): learning curves; goes on where it was stopped."""
    from kernelformer.studies import sparsity as study

    use_threads(threads)
    with plain_errors(goes_on):
        file = target(out / "sparsity.json")
        chosen = names(attention) if attention else list(study.METHODS)
        relevant = shares("--relevances", relevances)
        setting = SparsitySetting(steps=steps, length=length, num_features=features)
        with progress_bar() as progress:
            bar = progress.add_task("", total=len(chosen) * len(relevant) * seeds)
            curves = study.study(
                chosen,
                relevant,
                setting,
                file,
                seeds=range(seeds),
                tell=lambda text: progress.update(bar, description=visible(text)),
                done=lambda: progress.advance(bar),
            )
        console.print(study.table(curves))
        picture = file.with_suffix(".png")
        study.picture(curves, picture)
        console.print(f"figures: {file}   picture: {picture}")


@app.command()
def kernels(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for kernels.png")] = Path("out"),
) -> None:
    """Where learned kernels start, and what the smoothing of signed ones costs."""
    from kernelformer.studies import kernels as kernel_study

    use_threads(threads)
    with plain_errors():
        file = picture_in(out, "kernels.png")
        with progress_bar() as progress:
            bar = progress.add_task("", total=kernel_study.STEPS)
            found = kernel_study.run(lambda text: say(progress, bar, text, advance=1))
        for table in kernel_study.tables(found):
            console.print(table)
        kernel_study.picture(found, file)
        console.print(f"picture: {file}")


@app.command()
def approximation(
    encoder: Annotated[str, typer.Option(help="folder of transformers, or name on the hub")],
    text: Annotated[Path, typer.Option(help=".jsonl with 'text' in each line, or .txt, one text a line")],
    lengths: Annotated[str, typer.Option(help="tokens")] = "128,256,512",
    features: Annotated[str, typer.Option(help="landmarks, features or rank")] = "16,32,64,128,256",
    texts: Annotated[int, typer.Option(min=1, help="of each length")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for approximation.json and approximation.png")] = Path("out"),
) -> None:
    """Spectral error inside a real encoder (Skyformer, Fig. 1), condition numbers and the statistical dimension."""
    from kernelformer.studies import approximation as study

    use_threads(threads)
    with plain_errors():
        file = target(out / "approximation.json")
        sizes, counts = numbers("--lengths", lengths), numbers("--features", features)
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.steps(sizes))
            found = study.run(encoder, text, sizes, counts, texts, lambda x: say(progress, bar, x, advance=1))
        _show(study, found, file, threads)


@app.command()
def positions(
    lengths: Annotated[str, typer.Option(help="tokens; the paper goes to 40960")] = ",".join(
        map(str, POSITION_LENGTHS)
    ),
    draws: Annotated[int, typer.Option(min=2, help="of frequencies, queries and keys")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="timed calls of each forward")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for positions.json and positions.png")] = Path("out"),
) -> None:
    """Errors over the norm of queries and keys, and the time of a forward with relative positions (NPRF, Fig. 1)."""
    from kernelformer.studies import positions as study

    use_threads(threads)
    with plain_errors():
        file = target(out / "positions.json")
        sizes = numbers("--lengths", lengths)
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.steps(sizes))
            found = study.run(sizes, draws, repeats, lambda x: say(progress, bar, x, advance=1))
        _show(study, found, file, threads)


@app.command()
def encoder(
    sizes: Annotated[str, typer.Option(help="of regular, small")] = "regular,small",
    lengths: Annotated[str, typer.Option(help="tokens; default: each size's own")] = "",
    layers: Annotated[int, typer.Option(min=1)] = 6,
    depths: Annotated[str, typer.Option(help="further numbers of layers; 'none' for none")] = "12,20",
    deep_lengths: Annotated[str, typer.Option(help="tokens for those; default: the shortest and the middle one")] = "",
    attention: Annotated[str, typer.Option(help="specs separated by commas; opt, opt+qk are the bounds")] = ",".join(
        ENCODER_ATTENTIONS
    ),
    heap: Annotated[str, typer.Option(help="default or kept: the allocator's settings")] = "default",
    budget: Annotated[float, typer.Option(min=0.01, help="seconds per case and pass")] = 20.0,
    limit: Annotated[float, typer.Option(min=0.01, help="seconds of one pass beyond which it is not run")] = 60.0,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for encoder.json and encoder.png")] = Path("out"),
) -> None:
    """Speed and memory of whole encoders against SDPA and the upper bound (Performer, Fig. 3, 20)."""
    from kernelformer.studies import encoder as study
    from kernelformer.studies.settings import EncoderSettings

    use_threads(threads)
    with plain_errors():
        file = target(out / "encoder.json")
        settings = EncoderSettings(
            sizes=tuple(names(sizes)),
            lengths=tuple(numbers("--lengths", lengths)) if lengths else None,
            layers=layers,
            depths=() if depths in ("", "none") else tuple(numbers("--depths", depths)),
            deep_lengths=tuple(numbers("--deep-lengths", deep_lengths)) if deep_lengths else None,
            attention=tuple(names(attention)),
            heap=heap,
            budget=budget,
            limit=limit,
            memory=memory,
        )
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.steps(settings))
            result = study.run(settings, out, lambda x: say(progress, bar, x), lambda: progress.advance(bar))
        for table in study.tables(result):
            console.print(table)
        study.picture(result, file.with_suffix(".png"))
        console.print(f"figures: {file}   picture: {file.with_suffix('.png')}")


def _keep(found: Any, file: Path, threads: int | None) -> None:
    write_json(file, {"environment": environment(thread_count(threads)), **found.as_json()})


def _show(study: Any, found: Any, file: Path, threads: int | None) -> None:
    """Tables of what a study found on the terminal, its figures and its picture into files."""
    for table in study.tables(found):
        console.print(table)
    _keep(found, file, threads)
    picture = file.with_suffix(".png")
    study.picture(found, picture)
    console.print(f"figures: {file}   picture: {picture}")


@app.command()
def overhead(
    recipe: Annotated[str, typer.Argument(help="a name of `kernelformer list`")] = "demo",
    attention: Annotated[str, typer.Option(help="specs separated by commas; default: the recipe's")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for overhead.json")] = Path("out"),
) -> None:
    """How much of a training step is outside of tensor operations."""
    from kernelformer.studies import overhead as study

    use_threads(threads)
    with plain_errors():
        file = target(out / "overhead.json")
        chosen = find_recipe(recipe)
        specs = names(attention) if attention else list(chosen.attentions())
        with progress_bar() as progress:
            bar = progress.add_task("", total=len(specs))
            found = study.run(chosen.run(), specs, lambda x: say(progress, bar, x, advance=1))
        console.print(study.table(found))
        write_json(file, {"environment": environment(thread_count(threads)), "steps": study.as_json(found)})
        console.print(f"figures: {file}")


@app.command()
def tour(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for tour.png")] = Path("out"),
) -> None:
    """Two minutes of figures: error by number of features, speed and memory by length, decoding by context."""
    from kernelformer.studies import tour as figures

    with plain_errors():
        file = picture_in(out, "tour.png")
        with progress_bar() as progress:
            bar = progress.add_task("", total=figures.STEPS)
            started = False

            def tell(text: str) -> None:
                nonlocal started
                say(progress, bar, text, advance=1 if started else 0)
                started = True

            found = figures.take_tour(tell, thread_count(threads))
        for table in figures.tables(found):
            console.print(table)
        figures.picture(found, file)
        console.print(f"picture: {file}")
