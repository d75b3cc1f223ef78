"""A two-minute tour: what an approximation costs in accuracy, and what it saves in time and memory.

python tools/studies/tour.py            (after Performer, 2009.14794, Fig. 3 and 4)
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelformer.formatting import human_bytes, human_time
from kernelformer.modules import build_attention
from kernelformer.settings import Settings
from kernelformer_lab.analysis.errors import output_errors, sample_inputs
from kernelformer_lab.bench.attention import Case
from kernelformer_lab.bench.benchmark import run_case
from kernelformer_lab.cli.studies import main
from kernelformer_lab.figures import drawing, log_axis, table
from kernelformer_lab.studies.base import SCRIPT, Log, Progress, Record, Row, Study

FEATURES = (16, 32, 64, 128, 256, 512)
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (1024, 4096, 16384, 65536)
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "favor+ (orthogonal)": ("favor+", {}),
    "favor+ (iid)": ("favor+", {"draw": "iid"}),
    "favor+hyperbolic": ("favor+hyperbolic", {}),
    "trigonometric": ("trigonometric", {}),
}


def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure errors, then speed and memory by length, then decoding by context."""
    threads, names = torch.get_num_threads(), ("favor+", "sdpa")
    inputs, errors, lengths, contexts = sample_inputs(1024, 64, norm=1.5), {}, list[Row](), list[Row]()
    for label, (method, options) in MAPS.items():
        log(f"error of {label}")
        errors[label] = [asdict(x) for x in output_errors(method, inputs, FEATURES, **options)]
        progress()
    for length in LENGTHS:
        log(f"speed and memory at length {length}")
        case = Case(task="bidirectional", length=length)
        found = run_case(case, names, heaps=["default"], threads=threads, budget=0.5, memory=True)
        lengths += [x.as_json() for x in found]
        progress()
    for context in CONTEXTS:
        log(f"one token after {context}")
        case = Case(task="decode", length=context)
        found = run_case(case, names, heaps=["default"], threads=threads, budget=0.3, memory=False)
        contexts += [x.as_json() for x in found]
        progress()
    state = state_bytes(Case(task="decode", length=1))
    record.figures = {"errors": errors, "lengths": lengths, "contexts": contexts, "state": state}


def state_bytes(case: Case) -> int:
    """Bytes that favor+ keeps between two tokens, whatever the context."""
    core = build_attention("favor+", head_dim=case.head_dim, num_heads=case.heads, num_features=case.features)
    _, state = core.step(*case.inputs(1))
    return state.nbytes


def cache_bytes(case: Row) -> int:
    """Bytes that softmax attention keeps: all keys and values, in float32."""
    return 2 * 4 * case["batch"] * case["heads"] * case["head_dim"] * case["length"]


def beyond(row: Row) -> int:
    """Peak memory of a forward beyond its inputs and outputs."""
    return (row["peak"] or 0) - (row["results"] or 0)


def tables(record: Record) -> list[Table]:
    """Errors, speed and memory, and decoding."""
    figures = record.figures
    speed, decode = [], []
    for ours, theirs in zip(figures["lengths"][::2], figures["lengths"][1::2], strict=True):
        speed.append((*_times(ours, theirs), human_bytes(beyond(ours)), human_bytes(beyond(theirs))))
    for ours, theirs in zip(figures["contexts"][::2], figures["contexts"][1::2], strict=True):
        kept = (figures["state"], cache_bytes(theirs["case"]))
        decode.append((*_times(ours, theirs), *(human_bytes(x) for x in kept)))
    both = ("favor+", "softmax", "faster by")
    return [
        table(
            "Relative error against exact attention (|q| = |k| = 1.5)",
            ("map", *(f"m = {x}" for x in FEATURES)),
            [(label, *(f"{x['mean']:.3f}" for x in row)) for label, row in figures["errors"].items()],
        ),
        table(
            "Bidirectional forward, H = 8, D = 64, m = 256",
            ("length", *both, "favor+ memory", "softmax memory"),
            speed,
            left=0,
        ),
        table("Decoding: one token after a context", ("context", *both, "state kept", "cache kept"), decode, left=0),
    ]


def _times(ours: Row, theirs: Row) -> list[str]:
    one, two = (x["seconds"]["default"] for x in (ours, theirs))
    return [str(ours["case"]["length"]), human_time(one), human_time(two), f"{two / one:.1f}x"]


def picture(record: Record, path: Path) -> None:
    """Draw errors, speed, memory and decoding in four panels."""
    figures = record.figures
    with drawing(path, (10, 7.5), 2, 2) as (_, ((errors, speed), (memory, decode))):
        for label, row in figures["errors"].items():
            x, mean, error = ([e[name] for e in row] for name in ("num_features", "mean", "standard_error"))
            errors.errorbar(x, mean, yerr=error, marker="o", label=label)
        errors.set(title="error against exact attention", xlabel="frequencies m", ylabel="relative error of the output")
        for axis, rows, title, xlabel in (
            (speed, figures["lengths"], "bidirectional forward", "length"),
            (decode, figures["contexts"], "decoding one token", "context"),
        ):
            for index, label in enumerate(("favor+", "softmax")):
                points = [(x["case"]["length"], x["seconds"]["default"] * 1e3) for x in rows[index::2]]
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
            axis.set(title=title, xlabel=xlabel, ylabel="ms")
        for index, label in enumerate(("favor+", "softmax")):
            points = [(x["case"]["length"], beyond(x) / 2**20) for x in figures["lengths"][index::2]]
            memory.plot(*zip(*points, strict=True), marker="o", label=f"{label}: peak of a forward")
        cases = [x["case"] for x in figures["contexts"][::2]]
        x = [case["length"] for case in cases]
        memory.plot(x, [figures["state"] / 2**20] * len(x), "C0--", label="favor+: state kept for decoding")
        memory.plot(x, [cache_bytes(case) / 2**20 for case in cases], "C1--", label="softmax: cache kept")
        memory.set(title="memory beyond inputs and outputs", xlabel="length or context", ylabel="MiB")
        for axis in (errors, speed, memory, decode):
            log_axis(axis)
            axis.grid(True, which="both", alpha=0.2)
            axis.legend(fontsize="small")


STEPS = len(MAPS) + len(LENGTHS) + len(CONTEXTS)
STUDY = Study(
    "tour", "Performer (2009.14794), Fig. 3 and 4", Settings, lambda _: STEPS, run, tables, picture, program=SCRIPT
)

if __name__ == "__main__":
    main(STUDY, "Two minutes of figures: error by number of features, speed and memory by length, decoding by context.")
