"""Hooks of a task beyond batches: judging, remarks, files beside the model; and weights to start from."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kernelformer as kf
from kernelformer.models import KernelformerConfig, KernelformerForSequenceClassification
from kernelformer_lab.comparison import make_plan
from kernelformer_lab.tasks import TASKS, Task, make_task
from kernelformer_lab.training import Run, TrainingError, evaluate, train
from kernelformer_lab.training.session import build_model

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SHORT = {"steps": 2, "batch_size": 4, "log_every": 1}


class Sums(Task):
    """Tell the mean of a sequence: a number, judged by what the model says of the first sample."""

    name, about, model, metric, higher_is_better = "sums", "for tests", "classifier", "told", False

    def __init__(self, *, classes: int = 1):
        self.classes = classes
        self.metric = "told" if classes == 1 else "accuracy"

    def settings(self):
        return {"vocab_size": 9, "max_position_embeddings": 8, "num_labels": self.classes}

    def split(self, name):
        gen = torch.Generator().manual_seed(len(name))
        return [{"ids": torch.randint(9, (8,), generator=gen)} for _ in range(12)]

    def collate(self, samples):
        ids = torch.stack([x["ids"] for x in samples])
        means = ids.float().mean(1)
        return {"input_ids": ids, "labels": means if self.classes == 1 else (means > 4).long()}

    def score(self, found):
        if self.classes > 1:
            return {"accuracy": found.right}
        assert found.loss == pytest.approx(np.mean((found.predictions - found.labels) ** 2), rel=1e-5)
        assert math.isnan(found.right)
        return {"error": found.loss**0.5}

    def judge(self, model, data, batch_size):
        assert not model.training
        assert not torch.is_grad_enabled()
        if self.classes > 1:
            return {}
        return {"told": float(model(data[0]["ids"][None]).logits[0, 0]), "size": float(batch_size)}

    def remarks(self):
        return ["2 of 14 rows were left out"]

    def save_extra(self, folder):
        (folder / "words.txt").write_text("a b")


@pytest.fixture(autouse=True)
def _task():
    TASKS["sums"] = Sums


def test_numbers_are_learned_by_their_squared_error_and_a_task_has_the_last_word(tmp_path):
    heard = []
    result = train(Run("sums", "elu", model=MODEL, **SHORT), tmp_path / "run", log=heard.append)
    assert "2 of 14 rows were left out" in heard
    assert (tmp_path / "run" / "model" / "words.txt").read_text() == "a b"
    heard.clear()
    found = evaluate(tmp_path / "run", batch_size=3, log=heard.append)
    assert heard == ["2 of 14 rows were left out"]
    assert found["told"] == pytest.approx(result.value, abs=1e-6)
    assert found["size"] == 3
    assert 0 < result.input_seconds < result.seconds
    assert found["error"] == pytest.approx(result.scores["error"], rel=1e-5)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metric"] == "told"
    # The metric is no part of the evaluations in between.
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ["eval_error", "eval_loss", "eval_loss_error", "seconds", "step", "tokens"]
    assert [sorted(x) for x in lines if "eval_loss" in x] == [names]


def test_numbers_and_classes_are_not_mixed_up():
    model = KernelformerForSequenceClassification(KernelformerConfig(vocab_size=9, num_labels=1, **MODEL))
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"num_labels=1 is a regression, whose labels are floating point, got .*int64"):
        model(ids, labels=torch.zeros(2, dtype=torch.long))
    model = KernelformerForSequenceClassification(KernelformerConfig(vocab_size=9, num_labels=3, **MODEL))
    with pytest.raises(ValueError, match=r"float32 are a regression, which has num_labels=1, got 3"):
        model(ids, labels=torch.zeros(2))


@pytest.fixture
def trained(tmp_path):
    spec = "favor+:num_features=8"
    train(Run("sums", spec, model=MODEL, task_options={"classes": 1}, **SHORT), tmp_path / "first", quiet=True)
    return tmp_path / "first"


def first_weights(folder, run):
    """Of a run with a learning rate that moves nothing."""
    heard = []
    train(run, folder, log=heard.append)
    return load_file(folder / "model" / "model.safetensors"), [x for x in heard if x.startswith("starting from")]


def test_a_run_starts_from_saved_weights_and_a_head_of_another_size_is_new(trained, tmp_path):
    still = SHORT | {"learning_rate": 1e-30, "weight_decay": 0.0}
    options = {"classes": 3}
    run = Run("sums", "favor+:num_features=8", model=MODEL, task_options=options, start=str(trained), seed=5, **still)
    found, said = first_weights(tmp_path / "second", run)
    saved = load_file(trained / "model" / "model.safetensors")
    assert torch.equal(found["model.embeddings.tokens.weight"], saved["model.embeddings.tokens.weight"])
    draws = [name for name in saved if name.endswith("omega")]
    assert draws
    assert all(torch.equal(found[name], saved[name]) for name in draws)
    assert found["head.3.weight"].shape == (3, 16)
    assert "new: head.3.weight, head.3.bias" in said[0]


def test_another_attention_keeps_its_own_draws(trained):
    from kernelformer_lab.training.session import start_from

    model = build_model(Run("sums", "relu:num_features=8", model=MODEL, seed=9), make_task("sums"))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    start_from(model, trained / "model")
    saved, after = load_file(trained / "model" / "model.safetensors"), model.state_dict()
    for name in after:
        if ".core." in name:
            assert torch.equal(after[name], before[name])
        elif name in saved:
            assert torch.equal(after[name], saved[name])


@pytest.mark.parametrize("method", ["softmax:relative=1d", "nprf:num_features=8:relative=1d"])
def test_a_table_of_relative_positions_of_another_length_is_taken_by_distance(method, tmp_path):
    from kernelformer_lab.training.session import start_from

    def encoder(length, **more):
        model = {**MODEL, "share_bias": True, "num_hidden_layers": 2, **more}
        settings = KernelformerConfig(vocab_size=9, max_position_embeddings=length, attention=method, **model)
        return KernelformerForSequenceClassification(settings).eval()

    saved = encoder(8)
    table = saved.model.stack.blocks[0].attention.positions
    torch.nn.init.normal_(table.weight)
    saved.save_pretrained(tmp_path)
    ids = torch.randint(9, (2, 8), generator=torch.Generator().manual_seed(0))
    for length, more in ((12, {}), (8, {"pooling": "cls"}), (6, {})):
        other = encoder(length, **more)
        said = start_from(other, tmp_path)
        own = other.model.stack.blocks[0].attention.positions
        assert "of another length: model.stack.blocks.0.attention.positions.weight from 15 to" in said
        reach = torch.arange(-own.weight.shape[1] // 2 + 1, own.weight.shape[1] // 2 + 1)
        assert torch.equal(own.entries(reach), table.entries(reach.clamp(-7, 7)))  # the farthest stands for what is new
        if not more:
            with torch.no_grad():
                assert torch.equal(other(ids[:, :length]).logits, saved(ids[:, :length]).logits)
    with pytest.raises(TrainingError, match=r"build it with the same sizes"):
        start_from(encoder(9, num_attention_heads=4), tmp_path)


def test_tables_of_decoders_and_those_with_an_end_are_taken_where_distances_mean_the_same():
    from kernelformer_lab.training.session import _stretched

    saved = torch.randn(2, 5)
    causal = _stretched(kf.RelativePositions(2, max_length=7, causal=True), saved)
    assert torch.equal(causal, saved[:, [0, 1, 2, 3, 4, 4, 4]])
    ended = _stretched(kf.RelativePositions(2, max_distance=1), saved)
    assert ended is saved  # its last entry stands for many
    assert _stretched(kf.RelativePositions(2, scheme="t5"), saved) is saved


def test_what_cannot_start_a_run_is_named(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    for start, message in [
        (tmp_path / "empty", "empty cannot start a run"),
        (tmp_path / "nowhere", "nowhere cannot start a run"),
    ]:
        with pytest.raises(TrainingError, match=message):
            train(Run("sums", "elu", model=MODEL, start=str(start), **SHORT), tmp_path / "a", quiet=True)
    wide = {**MODEL, "hidden_size": 24, "intermediate_size": 24}
    with pytest.raises(TrainingError, match=r"is \(9, 16\), this model's is \(9, 24\); build it with"):
        train(Run("sums", "softmax", model=wide, start=str(trained), **SHORT), tmp_path / "b", quiet=True)
    with pytest.raises(ValueError, match="start must be the path of a folder, got 3"):
        Run("sums", "elu", start=3)


def test_a_run_without_a_checkpoint_does_not_go_on_from_other_weights(trained, tmp_path):
    folder, run = tmp_path / "second", Run("sums", "elu", model=MODEL, start=str(trained), **SHORT)
    train(run, folder, quiet=True)
    assert "model.safetensors" in json.loads((folder / "run.json").read_text())["start"]
    train(replace(run, seed=7), trained.parent / "other", quiet=True)
    weights = (trained.parent / "other" / "model" / "model.safetensors").read_bytes()
    (trained / "model" / "model.safetensors").write_bytes(weights)
    (folder / "result.json").unlink()
    train(run, folder, quiet=True, resume=True)  # a checkpoint has all that it needs
    for part in folder.glob("checkpoint-*"):
        shutil.rmtree(part)
    (folder / "result.json").unlink()
    with pytest.raises(TrainingError, match=r"started from other weights than .*first has: model.safetensors.*, now "):
        train(run, folder, quiet=True, resume=True)


def test_smoothed_labels_are_for_classes():
    run = Run("sums", "elu", model=MODEL, label_smoothing=0.1, **SHORT)
    with pytest.raises(ValueError, match=r"label_smoothing is for classes, got 0.1 and task 'sums' with num_labels=1"):
        build_model(run, make_task("sums"))
    build_model(run, make_task("sums", classes=3))


def test_encoder_and_decoder_may_have_attentions_of_their_own(tmp_path):
    with pytest.raises(ValueError, match="decoder_attention is for encoder-decoders, got 'elu' and task 'sums'"):
        Run("sums", "softmax", decoder_attention="elu")
    if "translation" not in TASKS:
        pytest.skip("no encoder-decoder task")
    base = Run("translation", "softmax", model=MODEL)
    plan = make_plan("both", base, ["softmax > favor+:num_features=8", "elu"], 1, tmp_path)
    first, second = plan.runs
    assert (first.attention, first.decoder_attention) == ("softmax", "favor+:num_features=8")
    assert first.label == "softmax > favor+:num_features=8"
    assert (second.attention, second.decoder_attention, second.label) == ("elu", None, "elu")
    assert len({plan.folder_of(x) for x in plan.runs}) == 2
    config = build_model(first, make_task("translation")).config
    assert (config.encoder_specs, config.cross_specs) == (["softmax"], ["favor+:num_features=8"])


def test_a_run_goes_on_with_the_cross_attention_that_it_was_started_with(tmp_path):
    run, task = Run("translation", "nprf:num_features=8:relative=1d", model=MODEL), make_task("translation")
    (tmp_path / "config.json").write_text('{"cross_attention": null}')  # before there was a default for nprf
    assert build_model(run, task).config.cross_attention == "auto"
    assert build_model(run, task, tmp_path).config.cross_specs == ["nprf:num_features=8"]


def test_heads_may_be_wider_or_narrower_than_their_share():
    torch.manual_seed(0)
    for method in ("softmax", "favor+", "skyformer"):
        layer = kf.KernelAttention(12, 5, method, head_dim=8)
        assert layer.query.weight.shape == (40, 12)
        assert layer.out.weight.shape == (12, 40)
        assert layer(torch.randn(2, 7, 12)).shape == (2, 7, 12)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim, got 5 and 12; or give head_dim"):
        kf.KernelAttention(12, 5)
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got 0"):
        kf.KernelAttention(12, 5, head_dim=0)
    settings = {**MODEL, "num_attention_heads": 3, "head_dim": 8, "classifier_size": 5, "classifier_act": "tanh"}
    model = KernelformerForSequenceClassification(KernelformerConfig(vocab_size=9, attention="elu", **settings))
    assert model.head[0].weight.shape == (5, 16)
    assert isinstance(model.head[1], torch.nn.Tanh)
    assert model.model.stack.blocks[0].attention.head_dim == 8
    with pytest.raises(ValueError, match="unknown classifier_act 'than'"):
        KernelformerConfig(classifier_act="than")


@pytest.mark.parametrize("task", ["sentences", "words", "masked"])
def test_a_saved_model_is_read_with_its_own_vocabulary_whatever_became_of_the_data(task, tmp_path):
    words = ["sun", "moon", "star", "sea", "hill", "tree", "road", "bird"]
    rows = [{"text": " ".join(words[(i * k) % 8] for k in range(1, 9)), "label": i % 2} for i in range(40)]

    def write(change):
        for split in ("train", "validation"):
            lines = [json.dumps({**row, "text": change(row["text"])}) for row in rows]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))

    write(str)
    options = {"data": str(tmp_path), "vocab_size": 300, "length": 16, "cache": str(tmp_path / "cache")}
    more = {} if task == "sentences" else {"validation_samples": 8}
    train(Run(task, "elu", model=MODEL, task_options=options | more, **SHORT), tmp_path / "run", quiet=True)
    heard = []
    before = evaluate(tmp_path / "run", log=heard.append)
    assert not any("not that of training" in x for x in heard)
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": "zz top " * 9, "label": 0}) for _ in rows))
    assert evaluate(tmp_path / "run", log=heard.append) == pytest.approx(before)
    told = [x for x in heard if x.startswith("the data is not that of training: train.jsonl, validation.jsonl: ")]
    assert len(told) == 1
    assert told[0].endswith("the validation split may hold rows that were trained on")
    other, saved = make_task(task, **options), make_task(task, **options)
    saved.load_extra(tmp_path / "run" / "model")
    assert [len(x.vocabulary().encode("moon")) for x in (other, saved)] == [4, 1]
    (tmp_path / "run" / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"model has no tokenizer.json, without which its model cannot be used"):
        evaluate(tmp_path / "run")


def test_embeddings_do_not_go_to_the_tokens_of_another_vocabulary(tmp_path):
    def rows(folder, words):
        folder.mkdir()
        texts = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) for i in range(40)]
        for split in ("train", "validation"):
            lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
        return {"data": str(folder), "vocab_size": 280, "length": 16, "cache": str(tmp_path / "cache")}

    before = rows(tmp_path / "a", ["sun", "moon", "star", "sea"])
    train(Run("sentences", "elu", model=MODEL, task_options=before, **SHORT), tmp_path / "first", quiet=True)
    options = rows(tmp_path / "b", ["hill", "tree", "road", "bird"])
    for more, own in (({}, "another one, of 278 tokens"), ({"kind": "bytes", "vocab_size": None}, "one of bytes")):
        run = Run("sentences", "elu", model=MODEL, task_options=options | more, start=str(tmp_path / "first"), **SHORT)
        message = rf"tokenizer.json is the vocabulary .* of 277 tokens; task 'sentences' has {own}\. .*--set task.tok"
        with pytest.raises(TrainingError, match=message):
            train(run, tmp_path / "second", quiet=True)
    train(replace(run, task_options=before), tmp_path / "second", quiet=True)  # made again, it is the same
    options["tokenizer"] = str(tmp_path / "first")
    train(replace(run, task_options=options), tmp_path / "third", quiet=True)


def test_no_draw_comes_when_the_learning_rate_is_nearly_gone(tmp_path):
    """Cosine from step 0: below a quarter from two thirds of the steps on."""
    spec, given = "favor+:num_features=8", {"batch_size": 4, "redraw": 3, "seed": 1, "model": MODEL}
    draws = {}
    for schedule in ("cosine", "constant"):
        run = Run("sums", spec, steps=30, schedule=schedule, **given)
        train(run, tmp_path / schedule, quiet=True)
        weights = load_file(tmp_path / schedule / "model" / "model.safetensors")
        draws[schedule] = {int(x) for name, x in weights.items() if name.endswith(".draw")}
    assert draws == {"cosine": {6}, "constant": {9}}  # before forwards 4, 7, ..., 19 or 28
