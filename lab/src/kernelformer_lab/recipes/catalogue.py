"""Complete training runs by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kernelformer.errors import positive_int, unknown
from kernelformer_lab.recipes.papers import PAPERS
from kernelformer_lab.recipes.papers.base import BIASED, CPU, Recipe, network
from kernelformer_lab.training.config import Run

BYTES = partial(
    Run,
    task="bytes",
    attention=BIASED,
    task_options={"length": 512, "validation_samples": 128},
    model={"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    steps=1000,
    batch_size=8,
    learning_rate=5e-3,
    bias_lr=5e-2,  # at the model's own rate a table would hardly move in so few steps
    warmup_steps=50,
    schedule="cosine",
    redraw=100,
    eval_every=100,
    save_every=100,
)
FEW = ("softmax", "favor+:num_features=64", "elu")
WINDOW = ":window=64:sinks=4"
NEAR = (f"favor+:num_features=64{WINDOW}", f"local{WINDOW}")  # near tokens exactly, with and without far ones
ROTARY = tuple(f"{x}:rotary=True" for x in (*FEW, *NEAR))


def _own(about: str, source: str, run: partial[Run], compared: Sequence[str]) -> Recipe:
    return Recipe(about, source, {CPU: run}, {CPU: tuple(compared)})


RECIPES: dict[str, Recipe] = {
    "bytes": _own(
        "byte-level language model of the Python standard library, or of --data",
        "a size for a CPU: 0.4 M parameters, three to six minutes on 2 cores",
        BYTES,
        (*FEW, BIASED),
    ),
    "listops": _own(
        "ListOps of Long Range Arena: nested operators over digits, ten classes, lengths 500 to 2000",
        "the model of Skyformer's Sec. 5 (2 layers, width 64), fewer samples and steps, for a CPU",
        partial(
            Run,
            task="listops",
            attention="favor+:num_features=64",
            task_options={"train_samples": 20000, "validation_samples": 500, "test_samples": 500},
            model=network(2, 2, 64, 128),
            steps=1000,
            batch_size=16,
            learning_rate=1e-3,
            warmup_steps=100,
            redraw=100,
            eval_every=200,
            save_every=200,
        ),
        (*FEW, "skyformer"),
    ),
    "recall": _own(
        "associative recall: the value of a key that was seen before, from near to four times a window of 8 away",
        "the task of Zoology (2312.04927) in a size for a CPU: few keys and values, rows of 32 tokens",
        partial(
            Run,
            task="recall",
            attention="softmax:rotary=True",
            task_options={
                "length": 32,
                "distances": [8, 16, 30],
                "num_pairs": 4,
                "query_share": 1.0,
                "num_keys": 8,
                "num_values": 16,
                "num_fillers": 1,
                "validation_samples": 256,
            },
            model=network(2, 2, 64, 128),
            steps=400,
            batch_size=64,  # of 8 or 16 rows 1000 steps teach only to guess among a row's values
            learning_rate=2e-3,
            warmup_steps=50,
            schedule="constant",  # the ability appears suddenly, maybe late
            redraw=100,
            eval_every=50,
            save_every=100,
            keep=1,
        ),
        # No sinks: the pairs come first, and would be among them.
        tuple(
            f"{x}:rotary=True"
            for x in (
                *FEW,
                "favor+:num_features=64:window=8",
                "local:window=8:sinks=0",
                "loglinear:num_features=64:window=8",
                "skyformer:num_landmarks=64:landmarks=learned",
            )
        ),
    ),
    "series": _own(
        "class or number of a real-valued sequence: sensors, audio, genomes; --data in npz or the UCR archive's layout",
        "a size for a CPU: 2 layers of 64, sequences of up to 1024 moments",
        partial(
            Run,
            task="series",
            attention="favor+:num_features=64",
            model=network(2, 4, 64, 128),
            steps=600,
            batch_size=16,
            learning_rate=1e-3,
            warmup_steps=50,
            schedule="cosine",
            redraw=100,
            eval_every=100,
            save_every=100,
        ),
        (*FEW, BIASED),
    ),
    "shards": _own(
        "language model of token shards that `kernelformer prepare` has written, of any size",
        "the model of `bytes`, on --data",
        partial(BYTES, task="shards", attention=ROTARY[3]),
        (*ROTARY, BIASED),
    ),
    "demo": _own(
        "byte-level language model of the Python standard library, in less than a minute for each attention",
        "what `make demo` compares: `bytes` with shorter samples and fewer steps",
        partial(
            BYTES,
            task_options={"length": 256, "validation_samples": 128},
            steps=320,
            warmup_steps=30,
            eval_every=40,
            save_every=80,
            keep=1,
        ),
        (*FEW, BIASED),
    ),
    "rotary": _own(
        "byte-level language model with rotary positions, of the Python standard library or of --data",
        "a size for a CPU: 0.25 M parameters, 60 to 90 seconds for each attention on one core",
        partial(
            BYTES,
            attention=ROTARY[1],
            model={"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
            steps=600,
            batch_size=4,
            eval_every=200,
            save_every=200,
            keep=1,
        ),
        (*ROTARY, BIASED),
    ),
    **PAPERS,
}


def recipes_of(task: str) -> list[str]:
    """The recipes that run a task; the first is what the task's name alone means."""
    return sorted((name for name, recipe in RECIPES.items() if recipe.task == task), key=lambda name: name != task)


def recipe_name(name: str) -> str:
    """The name of a recipe, or of a task's first recipe."""
    if name in RECIPES:
        return name
    recipes = recipes_of(name)
    if not recipes:
        raise unknown("recipe", name, [*RECIPES, *{recipe.task: None for recipe in RECIPES.values()}])
    return recipes[0]


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or a task's first recipe."""
    return RECIPES[recipe_name(name)]


def change(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return the run with other settings.

    Args:
        run: of a recipe.
        settings: by name: those of a `Run`, ``model.NAME`` for the model's, ``task.NAME`` for the task's.
    """
    known = [x.name for x in fields(Run) if x.name not in ("model", "task_options", "task")]
    own: dict[str, Any] = {}
    model, task = dict(run.model), dict(run.task_options)
    for name, value in settings.items():
        head, dot, rest = name.partition(".")
        if dot and head == "model":
            model[rest] = value
        elif dot and head == "task":
            task[rest] = value
        elif name in known:
            own[name] = value
        else:
            from kernelformer_lab.tasks import task_options

            more = [f"task.{x}" for x in task_options(run.task)]
            raise unknown("setting", name, [*known, *more, *(f"model.{x}" for x in sorted(run.model))])
    if "warmup_steps" not in own and positive_int("steps", own.get("steps", run.steps)) < run.warmup_steps:
        own["warmup_steps"] = own["steps"] // 10  # a shortened run warms up shorter
    return replace(run, **own, model=model, task_options=task)
