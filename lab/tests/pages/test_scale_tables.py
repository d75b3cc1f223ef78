"""Tables of the plan for many ranks are what the formulas make of a record."""

from __future__ import annotations

import json

import pytest

from kernelformer.formatting import human_bytes, human_time
from pages import scale
from pages.records import TABLES, Records

SIZES = {"heads": 8, "head_dim": 64, "value_dim": 64, "features": 64, "facts": 17}


def timed(attention, causal, ranks, near):
    exchange = {**SIZES, "causal": causal, **near}
    numbers = {"length": 1000, "alone": 0.01 * ranks, "work": 0.011 * ranks, "split": 0.0125 * ranks, "merge": 1e-5}
    ratios = {"efficiency": 0.8, "expected": 0.9}
    sent = {"sent": {"125": [7, 3], "500": [7, 3]}, "formula": [7, 3]}
    return {"attention": attention, "causal": causal, "ranks": ranks, **numbers, **ratios, "exchange": exchange, **sent}


@pytest.fixture
def records(tmp_path):
    kinds = (("plain", {}), ("near", {"window": 64, "sinks": 4}))
    times = [timed(x, causal, n, near) for n in (2, 4) for x, near in kinds for causal in (False, True)]
    sizes = {"length": 1000, "inputs": 2**20, "merge": 1000.0}
    peaks = [
        {"attention": x, "causal": causal, "ranks": n, "peak": 3 * 2**20, **sizes}
        for n in (1, 2, 4)
        for x, _ in kinds
        for causal in (False, True)
    ]
    softmax = {"length": 1000, "ranks": 2, "bidirectional": 1.0, "causal": 0.5}
    file = tmp_path / scale.RANKS
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"times": times, "peaks": peaks, "softmax": softmax}))
    return Records(tmp_path)


def lines(name, records):
    table = TABLES[name](records).split("\n\n")[0]
    return [[x.strip() for x in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_what_was_measured_is_shown_as_it_is(records):
    assert lines("ranks-efficiency", records)[0] == [
        "`plain`, bidirectional",
        "2 x 1000",
        "20 ms",
        "25 ms",
        "0.80",
        "0.90",
    ]
    assert lines("ranks-bytes", records)[0] == ["`plain`, bidirectional", "2", "7 + 3", "7 + 3", "125, 500"]
    assert lines("ranks-memory", records)[0] == ["`plain`, bidirectional", "1 MiB", "3 MiB", "3 MiB", "3 MiB"]
    assert lines("scale-speeds", records)[0][1] == "22 µs a token, 10 µs for the state of another rank"


def test_a_short_run_is_said_to_be_a_trial(records, monkeypatch):
    assert "A trial run with 1000 tokens of a rank" in TABLES["ranks-efficiency"](records)
    monkeypatch.setattr(scale, "LENGTH", 1000)
    assert "trial" not in TABLES["ranks-efficiency"](records)


def test_times_of_a_layer_are_computed_from_the_fewest_ranks(records):
    (row,) = [x for x in lines("scale-plain", records) if x[0] == "4M, 64"]
    tokens = 4 * 2**20 // 64
    assert row[1] == f"{tokens:,}"
    assert row[2] == human_time(tokens * 2.2e-5 + 64 * 1e-5)
    sent = 63 * (2 * 4 * 8 * 64 * 65 + 17 * 8)
    assert row[3].split(" / ")[1] == human_time(3 * 63 * 2e-5 + 8 * sent / 1e11)
    assert row[4] == human_time(0.5 * 64 * (tokens / 1000) ** 2)  # pairs over those that were timed
    ratio = 0.5 * 64 * (tokens / 1000) ** 2 / (tokens * 2.2e-5 + 64 * 1e-5 + 3 * 63 * 2e-5 + 8 * sent / 1e11)
    assert row[6] == f"{ratio:,.0f}x"
    assert len(lines("scale-near", records)) == 12


def test_memory_and_bytes_grow_with_what_they_are_said_to(records):
    rows = lines("scale-memory", records)
    states = 8 * 1000
    assert rows[0][:3] == ["`plain`", "8", human_bytes(states)]
    tokens = 2**20 // 8 * 4 * 2**20 / 1000  # inputs, and three times as much
    assert rows[0][3] == human_bytes(tokens + states)
    ring = [x[-1].split(" / ") for x in lines("scale-bytes", records)]
    assert ring[0][0] == "10.5 GiB"  # 7 steps of 3 blocks of 2^17 tokens, 2 x 8 x 64 numbers each
    assert all(len(x) == 4 for x in ring)


def test_limits_are_given_for_every_speed_and_both_ways(records):
    rows = lines("scale-limits", records)
    assert len(rows) == 3 * (2 * 3 + 1)
    ours, theirs = ([float(y.replace(",", "")) for y in x[2:]] for x in (rows[0], rows[6]))
    assert ours[0] > ours[1] > ours[2]
    assert theirs[0] / theirs[1] == pytest.approx(10, rel=0.5)
