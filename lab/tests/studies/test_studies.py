"""Studies: each measures, shows, draws and writes at a tiny size, and what is finished is not measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.errors import WorkerError
from kernelformer.settings import given_as, options
from kernelformer_lab.bench.harness import fill_rows
from kernelformer_lab.studies import STUDIES, base, encoder, find_study, lengths, positions, sparsity
from kernelformer_lab.studies.conversion import ConversionSettings
from kernelformer_lab.studies.encoder import EncoderSettings
from kernelformer_lab.studies.sparsity import SparsitySettings
from kernelformer_lab.training import Run, TrainingError, session, train

ACIDS = "ARNDCQEGHILKMFPSTWYV"
SMALL = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TINY = {"relevances": (0.5,), "steps": 2, "length": 8, "features": 16}
BYTES = {"steps": 2, "length": 16, "layers": 1, "width": 8, "heads": 2, "batch": 2, "samples": 4}
FEW = {"budget": 0.01, "rounds": 1}
ANEW = ("encoder", "features")  # start anew when they are finished


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A BERT and a Llama over amino acids, texts of both kinds, and a finished run."""
    home = tmp_path_factory.mktemp("studies")
    torch.manual_seed(3)
    vocabulary = {x: i for i, x in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(ACIDS)])}
    transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False).save_pretrained(home / "bert")
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained(home / "bert")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(home / "llama")
    gen = torch.Generator().manual_seed(0)
    rows = [" ".join(ACIDS[i] for i in torch.randint(20, (30,), generator=gen)) for _ in range(4)]
    (home / "proteins.txt").write_text("\n".join(rows))
    (home / "text.txt").write_text("".join(f"line {i} of {i * i % 97} in a text\n" for i in range(200)))
    sizes = {"length": 6, "train_samples": 24, "validation_samples": 10, "test_samples": 4, "relevance": 0.5}
    run = Run(
        task="sparsity",
        attention="gmm-rks:num_features=4",
        task_options=sizes,
        model={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "classifier_size": 5},
        steps=1,
        batch_size=4,
    )
    train(run, home / "run", quiet=True)
    return home


@pytest.fixture
def quick(monkeypatch, quick_gc):
    """Jobs in this process, small encoders, few points, and the recipe of sparsity with a hundred samples."""

    def work(function, *, threads, allocator, **given):
        return json.loads(json.dumps(function(**json.loads(json.dumps(given)))))

    for module in (encoder, lengths):
        monkeypatch.setattr(module, "run_in_process", work)
    monkeypatch.setattr(encoder, "SIZES", {"small": encoder.Size(2, 16, 24, (16, 32))})
    monkeypatch.setattr(positions, "NORMS", (1.0, 2.0))
    monkeypatch.setattr(positions, "FEATURES", (4, 16))
    recipe = sparsity.find_recipe("kl-sparsity").run()
    samples = {"task.train_samples": 100, "task.validation_samples": 20, "task.test_samples": 20}
    run = sparsity.change(recipe, samples)
    monkeypatch.setattr(sparsity, "find_recipe", lambda name: SimpleNamespace(run=lambda: run))


def tiny_settings(name, home):
    """Settings of a study that take a moment."""
    bert, proteins, text, favor = (
        str(home / "bert"),
        home / "proteins.txt",
        home / "text.txt",
        ("favor+:num_features=4",),
    )
    given = {
        "conversion": {"model": bert, "text": proteins, "held_out": proteins, "attention": favor, "seconds": 0.2}
        | {"length": 16, "samples": 4, "batch": 2},
        "normalized": {**BYTES, "data": text, "features": (2, 4), "draws": 2},
        "transfer": {**BYTES, "data": text, "attention": favor, "tuning": 2, "draws": 2},
        "lengths": {**FEW, "model": home / "bert", "random": True, "attention": favor, "lengths": (8, 16)},
        "serving": {**FEW, "model": str(home / "llama"), "attention": favor, "lengths": (8, 16), "chunk": 8},
        "sparsity": {**TINY, "attention": ("softmax", "gmm-prf")},
        "redraws": {"runs": (str(home / "run"),), "draws": 2, "samples": 4, "gradients": 2},
        "features": {"features": (4, 8), "norms": (1.0,), "model": (bert,), "text": (str(proteins),), "length": 16}
        | {"attention": ("favor+",), "heads": 2, "samples": 2, "head_dim": 8, "time_length": 16, "rounds": 1},
        "approximation": {"encoder": bert, "text": proteins, "lengths": (8, 16), "features": (4,)},
        "estimators": {"length": 20, "head_dim": 4, "features": (4, 8), "norms": (1.0,), "samples": 2, "dims": (2,)}
        | {"draws": 100, "tokens": 16},
        "instability": {"attention": ("softmax", "elu"), "steps": 4, "starts": (0, 2), "window": 2, "batch": 2},
        "depth": {"model": bert, "text": proteins, "attention": favor, "draws": 2, "texts": 2, "length": 16},
        "amino-acids": {"model": bert, "text": proteins, "attention": favor, "sequences": 4, "resamples": 5},
        "positions": {"lengths": (32, 64), "draws": 2, "repeats": 1},
        "encoder": {**FEW, "sizes": ("small",), "layers": 1, "depths": (2,), "attention": ("softmax", "opt")},
    }
    return find_study(name).settings(**given[name])


@pytest.mark.parametrize("name", [x for x in STUDIES if x != "ranks"])  # has a test of its own: it needs processes
def test_every_study_measures_shows_draws_writes_and_resumes(name, home, quick, tmp_path):
    study, settings, done, said = find_study(name), tiny_settings(name, home), [], []
    assert study.name == name
    record = study.measure(settings, tmp_path, said.append, lambda: done.append(1))
    assert len(done) == study.steps(settings) > 0
    assert all(x.row_count for x in study.tables(record))
    study.picture(record, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    kept = json.loads(record.save().read_text())
    assert kept["command"].startswith(f"kernelformer study {name}")
    assert kept.keys() == {"command", "environment", "settings", *record.figures}
    assert str(home) not in json.dumps(kept)
    if study.resumes and name not in ANEW:
        again = study.measure(settings, tmp_path, progress=lambda: done.append(1))
        assert len(done) == 2 * study.steps(settings)
        again = json.loads(again.save().read_text())
        assert {x: again[x] for x in record.figures} == {x: kept[x] for x in record.figures}
    else:
        assert said


def test_a_study_goes_on_where_it_was_stopped(tmp_path, monkeypatch, quick):
    def run(*attention, **options):
        settings = SparsitySettings(attention=attention, **{**TINY, **options})
        return sparsity.STUDY.measure(settings, tmp_path).figures["curves"]

    (first,) = run("softmax")
    assert first["steps"] == [2]
    assert 0 <= first["accuracy"][0] <= 1
    trained, trainer = [], session.RunTrainer
    monkeypatch.setattr(
        session, "RunTrainer", lambda run, *rest, **more: trained.append(run.attention) or trainer(run, *rest, **more)
    )
    curves = run("softmax", "gmm-prf")
    assert trained == ["gmm-prf:num_features=16"]
    assert curves[0] == first
    with pytest.raises(TrainingError, match="other settings, there and here: steps 2 and 1"):
        run("softmax", steps=1)
    with pytest.raises(ValueError, match="unknown option for method 'softmax', 'learn'"):
        run("softmax:learn=S")


def test_a_level_is_reached_at_the_first_step_that_has_it():
    curve = {"steps": [1, 2, 3], "accuracy": [0.5, 0.85, 0.9]}
    assert (sparsity.reached(curve, 0.8), sparsity.reached(curve, 0.95), sparsity.last(curve)) == (2, None, 0.9)


@pytest.mark.parametrize("name", STUDIES)
def test_the_help_of_a_study_has_its_figure_and_every_setting(name):
    shown = CliRunner().invoke(app, ["study", name, "--help"], env={"COLUMNS": "200"}).output
    study = find_study(name)
    assert STUDIES[name] in shown
    assert (study.figure or "no figure of a paper") in shown
    for each, how in options(study.settings):
        assert ((how.shown or each.name) if how.argument else f"--{given_as(each).replace('_', '-')}") in shown


def test_the_command_of_a_record_has_what_is_not_a_default():
    assert encoder.STUDY.command(EncoderSettings(lengths=(64, 128), depths=(), memory=False)) == (
        "kernelformer study encoder --lengths 64,128 --depths '' --no-memory"
    )
    paths = {"model": "/a/b/model", "text": Path("c/d.txt"), "held_out": Path("e.txt")}
    assert find_study("conversion").command(ConversionSettings(**paths, allow_pickle=True, layers=(0, "x.*"))) == (
        "kernelformer study conversion model --distill d.txt --text e.txt --layers '0,x.*' --allow-pickle"
    )


def test_rows_of_other_settings_are_never_resumed(tmp_path):
    study = replace(sparsity.STUDY, name="any")
    record = base.Record(study, SparsitySettings(), tmp_path, {"model": "a", "rows": [{"x": 1}]})
    record.save()
    again = base.Record(study, SparsitySettings(), tmp_path)
    again.resume({"model": "a"}, steps=800)
    assert again.figures == record.figures
    assert base.Record(study, SparsitySettings(), tmp_path).earlier_of_same_settings(same_machine=True)["model"] == "a"
    assert base.Record(study, SparsitySettings(steps=3), tmp_path).earlier_of_same_settings() == {}
    with pytest.raises(ValueError, match=r"any\.json has figures of another model \('a'\)"):
        record.resume({"model": "b"})
    with pytest.raises(ValueError, match=r"has figures of another steps \(800\)"):
        record.resume({"model": "a"}, steps=3)
    record.path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match="is not of this study"):
        record.resume({})


def test_rows_without_a_note_are_filled_and_a_failure_is_noted_in_all_of_them():
    rows = [{"name": "a", "note": ""}, {"name": "b", "note": "too long"}, {"name": "c", "note": ""}]
    fill_rows(rows, lambda some: [{"seconds": 2.0} if x["name"] == "a" else {"problem": "none"} for x in some])
    assert [(x["note"], x.get("seconds")) for x in rows] == [("", 2.0), ("too long", None), ("none", None)]

    def fails(some):
        raise WorkerError("ended")

    fill_rows(rows, fails)
    assert [x["note"] for x in rows] == ["ended", "too long", "none"]
    fill_rows(rows[1:], lambda _: pytest.fail("nothing was left to measure"))


def test_every_method_of_the_sparsity_study_can_be_trained():
    for method in sparsity.METHODS:
        run = sparsity.training_of(method, 0.5, 3, SparsitySettings(features=32))
        assert (run.seed, run.task_options["relevance"]) == (3, 0.5)
        assert ("num_features=32" in run.attention) == (method != "softmax")
    assert (
        sparsity.training_of("gmm-prf:num_features=8", 0.5, 0, SparsitySettings()).attention == "gmm-prf:num_features=8"
    )


def test_settings_have_the_bounds_of_their_options():
    for wrong, message in (
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"length": 3}, "length must be an integer of at least 4, got 3"),
        ({"seeds": 1.5}, "seeds must be an integer of at least 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            SparsitySettings(**wrong)
    with pytest.raises(ValueError, match="lengths must be an integer of at least 1, got 0"):
        EncoderSettings(lengths=(64, 0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["softmax", "gmm-rks", "gmm-prf", "fastfood-prf", "generative-prf"])
def test_the_sparsity_task_is_learned(method, tmp_path):
    settings = SparsitySettings(attention=(method,), relevances=(0.5,), length=24, steps=500, features=32)
    (curve,) = sparsity.STUDY.measure(settings, tmp_path).figures["curves"]
    assert curve["accuracy"][-1] > 0.8
