"""Small files that ask for much: refused in one clear sentence before anything is built, drawn, unpacked or fetched."""

from __future__ import annotations

import json
import shutil
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from converted_folders import change, saved
from kernelformer.cli.app import app
from kernelformer.files import LIMITS, check_limit, limit, set_limit
from kernelformer.hf import load
from kernelformer.hf.load import load_source
from kernelformer.models import (
    KernelformerConfig,
    KernelformerForCausalLM,
    KernelformerForConditionalGeneration,
    register,
)
from kernelformer.modules.spec import parse_attention
from kernelformer_lab.data import images as npz
from kernelformer_lab.records import read_object
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training import Run, TrainingError, train
from kernelformer_lab.training.evaluation import load_model
from kernelformer_lab.training.session import start_from
from test_saved_by_older_versions import OLD
from tiny_models import tiny as original

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture
def own(tmp_path):
    """A model of this library, whose configuration can be changed."""
    KernelformerForCausalLM(KernelformerConfig(**SMALL, attention="favor+:num_features=8")).save_pretrained(tmp_path)
    (tmp_path / "hashes.json").unlink()
    return tmp_path


def quickly(use, message):
    """It is refused in one sentence, and at once."""
    start = time.process_time()
    with pytest.raises((ValueError, TrainingError), match=message) as problem:
        use()
    assert time.process_time() - start < 10
    assert len(str(problem.value)) < 1200
    return str(problem.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"num_attention_heads": 0}, "no BertForMaskedLM can be built as it says"),
        ({"hidden_size": 10**9}, r"do not fit its config.json: it asks for .* of shape \(.*1000000000.*, .* has \("),
        ({"vocab_size": 10**9}, r"do not fit its config.json: it asks for .* of shape \(1000000000"),
        ({"intermediate_size": -16}, "no BertForMaskedLM can be built as it says"),
        ({"num_hidden_layers": 20_000}, "asks for num_hidden_layers=20,000, the limit max_layers is 1,000; if you "),
        ({"backbone": "some/model"}, "names backbone='some/model', a part that is not in the folder and would be fet"),
        ({"_attn_implementation": "some/kernel"}, "names _attn_implementation='some/kernel', a part that is not in"),
    ],
)
def test_a_converted_folder_with_sizes_of_no_model_is_refused(source, message, tmp_path):
    saved(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, source={**record["source"], **source})
    quickly(lambda: load(tmp_path), message)


def test_an_architecture_of_another_type_is_refused(tmp_path):
    saved(tmp_path)
    change(tmp_path, architecture="GPT2LMHeadModel")
    quickly(
        lambda: load(tmp_path), "architecture GPT2LMHeadModel is for a GPT2Config, .* configuration is a BertConfig"
    )


@pytest.mark.parametrize("count", [10**7, 10**9])
def test_features_that_the_weights_have_no_room_for_are_not_drawn(count, tmp_path, own):
    saved(tmp_path / "converted")
    rows = json.loads((tmp_path / "converted" / "config.json").read_text())["conversion"]
    change(tmp_path / "converted", conversion=[{**x, "options": {"num_features": count}} for x in rows])
    words = rf"it asks for num_features={count}, and its weights have [\d,]+ bytes in all"
    quickly(lambda: load(tmp_path / "converted"), words)
    change_own(own, attention=f"favor+:num_features={count}")
    quickly(lambda: load_model("causal-lm", own), words)


@pytest.mark.parametrize("side", ["decoder_attention", "cross_attention"])
def test_features_of_a_decoder_are_not_drawn_either(side, tmp_path):
    KernelformerForConditionalGeneration(
        KernelformerConfig(**SMALL, attention="favor+:num_features=8", decoder_start_token_id=0)
    ).save_pretrained(tmp_path)
    (tmp_path / "hashes.json").unlink()
    change_own(tmp_path, **{side: "favor+:num_features=3000000"})
    words = r"it asks for num_features=3000000, and its weights have [\d,]+ bytes in all"
    quickly(lambda: load_model("seq2seq", tmp_path), words)


def change_own(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_hidden_layers": 20_000},
            r"config.json cannot be used: .*num_hidden_layers=20,000, the limit max_layers",
        ),
        ({"hidden_size": 10**6}, r"config.json cannot be used: it asks for .* of shape \(.*1000000"),
        ({"hidden_size": 10**9}, "config.json cannot be used: "),
        ({"attention": "favor+:draw=" + "(" * 20_000}, r"the attention 'favor\+:draw=\(+'... has 20,012 characters"),
    ],
)
def test_a_model_of_this_library_with_such_a_configuration_is_refused(values, message, own):
    change_own(own, **values)
    quickly(lambda: load_model("causal-lm", own), message)


def test_brackets_without_end_are_not_json(own, tmp_path):
    deep = "[" * 100_000
    for content, message in ((deep, "its brackets are nested too deeply"), ("[]", "it is not a JSON object but")):
        (own / "config.json").write_text(content)
        quickly(lambda: KernelformerForCausalLM.from_pretrained(own), f"config.json cannot be used: {message}")
    (own / "config.json").write_text(deep)
    quickly(lambda: load_model("causal-lm", own), "config.json cannot be used: ")
    quickly(lambda: load(own), "config.json is not JSON: its brackets are nested too deeply")
    quickly(lambda: load_source(own), "config.json is not JSON: its brackets are nested too deeply")
    (tmp_path / "run.json").write_text(deep)
    quickly(lambda: read_object(tmp_path / "run.json"), "run.json: not JSON: its brackets are nested too deeply")
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


OWN = {
    "class": KernelformerForCausalLM.from_pretrained,
    "auto class": AutoModelForCausalLM.from_pretrained,
    "run": lambda folder: load_model("causal-lm", folder),
    "start": lambda folder: start_from(KernelformerForCausalLM(KernelformerConfig(**SMALL)), folder),
}
WAYS = {**OWN, "converted": load, "original": load_source}


@pytest.fixture(params=WAYS)
def way(request, tmp_path):
    """A folder of weights without hashes, and a way to read it."""
    register()
    folder = tmp_path / "model"
    if request.param == "converted":
        saved(folder)
    elif request.param == "original":
        original("BertModel", torch.float32).save_pretrained(folder)
    else:
        KernelformerForCausalLM(KernelformerConfig(**SMALL, attention="elu")).save_pretrained(folder)
    (folder / "hashes.json").unlink(missing_ok=True)
    WAYS[request.param](folder)
    return folder, WAYS[request.param]


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_that_names_files_elsewhere_is_refused(absolute, way):
    folder, use = way
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    index = folder / "model.safetensors.index.json"
    outside = weights.rename(folder.parent / "outside.safetensors")
    for name in (str(outside) if absolute else "../outside.safetensors", "inside.safetensors"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
        if name == "inside.safetensors":
            shutil.copyfile(outside, folder / name)
            use(folder)
        else:
            quickly(lambda: use(folder), f"index.json names '{name}', which is not the name of a file in its folder")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_a_folder_of_weights_is_not_followed_unless_that_is_allowed(name, way, monkeypatch):
    folder, use = way
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    quickly(lambda: use(folder), f"{name} leads out of .*/model, by a link to .*{name}; copy what is there, or if you")
    monkeypatch.setenv("KERNELFORMER_FOLLOW_LINKS", "1")
    use(folder)


def test_links_of_the_hubs_cache_belong_to_the_model(way):
    folder, use = way
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "0123abc"
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    use(snapshot)
    (folder.parent / "secret").write_text("{}")
    (snapshot / "more.json").symlink_to("../../secret")
    quickly(lambda: use(snapshot), "more.json leads out of .*0123abc, by a link to .*secret")


def test_pickled_weights_of_a_model_of_this_library_are_refused(way):
    folder, use = way
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    use(folder)  # of safetensors beside them
    weights.unlink()
    quickly(
        lambda: use(folder), r"the weights in .*/model are pickled \(pytorch_model.bin\), and a pickle can run code"
    )


def test_an_adapter_does_not_lead_to_a_model_elsewhere(own, tmp_path):
    record = {"base_model_name_or_path": str(own), "peft_type": "LORA"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(record))
    for use in (KernelformerForCausalLM.from_pretrained, load_source):
        quickly(lambda use=use: use(tmp_path / "adapter"), "has an adapter .* and no model of its own; load the model")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"hidden_size": 10**6},
            r"config.json cannot be used: it asks for .* of shape \(32, 1000000\), .* has \(32, 16",
        ),
        ({"hidden_size": 10**9}, "config.json cannot be used: its sizes are those of no model"),
        ({"vocab_size": 10**12}, r"config.json cannot be used: it asks for .* of shape \(1000000000000, 16\), "),
        (
            {"positions": "learned", "max_position_embeddings": 10**12},
            r"asks for .*places.0.weight of shape \(10+, 16\), and ",
        ),
        ({"attention": "linformer:max_length=1000000000000"}, "it asks for max_length=1000000000000, and its weights"),
        ({"attention": "nprf:relative=1d:max_length=1000000000000"}, "asks for max_length=1000000000000, and its we"),
        ({"attention": "nprf:relative=1d:max_distance=10000000000"}, "asks for max_distance=10000000000, and its"),
        ({"attention": "nprf:relative=1d:scheme=t5:num_buckets=10000000000:max_distance=10000000000"}, "num_buckets="),
        (
            {"attention": "nprf:relative=2d:grid=(1000000, 1000000)"},
            r"it asks for grid=\(1000000, 1000000\), and its we",
        ),
        ({"attention": "relu:eps=1.5"}, "config.json cannot be used: it asks for .*settings of shape"),
        ({"attention": None}, "attention must be a string such as 'favor\\+', or a list of them, got None"),
        (
            {"num_labels": 10**9},
            "asks for num_labels=1,000,000,000, the limit max_labels is 1,000,000; if you trust it",
        ),
        ({"dtype": "float7"}, "has a value of another kind than transformers takes: .*float7"),
        ({"id2label": 5}, "has a value of another kind than transformers takes: "),
        ({"architectures": 5}, "architectures must be names of classes, got 5"),
    ],
)
@pytest.mark.parametrize("way", ["class", "auto class", "run"], indirect=True)
def test_a_configuration_that_its_weights_have_no_room_for_is_refused_before_it_costs_anything(way, values, message):
    folder, use = way
    change_own(folder, **values)
    quickly(lambda: use(folder), message)


def test_a_header_of_very_many_tensors_is_refused(own, tmp_path):
    header = {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
    content = json.dumps(header).encode()
    (own / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    words = (
        "model.safetensors has 200,000 tensors, the limit max_tensors is 100,000; if you trust it, raise it by kernelfo"
    )
    quickly(lambda: load_model("causal-lm", own), words)
    saved(tmp_path / "converted")
    (tmp_path / "converted" / "hashes.json").unlink()
    (tmp_path / "converted" / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    quickly(lambda: load(tmp_path / "converted"), words)


def test_an_original_to_convert_is_looked_at_first(tmp_path):
    original("BertModel", torch.float32).save_pretrained(tmp_path)
    change_own(tmp_path, num_hidden_layers=5000)
    quickly(
        lambda: load_source(tmp_path), "config.json asks for num_hidden_layers=5,000, the limit max_layers is 1,000"
    )


def test_a_long_attention_is_refused_before_it_is_read():
    quickly(
        lambda: parse_attention("favor+:draw=" + "[" * 20_000), "has 20,012 characters, the limit max_attention_cha"
    )
    assert parse_attention("favor+:draw=" + "[" * 1500)[1]["draw"] == "[" * 1500  # too deep for Python, and so a text


def test_every_limit_is_raised_by_the_environment_or_the_command(monkeypatch):
    for name, value in LIMITS.items():
        assert limit(name) == value
        monkeypatch.setenv(f"KERNELFORMER_{name.upper()}", "")
        set_limit(name, value + 7)
        check_limit(name, value + 7, "it")
        with pytest.raises(ValueError, match=rf"it, the limit {name} is [\d,]+; .* --limit {name}={value + 8} COMMAND"):
            check_limit(name, value + 8, "it")
    monkeypatch.setenv("KERNELFORMER_MAX_LAYERS", "many")
    with pytest.raises(ValueError, match="KERNELFORMER_MAX_LAYERS must be an integer of at least 0, got 'many'"):
        limit("max_layers")
    assert CliRunner().invoke(app, ["--limit", "max_layers=5", "--follow-links", "list", "tasks"]).exit_code == 0
    assert (limit("max_layers"), limit("follow_links")) == (5, 1)
    refused = CliRunner().invoke(app, ["--limit", "layers=5", "list"])
    assert refused.exit_code == 2
    assert "unknown limit 'layers'; " in refused.stderr


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(
        tmp_path / "train.npz", images=np.zeros((64, 32, 32, 3), np.uint8), labels=np.zeros(64, np.int64)
    )
    monkeypatch.setenv("KERNELFORMER_MAX_UNPACKED_BYTES", "100000")
    task = make_task("images", data=tmp_path, cache=tmp_path / "cache")
    quickly(
        lambda: task.split("train"),
        r"images of .*npz unpacks to 196,\d+ bytes, the limit max_unpacked_bytes is 100,000; ",
    )
    monkeypatch.setenv("KERNELFORMER_MAX_UNPACKED_BYTES", "200000")
    assert len(make_task("images", data=tmp_path, cache=tmp_path / "cache").split("train")) > 0


def test_an_archive_is_not_unpacked_into_a_cache_without_room(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((64, 32, 32, 3), np.uint8), labels=np.zeros(64, np.int64))
    monkeypatch.setattr(npz, "MEMORY", 0)
    monkeypatch.setattr(npz.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    task = make_task("images", data=tmp_path / "a.npz", cache=tmp_path / "cache")
    quickly(
        lambda: task.split("train"), r"unpacks to 196,608 bytes, and .*cache has room for 1,000; make room, or give"
    )
    assert not (tmp_path / "cache").exists()


def test_features_that_a_checkpoint_cannot_have_are_not_drawn(tmp_path):
    weights = tmp_path / "checkpoint-3"
    shutil.copytree(OLD / "run", tmp_path, dirs_exist_ok=True)
    head = json.loads((tmp_path / "run.json").read_text())
    head["run"] |= {"attention": "favor+:num_features=10000000"}
    head["run"]["task_options"]["data"] = str(OLD / "text.txt")
    (tmp_path / "run.json").write_text(json.dumps(head))
    run = Run.from_json(head["run"])
    size = (weights / "model.safetensors").stat().st_size
    words = rf"run.json: it asks for num_features=10000000, and its weights have {size:,} bytes in all; put it right"
    quickly(lambda: train(run, tmp_path, resume=True, quiet=True), words)
