"""From which length on a converted model is faster and leaner than the pretrained one: whole models over the length.

Time and peak memory of a pass, and of a token after a context, of the original with transformers' own attentions and of
its converted selves. Tokens are random, and tables of positions are stretched where they end: only speed is looked at.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelformer.environment import environment
from kernelformer.errors import choice, flag, integer, number, positive_int
from kernelformer.files import read_json, write_json
from kernelformer.formatting import human_time
from kernelformer.hf.find import find_attentions
from kernelformer.measure.benchmark import WorkerError
from kernelformer.measure.case import too_large
from kernelformer.measure.lengths import BASELINES, MOST_ROUNDS, PASSES, TASKS, TOKEN, Subject, contender
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.subprocesses import finished

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
ATTENTIONS = ("loglinear:num_features=128", "favor+:num_features=128")
FIRST_CONTEXT = 128
# Whatever is larger than 64 KiB goes back to the system at once, so that resident memory is what is in use.
WEIGHED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
KEPT = "lengths.json"
STRETCHED = ("max_position_embeddings", "n_positions")  # what a configuration says of positions


@dataclass(frozen=True)
class Setting:
    """What is measured, and how.

    Args:
        subject: the model.
        attentions: what it is converted to.
        baselines: attentions of the original, of `BASELINES`; crossovers are drawn for the first.
        lengths: tokens.
        backward: whether training passes are measured too.
        generate: the longest context to generate after; 0: none.
        threads: of the measuring processes.
        rounds: passes of each, interleaved; at least so many.
        budget: seconds for each length, while which there are more rounds.
        limit: seconds; what would take longer is not run.
        memory: whether to weigh each too.
    """

    subject: Subject
    attentions: Sequence[str] = ATTENTIONS
    baselines: Sequence[str] = BASELINES
    lengths: Sequence[int] = LENGTHS
    backward: bool = False
    generate: int = 0
    threads: int = 1
    rounds: int = 5
    budget: float = 10.0
    limit: float = 60.0
    memory: bool = True

    def __post_init__(self) -> None:
        choice("task", self.subject.task, TASKS)
        positive_int("batch", self.subject.batch)
        for name in self.baselines:
            choice("baseline", name, BASELINES)
        for spec in self.attentions:
            parse_method(spec)
        for what in ("lengths", "attentions", "baselines"):
            if not getattr(self, what):
                raise ValueError(f"{what} must name at least one, got {getattr(self, what)!r}.")
        for length in self.lengths:
            positive_int("length", length)
        for what in ("threads", "rounds"):
            positive_int(what, getattr(self, what))
        if self.rounds > MOST_ROUNDS:
            raise ValueError(f"rounds must be at most {MOST_ROUNDS}, got {self.rounds}.")
        for what in ("budget", "limit"):
            number(what, getattr(self, what), above=0)
        for what in ("backward", "memory"):
            flag(what, getattr(self, what))
        integer("generate", self.generate, at_least=0)
        if 0 < self.generate < FIRST_CONTEXT:
            raise ValueError(f"generate is a context of at least {FIRST_CONTEXT} tokens, got {self.generate}.")

    @property
    def names(self) -> list[str]:
        """All contenders."""
        return list(dict.fromkeys((*self.baselines, *self.attentions)))

    def cases(self) -> list[tuple[str, int]]:
        """Pass and length, short ones first, from which long ones are predicted."""
        lengths = sorted(set(self.lengths))
        found = [(kind, length) for kind in PASSES[: 1 + self.backward] for length in lengths]
        context = FIRST_CONTEXT
        while context <= self.generate:
            found.append((TOKEN, context))
            context *= 2
        return found


@dataclass
class Row:
    """One contender at one length."""

    kind: str  # one of `PASSES`, or `TOKEN` after a context
    length: int
    attention: str
    seconds: float | None = None  # median
    rounds: int = 0
    peak: int | None = None  # bytes of a pass beyond the weights; of the cache after a context
    note: str = ""  # why it was not run


@dataclass
class Found:
    """What the study has measured.

    Args:
        about: the model, and all that its figures depend on.
        baselines: contenders that are the original.
        rows: what was measured.
        stretched: tables of positions that were, for the longest length.
    """

    about: dict[str, Any]
    baselines: Sequence[str] = BASELINES
    rows: list[Row] = field(default_factory=list)
    stretched: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [asdict(row) for row in self.rows]
        return {"about": self.about, "stretched": self.stretched, "rows": rows, "crossovers": self.crossovers()}

    def row(self, kind: str, length: int, name: str) -> Row:
        """That of a contender, a new one where there is none."""
        for row in self.rows:
            if (row.kind, row.length, row.attention) == (kind, length, name):
                return row
        self.rows.append(Row(kind, length, name))
        return self.rows[-1]

    def curve(self, kind: str, name: str, what: str) -> dict[int, float]:
        """``seconds`` or ``peak`` over the length, where there is a figure."""
        rows = [x for x in self.rows if (x.kind, x.attention) == (kind, name) and (getattr(x, what) or 0) > 0]
        return {x.length: getattr(x, what) for x in sorted(rows, key=lambda x: x.length)}

    def crossovers(self) -> list[dict[str, Any]]:
        """From which length on each attention is below each baseline."""
        found = []
        for kind in dict.fromkeys(x.kind for x in self.rows):
            names = list(dict.fromkeys(x.attention for x in self.rows if x.kind == kind))
            for name in (x for x in names if x not in BASELINES):
                for base in (x for x in self.baselines if x in names):
                    line: dict[str, Any] = {"kind": kind, "attention": name, "against": base}
                    for what in ("seconds", "peak"):
                        at, words = crossover(self.curve(kind, base, what), self.curve(kind, name, what))
                        line |= {what: at, f"{what} in words": words}
                    found.append(line)
        return found

    def refusal(self, row: Row, limit: float) -> str:
        """Why a row should not be run, judged by shorter ones."""
        seconds = predicted(self.curve(row.kind, row.attention, "seconds"), row.length)
        if seconds is not None and seconds > limit:
            return f"about {human_time(seconds)}, and the limit is {human_time(limit)}"
        held = predicted(self.curve(row.kind, row.attention, "peak"), row.length)
        return "" if held is None else too_large(int(held)) or ""


def predicted(curve: Mapping[int, float], length: int) -> float | None:
    """The last growth goes on, as a power of the length between 1 and 2; 2 where it is not known."""
    points = [(n, x) for n, x in sorted(curve.items()) if n < length]
    if not points:
        return None
    power = 2.0
    if len(points) > 1:
        (m, y), (n, x) = points[-2:]
        power = min(2.0, max(1.0, math.log(x / y) / math.log(n / m)))
    n, x = points[-1]
    return float(x * (length / n) ** power)


def crossover(base: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float | None, str]:
    """The length from which on ours stays below the base, between two points on logarithmic scales; and in words.

    None where it is not reached, or where ours is below at the shortest length already.
    """
    lengths = sorted(set(base) & set(ours))
    if not lengths:
        return None, "not measured"
    gaps = [math.log(ours[n] / base[n]) for n in lengths]
    if gaps[-1] >= 0:
        return None, f"none up to {lengths[-1]}"
    above = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return None, f"below at {lengths[0]} already"
    i = above[-1]
    share = gaps[i] / (gaps[i] - gaps[i + 1])
    at = lengths[i] * (lengths[i + 1] / lengths[i]) ** share
    return at, f"{at:.0f}"


def steps(setting: Setting) -> int:
    """How often `run` tells what it does."""
    weighed = setting.memory * len(setting.names)
    return sum(1 if kind == TOKEN else 1 + weighed for kind, _ in setting.cases())


def run(setting: Setting, folder: Path, tell: Callable[[str], None] = lambda _: None) -> Found:
    """Measure everything that ``folder`` does not hold yet; ``tell`` is called before each of `steps` steps.

    Every point is written there when it is there, so that a second call goes on.
    """
    found = _checked(setting)
    path = folder / KEPT
    found.rows = _read(path, found.about)
    for kind, length in setting.cases():
        rows = [found.row(kind, length, name) for name in setting.names]
        for row in rows:
            row.note = found.refusal(row, setting.limit) if row.seconds is None else ""
        for row in rows if setting.memory and kind != TOKEN else ():
            tell(f"{kind}, {length} tokens: memory of {row.attention}")
            if row.peak is None:
                _measure("memory", [row], setting)
                write_json(path, found.as_json())
        tell(f"{kind}{' after' if kind == TOKEN else ','} {length} tokens: timing")
        missing = [row for row in rows if row.seconds is None and not row.note]
        if missing:
            _measure("time", missing, setting)
        write_json(path, found.as_json())
    return found


def _checked(setting: Setting) -> Found:
    """What is wrong with the model or an attention is said before the first hour has passed."""
    subject, longest = setting.subject, max(setting.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    kinds = {x.causal for x in find_attentions(model)}
    task = "causal" if kinds == {True} else "encoder"
    if subject.task not in ("auto", task):
        raise ValueError(f"{subject.folder} is of the task {task!r}, got --task {subject.task}.")
    if setting.generate and task != "causal":
        raise ValueError(f"{subject.folder} is an encoder and cannot generate; leave --generate out.")
    for name in setting.names:
        contender(model, name)
    sizes = {key: x for key, x in model.config.to_dict().items() if key not in STRETCHED}
    config = json.dumps(sizes, sort_keys=True, default=str)
    place = {key: value for key, value in environment(setting.threads).items() if key != "date"}
    about = {
        "model": Path(subject.folder).resolve().name,
        "kind": type(model).__name__,
        "configuration": hashlib.sha256(config.encode()).hexdigest()[:12],
        "weights": "random" if subject.random else "pretrained",
        "task": task,
        "batch": subject.batch,
        "environment": place,
    }
    return Found(about, tuple(setting.baselines), stretched=stretched)


def _read(path: Path, about: Mapping[str, Any]) -> list[Row]:
    """Rows with a figure, of the same model in the same place."""
    if not path.exists():
        return []
    try:
        record = read_json(path)
        rows = [Row(**x) for x in record["rows"]]
        other = {key: x for key, x in record["about"].items() if about.get(key) != x}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not of this study ({problem!r}); move it away, or choose another --out.") from None
    if other:
        raise ValueError(f"{path} holds figures of another model or place ({other}); choose another --out.")
    return [replace(x, note="") for x in rows if x.seconds is not None or x.peak is not None]


def _measure(what: str, rows: Sequence[Row], setting: Setting) -> None:
    """Fill in rows of one pass and length; a failure is noted in all that shared the process."""
    running = [row for row in rows if not row.note]
    if not running:
        return
    request = {"what": what, "subject": asdict(setting.subject), "kind": running[0].kind, "length": running[0].length}
    request |= {"names": [row.attention for row in running], "threads": setting.threads}
    request |= {"rounds": setting.rounds, "budget": setting.budget}
    try:
        result = job(request)
    except WorkerError as problem:
        for row in running:
            row.note = str(problem)
        return
    for row in running:
        for name, value in result[row.attention].items():
            setattr(row, "note" if name == "problem" else name, value)


def job(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one job in a process of its own: {contender: figures}."""
    heap = WEIGHED if request["what"] == "memory" else {}
    env = {**os.environ, **heap, "OMP_NUM_THREADS": str(request["threads"])}
    done = finished([sys.executable, "-m", "kernelformer.measure.lengths"], json.dumps(request), env)
    if done.returncode:  # a system that runs out of memory leaves no last words
        last = (done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"])[-1]
        raise WorkerError(last)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
