"""``kernelformer study``: small studies of the papers, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from kernelformer.bench import run as bench_run
from kernelformer.cli.common import console, fail, names, progress_bar, say, target, thread_count
from kernelformer.errors import positive_int
from kernelformer.recipes import positions as position_study
from kernelformer.recipes import sparsity as sparsity_study
from kernelformer.recipes.sparsity import Setting

app = typer.Typer(help="Small studies of the papers, at a size for a CPU.", no_args_is_help=True)


@app.command()
def sparsity(
    methods: Annotated[str, typer.Option(help="name or name:option=value, separated by commas")] = "",
    relevances: Annotated[str, typer.Option(help="probabilities that a position counts")] = "0.1,0.5,0.9",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each")] = 1,
    steps: Annotated[int, typer.Option(min=1)] = Setting.steps,
    length: Annotated[int, typer.Option(min=4)] = Setting.length,
    features: Annotated[int, typer.Option(min=1)] = Setting.num_features,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for sparsity.json and sparsity.png")] = Path("out"),
) -> None:
    """Which kernels learn to ignore (KL-Transformer, App. E): learning curves; goes on where it was stopped."""
    torch.set_num_threads(thread_count(threads))
    try:
        chosen = names(methods) if methods else list(sparsity_study.METHODS)
        shares = [float(x) for x in names(relevances)]
        setting = Setting(steps=steps, length=length, num_features=features)
        with progress_bar() as progress:
            bar = progress.add_task("", total=len(chosen) * len(shares) * seeds)
            curves = sparsity_study.study(
                chosen,
                shares,
                setting,
                target(out / "sparsity.json"),
                seeds=range(seeds),
                tell=lambda text: progress.update(bar, description=text),
                done=lambda: progress.advance(bar),
            )
    except ValueError as problem:
        fail(problem)
    console.print(sparsity_study.table(curves))
    sparsity_study.picture(curves, out / "sparsity.png")
    console.print(f"figures: {out / 'sparsity.json'}   picture: {out / 'sparsity.png'}", highlight=False)


@app.command()
def kernels(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="where the picture goes")] = Path("out/kernels.png"),
) -> None:
    """Where learned kernels start, and what the smoothing of signed ones costs."""
    from kernelformer.recipes import kernels as kernel_study

    torch.set_num_threads(thread_count(threads))
    with progress_bar() as progress:
        bar = progress.add_task("", total=kernel_study.STEPS)
        found = kernel_study.run(lambda text: say(progress, bar, text, advance=1))
    for table in kernel_study.tables(found):
        console.print(table)
    kernel_study.picture(found, target(out))
    console.print(f"picture: {out}", highlight=False)


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
    from kernelformer.recipes import approximation as study

    torch.set_num_threads(thread_count(threads))
    try:
        sizes, counts = (
            [positive_int(what, int(x)) for x in names(y)] for what, y in (("length", lengths), ("features", features))
        )
        with progress_bar() as progress:
            bar = progress.add_task("", total=study.steps(sizes))
            found = study.run(encoder, text, sizes, counts, texts, lambda x: say(progress, bar, x, advance=1))
    except ValueError as problem:
        fail(problem)
    for table in study.tables(found):
        console.print(table)
    file = target(out / "approximation.json")
    record = {"environment": bench_run.environment(thread_count(threads)), **found.as_json()}
    file.write_text(json.dumps(record, indent=1) + "\n")
    study.picture(found, out / "approximation.png")
    console.print(f"figures: {file}   picture: {out / 'approximation.png'}", highlight=False)


@app.command()
def positions(
    lengths: Annotated[str, typer.Option(help="tokens; the paper goes to 40960")] = ",".join(
        map(str, position_study.LENGTHS)
    ),
    draws: Annotated[int, typer.Option(min=2, help="of frequencies, queries and keys")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="timed calls of each forward")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for positions.json and positions.png")] = Path("out"),
) -> None:
    """Errors over the norm of queries and keys, and the time of a forward with relative positions (NPRF, Fig. 1)."""
    torch.set_num_threads(thread_count(threads))
    try:
        sizes = [positive_int("length", int(x)) for x in names(lengths)]
    except ValueError as problem:
        fail(problem)
    with progress_bar() as progress:
        bar = progress.add_task("", total=position_study.steps(sizes))
        found = position_study.run(sizes, draws, repeats, lambda x: say(progress, bar, x, advance=1))
    for table in position_study.tables(found):
        console.print(table)
    file = target(out / "positions.json")
    record = {"environment": bench_run.environment(thread_count(threads)), **found.as_json()}
    file.write_text(json.dumps(record, indent=1) + "\n")
    position_study.picture(found, out / "positions.png")
    console.print(f"figures: {file}   picture: {out / 'positions.png'}", highlight=False)


@app.command()
def tour(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="where the picture goes")] = Path("out/tour.png"),
) -> None:
    """Two minutes of figures: error by number of features, speed and memory by length, decoding by context."""
    from kernelformer.recipes import tour as figures

    with progress_bar() as progress:
        bar = progress.add_task("", total=figures.STEPS)
        started = False

        def tell(text: str) -> None:
            nonlocal started
            say(progress, bar, text, advance=1 if started else 0)
            started = True

        try:
            found = figures.take_tour(tell, thread_count(threads))
        except bench_run.WorkerError as problem:
            fail(problem)
    for table in figures.tables(found):
        console.print(table)
    figures.picture(found, target(out))
    console.print(f"picture: {out}", highlight=False)
