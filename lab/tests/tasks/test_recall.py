"""Associative recall: rows by their definition, splits, seeds, scores by distance, bad input."""

from __future__ import annotations

import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Subset

from kernelformer_lab.comparison import make_plan, report
from kernelformer_lab.data.batching import IGNORED
from kernelformer_lab.reports.comparison import comparison_table, spread_text
from kernelformer_lab.reports.results import write_results
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.base import Outcome
from kernelformer_lab.training import Run, evaluate, train

SMALL = {"length": 64, "num_pairs": 5, "distances": [8, 16, 40], "num_keys": 12, "num_values": 7, "num_fillers": 3}


def rows(task, split="train", count=20):
    return [task.split(split)[i] for i in range(count)]


@pytest.mark.parametrize("options", [SMALL, {}, {**SMALL, "distances": [62], "num_pairs": 1}])
def test_a_row_has_pairs_then_queries_for_those_within_the_distances_and_fillers_elsewhere(options):
    task = make_task("recall", **options)
    for row in rows(task):
        ids, labels, distances = (row[name].view(-1, 2) for name in ("input_ids", "labels", "distances"))
        assert ids.shape == labels.shape == distances.shape == (task.length // 2, 2)
        assert bool(((ids >= 0) & (ids < task.settings()["vocab_size"])).all())
        is_key, is_filler = ids < task.num_keys, ids >= task.num_keys + task.num_values
        pairs = {int(ids[i, 0]): i for i in (~is_key & ~is_filler)[:, 1].nonzero().flatten().tolist()}
        queries = [i for i in is_key[:, 0].nonzero().flatten().tolist() if i not in pairs.values()]
        assert list(pairs.values()) == list(range(task.num_pairs))
        assert queries[0] == task.num_pairs
        assert int(is_key.sum()) == task.num_pairs + len(queries)
        assert int(is_filler.sum()) == task.length - 2 * task.num_pairs - len(queries)
        assert int((labels != IGNORED).sum()) == int((distances != 0).sum()) == len(queries)
        for i in queries:
            pair = pairs[int(ids[i, 0])]
            assert labels[i, 1] == ids[pair, 1]
            assert 0 < distances[i, 1] == 2 * (i - pair) <= max(task.distances)


def test_a_row_depends_on_seed_and_number_alone_and_no_split_has_one_of_another():
    task, same = (make_task("recall", **SMALL, validation_samples=30) for _ in range(2))
    train = task.split("train")
    batch = same.split("train").__getitems__([7, 3, 999_999])
    for index, row in zip([7, 3, 999_999], batch, strict=True):
        assert all(torch.equal(train[index][name], row[name]) for name in row)
    other = make_task("recall", **SMALL, seed=1).split("train")
    assert not torch.equal(other[0]["input_ids"], train[0]["input_ids"])
    seen = {tuple(row["input_ids"].tolist()) for split in ("train", "validation", "test") for row in rows(task, split)}
    assert len(seen) == 60
    assert torch.equal(
        make_task("recall", **SMALL, train_samples=5).split("validation")[0]["input_ids"],
        make_task("recall", **SMALL).split("validation")[0]["input_ids"],
    )
    with pytest.raises(IndexError, match="samples are numbered from 0 to 29, got"):
        task.split("validation")[30]


def test_queries_and_what_they_ask_for_have_the_probabilities_that_are_said():
    task = make_task("recall", length=24, num_pairs=3, query_share=0.3, distances=[6, 14], num_keys=4, num_values=5)
    data = task.split("train").__getitems__(range(8000))
    ids, labels, distances = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels", "distances"))
    asked = distances[:, 7::2] > 0  # slots 3 to 11; from slot 10 on all pairs are too far
    assert asked[:, 0].all()
    assert not asked[:, 7:].any()
    pairs = torch.arange(3, 12) - distances[:, 7::2] // 2
    assert (pairs[:, 6][asked[:, 6]] == 2).all()  # of slot 9 only the last pair is near enough
    coins = asked[:, 1:7].flatten().long()
    for drawn, shares in (
        (coins, [0.7, 0.3]),
        (pairs[:, 0], [1 / 3] * 3),
        (pairs[:, 5][asked[:, 5]] - 1, [1 / 2] * 2),
        (ids[:, 4], [1 / 4] * 4),
        (labels[:, 7] - 4, [1 / 5] * 5),
    ):
        share = torch.tensor(shares)
        errors = (drawn.bincount() / len(drawn) - share).abs()
        assert (errors < 5 * (share * (1 - share) / len(drawn)).sqrt()).all(), errors


def test_rows_are_made_at_100_000_tokens_a_second_at_least():
    data = make_task("recall").split("train")
    start = time.process_time()
    assert sum(len(row["input_ids"]) for row in data.__getitems__(range(400))) > 100_000
    assert time.process_time() - start < 1


class Echo(nn.Module):
    """Predicts the value of a token whose pair is at most ``reach`` tokens back, else token 0; values are 12 to 18."""

    device = torch.device("cpu")

    def __init__(self, reach, size):
        super().__init__()
        self.reach, self.size = reach, size

    def forward(self, input_ids):
        length = input_ids.shape[1]
        near = torch.ones(length, length).tril(-1).triu(-self.reach).bool()
        after = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
        pair = (input_ids[:, :, None] == input_ids[:, None, :]) & near & ((after >= 12) & (after < 19))[:, None]
        last = torch.where(pair, torch.arange(length), -1).amax(-1)
        answers = torch.where(last >= 0, after.gather(1, last.clamp_min(0)), 0)
        return SimpleNamespace(logits=nn.functional.one_hot(answers, self.size).float())


@pytest.mark.parametrize("reach", [1, 8, 16, 63])
def test_a_model_of_limited_reach_is_right_at_the_distances_within_it(reach):
    task = make_task("recall", **SMALL, validation_samples=11)
    data = Subset(task.split("validation"), range(1, 10))
    scores = task.judge(Echo(reach, 30), data, 4)
    assert list(scores) == task.extra_metrics() == ["accuracy_to_8", "accuracy_to_16", "accuracy_to_40"]
    assert scores == {f"accuracy_to_{x}": float(x <= reach) for x in (8, 16, 40)}
    uneven = make_task("recall", **{**SMALL, "distances": [2, 3]})  # no query is three tokens away
    assert list(uneven.judge(Echo(reach, 30), uneven.split("validation"), 50)) == ["accuracy_to_2"]


def test_the_metric_is_the_share_of_right_answers_and_guessing_is_a_baseline():
    task = make_task("recall", **SMALL)
    assert task.score(Outcome(1.0, 0.75)) == {"accuracy": 0.75}
    assert task.baselines("validation")["guessing"] == {"accuracy": 1 / 7}
    batch = task.collate(rows(task, count=3))
    assert {name: tuple(x.shape) for name, x in batch.items()} == {"input_ids": (3, 64), "labels": (3, 64)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 63}, "length must be even, since a pair takes two tokens, got 63"),
        ({"num_keys": 4}, "num_pairs must be at most num_keys = 4 and length / 2 - 1 = 31, got 5"),
        ({"length": 10, "distances": [8]}, "at most num_keys = 12 and length / 2 - 1 = 4, got 5"),
        ({"query_share": 0.0}, "query_share must be above 0 and at most 1, got 0.0"),
        ({"query_share": 1.5}, "query_share must be above 0 and at most 1, got 1.5"),
        ({"distances": [8, 64]}, r"distances must differ, and be from 2 to length - 2 = 62, got \[8, 64\]"),
        ({"distances": [8, 8]}, r"distances must differ, .*, got \[8, 8\]"),
        ({"distances": [1]}, r"from 2 to length - 2 = 62, got \[1\]"),
        ({"distances": []}, r"distances must be a list of numbers of tokens, got \[\]"),
        ({"distances": "far"}, "distances must be a list of numbers of tokens, got 'far'"),
        ({"num_fillers": 0}, "num_fillers must be an integer of at least 1, got 0"),
    ],
)
def test_rows_that_cannot_be_made_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("recall", **{**SMALL, **options})


def test_a_comparison_has_a_column_for_each_range_in_its_table_its_record_and_its_reports(tmp_path):
    model = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    options = {**SMALL, "validation_samples": 4}
    run = Run(task="recall", attention="elu", task_options=options, model=model, steps=1, batch_size=2)
    plan = make_plan("a comparison", run, ["elu"], 2, tmp_path / "compared")
    for each in plan.runs:
        train(each, plan.folder_of(each), quiet=True)
    comparison = report(plan)
    names = ["accuracy_to_8", "accuracy_to_16", "accuracy_to_40"]
    ends = json.loads((plan.folder / "comparison.json").read_text())
    assert ends["extra_metrics"] == names
    first = ends["runs"][0]["result"]
    shares = [first["scores"][name] for name in names]
    assert min(shares) <= first["value"] <= max(shares)
    assert evaluate(plan.folder_of(plan.runs[0])).items() >= {**first["scores"], "accuracy": first["value"]}.items()
    (row,), out = comparison.summary(), io.StringIO()
    Console(file=out, width=300).print(comparison_table(comparison))
    write_results(tmp_path / "results", [plan.folder])
    pages = [(plan.folder / "report.html").read_text(), (tmp_path / "results" / "index.html").read_text()]
    for text in (out.getvalue(), *pages):
        assert all(text.count(name.replace("_", " ")) == 1 for name in names)
        assert all(spread_text([row.extra(name)], row.extra(name)) in text for name in names)
