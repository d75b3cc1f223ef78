"""The queue of jobs of evidence, the work of its processes, and data that is derived for them.

Two processes of one thread run side by side, resumable, and paused while timings are taken on the machine.
"""

from __future__ import annotations

import html
import json
import math
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import StoppedError
from kernelformer.files import read_json, replacing, write_json, write_text
from kernelformer.settings import options
from kernelformer_lab.bench.timing import BESIDE, timings_under_way
from kernelformer_lab.evidence.base import TRAINING, Item, Job, StudyPart, Training, located, study_settings
from kernelformer_lab.evidence.records import add_job, commit, damage, folder_name, left, probed, read_entries
from kernelformer_lab.evidence.rules import SAMPLES, TEST, VALUE
from kernelformer_lab.jobs import STOPPED, Worker
from kernelformer_lab.recipes.catalogue import find_recipe
from kernelformer_lab.records import RESULT, portable, read_head, rounded
from kernelformer_lab.reports.comparison import read_run
from kernelformer_lab.studies import find_study
from kernelformer_lab.studies.redraws import eigenvalue_statistics, gradient_statistics, redraw_statistics
from kernelformer_lab.tasks import TASKS, task_options
from kernelformer_lab.training.checkpoints import locked
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.evaluation import evaluate_samples
from kernelformer_lab.training.inspection import saved_run
from kernelformer_lab.training.session import train

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
    """Return True if a folder of data is there, or can be made."""
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


POLL = 0.2  # seconds between two looks at the processes
Log = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Folders that a queue reads and writes.

    Args:
        data: folder of all data, with a folder for each name that jobs ask for.
        out: of the runs, which a stopped queue resumes.
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
    worker: Worker
    stopped: bool = False  # while timings are taken
    told: bool = False  # to save and stop, by this queue


def missing_data(job: Job, data: Path) -> list[str]:
    """Folders of data that a job needs and that are not there."""
    return [name for name in job.data if not is_there(name, data)]


def pending(items: Iterable[Item], place: Place) -> list[tuple[Item, Job]]:
    """Jobs that are not on record yet and can be run, in the order of the items."""
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
        A line for each job that failed, and for each item whose record is damaged; the others continued.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; what ran was told to save, and the same call resumes there.
        TrainingError: another queue works on these records, or they cannot be written.
    """
    commit()  # now: what is committed while jobs run is not what they are made with
    with locked(place.records, "runs the queue of"):
        return _run(items, place, hours, parallel, log, progress)


def _run(
    items: Sequence[Item], place: Place, hours: float | None, parallel: int, log: Log, progress: Callable[[], None]
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
            for each in [x for x in running if x.worker.process.poll() is not None]:
                running.remove(each)
                reason = _finish(each, place, log)
                failed += [reason] if reason else []
                progress()
            time.sleep(POLL)
    except KeyboardInterrupt:
        _terminate(running)
        for each in running:
            each.worker.process.wait()
            _finish(each, place, log)
        raise StoppedError("stopped; what ran has saved where it was, and the same call goes on from there.") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        _terminate(running)
        for each in running:
            each.worker.process.wait()
    return failed


def _begin(item: Item, job: Job, place: Place, log: Log) -> _Running | None:
    """Start a job; None where another item has done it already, which is then put on record here too."""
    for path in sorted(place.records.glob("*.json")):
        with suppress(ValueError):  # a damaged record of another item; its own job says so
            for entry in read_entries(path):
                if entry["key"] == job.key and probed(job, entry):
                    add_job(place.records, item, job, entry, copied=True)
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
        do_job(**request)
        add_job(place.records, item, job, read_json(Path(request["folder"]) / JOB))
        progress()
    return len(jobs)


def _over(end: float | None) -> bool:
    return end is not None and time.monotonic() >= end


def _request(item: Item, job: Job, place: Place) -> dict[str, Any]:
    """Arguments of `do_job`."""
    return {
        "kind": job.kind,
        "request": located(job.request, place.data),
        "folder": str(place.out / item.name / folder_name(job)),
        "key": job.key,
        "probes": list(job.probes),
        "command": f"kernelformer reproduce {item.name}",
    }


def _start(item: Item, job: Job, place: Place, log: Log) -> _Running:
    request = _request(item, job, place)
    # HF_HUB_OFFLINE: a job reads what is there, and a missing file ends it at once instead of by a time-out.
    worker = Worker(do_job, request, threads=1, env={"HF_HUB_OFFLINE": "1", BESIDE: "1"}, listen=False)
    log(f"{item.name}: {_title(job)}: started")
    return _Running(item, job, Path(request["folder"]), worker)


def _finish(each: _Running, place: Place, log: Log) -> str:
    """Put a job on record, or return why it failed; one that was told to stop is neither."""
    name, problem = f"{each.item.name}: {_title(each.job)}", each.worker.problem()
    if not problem:
        try:
            add_job(place.records, each.item, each.job, read_json(each.folder / JOB))
        except (ValueError, OSError) as reason:
            return _failed(each.item, each.job, str(reason), log)
        log(f"{name}: on record")
        return ""
    if each.worker.process.returncode in (STOPPED, -signal.SIGTERM) and each.told:
        log(f"{name}: stopped, to be gone on with")
        return ""
    return _failed(each.item, each.job, problem, log)


def _failed(item: Item, job: Job, reason: str, log: Log) -> str:
    """The line on a job that failed, logged."""
    line = f"{item.name}: {_title(job)}: {reason}"
    log(f"failed: {line}")
    return line


def _terminate(running: Sequence[_Running]) -> None:
    for each in running:
        if each.stopped:
            each.worker.process.send_signal(signal.SIGCONT)
            each.stopped = False
        if not each.told:
            each.told = True
            each.worker.process.terminate()


def _yield_to_timings(running: Sequence[_Running], log: Log) -> None:
    """Pause all processes while timings are taken on this machine."""
    busy = timings_under_way()
    for each in running:
        if busy != each.stopped and each.worker.process.poll() is None:
            each.worker.process.send_signal(signal.SIGSTOP if busy else signal.SIGCONT)
            each.stopped = busy
            log(f"{each.item.name}: {_title(each.job)}: {'waits while timings are taken' if busy else 'goes on'}")


def _title(job: Job) -> str:
    seed = f", seed {job.seed}" if job.kind == "training" else ""
    return f"{job.part}, {job.name}{seed}"


JOB = "job.json"


def do_job(kind: str, request: dict[str, Any], folder: str, key: str, probes: Sequence[str], command: str) -> None:
    """Train or study what a job asks for, or resume it, and write the outcome into its folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    done = _train(request, place, probes, command) if kind == TRAINING else _study(request, place)
    write_json(place / JOB, rounded(portable({"key": key, **done})))


def _train(request: dict[str, Any], folder: Path, names: Sequence[str], command: str) -> dict[str, Any]:
    """Train a run, or resume it, then measure its probes; each is measured once."""
    run = Run.from_json(request)
    result = train(run, folder, resume=True, command=command, quiet=True)
    probes = {}
    for name in names if not result.diverged else ():
        kept = folder / f"{name}.json"
        if not kept.exists():
            write_json(kept, PROBES[name](folder))
        probes[name] = read_json(kept)
    record = read_run(folder)
    head = read_head(folder)
    return {
        "settings": run.as_json(),
        "environment": head["environment"],
        "data": head.get("data"),
        "started": record.started,
        "result": result.as_json(),
        "curve": [[p.step, p.values.get(result.metric, p.values["loss"])] for p in record.evaluation],
        "loss": _thinned([[p.step, p.values["loss"]] for p in record.training]),
        "probes": probes,
    }


def _thinned(points: list[list[float]], most: int = 60) -> list[list[float]]:
    """At most so many points of a curve, the last among them."""
    return points[:: -max(1, -(-len(points) // most))][::-1]


def _study(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a study, or resume it, and draw its picture."""
    study = find_study(request["study"])
    settings = study_settings(study, request["settings"])
    record = study.measure(settings, folder)
    record.save()
    study.picture(record, folder / f"{study.name}.png")
    return {"environment": environment(torch.get_num_threads()), "record": read_json(record.path)}


GROUPS = 200  # of samples at most: their number makes an error uncertain by 5%
LEVELS = (20, 40, 60, 80)  # percent of the validation samples: the checkpoints of KL-Transformer, Table 14


def redraws(folder: Path) -> dict[str, Any]:
    """Dependence of a classifier on the draw of its features: 100 draws on 200 validation samples."""
    measured = redraw_statistics(folder)
    flat = {name: x["mean"] if isinstance(x, Mapping) else x for name, x in measured["figures"].items()}
    errors = {f"{name}_error": x["error"] for name, x in measured["figures"].items() if isinstance(x, Mapping)}
    return {
        **flat,
        **errors,
        "deterministic": measured["deterministic"],
        "own_accuracy": measured["own_draw"]["accuracy"],
    }


def eigenvalues(folder: Path) -> dict[str, Any]:
    """Mean, largest and smallest eigenvalues of learned covariances at the start and at the end of training."""
    measured = eigenvalue_statistics(folder)
    start, end = measured["start"], measured["end"]
    if start is None or end is None:
        return {}
    both = {
        f"{when}_{name}": side[name]
        for when, side in (("start", start), ("end", end))
        for name in ("minimum", "maximum", "mean")
    }
    return {**both, "change": end["mean"] / start["mean"], "heads": end["heads"]}


def gradients(folder: Path) -> dict[str, Any]:
    """Gradients at the classifier over redraws, at the first checkpoint that has each of `LEVELS`, and at the end."""
    rows = gradient_statistics(folder, levels=[level / 100 for level in LEVELS])
    return {"rows": rows, **rows[-1], **first_at_levels(rows)}


def first_at_levels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The first row, by step, whose accuracy is at each of `LEVELS`: ``at_60`` has 60% or more; absent: none has."""
    reached = {level: [x for x in rows if (x["accuracy"] or 0) >= level / 100] for level in LEVELS}
    return {f"at_{level}": enough[0] for level, enough in reached.items() if enough}


def samples(folder: Path) -> dict[str, Any]:
    """Contributions of groups of samples to the standard error of the score, to compare runs on the same samples.

    Of weights that were selected it is the score on the test split, else that of the validation split.
    """
    run, _ = saved_run(folder)
    result = read_json(folder / RESULT)
    metric = result["metric"]
    selected = run.select == "best"
    value, parts = evaluate_samples(folder, "test" if selected else "validation", GROUPS)
    kept = result["test"][metric] if selected else result["value"]
    if math.isfinite(value) and not math.isclose(value, kept, rel_tol=1e-3, abs_tol=1e-3):
        raise ValueError(f"the model of {folder} has {metric} {value:.6g}, its result {kept:.6g}; train it anew.")
    path = f"{TEST}.{metric}" if selected else VALUE
    known = all(map(math.isfinite, parts))
    return {"path": path, "deviations": [float(f"{x:.3g}") for x in parts] if known else []}


PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "redraws": redraws,
    "eigenvalues": eigenvalues,
    "gradients": gradients,
    SAMPLES: samples,
}


ATTENTIONS = 2  # of each part: what differs between attentions is tested elsewhere
RUN: dict[str, Any] = {"steps": 2, "batch_size": 4, "warmup_steps": 1, "eval_every": 2, "log_every": 1, "save_every": 2}
TASK: dict[str, Any] = {
    "train_samples": 32,
    "validation_samples": 8,
    "test_samples": 8,
    "length": 32,
    "vocab_size": 300,
    "bleu_samples": 2,
    "min_length": 10,
    "max_length": 32,
}
# Of studies, by name of the setting: whatever makes them short.
STUDY: dict[str, Any] = {
    "steps": 2,
    "length": 32,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "batch": 2,
    "draws": 2,
    "samples": 2,
    "texts": 1,
    "starts": (0,),
    "window": 1,
}
WORDS = ("film", "year", "good", "bad", "seen", "came", "ends", "all", "how", "who", "and", "it", "was", "by")
ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def shrunk(item: Item) -> Item:
    """The item with one seed, few steps and samples, and two attentions a part."""
    return replace(item, parts=tuple(_shrunk(part) for part in item.parts))


def _shrunk(part: Training | StudyPart) -> Training | StudyPart:
    if isinstance(part, StudyPart):
        known = {x.name: how.least for x, how in options(find_study(part.study).settings)}
        small = {
            name: x if isinstance(x, tuple) else max(x, int(known[name] or 0))
            for name, x in STUDY.items()
            if name in known
        }
        return replace(part, settings={**part.settings, **small})
    task = find_recipe(part.recipe).task
    made = {f"task.{name}": x for name, x in TASK.items() if name in task_options(task)}
    if TASKS[task].name in ("recall", "sparsity"):
        made.pop("task.length")  # distances and sums go with it
    settings = {**part.settings, **made, **RUN}
    return replace(part, attentions=tuple(part.attentions[:ATTENTIONS]), seeds=1, settings=settings)


def make_data(folder: Path) -> None:
    """Small made-up data in the layout of the real: a folder for each name that items ask for."""
    random.seed(0)
    rows = [{"text": _sentence(12), "label": i % 2} for i in range(64)]
    _rows(folder / "imdb" / "train.jsonl", rows)
    _rows(folder / "imdb" / "test.jsonl", rows[:16])
    _rows(folder / "rotten-tomatoes" / "train.jsonl", rows)
    pairs = [{"premise": _sentence(6), "hypothesis": _sentence(4), "label": i % 3} for i in range(48)]
    _rows(folder / "snli" / "train.jsonl", pairs)
    _rows(folder / "snli" / "test.jsonl", pairs[:12])
    verses = [{"en": _sentence(6), "de": _sentence(6)} for _ in range(48)]
    _rows(folder / "bible-en-de" / "train.jsonl", verses)
    _rows(folder / "bible-en-de" / "test.jsonl", verses[:12])
    _write(folder / "enwik8" / "enwik8", "\n".join(_article(i) for i in range(120)))
    proteins = ("".join(random.choices(ACIDS, k=40)) for _ in range(64))
    _write(folder / "proteins" / "proteins.txt", "\n".join(proteins) + "\n")
    _images(folder / "cifar10")


def _article(number: int) -> str:
    """A page of a dump of Wikipedia that links to the next ones."""
    links = " ".join(f"[[Page {number + i}]]" for i in range(1, 40))
    return f"<page><title>Page {number}</title><text>{links} {_sentence(120)}</text></page>"


def _sentence(words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _images(folder: Path) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    made = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 20)):
        images = made.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        np.savez_compressed(folder / f"{name}.npz", images=images, labels=np.arange(count) % 10)
