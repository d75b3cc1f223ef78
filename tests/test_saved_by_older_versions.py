"""Folders that older versions wrote still load and give the same numbers; those of 0.1.0 have no hashes in them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import kernelformer as kf
from kernelformer.cli.app import app
from kernelformer.formatting import visible
from kernelformer.hf import load
from kernelformer.parallel import load_sharded
from kernelformer_lab.training import Result, Run, evaluate, train
from tiny_models import tokens

FOLDERS = Path(__file__).parent / "fixtures"
OLD, LATER = FOLDERS / "version-0.1.0", FOLDERS / "version-0.2.0"
EXPECTED = json.loads((LATER / "expected.json").read_text())


def command(*words):
    done = CliRunner().invoke(app, [*map(str, words), "--threads", "1"])
    assert done.exit_code == 0, done.output
    return done.stdout


def writable(folder, place, **options):
    """A copy of a run, whose data is where it is here."""
    shutil.copytree(folder, place)
    settings = json.loads((place / "run.json").read_text())
    settings["run"]["task_options"] |= options
    (place / "run.json").write_text(json.dumps(settings))
    return Run.from_json(settings["run"])


def assert_same_weights(folder, file):
    weights, expected = load_file(folder / "model" / "model.safetensors"), load_file(file)
    assert weights.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM"])
def test_a_converted_model_gives_the_outputs_it_had(kind):
    model = load(OLD / f"converted-{kind}").eval()
    with torch.no_grad():
        out = model(input_ids=tokens())[0]
    torch.testing.assert_close(out, load_file(OLD / "converted-outputs.safetensors")[kind], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_a_distilled_model_gives_the_outputs_it_had(kind):
    model, expected = load(LATER / f"converted-{kind}").eval(), load_file(LATER / "converted-outputs.safetensors")
    with torch.no_grad():
        out = model(input_ids=expected["ids"]).logits
    torch.testing.assert_close(out, expected[kind], rtol=1e-4, atol=1e-5)


def test_a_converted_decoder_continues_as_it_did():
    words = ("--prompt", "w1 w2", "--tokens", 12, "--temperature", 1)
    assert command("continue", LATER / "converted-LlamaForCausalLM", *words) == EXPECTED["continue"]


def test_a_stopped_run_goes_on_to_the_weights_it_would_have_had(tmp_path):
    run = writable(OLD / "run", tmp_path / "run", data=str(OLD / "text.txt"))
    train(run, tmp_path / "run", resume=True)
    assert_same_weights(tmp_path / "run", OLD / "run-finished.safetensors")


def test_a_stopped_run_on_shards_goes_on_to_the_weights_it_would_have_had(tmp_path):
    run = writable(LATER / "run-stopped", tmp_path / "run", data=str(LATER / "shards"))
    train(run, tmp_path / "run", resume=True, quiet=True)
    assert_same_weights(tmp_path / "run", LATER / "run-stopped-finished.safetensors")


def test_a_finished_run_is_evaluated_and_writes_as_it_did(tmp_path):
    folder = tmp_path / "run"
    run = writable(LATER / "run-finished", folder, data=str(LATER / "text.txt"))
    found = json.loads(command("evaluate", folder, "--split", "test", "--json"))
    assert found["scores"] == pytest.approx(EXPECTED["evaluate"]["scores"], rel=1e-5)
    assert evaluate(folder, split="test")["loss"] == pytest.approx(found["scores"]["loss"], rel=1e-5)
    words = ("--prompt", "def ", "--tokens", 24, "--temperature", 1)
    assert command("generate", folder, *words) == visible(EXPECTED["generate"], keep="\n\t")
    result = Result.from_json(json.loads((folder / "result.json").read_text()))
    assert train(run, folder, resume=True, quiet=True).value == result.value  # nothing is left to do


def test_a_sharded_checkpoint_brings_back_layer_and_optimizer():
    layer = kf.KernelAttention(8, 2, method="gmm-prf", num_features=4, components=2, relative="1d", max_distance=3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
    assert load_sharded(LATER / "sharded", layer, optimizer) == {"step": 1}
    expected = load_file(LATER / "sharded-outputs.safetensors")
    torch.testing.assert_close(layer(expected["x"]), expected["out"], rtol=1e-4, atol=1e-5)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.state[layer.query.weight]["exp_avg"].abs().sum() > 0
