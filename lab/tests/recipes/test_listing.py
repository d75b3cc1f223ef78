"""Explanations of `kernelformer list`, tables on narrow terminals, and states in one line."""

from __future__ import annotations

import io
import re
from dataclasses import fields

import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner

import kernelformer as kf
from kernelformer.cli import app as commands
from kernelformer.cli import listing as methods_listing
from kernelformer.cli.common import VisibleConsole
from kernelformer.formatting import short_names, shortened
from kernelformer.models import KernelformerConfig
from kernelformer.modules import MixedCore
from kernelformer.modules.spec import describe_options, describe_positions
from kernelformer_lab.cli import listing
from kernelformer_lab.recipes.catalogue import RECIPES, change
from kernelformer_lab.recipes.overrides import recipe_settings
from kernelformer_lab.tasks import task_options
from kernelformer_lab.training.config import OWN, Run

NEEDED = {"linformer": {"max_length": 8}}


def listed(*words: str) -> str:
    result = CliRunner().invoke(commands.app, ["list", *words])
    assert result.exit_code == 0, result.output
    return result.output


def rows(output: str) -> dict[str, list[str]]:
    """Cells by the first of their row; lines that go on have none."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in output.splitlines():
        if line.startswith("│"):
            first, *rest = (cell.strip() for cell in line.split("│")[1:-1])
            name = first or name
            found[name] = [f"{x} {y}".strip() for x, y in zip(found.get(name, [""] * len(rest)), rest, strict=True)]
    return found


@pytest.mark.parametrize("method", kf.list_methods())
def test_a_method_s_options_are_explained_with_their_defaults(method):
    options = describe_options(method)
    assert [x.name for x in options] == kf.method_options(method)
    for x in options:
        assert x.about.endswith("."), x
        assert len(x.about.split()) > 2, x
    sizes = {"head_dim": 4, "num_heads": 2, **NEEDED.get(method, {})}
    said = {x.name: x.default for x in options if x.default is not None}
    plain, spelled = kf.build_attention(method, **sizes), kf.build_attention(method, **{**said, **sizes})
    assert plain.scale == spelled.scale
    for (name, x), (_, y) in zip(plain.state_dict().items(), spelled.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("method", ["favor+", "gmm-rks", "skyformer", "softmax"])
def test_list_shows_a_method_with_all_its_options(method):
    output = listed(method)
    shown = rows(output)
    assert output.startswith(f"{method}: {kf.list_methods()[method]}")
    for x in [*describe_options(method), *describe_positions()]:
        assert shown[x.name] == [str(x.default), x.about]


@pytest.mark.parametrize("name", ["bytes", "sky-listops", "rpe-translation", "rpe-imagenet", "kl-glue-mnli"])
def test_list_shows_all_settings_of_a_recipe(name):
    recipe = RECIPES[name]
    chosen, default = recipe_settings(recipe)
    shown = rows(listed(name))
    own = [x.name for x in fields(Run) if x.name not in ("model", "task_options")]
    model = [x for x in KernelformerConfig.__annotations__ if x not in (*OWN, "model_type")]
    expected = {*own, *(f"task.{x}" for x in task_options(recipe.task)), *(f"model.{x}" for x in model)}
    assert expected <= chosen.keys() | default.keys()
    assert not chosen.keys() & default.keys()
    assert shown.keys() == {*chosen, *default, "compared"}
    for setting, values in {**chosen, **default}.items():
        assert "".join(" ".join(shown[setting]).split()) == "".join(" ".join(values).split())
    for position, size in enumerate(recipe.sizes):
        run = recipe.run(size)
        for setting in ("steps", "beta2"):
            assert {**chosen, **default}[setting][position] == repr(getattr(run, setting))
        for setting in (*chosen, *default):
            if setting != "task":
                change(run, {setting: getattr(run, setting, None)})  # each name is one that --set knows


def test_list_takes_a_task_s_name_as_train_does():
    said = listed("images")
    assert said.startswith("task images: rpe-imagenet, rpe-imagenet-finetune; `train images` runs the first\n")
    assert rows(said)["task"] == ["images", "images"]


def test_a_task_s_settings_of_its_model_are_told_from_defaults():
    chosen, default = recipe_settings(RECIPES["listops"])
    assert chosen["model.num_labels"] == ["10"]
    assert chosen["model.max_position_embeddings"] == ["2000"]
    assert default["model.dropout"] == ["0.0"]
    assert default["max_grad_norm"] == ["1.0"]


@pytest.mark.parametrize("width", [44, 80, 140])
@pytest.mark.parametrize("what", ["", "favor+", "rpe-translation"])
def test_lists_fit_the_terminal_and_lose_nothing(monkeypatch, what, width):
    out = io.StringIO()
    for module in (methods_listing, listing):
        monkeypatch.setattr(module, "console", VisibleConsole(file=out, width=width))
    listing.list_(what)
    said = out.getvalue()
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    names = [*kf.list_methods(), *RECIPES] if not what else ["num_prefix"] if what == "favor+" else ["model.use_cache"]
    cells = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
    for name in names:
        assert name in "".join(cells)
        assert name in cells or width == 44  # whole where there is room


def test_numbers_of_a_table_are_not_cut_off():
    table = Table()
    for name in ("attention", "seconds", "memory"):
        table.add_column(name, no_wrap=True)
    table.add_row("favor+:num_features=256", "1,234,567.8", "987.654 GiB")
    for width in (30, 40, 60):
        out = io.StringIO()
        VisibleConsole(file=out, width=width).print(table)
        columns = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if line.startswith("│")]
        cells = ["".join(column).replace(" ", "") for column in zip(*columns, strict=True)]
        assert cells == ["favor+:num_features=256", "1,234,567.8", "987.654GiB"]


def test_long_names_are_shortened_and_stay_different():
    long = [f"nprf:num_features=64:relative=1d:max_distance={x}:draw=iid:per_head=True" for x in (8, 16)]
    assert shortened("softmax") == "softmax"
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert len(shortened(long[0])) == 40
    assert shortened(long[0]).startswith("nprf:num_features=64")
    short = short_names(["softmax", *long, *long])
    assert list(short) == ["softmax", *long]
    assert len(set(short.values())) == 3
    twins = ["x" * 30 + y + "x" * 30 for y in "ab"]
    assert len(set(short_names(twins).values())) == 2


@pytest.mark.parametrize("method", ["favor+", "softmax", "gaussian", "loglinear", "rfa-gate", "gmm-prf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_one_line(method, dtype):
    core = kf.build_attention(method, head_dim=4, num_heads=2).to(dtype)
    x = torch.randn(3, 2, 5, 4, dtype=dtype)
    _, state = core(x, x, x, is_causal=True, return_state=True)
    said = repr(state)
    assert re.fullmatch(rf"State\({re.escape(method)}, 5 tokens, shapes \(3, .*B, .*, cpu\)", said)
    for tensor in state.tensors:
        assert str(tuple(tensor.shape)) in said
        assert str(tensor.dtype).removeprefix("torch.") in said
    assert "tensor" not in said
    assert len(said) < 200


def test_a_state_of_two_kinds_of_heads_names_both():
    exact, linear = (kf.build_attention(x, head_dim=4, num_heads=1) for x in ("softmax", "favor+"))
    x = torch.randn(1, 2, 3, 4)
    _, state = MixedCore(exact, linear, [0])(x, x, x, is_causal=True, return_state=True)
    assert repr(state).startswith("PairState(softmax and favor+, 3 tokens, shapes (1, ")
    assert repr(kf.State((), 0, ())) == "State(unknown method, 0 tokens, shapes none, 0 B)"
