"""In which order samples come: grouped by length they come as often, beside others of their length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_training import interrupted, same_weights

from kernelformer.tasks import make_task
from kernelformer.training import Run, StoppedError, evaluate, load_run, train
from kernelformer.training.order import GroupedOrder, LongestFirst, Order, sample_lengths
from samples import few_samples

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LISTOPS = {"min_length": 3, "max_length": 40, "train_samples": 200, "validation_samples": 30, "test_samples": 10}
TEXTS = ("listops", "text", "retrieval", "sentences", "translation", "proteins", "proteins-masked", "series")


@pytest.mark.parametrize("count", [1, 7, 1000, 1003, 2500])
def test_grouped_samples_come_as_often_as_before_and_near_to_where_they_were(count):
    lengths = np.random.default_rng(0).integers(1, 100, 900)
    plain = list(Order(900, count, seed=3))
    grouped = list(GroupedOrder(Order(900, count, seed=3), lengths, batch=8, seed=3))
    assert grouped == list(GroupedOrder(Order(900, count, seed=3), lengths, batch=8, seed=3))
    for first in range(0, count, 50 * 8):
        assert sorted(grouped[first : first + 400]) == sorted(plain[first : first + 400])


def test_a_batch_has_samples_of_about_one_length_and_batches_come_in_no_order_of_length():
    lengths = np.random.default_rng(0).integers(1, 100, 400)

    def batches(order):
        return lengths[list(order)].reshape(-1, 8)

    plain, grouped = Order(400, 400, seed=1), GroupedOrder(Order(400, 400, seed=1), lengths, batch=8, seed=1)
    assert np.ptp(batches(grouped), axis=1).max() < 12 < np.ptp(batches(plain), axis=1).min()
    longest = batches(grouped).max(1)
    assert np.abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.5
    assert list(GroupedOrder(plain, lengths, batch=8, seed=2)) != list(grouped)


def test_the_longest_come_first_and_each_once():
    lengths = np.array([3, 9, 9, 1])
    assert list(LongestFirst(lengths)) == [1, 2, 0, 3]
    assert len(LongestFirst(lengths)) == 4


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


def test_a_grouped_run_goes_on_to_the_same_numbers(tmp_path):
    train(run(group_by_length=True), tmp_path / "whole", quiet=True)
    with pytest.raises(StoppedError):
        interrupted(run(group_by_length=True), tmp_path / "cut", step=5)
    train(run(group_by_length=True), tmp_path / "cut", resume=True, quiet=True)
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    train(run(), tmp_path / "plain", quiet=True)
    assert not same_weights(tmp_path / "plain", tmp_path / "whole")


def test_evaluation_in_the_order_of_lengths_is_the_mean_over_all_samples(tmp_path):
    train(run(steps=1, warmup_steps=0, eval_every=None), tmp_path, quiet=True)
    task = make_task("listops", **LISTOPS)
    data = task.split("validation")
    model = load_run(tmp_path)[1].eval()
    with torch.no_grad():
        outs = [model(**task.collate([data[i]])) for i in range(len(data))]
    right = [int(out.logits.argmax()) == data[i]["labels"] for i, out in enumerate(outs)]
    found = evaluate(model, task, batch_size=4)
    assert found["loss"] == pytest.approx(sum(float(x.loss) for x in outs) / len(outs), rel=1e-5)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))


def test_samples_of_one_length_are_not_grouped(tmp_path):
    with pytest.raises(ValueError, match=r"group_by_length needs samples of different lengths, got task 'bytes'"):
        train(Run(task="bytes", attention="elu", model=MODEL, group_by_length=True), tmp_path, quiet=True)
    with pytest.raises(ValueError, match="group_by_length must be True or False"):
        run(group_by_length=1)
