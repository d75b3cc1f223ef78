"""The study of whole encoders: what is timed, the bounds, what is not run, and what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from kernelformer.errors import WorkerError
from kernelformer.lazy import LAYERS
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer_lab.bench.timing import Step
from kernelformer_lab.studies import encoder
from kernelformer_lab.studies import encoder as measured
from kernelformer_lab.studies.base import Record
from kernelformer_lab.studies.encoder import Case, EncoderSettings, Size, build, cases, measure, step

pytestmark = pytest.mark.usefixtures("quick_gc")

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

    def job(kind, case, wanted, settings):
        return measure(kind, vars(case), wanted, settings.rounds, settings.budget)

    monkeypatch.setattr(encoder, "job", job)
    return {"sizes": tuple(sizes), "layers": 1, "attention": NAMES, "rounds": 2, "budget": 0.01}


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


@pytest.mark.parametrize("name", LAYERS)
def test_sparse_layers_of_transformers_are_measured_as_any_attention(name):
    figures = measure("time", vars(TINY), {kind: [name, "softmax"] for kind in PASSES}, rounds=1, budget=0.01)
    assert all(figures[kind][x]["seconds"] > 0 for kind in PASSES for x in (name, "softmax"))
    peaks = measure("memory", vars(TINY), {kind: [name] for kind in PASSES}, rounds=1, budget=0.01)
    assert all("peak" in peaks[kind][name] for kind in PASSES)


def test_the_bound_still_projects_queries_and_keys():
    model, seen = build(TINY, "opt"), []
    for block in model.stack.blocks:
        block.attention.query.register_forward_hook(lambda *_: seen.append("query"))
        block.attention.key.register_forward_hook(lambda *_: seen.append("key"))
    step(model, TINY.tokens(), "forward").run()
    assert seen == ["query", "key"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_every_parameter_its_gradient(name):
    model = build(TINY, name)
    step(model, TINY.tokens(), "forward").run()
    assert all(x.grad is None for x in model.parameters())
    step(model, TINY.tokens(), "forward + backward").run()
    missing = [key for key, x in model.named_parameters() if x.grad is None]
    alone = ("attention.query.weight", "attention.query.bias", "attention.key.weight", "attention.key.bias")
    assert missing == ([f"stack.blocks.{i}.{x}" for i in range(2) for x in alone] if name == "opt" else [])
    want = model(TINY.tokens()).last_hidden_state.square().mean()
    (grad,) = torch.autograd.grad(want, [model.stack.norm.weight])
    torch.testing.assert_close(model.stack.norm.weight.grad, grad)


def test_both_bounds_give_the_last_block_the_same_gradients():
    models = [build(TINY, name) for name in ("opt", "opt+qk")]
    for model in models:
        step(model, TINY.tokens(), "forward + backward").run()
    for part in ("value", "out"):
        one, two = (getattr(model.stack.blocks[-1].attention, part).weight.grad for model in models)
        torch.testing.assert_close(one, two)


def test_all_attentions_have_the_same_first_weights():
    one, two = (build(TINY, name).state_dict() for name in ("softmax", "favor+:num_features=8"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(TINY.tokens(), TINY.tokens())
    assert TINY.tokens().shape == (1, 32)


def test_all_attentions_of_a_pass_are_timed_together():
    wanted = {"forward": ["softmax", "opt"], "forward + backward": ["opt"]}
    result = measure("time", vars(TINY), wanted, 3, 1e-9)
    assert {kind: list(x) for kind, x in result.items()} == wanted
    assert all(x["seconds"] > 0 and x["rounds"] == 3 for some in result.values() for x in some.values())


def test_an_attention_that_runs_out_of_memory_is_noted_and_the_others_go_on(monkeypatch):
    def run(model, forward, kind):
        def fail():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

        return Step(forward if isinstance(model.stack.blocks[0].attention.core, measured.Values) else fail)

    monkeypatch.setattr(measured, "model_step", run)
    result = measure("time", vars(TINY), {"forward": ["softmax", "opt"]}, 2, 1e-9)["forward"]
    assert result["softmax"] == {"problem": "DefaultCPUAllocator: can't allocate memory"}
    assert result["opt"]["rounds"] == 2


def test_the_papers_cases():
    sizes = [(x.size, x.layers, x.length) for x in cases(EncoderSettings())]
    assert sizes[:4] == [("regular", 6, n) for n in (1024, 2048, 4096, 8192)]
    assert sizes[4:8] == [("regular", n, m) for n in (12, 20) for m in (1024, 4096)]
    assert sizes[8:] == [
        *(("small", 6, n) for n in (1024, 2048, 4096, 8192, 16384)),
        *(("small", n, m) for n in (12, 20) for m in (1024, 4096)),
    ]
    regular, small = (next(cases(EncoderSettings(sizes=(x,)))) for x in ("regular", "small"))
    assert (regular.heads, regular.width, regular.feed_forward) == (8, 512, 2048)
    assert (small.heads, small.width, small.feed_forward) == (1, 64, 64)
    some = EncoderSettings(sizes=("small",), lengths=(128, 64), layers=2, depths=(4,), deep_lengths=(96,))
    assert [(x.layers, x.length) for x in cases(some)] == [(2, 64), (2, 96), (2, 128), (4, 96)]
    assert [x.length for x in cases(EncoderSettings(sizes=("small",), lengths=(64,), depths=()))] == [64]


def row(size, length, attention, seconds):
    key = {"size": size, "layers": 1, "length": length, "kind": "forward", "attention": attention}
    return {**key, "seconds": seconds, "rounds": 2, "peak": None, "note": ""}


def made(rows):
    return Record(encoder.STUDY, EncoderSettings(), Path(), {"heap": "default", "rows": rows})


def test_ratios_are_to_the_same_encoder_and_length():
    rows = [row("tiny", n, name, n * x) for n in (32, 64) for name, x in (("softmax", 3), ("opt", 1))]
    table = encoder.tables(made([*rows, row("tiny", 64, "relu", 96.0)]))[0]
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["faster by"] == ["", "3.00x", "", "3.00x", "2.00x"]
    assert columns["of opt"] == ["3.00x", "", "3.00x", "", "1.50x"]


def quadratic(kind, case, wanted, settings):
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
    more = {"sizes": ("tiny",), "lengths": (32, 64, 128, 256), "deep_lengths": (64,), "attention": ("softmax", "opt")}
    settings, logged = EncoderSettings(**{**tiny, **more}, depths=(3,), limit=10.0), []
    result = encoder.STUDY.measure(settings, tmp_path, logged.append)
    assert len(logged) == encoder.steps(settings)
    softmax = {(x["layers"], x["length"]): x for x in result.where(attention="softmax", kind="forward")}
    assert {key: x["seconds"] for key, x in softmax.items()} == {
        (1, 32): 1,
        (1, 64): 4,
        (1, 128): None,
        (1, 256): None,
        (3, 64): None,
    }
    assert softmax[1, 128]["note"] == "about 16 s, and the limit is 10 s"
    assert softmax[1, 256]["note"] == "about 64 s, and the limit is 10 s"
    assert softmax[3, 64]["note"] == "about 12 s, and the limit is 10 s"
    text = shown(encoder.tables(result)[0])
    assert text.count("not run") == 2 * 3 + 1
    assert "softmax, 1 layers, 128 tokens: about 16 s, and the limit is 10 s" in text


def test_what_would_not_fit_and_what_fails_is_marked_too(tiny, tmp_path, monkeypatch):
    def job(kind, case, wanted, settings):
        if kind == "memory" and wanted["forward"] == ["relu"]:
            raise WorkerError("the process ended with code -9")
        one = {"seconds": 1.0, "rounds": 5} if kind == "time" else {"peak": 10**6 * case.length}
        return {name: dict.fromkeys(some, one) for name, some in wanted.items()}

    monkeypatch.setattr(encoder, "job", job)
    monkeypatch.setattr(encoder, "too_large", lambda count: "needs 64 MB" if count == 64 * 10**6 else None)
    settings = EncoderSettings(**{**tiny, "sizes": ("tiny",), "attention": ("relu", "opt")}, depths=())
    result = encoder.STUDY.measure(settings, tmp_path)
    notes = {(x["length"], x["kind"], x["attention"]): x["note"] for x in result.rows}
    assert {x for key, x in notes.items() if key[2] == "relu"} == {"the process ended with code -9"}
    assert [notes[n, kind, "opt"] for n in (32, 64) for kind in PASSES] == ["", "", "needs 64 MB", "needs 64 MB"]


def test_memory_is_the_peak_of_a_step():
    wide = Case("wide", 1, 16, 2048, 1, 8192)  # 64 MiB before and after the activation, and both are kept for training
    result = encoder.job("memory", wide, {kind: ["opt"] for kind in PASSES}, EncoderSettings())  # in a fresh process
    forward, train = (result[kind]["opt"]["peak"] / 2**20 for kind in PASSES)
    assert 120 < forward < 150
    assert 180 < train < 240


def test_a_stopped_study_goes_on_and_a_finished_one_starts_anew(tiny, tmp_path, monkeypatch):
    settings, jobs = EncoderSettings(**tiny, depths=(), memory=False), []
    whole = encoder.job

    def job(kind, case, wanted, settings):
        jobs.append((case.size, case.length))
        if len(jobs) == 2:
            raise KeyboardInterrupt
        return whole(kind, case, wanted, settings)

    monkeypatch.setattr(encoder, "job", job)
    with pytest.raises(KeyboardInterrupt):
        encoder.STUDY.measure(settings, tmp_path)
    steps = []
    result = encoder.STUDY.measure(settings, tmp_path, progress=lambda: steps.append(1))
    assert jobs == [("tiny", 32), ("tiny", 64), ("tiny", 64), ("flat", 32)]
    assert len(steps) == encoder.steps(settings) == 3
    assert len(result.rows) == 3 * 8
    encoder.STUDY.measure(settings, tmp_path)
    assert jobs[4:] == [("tiny", 32), ("tiny", 64), ("flat", 32)]


def test_figures_of_other_settings_are_not_mixed_in(tiny, tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(encoder, "job", lambda *given: jobs.append(given) or quadratic(*given))
    one = EncoderSettings(**{**tiny, "sizes": ("tiny",)}, depths=(), memory=False)
    record = encoder.STUDY.measure(one, tmp_path)
    del record.rows[8:]
    record.save()
    other = EncoderSettings(**{**tiny, "sizes": ("tiny",)}, depths=(), memory=False, heap="kept")
    assert len(jobs) == 2
    encoder.STUDY.measure(other, tmp_path)
    assert len(jobs) == 4


@pytest.mark.parametrize(("kind", "allocator"), [("time", HEAPS["kept"]), ("memory", MEMORY_HEAP)])
def test_a_process_has_its_own_heap_and_threads(monkeypatch, kind, allocator):
    seen = {}
    monkeypatch.setattr(encoder, "run_in_process", lambda work, **given: seen.update(work=work, **given))
    torch.set_num_threads(3)
    encoder.job(kind, TINY, {"forward": ["opt"]}, EncoderSettings(heap="kept"))
    assert (seen["work"], seen["threads"], seen["allocator"]) == (measure, 3, allocator)
    assert (seen["kind"], seen["case"], seen["wanted"]) == (kind, vars(TINY), {"forward": ["opt"]})


@pytest.mark.slow
def test_the_study_in_processes_of_its_own(tmp_path):
    more = {"layers": 1, "depths": (), "attention": NAMES, "budget": 0.1, "heap": "kept"}
    result = encoder.STUDY.measure(EncoderSettings(sizes=("small",), lengths=(32,), **more), tmp_path)
    assert len(result.rows) == 8
    assert all(x["seconds"] > 0 and x["rounds"] >= 5 and x["peak"] is not None and not x["note"] for x in result.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ("regula",)}, "unknown size 'regula'; did you mean 'regular'\\? choose from arena, regular, small"),
        ({"sizes": ()}, "sizes must name at least one"),
        ({"lengths": (1024, 0)}, "lengths must be an integer of at least 1, got 0"),
        ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
        ({"depths": (12, -1)}, "depths must be an integer of at least 1, got -1"),
        ({"deep_lengths": (0,)}, "deep_lengths must be an integer of at least 1, got 0"),
        ({"attention": ("favor",)}, "unknown method 'favor'; did you mean 'favor\\+'"),
        ({"attention": ("favor+:features=3",)}, "unknown option for method 'favor\\+', 'features'"),
        ({"heap": "keep"}, "unknown heap 'keep'; did you mean 'kept'\\? choose from default, kept"),
        ({"limit": 0}, "limit must be .* at least 0.01, got 0"),
    ],
)
def test_bad_input_is_refused_with_the_known_names(options, message):
    with pytest.raises(ValueError, match=message):
        encoder.steps(EncoderSettings(**options))


def test_an_attention_that_an_encoder_cannot_have_is_refused_before_anything_runs(tiny, tmp_path):
    logged = []
    with pytest.raises(ValueError, match="rfa-gate"):
        encoder.STUDY.measure(
            EncoderSettings(**{**tiny, "attention": ("softmax", "rfa-gate")}), tmp_path, logged.append
        )
    assert not logged
