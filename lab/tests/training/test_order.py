"""In which order samples come: grouped by length they come as often, beside others of their length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_training import interrupted, same_weights
from torch.utils.data import Dataset, Subset

from kernelformer_lab.comparison import Plan, check
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training import Run, StoppedError, evaluate, load_run, train
from kernelformer_lab.training.selection import LongestFirst, sample_lengths, training_order
from samples import few_samples

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LISTOPS = {"min_length": 3, "max_length": 40, "train_samples": 200, "validation_samples": 30, "test_samples": 10}
TEXTS = ("listops", "text", "retrieval", "sentences", "translation", "proteins", "proteins-masked", "series")


def order(size, count, seed, *, lengths=None, batch=8):
    """The order of a run, grouped where lengths are given."""
    data = Lengths(np.zeros(size, int) if lengths is None else lengths)
    return training_order(data, count=count, batch=batch, seed=seed, grouped=lengths is not None)


class Lengths(Dataset):
    """Samples of which only the lengths are known."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return 900


LENGTHS = np.random.default_rng(0).integers(1, 100, 900)


@pytest.mark.parametrize("count", [1, 7, 1000, 1003, 2500])
def test_grouped_samples_come_as_often_as_before_and_near_to_where_they_were(count):
    plain = list(order(900, 2800, 3))
    grouped = list(order(900, count, 3, lengths=LENGTHS))
    assert grouped == list(order(900, count, 3, lengths=LENGTHS))
    assert len(grouped) == count
    for first in range(0, count - 399, 50 * 8):
        assert sorted(grouped[first : first + 400]) == sorted(plain[first : first + 400])


@pytest.mark.parametrize("steps", [1, 37, 50, 75])
def test_more_steps_do_not_change_the_first_ones(steps):
    longer = list(order(900, 8 * 160, 1, lengths=LENGTHS))
    assert list(order(900, 8 * steps, 1, lengths=LENGTHS)) == longer[: 8 * steps]


def test_a_batch_of_little_data_has_hardly_a_sample_twice():
    grouped = np.array(list(order(900, 900 * 20, 2, lengths=LENGTHS, batch=300))).reshape(-1, 300)
    assert min(len(set(x)) for x in grouped) > 200
    assert sorted(grouped.ravel()[:900]) == list(range(900))  # a pass over all of it


def test_a_batch_has_samples_of_about_one_length_and_batches_come_in_no_order_of_length():
    def batches(found):
        return LENGTHS[list(found)].reshape(-1, 8)

    grouped = order(900, 400, 1, lengths=LENGTHS)
    assert np.ptp(batches(grouped), axis=1).max() < 15 < np.ptp(batches(order(900, 400, 1)), axis=1).min()
    longest = batches(grouped).max(1)
    assert np.abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.5
    assert list(order(900, 400, 2, lengths=LENGTHS)) != list(grouped)


def test_the_longest_come_first_and_each_once():
    lengths = np.array([3, 9, 9, 1])
    assert list(LongestFirst(lengths)) == [1, 2, 0, 3]
    assert len(LongestFirst(lengths)) == 4


def test_lengths_are_those_of_the_samples_or_are_refused():
    assert sample_lengths(Subset(Lengths(LENGTHS), [5, 2])).tolist() == LENGTHS[[5, 2]].tolist()
    assert sample_lengths(Lengths(list(LENGTHS))).tolist() == LENGTHS.tolist()
    assert sample_lengths(Subset(range(9), [1])) is None
    with pytest.raises(ValueError, match=r"lengths of Lengths must be one number for each of its 900 samples, got .*7"):
        sample_lengths(Lengths(LENGTHS[:7]))


@pytest.mark.parametrize("name", TEXTS)
def test_data_sets_know_the_lengths_of_their_samples(name, tmp_path):
    task = make_task(name, **few_samples(name, tmp_path, {}))
    data = task.split("train")
    names = ("input_ids", "other_input_ids", "values") + (("labels",) if name == "translation" else ())
    found = [max(len(data[i][x]) for x in names if x in data[i]) for i in range(len(data))]
    assert sample_lengths(data).tolist() == found


def run(**settings):
    values = {"steps": 12, "batch_size": 4, "eval_every": 6, "log_every": 3, "task_options": LISTOPS}
    return Run(task="listops", attention="favor+:num_features=8", model=MODEL, **{**values, **settings})


def test_a_grouped_run_goes_on_to_the_same_numbers_and_to_more_steps(tmp_path):
    longer = run(group_by_length=True, steps=20, schedule="constant")
    train(longer, tmp_path / "long", quiet=True)
    train(replace(longer, steps=7), tmp_path / "short", quiet=True)
    train(longer, tmp_path / "short", resume=True, quiet=True)
    assert same_weights(tmp_path / "short", tmp_path / "long")
    train(run(group_by_length=True), tmp_path / "whole", quiet=True)
    with pytest.raises(StoppedError):
        interrupted(run(group_by_length=True), tmp_path / "cut", step=5)
    train(run(group_by_length=True), tmp_path / "cut", resume=True, quiet=True)
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    train(run(), tmp_path / "plain", quiet=True)
    assert not same_weights(tmp_path / "plain", tmp_path / "whole")


def test_evaluation_in_the_order_of_lengths_is_the_mean_over_all_samples(tmp_path, monkeypatch):
    seen = []
    train(run(steps=1, warmup_steps=0, eval_every=None), tmp_path, quiet=True)
    task = make_task("listops", **LISTOPS)
    data = task.split("validation")
    model = load_run(tmp_path)[1].eval()
    with torch.no_grad():
        outs = [model(**task.collate([data[i]])) for i in range(len(data))]
    right = [int(out.logits.argmax()) == data[i]["labels"] for i, out in enumerate(outs)]
    monkeypatch.setattr(LongestFirst, "__iter__", lambda self: iter(seen.append(1) or np.argsort(-self.lengths)))
    found = evaluate(model, task, batch_size=4)
    assert seen
    assert found["loss"] == pytest.approx(sum(float(x.loss) for x in outs) / len(outs), rel=1e-5)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))


def test_samples_of_one_length_are_not_grouped(tmp_path):
    with pytest.raises(ValueError, match=r"group_by_length needs samples of different lengths, got task 'bytes'"):
        train(Run(task="bytes", attention="elu", model=MODEL, group_by_length=True), tmp_path, quiet=True)
    assert not (tmp_path / "run.json").exists()
    with pytest.raises(ValueError, match="group_by_length needs samples of different lengths"):
        check(Plan("", [Run(task="bytes", attention="elu", model=MODEL, group_by_length=True)], tmp_path), resume=False)
    with pytest.raises(ValueError, match="group_by_length must be True or False"):
        run(group_by_length=1)


@pytest.mark.parametrize("settings", [{"task": "bytes"}, {"task": "masked", "label_smoothing": 0.1}])
def test_sparse_prediction_is_refused_where_it_would_do_nothing(settings, tmp_path):
    options = few_samples(settings["task"], tmp_path, {})
    asked = Run(attention="elu", task_options=options, model={**MODEL, "sparse_prediction": True}, **settings)
    with pytest.raises(ValueError, match="sparse_prediction is for masked language models without label_smoothing"):
        train(asked, tmp_path / "run", quiet=True)
