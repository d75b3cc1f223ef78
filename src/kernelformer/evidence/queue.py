"""The queue of jobs: two processes of one thread side by side, resumable, and quiet while others take timings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelformer.errors import StoppedError
from kernelformer.evidence.base import Item, Job, located
from kernelformer.evidence.derived import is_there, make_missing
from kernelformer.evidence.records import add_job, damage, folder_name, left, probed, read_entries
from kernelformer.evidence.worker import ERROR, JOB, STOPPED, do_job
from kernelformer.files import read_json
from kernelformer.subprocesses import PARENT
from kernelformer.timing import BESIDE, timings_under_way
from kernelformer.training.checkpoints import locked

WORKER = ("-m", "kernelformer.evidence.worker")
POLL = 0.2  # seconds between two looks at the processes
Log = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a queue reads and writes.

    Args:
        data: folder of all data, with a folder for each name that jobs ask for.
        out: of the runs, which a stopped queue goes on with.
        records: of what is measured, one file an item.
    """

    data: Path
    out: Path
    records: Path


@dataclass
class _Running:
    item: Item
    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    stopped: bool = False  # while somebody takes timings
    told: bool = False  # to save and stop, by this queue


def missing_data(job: Job, data: Path) -> list[str]:
    """Folders of data that a job needs and that are not there."""
    return [name for name in job.data if not is_there(name, data)]


def pending(items: Iterable[Item], place: Place) -> list[tuple[Item, Job]]:
    """What is not on record yet and can be run, in the order of the items."""
    return [(item, job) for item in items for job in left(item, place.records) if not missing_data(job, place.data)]


def run_queue(
    items: Sequence[Item],
    place: Place,
    *,
    hours: float | None = None,
    parallel: int = 2,
    log: Log = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """Do all jobs that are not on record yet, and put each on record as it ends.

    Args:
        items: in the order in which they are run.
        place: where data, runs and records are.
        hours: after which nothing more is started and what runs is told to save and stop; None: until all is done.
        parallel: processes side by side, each of one thread.
        log: takes one line at a time.
        progress: called after each job.

    Returns:
        A line for each job that failed, and for each item whose record is damaged; the others went on.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; what ran was told to save, and the same call goes on from there.
        TrainingError: another queue works on these records, or they cannot be written.
    """
    with locked(place.records, "runs the queue of"):
        return _run(items, place, hours, parallel, log, progress)


def _run(
    items: Sequence[Item],
    place: Place,
    hours: float | None,
    parallel: int,
    log: Log,
    progress: Callable[[], None],
) -> list[str]:
    damaged = {item.name: damage(item, place.records) for item in items}
    waiting = pending([item for item in items if not damaged[item.name]], place)
    end = time.monotonic() + 3600 * hours if hours is not None else None
    running: list[_Running] = []
    failed = [f"{name}: {problem}" for name, problem in damaged.items() if problem]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while running or (waiting and not _over(end)):
            while waiting and len(running) < parallel and not _over(end) and not timings_under_way():
                item, job = waiting.pop(0)
                try:
                    started = _begin(item, job, place, log)
                except (ValueError, OSError) as problem:
                    failed.append(_failed(item, job, str(problem), log))
                    started = None
                running += [started] if started else []
                if started is None:
                    progress()
            if _over(end):
                _terminate(running)
            else:
                _yield_to_timings(running, log)
            for each in [x for x in running if x.process.poll() is not None]:
                running.remove(each)
                reason = _finish(each, place, log)
                failed += [reason] if reason else []
                progress()
            time.sleep(POLL)
    except KeyboardInterrupt:
        _terminate(running)
        for each in running:
            each.process.wait()
            _finish(each, place, log)
        raise StoppedError("stopped; what ran has saved where it was, and the same call goes on from there.") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        _terminate(running)
        for each in running:
            each.process.wait()
    return failed


def _begin(item: Item, job: Job, place: Place, log: Log) -> _Running | None:
    """Start a job; None where another item has done it already, which is then put on record here too."""
    for path in sorted(place.records.glob("*.json")):
        with suppress(ValueError):  # a damaged record of another item; its own job says so
            for entry in read_entries(path):
                if entry["key"] == job.key and probed(job, entry):
                    add_job(place.records, item, job, entry)
                    log(f"{item.name}: {_title(job)}: on record in another item")
                    return None
    make_missing(job.data, place.data, log)
    return _start(item, job, place, log)


def run_here(items: Sequence[Item], place: Place, log: Log, progress: Callable[[], None]) -> int:
    """Do all jobs that are not on record yet in this process, one after another; the first that fails raises.

    Returns:
        How many there were.
    """
    jobs = pending(items, place)
    for item, job in jobs:
        log(f"{item.name}: {_title(job)}")
        make_missing(job.data, place.data, log)
        request = _request(item, job, place)
        do_job(request)
        add_job(place.records, item, job, read_json(Path(request["folder"]) / JOB))
        progress()
    return len(jobs)


def _over(end: float | None) -> bool:
    return end is not None and time.monotonic() >= end


def _request(item: Item, job: Job, place: Place) -> dict[str, Any]:
    """What a worker is told."""
    return {
        "kind": job.kind,
        "request": located(job.request, place.data),
        "folder": str(place.out / item.name / folder_name(job)),
        "key": job.key,
        "probes": list(job.probes),
        "threads": 1,
        "command": f"kernelformer reproduce {item.name}",
    }


def _start(item: Item, job: Job, place: Place, log: Log) -> _Running:
    request = _request(item, job, place)
    # HF_HUB_OFFLINE: a job reads what is there, and a missing file ends it at once instead of by a time-out.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", PARENT: str(os.getpid()), BESIDE: "1"}
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    order = [sys.executable, *WORKER, json.dumps(request)]
    process = subprocess.Popen(order, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
    log(f"{item.name}: {_title(job)}: started")
    return _Running(item, job, Path(request["folder"]), process, errors)


def _finish(each: _Running, place: Place, log: Log) -> str:
    """Put a job on record, or return why it failed; one that was told to stop is neither."""
    name, code = f"{each.item.name}: {_title(each.job)}", each.process.returncode
    with each.errors as file:
        file.seek(0)
        said = file.read().decode(errors="replace").strip().splitlines()
    if code == 0:
        try:
            add_job(place.records, each.item, each.job, read_json(each.folder / JOB))
        except (ValueError, OSError) as problem:
            return _failed(each.item, each.job, str(problem), log)
        log(f"{name}: on record")
        return ""
    if code in (STOPPED, -signal.SIGTERM) and each.told:
        log(f"{name}: stopped, to be gone on with")
        return ""
    last = f"killed by signal {-code}" if code < 0 else " ".join(said[-1:])
    reason = next((x.removeprefix(ERROR) for x in said if x.startswith(ERROR)), last) or "it ended without a word"
    return _failed(each.item, each.job, reason, log)


def _failed(item: Item, job: Job, reason: str, log: Log) -> str:
    """The line on a job that failed, logged."""
    line = f"{item.name}: {_title(job)}: {reason}"
    log(f"failed: {line}")
    return line


def _terminate(running: Sequence[_Running]) -> None:
    for each in running:
        if each.stopped:
            each.process.send_signal(signal.SIGCONT)
            each.stopped = False
        if not each.told:
            each.told = True
            each.process.terminate()


def _yield_to_timings(running: Sequence[_Running], log: Log) -> None:
    """Stop all processes while somebody takes timings on this machine, and let them go on after that."""
    busy = timings_under_way()
    for each in running:
        if busy != each.stopped and each.process.poll() is None:
            each.process.send_signal(signal.SIGSTOP if busy else signal.SIGCONT)
            each.stopped = busy
            log(f"{each.item.name}: {_title(each.job)}: {'waits while timings are taken' if busy else 'goes on'}")


def _title(job: Job) -> str:
    seed = f", seed {job.seed}" if job.kind == "training" else ""
    return f"{job.part}, {job.name}{seed}"
