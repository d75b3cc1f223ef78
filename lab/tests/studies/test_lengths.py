"""The cost of whole models over the length: the original's and its converted selves'."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.errors import WorkerError  # noqa: E402
from kernelformer.hf import conversion  # noqa: E402
from kernelformer_lab.studies import lengths as measured  # noqa: E402
from kernelformer_lab.studies import lengths as study  # noqa: E402
from kernelformer_lab.studies.lengths import (  # noqa: E402
    STUDY,
    LengthsSettings,
    Subject,
    between,
    crossover,
    crossovers,
    curve,
    find_row,
    predicted,
    refusal,
)

pytestmark = pytest.mark.usefixtures("quick_gc")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}
SPEC = "favor+:num_features=8"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=20)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A folder with a configuration alone."""
    path = tmp_path_factory.mktemp("decoder")
    transformers.LlamaConfig(**SMALL, num_key_value_heads=1).save_pretrained(path)
    return path


@pytest.fixture
def here(monkeypatch):
    """Jobs are done in this process, which is faster, and listed."""
    done = []

    def run(work, *, threads, allocator, **given):
        done.append(given)
        return json.loads(json.dumps(work(**json.loads(json.dumps(given)))))

    monkeypatch.setattr(study, "run_in_process", run)
    return done


def settings(folder, **options):
    given = {"attention": (SPEC,), "lengths": (16, 32), "budget": 0.01, "rounds": 1, **options}
    return LengthsSettings(**{"model": folder, "random": True, **given})


def test_a_table_of_positions_is_stretched_between_its_ends(encoder):
    model = transformers.BertModel.from_pretrained(encoder)
    before = model.embeddings.position_embeddings.weight.detach().clone()
    same, nothing = measured.stretch(model, 20)
    assert same is model
    assert nothing == []
    longer, lines = measured.stretch(model, 39)
    assert lines == ["embeddings.position_embeddings.weight: 20 rows stretched to 39"]
    after = longer.embeddings.position_embeddings.weight
    torch.testing.assert_close(after[::2], before)
    torch.testing.assert_close(after[1::2], (before[1:] + before[:-1]) / 2)
    torch.testing.assert_close(longer.encoder.layer[1].output.dense.weight, model.encoder.layer[1].output.dense.weight)
    assert torch.equal(model.embeddings.position_embeddings.weight, before)
    assert longer(torch.ones(1, 39, dtype=torch.long)).last_hidden_state.shape == (1, 39, 16)


@pytest.mark.parametrize(
    ("kind", "options", "room"),
    [
        ("Bert", {"max_position_embeddings": 20}, 20),
        ("Roberta", {"max_position_embeddings": 22, "pad_token_id": 1}, 20),
        ("GPT2", {"n_positions": 20}, 20),
        ("OPT", {"max_position_embeddings": 20, "ffn_dim": 16, "word_embed_proj_dim": 16}, 20),
        ("Llama", {"max_position_embeddings": 20}, None),
    ],
)
def test_positions_of_all_kinds_can_be_stretched(kind, options, room):
    config = getattr(transformers, f"{kind}Config")(**SMALL, **options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    assert measured.room(model) == room
    longer, lines = measured.stretch(model, 33)
    assert len(lines) == (room is not None)
    assert longer(torch.full((1, 33), 7)).last_hidden_state.shape[1] == 33


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_no_weight_is_read_from_its_file_during_a_pass(encoder):
    """Its pages would count as memory of the pass that touches them first."""
    model, _ = Subject(str(encoder)).build(16)
    gc.collect()
    assert str(encoder / "model.safetensors") not in Path("/proc/self/maps").read_text()
    assert model.embeddings.word_embeddings.weight.std() > 0


def test_contenders_share_their_weights_and_nothing_else(encoder):
    model, _ = Subject(str(encoder)).build(16)
    other, eager = measured.contender(model, SPEC), measured.contender(model, "eager")
    assert not hasattr(model, "conversion")
    assert model.config._attn_implementation == "sdpa"
    assert eager.config._attn_implementation == "eager"
    assert conversion(other).layers[0].method == "favor+"
    weights = dict(other.named_parameters())
    assert all(weights[name] is x for name, x in model.named_parameters())


def test_the_crossover_lies_where_two_powers_meet():
    lengths = (16, 64, 256, 1024)
    square, line = {n: n**2 for n in lengths}, {n: 100 * n for n in lengths}
    at, words = crossover(square, line)
    assert at == pytest.approx(100)
    assert words == "100"
    assert crossover(line, square)[1] == "none up to 1024"
    assert crossover(square, {n: n for n in lengths}) == (None, "below at 16 already")
    assert crossover({16: 1.0}, {32: 1.0}) == (None, "not measured")


def test_a_crossover_is_where_it_stays_below():
    base = {16: 1.0, 32: 1.0, 64: 1.0, 128: 1.0}
    at, _ = crossover(base, {16: 0.9, 32: 1.1, 64: 1 / 1.1, 128: 0.5})
    assert at == pytest.approx(32 * 2**0.5)


def test_the_last_growth_goes_on():
    assert predicted({8: 1.0, 16: 2.0, 32: 8.0}, 64) == pytest.approx(32)
    assert predicted({16: 2.0, 32: 4.0}, 64) == pytest.approx(8)
    assert predicted({16: 2.0, 32: 1.0}, 64) == pytest.approx(2)  # noise: no longer text is faster
    assert predicted({32: 1.0}, 64) == pytest.approx(4)
    assert predicted({64: 1.0}, 64) is None


def made(figures):
    """Rows of a forward: seconds and peak by attention and length."""
    rows = []
    for name, points in figures.items():
        for length, (seconds, peak) in points.items():
            find_row(rows, "forward", length, name).update(seconds=seconds, peak=peak)
    return rows


def test_what_would_take_too_long_is_not_run():
    rows = made({"sdpa": {16: (1.0, 1), 32: (4.0, 1)}})
    row = find_row([], "forward", 128, "sdpa")
    assert refusal(rows, row, 65) == ""
    assert refusal(rows, row, 63) == "about 64 s, and the limit is 63 s"
    rows[0]["peak"], rows[1]["peak"] = 2**40, 2**41
    assert "needs about 8192 GiB" in refusal(rows, row, 65)


def test_crossovers_are_those_of_the_curves():
    lengths = (16, 32, 64)
    rows = made({"sdpa": {n: (n**2 / 1e6, n**2) for n in lengths}, "elu": {n: (n / 5e4, 20 * n) for n in lengths}})
    (line,) = crossovers(rows, ("sdpa",))
    assert line["seconds"] == pytest.approx(20)
    assert between(curve(rows, "forward", "elu", "peak"), 20) == pytest.approx(400)


def test_a_stopped_study_goes_on_where_it_was(encoder, tmp_path, here, monkeypatch):
    mine = settings(encoder, backward=True)
    whole, count = study.job, 0

    def stopping(request, settings):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return whole(request, settings)

    monkeypatch.setattr(study, "job", stopping)
    with pytest.raises(KeyboardInterrupt):
        STUDY.measure(mine, tmp_path)
    logged, steps = [], []
    result = STUDY.measure(mine, tmp_path, logged.append, lambda: steps.append(1))
    asked = [(x["what"], x["kind"], x["length"], tuple(x["names"])) for x in here]
    assert len(asked) == len(set(asked)) == len(logged) == len(steps) == study.steps(mine) == 16
    assert all(x["seconds"] and x["peak"] is not None and not x["note"] for x in result.rows)
    assert len(result.rows) == 2 * 2 * 3
    more = STUDY.measure(settings(encoder, backward=True, attention=(SPEC, "elu")), tmp_path)
    assert {tuple(x["names"]) for x in here[16:]} == {("elu",)}
    assert len(more.rows) == 2 * 2 * 4
    assert result.figures["stretched"] == ["embeddings.position_embeddings.weight: 20 rows stretched to 32"]


def test_a_failure_is_noted_and_shown(encoder, tmp_path, monkeypatch):
    def job(request, settings):
        if "eager" in request["names"] and request["length"] == 32 and request["what"] == "memory":
            raise WorkerError("the process ended with code -9")
        return {name: {"seconds": 1.0, "rounds": 1, "peak": 5} for name in request["names"]}

    monkeypatch.setattr(study, "job", job)
    result = STUDY.measure(settings(encoder), tmp_path)
    (row,) = [x for x in result.rows if x["note"]]
    assert (row["attention"], row["length"], row["seconds"]) == ("eager", 32, None)
    table = study.tables(result)[0]
    assert "not run: eager, 32 tokens: the process ended with code -9" in table.caption
    assert "rows stretched to 32" in table.caption


def test_figures_of_another_model_are_not_mixed_in(encoder, decoder, tmp_path, here):
    STUDY.measure(settings(encoder, memory=False), tmp_path)
    with pytest.raises(ValueError, match=r"has figures of another model or machine .*choose another --out"):
        STUDY.measure(settings(decoder, memory=False), tmp_path)
    (tmp_path / "lengths.json").write_text('{"rows": 3}')
    with pytest.raises(ValueError, match="is not of this study"):
        STUDY.measure(settings(encoder, memory=False), tmp_path)


def test_the_state_does_not_grow_while_a_cache_does(decoder, tmp_path, here, monkeypatch):
    monkeypatch.setattr(study, "FIRST_CONTEXT", 8)
    mine = settings(decoder, generate=16, memory=False, lengths=(8,), baselines=("sdpa",))
    result = STUDY.measure(mine, tmp_path)
    assert result.figures["about"]["task"] == "causal"
    cache, state = (curve(result.rows, measured.TOKEN, name, "peak") for name in ("sdpa", SPEC))
    assert cache == {8: 8 * 2 * 2 * 8 * 4, 16: 16 * 2 * 2 * 8 * 4}  # tokens, layers, keys and values, D, bytes
    assert state[8] == state[16] > 0
    assert all(x["seconds"] for x in result.rows)


def test_an_encoder_with_random_weights_can_be_run_as_a_decoder(encoder, tmp_path, here):
    mine = settings(encoder, task="causal", baselines=("sdpa",), lengths=(16,), memory=False)
    assert STUDY.measure(mine, tmp_path).figures["about"]["task"] == "causal"


def test_a_process_of_its_own_weighs_a_pass(encoder):
    """Exact attention without fusion holds two matrices of weights at least: before the softmax and after it."""
    request = {"what": "memory", "kind": "forward", "length": 1024, "names": ["eager"]}
    peak = study.job(request, settings(encoder, random=False))["eager"]["peak"]
    matrix = 2 * 1024**2 * 4
    assert 1.5 * matrix < peak < 8 * matrix


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (0,)}, "lengths must be an integer of at least 1, got 0"),
        ({"lengths": ()}, "lengths must name at least one"),
        ({"attention": ("elo",)}, "did you mean 'elu'?"),
        ({"baselines": ("flash",)}, "unknown baseline 'flash'"),
        ({"generate": 5}, "a context of at least 128 tokens, got 5"),
        ({"rounds": 1000}, "rounds must be at most 100, got 1000"),
        ({"limit": 0}, "limit must be .* at least 0.01, got 0"),
    ],
)
def test_a_wrong_setting_is_named(encoder, options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        study.steps(settings(encoder, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "causal"], "is of the task 'encoder', got --task causal"),
        (["--task", "seq"], "unknown task 'seq'; choose from"),
        (["--generate", "128"], "is an encoder and cannot generate"),
        (["--attention", "rfa-gate"], "rfa-gate"),
        (["--lengths", "16,x"], "--lengths"),
    ],
)
def test_wrong_input_of_the_command_is_named(encoder, tmp_path, here, options, message):
    given = ["study", "lengths", str(encoder), *options, "--out", str(tmp_path)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not here


def test_a_folder_without_a_model_and_one_of_two_parts_are_named(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a model"):
        Subject(str(tmp_path), random=True).build(8)
    transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=40).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="lengths are measured of encoders and decoders of one text"):
        Subject(str(tmp_path), random=True).build(8)
