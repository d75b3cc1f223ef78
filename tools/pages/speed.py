"""Tables of time and memory: attention by itself, relative positions, whole encoders, serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernelformer.formatting import human_time
from pages.records import ABSENT, PASSES, Records, grid, joined, mebibytes, show, table, times

ATTENTION = "speed/attention/bench.json"
HEAPS = {"default": ATTENTION, "kept": "speed/heaps-kept/bench.json"}  # the record by the allocator's settings
DECODE = "speed/decode/bench.json"
SHORT = "speed/short/short.json"
MEMORY = "speed/memory/bench.json"
SKYFORMER = "speed/skyformer/bench.json"
LEARNED = "speed/learned-kernels/bench.json"
BIAS_TRAINING = "speed/bias-training/bench.json"
ENCODER = "speed/encoder/encoder.json"
SERVING = "speed/serving/serving.json"
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (1024, 4096, 16384, 65536)
LONG = 16384
TASKS = ("bidirectional", "causal")
HYBRID = "favor+:window=64:sinks=4"


def against_sdpa(records: Records, task: str, *, backward: bool, heap: str = "default") -> str:
    """Times of SDPA over those of `favor+`, at the three lengths."""
    bench = records.bench(HEAPS[heap])
    return joined([bench.faster("favor+", "sdpa", task, n, backward=backward, heap=heap) for n in LENGTHS])


def decode(records: Records) -> str:
    """Times of a token by SDPA over those by `favor+`, by the context."""
    bench = records.bench(DECODE)
    return joined([bench.faster("favor+", "sdpa", "decode", n) for n in CONTEXTS])


@table
def attention(records: Records) -> str:
    """`favor+` against SDPA and other libraries, by the allocator's settings; peers as far as they were installed."""
    lengths, cases = " / ".join(map(str, LENGTHS)), [(task, b, name) for task in TASKS for b, name in PASSES.items()]
    rows = [
        [f"{x} {name}, L = {lengths}", "SDPA", *(against_sdpa(records, x, backward=b, heap=heap) for heap in HEAPS)]
        for x, b, name in cases
    ]
    for peer in ("performer-pytorch", "fast-transformers"):
        for task, backward, name in cases:
            cells = [
                records.bench(file).faster("favor+", peer, task, LONG, backward=backward, heap=heap)
                for heap, file in HEAPS.items()
            ]
            if cells != [ABSENT, ABSENT]:
                rows.append([f"{task} {name}, L = {LONG}", peer, *cells])
    contexts = " / ".join(map(str, CONTEXTS))
    rows.append([f"decode one token, context {contexts}", "SDPA with a cache", decode(records), ""])
    return grid(["case", "against", "default", "heap kept"], rows)


@table
def memory(records: Records) -> str:
    """Peak memory of `favor+` beyond inputs and results."""
    bench, long = records.bench(ATTENTION), records.bench(MEMORY)
    rows = [["forward, L = 65536", *(long.beyond("favor+", task, 65536) for task in TASKS)]]
    for backward, name in PASSES.items():
        rows.append([f"{name}, L = {LONG}", *(bench.beyond("favor+", x, LONG, backward=backward) for x in TASKS)])
    return grid(["`favor+`, beyond inputs, outputs and gradients", *TASKS], rows)


@table
def skyformer_speed(records: Records) -> str:
    """`skyformer` with 128 landmarks against SDPA and nystrom-attention."""
    bench, rows = records.bench(SKYFORMER), []
    for peer in ("sdpa", "nystrom-attention"):
        for heap in HEAPS:
            cells = [bench.faster("skyformer", peer, TASKS[0], LONG, backward=b, heap=heap) for b in PASSES]
            if peer == "sdpa" or cells != [ABSENT, ABSENT]:
                rows.append([peer, heap, *cells])
    return grid(["against, L = 16384", "heap", *PASSES.values()], rows)


@table
def wildcat_speed(records: Records) -> str:
    """Time and memory of pivoted landmarks beside SDPA."""
    bench = records.bench("speed/wildcat/bench.json")
    names = {f"`{x}`": x for x in ("wildcat", "wildcat:window=32:sinks=1", "skyformer:kernel=softmax")}
    rows = []
    for shown, name in {**names, "SDPA": "sdpa"}.items():
        case = (TASKS[0], LONG)
        rows.append([shown, bench.time(name, *case), bench.faster(name, "sdpa", *case), bench.beyond(name, *case)])
    return grid(["forward, L = 16384, 128 landmarks", "time", "SDPA takes", "memory beyond the output"], rows)


@table
def learned_speed(records: Records) -> str:
    """Time of learned kernels over that of `favor+`, at equal total features."""
    bench = records.bench(LEARNED)
    names = dict.fromkeys(row["name"] for row in bench.rows if row["name"] != "favor+") or ["learned kernels"]
    ratios = {x: [bench.ratio(x, "favor+", TASKS[0], LONG, backward=b) for b in PASSES] for x in names}
    rows = [[f"`{name}`", *(show(x, "{:.2f}") for x in both)] for name, both in ratios.items()]
    return grid(["time over that of `favor+`, L = 16384", *PASSES.values()], rows)


@table
def bias(records: Records) -> str:
    """`nprf` with relative positions against SDPA with the same ones, and other algorithms."""
    full, window, tokens = (records.bench(f"speed/bias-{x}/bench.json") for x in ("all", "window", "decode"))
    direct = "nprf:algorithm=direct"
    rows = [
        ["L = 4096, all distances, `direct`, forward", "SDPA", full.faster(direct, "sdpa", TASKS[0], 4096)],
        ["the same", "Algorithm 1 as printed", full.faster(direct, "algorithm-1", TASKS[0], 4096)],
    ]
    for task in TASKS:
        rows.append([f"L = {LONG}, window 128, {task} forward", "SDPA", window.faster("nprf", "sdpa", task, LONG)])
        for other in (direct, "nprf:algorithm=fft"):
            rows.append(["the same", f"`{other}`", window.faster("nprf", other, task, LONG)])
        cell = bias_training(records, task)
        rows.append([f"L = {LONG}, window 128, {task} forward + backward", "SDPA with a fixed bias", cell])
    cell = joined([tokens.time("nprf", "decode", n) for n in (1000, 10000, 100000)])
    rows.append(["decode one token, window 128, context 1,000 / 10,000 / 100,000", "(time)", cell])
    return grid(["`nprf`, m = 64", "against", "faster by"], rows)


def bias_training(records: Records, task: str) -> str:
    """Time of a training step of SDPA with a fixed bias over that of `nprf` with a window of 128."""
    return records.bench(BIAS_TRAINING).faster("nprf", "sdpa-fixed", task, LONG, backward=True)


@table
def bias_lengths(records: Records) -> str:
    """`nprf` with a window of 128 against SDPA with the same positions, by length."""
    bench, lengths = records.bench("speed/bias-lengths/bench.json"), (1024, 2048, 4096)
    rows = [[x, *(bench.faster("nprf", "sdpa", x, n) for n in lengths)] for x in TASKS]
    return grid(["forward, window 128, faster than SDPA by", *(f"L = {n}" for n in lengths)], rows)


def encoder_time(records: Records, size: str, length: int, attention: str) -> float | None:
    """Seconds of forward + backward of a whole encoder."""
    keys = (size, length, attention, PASSES[True])
    some = (x for x in records.rows(ENCODER) if (x["size"], x["length"], x["attention"], x["kind"]) == keys)
    return next((x["seconds"] for x in some), None)


def encoder_ratio(records: Records, size: str, length: int, other: str = "softmax") -> float | None:
    """Time of an encoder with another attention over that with `favor+`."""
    own, its = (encoder_time(records, size, length, x) for x in ("favor+:num_features=256", other))
    return None if own is None or its is None else its / own


@table
def encoder(records: Records) -> str:
    """Whole encoders against SDPA and the bounds."""
    names, rows = {"regular": "8 heads, d = 512, ff = 2048", "small": "1 head, d = 64, ff = 64"}, []
    for size, about in names.items():
        for length in (4096, 8192):
            both = [encoder_time(records, size, length, x) for x in ("softmax", "favor+:num_features=256")]
            faster, *bounds = (encoder_ratio(records, size, length, x) for x in ("softmax", "opt", "opt+qk"))
            cells = [*(show(x, human_time) for x in both), show(faster, "{:.3g}x")]
            rows.append([f"{size} ({about})", str(length), *cells, *(show(x and 1 / x, "{:.2f}x") for x in bounds)])
    return grid(["encoder", "L", "softmax", "favor+", "faster by", "of opt", "of opt+qk"], rows)


@table
def serving(records: Records) -> str:
    """Prefill, decoding and cache of a converted decoder beside the original's."""
    by = {(x["kind"], x["length"], x["attention"]): x for x in records.rows(SERVING)}
    names, rows = ("sdpa", "loglinear:num_features=64:window=64:sinks=4"), []
    for length in CONTEXTS:
        cells = []
        for kind in ("prefill", "one token"):
            both = [by.get((kind, length, x), {}).get("seconds") for x in names]
            ratio = f" ({times(both[0] / both[1])})" if all(both) else ""
            cells.append(" / ".join(human_time(x) if x else "not run" for x in both) + ratio)
        caches = [by.get(("one token", length, x), {}).get("peak") for x in names]
        cells.append(" / ".join("not run" if x is None else f"{x / 2**20:.3g} MiB" for x in caches))
        rows.append([str(length), *cells])
    return grid(["tokens of the prompt", "prefill, original / converted", "a token after it", "cache"], rows)


def _by_length(first: str, rows: Sequence[Any], kinds: Sequence[str] = ("",)) -> str:
    """Time and memory by attention and length, and by the kind of pass where there are several."""
    by = {(x["attention"], x["length"], x["kind"] if any(kinds) else ""): x for x in rows}
    columns = [(n, kind) for n in sorted({x["length"] for x in rows}) for kind in kinds]
    cells = []
    for name in dict.fromkeys(x["attention"] for x in rows):
        found = [by[name, n, kind] for n, kind in columns]
        cells.append([f"`{name}`", *(f"{human_time(x['seconds'])}, {mebibytes(x['peak'])}" for x in found)])
    return grid([first, *(f"{n} tokens, {kind}".removesuffix(", ") for n, kind in columns)], cells)


@table
def sparse(records: Records) -> str:
    """Encoders of two layers by their attention, sparse layers of transformers among them: time and memory."""
    rows = records.rows("speed/sparse/encoder.json")
    return _by_length("two layers, d = 64, 2 heads", rows, [*PASSES.values()])


@table
def training_step(records: Records) -> str:
    """Encoders of two layers at 1024 tokens, softmax beside `favor+` and `nprf` with a bias: time and memory."""
    rows = records.rows("speed/training-step/encoder.json")
    return _by_length("two layers, d = 64, 2 heads", rows, [*PASSES.values()])


@table
def converted_lengths(records: Records) -> str:
    """Time and memory of a converted MiniLM beside the original's, by length."""
    return _by_length("one text, one thread", records.rows("conversion/minilm-lengths.json"))


@table
def short_speed(records: Records) -> str:
    """Many short sequences: time over SDPA's, with that of the loop over chunks in brackets."""
    rows: dict[tuple[int, str], list[str]] = {}
    for row in records.rows(SHORT):
        case, seconds = row["case"], row["seconds"]
        now, before = (seconds[name] / seconds["sdpa"] for name in ("favor+", "favor+:algorithm=chunked"))
        size = (case["features"], f"{case['batch']} x {case['length']}")
        rows.setdefault(size, []).append(f"{now:.2f} ({before:.2f})")
    head = ["m", "sequences x tokens", *(f"{task}, {x}" for task in TASKS for x in PASSES.values())]
    return grid(head, [[str(m), size, *cells] for (m, size), cells in rows.items()] or [[ABSENT] * len(head)])


@table
def short_step(records: Records) -> str:
    """One token of `favor+` beside SDPA with a cache."""
    steps = records.get(SHORT).get("steps", {})
    rows = [[name, human_time(seconds)] for name, seconds in steps.items()] or [[ABSENT, ABSENT]]
    return grid(["one token, m = 64, 9 heads of 64", "time"], rows)


@table
def exported(records: Records) -> str:
    """An encoder and its converted copies in torch and in onnxruntime: time of a pass, and how many times faster."""
    rows = records.rows("speed/exported/exported.json")
    by, lengths = {(x["way"], x["length"]): x for x in rows}, sorted({x["length"] for x in rows})

    def cell(row: dict[str, Any] | None) -> str:
        if row is None or row["seconds"] is None:
            return ABSENT if row is None else "not run"
        faster = row.get("times faster")
        return human_time(row["seconds"]) + (f", {times(faster)}" if faster is not None else "")

    cells = [[way, *(cell(by.get((way, n))) for n in lengths)] for way in dict.fromkeys(x["way"] for x in rows)]
    return grid(["one thread", *(f"{n} tokens" for n in lengths)], cells or [[ABSENT]])


@table
def near_speed(records: Records) -> str:
    """A window with `favor+` for the rest: time, beside `favor+` alone and SDPA, and memory."""
    bench, rows = records.bench("near-and-far/bench.json"), []
    for task in TASKS[::-1]:
        for backward, name in PASSES.items():
            where: dict[str, Any] = {"task": task, "length": LONG, "backward": backward}
            both = [bench.faster("favor+", HYBRID, **where), bench.faster(HYBRID, "sdpa", **where)]
            rows.append([f"{task} {name}", bench.time(HYBRID, **where), *both, bench.beyond(HYBRID, **where)])
    head = ["L = 16384", "window 64, 4 sinks, `favor+`", "over `favor+` alone", "SDPA takes", "memory beyond results"]
    return grid(head, rows)


@table
def near_decode(records: Records) -> str:
    """A token after a short and a very long context."""
    bench = records.bench("near-and-far/decode.json")
    rows = [[f"`{x}`", *(bench.time(x, "decode", n) for n in (1000, 1000000))] for x in (HYBRID, "favor+")]
    return grid(["a token after", "1,000 tokens", "1,000,000 tokens"], rows)
