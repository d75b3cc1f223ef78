"""Folders that version 0.1.0 wrote, before anything in them had a hash, still load and give the same numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernelformer.hf import load
from kernelformer.training.config import Run
from kernelformer.training.session import train
from tiny_models import tokens

OLD = Path(__file__).parent / "fixtures" / "version-0.1.0"


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM"])
def test_a_converted_model_gives_the_outputs_it_had(kind):
    model = load(OLD / f"converted-{kind}").eval()
    with torch.no_grad():
        out = model(input_ids=tokens())[0]
    torch.testing.assert_close(out, load_file(OLD / "converted-outputs.safetensors")[kind], rtol=1e-4, atol=1e-5)


def test_a_stopped_run_goes_on_to_the_weights_it_would_have_had(tmp_path):
    shutil.copytree(OLD / "run", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    settings["run"]["task_options"]["data"] = str(OLD / "text.txt")
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings))
    train(Run.from_json(settings["run"]), tmp_path / "run", resume=True)
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    expected = load_file(OLD / "run-finished.safetensors")
    assert weights.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, rtol=1e-4, atol=1e-5, msg=name)
