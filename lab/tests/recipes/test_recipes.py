"""Recipes: the numbers of the papers' tables, models of the full sizes, short runs of the sizes for a CPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.models.blocks import Block
from kernelformer.modules.spec import parse_attention
from kernelformer_lab.comparison import make_plan
from kernelformer_lab.recipes.catalogue import RECIPES, change, find_recipe
from kernelformer_lab.recipes.papers import PAPERS
from kernelformer_lab.recipes.papers.base import arena_rate
from kernelformer_lab.tasks import TASKS, make_task
from kernelformer_lab.training import train
from kernelformer_lab.training.session import build_model
from samples import few_samples

# Blocks, heads, width of a head, d, feed-forward, as printed; a width of a head that is not is d / heads.
SIZES = {
    "kl-listops": (6, 8, 64, 512, 2048),
    "kl-text": (4, 4, 64, 256, 1024),
    "kl-retrieval": (4, 4, 32, 128, 512),
    "kl-image": (1, 8, 8, 128, 128),
    "kl-wikitext": (3, 10, 64, 300, 512),
    "kl-glue-cola": (3, 10, 64, 300, 512),
    "kl-sparsity": (3, 4, 16, 64, 64),
    "sky-text": (2, 2, 32, 64, 128),
    "sky-pathfinder": (2, 2, 32, 64, 128),
    "rpe-pretrain": (12, 12, 64, 768, 3072),
    "rpe-glue-stsb": (12, 12, 64, 768, 3072),
    "rpe-wikitext": (6, 8, 64, 512, 2048),
    "rpe-imagenet": (12, 12, 64, 768, 3072),
    "rpe-imagenet-finetune": (12, 12, 64, 768, 3072),
    "rpe-imagenet32": (6, 8, 64, 512, 2048),
    "performer-protein-uni": (36, 8, 64, 512, 1024),
    "performer-protein-bid": (36, 8, 64, 512, 1024),
    "performer-protein-long": (6, 8, 64, 512, 2048),
    "performer-protein-long-small": (3, 8, 32, 256, 256),
    "performer-imagenet64": (6, 8, 64, 512, 2048),
}
# Batch, steps, warm-up, weight decay, beta2, dropout.
TRAINING = {
    "kl-listops": (32, 10_000, 1000, 0.1, 0.98, 0.1),
    "kl-text": (32, 20_000, 8000, 0.1, 0.98, 0.1),
    "kl-retrieval": (32, 5000, 5000, 0.1, 0.98, 0.1),
    "kl-image": (256, 200 * 175, 175, 0.0, 0.98, 0.3),
    "kl-wikitext": (64, 15_750, 10_000, 0.01, 0.999, 0.1),
    "kl-glue-rte": (64, 380, 38, 0.01, 0.999, 0.1),
    "sky-text": (16, 50_000, 80, 0.0, 0.999, 0.1),
    "sky-listops": (32, 50_000, 1000, 0.0, 0.999, 0.1),
    "sky-retrieval": (16, 50_000, 800, 0.0, 0.999, 0.1),
    "sky-pathfinder": (128, 50_000, 312, 0.0, 0.999, 0.1),
    "sky-image": (256, 50_000, 175, 0.0, 0.999, 0.1),
    "rpe-pretrain": (2048, 1_000_000, 20_000, 0.01, 0.999, 0.1),
    "rpe-glue-mnli": (32, 5 * 12_271, 3681, 0.01, 0.98, 0.1),
    "rpe-glue-cola": (32, 10 * 267, 160, 0.01, 0.98, 0.1),
    "rpe-wikitext": (64, 150_000, 6000, 0.01, 0.98, 0.1),
    "rpe-imagenet": (1024, 450 * 1251, 20 * 1251, 0.05, 0.999, 0.0),
    "rpe-imagenet-finetune": (1024, 100 * 1251, 6 * 1251, 0.05, 0.999, 0.0),
    "performer-protein-uni": (256, 500_000, 0, 0.1, 0.98, 0.1),
    "performer-protein-long": (2048, 100_000, 0, 0.1, 0.98, 0.1),
}
LENGTHS = {
    "kl-listops": 2000,
    "kl-text": 4000,
    "kl-retrieval": 4000,
    "kl-image": 1024,
    "kl-wikitext": 512,
    "kl-glue-qnli": 512,
    "kl-sparsity": 200,
    "sky-text": 4000,
    "sky-pathfinder": 1024,
    "rpe-pretrain": 512,
    "rpe-wikitext": 512,
    "rpe-imagenet32": 3072,
    "performer-protein-bid": 1024,
    "performer-protein-kernels": 512,
    "performer-protein-long": 8192,
    "performer-imagenet64": 12288,
}


def meta(run):
    with torch.device("meta"):
        return build_model(run, make_task(run.task, **run.task_options))


@pytest.mark.parametrize("name", SIZES)
def test_a_full_model_has_the_printed_sizes(name):
    layers, heads, wide, width, feed = SIZES[name]
    model = meta(replace(find_recipe(name).run("full"), attention="softmax", decoder_attention=None))
    matrices = {x: p for x, p in model.named_parameters() if p.dim() == 2 and ".blocks." in x}
    assert sum(p.numel() for p in matrices.values()) == layers * (4 * width * heads * wide + 2 * width * feed)


def test_full_models_have_the_published_numbers_of_parameters():
    assert meta(find_recipe("rpe-pretrain").run("full")).num_parameters() == pytest.approx(110e6, rel=0.02)  # BERT-base
    assert meta(find_recipe("rpe-imagenet").run("full")).num_parameters() == pytest.approx(86e6, rel=0.02)  # DeiT-base


def test_full_runs_have_the_printed_settings():
    for name, printed in TRAINING.items():
        run = find_recipe(name).run("full")
        dropout = run.model.get("dropout", 0.0)
        assert (run.batch_size, run.steps, run.warmup_steps, run.weight_decay, run.beta2, dropout) == printed, name


def test_full_runs_have_the_printed_lengths():
    for name, length in LENGTHS.items():
        run = find_recipe(name).run("full")
        assert make_task(run.task, **run.task_options).settings()["max_position_embeddings"] == length, name


def test_learning_rates_are_as_printed():
    for name, rate, schedule in (
        ("kl-listops", 5e-3 / math.sqrt(1000), "inverse_sqrt"),
        ("kl-text", 5e-2 / math.sqrt(8000), "inverse_sqrt"),
        ("kl-retrieval", 5e-2 / math.sqrt(8000) * 5 / 8, "inverse_sqrt"),
        ("kl-image", 5e-4, "cosine"),
        ("kl-wikitext", 5e-4, "linear"),
        ("kl-sparsity", 5e-6, "constant"),
        ("sky-text", 1e-4, "linear"),
        ("sky-listops", 1e-4, "linear"),
        ("sky-retrieval", 2e-4, "linear"),
        ("sky-pathfinder", 2e-4, "linear"),
        ("sky-image", 1e-4, "linear"),
        ("rpe-pretrain", 2e-4, "linear"),
        ("rpe-wikitext", 2e-3, "inverse_sqrt"),
        ("rpe-translation", 5e-4, "inverse_sqrt"),
        ("rpe-imagenet", 1e-5, "cosine"),
        ("rpe-imagenet-finetune", 1e-5, "cosine"),
        ("rpe-imagenet32", 5e-4, "inverse_sqrt"),
        ("performer-protein-bid", 1e-3, "constant"),
    ):
        run = find_recipe(name).run("full")
        assert (run.learning_rate, run.schedule) == (pytest.approx(rate), schedule), name


def test_translation_is_as_printed():
    run = find_recipe("rpe-translation").run("full")
    assert (run.steps, run.warmup_steps, run.label_smoothing, run.model["dropout"]) == (50_000, 4000, 0.1, 0.3)
    assert (run.model["num_hidden_layers"], run.model["hidden_size"], run.model["num_attention_heads"]) == (6, 512, 4)
    assert {x: run.task_options[x] for x in ("vocab_size", "beams", "length_penalty")} == {
        "vocab_size": 10_000,
        "beams": 5,
        "length_penalty": 1.2,
    }
    assert parse_attention(run.attention)[1]["num_features"] == 16
    assert parse_attention(run.decoder_attention)[1]["num_features"] == 24
    model = meta(run)
    assert len(model.encoder.stack.blocks) == len(model.stack.blocks) == 6


def test_every_kernel_has_its_own_number_of_samples():
    for name, samples in (
        ("kl-listops", {"gmm-rks": 256, "fastfood-rks": 64, "generative-rks": 256, "gmm-prf": 256}),
        ("kl-listops", {"fastfood-prf": 64, "generative-prf": 128}),
        ("kl-text", {"gmm-rks": 128, "fastfood-rks": 64, "generative-rks": 256, "gmm-prf": 256}),
        ("kl-text", {"fastfood-prf": 64, "generative-prf": 128}),
        ("kl-retrieval", {"gmm-rks": 64, "fastfood-rks": 32, "generative-rks": 128, "gmm-prf": 128}),
        ("kl-retrieval", {"fastfood-prf": 32, "generative-prf": 64}),
        ("kl-image", {"gmm-rks": 128, "fastfood-rks": 8, "generative-rks": 128, "gmm-prf": 128}),
        ("kl-image", {"fastfood-prf": 8, "generative-prf": 8}),
    ):
        parsed = [parse_attention(x) for x in find_recipe(name).attentions("full")]
        found = {method: options.get("num_features") for method, options in parsed}
        assert samples.items() <= found.items(), name


@pytest.mark.parametrize(("base", "warmup", "steps"), [(5e-3, 1000, 10_000), (5e-2, 8000, 20_000), (5e-2, 8000, 5000)])
def test_the_schedule_is_that_of_long_range_arena(base, warmup, steps):
    from transformers import get_inverse_sqrt_schedule

    settings = arena_rate(base, warmup, steps)
    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=settings["learning_rate"])
    schedule = get_inverse_sqrt_schedule(optimizer, settings["warmup_steps"])
    for i in (1, 10, warmup // 2, min(warmup, steps), (warmup + steps) // 2, steps):
        if i <= steps:
            rate = settings["learning_rate"] * schedule.lr_lambdas[0](i)
            assert rate == pytest.approx(base * min(1, i / warmup) / math.sqrt(max(i, warmup)))


@pytest.mark.parametrize("name", PAPERS)
def test_every_full_size_can_be_built(name):
    run = find_recipe(name).run("full")
    model = meta(run)
    sides = 1 if run.task != "translation" else 2
    blocks = [x for x in model.modules() if isinstance(x, Block)]
    assert len(blocks) == sides * run.model["num_hidden_layers"]


@pytest.mark.parametrize("name", [x for x in PAPERS if "-glue-" not in x or x in ("kl-glue-mnli", "rpe-glue-stsb")])
def test_every_attention_of_a_paper_can_be_built(name, tmp_path):
    recipe = find_recipe(name)
    run = recipe.run("full")
    one = replace(run, model={**run.model, "num_hidden_layers": 1})  # the others are like it
    for planned in [one, *make_plan("x", one, recipe.attentions("full"), 1, tmp_path).runs]:
        meta(planned)


FIRST = {find_recipe(name).run("cpu").task: name for name in reversed(RECIPES)}  # a recipe for each task


@pytest.mark.parametrize(
    "name", [x if x in FIRST.values() else pytest.param(x, marks=pytest.mark.slow) for x in RECIPES]
)
def test_the_size_for_a_cpu_trains(name, tmp_path):
    recipe = find_recipe(name)
    run = recipe.run("cpu")
    task = {f"task.{x}": y for x, y in few_samples(run.task, tmp_path, run.task_options).items()}
    quick = {"steps": 3, "batch_size": 2, "eval_batch_size": 2, "eval_every": None, "save_every": None, "redraw": 2}
    result = train(change(run, {**task, **quick}), tmp_path / "run", quiet=True)
    assert result.steps == 3
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_size_for_a_cpu_takes_every_attention_it_compares(task, tmp_path):
    named = [x for x in RECIPES.values() if x.run("cpu").task == task]
    assert named, f"no recipe has the task {task}"
    for specs in {tuple(x.attentions("cpu")) for x in named}:
        run = next(x.run("cpu") for x in named if tuple(x.attentions("cpu")) == specs)
        for planned in make_plan("x", run, specs, 1, tmp_path).runs:
            meta(planned)


def test_a_bias_learns_faster_only_at_the_size_for_a_cpu():
    assert all(recipe.run("full").bias_lr is None for recipe in PAPERS.values())


def test_every_recipe_of_a_paper_says_where_it_is_from_and_what_differs():
    for name, recipe in PAPERS.items():
        assert set(recipe.sizes) == set(recipe.compared) == {"full", "cpu"}, name
        assert "cpu:" in recipe.note, name
        assert any(x in recipe.source for x in ("Table", "Fig.", "App.")), name


def test_a_size_that_a_recipe_has_not_is_refused():
    with pytest.raises(ValueError, match="unknown size of this recipe, 'full'; choose from cpu"):
        find_recipe("demo").run("full")
    with pytest.raises(ValueError, match="did you mean 'kl-text'"):
        find_recipe("kl-texts")


@pytest.mark.parametrize(("first", "second"), [("rpe-pretrain", "rpe-glue-stsb"), ("kl-wikitext", "kl-glue-rte")])
def test_fine_tuning_follows_pre_training_as_its_note_says(first, second, tmp_path):
    """At the full size's attention, pooling, length and vocabulary; a smaller model."""
    small = {"model.hidden_size": 16, "model.num_hidden_layers": 2, "model.num_attention_heads": 2}
    small |= {"model.intermediate_size": 16, "steps": 2, "warmup_steps": 1, "batch_size": 2, "eval_batch_size": 2}
    small |= {"eval_every": None, "save_every": None, "precision": "float32"}
    heard = []
    for name in (first, second):
        run = find_recipe(name).run("full")
        (tmp_path / run.task).mkdir()
        options = few_samples(run.task, tmp_path / run.task, run.task_options) | {"length": 32}
        more = {"start": str(tmp_path / first), "task.tokenizer": str(tmp_path / first)} if name == second else {}
        task = {f"task.{x}": y for x, y in options.items()}
        result = train(change(run, {**small, **task, **more}), tmp_path / name, log=heard.append)
        assert math.isfinite(result.loss)
    words = [(tmp_path / name / "model" / "tokenizer.json").read_text() for name in (first, second)]
    assert words[0] == words[1]
    (said,) = (x for x in heard if x.startswith("starting from"))
    assert "new: model.first.vector, head." in said
    if first == "rpe-pretrain":
        assert "positions.weight from 63 to 65 distances" in said


def call(*words):
    return CliRunner().invoke(app, list(words))


def test_list_names_all_recipes_with_their_papers():
    output = call("list", "recipes").output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    rows: dict[str, list[str]] = {}
    name = ""
    for first, *rest in lines:  # a name is never broken; other cells go on in lines without one
        name = first or name
        rows[name] = [f"{x} {y}".strip() for x, y in zip(rows.get(name, [""] * len(rest)), rest, strict=True)]
    assert rows == {name: [x.about, x.source, x.run().task] for name, x in RECIPES.items()}
    assert "favor+hyperbolic" not in output
    assert max(map(len, output.splitlines())) <= 140


def test_list_shows_one_part_or_one_recipe():
    assert "favor+hyperbolic" in call("list", "methods").output
    assert "proteins-masked" in call("list", "tasks").output
    output = call("list", "kl-image").output
    assert "Tables 6 and 7" in output
    assert "model.head_dim" in output
    assert "fastfood-prf:num_features=8" in output
    wrong = call("list", "recipe")
    assert wrong.exit_code == 2
    assert "did you mean 'recipes'" in wrong.output


def test_list_of_a_folder_shows_each_of_its_runs_or_says_that_there_is_none(tmp_path):
    empty = call("list", str(tmp_path))
    assert empty.exit_code == 2
    assert "holds no run" in " ".join(empty.output.split())
    for attention in ("softmax", "elu"):
        folder = tmp_path / f"{attention}-seed0"
        folder.mkdir()
        run = {"task": "bytes", "attention": attention, "steps": 5}
        (folder / "run.json").write_text(json.dumps({"run": run, "environment": {}, "command": ""}))
    output = " ".join(call("list", str(tmp_path)).output.split())
    assert "elu-seed0: bytes, elu; unfinished" in output
    assert "softmax-seed0: bytes, softmax; unfinished" in output


def test_a_name_that_is_a_task_and_a_recipe_is_offered_once():
    with pytest.raises(ValueError, match="unknown recipe 'bytse'") as error:
        find_recipe("bytse")
    assert str(error.value).count("bytes,") == 1


def test_tokens_of_the_sparsity_task_add_up_to_their_label():
    task = make_task("sparsity", train_samples=90, validation_samples=9, test_samples=9, length=12, relevance=0.5)
    batch = task.collate(task.split("train").__getitems__(range(90)))
    ids = batch["input_ids"]
    value, relevant = 2 * (ids // 2) - 1, ids % 2
    assert torch.equal((value * relevant).sum(1) + 4, batch["labels"])
