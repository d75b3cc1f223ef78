"""Rules over jobs on record: beyond the errors there is a verdict, within them there is none."""

from __future__ import annotations

import math

import pytest

from kernelformer.evidence.base import CONTRADICTS, MISSING_RESULT, OPEN, SUPPORTS, Finding
from kernelformer.evidence.rules import Above, Alike, All, Level, look_up, mean_of, sample_error
from kernelformer.evidence.study_rules import OfStudy, SmallerCost, conversion_cost


def entry(name: str, seed: int, value: float, part: str = "main", **more):
    result = {"value": value, "metric": "accuracy", "diverged": False, "value_error": 0.0, **more}
    return {"kind": "training", "part": part, "name": name, "seed": seed, "result": result, "probes": {}}


def runs(name: str, values, part: str = "main"):
    return [entry(name, seed, value, part) for seed, value in enumerate(values)]


FAR = [*runs("a:m=1", [0.80, 0.81, 0.82]), *runs("b", [0.60, 0.61, 0.62])]
NEAR = [*runs("a:m=1", [0.60, 0.70, 0.80]), *runs("b", [0.61, 0.69, 0.75])]


def test_a_difference_beyond_the_errors_decides_in_its_direction():
    assert Above("a:m=1", "b")(FAR).verdict == SUPPORTS
    assert Above("b", "a:m=1")(FAR).verdict == CONTRADICTS
    assert Above("a:m=1", "b", below=True)(FAR).verdict == CONTRADICTS


def test_a_difference_within_the_errors_leaves_it_open():
    assert Above("a:m=1", "b")(NEAR).verdict == OPEN


def test_one_seed_decides_nothing():
    finding = Above("a:m=1", "b")([FAR[0], *FAR[3:]])
    assert finding.verdict == OPEN
    assert "one seed" in finding.ours


def test_nothing_on_record_is_not_run():
    assert Above("a:m=1", "c")(FAR) == Finding(MISSING_RESULT, "")
    assert Level("c", "result.value")(FAR).verdict == MISSING_RESULT


def test_errors_over_validation_samples_can_leave_it_open():
    wide = [{**x, "result": {**x["result"], "value_error": 0.2}} for x in FAR]
    assert Above("a:m=1", "b")(wide).verdict == OPEN


def test_an_accuracy_without_a_measured_error_has_that_of_independent_samples():
    one = entry("a", 0, 0.8)
    one["result"].pop("value_error")
    one["settings"] = {"task_options": {"validation_samples": 400}}
    assert sample_error(one) == pytest.approx(math.sqrt(0.8 * 0.2 / 400))
    one["result"]["metric"] = "perplexity"
    assert math.isnan(sample_error(one))


def test_alike_needs_the_whole_interval_within_the_margin():
    assert Alike("a:m=1", "b", margin=0.5)(FAR).verdict == SUPPORTS
    assert Alike("a:m=1", "b", margin=0.2)(FAR).verdict == OPEN  # 0.2 apart, and a little more is possible
    assert Alike("a:m=1", "b", margin=0.1)(FAR).verdict == CONTRADICTS


def test_level_is_judged_by_the_mean():
    assert Level("b", "result.value", most=0.7)(FAR).verdict == SUPPORTS
    assert Level("b", "result.value", most=0.5)(FAR).verdict == CONTRADICTS
    assert Level("b", "result.value", most=0.61)(FAR).verdict == OPEN


def test_all_needs_every_rule_and_one_is_enough_against():
    good, bad, vague = Above("a:m=1", "b"), Above("b", "a:m=1"), Level("b", "result.value", most=0.61)
    assert All([good, good])(FAR).verdict == SUPPORTS
    assert All([good, bad, vague])(FAR).verdict == CONTRADICTS
    assert All([good, vague])(FAR).verdict == OPEN
    assert All([good, Above("a:m=1", "c")])(FAR).verdict == MISSING_RESULT
    assert good.text in All([good, bad]).text


def test_parts_can_be_compared_with_each_other():
    both = [*runs("a", [1.0, 1.1, 0.9], "slow"), *runs("a", [3.0, 3.1, 2.9], "fast")]
    assert Above("a", "a", "fast", "slow")(both).verdict == SUPPORTS
    assert "(fast)" in Above("a", "a", "fast", "slow")(both).ours


def test_a_name_without_options_means_the_attention_that_begins_with_it():
    mean = mean_of(FAR, "main", "a")
    assert mean is not None
    assert mean.count == 3
    assert mean_of(FAR, "other", "a") is None


def test_a_path_leads_to_a_number_or_to_nan():
    one = {**entry("a", 0, 0.5), "curve": [[100, 0.2], [200, 0.85], [300, 0.9]]}
    assert look_up(one, "result.value") == 0.5
    assert math.isnan(look_up(one, "result.scores.none"))
    assert math.isnan(look_up({"result": {"value": None}}, "result.value"))
    assert look_up(one, "reach.0.8") == 200
    assert look_up(one, "reach.0.99") == 300  # never: the last step


def test_diverged_runs_do_not_count_as_values_but_as_divergences():
    some = [*runs("a", [0.5, 0.5]), entry("a", 2, math.nan, diverged=True)]
    mean = mean_of(some, "main", "a")
    assert mean is not None
    assert mean.count == 2
    share = mean_of(some, "main", "a", "result.diverged")
    assert share is not None
    assert share.value == pytest.approx(1 / 3)


def study(part: str, standard: float, normalized: float):
    def model(loss):
        return {"bits_per_byte": 3.0, "converted": [{"features": 64, "mean": 3.0 + loss}]}

    record = {"models": {"standard": model(standard), "normalized": model(normalized)}}
    return {"kind": "study", "part": part, "record": record}


def test_costs_of_a_study_are_compared_over_its_seeds():
    parts = ("seed 0", "seed 1", "seed 2")
    rule = SmallerCost(
        parts, conversion_cost("normalized", 64), conversion_cost("standard", 64), ("one", "other"), "bits"
    )
    entries = [study(part, 0.3 + 0.01 * i, 0.01) for i, part in enumerate(parts)]
    assert rule(entries).verdict == SUPPORTS
    assert rule(entries[:1]).verdict == OPEN
    assert rule([]).verdict == MISSING_RESULT


def test_one_study_is_judged_by_its_own_rule():
    rule = OfStudy("main", "in words", lambda record: Finding(SUPPORTS, str(record["x"])))
    assert rule([{"kind": "study", "part": "main", "record": {"x": 7}}]) == Finding(SUPPORTS, "7")
    assert rule([]).verdict == MISSING_RESULT
