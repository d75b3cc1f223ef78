"""A recipe's note agrees with its settings, size by size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelformer.modules.spec import parse_attention
from kernelformer_lab.recipes.catalogue import RECIPES, find_recipe
from kernelformer_lab.recipes.overrides import describe_changes
from kernelformer_lab.recipes.papers import PAPERS
from kernelformer_lab.recipes.papers.base import Recipe
from kernelformer_lab.training.config import Run, parse_sides


def options(recipe: Recipe, size: str, name: str, *methods: str) -> set[Any]:
    """The values of an option in the attentions of a size, of those methods or of all."""
    sides = [side for spec in recipe.attentions(size) for side in parse_sides(spec) if side is not None]
    parsed = [parse_attention(side) for side in sides]
    return {found.get(name) for method, found in parsed if not methods or method in methods}


def numbers(*values: Any) -> tuple[str, ...]:
    return tuple(f"{x:,}" if isinstance(x, int) else str(x) for x in values)


def layers(run: Run, recipe: Recipe) -> tuple[str, ...]:
    return numbers(run.model["num_hidden_layers"], run.model["hidden_size"])


def task(*names: str) -> Callable[[Run, Recipe], tuple[str, ...]]:
    return lambda run, recipe: numbers(*(run.task_options[x] for x in names))


def own(*names: str) -> Callable[[Run, Recipe], tuple[str, ...]]:
    return lambda run, recipe: numbers(*(getattr(run, x) for x in names))


def acids(run: Run, recipe: Recipe) -> tuple[str, ...]:
    return numbers(run.task_options["length"] - (run.task == "proteins"))  # a next one comes after a first token


def patches(run: Run, recipe: Recipe) -> tuple[str, ...]:
    return numbers((run.task_options["size"] // run.model["patch_size"]) ** 2)


def epochs(run: Run, recipe: Recipe) -> tuple[str, ...]:
    samples = int(re.search(r"epochs of ([\d,]+)", recipe.note)[1].replace(",", ""))
    return numbers(run.steps // (samples // run.batch_size), samples)


# Size, words with figures -> what the settings make them.
FIGURES: list[tuple[str, str, Callable[[Run, Recipe], tuple[str, ...]]]] = [
    ("cpu", r"(\d+)(?: \+ \d+)? layers? of width (\d+)", layers),
    ("cpu", r"first (\d+) bytes", task("length")),
    ("cpu", r"of IMDb, of (\d+) bytes", task("length")),
    ("cpu", r"windows of (\d+)", lambda run, _: (str(run.task_options["length"]),)),
    ("cpu", r"up to (\d+) a sample", task("length")),
    ("cpu", r"sentences of up to (\d+)", task("length")),
    ("cpu", r"first (\d+) amino acids", acids),
    ("cpu", r"(\d,\d{3}) (?:tokens|sub-words)", task("vocab_size")),
    ("cpu", r"(\d+) are translated", task("bleu_samples")),
    ("cpu", r"batches of (\d+)", own("batch_size")),
    ("cpu", r"(\d+) steps(?: with|;)", own("steps")),
    ("cpu", r"images (?:made|of) (\d+) x", task("size")),
    ("cpu", r"(\d+) patches", patches),
    (
        "cpu",
        r"(\d+) heads of (\d+)",
        lambda run, _: numbers(*(run.model[x] for x in ("num_attention_heads", "head_dim"))),
    ),
    ("cpu", r"(\d+) to 127 tokens", lambda run, _: numbers(run.task_options["min_length"] + 1)),
    ("cpu", r"11 to (\d+) tokens", lambda run, _: numbers(run.task_options["max_length"] - 1)),
    ("cpu", r"at most (\d+) deep, with up to (\d+) arguments", task("max_depth", "max_args")),
    ("cpu", r"paths of (\d+) dashes", task("dashes")),
    ("cpu", r"(\d+) pairs", task("length")),
    ("cpu", r"(?:every|stay for) (\d+) steps", own("redraw")),
    ("cpu", r"cut to norm (\d+)", lambda run, _: (f"{run.max_grad_norm:g}",)),
    ("full", r"every ([\d,]+) steps", own("redraw")),
    ("full", r"are ([\d,]+) steps;", own("steps")),
    ("full", r"(\d+) epochs of ([\d,]+) (?:samples|images)", epochs),
    ("full", r"batches of (\d+) sentences", own("batch_size")),
    ("full", r"by ([\d,]+) sub-words", task("vocab_size")),
    ("full", r"vocabulary's: (?:BERT's )?([\d,]+)", task("vocab_size")),
    ("full", r"here (1024) and", lambda run, _: (str(run.task_options["length"]),)),
    ("full", r"here [\d,]+ and ([\d,]+)\.|steps are not said: here ([\d,]+)\.", own("steps")),
    ("full", r"5e-6, here (\S+),", lambda run, _: (f"{run.learning_rate:.0e}".replace("e-0", "e-"),)),
]


@pytest.mark.parametrize(("size", "words", "settings"), FIGURES, ids=[f"{x}: {y}" for x, y, _ in FIGURES])
def test_figures_of_a_note_are_those_of_the_settings(size, words, settings):
    seen = 0
    for name, recipe in PAPERS.items():
        lines = [line for line in recipe.note.splitlines() if line.startswith("cpu:") == (size == "cpu")]
        for found in re.finditer(words, "\n".join(lines)):
            seen += 1
            said = tuple(x for x in found.groups() if x is not None)
            assert said == settings(recipe.run(size), recipe), (name, found[0])
    assert seen, "no note says this any more"


CLAIMS: list[tuple[str, str, Callable[[Run, Recipe], bool]]] = [
    (
        "cpu",
        "no dropout",
        lambda run, x: not run.model.get("dropout") and options(x, "cpu", "attention_dropout") == {None},
    ),
    ("cpu", "draws are orthogonal", lambda run, x: options(x, "cpu", "draw") == {None}),
    ("cpu", "falls to a quarter", lambda run, x: not run.redraw_to_end and run.schedule == "cosine"),
    ("cpu", "the last weights count", lambda run, x: run.select == "last"),
    ("cpu", "gamma is 0.001", lambda run, x: options(x, "cpu", "gamma") == {None}),
    ("cpu", "norms first", lambda run, x: run.model["norm_first"]),
    ("cpu", "at ten times the rate", lambda run, x: run.bias_lr == pytest.approx(10 * run.learning_rate)),
    ("cpu", "each layer has a bias of its own", lambda run, x: not run.model["share_bias"]),
    ("cpu", "a bias reaches 64 tokens", lambda run, x: options(x, "cpu", "max_distance", "nprf") == {64}),
    ("cpu", "three times as high", lambda run, x: run.learning_rate == pytest.approx(3 * x.run("full").learning_rate)),
    ("cpu", "share of the training reviews", lambda run, x: run.task_options["validation_split"] is None),
    ("full", "drawn iid", lambda run, x: options(x, "full", "draw", *IID) <= {"iid"}),
    ("full", "drawn iid (Eq. 5), once", lambda run, x: run.redraw is None),
    ("full", "to the end", lambda run, x: run.redraw_to_end),
    ("full", "new at every step", lambda run, x: run.redraw == 1 and run.redraw_to_end),
    ("full", "best on validation count", lambda run, x: run.select == "best"),
    ("full", "validation is IMDb's test split", lambda run, x: run.task_options["validation_split"] == "test"),
    ("full", "gamma is 0.1", lambda run, x: options(x, "full", "gamma", "skyformer") == {0.1}),
    (
        "full",
        "0.1 of the weights",
        lambda run, x: options(x, "full", "attention_dropout", "softmax", "gaussian") == {0.1},
    ),
    ("full", "drops 0.1 of", lambda run, x: options(x, "full", "attention_dropout", "softmax") == {0.1}),
    ("full", "drops 0.2 of", lambda run, x: options(x, "full", "attention_dropout", "softmax") == {0.2}),
    ("full", "is half of K(x, x)", lambda run, x: options(x, "full", "smoothing", "gmm-rks") == {0.5}),
    ("full", "is 0.0648 of K(x, x)", lambda run, x: options(x, "full", "smoothing", "gmm-rks") == {0.36**2 / 2}),
    ("full", "neither projects nor", lambda run, x: options(x, "full", "projection", "relu") == {None, False}),
]
IID = ("gmm-rks", "gmm-prf", "generative-rks", "generative-prf", "nprf", "rfa", "rfa-gate")


@pytest.mark.parametrize(("size", "words", "holds"), CLAIMS, ids=[f"{x}: {y}" for x, y, _ in CLAIMS])
def test_claims_of_a_note_hold(size, words, holds):
    said = {name: x for name, x in PAPERS.items() if re.search(rf"^{size}:.*{re.escape(words)}", x.note, re.M)}
    assert said, "no note says this any more"
    for name, recipe in said.items():
        assert holds(recipe.run(size), recipe), name


def test_the_papers_protocols_are_in_the_full_sizes():
    for name, recipe in PAPERS.items():
        run, paper = recipe.run("full"), name.split("-")[0]
        # Skyformer's code cuts entries, not norms; KL-Transformer and NPRF print no cut but for pre-training and GLUE.
        printed = {"performer": 0.5}.get(paper, 1.0 if name.startswith(("rpe-pretrain", "rpe-glue")) else None)
        assert run.max_grad_norm == printed, name
        assert (run.redraw, run.redraw_to_end) == {
            "kl": (100, True),
            "sky": (1, True),
            "rpe": (None, False),
            "performer": (1000, False),
        }[paper], name
        assert run.select == ("best" if paper == "sky" else "last"), name
        if paper == "rpe":
            assert options(recipe, "full", "draw", "favor+", *IID) == {"iid"}, name


def test_the_learned_kernels_are_compared_with_the_fixed_ones():
    for name in ("kl-listops", "kl-text", "kl-retrieval", "kl-image"):
        methods = {parse_attention(x)[0] for x in find_recipe(name).attentions("full")}
        assert {"softmax", "elu", "favor+", "relu", "gmm-rks", "fastfood-prf"} <= methods, name


def test_a_note_is_lines_that_hold_for_one_size_or_for_both():
    for name, recipe in PAPERS.items():
        lines = recipe.note.splitlines()
        assert len(lines) == len(set(lines)), name
        for line in lines:
            assert line.endswith("."), (name, line)
            assert "  " not in line, (name, line)
        for size in recipe.sizes:
            other = {"cpu": "full:", "full": "cpu:"}[size]
            assert other not in recipe.note_on(size), name
            assert recipe.note_on(size) == " ".join(x for x in lines if not x.startswith(other)), name
    assert find_recipe("demo").note_on() == ""
    with pytest.raises(ValueError, match="unknown size of this recipe, 'big'"):
        RECIPES["kl-text"].note_on("big")


def test_settings_that_replace_a_recipes_are_told_beside_its_note():
    assert describe_changes({}) == describe_changes({"task.data": "x", "start": "y"}) == ""
    said = describe_changes({"steps": 5, "task.length": 64, "task.data": "/somewhere"})
    assert said == "Changed here: steps=5, task.length=64."


def test_fine_tuning_of_a_vision_model_starts_where_softmax_ended(tmp_path):
    from kernelformer_lab.recipes.catalogue import change
    from kernelformer_lab.training import train
    from samples import few_samples

    small = {"steps": 2, "warmup_steps": 1, "batch_size": 2, "eval_every": None, "save_every": None}
    small |= {"model.hidden_size": 16, "model.num_attention_heads": 2, "model.num_hidden_layers": 1}
    small |= {f"task.{x}": y for x, y in few_samples("images", tmp_path, {}).items()}
    first = change(find_recipe("rpe-imagenet").run("cpu"), {**small, "attention": "softmax"})
    train(first, tmp_path / "softmax", quiet=True)
    heard: list[str] = []
    second = change(find_recipe("rpe-imagenet-finetune").run("cpu"), {**small, "start": str(tmp_path / "softmax")})
    result = train(second, tmp_path / "favor", log=heard.append)
    assert torch.isfinite(torch.tensor(result.loss))
    (said,) = (x for x in heard if x.startswith("starting from"))
    assert "new:" not in said
