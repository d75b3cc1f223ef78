"""The study of whole encoders: what is timed, the bounds, what is not run, and what is shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from kernelformer.measure import encoder as encoder_worker
from kernelformer.measure.benchmark import WorkerError
from kernelformer.measure.encoder import PASSES, Case, build, measure_memory, measure_time, step
from kernelformer.studies import encoder
from kernelformer.studies.encoder import Found, Row, Setting, Size

NAMES = ("softmax", "favor+:num_features=8", "opt", "opt+qk")
TINY = Case("tiny", 2, 16, 24, 2, 32)


@pytest.fixture(autouse=True)
def _one_thread(_threads):
    torch.set_num_threads(1)  # steps this small would mostly wait for the other one


@pytest.fixture
def tiny(monkeypatch):
    """Two tiny sizes, measured in this process."""
    sizes = {"tiny": Size(2, 16, 24, (32, 64)), "flat": Size(1, 16, 16, (32,))}
    monkeypatch.setattr(encoder, "SIZES", sizes)

    def job(kind, case, wanted, setting):
        return encoder_worker.do(
            {"kind": kind, "case": vars(case), "wanted": wanted, "rounds": setting.rounds, "budget": setting.budget}
        )

    monkeypatch.setattr(encoder, "job", job)
    return {"sizes": tuple(sizes), "layers": 1, "attentions": NAMES, "rounds": 2, "budget": 1e-9}


def by_hand(model, tokens):
    """The encoder whose attention is the identity, from its weights."""
    width = model.config.hidden_size
    x = model.embeddings.tokens(tokens) * width**0.5
    for block in model.stack.blocks:
        x = x + block.attention.out(block.attention.value(block.attention_norm(x)))
        x = x + block.narrow(F.gelu(block.wide(block.feed_norm(x))))
    return model.stack.norm(x)


@pytest.mark.parametrize("name", ["opt", "opt+qk"])
def test_the_bound_returns_the_values(name):
    model, tokens = build(TINY, name).eval(), TINY.tokens()
    torch.testing.assert_close(model(tokens).last_hidden_state, by_hand(model, tokens))


def test_the_bound_still_projects_queries_and_keys():
    model, seen = build(TINY, "opt"), []
    for block in model.stack.blocks:
        block.attention.query.register_forward_hook(lambda *_: seen.append("query"))
        block.attention.key.register_forward_hook(lambda *_: seen.append("key"))
    step(model, TINY.tokens(), "forward")
    assert seen == ["query", "key"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_every_parameter_its_gradient(name):
    model = build(TINY, name)
    step(model, TINY.tokens(), "forward")
    assert all(x.grad is None for x in model.parameters())
    step(model, TINY.tokens(), "forward + backward")
    missing = [key for key, x in model.named_parameters() if x.grad is None]
    alone = ("attention.query.weight", "attention.query.bias", "attention.key.weight", "attention.key.bias")
    assert missing == ([f"stack.blocks.{i}.{x}" for i in range(2) for x in alone] if name == "opt" else [])
    want = model(TINY.tokens()).last_hidden_state.square().mean()
    (grad,) = torch.autograd.grad(want, [model.stack.norm.weight])
    torch.testing.assert_close(model.stack.norm.weight.grad, grad)


def test_both_bounds_give_the_last_block_the_same_gradients():
    models = [build(TINY, name) for name in ("opt", "opt+qk")]
    for model in models:
        step(model, TINY.tokens(), "forward + backward")
    for part in ("value", "out"):
        one, two = (getattr(model.stack.blocks[-1].attention, part).weight.grad for model in models)
        torch.testing.assert_close(one, two)


def test_all_attentions_have_the_same_first_weights():
    one, two = (build(TINY, name).state_dict() for name in ("softmax", "favor+:num_features=8"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(TINY.tokens(), TINY.tokens())
    assert TINY.tokens().shape == (1, 32)


def test_steps_are_interleaved_and_the_first_is_not_counted():
    calls = []

    def timed(model, tokens, kind):
        calls.append((kind, type(model.stack.blocks[0].attention.core).__name__))
        return float(len(calls))

    wanted = {"forward": ["softmax", "opt"], "forward + backward": ["opt"]}
    found = measure_time(TINY, wanted, 3, 1e-9, timed)
    assert (
        calls
        == [("forward", x) for _ in range(4) for x in ("SoftmaxCore", "Values")]
        + [("forward + backward", "Values")] * 4
    )
    assert found == {
        "forward": {"softmax": {"seconds": 5.0, "rounds": 3}, "opt": {"seconds": 6.0, "rounds": 3}},
        "forward + backward": {"opt": {"seconds": 11.0, "rounds": 3}},
    }


def test_there_are_more_rounds_while_the_budget_lasts_but_not_without_end():
    found = measure_time(TINY, {"forward": ["opt"]}, 2, 1e9, lambda *_: 1.0)
    assert found["forward"]["opt"]["rounds"] == encoder_worker.MOST_ROUNDS


def test_an_attention_that_runs_out_of_memory_is_noted_and_the_others_go_on():
    def timed(model, tokens, kind):
        if not isinstance(model.stack.blocks[0].attention.core, encoder_worker.Values):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")
        return 1.0

    found = measure_time(TINY, {"forward": ["softmax", "opt"]}, 2, 1e-9, timed)["forward"]
    assert found["softmax"] == {"problem": "DefaultCPUAllocator: can't allocate memory"}
    assert found["opt"] == {"seconds": 1.0, "rounds": 2}


def test_the_papers_cases():
    cases = [(x.size, x.layers, x.length) for x in Setting().cases()]
    assert cases[:4] == [("regular", 6, n) for n in (1024, 2048, 4096, 8192)]
    assert cases[4:8] == [("regular", n, m) for n in (12, 20) for m in (1024, 4096)]
    assert cases[8:] == [
        *(("small", 6, n) for n in (1024, 2048, 4096, 8192, 16384)),
        *(("small", n, m) for n in (12, 20) for m in (1024, 4096)),
    ]
    regular, small = (next(Setting(sizes=[x]).cases()) for x in ("regular", "small"))
    assert (regular.heads, regular.width, regular.feed_forward) == (8, 512, 2048)
    assert (small.heads, small.width, small.feed_forward) == (1, 64, 64)
    some = Setting(sizes=["small"], lengths=[128, 64], layers=2, depths=[4], deep_lengths=[96])
    assert [(x.layers, x.length) for x in some.cases()] == [(2, 64), (2, 96), (2, 128), (4, 96)]
    assert [x.length for x in Setting(sizes=["small"], lengths=[64], depths=[]).cases()] == [64]


def test_the_whole_study(tiny, tmp_path):
    setting, told = Setting(**tiny, depths=(2,), deep_lengths=(32,)), []
    found = encoder.run(setting, told.append)
    assert len(told) == encoder.steps(setting) == 5 * 5
    places = [("tiny", 1, 32), ("tiny", 1, 64), ("tiny", 2, 32), ("flat", 1, 32), ("flat", 2, 32)]
    assert [(x.size, x.layers, x.length, x.kind, x.attention) for x in found.rows] == [
        (*place, kind, name) for place in places for kind in PASSES for name in NAMES
    ]
    assert all(x.seconds > 0 and x.rounds == 2 and x.peak >= 0 and not x.note for x in found.rows)
    record = json.loads(json.dumps(found.as_json()))
    assert record["heap"] == "default"
    assert len(record["rows"]) == 40
    tables = encoder.tables(found)
    assert [x.row_count for x in tables] == [12, 12, 8, 8]
    assert [x.header for x in tables[0].columns] == [
        *("layers", "tokens", "attention", "a step", "faster by", "of opt", "of opt+qk", "peak", "rounds")
    ]
    encoder.picture(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_to_the_same_place():
    rows = [Row("tiny", 1, n, "forward", name, n * x, 2) for n in (32, 64) for name, x in (("softmax", 3), ("opt", 1))]
    table = encoder.tables(Found([*rows, Row("tiny", 1, 64, "forward", "relu", 96.0, 2)]))[0]
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["faster by"] == ["", "3.00x", "", "3.00x", "2.00x"]
    assert columns["of opt"] == ["3.00x", "", "3.00x", "", "1.50x"]


def quadratic(kind, case, wanted, setting):
    """A step takes a second at 32 tokens and one layer, and grows with the square of the length; memory with both."""
    scale = case.length / 32
    one = {"seconds": scale**2 * case.layers, "rounds": 5} if kind == "time" else {"peak": int(scale * case.layers)}
    return {name: dict.fromkeys(some, one) for name, some in wanted.items()}


def shown(table):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_what_would_take_too_long_is_marked_as_not_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "job", quadratic)
    more = {"sizes": ("tiny",), "lengths": (32, 64, 128, 256), "deep_lengths": (64,), "attentions": ("softmax", "opt")}
    setting, told = Setting(**{**tiny, **more}, depths=(3,), limit=10.0), []
    found = encoder.run(setting, told.append)
    assert len(told) == encoder.steps(setting)
    softmax = {(x.layers, x.length): x for x in found.rows if x.attention == "softmax" and x.kind == "forward"}
    assert {key: x.seconds for key, x in softmax.items()} == {
        (1, 32): 1,
        (1, 64): 4,
        (1, 128): None,
        (1, 256): None,
        (3, 64): None,
    }
    assert softmax[1, 128].note == "about 16 s, and the limit is 10 s"
    assert softmax[1, 256].note == "about 64 s, and the limit is 10 s"
    assert softmax[3, 64].note == "about 12 s, and the limit is 10 s"
    text = shown(encoder.tables(found)[0])
    assert text.count("not run") == 2 * 3 + 1
    assert "softmax, 1 layers, 128 tokens: about 16 s, and the limit is 10 s" in text
    encoder.picture(found, tmp_path / "x.png")


def test_what_would_not_fit_and_what_fails_is_marked_too(tiny, tmp_path, monkeypatch):
    def job(kind, case, wanted, setting):
        if kind == "memory" and wanted["forward"] == ["relu"]:
            raise WorkerError("the process ended with code -9")
        one = {"seconds": 1.0, "rounds": 5} if kind == "time" else {"peak": 10**6 * case.length}
        return {name: dict.fromkeys(some, one) for name, some in wanted.items()}

    monkeypatch.setattr(encoder, "job", job)
    monkeypatch.setattr(encoder, "too_large", lambda count: "needs 64 MB" if count == 64 * 10**6 else None)
    found = encoder.run(Setting(**{**tiny, "sizes": ("tiny",), "attentions": ("relu", "opt")}, depths=()), print)
    notes = {(x.length, x.kind, x.attention): x.note for x in found.rows}
    assert {x for key, x in notes.items() if key[2] == "relu"} == {"the process ended with code -9"}
    assert [notes[n, kind, "opt"] for n in (32, 64) for kind in PASSES] == ["", "", "needs 64 MB", "needs 64 MB"]
    encoder.picture(found, tmp_path / "x.png")


def test_memory_is_the_peak_of_a_step():
    wide = Case("wide", 1, 16, 2048, 1, 8192)  # 64 MiB before and after the activation, and both are kept for training
    found = measure_memory(wide, {kind: ["opt"] for kind in PASSES})
    forward, train = (found[kind]["opt"]["peak"] / 2**20 for kind in PASSES)
    assert 120 < forward < 150
    assert 180 < train < 240


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("time", "MALLOC_MMAP_MAX_"), ("memory", "MALLOC_MMAP_THRESHOLD_")],
)
def test_a_process_has_its_own_heap_and_threads_and_says_why_it_failed(monkeypatch, kind, setting):
    ends = [
        SimpleNamespace(returncode=0, stdout='a warning\n{"forward": {}}\n', stderr=""),
        SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nValueError: no\n"),
        SimpleNamespace(returncode=-9, stdout="", stderr=""),
    ]
    seen = []
    monkeypatch.setattr(encoder, "finished", lambda _, *given: seen.append(given) or ends.pop(0))
    given = (kind, TINY, {"forward": ["opt"]}, Setting(heap="kept", threads=3))
    assert encoder.job(*given) == {"forward": {}}
    with pytest.raises(WorkerError, match="ValueError: no"):
        encoder.job(*given)
    with pytest.raises(WorkerError, match="the process ended with code -9"):
        encoder.job(*given)
    assert next(name for name in seen[0][1] if name.startswith("MALLOC")) == setting
    assert seen[0][1]["OMP_NUM_THREADS"] == "3"
    request = json.loads(seen[0][0])
    assert Case(**request["case"]) == TINY
    assert (request["kind"], request["threads"], request["wanted"]) == (kind, 3, {"forward": ["opt"]})


@pytest.mark.slow
def test_the_study_in_processes_of_its_own():
    setting = Setting(["small"], lengths=[32], layers=1, depths=(), attentions=NAMES, budget=0.1, heap="kept")
    found = encoder.run(setting, print)
    assert len(found.rows) == 8
    assert all(x.seconds > 0 and x.rounds >= 5 and x.peak is not None and not x.note for x in found.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ["regula"]}, "unknown size 'regula'; did you mean 'regular'\\? choose from regular, small"),
        ({"sizes": []}, "sizes must name at least one"),
        ({"lengths": [1024, 0]}, "length must be an integer of at least 1, got 0"),
        ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
        ({"depths": [12, -1]}, "depth must be an integer of at least 1, got -1"),
        ({"deep_lengths": [0]}, "deep length must be an integer of at least 1, got 0"),
        ({"attentions": ["favor"]}, "unknown method 'favor'; did you mean 'favor\\+'"),
        ({"attentions": ["favor+:features=3"]}, "unknown option for method 'favor\\+', 'features'"),
        ({"heap": "keep"}, "unknown heap 'keep'; did you mean 'kept'\\? choose from default, kept"),
        ({"limit": 0}, "limit must be a finite number above 0, got 0"),
        ({"rounds": 0}, "rounds must be an integer of at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_with_the_known_names(options, message):
    with pytest.raises(ValueError, match=message):
        Setting(**options)


def test_an_attention_that_an_encoder_cannot_have_is_refused_before_anything_runs(tiny):
    told = []
    with pytest.raises(ValueError, match="rfa-gate"):
        encoder.run(Setting(**{**tiny, "attentions": ("softmax", "rfa-gate")}), told.append)
    assert not told
