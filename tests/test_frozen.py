"""Names, signatures, saved keys, operators and options that users have, compared with those on file.

After a change that is meant, write the files again and let the difference be read with the change:

    python tests/test_frozen.py
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import json
import re
import types
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from typer.testing import CliRunner

import kernelformer as kf
from definition import VARIANTS, build, inputs, mode
from kernelformer.cli.app import app
from kernelformer.models import MODELS, KernelformerConfig

ROOT = Path(__file__).parents[1]
FILES = Path(__file__).parent / "fixtures" / "frozen"
# Where the public names are, by a name that stays if they move.
PACKAGES = {
    "core": "kernelformer",
    "modules": "kernelformer.modules",
    "feature_maps": "kernelformer.feature_maps",
    "hf": "kernelformer.hf",
    "models": "kernelformer.models",
    "parallel": "kernelformer.parallel",
    "export": "kernelformer.export",
    "tasks": "kernelformer_lab.tasks",
    "training": "kernelformer_lab.training",
}
METHODS = ("forward", "step", "resample", "calibrate", "reset_calibration", "attention_matrix", "recall", "remember")
METHODS += ("covariances", "eigenvalues", "new_cache", "example", "detach", "to", "nbytes", "as_json", "from_json")
METHODS += ("first_values", "log_phi", "phi", "split", "collate", "settings", "score", "judge")
LAYERS = {
    "plain": {},
    "without bias": {"bias": False},
    "key heads": {"num_kv_heads": 2, "head_dim": 4},
    "relative 1d": {"relative": "1d", "max_length": 6},
    "relative 1d clipped": {"relative": "1d", "max_distance": 3, "causal": True},
    "relative 1d t5": {"relative": "1d", "max_distance": 9, "scheme": "t5", "num_buckets": 4},
    "relative 1d alibi": {"relative": "1d", "scheme": "alibi", "causal": True},
    "relative 2d": {"relative": "2d", "grid": (2, 3), "num_prefix": 1},
    "window": {"window": 4, "sinks": 2},
    "rotary": {"rotary": True, "causal": True},
    "rotary window": {"rotary": True, "window": 4, "causal": True},
    "gated": {"method": "rfa-gate", "causal": True},
    "gated own": {"method": "rfa-gate", "causal": True, "own_gate": True},
    "learned": {"method": "loglinear"},
    "landmarks": {"method": "skyformer", "num_features": None, "num_landmarks": 4, "landmarks": "learned"},
}
SIZES = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 12}
SIZES |= {"attention": "favor+:num_features=4", "max_position_embeddings": 16, "num_labels": 3}
CONFIGS = {
    "encoder": {"share_bias": True, "positions": "none", "attention": "nprf:num_features=4:relative=1d:max_distance=3"},
    "classifier": {"classifier_size": 6},
    "seq2seq": {"decoder_start_token_id": 0, "cross_attention": "softmax"},
    "image": {"image_size": (8, 8)},
    "series": {"num_channels": 2},
    "pixel-lm": {"image_size": (4, 4), "num_channels": 1},
}


def signature(value: object) -> object:
    """Parameters with their defaults, without annotations: those may be spelled otherwise."""
    if isinstance(value, property):
        return "property"
    if isinstance(value, dict):
        return sorted(value)
    if isinstance(value, types.GenericAlias):
        return str(value)
    if not callable(value):
        return value
    if isinstance(value, type) and issubclass(value, Exception):
        return [x.__name__ for x in value.__mro__[1:-2]]

    def plain(parameter: inspect.Parameter) -> inspect.Parameter:
        default = parameter.default
        if callable(default) and default is not parameter.empty:
            default = ...  # others have an address in their repr
        return parameter.replace(annotation=parameter.empty, default=default)

    found = inspect.signature(value)
    return str(found.replace(parameters=map(plain, found.parameters.values()), return_annotation=found.empty))


def described(value: object) -> object:
    """The signature; of a class also those of its methods that users call, where this library has them."""
    if not inspect.isclass(value):
        return signature(value)
    found = {"": signature(value)}
    for name in METHODS:
        home = next((x for x in value.__mro__ if name in vars(x)), None)
        if home is not None and not home.__module__.startswith(("torch", "transformers", "builtins")):
            found[name] = signature(getattr(value, name))
    return found


def names() -> dict:
    """Public names with their signatures: of the packages, and others that documentation and examples name."""
    found, known, others = {}, [], {}
    for key, package in PACKAGES.items():
        module = importlib.import_module(package)
        found[key] = {x: described(getattr(module, x)) for x in module.__all__ if x != "__version__"}
        known += [getattr(module, x) for x in module.__all__]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]:
        text = page.read_text()
        paths = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
        for package, imported in re.findall(r"^\s*from (kernelformer\S*) import ([\w, ]+)$", text, re.MULTILINE):
            paths |= {f"{package}.{x.strip()}" for x in imported.split(",")}
        for path in paths:
            package, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(package), name)
            if not any(value is x for x in known):
                assert others.setdefault(name, value) is value, f"two documented objects are called {name}"
    return {**found, "documented elsewhere": {x: described(others[x]) for x in others}}


def contents(module: torch.nn.Module) -> list[str]:
    """Keys of a state dict with shape and type, and what a map's settings say.

    Parameters are in their order, by which the states of optimizers are saved.
    """
    tensors, learned = module.state_dict(), dict(module.named_parameters())
    lines = []
    for name in [*(x for x in learned if x in tensors), *sorted(tensors.keys() - learned.keys())]:
        x = tensors[name]
        size = f"{'x'.join(map(str, x.shape)) or 'number'} {str(x.dtype).removeprefix('torch.')}"
        lines.append(f"{name}: {bytes(x.tolist()).decode() if name.endswith('settings') else size}")
    return lines


def layer(**options: object) -> torch.nn.Module:
    return kf.KernelAttention(8, 4, **{"num_features": 4, **options})


def state_keys() -> dict:
    """Keys of all state dicts: cores, layers and models."""
    models = {x: MODELS[x](KernelformerConfig(**{**SIZES, **CONFIGS.get(x, {})})) for x in MODELS}
    return {
        "cores": {x: contents(build(x, torch.float32)) for x in VARIANTS},
        "layers": {x: contents(layer(**options)) for x, options in LAYERS.items()},
        "as torch": contents(kf.MultiheadAttention(8, 4, kdim=6, vdim=6, num_features=4)),
        "models": {x: contents(model) for x, model in models.items()},
    }


def operators() -> dict:
    """Schemas of the custom operators, which exported and compiled graphs name."""
    assert kf.KernelAttention  # torch is imported with it, and the operators
    every = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith("kernelformer::")]
    return {x: [str(schema) for schema in torch._C._jit_get_schemas_for_operator(x)] for x in every}


def parameters(command: object) -> dict[str, str]:
    """Visible arguments and options of a command: names, type with its choices and bounds, default."""
    found = {}
    for x in command.get_params(typer.Context(command)):
        if x.hidden or x.name == "help":
            continue
        kind = x.type_descriptor.annotation
        text = str(kind) if get_args(kind) else kind.__name__
        if (x.min, x.max) != (None, None):
            text += f" {x.min}..{x.max}"
        text += " required" * x.required + " repeated" * (x.multiple or x.nargs != 1)
        default = x.default if x.default is None or isinstance(x.default, bool | int | float) else str(x.default)
        is_option = x.opts[0].startswith("-")
        name = " ".join([*x.opts, *x.secondary_opts]) if is_option else f"argument {1 + len(found)}"
        found[name] = f"{text} = {default!r}"
    return found


def options() -> dict:
    """Options of every command, of groups too."""
    found = {}

    def walk(path: str, command: object) -> None:
        found[path] = parameters(command)
        if hasattr(command, "list_commands"):
            context = typer.Context(command)
            for name in command.list_commands(context):
                inner = command.load(name)
                if not inner.hidden:
                    walk(f"{path} {name}", inner)

    walk("kernelformer", typer.main.get_command(app))
    return found


def listed(*words: str) -> dict:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def settings() -> dict:
    """Options of methods and tasks, defaults of the configuration, and recipes: a hash for each.

    `kernelformer list RECIPE --json` of both versions shows what a hash that differs stands for.
    """
    every = listed("list")
    others = KernelformerConfig.__mro__[1]().to_dict()  # defaults of transformers are not ours to keep
    config = {x: y for x, y in KernelformerConfig().to_dict().items() if x not in others or y != others[x]}
    recipes = {}
    for x in every["recipes"]:
        known = listed("list", x["recipe"])
        text = json.dumps([known["settings"], known["compared"]], sort_keys=True)
        recipes[x["recipe"]] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {
        "methods": {x["method"]: x["options"] for x in every["methods"]},
        "tasks": {x["task"]: {y: x[y] for y in ("metric", "recipes", "options")} for x in every["tasks"]},
        "recipes": recipes,
        "configuration": config,
    }


def records() -> dict:
    """Jobs of each item of evidence, and how many of them the records here do not have."""
    rows = listed("reproduce", "--list", "--records", str(ROOT / "results" / "evidence"))
    return {x["item"]: {y: x[y] for y in ("jobs", "jobs_left", "damage")} for x in rows}


def numbers() -> dict[str, list[float]]:
    """Outputs of every variant, each weighted by four random vectors: draws, first values and arithmetic."""
    q, k, v = inputs(9, B=1)
    probes = torch.randn(4, 4 * 9 * 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return {x: (probes @ build(x)(q, k, v, **mode(x)).flatten()).tolist() for x in VARIANTS}


FROZEN = {
    "numbers": numbers,
    "names": names,
    "state-keys": state_keys,
    "operators": operators,
    "options": options,
    "settings": settings,
    "records": records,
}


def as_text(value: dict) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def test_the_same_seed_gives_the_numbers_on_file():
    before, now = json.loads((FILES / "numbers.json").read_text()), numbers()
    assert before.keys() == now.keys()
    assert not [x for x in now if not same(now[x], before[x])]


def same(now: list[float], before: list[float] | None) -> bool:
    return before is not None and now == pytest.approx(before, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", [x for x in FROZEN if x != "numbers"])
def test_what_users_have_is_what_is_on_file(name):
    file = FILES / f"{name}.json"
    before, now = file.read_text().splitlines(), as_text(FROZEN[name]()).splitlines()
    changed = "\n".join(difflib.unified_diff(before, now, "on file", "now", lineterm="", n=2))
    assert not changed, f"{changed}\nIf that is meant: python tests/test_frozen.py writes the files again."


if __name__ == "__main__":
    _before = json.loads((FILES / "numbers.json").read_text())  # rounding of this machine is no change
    _made = {name: make() for name, make in FROZEN.items()}
    _kept = {x: _before[x] if same(now, _before.get(x)) else now for x, now in _made["numbers"].items()}
    for _name, _value in {**_made, "numbers": _kept}.items():
        (FILES / f"{_name}.json").write_text(as_text(_value))
