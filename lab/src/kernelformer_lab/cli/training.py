"""``kernelformer train | evaluate | compare | demo``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kernelformer.cli.common import (
    Json,
    Threads,
    console,
    errors,
    following,
    goes_on,
    plain_errors,
    show_json,
    thread_count,
    use_threads,
)
from kernelformer.cli.options import attentions, one_of, starting
from kernelformer.commands import typed
from kernelformer.files import read_json
from kernelformer.settings import SEED, SKIP_BAD, split_names
from kernelformer_lab.recipes.catalogue import RECIPES, change, find_recipe, recipe_name, recipes_of
from kernelformer_lab.recipes.overrides import describe_changes, read_attention, read_settings
from kernelformer_lab.recipes.papers.base import CPU
from kernelformer_lab.records import PLAN, RUN, resume_command

if TYPE_CHECKING:
    from kernelformer_lab.comparison import Plan
    from kernelformer_lab.training.config import Run

Command = Literal["train", "compare"]
FILES: dict[Command, tuple[str, str]] = {"train": (RUN, "run"), "compare": (PLAN, "comparison")}


def recipes(incomplete: str) -> list[str]:
    """Recipes, and tasks, whose name means their first recipe."""
    return starting(incomplete, (*RECIPES, *(x.task for x in RECIPES.values())))


def next_command(folder: Path, command: Command = "train") -> str:
    """Sentence for Ctrl-C on a run or comparison: how to resume it, if it has begun."""
    begun = (folder / FILES[command][0]).is_file()
    return f"go on with {resume_command(folder, command)}" if begun else f"{typed()} starts anew"


def saved_folder(name: str, resume: bool, command: Command) -> Path | None:
    """The folder that is given in the place of a recipe, or None: a name of a recipe or of a task means that.

    Raises:
        ValueError: it holds nothing that the command could resume, or --resume was not asked for.
    """
    folder, (file, kind) = Path(name), FILES[command]
    path = os.sep in name
    if name in RECIPES or recipes_of(name) or not (path or (folder / file).is_file()):
        return None
    if not (folder / file).is_file():
        for other, (theirs, their_kind) in FILES.items():
            if (folder / theirs).is_file():
                raise ValueError(f"{folder} holds a {their_kind}; go on with {resume_command(folder, other)}.")
        lacks = f"it has no {file}" if folder.is_dir() else "there is no such folder"
        raise ValueError(
            f"{folder} is neither a recipe nor the folder of a {kind}: {lacks}; give the recipe and its options, with "
            f"--out {folder}."
        )
    if not resume:
        raise ValueError(f"{folder} holds a {kind} already; go on with {resume_command(folder, command)}.")
    return folder


def refuse_options(folder: Path, given: Mapping[str, Any]) -> None:
    """Raise for an option that was given, not None, although what is in the folder has it already."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"what is in {folder} has its settings, got --{option} {value} too; leave it out, or train anew in "
                f"another folder."
            )


def saved_settings(folder: Path) -> tuple[Run, int | None]:
    """The run in a folder and its threads; training refuses options that contradict it."""
    from kernelformer_lab.training.inspection import saved_run

    run, head = saved_run(folder)
    threads = head["environment"].get("threads")
    return run, threads if isinstance(threads, int) and threads > 0 else None


def saved_plan(folder: Path, steps: int | None) -> tuple[Plan, int]:
    """The comparison in a folder, made longer if ``steps`` says so, and its threads."""
    from dataclasses import replace

    from kernelformer_lab.comparison import read_plan

    plan, threads = read_plan(folder)
    return plan if steps is None else replace(plan, runs=[change(x, {"steps": steps}) for x in plan.runs]), threads


Steps = Annotated[int | None, typer.Option(min=1, help="updates; default: the recipe's")]
Data = Annotated[str | None, typer.Option(help="of the task: a file or folder, or hub:NAME of a Hugging Face data set")]
Size = Annotated[
    str | None,
    typer.Option(
        help="cpu (minutes on a CPU, the default) or full (as printed in the paper)",
        autocompletion=one_of("cpu", "full"),
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help=SKIP_BAD)]
Length = Annotated[int | None, typer.Option(min=2, help="tokens of a sample")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="any other setting: learning_rate=1e-3, model.hidden_size=64, task.validation_samples=32"
    ),
]
TRAINING_SAMPLES = 1000  # that `evaluate` takes by default: a training split may have millions
DEMO_SECONDS = 200.0  # of training in the demo, which takes half of it on two idle cores
Resume = Annotated[bool, typer.Option("--resume", help="resume what is in the folder")]
Timeout = Annotated[
    int | None, typer.Option(min=1, help="seconds that a process of several waits for the others; default: 1800")
]


ContextParallel = Annotated[
    int | None, typer.Option(min=1, help="processes that each sequence is split over; they are started here")
]


def start_ranks(count: int) -> None:
    """Become torchrun with so many processes of this command on this machine."""
    own = ["--standalone", "--nproc-per-node", str(count), "-m", "kernelformer", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *own])


def _named(recipe: str) -> str:
    """The recipe that a name means; prints it where a task was named."""
    name = recipe_name(recipe)
    if name != recipe:
        console.print(f"task {recipe}: recipe {name}")
    return name


def _command() -> str:
    return shlex.join(["kernelformer", *sys.argv[1:]])


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="a recipe of `kernelformer list`, or a task for its first one; with --resume the folder of a run is "
            "enough",
            autocompletion=recipes,
        ),
    ],
    attention: Annotated[
        str,
        typer.Option(
            help="method:option=value:...; several separated by commas are one for each block; of an encoder-decoder A "
            "is for both sides, 'A > B' gives B to the decoder; default: the recipe's",
            autocompletion=attentions,
        ),
    ] = "",
    steps: Steps = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help=f"{SEED} of weights, draws and data order; default: 0")
    ] = None,
    data: Data = None,
    length: Length = None,
    size: Size = None,
    skip_bad: SkipBad = False,
    sets: Sets = None,
    context_parallel: ContextParallel = None,
    resume: Resume = False,
    threads: Threads = None,
    timeout: Timeout = None,
    out: Annotated[Path | None, typer.Option(help="folder for the run; default: out/RECIPE")] = None,
) -> None:
    """Train a model. Also by `torchrun -m kernelformer train ...` on several processes."""
    from kernelformer.parallel.context import TIMEOUT
    from kernelformer_lab.training.session import train as train_model

    folder = out or Path("out") / recipe
    with plain_errors(lambda: next_command(folder)):
        saved = saved_folder(recipe, resume, "train")
        if saved is None:
            recipe = _named(recipe)
            folder, run = out or Path("out") / recipe, find_recipe(recipe).run(size or CPU)
        else:
            refuse_options(saved, {"size": size, "out": out if out != saved else None})
            folder, (run, before) = saved, saved_settings(saved)
            threads = threads or before
        own = {"steps": steps, "seed": seed, "data": data, "length": length, "skip_bad": skip_bad or None}
        own["context_parallel"] = context_parallel
        settings = read_settings(sets, run.task, **own, **(read_attention(attention) if attention else {}))
        if attention:  # A alone is for the decoder too, whatever the recipe has there
            settings.setdefault("decoder_attention", None)
        run = change(run, settings)
        if run.context_parallel > 1 and "WORLD_SIZE" not in os.environ:  # not started by torchrun: one machine's ranks
            start_ranks(run.context_parallel)
        use_threads(threads)
        waits = TIMEOUT if timeout is None else timeout
        train_model(run, folder, resume=resume, command=_command(), timeout=waits)


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a finished run")],
    split: Annotated[
        str, typer.Option(help="validation, test or train", autocompletion=one_of("validation", "test", "train"))
    ] = "test",
    samples: Annotated[
        int | None, typer.Option(min=1, help="at most so many, spread evenly; default: all, of train 1000")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples at once")] = 16,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model on a split."""
    from kernelformer_lab.training.evaluation import evaluate as evaluate_model
    from kernelformer_lab.training.meter import score_text, split_errors

    use_threads(threads)
    with plain_errors():
        some = TRAINING_SAMPLES if samples is None and split == "train" else samples
        with following() as job:
            values = evaluate_model(
                folder, split=split, batch_size=batch, samples=some, log=_remark, progress=job.reach
            )
        scores, deviations = split_errors(values)
        if as_json:
            show_json({"split": split, "samples": some, "scores": scores, "standard_errors": deviations})
        for name, value in scores.items():
            console.print(f"{split} {name.replace('_', ' ')}: {score_text(value, deviations.get(name))}")
        if deviations:
            console.print("± is the standard error over the samples of the split")
        if some is not None:
            console.print(f"at most {some:,} samples, spread evenly over the split")


def _remark(text: str) -> None:
    errors.print(text)


def compare(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="a recipe of `kernelformer list`, or a task for its first one; with --resume the folder of a "
            "comparison is enough",
            autocompletion=recipes,
        ),
    ],
    attention: Annotated[
        str,
        typer.Option(
            help="method:option=value:..., separated by commas; 'A > B' is A in an encoder and B in its decoder; "
            "default: the recipe's",
            autocompletion=attentions,
        ),
    ] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="runs of each, with as many seeds; default: 1")] = None,
    steps: Steps = None,
    data: Data = None,
    length: Length = None,
    size: Size = None,
    skip_bad: SkipBad = False,
    sets: Sets = None,
    resume: Resume = False,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="folder for the runs and the report; default: out/RECIPE")] = None,
    as_json: Json = False,
) -> None:
    """Train several attentions on the same data in the same order, and write a report."""
    from kernelformer_lab.comparison import make_plan

    folder = out or Path("out") / recipe
    with plain_errors(lambda: next_command(folder, "compare")):
        saved = saved_folder(recipe, resume, "compare")
        if saved is not None:
            given = {"attention": attention or None, "seeds": seeds, "data": data, "length": length, "size": size}
            given |= {"skip-bad": skip_bad or None, "set": " ".join(sets) if sets else None}
            refuse_options(saved, {**given, "out": out if out != saved else None})
            folder, (plan, before) = saved, saved_plan(saved, steps)
            _compare(plan, resume, threads or before, resume_command(folder, "compare"), as_json)
            return
        recipe = _named(recipe)
        folder = out or Path("out") / recipe
        own = {"steps": steps, "data": data, "length": length, "skip_bad": skip_bad or None}
        settings = read_settings(sets, find_recipe(recipe).task, **own)
        for name, way in (("attention", "--attention"), ("decoder_attention", "--attention 'A > B'")):
            if name in settings:
                raise ValueError(f"compare takes several attentions, got --set {name}={settings[name]}; give {way}.")
        origin = find_recipe(recipe)
        run = change(origin.run(size or CPU), settings)
        chosen = split_names(attention) if attention else origin.attentions(size or CPU)
        about = {"recipe": recipe, "size": size or CPU, "source": origin.source}
        about["note"] = f"{origin.note_on(size or CPU)} {describe_changes(settings)}".strip()
        plan = make_plan(recipe, run, chosen, seeds or 1, folder, about)
        _compare(plan, resume, thread_count(threads), resume_command(folder, "compare"), as_json)


def _compare(plan: Plan, resume: bool, threads: int, again: str, as_json: bool) -> None:
    from kernelformer_lab.comparison import FIGURES, REPORT, run_comparison
    from kernelformer_lab.reports.comparison import comparison_table

    with following(len(plan.runs), inner=True) as job:
        comparison = run_comparison(
            plan, resume=resume, threads=threads, command=_command(), again=again, log=job.log, progress=job.advance
        )
    console.print(comparison_table(comparison))
    console.print(f"report: {plan.folder / REPORT}")
    if as_json:
        show_json(read_json(plan.folder / FIGURES))


def demo(
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="folder for the runs and the report")] = Path("out/demo"),
    as_json: Json = False,
) -> None:
    """Compare kernels on real text, about four minutes: the Python standard library's own source, byte by byte."""
    from kernelformer.cli.generate import PROMPT, write_sample
    from kernelformer.models import KernelformerForCausalLM
    from kernelformer_lab.comparison import REPORT, fit_steps, make_plan, read_plan
    from kernelformer_lab.records import PLAN
    from kernelformer_lab.training.evaluation import load_run

    with plain_errors(goes_on):
        count = thread_count(threads)
        use_threads(count)
        if (out / PLAN).exists():
            plan, saved = read_plan(out)
            count = threads or saved
        else:
            recipe = find_recipe("demo")
            attentions, usual = recipe.attentions(), recipe.run()
            run = fit_steps(usual, attentions, DEMO_SECONDS)
            about = {}
            if run.steps < usual.steps:
                about["note"] = f"{run.steps} steps instead of {usual.steps}, as this machine is slow or busy now."
                console.print(f"a slow or busy machine: {run.steps} steps for each attention instead of {usual.steps}")
            title = "Attention by kernels on the Python standard library"
            plan = make_plan(title, run, attentions, 1, out, about)
        _compare(plan, True, count, typed(), as_json)
        if as_json:
            return
        _, model = load_run(plan.folder_of(plan.runs[-1]))
        assert isinstance(model, KernelformerForCausalLM)
        console.print(f"\nwritten by {plan.runs[-1].label}:\n", style="bold")
        write_sample(model, PROMPT, tokens=400)
        console.print(f"the report with curves, memory and decoding: {out / REPORT}")
