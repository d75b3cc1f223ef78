"""Sharded models learn what one process learns, and their checkpoints load on any number of processes."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import kernelformer as kf
from kernelformer.hf import convert
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.parallel import load_sharded, save_sharded, shard
from kernelformer.parallel.sharding import difference, find_blocks
from rank_processes import run_ranks
from tiny_models import VOCAB, inputs, tiny, tokens

BATCH = 6  # samples; a multiple of all numbers of processes
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32, "dropout": 0.0}
PAIRS = {"decoder_start_token_id": 1, "pad_token_id": 0}


def own(kind, attention, **settings):
    torch.manual_seed(0)
    return MODELS[kind](KernelformerConfig(**SIZES, attention=attention, **settings)).double()


def converted(kind, method, **options):
    model = convert(tiny(kind), method, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def calibrated():
    model = own("causal-lm", "favor++:num_features=8")
    kf.calibrate(model, [{"input_ids": tokens(2, 9), "use_cache": False}])
    return model


def recomputing():
    model = own("causal-lm", "favor+:num_features=8")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    kf.replace_attention(model, "favor+", num_features=8)
    return model.double()


MODELS_OF_TESTS = {
    "drawn": lambda: own("causal-lm", "favor+:num_features=8"),
    "learned": lambda: own("masked-lm", "gmm-prf:num_features=8:components=2"),
    "shared table": lambda: own("seq2seq", "nprf:num_features=8:relative=1d", share_bias=True, **PAIRS),
    "near and far": lambda: own("causal-lm", "loglinear:num_features=8:window=4:sinks=1:rotary=True"),
    "calibrated": calibrated,
    "recomputed": recomputing,
    "plain": plain,
    "BERT": lambda: converted("BertForMaskedLM", "loglinear", num_features=8),
    "ALBERT": lambda: converted("AlbertModel", "favor+", num_features=8),
    "Llama": lambda: converted("LlamaForCausalLM", "favor+", num_features=8, window=4),
    "T5": lambda: converted("T5ForConditionalGeneration", "favor+", num_features=8),
}


def call(model, part):
    ids = tokens(BATCH, 11)[part]
    if not hasattr(model, "config"):
        return model(ids)
    given = inputs(model, ids)
    if "decoder_input_ids" in given:
        given["decoder_input_ids"] = tokens(BATCH, 7, seed=2)[part]
    out = model(**given, **({"use_cache": False} if getattr(model.config, "use_cache", False) else {}))
    return out.logits if "logits" in out else out.last_hidden_state


def learn(model, optimizer, part=slice(None), steps=3):
    """Losses and norms of gradients; in float64, of what the model computes itself."""
    numbers = []
    for _ in range(steps):
        loss = call(model, part).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(torch.stack([loss.detach(), whole(norm.detach())]))
    return torch.stack(numbers)


def make_optimizer(model):
    return torch.optim.AdamW(kf.parameter_groups(model, lr=0.02), lr=0.01)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def drawing(model):
    return any(x.is_random for x in model.modules() if isinstance(x, kf.feature_maps.FeatureMap))


def mine(rank):
    share = BATCH // dist.get_world_size()
    return slice(rank * share, (rank + 1) * share)


def check_model(name, rank):
    one, many = MODELS_OF_TESTS[name]().train(), MODELS_OF_TESTS[name]().train()
    count = len(list(many.parameters()))
    shard(many)
    assert all(isinstance(x, DTensor) for x in many.parameters()), name
    for model in (one, many) if drawing(one) else ():
        kf.redraw(model, every=2)
    want = learn(one, make_optimizer(one))
    numbers = learn(many, make_optimizer(many), mine(rank))
    dist.all_reduce(numbers)
    torch.testing.assert_close(numbers / dist.get_world_size(), want, rtol=1e-9, atol=1e-10, msg=name)
    assert len(list(many.parameters())) == count
    for (key, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-7, atol=1e-8, msg=f"{name}: {key}")
    buffers = dict(many.named_buffers())
    assert not difference(buffers), name
    assert all(torch.equal(x, buffers[key]) for key, x in one.named_buffers()), name
    if drawing(many):
        assert {int(x) for key, x in buffers.items() if key.endswith(".draw")} == {1}, name


def check_resampling(rank):
    torch.manual_seed(rank)  # draws are functions of the seed of the map
    model = shard(MODELS_OF_TESTS["drawn"]())
    for module in model.modules():
        if isinstance(module, kf.modules.AttentionCore):
            module.resample()
    buffers = dict(model.named_buffers())
    assert not difference(buffers)
    assert {int(x) for name, x in buffers.items() if name.endswith(".draw")} == {1}


def check_refusals(rank, folder):
    other = KernelformerConfig(**SIZES, attention="favor+:num_features=8", seed=rank)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"not the same on all processes: stack.*other values on process 1 than on 0"):
        shard(MODELS["causal-lm"](other))
    methods = ("favor+:num_features=8", "elu")
    with pytest.raises(ValueError, match=r"not the same on all processes: .* on process 0 and .* on 1; build it with"):
        shard(own("causal-lm", methods[rank]))
    with pytest.raises(ValueError, match=r"Linear has no list of blocks with attention of this library"):
        shard(nn.Linear(2, 2) if rank else MODELS_OF_TESTS["drawn"]())  # one that is refused on one process alone
    model = shard(MODELS_OF_TESTS["calibrated"]())
    with pytest.raises(ValueError, match=r"is sharded already"):
        shard(model)
    kf.calibrate(model, [{"input_ids": tokens(2, 9, seed=rank), "use_cache": False}])
    with pytest.raises(ValueError, match=r"the same on all processes: stack.* has other values on process 1 than on 0"):
        save_sharded(folder / "differ", model)
    model = shard(MODELS_OF_TESTS["drawn"]())
    with pytest.raises(ValueError, match=r"group 0 of SGD has a parameter that .* has not; build the optimizer after"):
        save_sharded(folder / "foreign", model, torch.optim.SGD(MODELS_OF_TESTS["drawn"]().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"extra must hold plain values .*, got .*set"):
        save_sharded(folder / "values", model, extra={"x": {1}} if rank == 0 else {})
    dist.barrier()
    assert not list(folder.iterdir())


def check_checkpoint(rank, folder, expected):
    model = shard(MODELS_OF_TESTS["learned"]())
    kf.redraw(model, every=2)
    optimizer = make_optimizer(model)
    save_sharded(folder / "first", model, optimizer)
    learn(model, optimizer, mine(rank))
    save_sharded(folder / "third", model, optimizer, extra={"step": 3})
    with pytest.raises(ValueError, match=r"third exists already, and a checkpoint replaces nothing"):
        save_sharded(folder / "third", model)
    tied = shard(MODELS_OF_TESTS["BERT"]())
    save_sharded(folder / "tied", tied)
    state = {name: whole(x).clone() for name, x in model.state_dict().items()}
    moments = [whole(x).clone() for y in optimizer.state.values() for x in y.values()]
    rest = learn(model, optimizer, mine(rank))
    if rank == 0:
        torch.save({"state": state, "moments": moments}, expected)
    other = shard(MODELS_OF_TESTS["learned"]())
    kf.redraw(other, every=2)
    optimizer = make_optimizer(other)
    assert load_sharded(folder / "third", other, optimizer) == {"step": 3}
    assert torch.equal(learn(other, optimizer, mine(rank)), rest)
    assert load_sharded(folder / "first", other, optimizer) == {}  # back to before the first step
    assert not optimizer.state


def two_processes(rank, base):
    for name in MODELS_OF_TESTS:
        check_model(name, rank)
    check_resampling(rank)
    check_refusals(rank, base / "refused")
    check_checkpoint(rank, base / "saved", base / "expected.pt")


def three_processes(rank, base):
    expected = torch.load(base / "expected.pt", weights_only=True)
    model = shard(MODELS_OF_TESTS["learned"]())
    optimizer = make_optimizer(model)
    load_sharded(base / "saved" / "third", model, optimizer)
    for name, x in model.state_dict().items():
        assert torch.equal(whole(x), expected["state"][name]), name
    moments = [whole(x) for y in optimizer.state.values() for x in y.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, expected["moments"], strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    base = tmp_path_factory.mktemp("sharded")
    (base / "refused").mkdir()
    run_ranks(two_processes, 2, base)
    return base


def test_two_processes_learn_what_one_learns_and_three_load_what_two_saved(saved):
    names = {x.name for x in (saved / "saved" / "third").iterdir()}
    assert names == {
        "sharded.json",
        "hashes.json",
        *(f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)),
    }
    run_ranks(three_processes, 3, saved)


def test_one_process_without_a_group_loads_what_two_saved_and_writes_an_ordinary_folder(saved, tmp_path):
    expected = torch.load(saved / "expected.pt", weights_only=True)
    model = MODELS_OF_TESTS["learned"]()
    optimizer = make_optimizer(model)
    assert load_sharded(saved / "saved" / "third", model, optimizer) == {"step": 3}
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected["state"][name]), name
    moments = [x for y in optimizer.state.values() for x in y.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, expected["moments"], strict=True))
    assert [(x["lr"], x["betas"]) for x in optimizer.param_groups] == [(0.01, (0.9, 0.999)), (0.02, (0.9, 0.999))]
    model.save_pretrained(tmp_path / "model")
    for name, x in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(x, expected["state"][name]), name
    again = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(call(again, slice(None)), call(model.float().eval(), slice(None)))
    save_sharded(tmp_path / "again", again)
    load_sharded(tmp_path / "again", MODELS_OF_TESTS["learned"]().float())


def test_weights_with_two_names_are_saved_once(saved):
    model = MODELS_OF_TESTS["BERT"]()
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    load_sharded(saved / "saved" / "tied", model)
    want = MODELS_OF_TESTS["BERT"]()
    assert all(torch.equal(x, want.state_dict()[name]) for name, x in model.state_dict().items())


class Code:
    """Code that unpickling would run."""

    def __reduce__(self):
        return print, ("this must not be run",)


def edit(folder, **values):
    record = json.loads((folder / "sharded.json").read_text())
    (folder / "sharded.json").write_text(json.dumps({**record, **values}))


def flip(folder):
    file = folder / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: (x / "sharded.json").unlink(), "is not a checkpoint of save_sharded: it has no sharded.json"),
        (lambda x: (x / "shard-00001-model-00001-of-00001.safetensors").unlink(), "shard-00001-.* is missing"),
        (lambda x: (x / "hashes.json").unlink(), "hashes.json is missing"),
        (lambda x: (x / "more.safetensors").write_bytes(b""), "more.safetensors was not saved with it"),
        (flip, "shard-00002-.* has changed since it was saved"),
        (lambda x: edit(x, extra={"step": 4}), "sharded.json has changed since it was saved"),
        (lambda x: edit(x, format=2), "has format 2, this version reads 1"),
        (lambda x: edit(x, tensors=[]), "sharded.json is damaged"),
        (lambda x: torch.save(Code(), x / "sharded.json"), "sharded.json is damaged"),
    ],
)
def test_a_folder_that_is_not_as_it_was_is_refused_and_nothing_of_it_is_run(saved, tmp_path, damage, message, capsys):
    folder = shutil.copytree(saved / "saved" / "third", tmp_path / "third")
    damage(folder)
    model = MODELS_OF_TESTS["learned"]()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_sharded(folder, model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert "this must not be run" not in capsys.readouterr().out


def test_pickles_beside_the_files_are_not_looked_at(saved, tmp_path, capsys):
    folder = shutil.copytree(saved / "saved" / "third", tmp_path / "third")
    for name in (".metadata", "__0_0.distcp"):  # of torch's default storage
        (folder / name).write_bytes(pickle.dumps(Code()))
    load_sharded(folder, MODELS_OF_TESTS["learned"]())
    assert "this must not be run" not in capsys.readouterr().out


def test_other_models_and_optimizers_are_refused_by_name(saved):
    folder = saved / "saved" / "third"
    with pytest.raises(ValueError, match=r"another model than this \w+: .*feature_map.mu is .* there and missing here"):
        load_sharded(folder, own("masked-lm", "favor+:num_features=8"))
    model = MODELS_OF_TESTS["learned"]()
    with pytest.raises(ValueError, match=r"an optimizer with other groups of parameters: of .* there and .* here"):
        load_sharded(folder, model, torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.SGD(kf.parameter_groups(model), lr=0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=r"another optimizer than this SGD: .*step is \(\) in float32 there and missing here"
    ):
        load_sharded(folder, model, optimizer)
    assert not optimizer.state
    bert = MODELS_OF_TESTS["BERT"]()
    with pytest.raises(ValueError, match=r"tied was saved without an optimizer"):
        load_sharded(saved / "saved" / "tied", bert, torch.optim.SGD(bert.parameters()))


def test_blocks_are_found_once_and_shards_need_processes():
    assert list(find_blocks(MODELS_OF_TESTS["T5"]())) == [
        *(f"encoder.block.{i}" for i in (0, 1)),
        *(f"decoder.block.{i}" for i in (0, 1)),
    ]
    assert list(find_blocks(plain())) == ["1.layers.0", "1.layers.1"]
    with pytest.raises(ValueError, match=r"shard needs processes .* torchrun"):
        shard(plain())
