"""Prefill, decoding and the cache of a decoder and its converted copies over the length of the prompt.

The original with transformers' SDPA against its converted copies. Tokens are random: only speed is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernelformer.formatting import human_bytes, human_time, short_names
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.settings import MAX_SECONDS, MEMORY, PICKLE, Settings, option
from kernelformer_lab.bench.harness import fill_rows, peak_memory
from kernelformer_lab.bench.timing import Figures, Step, time_rounds
from kernelformer_lab.figures import table
from kernelformer_lab.studies import lengths
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study, check_named
from kernelformer_lab.studies.lengths import BASELINES, SPARE, TINY, TOKEN, Contender, Subject, find_row

PREFILL = "prefill"
# The sizes of SmolLM2-135M.
SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Served(Subject):
    """The decoder that is measured.

    Args:
        folder: of a pretrained one, or its ``.gguf`` file; "": a Llama of `SIZES` with random weights.
    """

    folder: str = ""

    def build(self, length: int, head: bool = True) -> tuple[Any, list[str]]:
        """Build the model with its head; see `Subject.build`."""
        model, stretched = super().build(length, head)
        if not model.can_generate():
            raise ValueError(f"{self.folder} is a {type(model).__name__}, which does not generate; give a decoder.")
        return model, stretched

    def _drawn(self, head: bool) -> Any:
        if self.folder:
            return super()._drawn(head)
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]


def measure(
    what: str, subject: Mapping[str, Any], length: int, names: Sequence[str], chunk: int, rounds: int, budget: float
) -> dict[str, dict[str, Figures]]:
    """Measure contenders in this process.

    Args:
        what: ``time`` of prefill and of a token after it, or ``memory`` of the prefill of one contender.
        subject: fields of `Served`.
        length: tokens of the prompt.
        names: of the contenders.
        chunk: tokens that a converted model reads at once. The original reads all at once: SDPA is causal without a
            mask then, and would need one of chunk x S numbers for pieces.
        rounds: at least so many prefills and tokens of each are timed, after one that warms up.
        budget: seconds for timing all prefills, and as many for all tokens.

    Returns:
        Of each contender the figures of ``prefill`` and ``token``; ``peak`` is the memory of a prefill beyond the
        weights, and the bytes of the cache of a token.
    """
    this = Served(**subject)
    model, _ = this.build(length + SPARE)
    tokens, one = this.tokens(model, length), this.tokens(model, 1, seed=1)
    served = {name: Contender(model, name, length if name in BASELINES else chunk) for name in names}
    if what == "memory":
        (name, mine), *_ = served.items()
        mine.read(tokens[:, :TINY])
        return {name: {"prefill": {"peak": peak_memory(_steps(served, "read", tokens))[name]}}}
    first = time_rounds(_steps(served, "read", tokens), rounds, budget)
    ready = {name: x for name, x in served.items() if "problem" not in first[name]}
    sizes = {name: lengths.cache_bytes(x.cache) for name, x in ready.items()}
    after = time_rounds(_steps(ready, "go_on", one), rounds, budget)
    tokens_of = {name: {**x, "peak": sizes[name]} for name, x in after.items()}
    return {name: {"prefill": x, "token": tokens_of.get(name, x)} for name, x in first.items()}


def _steps(served: Mapping[str, Contender], what: str, tokens: Tensor) -> dict[str, Step]:
    calls: dict[str, Callable[..., None]] = {name: getattr(x, what) for name, x in served.items()}
    return {name: Step(partial(call, tokens)) for name, call in calls.items()}


ORIGINAL = "sdpa"
PARTS = {PREFILL: "prefill", TOKEN: "token"}  # of the figures of `measure.serving`, by kind of row


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """Settings of this study."""

    model: str = option("", "folder or .gguf of a decoder; default: random weights, SmolLM2-135M's sizes", path=True)
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=64:window=64:sinks=4",), f"what it is converted to: {SPECS}"
    )
    lengths: tuple[int, ...] = option((1024, 4096, 16384, 65536), "tokens of the prompt", least=1)
    chunk: int = option(4096, "tokens of the prompt that a converted model reads at once", least=1)
    batch: int = option(1, "prompts at once", least=1)
    rounds: int = option(2, "timed prefills and tokens of each, at least", least=1)
    budget: float = option(20.0, "seconds for all prefills of a length, and for all tokens", least=0.01)
    limit: float = option(900.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    allow_pickle: bool = option(False, PICKLE, switch=True)


def check(settings: ServingSettings) -> None:
    """Raise ValueError for settings that are not known, before anything is measured."""
    for spec in settings.attention:
        parse_method(spec)
    check_named(settings, "lengths", "attention")
    lengths.check_rounds(settings.rounds)


def contenders(settings: ServingSettings) -> list[str]:
    """Return the names of all contenders, the original first."""
    return list(dict.fromkeys((ORIGINAL, *settings.attention)))


def steps(settings: ServingSettings) -> int:
    """Return how many processes measure: for each length one of all times, and one of each one's memory."""
    check(settings)
    return len(set(settings.lengths)) * (1 + settings.memory * len(contenders(settings)))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure everything that the record does not have yet, short prompts first; see `studies.base`."""
    settings = record.settings
    check(settings)
    lengths.resume(record, *_described(settings))
    for length in sorted(set(settings.lengths)):
        rows = [find_row(record.rows, PREFILL, length, name) for name in contenders(settings)]
        for row in rows:
            row["note"] = lengths.refusal(record.rows, row, settings.limit) if row["seconds"] is None else ""
        for row in rows if settings.memory else ():
            log(f"{length} tokens: memory of {row['attention']}")
            if row["peak"] is None:
                _measure("memory", [row], record)
            progress()
        log(f"{length} tokens: timing")
        pairs = [(row, find_row(record.rows, TOKEN, length, row["attention"])) for row in rows]
        for row, token in pairs:
            token["note"] = row["note"]
        # A prefill comes before its token.
        pairs = [pair for pair in pairs if any(x["seconds"] is None for x in pair)]
        _measure("time", [row for pair in zip(*pairs, strict=True) for row in pair], record)
        progress()


def speed(record: Record, row: Row) -> float | None:
    """Tokens per second of a prefill, or of decoding."""
    count: int = record.figures["about"]["batch"] * (row["length"] if row["kind"] == PREFILL else 1)
    return None if row["seconds"] is None else count / row["seconds"]


def tables(record: Record) -> list[Table]:
    """A line for each contender and length, then the tables of ratios and crossovers as of lengths."""
    first = sorted(record.where(kind=PREFILL), key=lambda x: x["length"])
    short = short_names(x["attention"] for x in first)
    cells = []
    for row in first:
        token = find_row(record.rows, TOKEN, row["length"], row["attention"])
        times = [x for part in (row, token) for x in _time(part)]
        sizes = (human_bytes(token["peak"]), human_bytes(row["peak"]))
        cells.append((str(row["length"]), short[row["attention"]], *times, *sizes))
    columns = ("tokens", "attention", "prefill", "tokens/s", "a token after it", "tokens/s", "cache", "peak")
    return [
        table(f"{lengths.headline(record)}, served", columns, cells, left=2),
        *lengths.curve_tables(record, ORIGINAL),
    ]


def _time(row: Row) -> tuple[str, str]:
    rate = row["tokens per second"]
    return ("not run", "") if rate is None else (human_time(row["seconds"]), f"{rate:,.1f}")


def picture(record: Record, path: Path) -> None:
    """Draw time and memory over the length; crossovers with the original are ringed."""
    lengths.draw_curves(record, path, ORIGINAL)


def _subject(settings: ServingSettings) -> Served:
    random = not settings.model
    return Served(settings.model, "causal" if random else "auto", random, settings.allow_pickle, settings.batch)


def _described(settings: ServingSettings) -> tuple[dict[str, Any], list[str]]:
    """Description of what is measured, and stretched tables; a wrong model is refused before anything is measured."""
    subject = _subject(settings)
    with silent_libraries():
        model, stretched = subject.build(max(settings.lengths) + SPARE)
    for name in contenders(settings):
        lengths.contender(model, name)
    name = Path(settings.model).resolve().name if settings.model else "a Llama of SmolLM2-135M's sizes"
    return {**lengths.describe(model, subject, name, "causal"), "chunk": settings.chunk}, stretched


def _measure(what: str, rows: Sequence[Row], record: Record) -> None:
    """Fill in rows of one length, by one process, and write the record."""

    def measure(running: list[Row]) -> list[Figures]:
        names = list(dict.fromkeys(row["attention"] for row in running))
        figures = job({"what": what, "length": running[0]["length"], "names": names}, record.settings)
        return [figures[row["attention"]][PARTS[row["kind"]]] for row in running]

    fill_rows(rows, measure)
    for row in record.rows:
        row["tokens per second"] = speed(record, row)
    lengths.save(record, (ORIGINAL,))


def job(request: Mapping[str, Any], settings: ServingSettings) -> dict[str, dict[str, Figures]]:
    """Run `measure` in a process of its own; ``request`` says what, length and names."""
    return lengths.measured_apart(measure, _subject(settings), settings, request, chunk=settings.chunk)


STUDY = Study(
    "serving",
    "",
    ServingSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("--model MODEL --lengths 1024,16384", "prefill, decoding and the cache"),),
)
