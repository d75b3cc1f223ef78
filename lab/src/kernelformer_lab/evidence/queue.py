"""The queue of jobs: two processes of one thread side by side, resumable, and quiet while others take timings."""

from __future__ import annotations

import html
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelformer.errors import StoppedError
from kernelformer.files import read_json, replacing
from kernelformer.timing import BESIDE, timings_under_way
from kernelformer_lab.evidence.base import Item, Job, located
from kernelformer_lab.evidence.records import add_job, damage, folder_name, left, probed, read_entries
from kernelformer_lab.evidence.worker import ERROR, JOB, STOPPED, do_job
from kernelformer_lab.subprocesses import PARENT
from kernelformer_lab.training.checkpoints import locked

PAGE = re.compile(r"<title>([^<]*)</title>.*?<text[^>]*>([^<]*)</text>", re.DOTALL)
LINK = re.compile(r"\[\[([^]|#]+)[^]]*\]\]")
MARKUP = re.compile(r"\{\{[^}]*\}\}|<[^>]*>|'{2,}|={2,}|\[\[(?:[^]|]*\|)?([^]]*)\]\]")
SPLITS = (("train", 0.7), ("validation", 0.15), ("test", 0.15))  # of the articles; pairs are within a split
LEAST = 500  # characters of an article that says something


def read_articles(dump: Path) -> dict[str, tuple[str, list[str]]]:
    """Articles of a dump in XML by title: their text without markup, and the titles that they link to.

    Redirections, pages about pages (with a colon in the title) and articles of less than 500 characters are left out.
    """
    raw = dump.read_bytes().decode("utf-8", errors="replace")
    articles = {}
    for title, source in PAGE.findall(raw):
        text = html.unescape(source)
        if ":" in title or text.lower().startswith("#redirect"):
            continue
        links = [_article_title(x) for x in LINK.findall(text)]
        plain = " ".join(MARKUP.sub(r"\1", text).split())
        if len(plain) >= LEAST:
            articles[html.unescape(title)] = (plain, links)
    return articles


def _article_title(link: str) -> str:
    """The title that a link means: its first letter is a capital, and underscores are blanks."""
    name = " ".join(link.replace("_", " ").split())
    return name[:1].upper() + name[1:]


def linked_pairs(
    articles: dict[str, tuple[str, list[str]]], titles: Sequence[str], seed: int
) -> Iterator[dict[str, str | int]]:
    """A linked and an unlinked pair for each article that links to another one of these titles.

    The unlinked partner is the linked partner of another article, so that partners are drawn alike for both labels.
    """
    draw = random.Random(seed)
    known = set(titles)
    linked = []
    for title in titles:
        choices = [x for x in dict.fromkeys(articles[title][1]) if x in known and x != title]
        if choices:
            linked.append((title, draw.choice(choices)))
    partners = [partner for _, partner in linked]
    draw.shuffle(partners)
    for (title, partner), other in zip(linked, partners, strict=True):
        yield {"text1": articles[title][0], "text2": articles[partner][0], "label": 1}
        if other != title and other not in articles[title][1] and title not in articles[other][1]:
            yield {"text1": articles[title][0], "text2": articles[other][0], "label": 0}


def write_pairs(dump: Path, folder: Path, *, length: int = 4000, seed: int = 0) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` for the task ``retrieval``.

    No article is in two splits, so that nothing can be learned by heart.

    Args:
        dump: enwik8 or another dump in its form.
        folder: of the files.
        length: characters of a text that are kept.
        seed: of the division and of the pairs.
    """
    articles = read_articles(dump)
    if not articles:
        raise ValueError(f"{dump} has no articles; it must be a dump of Wikipedia in XML, such as enwik8.")
    titles = sorted(articles)
    random.Random(seed).shuffle(titles)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for name, share in SPLITS:
        count = round(share * len(titles))
        mine, start = titles[start : start + count], start + count
        with replacing(folder / f"{name}.jsonl") as part, part.open("w", encoding="utf-8") as out:
            for pair in linked_pairs(articles, mine, seed):
                short = {key: x[:length] if isinstance(x, str) else x for key, x in pair.items()}
                out.write(json.dumps(short, ensure_ascii=False) + "\n")


# Folder: what it is made from, below the folder of all data, and how.
DERIVED: dict[str, tuple[str, Callable[[Path, Path], None]]] = {"enwik8-links": ("enwik8/enwik8", write_pairs)}


def is_there(name: str, data: Path) -> bool:
    """Whether a folder of data is there, or can be made."""
    return (data / name).exists() or (name in DERIVED and (data / DERIVED[name][0]).exists())


def make_missing(names: tuple[str, ...], data: Path, log: Callable[[str], None]) -> None:
    """Make those folders that are made from others and not there yet; what is half written has another name."""
    for name in names:
        if name in DERIVED and not (data / name).exists():
            source, make = DERIVED[name]
            log(f"{data / name}: made from {source}")
            part = data / f".{name}.partial"
            make(data / source, part)
            part.rename(data / name)


WORKER = ("-m", "kernelformer_lab.evidence.worker")
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
