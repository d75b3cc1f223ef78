"""Failures in the queue are reported, the other jobs continue, and nothing that is on record is lost."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
from test_queue import item

from kernelformer.errors import TrainingError
from kernelformer_lab.evidence import ledger, queue
from kernelformer_lab.evidence.base import located
from kernelformer_lab.evidence.items import ITEMS
from kernelformer_lab.evidence.ledger import judge, write_ledger
from kernelformer_lab.evidence.queue import missing_data, pending, run_here, run_queue, shrunk
from kernelformer_lab.evidence.records import damage, left, read_jobs, record_path, refresh, superseded
from kernelformer_lab.training.checkpoints import locked


def test_a_queue_whose_time_is_up_goes_on_where_it_was(place):
    long = item(steps=100_000, eval_every=100_000)
    told = []
    assert run_queue([long], place, hours=6 / 3600, log=told.append) == []
    assert [x for x in told if "stopped, to be gone on with" in x]
    assert len(pending([long], place)) == 2


def test_a_job_that_fails_is_named_with_its_reason(place):
    bad = item(**{"task.num_keys": 1})  # four pairs of one key
    bad = replace(bad, parts=(replace(bad.parts[0], attentions=("softmax:rotary=True",)),))
    failed = run_queue([bad], place)
    assert len(failed) == 1
    assert "num_keys" in failed[0]
    assert len(pending([bad], place)) == 1


def test_a_job_whose_data_is_missing_is_not_started(place):
    job = ITEMS["enwik8"].jobs()[0]
    assert missing_data(job, place.data) == ["enwik8"]
    assert pending([ITEMS["enwik8"]], place) == []
    assert located(job.request, place.data)["task_options"]["data"] == str(place.data / "enwik8" / "enwik8")


@pytest.mark.parametrize("text", ['{"jobs": 3}', '{"jobs": [{"x": 1}]}', '{"jobs": [3]}', "{", "[]"])
def test_a_damaged_record_is_named(text, place):
    one = item()
    assert damage(one, place.records) == ""
    place.records.mkdir(parents=True)
    record_path(place.records, one).write_text(text)
    with pytest.raises(ValueError, match=r"recall-test\.json is no(t JSON| record of evidence)"):
        left(one, place.records)
    assert "recall-test.json is no" in damage(one, place.records)


def test_a_killed_worker_a_full_disk_and_a_damaged_record_are_said_and_the_next_call_does_what_is_left(
    place, monkeypatch
):
    one, worker, add = item(), queue.Worker, queue.add_job
    damaged = replace(one, name="damaged")
    place.records.mkdir(parents=True)
    record_path(place.records, damaged).write_text("{")

    def kill_softmax(work, arguments, **how):
        started = worker(work, arguments, **how)
        if "softmax" in arguments["request"]["attention"]:
            started.process.kill()
        return started

    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(queue, "Worker", kill_softmax)
    monkeypatch.setattr(queue, "add_job", full_disk)
    failed = sorted(run_queue([damaged, one], place))
    assert len(failed) == 3
    assert failed[0].startswith("damaged: ")
    assert "elu" in failed[1]
    assert "No space left on device" in failed[1]
    assert "softmax" in failed[2]
    assert "killed by signal 9" in failed[2]
    assert len(pending([one], place)) == 2
    monkeypatch.setattr(queue, "Worker", worker)
    monkeypatch.setattr(queue, "add_job", add)
    assert run_queue([one], place) == []
    assert pending([one], place) == []
    assert record_path(place.records, damaged).read_text() == "{"


def test_jobs_of_settings_that_an_item_no_longer_has_stay_and_are_marked(place):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    new = item(steps=3)
    assert superseded(one, place.records) == 0
    assert superseded(new, place.records) == 2
    refresh(place.records, new)
    assert [x["superseded"] for x in read_jobs(place.records, new)] == [True, True]
    assert judge(new, place.records).entries == []
    run_here([new], place, lambda _: None, lambda: None)
    assert ["superseded" in x for x in read_jobs(place.records, new)] == [False, False, True, True]
    refresh(place.records, one)  # back to the settings of before
    assert [x["result"]["steps"] for x in read_jobs(place.records, one) if "superseded" in x] == [3, 3]


def test_the_ledger_leaves_records_alone_that_a_queue_works_on(place, monkeypatch):
    one = item()
    run_here([one], place, lambda _: None, lambda: None)
    monkeypatch.setattr(ledger, "ITEMS", {one.name: replace(one, differs="another")})
    before = record_path(place.records, one).read_text()
    with locked(place.records):
        page, _ = write_ledger(place.records)
    assert "another" in page.read_text()
    assert record_path(place.records, one).read_text() == before
    write_ledger(place.records)
    assert json.loads(record_path(place.records, one).read_text())["differs"] == "another"


def test_two_queues_do_not_write_the_same_records(place):
    with locked(place.records), pytest.raises(TrainingError, match="another process runs the queue of"):
        run_queue([item()], place)


def test_data_that_cannot_be_made_fails_its_jobs_alone(place):
    (place.data / "enwik8").mkdir(parents=True)
    (place.data / "enwik8" / "enwik8").write_text("no articles")
    small = shrunk(ITEMS["retrieval"])
    failed = run_queue([small], place)
    assert len(failed) == len(small.jobs())
    assert "has no articles" in failed[0]
