"""Read and write run folders; errors name file, line and fix."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kernelformer.commands import program
from kernelformer.errors import flag, integer, number
from kernelformer.files import check_regular, given_options, parse_json
from kernelformer.settings import OPTION, Option, as_text, given_as, options

RUN, METRICS, RESULT = "run.json", "metrics.jsonl", "result.json"
PLAN = "plan.json"  # of a comparison: its runs, started or not
MODEL = "model"  # the folder of the final one
CHECKPOINT = "trainer_state.json"  # in a checkpoint, by transformers: how far it is
SAMPLE = "sample.txt"  # text that a language model wrote after training
WAYS_OUT = {
    RUN: "put it right, or train anew in another folder",
    PLAN: "put it right, or give the recipe and its options again",
    METRICS: "remove that line",
    CHECKPOINT: "take another checkpoint",
    RESULT: "remove the file, and resuming the run makes it again",
}


@dataclass(frozen=True)
class Result:
    """Result of a finished run.

    Args:
        metric: name of the task's metric.
        value: of it on the validation split; NaN if the run diverged.
        tokens_per_second: of training, all processes together: the median over logged intervals after the first.
        peak_bytes: the most memory of the main process in training, beyond what it had before the model was built:
            resident memory, or allocated memory of the GPU. Libraries that load late and buffers that an earlier run
            left in the process count or are missing, so compare runs that each had a process of their own.
        parameters: number of weights.
        seconds: of training, without evaluation and saving.
        steps: updates that were made.
        input_seconds: of these seconds, those spent on getting the next batch.
        loss: mean over all labels of the validation split.
        diverged: whether a loss was not finite; the run ended there.
        scores: whatever else the task says of the validation split, by name.
        value_error: standard error of ``value`` over the samples of the split, by the jackknife; NaN where it is not
            known: of most that a model writes (BLEU has one), of one sample, in older records.
        loss_error: that of ``loss``.
        best_step: after which step the weights were those of the result, where the best ones were selected; None: the
            last ones are the result, or the run diverged.
        test: loss and scores of the test split by name, where the best weights were selected; else empty.
        test_error: standard error of the metric among them.
        grad_norm: "median", "p95" (95th percentile) and "max" of the norm of the gradient before it is shortened, over
            all steps with a finite one; of runs that older versions began, over the steps that they logged. Empty:
            not known.
        decode: rows of context, seconds per token and bytes of state, by context; None: not measured.
    """

    metric: str
    value: float
    tokens_per_second: float
    peak_bytes: int
    parameters: int
    seconds: float
    steps: int
    loss: float = math.nan
    input_seconds: float = math.nan
    diverged: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    value_error: float = math.nan
    loss_error: float = math.nan
    best_step: int | None = None
    test: dict[str, float] = field(default_factory=dict)
    test_error: float = math.nan
    grad_norm: dict[str, float] = field(default_factory=dict)
    decode: tuple[tuple[int, float, int], ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Result:
        """Build a result from what `as_json` returned and what was added to it."""
        best = record.get("best_step")
        maybe: dict[str, Any] = {name: _float(name, record.get(name, math.nan)) for name in MAYBE_NUMBERS}
        maybe |= {name: _floats(record, name) for name in BY_NAME}
        return cls(
            decode=_decode(record.get("decode")),
            metric=part(record, "metric", str),
            value=_float("value", record.get("value")),
            tokens_per_second=number("tokens_per_second", record.get("tokens_per_second"), at_least=0),
            peak_bytes=integer("peak_bytes", record.get("peak_bytes"), at_least=0),
            parameters=integer("parameters", record.get("parameters"), at_least=0),
            seconds=number("seconds", record.get("seconds"), at_least=0),
            steps=integer("steps", record.get("steps"), at_least=0),
            diverged=flag("diverged", record.get("diverged", False)),
            best_step=None if best is None else integer("best_step", best, at_least=0),
            **maybe,
        )


# Fields of a result that older ones do not have.
MAYBE_NUMBERS = ("loss", "input_seconds", "value_error", "loss_error", "test_error")
BY_NAME = ("scores", "test", "grad_norm")


def _floats(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """Numbers by name; none where the record has no such key."""
    return {str(name): _float(name, x) for name, x in part({key: {}, **record}, key, dict).items()}


def _decode(rows: object) -> tuple[tuple[int, float, int], ...] | None:
    if rows is None:
        return None
    if not isinstance(rows, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 3 for x in rows):
        raise ValueError(f"decode must be null or rows of context, seconds and bytes, got {rows!r:.60}.")
    return tuple(
        sorted(
            (
                integer("context of decode", context, at_least=0),
                number("seconds of decode", seconds, at_least=0),
                integer("bytes of decode", size, at_least=0),
            )
            for context, seconds, size in rows
        )
    )


@contextmanager
def reading(path: Path, line: int | None = None) -> Iterator[None]:
    """A ValueError about a file's content gets the file, the line and the way out."""
    try:
        yield
    except ValueError as problem:
        where = path if line is None else f"{path}, line {line}"
        raise ValueError(f"{where}: {str(problem).rstrip('.')}; {WAYS_OUT[path.name]}.") from None


def part(record: Mapping[str, Any], key: str, kind: type) -> Any:
    """A value by its key, if it is of this kind."""
    if not isinstance(record.get(key), kind):
        raise ValueError(f"{key!r} must be of type {kind.__name__}, got {record.get(key)!r:.60}.")
    return record[key]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    content = _content(path)
    with reading(path):
        return _object(content)


def read_head(folder: Path) -> dict[str, Any]:
    """``run.json`` of a run: "run" and "environment", both dicts, "command", and what else there is."""
    head = read_object(folder / RUN)
    with reading(folder / RUN):
        for key, kind in (("run", dict), ("environment", dict), ("command", str)):
            part(head, key, kind)
    return head


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of ``metrics.jsonl``: step, seconds, tokens, and a loss of training or of evaluation at least.

    A last line that was cut off is left out: the writer died in it.
    """
    path = folder / METRICS
    lines = _content(path).split(b"\n")
    for count, content in enumerate(lines, 1):
        cut = count == len(lines) and not _is_json(content)  # no line break after it
        if not content.strip() or cut:
            continue
        with reading(path, count):
            line = _object(content)
            _check_line(line)
        yield line


def read_result(folder: Path) -> Result:
    """``result.json`` of a finished run."""
    record = read_object(folder / RESULT)
    with reading(folder / RESULT):
        return Result.from_json(record)


def is_finished(folder: Path) -> bool:
    """Return True if the run in a folder is at its end, diverged or not: it has a result, and ``run.json`` says so."""
    head = read_head(folder)
    with reading(folder / RUN):
        said = flag("finished", head.get("finished", True))  # older runs did not say
    return said and (folder / RESULT).exists()


def last_step(folder: Path) -> int:
    """The step of the newest checkpoint of a run; 0 where there is none."""
    return max((int(x.name[11:]) for x in folder.glob("checkpoint-*") if x.name[11:].isdecimal()), default=0)


def standing(folder: Path) -> str:
    """Progress of the run in a folder, in a few words."""
    steps = read_head(folder)["run"].get("steps")
    if not is_finished(folder):
        return f"unfinished, saved at step {last_step(folder)} of {steps}"
    result = read_result(folder)
    if result.diverged:
        return f"diverged at step {result.steps} of {steps}"
    return f"finished after {result.steps} steps, {result.metric} {result.value:.4f}"


def unfinished(folder: Path) -> str | None:
    """A sentence on a saved model that is not that of a finished run; None if it is, or this is unknown.

    Args:
        folder: of a run, of its model, or of a checkpoint.
    """
    home = folder.parent if folder.name == MODEL and (folder.parent / RUN).is_file() else folder
    if (home / RUN).is_file():
        if is_finished(home):
            return None
        if (home / RESULT).exists():
            steps, now = read_result(home).steps, read_head(home)["run"].get("steps")
            return f"this is the model after {steps} steps; the run was made longer since, to {now}, and is unfinished"
        return f"{home} is {standing(home)}"
    if (folder / CHECKPOINT).is_file():
        state = read_object(folder / CHECKPOINT)
        with reading(folder / CHECKPOINT):
            step, steps = (integer(x, state.get(x), at_least=0) for x in ("global_step", "max_steps"))
        if step < steps:
            return f"{folder} is a checkpoint after step {step} of {steps}, not the model of a finished run"
    return None


def _content(path: Path) -> bytes:
    try:
        return check_regular(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is missing; the folder of a run has {RUN}, {METRICS} and, once finished, {RESULT}."
        ) from None


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content.decode())
    except ValueError as problem:
        raise ValueError(f"not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {value!r:.60}")
    return value


def _is_json(content: bytes) -> bool:
    try:
        parse_json(content.decode())
    except ValueError:
        return False
    return True


def _check_line(line: Mapping[str, Any]) -> None:
    integer("step", line.get("step"), at_least=0)
    number("seconds", line.get("seconds"), at_least=0)
    integer("tokens", line.get("tokens"), at_least=0)
    losses = [name for name in ("loss", "eval_loss") if name in line]
    if not losses:
        raise ValueError(f"neither 'loss' (of training) nor 'eval_loss' (of evaluation) in {dict(line)!r:.80}")
    for name in losses:
        _float(name, line[name])


def _float(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} must be a number, NaN and Infinity included, got {value!r:.60}.")
    return float(value)


def resume_command(folder: Path | str, command: str = "train", more: str = "") -> str:
    """Command that resumes the run or comparison in a folder, in backticks.

    Bounds that were raised by options are raised in it too: no record keeps them, and the data is read again.

    Args:
        folder: of the run or the comparison.
    """
    words = [program(), *given_options(), command, shlex.quote(str(folder)), "--resume", more]
    return f"`{' '.join(filter(None, words))}`"


def command_words(settings: Any) -> list[str]:
    """The arguments and options that give these settings on the command line; defaults are left out."""
    words: list[str] = []
    short = plain(settings)
    for each, how in options(type(settings)):
        value = getattr(settings, each.name)
        if value == each.default:
            continue
        key = given_as(each).replace("_", "-")
        shown = short[each.name] if how.path or isinstance(value, Path) else value
        text = as_text(shown)
        flag = [f"--{key}" if value else f"--no-{key}"] if isinstance(value, bool) else [f"--{key}", text]
        given = [str(x) for x in shown] if isinstance(value, tuple) else [text]
        words += given if how.argument else flag
    return words


WIDTH = 110  # of a line of a record
PROSE = ("title", "about", "source", "note")  # keys whose texts are sentences: a path in them ends at a space
_HOME = re.compile(r"(?:[A-Za-z]:)?/(?:home|Users)/[^/]+(?=/|$)|/root(?=/|$)|~[^/]*")
_START = r"(?:file://)?(?:~[\w.-]*[\\/]|[A-Za-z]:[\\/]|/(?!/))"
_VALUE = re.compile(rf"(?:^|(?<=[=:,]))(?:{_START}[^,:]*|~$)")
_NAME = r"[\w.+@%-]+"
_WORD = re.compile(rf"(?<![\w.~/\\<]){_START}{_NAME}(?:[\\/]{_NAME})*/?")


def short_path(path: str) -> str:
    """Return the last two parts of a path, without the home folder; ``~`` for that folder itself."""
    plain = path.removeprefix("file://").replace("\\", "/")
    home = Path.home().as_posix()
    if len(home) > 1 and (plain == home or plain.startswith(f"{home}/")):
        rest = plain[len(home) :]
    else:
        match = _HOME.match(plain)
        rest = plain[match.end() :] if match else plain
    names = [x for x in rest.split("/") if x not in ("", ".", "..") and not re.fullmatch("[A-Za-z]:", x)]
    return "/".join(names[-2:]) or "~"


def short_paths(text: str, prose: bool = False) -> str:
    """Shorten the absolute paths in a text; outside of prose a path may have spaces and ends with the value."""

    def word(match: re.Match[str]) -> str:
        one = match[0][0] == "/" and match[0].count("/") == 1  # such as "and /or": a word rather than a path
        return match[0] if one else short_path(match[0])

    text = text if prose else _VALUE.sub(lambda match: short_path(match[0]), text)
    return _WORD.sub(word, text)


def short_command(command: str) -> str:
    """Shorten the paths in a command line, word by word."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        return short_paths(command, prose=True)
    return shlex.join(short_paths(word) for word in words)


def portable(value: Any, key: str = "") -> Any:
    """Copy a record without what is of this machine; ``key`` is its name in what holds it."""
    if isinstance(value, dict):
        return {str(name): portable(x, str(name)) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [portable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return short_command(value) if key == "command" else short_paths(value, prose=key in PROSE)
    return value


def rounded(value: Any) -> Any:
    """Copy a record with seven digits of every number that is not an integer: more than a measurement has."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def readable_json(value: Any, indent: str = "") -> str:
    """Write JSON for readers: a value that fits on a line has one line, others a line for each item."""
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or not value or len(indent) + len(flat) <= WIDTH:
        return flat
    inner = f"{indent}  "
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {readable_json(x, inner)}" for name, x in value.items()]
    else:
        items = [readable_json(x, inner) for x in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n" + ",\n".join(inner + item for item in items) + f"\n{indent}{closed}"


def plain(settings: Any) -> dict[str, Any]:
    """Settings as plain values for JSON; paths are reduced to their last part."""
    values = {}
    for each in fields(settings):
        value, how = getattr(settings, each.name), each.metadata.get(OPTION, Option())
        if how.path and isinstance(value, tuple):
            value = tuple(Path(x).name for x in value)
        elif isinstance(value, Path) or (how.path and value is not None):
            value = Path(value).name
        values[each.name] = list(value) if isinstance(value, tuple) else value
    return values


def target(path: Path) -> Path:
    """Make the folder of a path and check early that it can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written; give another --out.")
    return path
