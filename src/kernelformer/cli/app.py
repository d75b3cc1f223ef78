"""Commands of ``kernelformer``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kernelformer import list_methods, method_options
from kernelformer.bench import run as bench_run
from kernelformer.bench import show
from kernelformer.bench.contenders import BIASES, TASKS, contender, yardsticks
from kernelformer.errors import choice, positive_int
from kernelformer.recipes import positions as position_study
from kernelformer.recipes import sparsity as sparsity_study
from kernelformer.recipes.sparsity import Setting

app = typer.Typer(help="Linear-time attention by kernels.", no_args_is_help=True, add_completion=False)
study_app = typer.Typer(help="Small studies of the papers, at a size for a CPU.", no_args_is_help=True)
app.add_typer(study_app, name="study")
console = Console(width=None if sys.stdout.isatty() else 140)  # a pipe has room for a table


def _fail(problem: Exception) -> NoReturn:
    console.print(f"[bold red]error:[/] {problem}", highlight=False)
    raise typer.Exit(2)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _say(progress: Progress, bar: TaskID, text: str, advance: int = 0) -> None:
    """Next to the bar, or as a line of its own where there is no terminal to draw a bar on."""
    progress.update(bar, description=text, advance=advance)
    if not console.is_terminal:
        console.print(text, highlight=False)


def _names(text: str) -> list[str]:
    return [x.strip() for x in text.split(",")]


def _target(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _threads(threads: int | None) -> int:
    return threads or os.cpu_count() or 1


@app.command("list")
def list_() -> None:
    """Show the methods and their options."""
    table = Table("method", "about", "options")
    for name, about in list_methods().items():
        table.add_row(name, about, ", ".join(method_options(name)))
    console.print(table)


@app.command()
def bench(
    lengths: Annotated[str, typer.Option(help="lengths, and contexts for decoding")] = "1024,4096,16384",
    methods: Annotated[
        str, typer.Option(help="of ours, name or name:option=value; ratios refer to the first")
    ] = "favor+",
    peers: Annotated[
        str, typer.Option(help="'auto' for SDPA, what is installed, and for a bias Algorithm 1; 'none'; or names")
    ] = "auto",
    tasks: Annotated[str, typer.Option(help="of bidirectional, causal, decode")] = ",".join(TASKS),
    passes: Annotated[str, typer.Option(help="of forward, train (forward + backward)")] = "forward,train",
    heaps: Annotated[str, typer.Option(help="of default, kept: the allocator's settings")] = "default,kept",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    features: Annotated[int, typer.Option(min=1)] = 256,
    bias: Annotated[str, typer.Option(help="relative positions: none, full (all distances), window")] = "none",
    window: Annotated[int, typer.Option(min=1, help="distance beyond which such a bias is constant")] = 128,
    budget: Annotated[float, typer.Option(min=0.01, help="seconds per contender and case")] = 2.0,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for bench.json and bench.png")] = Path("out"),
) -> None:
    """Time and weigh methods against their peers, after checking each against its definition."""
    try:
        names = _names(methods)
        kind_of_bias = None if choice("bias", bias, ("none", *BIASES)) == "none" else bias
        backward = [choice("pass", x, ("forward", "train")) == "train" for x in _names(passes)]
        if peers == "auto":
            names += yardsticks(bias=kind_of_bias is not None, backward=any(backward))
        elif peers != "none":
            names += _names(peers)
        for name in names:
            contender(name)
        kinds = [choice("task", x, TASKS) for x in _names(tasks)]
        heap_names = [choice("heap", x, bench_run.HEAPS) for x in _names(heaps)]
        sizes = [int(x) for x in _names(lengths)]
        if min(sizes) < 1:
            raise ValueError(f"lengths must be at least 1, got {lengths!r}.")
    except ValueError as problem:
        _fail(problem)
    shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "features": features}
    todo = list(bench_run.cases(sizes, kinds, backward, **shape, bias=kind_of_bias, window=window))
    rows: list[bench_run.Row] = []
    try:
        with _progress() as progress:
            bar = progress.add_task("", total=len(todo))
            for case in todo:
                rows += bench_run.run_case(
                    case,
                    names,
                    heaps=heap_names,
                    threads=_threads(threads),
                    budget=budget,
                    memory=memory,
                    tell=lambda text: _say(progress, bar, text),
                )
                progress.advance(bar)
    except bench_run.WorkerError as problem:
        _fail(problem)
    for table in show.tables(rows, names[0], heap_names):
        console.print(table)
        console.print()
    console.print(
        f"ratios: against {names[0]}; above 1, {names[0]} is faster or leaner. peak: memory beyond the inputs; "
        f"beyond: beyond outputs and gradients too.",
        highlight=False,
    )
    target = _target(out / "bench.json")
    record = {"environment": bench_run.environment(_threads(threads)), "rows": [row.as_json() for row in rows]}
    target.write_text(json.dumps(record, indent=1) + "\n")
    show.plot(rows, out / "bench.png", heap_names[0])
    console.print(f"figures: {target}   picture: {out / 'bench.png'}", highlight=False)


@app.command()
def demo(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="where the picture goes")] = Path("out/demo.png"),
) -> None:
    """A two-minute tour: error by number of features, speed and memory by length, decoding by context."""
    from kernelformer.recipes import tour

    with _progress() as progress:
        bar = progress.add_task("", total=tour.STEPS)
        started = False

        def tell(text: str) -> None:
            nonlocal started
            _say(progress, bar, text, advance=1 if started else 0)
            started = True

        try:
            found = tour.take_tour(tell, _threads(threads))
        except bench_run.WorkerError as problem:
            _fail(problem)
    for table in tour.tables(found):
        console.print(table)
    tour.picture(found, _target(out))
    console.print(f"picture: {out}", highlight=False)


@study_app.command()
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
    torch.set_num_threads(_threads(threads))
    try:
        names = _names(methods) if methods else list(sparsity_study.METHODS)
        shares = [float(x) for x in _names(relevances)]
        setting = Setting(steps=steps, length=length, num_features=features)
        with _progress() as progress:
            bar = progress.add_task("", total=len(names) * len(shares) * seeds)
            curves = sparsity_study.study(
                names,
                shares,
                setting,
                _target(out / "sparsity.json"),
                seeds=range(seeds),
                tell=lambda text: progress.update(bar, description=text),
                done=lambda: progress.advance(bar),
            )
    except ValueError as problem:
        _fail(problem)
    console.print(sparsity_study.table(curves))
    sparsity_study.picture(curves, out / "sparsity.png")
    console.print(f"figures: {out / 'sparsity.json'}   picture: {out / 'sparsity.png'}", highlight=False)


@study_app.command()
def kernels(
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    out: Annotated[Path, typer.Option(help="where the picture goes")] = Path("out/kernels.png"),
) -> None:
    """Where learned kernels start, and what the smoothing of signed ones costs."""
    from kernelformer.recipes import kernels as kernel_study

    torch.set_num_threads(_threads(threads))
    with _progress() as progress:
        bar = progress.add_task("", total=kernel_study.STEPS)
        found = kernel_study.run(lambda text: _say(progress, bar, text, advance=1))
    for table in kernel_study.tables(found):
        console.print(table)
    kernel_study.picture(found, _target(out))
    console.print(f"picture: {out}", highlight=False)


@study_app.command()
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

    torch.set_num_threads(_threads(threads))
    try:
        sizes, counts = (
            [positive_int(what, int(x)) for x in _names(y)] for what, y in (("length", lengths), ("features", features))
        )
        with _progress() as progress:
            bar = progress.add_task("", total=study.steps(sizes))
            found = study.run(encoder, text, sizes, counts, texts, lambda x: _say(progress, bar, x, advance=1))
    except ValueError as problem:
        _fail(problem)
    for table in study.tables(found):
        console.print(table)
    target = _target(out / "approximation.json")
    record = {"environment": bench_run.environment(_threads(threads)), **found.as_json()}
    target.write_text(json.dumps(record, indent=1) + "\n")
    study.picture(found, out / "approximation.png")
    console.print(f"figures: {target}   picture: {out / 'approximation.png'}", highlight=False)


@study_app.command()
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
    torch.set_num_threads(_threads(threads))
    try:
        sizes = [positive_int("length", int(x)) for x in _names(lengths)]
    except ValueError as problem:
        _fail(problem)
    with _progress() as progress:
        bar = progress.add_task("", total=position_study.steps(sizes))
        found = position_study.run(sizes, draws, repeats, lambda x: _say(progress, bar, x, advance=1))
    for table in position_study.tables(found):
        console.print(table)
    target = _target(out / "positions.json")
    record = {"environment": bench_run.environment(_threads(threads)), **found.as_json()}
    target.write_text(json.dumps(record, indent=1) + "\n")
    position_study.picture(found, out / "positions.png")
    console.print(f"figures: {target}   picture: {out / 'positions.png'}", highlight=False)
