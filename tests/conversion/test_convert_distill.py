"""``kernelformer convert`` with a clock, LoRA and held-out texts, and what is wrong with their settings."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import peft  # noqa: F401  (takes seconds to import, which the clock of a test should not count)
import pytest
import transformers

from kernelformer.conversion import convert as converting
from kernelformer.conversion import distill as convert_distill
from kernelformer.conversion import tune as progress
from kernelformer.conversion.measure import Report
from kernelformer.conversion.settings import ConvertSettings as Setting
from tiny_models import HEADS, SPECIAL, VOCAB, WORDS, save_tiny, word_tokenizer, write_sentences

NEAR = "loglinear:num_features=8:window=4:sinks=1"


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_folder("BertForMaskedLM")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("text") / "some.jsonl", [20] * 60)


def settings(learned, **options):
    return Setting(**{"attention": NEAR, "distill": learned, "samples": 4, "batch": 2, **options})


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 50 ms whenever it is looked at: a busy machine changes nothing."""
    ticks = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: 0.05 * next(ticks))
    for file in (progress, convert_distill):
        monkeypatch.setattr(file, "time", fake)


@pytest.mark.usefixtures("clock")
def test_a_clock_gives_both_stages_a_rate_a_curve_and_an_end(model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_distill, "TRIALS", 0.5)
    said = []
    found = converting.run(model, tmp_path / "d", settings(text, minutes=0.1, lora=2), log=said.append)
    assert list(found.spent) == ["transfer", "tune"]
    for stage, spent in found.spent.items():
        assert len(found.losses[stage]) >= 1
        assert spent["tokens"] > 0
        assert spent["seconds"] < 10
        values = [x[-1] for x in found.curves[stage]]
        assert found.curves[stage][0][0] == 0  # the first look is before the first step
        assert min(values) <= values[0]
    assert 0 < found.spent["transfer"]["cosine"] <= 1.001
    assert "cosine" not in found.spent["tune"]  # the report after it has more
    assert sum(x.startswith("a rate for transfer") for x in said) >= 1
    assert any("start at centres of the original's keys" in x for x in found.remarks)
    report = json.loads((tmp_path / "d" / "report.json").read_text())
    assert report["curves"]["tune"] == [list(x) for x in found.curves["tune"]]
    assert report["setting"]["lora"] == 2
    assert found.texts["learned from"].available == 51  # of 60, 4 are measured on and 5 are looked at


@pytest.mark.usefixtures("clock")
def test_without_time_to_look_for_a_rate_it_is_the_usual_one(model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_distill, "TRIALS", 0.1)  # of two seconds
    said = []
    result = converting.run(model, tmp_path / "d", settings(text, minutes=1 / 30, tune=0), log=said.append)
    assert [x for x in said if "a rate for" in x] == ["there is no time to look for a rate for transfer: it is 0.01"]
    assert result.spent["transfer"]["rate"] == 0.01


@pytest.mark.parametrize("stage", ["transfer", "tune"])
def test_a_stopped_stage_with_lora_goes_on_to_the_last_bit(model, text, tmp_path, stage):
    setting = settings(text, steps=6, tune=4, lora=2)

    def stop(said):
        if said.startswith(f"{stage}: step 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converting.run(model, tmp_path / "d", setting, log=stop)
    found = converting.run(model, tmp_path / "d", setting)
    whole = converting.run(model, tmp_path / "whole", setting)
    assert found.losses == whole.losses
    assert [[x[0], x[2], x[3]] for x in found.curves["tune"]] == [[x[0], x[2], x[3]] for x in whole.curves["tune"]]
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("d", "whole"))
    assert a == b
    assert f"{stage} was resumed after step 3" in " ".join(found.remarks)


def test_a_decoder_learns_from_passages_that_come_again(text, tmp_path):
    source = save_tiny(tmp_path / "decoder", "LlamaForCausalLM", num_hidden_layers=1)

    def setting(share, **more):
        quiet = {"passkeys": 0, "sample_tokens": 0, "length": 48}
        return settings(text, steps=5, tune=3, repeats=share, **{**quiet, **more})

    def stop(said):
        if said.startswith("transfer: step 3"):
            raise KeyboardInterrupt

    whole = converting.run(source, tmp_path / "whole", setting(1.0))
    with pytest.raises(KeyboardInterrupt):
        converting.run(source, tmp_path / "d", setting(1.0), log=stop)
    found = converting.run(source, tmp_path / "d", setting(1.0))
    plain = converting.run(source, tmp_path / "plain", setting(0.0))
    assert found.losses == whole.losses
    assert all(x != y for x, y in zip(whole.losses["tune"], plain.losses["tune"], strict=True))
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("d", "whole"))
    assert a == b
    assert "in 100% of the rows to learn from and of those held out, passages come again after 4" in whole.remarks[-1]
    short = converting.run(source, tmp_path / "short", setting(None, length=24))
    assert "rows of 24 tokens have no room for passages that come again" in short.remarks[-1]


def test_a_stopped_distillation_does_not_go_on_with_other_heads_exact(model, text, tmp_path, monkeypatch):
    def stop(said):
        if said.startswith("transfer: step 3"):
            raise KeyboardInterrupt

    setting = settings(text, steps=5, keep_heads=1)
    with pytest.raises(KeyboardInterrupt):
        converting.run(model, tmp_path / "d", setting, log=stop)
    worst = Report.worst_heads
    monkeypatch.setattr(
        Report, "worst_heads", lambda *x: {name: [(y + 1) % HEADS for y in heads] for name, heads in worst(*x).items()}
    )
    with pytest.raises(ValueError, match=r"is of another call \(what stays exact\)"):
        converting.run(model, tmp_path / "d", setting)
    assert (tmp_path / "d.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 1e-7}, r"--minutes 1e-07 leaves 0 s for transfer, which is too short for one step here"),
        ({"minutes": 0.0}, r"minutes must be above 0, got 0"),
        ({"minutes": 1.0, "steps": 5}, r"minutes=1 and steps=5, tune=0 say the same thing"),
        ({"minutes": 1.0, "steps": 0, "tune": 0}, r"--minutes 1 with --steps 0 and --tune 0 leaves nothing to do"),
        ({"minutes": 1.0, "distill": None}, r"minutes=1 need texts to learn from"),
        ({"lora": 2, "lora_layers": "*.w", "tune": 1}, r"no linear layer of BertForMaskedLM fits '\*\.w'; it has "),
        ({"lora_layers": "*.value"}, r"lora_layers='\*\.value' without LoRA"),
        ({"lora": 2, "steps": 1}, r"lora=2 is for tuning, of which there is none; give --tune or --minutes"),
        ({"lora": 2, "minutes": 1.0, "tune": 0}, r"lora=2 is for tuning, of which there is none"),
        ({"window_dropout": 1.5}, r"window_dropout is a share, 0 to 1, got 1\.5"),
        ({"repeats": -0.1}, r"repeats is a share, 0 to 1, got -0\.1"),
        ({"attention": "loglinear:window=40", "steps": 1}, r"at most 22 tokens and the window is 40, so that nothing"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(model, text, tmp_path, options, message):
    before = {x.name: x.read_bytes() for x in model.iterdir()}
    with pytest.raises(ValueError, match=message):
        converting.run(model, tmp_path / "d", settings(text, **options))
    assert list(tmp_path.iterdir()) == []
    assert {x.name: x.read_bytes() for x in model.iterdir()} == before


def test_a_tokenizer_of_another_model_is_named(model, text, tmp_path):
    other = tmp_path / "other"
    transformers.BertForMaskedLM.from_pretrained(model).save_pretrained(other)
    word_tokenizer([*SPECIAL, *(f"x{i}" for i in range(90)), *WORDS]).save_pretrained(other)
    with pytest.raises(ValueError, match=rf"is of another model: .* has token \d+, and the model knows {VOCAB};"):
        converting.run(other, tmp_path / "d", settings(text, steps=1))


def test_many_copies_of_a_text_are_still_learned_from(model, text, tmp_path):
    same = tmp_path / "same.jsonl"
    same.write_text(json.dumps({"text": " ".join(WORDS[:20])}) + "\n")
    same.write_text(same.read_text() * 50)
    found = converting.run(model, tmp_path / "d", settings(same, text=text, steps=2))
    assert len(found.losses["transfer"]) == 2
