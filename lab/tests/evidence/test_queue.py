"""The queue: every job once, on record as it ends, to be gone on with whenever it is stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernelformer.errors import TrainingError
from kernelformer_lab.bench import timing
from kernelformer_lab.bench.timing import taking_timings, timings_under_way
from kernelformer_lab.evidence import queue
from kernelformer_lab.evidence.base import (
    CONTRADICTED,
    MISSING_RESULT,
    NOT_SEEN,
    OPEN,
    SUPPORTED,
    Claim,
    Finding,
    Item,
    StudyPart,
    Training,
)
from kernelformer_lab.evidence.items import ITEMS, find_items
from kernelformer_lab.evidence.ledger import Judged, findings_of, judge, page_text, summary_text, write_ledger
from kernelformer_lab.evidence.queue import PROBES, first_at_levels, make_data, run_here, run_queue, shrunk
from kernelformer_lab.evidence.records import (
    claims_as_json,
    commit,
    current,
    folder_name,
    left,
    read_jobs,
    record_path,
    rule_commits,
    rule_key,
    write_record,
)
from kernelformer_lab.evidence.rules import Above
from page_checks import check_page

SMALL = {
    "steps": 2,
    "batch_size": 4,
    "warmup_steps": 0,
    "eval_every": 1,
    "task.train_samples": 32,
    "task.validation_samples": 8,
    "task.test_samples": 8,
    "model.num_hidden_layers": 1,
}


def item(**settings) -> Item:
    part = Training("main", "recall", ("softmax:rotary=True", "elu:rotary=True"), {**SMALL, **settings}, seeds=1)
    claim = Claim("softmax is better", "1 against 0", Above("softmax:rotary=True", "elu:rotary=True"))
    return Item("recall-test", "this library", "nowhere", "a test", "tiny", (part,), (claim,), 0.01)


def test_jobs_are_done_once_and_recorded_with_all_that_they_depend_on(place, monkeypatch):
    one = item()
    looks = iter([True] * 3 + [False] * 10_000)  # somebody takes timings at first
    monkeypatch.setattr(queue, "timings_under_way", lambda: next(looks))
    assert run_queue([one], place) == []
    assert next(looks) is False
    assert left(one, place.records) == []
    record = json.loads(record_path(place.records, one).read_text())
    assert record["command"] == "kernelformer reproduce recall-test"
    assert record["claims"][0]["rule"].startswith("for: ")
    entries = read_jobs(place.records, one)
    assert [x["name"] for x in entries] == ["softmax:rotary=True", "elu:rotary=True"]
    for entry in entries:
        assert entry["settings"]["steps"] == 2
        assert entry["settings"]["seed"] == 0
        assert entry["environment"]["torch"]
        assert [step for step, _ in entry["curve"]] == [1, 2]
        assert entry["result"]["steps"] == 2
        assert entry["result"]["grad_norm"]["max"] >= entry["result"]["grad_norm"]["median"] > 0
    started = []
    assert run_queue([one], place, log=started.append) == []
    assert started == []


def test_what_another_item_has_done_is_not_done_again(place):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    told = []
    assert run_queue([replace(one, name="other")], place, log=told.append) == []
    assert all("on record in another item" in x for x in told)
    assert len(told) == 2


def test_other_settings_are_another_job_and_the_old_one_stays_on_record(place):
    run_here([item()], place, lambda _: None, lambda: None)
    changed = item(learning_rate=0.5)
    assert len(left(changed, place.records)) == 2
    run_here([changed], place, lambda _: None, lambda: None)
    assert len(read_jobs(place.records, changed)) == 4
    assert {x["settings"]["learning_rate"] for x in current(changed, read_jobs(place.records, changed))} == {0.5}


def test_what_changes_no_result_changes_no_key():
    jobs, other = item().jobs(), item(log_every=1, save_every=1).jobs()
    assert [x.key for x in jobs] == [x.key for x in other]
    assert len({x.key for x in jobs}) == len({folder_name(x) for x in jobs}) == 2


def test_timings_are_under_way_while_their_process_lives():
    assert not timings_under_way()
    with taking_timings():
        assert timings_under_way()
    assert not timings_under_way()
    code = (
        "import os, signal; from kernelformer_lab.bench.timing import taking_timings\n"
        "with taking_timings(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == -signal.SIGKILL
    assert not timings_under_way()  # whoever left the mark is dead


def test_settings_on_record_name_data_and_no_folder_of_a_machine(place):
    make_data(place.data)
    small = shrunk(ITEMS["snli"])
    run_here([small], place, lambda _: None, lambda: None)
    assert {x["settings"]["task_options"]["data"] for x in read_jobs(place.records, small)} == {"data:snli"}
    assert str(place.data) not in record_path(place.records, small).read_text()


def test_steps_between_evaluations_are_part_of_a_job_whose_curve_is_judged():
    part = item().parts[0]
    keys = [
        [x.key for x in replace(part, by_curve=curve, settings={**SMALL, "eval_every": every}).jobs()]
        for curve in (True, False)
        for every in (1, 2)
    ]
    assert keys[0] != keys[1]
    assert keys[2] == keys[3]
    best = [[x.key for x in item(select="best", eval_every=every).jobs()] for every in (1, 2)]
    assert best[0] != best[1]


def test_unknown_items_are_named():
    with pytest.raises(ValueError, match="unknown item 'varianc'; did you mean 'variance'"):
        find_items(["varianc"])


def test_every_item_says_what_counts_before_it_runs():
    for each in ITEMS.values():
        assert each.claims
        assert each.differs
        assert each.about
        assert all(x.rule.text.startswith("for: ") for x in each.claims)
        jobs = each.jobs()
        assert len({x.key for x in jobs}) == len(jobs)
        for part in each.parts:
            assert isinstance(part, StudyPart) or part.seeds >= 3


LONG = (
    "estimators",
    "image",
    "instability",
    "normalized",
    "rates",
    "stability",
    "transfer",
)  # seconds each, and others are like them


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in ITEMS])
def test_every_item_runs_in_its_smallest_size(name, place):
    make_data(place.data)
    small = shrunk(ITEMS[name])
    assert run_here([small], place, lambda _: None, lambda: None) == len(small.jobs())
    assert len(judge(small, place.records).findings) == len(small.claims)


def test_the_ledger_shows_every_claim_and_escapes_what_it_shows(place, monkeypatch):
    from kernelformer_lab.evidence import ledger

    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    odd = replace(
        one, about="<script>alert(1)</script>", claims=(replace(one.claims[0], text="a | b <i>", second_look="<b>"),)
    )
    monkeypatch.setattr(ledger, "ITEMS", {odd.name: odd})
    page, summary = write_ledger(place.records)
    html, markdown = page.read_text(), summary.read_text()
    check_page(html, hostile="<script")
    assert "a | b &lt;i&gt;<br><small>&lt;b&gt;</small>" in html
    assert "a \\| b &lt;i&gt; (&lt;b&gt;)" in markdown
    assert "<svg" in html
    assert "All figures" in html
    assert "bars overlap" not in html  # nothing is compared sample by sample here
    for name in one.parts[0].attentions:
        assert html.count(f"<td><code>{name}</code></td>") == 1  # in the table of all figures
    assert "open" in markdown


def test_the_ledger_shows_studies_by_the_values_of_their_record(place, monkeypatch):
    from kernelformer_lab.evidence import ledger

    one = replace(item(), parts=ITEMS["transfer"].parts[:2], claims=ITEMS["transfer"].claims)
    one = replace(one, study_values=lambda record: {"a": record["x"], "b": math.nan})
    entries = [{"kind": "study", "part": "seed 0", "record": {"x": x, "moved": []}} for x in (1.0, 3.0)]
    judged = ledger.Judged(one, entries, [Finding("open", "") for _ in one.claims])
    html = ledger.page_text([judged], ())
    assert "<td>2.0 ± 1</td>" in html
    assert "<td>2, 2 without</td>" in html
    assert "<svg" in html


def test_the_summary_begins_with_the_claims_by_their_verdict():
    claims = tuple(replace(item().claims[0], text=f"claim <{i}>") for i in range(5))
    verdicts = (OPEN, SUPPORTED, NOT_SEEN, OPEN, MISSING_RESULT)
    judged = Judged(replace(item(), claims=claims), [], [Finding(x, "") for x in verdicts])
    short = summary_text([judged]).split("## ")[1]
    assert "| our own questions | 1 | 1 | 0 | 2 | 1 |" in short
    assert "4 claims were tested, 2 are decided" in short
    assert "Supported:\n\n- claim &lt;1&gt; (our question, recall-test).\n\n" in short
    assert "Not seen at this size:\n\n- claim &lt;2&gt; (our question, recall-test).\n\n" in short
    late = replace(claims[1], second_look="margin narrowed")
    other = Judged(replace(judged.item, paper="Skyformer", claims=(late,)), [], [Finding(SUPPORTED, "")])
    assert r"- claim &lt;1&gt; (Skyformer, recall-test\*)." in summary_text([other])
    assert "| Skyformer | 1 | 0 | 0 | 0 | 0 |" in summary_text([other])
    assert "Open, claims of: recall-test (2).\n\nNot run, claims of: recall-test." in short


def test_the_opposite_contradicts_a_paper_only_at_its_own_setting():
    entries = [
        {"kind": "training", "part": "main", "name": f"{name}:rotary=True", "seed": seed, "key": "", "probes": {}}
        | {"result": {"value": value + 0.01 * seed * (1 + value), "metric": "loss", "diverged": False}}
        for name, value in (("softmax", 0.2), ("elu", 0.8))
        for seed in range(3)
    ]
    for setting, verdict in ((False, NOT_SEEN), (True, CONTRADICTED)):
        finding = findings_of(replace(item(), paper_setting=setting), entries)[0]
        assert finding.verdict == verdict


def test_a_job_keeps_the_commit_and_the_rules_that_it_was_run_with(place):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    entries = read_jobs(place.records, one)
    assert all(x["rules"] == [rule_key(one.claims[0])] for x in entries)
    assert rule_commits(one.claims[0], entries) == {commit()}
    worded = replace(one.claims[0], text="softmax is much better")
    assert rule_commits(worded, entries) is None  # it came after the runs
    other = replace(one, name="other-test")
    assert run_queue([other], place) == []
    copied = read_jobs(place.records, other)
    assert [x["key"] for x in copied] == [x["key"] for x in entries]
    assert all(x["rules"] == [] for x in copied)


def test_the_ledger_in_the_results_is_made_from_the_records_beside_it():
    records = Path(__file__).parents[3] / "results" / "evidence"
    for each in ITEMS.values():
        head = json.loads(record_path(records, each).read_text())
        told = (head["differs"], head["about"], head["claims"])
        assert told == (each.differs, each.about, claims_as_json(each)), (
            "kernelformer reproduce --page writes them again"
        )
    made = summary_text([judge(each, records) for each in ITEMS.values()])
    assert (records / "README.md").read_text() == made, "kernelformer reproduce --page writes it again"


def test_pictures_name_attentions_by_what_tells_them_apart():
    from kernelformer_lab.evidence.ledger import _labels

    names = ("softmax", "softmax:relative=1d", "nprf:num_features=8:relative=1d", "elu > softmax:rotary=True")
    assert list(_labels(names).values()) == ["softmax", "softmax:relative=1d", "nprf:relative=1d", names[3]]
    same = ("nprf:num_features=8:relative=1d", "nprf:num_features=16:relative=1d")
    assert list(_labels(same).values()) == ["nprf:num_features=8", "nprf:num_features=16"]
    for each in ITEMS.values():
        for part in each.parts:
            if isinstance(part, Training):
                assert len(set(_labels(part.attentions).values())) == len(part.attentions)


def test_whatever_reads_the_clock_in_a_study_or_a_benchmark_says_so_to_the_queue():
    source = Path(queue.__file__).parents[1]
    scripts = Path(__file__).parents[3] / "tools" / "studies"
    files = [x for folder in (source / "studies", source / "bench", scripts) for x in folder.glob("*.py")]
    files.append(Path(timing.__file__))
    clocks = [x for x in files if "perf_counter" in x.read_text()]
    assert len(clocks) >= 4
    for path in clocks:
        assert "taking_timings()" in path.read_text(), path


@pytest.mark.parametrize("select", ["last", "best"])
def test_samples_are_those_of_the_score_on_record(select, place):
    part = item(select=select).parts[0]
    one = replace(item(), parts=(replace(part, probes=("samples",)),))
    run_here([one], place, lambda _: None, lambda: None)
    for entry in read_jobs(place.records, one):
        probe, result = entry["probes"]["samples"], entry["result"]
        error = result["test_error"] if select == "best" else result["value_error"]
        assert probe["path"] == ("result.test.accuracy" if select == "best" else "result.value")
        assert len(probe["deviations"]) == 8
        assert math.sqrt(sum(x * x for x in probe["deviations"])) == pytest.approx(error, rel=0.02)
    assert "also where bars overlap" in page_text([judge(one, place.records)], ())


def test_models_with_a_vocabulary_of_their_own_can_be_probed(place):
    make_data(place.data)
    tiny = {**SMALL, "task.data": "data:snli", "task.vocab_size": 300, "task.length": 32}
    tiny = {name: x for name, x in tiny.items() if name not in ("task.train_samples", "task.test_samples")}
    part = Training("main", "kl-glue-mnli", ("gmm-rks:num_features=4",), tiny, seeds=1, probes=("samples", "redraws"))
    one = replace(item(), parts=(part,))
    run_here([one], place, lambda _: None, lambda: None)
    probes = read_jobs(place.records, one)[0]["probes"]
    assert len(probes["samples"]["deviations"]) == 5  # a tenth of the rows
    assert not probes["redraws"]["deterministic"]


def test_a_model_that_is_not_that_of_its_result_is_not_compared(place):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    folder = next((place.out / one.name).glob("*/result.json")).parent
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "value": result["value"] + 0.1}))
    with pytest.raises(ValueError, match=r"has accuracy .* its result .*; train it anew"):
        PROBES["samples"](folder)


def test_a_model_whose_data_has_changed_is_not_compared(place):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    folder = next((place.out / one.name).glob("*/result.json")).parent
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, "data": "another"}))
    with pytest.raises(TrainingError, match="in training another; train it anew"):
        PROBES["samples"](folder)


def test_gradients_are_those_of_the_first_checkpoint_at_each_level():
    curve = (0.1, None, 0.45, 0.3, 0.6, 0.59)
    rows = [{"step": 50 * i, "accuracy": x} for i, x in enumerate(curve, 1)]
    assert {name: x["step"] for name, x in first_at_levels(rows).items()} == {"at_20": 150, "at_40": 150, "at_60": 250}


def test_the_probe_of_gradients_has_the_checkpoints_at_the_levels_and_the_end(place, monkeypatch):
    monkeypatch.setattr(queue, "LEVELS", (0, 60))
    tiny = {**SMALL, "save_every": 1, "keep": 3, "task.length": 6}
    part = Training("main", "kl-sparsity", ("gmm-rks:num_features=4",), tiny, seeds=1, probes=("gradients",))
    one = replace(item(), parts=(part,))
    run_here([one], place, lambda _: None, lambda: None)
    probe = read_jobs(place.records, one)[0]["probes"]["gradients"]
    assert probe["rows"][-1]["step"] == 2
    assert probe["absolute_mean"] == probe["rows"][-1]["absolute_mean"] > 0
    assert probe["at_0"]["step"] == 1
    assert {k: v for k, v in probe.items() if k.startswith("at_")} == first_at_levels(probe["rows"])


def test_a_claim_is_measured_again_with_other_seeds_and_shown_beside_its_record(place, monkeypatch):
    from kernelformer_lab.evidence import ledger

    part = replace(item().parts[0], attentions=("softmax:rotary=True", "elu:rotary=True", "local:rotary=True"), seeds=2)
    one = replace(item(), parts=(part,))
    again = one.again(1, 7)
    assert [(x.name.split(":")[0], x.seed) for x in again.jobs()] == [
        *(("softmax", 7), ("elu", 7)),
        *(("softmax", 8), ("elu", 8)),
    ]
    assert not {x.key for x in again.jobs()} & {x.key for x in one.jobs()}
    with pytest.raises(ValueError, match="has claims 1 to 1, got 2"):
        one.again(2, 7)
    seeds = {x.part: x.request["settings"]["seed"] for x in ITEMS["instability"].again(1, 100).jobs()}
    assert seeds == {f"seed {i}": 100 + i for i in range(5)}
    with pytest.raises(ValueError, match="no comparison of two attentions"):
        ITEMS["eigenvalues"].again(1, 7)

    def entry(each, value):
        name, seed = each.name, each.seed
        result = {"value": value + 0.01 * (seed % 2) * (name[0] == "s"), "metric": "loss", "diverged": False}
        head = {"kind": "training", "part": "main", "name": name, "seed": seed, "key": each.key, "settings": {}}
        return {**head, "result": result, "probes": {}}

    for each, folder, extra in ((one, place.records, 0.0), (again, place.records / "again", 0.005)):
        entries = [entry(x, 0.5 + 0.2 * (x.name[0] == "s") + extra * (x.name[0] == "s")) for x in each.jobs()]
        write_record(folder, each, entries)
    monkeypatch.setattr(ledger, "ITEMS", {one.name: one})
    monkeypatch.setattr(ledger, "REPEATED", ((one.name, 1, 7), (one.name + "?", 1, 7)))
    text = write_ledger(place.records)[1].read_text()
    assert "## Measured again" in text
    assert "| softmax is better (recall-test, from seed 7) | +0.205 ± 0.005 | +0.21 ± 0.005 | 0.7 | " in text
