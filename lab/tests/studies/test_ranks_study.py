"""One sequence over several processes: bytes are the formula's, the study shows them, and a mismatch is an error."""

from __future__ import annotations

import copy
import gc
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kernelformer.attention.ranks import HEADER
from kernelformer.errors import WorkerError
from kernelformer_lab import jobs
from kernelformer_lab.analysis.scaling import Exchange
from kernelformer_lab.bench import harness
from kernelformer_lab.studies import ranks as study
from kernelformer_lab.studies.ranks import RanksSettings, SplitCase, memory_of_ranks, run_ranks, time_ranks

ROOT = Path(__file__).parents[3]
SMALL = {"heads": 2, "head_dim": 4}
SETTINGS = RanksSettings(
    attention=("favor+:num_features=8", "favor+:num_features=8:window=4:sinks=2"),
    ranks=(2,),
    length=40,
    crowded_length=40,
    rounds=1,
    softmax=8,
    **SMALL,
)
LENGTHS = (5, 20)  # the first is shorter than two windows
OTHERS = [
    ("favor+:num_features=8:window=4", {"batch": 3, "masked": True}),
    ("favor+:num_features=8:window=4", {"dtype": "float64", "key_heads": 1}),
    ("favor+:num_features=8:window=4:sinks=2", {"packed": True}),
    ("favor+:num_features=8:window=4:sinks=2", {"slope": 3, "key_heads": 1}),
    ("favor+:num_features=8", {"slope": 3}),
    ("favor+:num_features=8:sinks=2", {}),
    ("trigonometric:num_features=8", {"batch": 2}),
    ("trigonometric:num_features=8:window=3", {"masked": True}),
    ("elu", {"packed": True, "key_heads": 1}),
    ("relu:num_features=8", {"dtype": "bfloat16", "masked": True}),
    ("local:window=5:sinks=0", {}),
    ("local:window=5:sinks=1", {"batch": 2, "masked": True}),
]
CASES = [
    *study.cases(SETTINGS),
    *(SplitCase(x, causal, **{**SMALL, **more}) for x, more in OTHERS for causal in (False, True)),
]


@pytest.fixture(scope="module")
def counted():
    """Bytes that two ranks have sent in all cases, in one start of two processes."""
    return run_ranks(2, CASES, length=40, lengths=LENGTHS, rounds=0, softmax=0)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """Times of a group of one, in this process."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    cases = [asdict(x) for x in study.cases(SETTINGS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # see `quick_gc`
        return time_ranks(rank=0, count=1, store=store, cases=cases, length=40, lengths=(), rounds=1, softmax=8)


@pytest.fixture
def here(monkeypatch, counted, timed, tmp_path, quick_gc):
    """A study that takes the bytes of two ranks, and the times and peaks of a group of one in this process."""
    figures = [
        {
            "cases": [{**x, **y} for x, y in zip(timed["cases"], rank["cases"], strict=False)],
            "softmax": timed["softmax"],
        }
        for rank in counted
    ]
    monkeypatch.setattr(study, "run_ranks", lambda *_, **__: figures)

    def peaks(count, cases, length):
        store = str(tmp_path / f"store{count}")
        given = [asdict(x) for x in cases]
        return [memory_of_ranks(rank=0, count=1, store=store, cases=given, length=length)] * count

    monkeypatch.setattr(study, "run_memory", peaks)
    return figures


def test_what_ranks_send_is_the_formula_to_the_byte_and_has_no_length_in_it(counted):
    for number, case in enumerate(CASES):
        traffic = Exchange(**counted[0]["cases"][number]["exchange"]).traffic(2)
        for rank in counted:
            sent = rank["cases"][number]["sent"]
            assert sent == {str(n): [traffic.forward, traffic.backward] for n in LENGTHS}, case


def test_every_way_is_timed_and_a_group_of_one_sends_nothing(timed):
    for figures in timed["cases"]:
        for name in ("alone", "work", "split", "few", "many"):
            assert figures[name]["rounds"] == 1
            assert figures[name]["seconds"] > 0
        assert Exchange(**figures["exchange"]).traffic(1).total == 0
    assert timed["softmax"].keys() == {"bidirectional", "causal"}


def test_the_study_shows_and_keeps_what_was_measured(here, tmp_path):
    ranks, done = study.STUDY, []
    result = ranks.measure(SETTINGS, tmp_path, progress=lambda: done.append(1))
    assert len(done) == ranks.steps(SETTINGS) == 3
    assert [x.row_count for x in ranks.tables(result)] == [4, 4, 8]
    assert [(x["ranks"], x["causal"]) for x in result.figures["peaks"]] == [
        (n, c) for n in (1, 2) for _ in range(2) for c in (False, True)
    ]
    assert all(x["inputs"] == 4 * 2 * 40 * 4 * 4 for x in result.figures["peaks"])
    result.save()
    record = json.loads((tmp_path / "ranks.json").read_text())
    assert record["command"].startswith("kernelformer study ranks --attention favor+:num_features=8,")
    for row in record["times"]:
        assert row["efficiency"] == pytest.approx(row["alone"] / row["split"])
        assert row["expected"] == pytest.approx(row["alone"] / row["work"])
        assert row["merge"] >= 0
        assert list(row["sent"].values()) == [row["formula"]] * len(LENGTHS)
    assert record["softmax"]["length"] == 8
    ranks.picture(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_bytes_that_are_not_the_formulas_are_an_error(here, tmp_path, monkeypatch):
    wrong = copy.deepcopy(here)
    wrong[1]["cases"][0]["sent"]["5"][1] += 4
    monkeypatch.setattr(study, "run_ranks", lambda *_, **__: wrong)
    with pytest.raises(
        ValueError, match=r"rank 1 of 2 sent 512 bytes forward and 324 backward for 5 tokens.*512 and 320"
    ):
        study.STUDY.measure(SETTINGS, tmp_path)


def test_an_unknown_attention_is_refused_before_anything_is_started(tmp_path):
    with pytest.raises(ValueError, match="unknown method 'nothing'"):
        study.STUDY.measure(RanksSettings(attention=("nothing",)), tmp_path)


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    script = (
        "import json, sys, time; job = json.load(sys.stdin)\nsys.exit('no memory') if job['rank'] else time.sleep(100)"
    )
    monkeypatch.setattr(jobs, "COMMAND", [sys.executable, "-S", "-c", script])
    with pytest.raises(WorkerError, match="rank 1 of 2: no memory"):
        harness.run_together(run_ranks, count=2, threads=1)


def test_the_page_has_as_many_facts_as_ranks_compare():
    assert f"facts={HEADER}," in (ROOT / "docs" / "measured" / "scale.md").read_text()


@pytest.mark.slow
def test_the_whole_study_runs_in_processes_of_its_own(tmp_path):
    threads = torch.get_num_threads()
    long = replace(SETTINGS, length=8192)  # more than fits into what the heap has left over
    result = study.STUDY.measure(long, tmp_path)
    assert {x["ranks"] for x in result.figures["peaks"]} == {1, 2}
    assert all(x["peak"] > 0 for x in result.figures["peaks"])
    assert torch.get_num_threads() == threads
