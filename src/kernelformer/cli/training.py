"""``kernelformer train | evaluate | compare | generate | demo``.

What trains is imported by the command that needs it: transformers takes seconds.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from kernelformer.cli.common import console, fail, names, plain_errors, progress_bar, say, thread_count
from kernelformer.recipes.catalogue import change, find_recipe
from kernelformer.training.run import Run, StoppedError, TrainingError
from kernelformer.units import human_bytes

if TYPE_CHECKING:
    from kernelformer.models import KernelformerForCausalLM
    from kernelformer.recipes.compare import Plan

Steps = Annotated[int | None, typer.Option(min=1, help="updates; default: the recipe's")]
Data = Annotated[Path | None, typer.Option(help="of the task: a file or folder")]
Length = Annotated[int | None, typer.Option(min=2, help="tokens of a sample")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="any other setting: learning_rate=1e-3, model.hidden_size=64, task.validation_samples=32"
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="default: all cores")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what is in the folder")]


@contextmanager
def training_errors() -> Iterator[None]:
    """Errors without a traceback; a run that was told to stop ends as the shell expects of Ctrl-C."""
    with plain_errors(TrainingError):
        try:
            yield
        except StoppedError as stopped:
            fail(stopped, 130)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _run(
    recipe: str,
    *,
    steps: int | None = None,
    seed: int | None = None,
    data: Path | None = None,
    length: int | None = None,
    sets: Sequence[str] | None = None,
) -> Run:
    """The recipe's run with what the command changes."""
    settings: dict[str, Any] = {}
    for text in sets or ():
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set takes name=value, got {text!r}.")
        settings[name] = _value(value)
    given = {"steps": steps, "seed": seed, "task.data": data and str(data), "task.length": length}
    settings |= {name: x for name, x in given.items() if x is not None}
    return change(find_recipe(recipe).run, settings)


def _command() -> str:
    return shlex.join(["kernelformer", *sys.argv[1:]])


def train(
    recipe: Annotated[str, typer.Argument(help="a name of `kernelformer list`")],
    attention: Annotated[
        str, typer.Option(help="method:option=value:...; several separated by commas are one for each block")
    ] = "",
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, help="of weights, draws and data order")] = 0,
    data: Data = None,
    length: Length = None,
    sets: Sets = None,
    resume: Resume = False,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; default: out/RECIPE")] = None,
) -> None:
    """Train a model. Also by `torchrun -m kernelformer train ...` on several processes."""
    from kernelformer.training.session import train as train_model

    torch.set_num_threads(thread_count(threads))
    with training_errors():
        run = _run(recipe, steps=steps, seed=seed, data=data, length=length, sets=sets)
        if attention:
            specs = names(attention)
            run = change(run, {"attention": specs[0] if len(specs) == 1 else specs})
        train_model(run, out or Path("out") / recipe, resume=resume, command=_command())


def evaluate(
    folder: Annotated[Path, typer.Argument(help="of a finished run")],
    split: Annotated[str, typer.Option(help="validation, test or train")] = "test",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    threads: Threads = None,
) -> None:
    """Measure a trained model on a split."""
    from kernelformer.training.evaluation import evaluate as evaluate_model

    torch.set_num_threads(thread_count(threads))
    with training_errors():
        for name, value in evaluate_model(folder, split=split, batch_size=batch).items():
            console.print(f"{split} {name.replace('_', ' ')}: {value:.4f}", highlight=False)


def compare(
    recipe: Annotated[str, typer.Argument(help="a name of `kernelformer list`")],
    attention: Annotated[
        str, typer.Option(help="method:option=value:..., separated by commas; default: the recipe's")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each")] = 1,
    steps: Steps = None,
    data: Data = None,
    length: Length = None,
    sets: Sets = None,
    resume: Resume = False,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs and the report; default: out/RECIPE")] = None,
) -> None:
    """Train several attentions on the same data in the same order, and write a report."""
    from kernelformer.recipes.compare import make_plan

    with training_errors():
        run = _run(recipe, steps=steps, data=data, length=length, sets=sets)
        chosen = names(attention) if attention else find_recipe(recipe).attentions
        plan = make_plan(recipe, run, chosen, seeds, out or Path("out") / recipe)
        _compare(plan, resume, thread_count(threads))


def _compare(plan: Plan, resume: bool, threads: int) -> None:
    from kernelformer.analysis.comparison import table
    from kernelformer.recipes.compare import REPORT, carry_out

    with progress_bar() as progress:
        bar = progress.add_task("", total=len(plan.runs))
        found = carry_out(
            plan,
            resume=resume,
            threads=threads,
            command=_command(),
            tell=lambda text: say(progress, bar, text),
            done=lambda: progress.advance(bar),
        )
    console.print(table(found))
    console.print(f"report: {plan.folder / REPORT}", highlight=False)


def generate(
    folder: Annotated[Path, typer.Argument(help="of a finished run")],
    prompt: Annotated[str, typer.Option(help="what comes before")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="bytes to write")] = 500,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte each time")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="sample among so many; 0 = all")] = 0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    threads: Threads = None,
) -> None:
    """Write text with a trained language model, in constant memory where its attention has a feature map."""
    from kernelformer.models import KernelformerForCausalLM
    from kernelformer.training.evaluation import load_run

    torch.set_num_threads(thread_count(threads))
    with training_errors():
        run, model = load_run(folder)
        if not isinstance(model, KernelformerForCausalLM):
            raise ValueError(f"{folder} was trained on {run.task!r}, which is not a language model.")
        _write(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def _write(model: KernelformerForCausalLM, prompt: str, **settings: Any) -> None:
    from kernelformer.recipes.decoding import sample_bytes

    def write(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    write(prompt)
    made = sample_bytes(model, prompt, write=write, **settings)
    console.print(
        f"\n\n{made.tokens} bytes in {made.seconds:.1f} s, {made.tokens / made.seconds:.0f} a second; "
        f"kept between two: {human_bytes(made.state_bytes)}",
        style="dim",
        highlight=False,
    )


def demo(
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="folder of the runs and the report")] = Path("out/demo"),
) -> None:
    """Compare kernels on real text, about four minutes: the Python standard library's own source, byte by byte."""
    from kernelformer.models import KernelformerForCausalLM
    from kernelformer.recipes.compare import REPORT, make_plan
    from kernelformer.training.evaluation import load_run

    with training_errors():
        recipe = find_recipe("demo")
        plan = make_plan("Attention by kernels on the Python standard library", recipe.run, recipe.attentions, 1, out)
        _compare(plan, True, thread_count(threads))
        torch.set_num_threads(thread_count(threads))
        _, model = load_run(plan.place(plan.runs[-1]))
        assert isinstance(model, KernelformerForCausalLM)
        console.print(f"\nwritten by {plan.runs[-1].label}:\n", style="bold", highlight=False)
        _write(model, "def ", tokens=400)
        console.print(f"the report with curves, memory and decoding: {out / REPORT}", highlight=False)
