"""Time and memory of a pretrained model and its converted copies over the length, and where their curves cross."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from kernelformer.settings import MAX_SECONDS, MEMORY, PICKLE, Settings, option
from kernelformer_lab.bench.harness import fill_rows, model_step, over_limit, peak_memory, run_in_process, too_large
from kernelformer_lab.bench.settings import HEAPS, MEMORY_HEAP, PASSES
from kernelformer_lab.bench.timing import MOST_ROUNDS, Figures, Step, time_rounds
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, check_named, unique, where

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
        task: one of `TASKS`; ``auto``: what the model is. With random weights BERT and its kin can be ``causal``.
        random: whether its weights are drawn, and only its configuration is read.
        allow_pickle: whether weights may be read from a pickle.
    """

    folder: str
    task: str = "auto"
    random: bool = False
    allow_pickle: bool = False
    batch: int = 1

    def build(self, length: int, head: bool = False) -> tuple[Any, list[str]]:
        """Build the model in evaluation mode with positions for ``length`` tokens; return it and what was stretched.

        Args:
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

    other = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    if name in BASELINES:
        other.set_attn_implementation(name)
        return other
    method, options = parse_method(name)
    return convert(other, method, **options)


def empty_cache(model: Any, name: str) -> Any:
    """Make the cache that a contender generates with: transformers' own, or states."""
    from transformers import DynamicCache

    from kernelformer.hf import new_cache

    return DynamicCache(config=model.config) if name in BASELINES else new_cache(model)


@torch.no_grad()
def prefill(model: Any, tokens: Tensor, cache: Any, chunk: int) -> None:
    """Read a prompt (B, L) into a cache, ``chunk`` tokens at a time; only the last token gets logits.

    Cost: O(chunk) memory beyond the cache where all attentions are linear.
    """
    for part in tokens.split(chunk, 1):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)


class Contender:
    """One way to serve the model: it reads the prompt into a new cache, and continues from the last one.

    Args:
        name: see `contender`.
        chunk: tokens that it reads at once.
    """

    def __init__(self, model: Any, name: str, chunk: int) -> None:
        self.model, self.name, self.chunk = contender(model, name), name, chunk
        self.cache: Any = None

    def read(self, tokens: Tensor) -> None:
        """Read a prompt (B, L)."""
        self.cache = empty_cache(self.model, self.name)
        prefill(self.model, tokens, self.cache, self.chunk)

    @torch.no_grad()
    def go_on(self, token: Tensor) -> None:
        """Take one token (B, 1) more."""
        self.model(input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


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
        _step(other, this.tokens(model, min(TINY, length)), kind).seconds()
        return {name: {"peak": count} for name, count in peak_memory({names[0]: _step(other, tokens, kind)}).items()}
    return time_rounds({name: _step(contender(model, name), tokens, kind) for name in names}, rounds, budget)


def _step(model: Any, tokens: Tensor, kind: str) -> Step:
    """One of `PASSES` of a model on tokens (B, L), without dropout."""
    return model_step(model, lambda: model(input_ids=tokens).last_hidden_state, kind)


@torch.no_grad()
def measure_generation(
    subject: Subject, context: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Figures]:
    """Return the median seconds of a token after a context, and the bytes of each contender's cache then."""
    model, _ = subject.build(context + SPARE, head=True)
    tokens, one = subject.tokens(model, context), subject.tokens(model, 1, seed=1)
    served = {name: Contender(model, name, CHUNK) for name in names}
    for each in served.values():
        each.read(tokens)
    sizes = {name: cache_bytes(x.cache) for name, x in served.items()}
    figures = time_rounds({name: Step(partial(x.go_on, one)) for name, x in served.items()}, rounds, budget)
    return {name: {**x, "peak": sizes[name]} for name, x in figures.items()}


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache: of its states, or of all keys and values."""
    own = getattr(cache, "nbytes", None)
    return own if own is not None else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


def find_row(rows: list[Row], kind: str, length: int, name: str) -> Row:
    """The row of a contender, a new one where there is none.

    ``kind`` is one of `PASSES`, or `TOKEN` after a context; ``seconds`` a median; ``peak`` bytes of a pass beyond the
    weights, of the cache after a context; ``note``: why it was not run.
    """
    key = {"kind": kind, "length": length, "attention": name}
    for row in where(rows, **key):
        return row
    rows.append({**key, "seconds": None, "rounds": 0, "peak": None, "note": ""})
    return rows[-1]


def curve(rows: Sequence[Row], kind: str, name: str, what: str) -> dict[int, float]:
    """``seconds`` or ``peak`` over the length, where there is a figure."""
    mine = sorted(where(rows, kind=kind, attention=name), key=lambda x: x["length"])
    return {x["length"]: x[what] for x in mine if (x[what] or 0) > 0}


def crossovers(rows: Sequence[Row], baselines: Sequence[str]) -> list[dict[str, Any]]:
    """The length from which on each attention is below each baseline."""
    lines = []
    for kind in unique(rows, "kind"):
        names = unique(where(rows, kind=kind), "attention")
        for name in (x for x in names if x not in BASELINES):
            for base in (x for x in baselines if x in names):
                line: dict[str, Any] = {"kind": kind, "attention": name, "against": base}
                for what in ("seconds", "peak"):
                    at, words = crossover(curve(rows, kind, base, what), curve(rows, kind, name, what))
                    line |= {what: at, f"{what} in words": words}
                lines.append(line)
    return lines


def refusal(rows: Sequence[Row], row: Row, limit: float) -> str:
    """Reason not to run a row, judged by shorter ones."""
    seconds, peak = (
        predicted(curve(rows, row["kind"], row["attention"], what), row["length"]) for what in ("seconds", "peak")
    )
    return over_limit(seconds, limit) or too_large(peak or 0) or ""


def resume(record: Record, about: dict[str, Any], stretched: list[str]) -> None:
    """Begin the figures with the rows that have one in an earlier record of the same model on the same machine."""
    record.resume({"about": about})
    kept = record.rows
    record.figures |= {"stretched": stretched, "rows": []}
    for row in kept:
        if row["seconds"] is not None or row["peak"] is not None:
            own = find_row(record.rows, row["kind"], row["length"], row["attention"])
            own |= {name: row[name] for name in ("seconds", "rounds", "peak")}


def save(record: Record, baselines: Sequence[str]) -> None:
    """Write the record with the crossovers of its rows."""
    record.figures["crossovers"] = crossovers(record.rows, baselines)
    record.save()


def predicted(curve: Mapping[int, float], length: int) -> float | None:
    """Extend a curve to a longer input: the last growth continues, as a power between 1 and 2; 2 where it is not known.

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


def tables(record: Record) -> list[Table]:
    """A table for each pass, with ratios to the first baseline (above 1: better than it), and the crossovers."""
    return curve_tables(record, record.settings.baselines[0])


def curve_tables(record: Record, first: str) -> list[Table]:
    """`tables` with ratios to this baseline."""
    crossed = record.figures["crossovers"]
    short = short_names(x["attention"] for x in crossed)
    last = [
        (x["kind"], short[x["attention"]], x["against"], x["seconds in words"], x["peak in words"]) for x in crossed
    ]
    return [
        *(_table(record, record.where(kind=kind), first) for kind in unique(record.rows, "kind")),
        table(
            "Length from which on the converted model stays below the original",
            ("pass", "attention", "against", "time", "memory"),
            last,
            left=3,
        ),
    ]


def headline(record: Record) -> str:
    """Describe the model in one line."""
    about = record.figures["about"]
    return f"{about['model']} ({about['kind']}, {about['weights']} weights, {about['task']})"


def _table(record: Record, rows: Sequence[Row], first: str) -> Table:
    kind = rows[0]["kind"]
    skipped = [f"not run: {x['attention']}, {x['length']} tokens: {x['note']}" for x in rows if x["note"]]
    short = short_names(x["attention"] for x in rows)
    cells = [
        (
            str(row["length"]),
            short[row["attention"]],
            "not run" if row["seconds"] is None else human_time(row["seconds"]),
            _ratio(rows, row, "seconds", first),
            human_bytes(row["peak"]),
            _ratio(rows, row, "peak", first),
            str(row["rounds"] or ""),
        )
        for row in sorted(rows, key=lambda x: x["length"])
    ]
    size, memory = ("context", "cache") if kind == TOKEN else ("tokens", "peak")
    return table(
        f"{headline(record)}, {kind}",
        (size, "attention", "time", f"{first} / it", memory, f"{first} / it", "rounds"),
        cells,
        left=2,
        caption="\n".join([*record.figures["stretched"], *skipped]) or None,
    )


def _ratio(rows: Sequence[Row], row: Row, what: str, first: str) -> str:
    base, own = curve(rows, row["kind"], first, what).get(row["length"]), row[what]
    return human_ratio(base / own) if base and own and row["attention"] != first else ""


def picture(record: Record, path: Path) -> None:
    """Draw time and memory over the length, one row for each pass; crossovers with the first baseline are ringed."""
    draw_curves(record, path, record.settings.baselines[0])


def draw_curves(record: Record, path: Path, first: str) -> None:
    """`picture` with this baseline."""
    kinds, names = unique(record.rows, "kind"), unique(record.rows, "attention")
    styles = {name: style(index) for index, name in enumerate(names)}
    for name in (x for x in names if x in BASELINES):
        styles[name] |= {"color": "#1b1e23" if name == first else "#808080"}
    with drawing(path, (10, 4.0 * len(kinds) + 0.4), len(kinds), 2, dpi=140) as (figure, axes):
        for line, kind in zip(axes, kinds, strict=True):
            for axis, what in zip(line, ("seconds", "peak"), strict=True):
                _panel(axis, record, kind, what, styles, first)
            line[0].legend(fontsize=8, frameon=False)
        note = "; positions stretched" if record.figures["stretched"] else ""
        figure.suptitle(f"{headline(record)}{note}", size=11)


def _panel(axis: Any, record: Record, kind: str, what: str, styles: dict[str, dict[str, Any]], first: str) -> None:
    show = human_time if what == "seconds" else human_bytes
    words = {"seconds": "time", "peak": "cache" if kind == TOKEN else "peak memory beyond the weights"}
    axis.set_title(f"{words[what]}, {kind}", size=10)
    curves = {name: curve(record.rows, kind, name, what) for name in styles}
    if not any(curves.values()):
        axis.axis("off")
        axis.text(0.5, 0.5, "not measured", ha="center", color="grey", transform=axis.transAxes)
        return
    for name, points in curves.items():
        if points:
            label = f"original, {name}" if name in BASELINES else name
            axis.plot(list(points), list(points.values()), label=label, **styles[name] | {"markersize": 5})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10 if what == "seconds" else 2)
    if what == "seconds":
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    low, high = axis.get_ylim()
    if high < 5 * low:  # else a few percent would fill the panel
        middle = math.sqrt(low * high)
        axis.set_ylim(middle / 5**0.5, middle * 5**0.5)
    lengths = sorted(unique(record.where(kind=kind), "length"))
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda y, _: show(y))
    axis.set_xlabel("context, tokens" if kind == TOKEN else "tokens")
    axis.grid(True, alpha=0.15)
    for x in where(record.figures["crossovers"], kind=kind, against=first):
        at = x[what]
        if at is not None:
            colour = styles[x["attention"]]["color"]
            ring = {"mfc": "none", "mec": colour, "markersize": 13, "zorder": 5}
            axis.plot([at], [between(curves[x["attention"]], at)], "o", **ring)
            axis.axvline(at, color=colour, linewidth=0.8, linestyle=":")
            foot = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            axis.text(at, 0.02, f"{at:,.0f}", rotation=90, size=8, color=colour, **foot)


def between(curve: dict[int, float], at: float) -> float:
    """Return the value at a length between two measured ones, on a line on logarithmic scales."""
    first = max(n for n in curve if n <= at)
    last = min(n for n in curve if n >= at)
    share = 0.0 if first == last else math.log(at / first) / math.log(last / first)
    return float(curve[first] * (curve[last] / curve[first]) ** share)


FIRST_CONTEXT = 128
STRETCHED = ("max_position_embeddings", "n_positions")  # what a configuration says of positions


@dataclass(frozen=True, kw_only=True)
class LengthsSettings(Settings):
    """Settings of this study."""

    model: Path = option(
        help="folder of transformers; --random needs its config.json alone", argument=True, shown="MODEL"
    )
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=128", "favor+:num_features=128"), f"what it is converted to: {SPECS}"
    )
    baselines: tuple[str, ...] = option(("sdpa", "eager"), "of the original: sdpa, eager", choices=("sdpa", "eager"))
    lengths: tuple[int, ...] = option((256, 512, 1024, 2048, 4096, 8192), "tokens", least=1)
    task: str = option("auto", "what the model is: auto, encoder or causal", choices=("auto", "encoder", "causal"))
    random: bool = option(False, "draw the weights", switch=True)
    backward: bool = option(False, "measure forward + backward too", switch=True)
    generate: int = option(0, "the longest context to generate after; 0: none", least=0)
    batch: int = option(1, "sequences of a pass", least=1)
    budget: float = option(10.0, "seconds for each length and pass", least=0.01)
    limit: float = option(60.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    rounds: int = 5  # passes of each, interleaved; at least so many


def check(settings: LengthsSettings) -> None:
    """Raise ValueError for settings that are not known, before anything is measured."""
    choice("task", settings.task, TASKS)
    for name in settings.baselines:
        choice("baseline", name, BASELINES)
    for spec in settings.attention:
        parse_method(spec)
    check_named(settings, "lengths", "attention", "baselines")
    check_rounds(settings.rounds)
    if 0 < settings.generate < FIRST_CONTEXT:
        raise ValueError(f"generate is a context of at least {FIRST_CONTEXT} tokens, got {settings.generate}.")


def check_rounds(rounds: int) -> None:
    """Raise ValueError for more rounds than are ever timed."""
    if rounds > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS}, got {rounds}.")


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


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure everything that the record does not have yet; every point is written when it is measured."""
    settings = record.settings
    check(settings)
    resume(record, *_described(settings))
    for kind, length in cases(settings):
        rows = [find_row(record.rows, kind, length, name) for name in contenders(settings)]
        for row in rows:
            row["note"] = refusal(record.rows, row, settings.limit) if row["seconds"] is None else ""
        for row in rows if settings.memory and kind != TOKEN else ():
            log(f"{kind}, {length} tokens: memory of {row['attention']}")
            if row["peak"] is None:
                _measure("memory", [row], settings)
                save(record, settings.baselines)
            progress()
        log(f"{kind}{' after' if kind == TOKEN else ','} {length} tokens: timing")
        _measure("time", where(rows, seconds=None), settings)
        save(record, settings.baselines)
        progress()


def _subject(settings: LengthsSettings) -> Subject:
    return Subject(str(settings.model), settings.task, settings.random, settings.allow_pickle, settings.batch)


def _described(settings: LengthsSettings) -> tuple[dict[str, Any], list[str]]:
    """Description of what is measured, and stretched tables; a wrong model is refused before anything is measured."""
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
    return describe(model, subject, Path(subject.folder).resolve().name, task), stretched


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
        request = {"what": what, "kind": running[0]["kind"], "length": running[0]["length"]}
        figures = job({**request, "names": [row["attention"] for row in running]}, settings)
        return [figures[row["attention"]] for row in running]

    fill_rows(rows, measure)


def job(request: Mapping[str, Any], settings: LengthsSettings) -> dict[str, Figures]:
    """Run `measure` in a process of its own: {contender: figures}; ``request`` says what, kind, length and names."""
    return measured_apart(measure, _subject(settings), settings, request)


def measured_apart(
    work: Callable[..., Any], subject: Subject, settings: Any, request: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Call a function of this kind in a process of its own, with the rounds and the budget of the settings."""
    return run_in_process(
        work,
        threads=torch.get_num_threads(),
        allocator=MEMORY_HEAP if request["what"] == "memory" else HEAPS["default"],
        subject=asdict(subject),
        rounds=settings.rounds,
        budget=settings.budget,
        **request,
        **more,
    )


STUDY = Study(
    "lengths",
    "",
    LengthsSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("MODEL --lengths 512,2048,8192", "time and memory of the original and the converted"),),
)
