"""A two-minute tour: what an approximation costs in accuracy, and what it saves in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelformer.formatting import human_bytes, human_time
from kernelformer.modules import build_attention
from kernelformer_lab.analysis.errors import Error, output_errors, sample_inputs
from kernelformer_lab.bench.attention import Case
from kernelformer_lab.bench.benchmark import Row, run_case
from kernelformer_lab.studies.base import Log, Progress
from kernelformer_lab.studies.settings import NoSettings

FEATURES = (16, 32, 64, 128, 256, 512)
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (1024, 4096, 16384, 65536)
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "favor+ (orthogonal)": ("favor+", {}),
    "favor+ (iid)": ("favor+", {"draw": "iid"}),
    "favor+hyperbolic": ("favor+hyperbolic", {}),
    "trigonometric": ("trigonometric", {}),
}


@dataclass
class Tour:
    """What the tour has measured."""

    errors: dict[str, list[Error]] = field(default_factory=dict)
    lengths: list[Row] = field(default_factory=list)
    contexts: list[Row] = field(default_factory=list)
    state: int = 0  # bytes that favor+ keeps between tokens


def steps(settings: NoSettings) -> int:
    """How often `run` calls ``progress``."""
    return len(MAPS) + len(LENGTHS) + len(CONTEXTS)


def run(settings: NoSettings, folder: Path, log: Log, progress: Progress) -> Tour:
    """Measure errors, then speed and memory by length, then decoding by context."""
    tour, threads = Tour(), torch.get_num_threads()
    inputs = sample_inputs(1024, 64, norm=1.5)
    for label, (method, options) in MAPS.items():
        log(f"error of {label}")
        tour.errors[label] = output_errors(method, inputs, FEATURES, **options)
        progress()
    names = ("favor+", "sdpa")
    for length in LENGTHS:
        log(f"speed and memory at length {length}")
        case = Case(task="bidirectional", length=length)
        tour.lengths += run_case(case, names, heaps=["default"], threads=threads, budget=0.5, memory=True)
        progress()
    for context in CONTEXTS:
        log(f"one token after {context}")
        case = Case(task="decode", length=context)
        tour.contexts += run_case(case, names, heaps=["default"], threads=threads, budget=0.3, memory=False)
        progress()
    tour.state = state_bytes(Case(task="decode", length=1))
    return tour


def state_bytes(case: Case) -> int:
    """Bytes that favor+ keeps between two tokens, whatever the context."""
    core = build_attention("favor+", head_dim=case.head_dim, num_heads=case.heads, num_features=case.features)
    _, state = core.step(*case.inputs(1))
    return state.nbytes


def cache_bytes(case: Case) -> int:
    """Bytes that softmax attention keeps: all keys and values, in float32."""
    return 2 * 4 * case.batch * case.heads * case.head_dim * case.length


def tables(tour: Tour) -> list[Table]:
    """Tables of errors, of speed and memory, and of decoding."""
    errors = Table(title="Relative error against exact attention (|q| = |k| = 1.5)")
    errors.add_column("map")
    for count in FEATURES:
        errors.add_column(f"m = {count}", justify="right")
    for label, row in tour.errors.items():
        errors.add_row(label, *(f"{x.mean:.3f}" for x in row))
    speed = Table(title="Bidirectional forward, H = 8, D = 64, m = 256")
    for name in ("length", "favor+", "softmax", "faster by", "favor+ memory", "softmax memory"):
        speed.add_column(name, justify="right")
    for ours, theirs in _pairs(tour.lengths):
        beyond = [human_bytes((x.peak or 0) - (x.results or 0)) for x in (ours, theirs)]
        speed.add_row(str(ours.case.length), *_times(ours, theirs), *beyond)
    decode = Table(title="Decoding: one token after a context")
    for name in ("context", "favor+", "softmax", "faster by", "state kept", "cache kept"):
        decode.add_column(name, justify="right")
    for ours, theirs in _pairs(tour.contexts):
        kept = (human_bytes(tour.state), human_bytes(cache_bytes(theirs.case)))
        decode.add_row(str(ours.case.length), *_times(ours, theirs), *kept)
    return [errors, speed, decode]


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    return list(zip(rows[::2], rows[1::2], strict=True))


def _times(ours: Row, theirs: Row) -> list[str]:
    one, two = (x.seconds["default"] for x in (ours, theirs))
    return [human_time(one), human_time(two), f"{two / one:.1f}x"]


def record(tour: Tour) -> dict[str, Any]:
    """Errors by map, rows of the benchmark by length and by context, and the bytes of a state."""
    return {
        "errors": {label: [asdict(x) for x in row] for label, row in tour.errors.items()},
        "lengths": [x.as_json() for x in tour.lengths],
        "contexts": [x.as_json() for x in tour.contexts],
        "state": tour.state,
    }


def picture(tour: Tour, path: Path) -> None:
    """Draw errors, speed, memory and decoding in four panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((errors, speed), (memory, decode)) = plt.subplots(2, 2, figsize=(10, 7.5), constrained_layout=True)
    for label, row in tour.errors.items():
        x = [e.num_features for e in row]
        errors.errorbar(x, [e.mean for e in row], yerr=[e.standard_error for e in row], marker="o", label=label)
    errors.set_title("error against exact attention")
    errors.set_xlabel("frequencies m")
    errors.set_ylabel("relative error of the output")
    for axis, rows, title, xlabel in (
        (speed, tour.lengths, "bidirectional forward", "length"),
        (decode, tour.contexts, "decoding one token", "context"),
    ):
        for index, label in enumerate(("favor+", "softmax")):
            mine = rows[index::2]
            axis.plot(
                [r.case.length for r in mine], [r.seconds["default"] * 1e3 for r in mine], marker="o", label=label
            )
        axis.set_title(title)
        axis.set_xlabel(xlabel)
        axis.set_ylabel("ms")
    for index, label in enumerate(("favor+", "softmax")):
        mine = tour.lengths[index::2]
        beyond = [((r.peak or 0) - (r.results or 0)) / 2**20 for r in mine]
        memory.plot([r.case.length for r in mine], beyond, marker="o", label=f"{label}: peak of a forward")
    x = [r.case.length for r in tour.contexts[::2]]
    memory.plot(x, [tour.state / 2**20] * len(x), "C0--", label="favor+: state kept for decoding")
    memory.plot(x, [cache_bytes(r.case) / 2**20 for r in tour.contexts[::2]], "C1--", label="softmax: cache kept")
    memory.set_title("memory beyond inputs and outputs")
    memory.set_xlabel("length or context")
    memory.set_ylabel("MiB")
    for axis in (errors, speed, memory, decode):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
