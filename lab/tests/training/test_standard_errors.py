"""Standard errors over samples: against what is known of means and shares, and against repeated samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernelformer.models import KernelformerConfig, KernelformerForImageClassification
from kernelformer_lab.analysis.statistics import GROUPS
from kernelformer_lab.tasks import make_task
from kernelformer_lab.training import evaluate
from kernelformer_lab.training.evaluation import in_top
from kernelformer_lab.training.meter import Contributions, score_text, split_errors, standard_errors


def classes(size, seed=0, share=0.7):
    """Labels of two classes, and answers that are right with some probability."""
    gen = np.random.default_rng(seed)
    labels = gen.integers(0, 2, size)
    answers = np.where(gen.random(size) < share, labels, 1 - labels)
    return Contributions(gen.random(size), np.ones(size, int), (answers == labels).astype(int), answers, labels)


def texts(size, seed=0):
    """Sums of losses over unequal numbers of labels."""
    gen = np.random.default_rng(seed)
    counts = gen.integers(1, 9, size)
    return Contributions(counts * gen.gamma(4.0, 0.5, size), counts, np.zeros(size, int))


@pytest.mark.parametrize("size", [2, 7, GROUPS])
def test_the_error_of_an_accuracy_is_that_of_a_share(size):
    samples = classes(size, seed=3)
    p = samples.outcome().right
    found = standard_errors(make_task("listops"), samples)["accuracy"]
    assert found == pytest.approx(math.sqrt(p * (1 - p) / (size - 1)), rel=1e-9)


def test_groups_give_the_same_error_within_what_their_number_allows():
    samples = classes(5 * GROUPS + 17)
    p = samples.outcome().right
    found = standard_errors(make_task("listops"), samples)["accuracy"]
    deviation = 1 / math.sqrt(2 * GROUPS)  # of a standard deviation that so many values give
    assert abs(found / math.sqrt(p * (1 - p) / len(samples.losses)) - 1) < 5 * deviation


def test_the_order_of_a_file_does_not_change_the_error():
    samples = classes(4 * GROUPS)
    order = np.argsort(samples.right)  # all wrong answers first, as in a file sorted by its classes
    ordered = Contributions(samples.losses[order], samples.counts[order], samples.right[order])
    p, size = samples.outcome().right, len(order)
    found = standard_errors(make_task("listops"), ordered)["accuracy"]
    assert abs(found / math.sqrt(p * (1 - p) / size) - 1) < 5 / math.sqrt(2 * GROUPS)


def test_the_error_of_a_mean_loss_is_that_of_a_ratio_and_scores_of_it_follow():
    samples = texts(900)
    loss, size, total = samples.outcome().loss, 900, samples.counts.sum()
    want = math.sqrt(size / (size - 1) * ((samples.losses - loss * samples.counts) ** 2).sum()) / total
    bits = standard_errors(make_task("bytes"), samples)
    assert bits["loss"] == pytest.approx(want, rel=1e-2)  # the two estimates differ by O(1 / N)
    assert bits["bits_per_byte"] == pytest.approx(bits["loss"] / math.log(2), rel=1e-9)
    words = standard_errors(make_task("words"), samples)
    assert words["perplexity"] == pytest.approx(math.exp(loss) * want, rel=2e-2)


def test_equal_counts_give_the_error_of_a_mean_exactly():
    losses = np.random.default_rng(1).random(50)
    samples = Contributions(8 * losses, np.full(50, 8), np.zeros(50, int))
    want = losses.std(ddof=1) / math.sqrt(50)
    assert standard_errors(make_task("bytes"), samples)["loss"] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("metric", ["matthews", "f1"])
def test_errors_of_scores_that_are_no_means_are_those_of_repeated_samples(metric):
    task, count, size = make_task("sentences"), 1000, 200
    values = [task.score(classes(size, seed).outcome())[metric] for seed in range(count)]
    some = [standard_errors(task, classes(size, seed))[metric] for seed in range(20)]
    bias = 0.02  # of the jackknife at 200 samples, beside the two standard errors
    allowed = 5 * math.hypot(1 / math.sqrt(2 * count), np.std(some) / np.mean(some) / math.sqrt(20)) + bias
    assert abs(np.mean(some) / np.std(values) - 1) < allowed


def test_errors_of_numbers_are_there_too():
    gen = np.random.default_rng(0)
    labels = gen.normal(size=300)
    answers = 0.6 * labels + 0.8 * gen.normal(size=300)
    samples = Contributions((answers - labels) ** 2, np.ones(300, int), np.zeros(300, int), answers, labels)
    found = standard_errors(make_task("sentences", labels=1), samples)
    r = np.corrcoef(answers, labels)[0, 1]
    assert found["pearson"] == pytest.approx((1 - r**2) / math.sqrt(300), rel=0.3)  # of normal ones, for large N
    assert found["loss"] == pytest.approx(samples.losses.std(ddof=1) / math.sqrt(300), rel=1e-9)


def test_nothing_is_said_of_one_sample_or_of_what_a_model_writes():
    assert all(math.isnan(x) for x in standard_errors(make_task("listops"), classes(1)).values())
    two = Contributions(np.array([1.0, 0.0]), np.array([3, 0]), np.array([1, 0]))  # the second has no label
    assert math.isnan(standard_errors(make_task("bytes"), two)["loss"])
    assert "bleu" not in standard_errors(make_task("translation"), texts(5))


def test_errors_stand_beside_their_scores():
    values = {"loss": 1.0, "loss_error": 0.25, "rms_error": 3.0, "accuracy": 0.5}
    scores, errors = split_errors(values)
    assert scores == {"loss": 1.0, "rms_error": 3.0, "accuracy": 0.5}
    assert errors == {"loss": 0.25}
    assert score_text(0.75, 0.0433) == "0.7500 ± 0.0433"
    assert score_text(0.75, math.nan) == score_text(0.75) == "0.7500"


def test_the_five_likeliest_classes_count_where_there_are_more(tmp_path):
    gen = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 9, generator=gen), torch.randint(0, 9, (50,), generator=gen)
    ranks = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)
    assert in_top(logits, labels).tolist() == (ranks < 5).long().tolist()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 3)).astype(np.uint8)
    for name in ("train", "validation"):
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=labels[:40].numpy())
    for count in (9, 5):
        task = make_task("images", data=tmp_path, size=4, classes=count, skip_bad=True)
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        torch.manual_seed(0)
        model = KernelformerForImageClassification(
            KernelformerConfig(**task.settings(), **small, patch_size=2, attention="softmax")
        )
        found = evaluate(model, task, batch_size=16)
        assert ("top5_accuracy" in found) == (count > 5)
        data = task.split("validation")
        batch = task.collate([data[i] for i in range(len(data))])
        with torch.no_grad():
            wanted = in_top(model.eval()(batch["pixel_values"]).logits, batch["labels"]).double().mean()
        if count > 5:
            assert found["top5_accuracy"] == pytest.approx(float(wanted))
            assert found["top5_accuracy"] >= found["accuracy"]
