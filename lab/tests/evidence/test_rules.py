"""Rules over jobs on record: beyond the errors there is a verdict, within them there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kernelformer_lab.analysis.statistics import student_p
from kernelformer_lab.evidence.base import MISSING_RESULT, NOT_SEEN, OPEN, SUPPORTED, Finding
from kernelformer_lab.evidence.items import ITEMS
from kernelformer_lab.evidence.rules import (
    Above,
    Alike,
    All,
    AtLeast,
    Later,
    LearnedBy,
    Level,
    SmallerCost,
    Where,
    conversion_cost,
    conversion_costs,
    look_up,
    mean_of,
    moved_at_once,
    moved_tuned,
    moved_values,
    sample_error,
)


def entry(name: str, seed: int, value: float, part: str = "main", **more):
    result = {"value": value, "metric": "accuracy", "diverged": False, "value_error": 0.0, **more}
    return {"kind": "training", "part": part, "name": name, "seed": seed, "result": result, "probes": {}}


def runs(name: str, values, part: str = "main"):
    return [entry(name, seed, value, part) for seed, value in enumerate(values)]


FAR = [*runs("a:m=1", [0.80, 0.81, 0.82]), *runs("b", [0.60, 0.62, 0.61])]
NEAR = [*runs("a:m=1", [0.60, 0.70, 0.80]), *runs("b", [0.61, 0.69, 0.75])]


def test_a_difference_beyond_the_errors_decides_in_its_direction():
    assert Above("a:m=1", "b")(FAR).verdict == SUPPORTED
    assert Above("b", "a:m=1")(FAR).verdict == NOT_SEEN
    assert Above("a:m=1", "b", below=True)(FAR).verdict == NOT_SEEN


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
    assert Alike("a:m=1", "b", margin=0.5)(FAR).verdict == SUPPORTED
    assert Alike("a:m=1", "b", margin=0.2)(FAR).verdict == OPEN  # 0.2 apart, and a little more is possible
    assert Alike("a:m=1", "b", margin=0.1)(FAR).verdict == NOT_SEEN


def test_level_is_judged_by_the_mean():
    assert Level("b", "result.value", level=0.7)(FAR).verdict == SUPPORTED
    assert Level("b", "result.value", level=0.5)(FAR).verdict == NOT_SEEN
    assert Level("b", "result.value", level=0.61)(FAR).verdict == OPEN
    above = Level("b", "result.value", level=0.5, above=True, scale=100)
    assert above(FAR) == Finding(SUPPORTED, "`b`: the value 61.00 ± 0.58", pytest.approx(0.00274, rel=1e-2))
    assert Level("b", "result.value", level=0.7, above=True)(FAR).verdict == NOT_SEEN
    assert "is above 50 by more than" in above.text


def test_where_nothing_is_learned_nothing_is_judged():
    learned = Level("b", "result.value", level=0.5, above=True)
    rule = Where(learned, Above("a:m=1", "b"))
    assert rule(FAR) == Above("a:m=1", "b")(FAR)
    finding = Where(replace(learned, level=0.7), Above("a:m=1", "b"))(FAR)
    assert finding.verdict == OPEN
    assert "too little is learned to tell (`b`: the value 0.6100 ± 0.0058)" in finding.ours
    assert Where(learned, Above("a:m=1", "c"))(FAR).verdict == MISSING_RESULT
    assert "; open unless the value of `b` is above 0.5 by more than two" in rule.text
    assert replace(learned, level=0.7, against=False)(FAR).verdict == OPEN
    assert replace(learned, level=0.7)(FAR).verdict == NOT_SEEN


def test_all_needs_every_rule_and_one_is_enough_against():
    good, bad, vague = Above("a:m=1", "b"), Above("b", "a:m=1"), Level("b", "result.value", level=0.61)
    assert All([good, good])(FAR).verdict == SUPPORTED
    assert All([good, bad, vague])(FAR).verdict == NOT_SEEN
    assert All([good, vague])(FAR).verdict == OPEN
    assert All([good, Above("a:m=1", "c")])(FAR).verdict == MISSING_RESULT
    assert All([bad, Above("a:m=1", "c")])(FAR).verdict == NOT_SEEN
    assert good.text in All([good, bad]).text


def test_parts_can_be_compared_with_each_other():
    both = [*runs("a", [1.0, 1.1, 0.9], "slow"), *runs("a", [3.0, 3.2, 2.9], "fast")]
    assert Above("a", "a", "fast", "slow")(both).verdict == SUPPORTED
    assert "(fast)" in Above("a", "a", "fast", "slow")(both).ours


def test_an_attention_is_known_by_its_whole_name():
    mean = mean_of(FAR, "main", "a:m=1")
    assert mean is not None
    assert mean.count == 3
    assert mean_of(FAR, "main", "a") is None
    assert mean_of(FAR, "other", "a:m=1") is None


def test_at_least_as_good_allows_a_margin_and_no_more():
    near = [*runs("a", [0.700, 0.701, 0.702]), *runs("b", [0.701, 0.7025, 0.7028])]
    assert AtLeast("a", "b", margin=0.02)(near).verdict == SUPPORTED
    assert AtLeast("a", "b", margin=0.001)(near).verdict == OPEN
    assert AtLeast("b", "a:m=1", margin=0.02)(FAR).verdict == NOT_SEEN
    assert AtLeast("b", "a:m=1", margin=0.02, below=True)(FAR).verdict == SUPPORTED


def test_a_path_leads_to_a_number_or_to_nan():
    one = {**entry("a", 0, 0.5), "curve": [[100, 0.2], [200, 0.85], [300, 0.9]]}
    assert look_up(one, "result.value") == 0.5
    assert math.isnan(look_up(one, "result.scores.none"))
    assert math.isnan(look_up({"result": {"value": None}}, "result.value"))
    assert look_up(one, "reach.0.8") == 200
    assert math.isnan(look_up(one, "reach.0.99"))  # never
    assert look_up({"curve": [[50, None], [100, 0.9]]}, "reach.0.8") == 100
    assert sample_error(one, "reach.0.8") == pytest.approx(100 / math.sqrt(12))


def test_a_diverged_run_has_no_right_answer_and_leaves_other_measures_open():
    bad = [entry("a", seed, math.nan, diverged=True) for seed in range(3)]
    good = runs("b", [0.60, 0.61, 0.62])
    finding = Above("b", "a")([*bad, *good])
    assert finding.verdict == SUPPORTED
    share = mean_of(bad, "main", "a", "result.diverged")
    assert share is not None
    assert share.value == 1
    losses = [{**x, "result": {**x["result"], "metric": "perplexity"}} for x in bad]
    finding = Above("b", "a")([*losses, *good])
    assert finding.verdict == OPEN
    assert "without a value: 0, 3" in finding.ours
    one = Above("b", "a")([*losses[:1], *runs("a", [0.1, 0.1])[1:], *good])
    assert one.verdict == OPEN


def test_a_level_that_is_never_reached_decides_nothing():
    slow = [{**x, "curve": [[50, 0.1], [100, 0.2]]} for x in runs("a", [0.2, 0.2, 0.2])]
    quick = [{**x, "curve": [[50, 0.9], [100, 1.0]]} for x in runs("b", [1.0, 1.0, 1.0])]
    assert Alike("a", "a", path="reach.0.8", margin=200)(slow).verdict == OPEN
    assert Above("a", "b", path="reach.0.8")([*slow, *quick]).verdict == OPEN


def test_a_level_that_is_never_reached_is_the_last_by_ranks():
    def curves(name, steps):
        return [
            {**x, "curve": [[s, 0.9]] if s else [[50, 0.1]]} for x, s in zip(runs(name, [0.5] * 5), steps, strict=True)
        ]

    slow, quick = curves("a", [700, None, 500, None, 700]), curves("b", [150, 200, 200, 150, 300])
    finding = Later("a", "b", path="reach.0.8")([*slow, *quick])
    assert finding.verdict == SUPPORTED
    assert "median 700 (2 of 5 never), `b` median 200; p = 0.0079 by ranks" in finding.ours
    assert Later("a", "b", path="reach.0.8", below=True)([*slow, *quick]).verdict == NOT_SEEN
    assert Later("b", "a", path="reach.0.8", below=True)([*slow, *quick]).verdict == SUPPORTED
    assert Later("a", "b", path="reach.0.8")([*slow[:3], *quick[:3]]).verdict == OPEN  # three seeds
    assert Later("a", "b", path="reach.0.8")(slow).verdict == MISSING_RESULT


def test_runs_of_one_seed_are_pairs():
    spread = [*runs("a", [0.5, 0.7, 0.9]), *runs("b", [0.48, 0.67, 0.88])]
    finding = Above("a", "b")(spread)
    assert finding.verdict == SUPPORTED
    assert finding.p == pytest.approx(student_p(7, 2))
    assert Above("a", "b")([*spread[:3], *reversed(spread[3:])]) == finding
    shifted = [*spread[:3], *({**x, "seed": x["seed"] + 3} for x in spread[3:])]
    assert Above("a", "b")(shifted).ours == "no seed has runs of both `a` and `b`"
    alike = [*runs("a", [0.5, 0.7, 0.9]), *runs("b", [0.4, 0.6, 0.8])]
    assert "neither seeds nor samples differ" in Above("a", "b")(alike).ours


def test_p_values_are_of_the_border_between_verdicts():
    near = [*runs("a", [0.50, 0.61, 0.69]), *runs("b", [0.51, 0.60, 0.70])]
    for rule in (AtLeast("a", "b", margin=0.05), Alike("a", "b", margin=0.05), Above("a", "b"), Above("b", "a")):
        finding = rule(near)
        assert (finding.verdict != OPEN) == (finding.p < 0.05)
    good, vague = Above("a:m=1", "b"), Level("b", "result.value", level=0.615)
    assert All([good, vague])(FAR).p == vague(FAR).p
    assert All([Above("b", "a:m=1"), vague])(FAR).p == pytest.approx(2 * good(FAR).p)


def test_runs_that_learn_or_do_not_are_counted():
    learned = [*runs("a", [0.99] * 6), *runs("b", [0.3, 0.98, 0.3, 0.2, 0.97, 0.3])]
    finding = LearnedBy("a", "b", level=0.9)(learned)
    assert (finding.verdict, finding.p) == (OPEN, pytest.approx(0.0606, rel=1e-3))
    assert "`a` 6 of 6 runs, `b` 2 of 6; p = 0.061 (Fisher)" in finding.ours
    fewer = [*learned[:6], *runs("b", [0.3, 0.98, 0.3, 0.2, 0.3, 0.3])]
    assert LearnedBy("a", "b", level=0.9)(fewer).verdict == SUPPORTED
    assert LearnedBy("b", "a", level=0.9)(fewer).verdict == NOT_SEEN
    assert LearnedBy("b", "a", level=0.9, below=True)(fewer).verdict == SUPPORTED
    assert LearnedBy("a", "c")(fewer).verdict == MISSING_RESULT


def test_a_margin_stands_in_the_words_of_its_claim():
    for item in ITEMS.values():
        for claim in item.claims:
            rules = [x.rule if isinstance(x, Where) else x for x in all_rules(claim.rule)]
            for margin in {x.margin for x in rules if isinstance(x, Alike | AtLeast)}:
                shown = {f"{margin:g}", f"{100 * margin:g} points"}
                assert any(x in claim.text for x in shown), (item.name, claim.text, margin)


def all_rules(rule):
    return [x for each in rule.rules for x in all_rules(each)] if isinstance(rule, All) else [rule]


def test_identical_results_support_every_claim_of_likeness_at_its_number_of_samples():
    for item in ITEMS.values():
        rules = [x for claim in item.claims for x in all_rules(claim.rule) if isinstance(x, Alike | AtLeast)]
        for rule in rules:
            if "accuracy" in rule.name:
                job = next(x for x in item.jobs() if x.part == rule.part)
                options = job.request["task_options"]
                samples = options.get("test_samples" if "test" in rule.name else "validation_samples")
                assert 2 * math.sqrt(2 * 0.25 / samples) < rule.margin, (item.name, rule)


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
    assert rule(entries).verdict == SUPPORTED
    assert rule(entries[:1]).verdict == OPEN
    assert rule([]).verdict == MISSING_RESULT
    assert conversion_costs(entries[0]["record"])["normalized, m = 64"] == pytest.approx(0.01)


def test_moved_weights_are_judged_and_shown_by_attention():
    def study(part, at_once, tuned):
        row = {"attention": "favor+", "at_once": [at_once, at_once + 0.2], "tuned": [[1, 9.0], [2, tuned]]}
        exact = {"attention": "softmax", "at_once": [3.0], "tuned": [[1, 9.0], [2, 2.9]], "fresh": [[2, 5.0]]}
        return {"kind": "study", "part": part, "record": {"moved": [exact, {**row, "fresh": [[2, 6.0]]}]}}

    parts = ("seed 0", "seed 1", "seed 2")
    entries = [study(part, 3.5 + 0.01 * i, 2.92 + 0.001 * i) for i, part in enumerate(parts)]
    names = ("one", "other")
    lost = SmallerCost(parts, moved_at_once("softmax"), moved_at_once("favor+"), names, "bits")
    assert lost(entries).verdict == SUPPORTED
    near = SmallerCost(parts, moved_tuned("favor+"), moved_tuned("softmax", plus=0.05), names, "bits")
    assert near(entries).verdict == SUPPORTED
    nearer = SmallerCost(parts, moved_tuned("favor+"), moved_tuned("softmax", plus=0.01), names, "bits")
    assert nearer(entries).verdict == NOT_SEEN
    shown = moved_values(entries[0]["record"])
    assert shown["favor+, at once"] == pytest.approx(3.6)
    assert (shown["favor+, tuned"], shown["favor+, fresh"], shown["softmax, fresh"]) == (2.92, 6.0, 5.0)


GROUPS = 40


def with_samples(entries, first: float, rest: float, path="result.value"):
    """Entries whose runs know what their samples add to the error: so much the first half, so much the second."""
    parts = [first] * (GROUPS // 2) + [rest] * (GROUPS // 2)
    return [{**x, "probes": {"samples": {"path": path, "deviations": parts}}} for x in entries]


WIDE = [{**x, "result": {**x["result"], "value_error": 0.2}} for x in FAR]


def test_runs_on_the_same_samples_are_compared_sample_by_sample():
    assert Above("a:m=1", "b")(WIDE).verdict == OPEN
    finding = Above("a:m=1", "b")(with_samples(WIDE, 0.04, -0.02))
    assert finding.verdict == SUPPORTED  # what both find hard is no difference between them
    assert "± 0.0058, sample by sample" in finding.ours  # sqrt(1 / 3) of 0.01, over seeds alone
    other = [*with_samples(WIDE[:3], 0.04, 0.0), *with_samples(WIDE[3:], 0.0, 0.04)]
    assert Above("a:m=1", "b")(other).verdict == OPEN  # each is wrong where the other is right


def test_the_score_on_the_test_split_is_compared_so_too():
    tested = [{**x, "result": {**x["result"], "test": {"accuracy": x["result"]["value"]}}} for x in WIDE]
    rule = Above("a:m=1", "b", path="result.test.accuracy")
    assert "sample by sample" in rule(with_samples(tested, 0.04, 0.0, "result.test.accuracy")).ours
    assert "sample by sample" not in rule(with_samples(tested, 0.04, 0.0)).ours


def test_samples_of_another_value_of_other_data_or_of_some_runs_alone_are_not_compared():
    same = with_samples(WIDE, 0.04, 0.0)
    other_options = [{**x, "settings": {"task_options": {"length": i // 3}}} for i, x in enumerate(same)]
    other_data = [{**x, "data": f"hash {i % 3}"} for i, x in enumerate(same)]
    diverged = {**WIDE[5], "result": {**WIDE[5]["result"], "diverged": True}}
    no_probes = {name: x for name, x in WIDE[5].items() if name != "probes"}
    for entries in (
        with_samples(WIDE, 0.04, 0.0, "result.test.accuracy"),
        other_options,
        other_data,
        [*same[:5], WIDE[5]],
        [*same[:5], diverged],
        [*same[:5], no_probes],
    ):
        finding = Above("a:m=1", "b")(entries)
        assert finding.verdict == OPEN
        assert "sample by sample" not in finding.ours


def test_parts_of_one_task_are_compared_sample_by_sample():
    entries = [*with_samples(runs("a", [0.8, 0.81, 0.82], "one"), 0.04, 0.0)]
    entries += with_samples(runs("a", [0.6, 0.61, 0.62], "two"), 0.04, 0.0)
    assert "sample by sample" in Above("a", "a", "one", "two")(entries).ours
