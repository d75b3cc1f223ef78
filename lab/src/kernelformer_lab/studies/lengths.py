"""The result of the study of lengths: curves, crossovers, tables and the picture."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from kernelformer.environment import environment
from kernelformer.errors import choice
from kernelformer.formatting import human_bytes, human_ratio, human_time, short_names
from kernelformer.hf.find import find_attentions
from kernelformer.modules.spec import parse_method
from kernelformer.page import style
from kernelformer.quiet import silent_libraries
from kernelformer.timing import MOST_ROUNDS, Figures, Step, time_rounds
from kernelformer_lab.bench.harness import (
    clean_model,
    fill_rows,
    over_limit,
    peak_memory,
    run_in_process,
    run_pass,
    too_large,
)
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.settings import LengthsSettings

BASELINES = ("sdpa", "eager")  # implementations of the original
TOKEN = "one token"
TASKS = ("auto", "encoder", "causal")
TINY = 16  # tokens of the pass after which libraries, threads and their buffers are there
CHUNK = 1024  # tokens of a context that go through the model at once
SPARE = 128  # positions for tokens after a context: more than are ever timed


@dataclass(frozen=True)
class Subject:
    """The pretrained model that is measured.

    Args:
        folder: of a transformers model.
        task: one of `TASKS`; ``auto``: what the model is. With random weights BERT and its kin can be ``causal``.
        random: whether its weights are drawn, and only its configuration is read.
        allow_pickle: whether weights may be read from a pickle.
        batch: sequences of a pass.
    """

    folder: str
    task: str = "auto"
    random: bool = False
    allow_pickle: bool = False
    batch: int = 1

    def build(self, length: int, head: bool = False) -> tuple[Any, list[str]]:
        """Build the model in evaluation mode with positions for ``length`` tokens; return it and what was stretched.

        Args:
            length: tokens.
            head: whether it predicts tokens, for generating; without one there are no numbers over the vocabulary,
                which would be as many for every attention.
        """
        model = self._drawn(head) if self.random else self._loaded(head)
        if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
            raise ValueError(
                f"{self.folder} is a {type(model).__name__}; lengths are measured of encoders and decoders of one text."
            )
        model, stretched = stretch(model, length)
        model.config.use_cache = False
        return model.eval(), stretched

    def _drawn(self, head: bool) -> Any:
        from transformers import AutoModel, AutoModelForCausalLM

        from kernelformer.hf.load import load_config

        config: Any = load_config(self.folder)
        if self.task == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # BERT and its kin attend causally then
        torch.manual_seed(0)
        kind: Any = AutoModelForCausalLM if head else AutoModel
        return kind.from_config(config, trust_remote_code=False)

    def _loaded(self, head: bool) -> Any:
        from kernelformer.hf.load import load_source

        task = "causal" if head else "auto"
        model = load_source(self.folder, task=task, allow_pickle=self.allow_pickle).model
        # Weights are mapped from their file: a pass would pay for the pages that it is the first to read.
        for x in (*model.parameters(), *model.buffers()):
            x.data = x.data.clone()
        return model if head else model.base_model

    def tokens(self, model: Any, length: int, seed: int = 0) -> Tensor:
        """Return random tokens (B, L), the same for every attention."""
        gen = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.get_text_config().vocab_size, (self.batch, length), generator=gen)


def room(model: Any) -> int | None:
    """Return how many tokens a model's table of positions has rows for; None without a table, as rotary models."""
    count = getattr(model.config, "max_position_embeddings", None)
    if count is None:
        return None
    rooms = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not ("pos" in name.lower() or name.endswith("wpe")):
            continue
        if count <= module.num_embeddings <= count + 2:  # OPT and its kin have two rows more
            first = 0 if module.padding_idx is None or module.num_embeddings > count else module.padding_idx + 1
            rooms.append(count - first)
    return min(rooms, default=None)


@torch.no_grad()
def stretch(model: Any, length: int) -> tuple[Any, list[str]]:
    """Return a model with positions for ``length`` tokens, for measuring its speed.

    Its tables of positions are stretched: between two rows the new ones lie on a line. What it predicts at positions
    that it was not trained on means nothing. A model with enough positions, or without a table, is returned as it is.

    Returns:
        The model, and a line for each table that was stretched.
    """
    fits = room(model)
    if fits is None or length <= fits:
        return model, []
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - fits
    longer = type(model)(config)
    old, new, lines = model.state_dict(), longer.state_dict(), []
    for name, x in new.items():
        was = old[name]
        if was.shape == x.shape:
            x.copy_(was)
            continue
        if was.dim() != 2 or was.shape[1:] != x.shape[1:]:
            raise ValueError(f"{name} of {type(model).__name__} cannot be stretched to {length} tokens.")
        x.copy_(F.interpolate(was.T[None], size=x.shape[0], mode="linear", align_corners=True)[0].T)
        lines.append(f"{name}: {was.shape[0]} rows stretched to {x.shape[0]}")
    return longer.to(next(model.parameters()).dtype), lines


def contender(model: Any, name: str) -> Any:
    """Return a copy that attends in another way: one of `BASELINES`, or converted to ``method:option=value``.

    All copies share the tensors of the weights; cores are their own.
    """
    from kernelformer.hf import convert
    from kernelformer.modules.spec import parse_method

    other = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    if name in BASELINES:
        other.set_attn_implementation(name)
        return other
    method, options = parse_method(name)
    return convert(other, method, **options)


def step(model: Any, tokens: Tensor, kind: str) -> None:
    """Run one of `PASSES` of a model on tokens (B, L), without dropout."""
    run_pass(lambda: model(input_ids=tokens).last_hidden_state, kind)


def measure(
    what: str, subject: Mapping[str, Any], kind: str, length: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Figures]:
    """Measure contenders in this process: {contender: figures}.

    Args:
        what: ``time``, or ``memory`` of one contender.
        subject: fields of `Subject`.
        kind: one of `PASSES`, or `TOKEN`.
        length: tokens of a pass, or of the context.
        names: of the contenders, see `contender`.
        rounds: at least so many runs of each are timed.
        budget: seconds for timing all of them.
    """
    this = Subject(**subject)
    if kind == TOKEN:
        return measure_generation(this, length, names, rounds, budget)
    model, _ = this.build(length)
    tokens = this.tokens(model, length)
    if what == "memory":
        other = contender(model, names[0])
        step(other, this.tokens(model, min(TINY, length)), kind)
        clean_model(other)
        return {name: {"peak": count} for name, count in peak_memory({names[0]: _step(other, tokens, kind)}).items()}
    return time_rounds({name: _step(contender(model, name), tokens, kind) for name in names}, rounds, budget)


def _step(model: Any, tokens: Tensor, kind: str) -> Step:
    return Step(lambda: step(model, tokens, kind), lambda: clean_model(model))


@torch.no_grad()
def measure_generation(
    subject: Subject, context: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Figures]:
    """Return the median seconds of a token after a context, and the bytes of each contender's cache then."""
    from transformers import DynamicCache

    from kernelformer.hf import new_cache

    model, _ = subject.build(context + SPARE, head=True)
    tokens, one = subject.tokens(model, context), subject.tokens(model, 1, seed=1)
    steps, sizes = dict[str, Step](), dict[str, int]()
    for name in names:
        other = contender(model, name)
        cache: Any = DynamicCache() if name in BASELINES else new_cache(other)
        feed = partial(other, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for part in tokens.split(CHUNK, 1):
            feed(input_ids=part)
        sizes[name] = cache_bytes(cache)
        steps[name] = Step(partial(feed, input_ids=one))
    figures = time_rounds(steps, rounds, budget)
    return {name: {**x, "peak": sizes[name]} for name, x in figures.items()}


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache: of its states, or of all keys and values."""
    own = getattr(cache, "nbytes", None)
    return own if own is not None else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


@dataclass
class Row:
    """The figures of one contender at one length, in one pass."""

    kind: str  # one of `PASSES`, or `TOKEN` after a context
    length: int
    attention: str
    seconds: float | None = None  # median
    rounds: int = 0
    peak: int | None = None  # bytes of a pass beyond the weights; of the cache after a context
    note: str = ""  # why it was not run


@dataclass
class Result:
    """The rows that the study has measured, as curves over the length.

    Args:
        about: the model, and all that its figures depend on.
        baselines: contenders that are the original; ratios and marks in the picture refer to the first.
        rows: of all contenders, passes and lengths.
        stretched: a line for each table of positions that was, for the longest length.
    """

    about: dict[str, Any]
    baselines: Sequence[str] = BASELINES
    rows: list[Row] = field(default_factory=list)
    stretched: list[str] = field(default_factory=list)

    def row(self, kind: str, length: int, name: str) -> Row:
        """Return the row of a contender, a new one where there is none."""
        for row in self.rows:
            if (row.kind, row.length, row.attention) == (kind, length, name):
                return row
        self.rows.append(Row(kind, length, name))
        return self.rows[-1]

    def curve(self, kind: str, name: str, what: str) -> dict[int, float]:
        """Return ``seconds`` or ``peak`` over the length, where there is a figure."""
        rows = [x for x in self.rows if (x.kind, x.attention) == (kind, name) and (getattr(x, what) or 0) > 0]
        return {x.length: getattr(x, what) for x in sorted(rows, key=lambda x: x.length)}

    def crossovers(self) -> list[dict[str, Any]]:
        """Return from which length on each attention is below each baseline."""
        lines = []
        for kind in dict.fromkeys(x.kind for x in self.rows):
            names = list(dict.fromkeys(x.attention for x in self.rows if x.kind == kind))
            for name in (x for x in names if x not in BASELINES):
                for base in (x for x in self.baselines if x in names):
                    line: dict[str, Any] = {"kind": kind, "attention": name, "against": base}
                    for what in ("seconds", "peak"):
                        at, words = crossover(self.curve(kind, base, what), self.curve(kind, name, what))
                        line |= {what: at, f"{what} in words": words}
                    lines.append(line)
        return lines

    def refusal(self, row: Row, limit: float) -> str:
        """Why a row should not be run, judged by shorter ones."""
        seconds, peak = (
            predicted(self.curve(row.kind, row.attention, what), row.length) for what in ("seconds", "peak")
        )
        return over_limit(seconds, limit) or too_large(peak or 0) or ""


def read_rows(folder: Path, name: str, about: Mapping[str, Any]) -> list[Row]:
    """Read the rows with a figure that a study has written, of the same model on the same machine.

    Args:
        folder: of the record.
        name: of the study.
        about: what the figures depend on.

    Raises:
        ValueError: a record of something else is there.
    """
    path = folder / f"{name}.json"
    fields = [x.name for x in dataclasses.fields(Row)]
    try:
        kept = read_record(folder, name)
        if kept is None:
            return []
        rows = [Row(**{key: x[key] for key in fields}) for x in kept["rows"]]
        other = {key: x for key, x in kept["about"].items() if about.get(key) != x}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not of this study ({problem!r}); move it away, or choose another --out.") from None
    if other:
        raise ValueError(f"{path} holds figures of another model or machine ({other}); choose another --out.")
    return [dataclasses.replace(x, note="") for x in rows if x.seconds is not None or x.peak is not None]


def predicted(curve: Mapping[int, float], length: int) -> float | None:
    """Extend a curve to a longer input: the last growth goes on, as a power between 1 and 2; 2 where it is not known.

    None where nothing shorter was measured.
    """
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
    """Return the length from which on ours stays below the base, between two points on log scales; and it in words.

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


def tables(result: Result) -> list[Table]:
    """Return a table for each pass, with ratios to the first baseline (above 1: better than it), and the crossovers."""
    kinds = dict.fromkeys(row.kind for row in result.rows)
    out = [_table(result, [row for row in result.rows if row.kind == kind]) for kind in kinds]
    last = Table(title="From which length on the converted model stays below the original", title_justify="left")
    for name in ("pass", "attention", "against"):
        last.add_column(name, no_wrap=True)
    for name in ("time", "memory"):
        last.add_column(name, justify="right", no_wrap=True)
    short = short_names(x["attention"] for x in result.crossovers())
    for x in result.crossovers():
        last.add_row(x["kind"], short[x["attention"]], x["against"], x["seconds in words"], x["peak in words"])
    return [*out, last]


def headline(result: Result) -> str:
    """Describe the model in one line."""
    about = result.about
    return f"{about['model']} ({about['kind']}, {about['weights']} weights, {about['task']})"


def _table(result: Result, rows: Sequence[Row]) -> Table:
    kind, first = rows[0].kind, result.baselines[0]
    skipped = [f"not run: {row.attention}, {row.length} tokens: {row.note}" for row in rows if row.note]
    out = Table(
        title=f"{headline(result)}, {kind}",
        caption="\n".join([*result.stretched, *skipped]) or None,
        title_justify="left",
        caption_justify="left",
    )
    out.add_column("context" if kind == TOKEN else "tokens", justify="right", no_wrap=True)
    out.add_column("attention", no_wrap=True)
    for name in ("time", f"{first} / it", "cache" if kind == TOKEN else "peak", f"{first} / it", "rounds"):
        out.add_column(name, justify="right", no_wrap=True)
    rows = sorted(rows, key=lambda x: x.length)
    short = short_names(row.attention for row in rows)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        time, peak = (_ratio(result, row, what) for what in ("seconds", "peak"))
        out.add_row(
            str(row.length),
            short[row.attention],
            "not run" if row.seconds is None else human_time(row.seconds),
            time,
            human_bytes(row.peak),
            peak,
            str(row.rounds or ""),
            end_section=after is None or after.length != row.length,
        )
    return out


def _ratio(result: Result, row: Row, what: str) -> str:
    base, own = result.curve(row.kind, result.baselines[0], what).get(row.length), getattr(row, what)
    return human_ratio(base / own) if base and own and row.attention != result.baselines[0] else ""


def picture(result: Result, path: Path) -> None:
    """Draw time and memory over the length, one row for each pass; crossovers with the first baseline are ringed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.kind for row in result.rows))
    names = list(dict.fromkeys(row.attention for row in result.rows))
    styles = {name: style(index) for index, name in enumerate(names)}
    for name in (x for x in names if x in BASELINES):
        styles[name] |= {"color": "#1b1e23" if name == result.baselines[0] else "#808080"}
    with mpl.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4.0 * len(kinds) + 0.4), layout="constrained")
        axes = figure.subplots(len(kinds), 2, squeeze=False)
        for line, kind in zip(axes, kinds, strict=True):
            _panel(line[0], result, kind, "seconds", styles)
            _panel(line[1], result, kind, "peak", styles)
            line[0].legend(fontsize=8, frameon=False)
        note = "; positions stretched" if result.stretched else ""
        figure.suptitle(f"{headline(result)}{note}", size=11)
        figure.savefig(path, dpi=140)


def _panel(axis: Any, result: Result, kind: str, what: str, styles: dict[str, dict[str, Any]]) -> None:
    show = human_time if what == "seconds" else human_bytes
    words = {"seconds": "time", "peak": "cache" if kind == TOKEN else "peak memory beyond the weights"}
    axis.set_title(f"{words[what]}, {kind}", size=10)
    if not any(result.curve(kind, name, what) for name in styles):
        axis.axis("off")
        axis.text(0.5, 0.5, "not measured", ha="center", color="grey", transform=axis.transAxes)
        return
    for name, style_of_line in styles.items():
        curve = result.curve(kind, name, what)
        if curve:
            label = f"original, {name}" if name in BASELINES else name
            axis.plot(list(curve), list(curve.values()), label=label, **style_of_line | {"markersize": 5})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if what == "seconds" else 2)
    if what == "seconds":
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    low, high = axis.get_ylim()
    if high < 5 * low:  # else a few percent would fill the panel
        middle = math.sqrt(low * high)
        axis.set_ylim(middle / 5**0.5, middle * 5**0.5)
    lengths = sorted({row.length for row in result.rows if row.kind == kind})
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens" if kind == TOKEN else "tokens")
    axis.grid(True, alpha=0.15)
    for x in result.crossovers():
        at = x[what]
        if (x["kind"], x["against"]) == (kind, result.baselines[0]) and at is not None:
            height = between(result.curve(kind, x["attention"], what), at)
            colour = styles[x["attention"]]["color"]
            axis.plot([at], [height], "o", mfc="none", mec=colour, markersize=13, zorder=5)
            axis.axvline(at, color=colour, linewidth=0.8, linestyle=":")
            foot = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            axis.text(at, 0.02, f"{at:,.0f}", rotation=90, size=8, color=colour, **foot)


def between(curve: dict[int, float], at: float) -> float:
    """Return the value at a length between two measured ones, on a line on logarithmic scales."""
    first = max(n for n in curve if n <= at)
    last = min(n for n in curve if n >= at)
    share = 0.0 if first == last else math.log(at / first) / math.log(last / first)
    return float(curve[first] * (curve[last] / curve[first]) ** share)


__all__ = ["check", "picture", "record", "run", "steps", "tables"]
NAME = "lengths"
FIRST_CONTEXT = 128
STRETCHED = ("max_position_embeddings", "n_positions")  # what a configuration says of positions


def check(settings: LengthsSettings) -> None:
    """Raise ValueError for settings that are not known, before anything is measured."""
    choice("task", settings.task, TASKS)
    for name in settings.baselines:
        choice("baseline", name, BASELINES)
    for spec in settings.attention:
        parse_method(spec)
    for what in ("lengths", "attention", "baselines"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")
    if settings.rounds > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS}, got {settings.rounds}.")
    if 0 < settings.generate < FIRST_CONTEXT:
        raise ValueError(f"generate is a context of at least {FIRST_CONTEXT} tokens, got {settings.generate}.")


def contenders(settings: LengthsSettings) -> list[str]:
    """Return the names of all contenders, the original's first."""
    return list(dict.fromkeys((*settings.baselines, *settings.attention)))


def cases(settings: LengthsSettings) -> list[tuple[str, int]]:
    """Return pairs of pass and length, short ones first, from which long ones are predicted."""
    lengths = sorted(set(settings.lengths))
    pairs = [(kind, length) for kind in PASSES[: 1 + settings.backward] for length in lengths]
    context = FIRST_CONTEXT
    while context <= settings.generate:
        pairs.append((TOKEN, context))
        context *= 2
    return pairs


def steps(settings: LengthsSettings) -> int:
    """Return how many processes measure: for each case one of all times, and of a pass one of each one's memory."""
    check(settings)
    weighed = settings.memory * len(contenders(settings))
    return sum(1 if kind == TOKEN else 1 + weighed for kind, _ in cases(settings))


def run(
    settings: LengthsSettings, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
) -> Result:
    """Measure everything that ``folder`` does not hold yet; see `studies.base`.

    Every point is written there when it is measured, so that a second call goes on.
    """
    check(settings)
    result = _described(settings)
    result.rows = read_rows(folder, NAME, result.about)
    for kind, length in cases(settings):
        rows = [result.row(kind, length, name) for name in contenders(settings)]
        for row in rows:
            row.note = result.refusal(row, settings.limit) if row.seconds is None else ""
        for row in rows if settings.memory and kind != TOKEN else ():
            log(f"{kind}, {length} tokens: memory of {row.attention}")
            if row.peak is None:
                _measure("memory", [row], settings)
                write_record(folder, NAME, settings, record(result))
            progress()
        log(f"{kind}{' after' if kind == TOKEN else ','} {length} tokens: timing")
        _measure("time", [row for row in rows if row.seconds is None], settings)
        write_record(folder, NAME, settings, record(result))
        progress()
    return result


def record(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON."""
    rows = [asdict(row) for row in result.rows]
    return {"about": result.about, "stretched": result.stretched, "rows": rows, "crossovers": result.crossovers()}


def _subject(settings: LengthsSettings) -> Subject:
    return Subject(str(settings.model), settings.task, settings.random, settings.allow_pickle, settings.batch)


def _described(settings: LengthsSettings) -> Result:
    """A result without rows; what is wrong with the model or an attention is said before the first hour has passed."""
    subject, longest = _subject(settings), max(settings.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    kinds = {x.causal for x in find_attentions(model)}
    task = "causal" if kinds == {True} else "encoder"
    if subject.task not in ("auto", task):
        raise ValueError(f"{subject.folder} is of the task {task!r}, got --task {subject.task}.")
    if settings.generate and task != "causal":
        raise ValueError(f"{subject.folder} is an encoder and cannot generate; leave --generate out.")
    for name in contenders(settings):
        contender(model, name)
    return Result(
        describe(model, subject, Path(subject.folder).resolve().name, task), settings.baselines, stretched=stretched
    )


def describe(model: Any, subject: Subject, name: str, task: str) -> dict[str, Any]:
    """Return what the figures of a model depend on: the model, its sizes and weights, and the machine."""
    sizes = {key: x for key, x in model.config.to_dict().items() if key not in STRETCHED}
    config = json.dumps(sizes, sort_keys=True, default=str)
    machine = {key: value for key, value in environment(torch.get_num_threads()).items() if key != "date"}
    return {
        "model": name,
        "kind": type(model).__name__,
        "configuration": hashlib.sha256(config.encode()).hexdigest()[:12],
        "weights": "random" if subject.random else "pretrained",
        "task": task,
        "batch": subject.batch,
        "environment": machine,
    }


def _measure(what: str, rows: Sequence[Row], settings: LengthsSettings) -> None:
    """Fill in rows of one pass and length, by one process."""

    def measure(running: list[Row]) -> list[Figures]:
        request = {"what": what, "kind": running[0].kind, "length": running[0].length}
        figures = job({**request, "names": [row.attention for row in running]}, settings)
        return [figures[row.attention] for row in running]

    fill_rows(rows, measure)


def job(request: Mapping[str, Any], settings: LengthsSettings) -> dict[str, Figures]:
    """Run `measure.lengths.measure` in a process of its own: {contender: figures}.

    Args:
        request: what, kind, length and names of the contenders.
        settings: of the model and the time to spend.
    """
    return run_in_process(
        measure,
        threads=torch.get_num_threads(),
        allocator=MEMORY_HEAP if request["what"] == "memory" else HEAPS["default"],
        subject=asdict(_subject(settings)),
        rounds=settings.rounds,
        budget=settings.budget,
        **request,
    )
