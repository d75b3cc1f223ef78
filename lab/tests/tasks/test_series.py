"""Real-valued sequences: their files, their normalization, and a model that learns from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kernelformer.models import MODELS, KernelformerConfig
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.training import Run, evaluate, train

RNG = np.random.default_rng(0)


def waves(count, length=40, channels=2, noise=0.1, seed=0):
    """Slow waves are of class 0; fast ones, which are a little higher, of class 1."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    time, level = np.linspace(0, 1, length), labels[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, (count, 1, channels))
    values = 3 * np.sin(2 * np.pi * (2 + 4 * level) * time[:, None] + phase) + 50 + 4 * level
    return values + noise * rng.standard_normal(values.shape), labels


@pytest.fixture
def folder(tmp_path):
    for seed, (split, count) in enumerate((("train", 60), ("validation", 12), ("test", 20))):
        series, labels = waves(count, seed=seed)
        np.savez(tmp_path / f"{split}.npz", series=series.astype(np.float32), labels=labels)
    return tmp_path


def task_of(data, **options):
    return make_task("series", data=str(data), **{"channels": 2, "length": 64, **options})


def test_values_are_normalized_by_the_training_split_alone(folder):
    task = task_of(folder)
    train_values = torch.cat([x["values"] for x in task.split("train")])
    torch.testing.assert_close(train_values.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(train_values.std(0, unbiased=False), torch.ones(2), atol=1e-4, rtol=0)
    raw, labels = np.load(folder / "train.npz")["series"].astype(np.float64), np.load(folder / "test.npz")["labels"]
    mean, std = raw.mean((0, 1)), raw.std((0, 1))
    sample = task.split("test")[3]
    wanted = (np.load(folder / "test.npz")["series"][3] - mean) / std
    np.testing.assert_allclose(sample["values"].numpy(), wanted, atol=1e-4)
    assert sample["labels"] == labels[3]
    assert task.baselines("test") == {"most frequent class": {"accuracy": 0.5}}


@pytest.mark.parametrize("way", ["nan", "lengths"])
def test_sequences_of_unequal_length_are_padded_and_masked(tmp_path, way):
    series, labels = waves(6, length=30)
    lengths = np.array([30, 7, 30, 1, 18, 29])
    more = {}
    if way == "nan":
        for x, n in zip(series, lengths, strict=True):
            x[n:] = np.nan
    else:
        more["lengths"] = lengths
    np.savez(tmp_path / "train.npz", series=series, labels=labels, **more)
    task = task_of(tmp_path, validation_share=0.0)
    samples = [task.split("train")[i] for i in range(6)]
    assert [len(x["values"]) for x in samples] == lengths.tolist()
    batch = task.collate(samples)
    assert batch["values"].shape == (6, 32, 2)
    assert batch["attention_mask"].sum(1).tolist() == lengths.tolist()
    assert (batch["values"][batch["attention_mask"] == 0] == 0).all()
    assert "attention_mask" not in task.collate([samples[0], samples[2]])
    real = np.concatenate([x[:n] for x, n in zip(series, lengths, strict=True)])
    np.testing.assert_allclose(task.statistics()["mean"], real.mean(0), rtol=1e-5)


@pytest.mark.parametrize("separator", ["\t", ",", "  "])
def test_files_of_the_ucr_archive_are_read(tmp_path, separator):
    series, labels = waves(10, channels=1)
    for name, rows in (("Waves_TRAIN.tsv", slice(0, 6)), ("Waves_TEST.tsv", slice(6, 10))):
        lines = [
            separator.join([str(3 * label - 1), *map(repr, map(float, x[:, 0])), *(["NaN"] if label else [])])
            for x, label in zip(series[rows], labels[rows], strict=True)
        ]
        (tmp_path / name).write_text("\n".join(lines) + "\n\n")
    task = task_of(tmp_path, channels=1, validation_share=0.3)
    assert task.statistics()["labels"] == [-1, 2]
    samples = task.split("test")
    assert [samples[i]["labels"] for i in range(4)] == [0, 1, 0, 1]
    assert all(samples[i]["values"].shape == (40, 1) for i in range(4))
    assert len(task.split("train")) + len(task.split("validation")) == 6


def test_a_regression_is_scored_in_the_unit_of_its_numbers(tmp_path):
    series = RNG.standard_normal((30, 12))
    targets = 1000 + 20 * series.mean(1)
    np.savez(tmp_path / "all.npz", series=series, targets=targets)
    task = task_of(tmp_path / "all.npz", channels=1, classes=1, test_share=0.4)
    assert task.metric == "pearson"
    assert task.settings()["num_labels"] == 1
    labels = task.split("train").labels
    assert (abs(labels.mean()), labels.std()) == pytest.approx((0, 1), abs=1e-5)
    std = task.statistics()["labels"][1]
    found = task.score(Outcome(0.25, predictions=np.array([0.5, -0.5]), labels=np.array([1.0, 0.0])))
    assert found == {"pearson": pytest.approx(1), "rmse": pytest.approx(0.5 * std)}
    wanted = np.sqrt(np.mean((task.split("test").labels * std) ** 2))
    assert task.baselines("test")["mean"]["rmse"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_and_what_stands_in_it_do_not_reach_a_class(pooling):
    torch.manual_seed(0)
    config = KernelformerConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_channels=3, num_labels=4, pooling=pooling
    )
    model = MODELS["series"](config).eval()
    values = torch.randn(1, 9, 3)
    padded = torch.cat([values, torch.full((1, 5, 3), torch.nan)], 1)
    mask = torch.arange(14)[None] < 9
    torch.testing.assert_close(model(padded, mask.long()).logits, model(values).logits)
    assert not any("tokens" in name for name, _ in model.named_parameters())  # no table that nothing uses
    model(padded, mask.long(), labels=torch.tensor([2])).loss.backward()
    assert all(torch.isfinite(x.grad).all() for x in model.parameters() if x.grad is not None)
    with pytest.raises(ValueError, match=r"values must be .* = \(B, L, 3\) numbers, got \(1, 9, 2\)"):
        model(values[..., :2])


@pytest.mark.parametrize("classes", [2, 1])
def test_a_model_learns_and_its_saved_self_is_scored_alike(folder, tmp_path, classes):
    options = {"data": str(folder), "channels": 2, "length": 64, "classes": classes}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    schedule = {"steps": 60, "warmup_steps": 5, "eval_every": 60, "save_every": 60, "batch_size": 16}
    attention = "favor+:num_features=16"
    run = Run(task="series", task_options=options, model=small, attention=attention, learning_rate=5e-3, **schedule)
    result = train(run, tmp_path / "run", quiet=True)
    again = evaluate(tmp_path / "run", split="validation")
    name = "accuracy" if classes == 2 else "pearson"
    assert result.value > (0.9 if classes == 2 else 0.8)
    assert again[name] == pytest.approx(result.value, abs=1e-6)
    saved = json.loads(next((tmp_path / "run").rglob("series.json")).read_text())
    assert saved == task_of(folder, classes=classes).statistics()


def write(path, **arrays):
    np.savez(path / "train.npz", **{"series": np.zeros((4, 5, 2)), "labels": np.arange(4) % 2, **arrays})


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"labels": np.arange(3)}, {}, r"labels numbers \(N\), got float64 \(4, 5, 2\) and int64 \(3,\)"),
        ({"labels": np.array(["a"] * 4)}, {}, r"labels numbers \(N\)"),
        (
            {"targets": np.arange(4)},
            {},
            r"series and labels \(or targets, but not both\), found series, labels, targets",
        ),
        ({"series": np.zeros((4, 5, 3))}, {}, "sequence 0: has 3 channels, and task.channels is 2"),
        (
            {"series": np.zeros((4, 99, 2))},
            {},
            "has 99 values, and task.length is 64; give a larger one",
        ),
        ({"series": np.array([[[0.0, np.inf]] * 5] * 4)}, {}, r"has \[0.0, inf\] at 0, before its end; fill gaps in"),
        ({"series": np.full((4, 5, 2), np.nan)}, {}, "sequence 0: has not one value"),
        (
            {"labels": np.arange(4.0)},
            {},
            r"4 different labels \(0, 1, 2, 3\), and task.classes is 2; give --set",
        ),
        ({"lengths": np.arange(4) + 3}, {}, r"lengths of .* must be \(4,\) integers from 0 to 5"),
        ({}, {"data": "hub:some/thing"}, "series are read from local files, got 'hub:some/thing'"),
        ({}, {"data": None}, "data"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, arrays, options, message):
    write(tmp_path, **arrays)
    given = {"data": str(tmp_path), "channels": 2, "length": 64, "validation_share": 0, **options}
    with pytest.raises(ValueError, match=message):
        make_task("series", **given).split("train")


def test_bad_sequences_can_be_left_out_and_are_counted(tmp_path):
    series = np.zeros((4, 5, 2))
    series[1, 2, 0] = np.nan
    write(tmp_path, series=series)
    task = task_of(tmp_path, skip_bad=True, validation_share=0)
    assert len(task.split("train")) == 3
    assert "left out 1 of 4 rows" in task.remarks()[0]


def test_a_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match="has no split of series, found nothing"):
        task_of(tmp_path).split("train")
    write(tmp_path)
    with pytest.raises(ValueError, match=r"has no test split, found train.npz"):
        task_of(tmp_path).split("test")
    (tmp_path / "x_TRAIN.tsv").write_text("0\tone\n")
    with pytest.raises(ValueError, match=r"has train.npz and x_TRAIN.tsv; keep one file for each split"):
        task_of(tmp_path).split("train")
    (tmp_path / "train.npz").unlink()
    with pytest.raises(ValueError, match=r"x_TRAIN.tsv, line 1: .*'one'; a line is a label and then values"):
        task_of(tmp_path).split("train")
