"""Studies that are scripts: each measures, shows, draws and writes at a tiny size."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernelformer_lab.training.config import Run
from samples import few_samples

SCRIPTS = Path(__file__).parents[3] / "tools" / "studies"
RUN = Run(
    task="bytes",
    attention="elu",
    task_options={"data": argparse.__file__, "length": 32, "validation_samples": 2},
    model={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    steps=4,
    batch_size=2,
)
TWIN = {"image_size": 8, "patch": 4, "width": 16, "layers": 1, "heads": 2, "steps": 1, "batch": 4}
PACK = {"attention": ("softmax", "elu"), "length": 48, "median": 12, "batch": 3, "width": 16, "layers": 1, "heads": 2}
SETTINGS = {
    "overhead": {"attention": ("softmax", "elu")},
    "packing": {**PACK, "rounds": 1},
    "short": {"sizes": ("3x4", "1x40"), "features": (8,), "heads": 2, "head_dim": 8, "step_features": 8}
    | {"contexts": (5,), "budget": 0.001},
    "exported": {"attention": ("elu",), "lengths": (16,), "rounds": 1, "budget": 0.01},
    "twins": {**TWIN, "tasks": ("images",), "seeds": 2},
    "tour": {},
    "kernels": {},
}
SMALLER = {
    "overhead": {"find_recipe": lambda name: SimpleNamespace(run=lambda: RUN)},
    "twins": {"EVALUATED": 32},
    "tour": {"FEATURES": (4, 8), "LENGTHS": (64,), "CONTEXTS": (32,), "STEPS": 6,
             "sample_inputs": lambda *_, **__: [torch.randn(1, 2, 16, 8) for _ in range(3)]},
    "kernels": {"NORMS": (0.5,), "FEATURES": (16, 32), "METHODS": ("gmm-rks",), "STEPS": 4},
}  # fmt: skip
SLOW = ("exported", "tour")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in SETTINGS])
def test_a_script_measures_shows_draws_and_writes(name, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, script)
    spec.loader.exec_module(script)
    for what, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(script, what, value)
    images = {"images": few_samples("images", tmp_path, {"channels": 1, "size": 8})["data"]} if name == "twins" else {}
    study, done = script.STUDY, []
    settings = study.settings(**SETTINGS[name], **images)
    record = study.measure(settings, tmp_path, progress=lambda: done.append(1))
    assert len(done) == SMALLER.get(name, {}).get("STEPS", study.steps(settings))
    assert all(x.row_count for x in study.tables(record))
    study.picture(record, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    kept = json.loads(record.save().read_text())
    assert kept["command"].startswith(f"python tools/studies/{name}.py")
    if study.resumes:
        assert study.measure(settings, tmp_path).figures == {x: kept[x] for x in record.figures}
