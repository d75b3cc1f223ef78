"""Tables of time and memory: attention by itself, relative positions, whole encoders, serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelformer.formatting import human_time
from kernelformer_lab.reports.tables.records import ABSENT, Records, grid, joined, mebibytes, times

ATTENTION = "speed/attention/bench.json"
HEAPS = {"default": ATTENTION, "kept": "speed/heaps-kept/bench.json"}  # the record by the allocator's settings
DECODE = "speed/decode/bench.json"
SHORT = "speed/short/short.json"
EXPORTED = "speed/exported/exported.json"
MEMORY = "speed/memory/bench.json"
SKYFORMER = "speed/skyformer/bench.json"
WILDCAT = "speed/wildcat/bench.json"
LEARNED = "speed/learned-kernels/bench.json"
BIAS_ALL = "speed/bias-all/bench.json"
BIAS_WINDOW = "speed/bias-window/bench.json"
BIAS_TRAINING = "speed/bias-training/bench.json"
BIAS_LENGTHS = "speed/bias-lengths/bench.json"
BIAS_DECODE = "speed/bias-decode/bench.json"
ENCODER = "speed/encoder/encoder.json"
SPARSE = "speed/sparse/encoder.json"
TRAINING_STEP = "speed/training-step/encoder.json"
SERVING = "speed/serving/serving.json"
NEAR = "near-and-far/bench.json"
NEAR_DECODE = "near-and-far/decode.json"
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (1024, 4096, 16384, 65536)
LONG = 16384
PASSES = {False: "forward", True: "forward + backward"}
HYBRID = "favor+:window=64:sinks=4"


def against_sdpa(records: Records, task: str, *, backward: bool, heap: str = "default") -> str:
    """How many times faster than SDPA `favor+` is, at the three lengths."""
    bench = records.bench(HEAPS[heap])
    return joined([bench.faster("favor+", "sdpa", task, n, backward=backward, heap=heap) for n in LENGTHS])


def attention(records: Records) -> str:
    """`favor+` against SDPA and other libraries, by the allocator's settings; peers as far as they were installed."""
    lengths, rows = " / ".join(map(str, LENGTHS)), []
    for task in ("bidirectional", "causal"):
        for backward, name in PASSES.items():
            cells = [against_sdpa(records, task, backward=backward, heap=heap) for heap in HEAPS]
            rows.append([f"{task} {name}, L = {lengths}", "SDPA", *cells])
    for peer in ("performer-pytorch", "fast-transformers"):
        for task in ("bidirectional", "causal"):
            for backward, name in PASSES.items():
                cells = [
                    records.bench(file).faster("favor+", peer, task, LONG, backward=backward, heap=heap)
                    for heap, file in HEAPS.items()
                ]
                if cells != [ABSENT, ABSENT]:
                    rows.append([f"{task} {name}, L = {LONG}", peer, *cells])
    rows.append([f"decode one token, context {' / '.join(map(str, CONTEXTS))}", "SDPA with a cache", decode(records)])
    rows[-1].append("")
    return grid(["case", "against", "default", "heap kept"], rows)


def decode(records: Records) -> str:
    """How many times faster than SDPA `favor+` writes a token, by the context."""
    bench = records.bench(DECODE)
    return joined([bench.faster("favor+", "sdpa", "decode", n) for n in CONTEXTS])


def memory(records: Records) -> str:
    """Peak memory of `favor+` beyond inputs and results."""
    bench, long = records.bench(ATTENTION), records.bench(MEMORY)
    tasks = ("bidirectional", "causal")
    rows = [["forward, L = 65536", *(long.beyond("favor+", task, 65536) for task in tasks)]]
    for backward, name in PASSES.items():
        rows.append([f"{name}, L = {LONG}", *(bench.beyond("favor+", x, LONG, backward=backward) for x in tasks)])
    return grid(["`favor+`, beyond inputs, outputs and gradients", *tasks], rows)


def skyformer(records: Records) -> str:
    """`skyformer` with 128 landmarks against SDPA and nystrom-attention."""
    bench, rows = records.bench(SKYFORMER), []
    for peer in ("sdpa", "nystrom-attention"):
        for heap in ("default", "kept"):
            cells = [bench.faster("skyformer", peer, "bidirectional", LONG, backward=b, heap=heap) for b in PASSES]
            if peer == "sdpa" or cells != [ABSENT, ABSENT]:
                rows.append([peer, heap, *cells])
    return grid(["against, L = 16384", "heap", *PASSES.values()], rows)


def wildcat(records: Records) -> str:
    """Time and memory of pivoted landmarks beside SDPA."""
    bench = records.bench(WILDCAT)
    rows = []
    for name in ("wildcat", "wildcat:window=32:sinks=1", "skyformer:kernel=softmax", "sdpa"):
        seconds = bench.seconds(name, "bidirectional", LONG)
        time = ABSENT if seconds is None else human_time(seconds)
        cells = [bench.faster(name, "sdpa", "bidirectional", LONG), bench.beyond(name, "bidirectional", LONG)]
        rows.append([f"`{name}`" if name != "sdpa" else "SDPA", time, *cells])
    return grid(["forward, L = 16384, 128 landmarks", "time", "SDPA takes", "memory beyond the output"], rows)


def learned(records: Records) -> str:
    """Time of learned kernels over that of `favor+`, at equal total features."""
    bench, rows = records.bench(LEARNED), []
    names = dict.fromkeys(row["name"] for row in bench.rows if row["name"] != "favor+")
    for name in names or ["learned kernels"]:
        cells = []
        for backward in PASSES:
            own, its = (bench.seconds(x, "bidirectional", LONG, backward=backward) for x in (name, "favor+"))
            cells.append(ABSENT if own is None or its is None else f"{own / its:.2f}")
        rows.append([f"`{name}`", *cells])
    return grid(["time over that of `favor+`, L = 16384", *PASSES.values()], rows)


def bias(records: Records) -> str:
    """`nprf` with relative positions against SDPA with the same ones, and other algorithms."""
    full, window, tokens = (records.bench(x) for x in (BIAS_ALL, BIAS_WINDOW, BIAS_DECODE))
    direct = "nprf:algorithm=direct"
    rows = [
        ["L = 4096, all distances, `direct`, forward", "SDPA", full.faster(direct, "sdpa", "bidirectional", 4096)],
        ["the same", "Algorithm 1 as printed", full.faster(direct, "algorithm-1", "bidirectional", 4096)],
    ]
    for task in ("bidirectional", "causal"):
        rows.append([f"L = {LONG}, window 128, {task} forward", "SDPA", window.faster("nprf", "sdpa", task, LONG)])
        for other in (direct, "nprf:algorithm=fft"):
            rows.append(["the same", f"`{other}`", window.faster("nprf", other, task, LONG)])
        cell = bias_training(records, task)
        rows.append([f"L = {LONG}, window 128, {task} forward + backward", "SDPA with a fixed bias", cell])
    seconds = [tokens.seconds("nprf", "decode", n) for n in (1000, 10000, 100000)]
    cell = joined([ABSENT if x is None else human_time(x) for x in seconds])
    rows.append(["decode one token, window 128, context 1,000 / 10,000 / 100,000", "(time)", cell])
    return grid(["`nprf`, m = 64", "against", "faster by"], rows)


def bias_training(records: Records, task: str) -> str:
    """How many times faster `nprf` with a window of 128 trains than SDPA with a fixed bias."""
    return records.bench(BIAS_TRAINING).faster("nprf", "sdpa-fixed", task, LONG, backward=True)


def bias_lengths(records: Records) -> str:
    """`nprf` with a window of 128 against SDPA with the same positions, by length."""
    bench, lengths = records.bench(BIAS_LENGTHS), (1024, 2048, 4096)
    rows = [[x, *(bench.faster("nprf", "sdpa", x, n) for n in lengths)] for x in ("bidirectional", "causal")]
    return grid(["forward, window 128, faster than SDPA by", *(f"L = {n}" for n in lengths)], rows)


def encoder_time(records: Records, size: str, length: int, attention: str) -> float | None:
    """Seconds of forward + backward of a whole encoder."""
    for row in records.get(ENCODER).get("rows", []):
        if (row["size"], row["length"], row["attention"], row["kind"]) == (size, length, attention, PASSES[True]):
            seconds: float | None = row["seconds"]
            return seconds
    return None


def encoder_ratio(records: Records, size: str, length: int, other: str = "softmax") -> float | None:
    """Time of an encoder with another attention over that with `favor+`."""
    own, its = (encoder_time(records, size, length, x) for x in ("favor+:num_features=256", other))
    return None if own is None or its is None else its / own


def encoder(records: Records) -> str:
    """Whole encoders against SDPA and the bounds."""
    names, rows = {"regular": "8 heads, d = 512, ff = 2048", "small": "1 head, d = 64, ff = 64"}, []
    for size, about in names.items():
        for length in (4096, 8192):
            both = [encoder_time(records, size, length, x) for x in ("softmax", "favor+:num_features=256")]
            faster, opt, keys = (encoder_ratio(records, size, length, x) for x in ("softmax", "opt", "opt+qk"))
            cells = [ABSENT if x is None else human_time(x) for x in both]
            cells.append(ABSENT if faster is None else f"{faster:.3g}x")
            cells += [ABSENT if x is None else f"{1 / x:.2f}x" for x in (opt, keys)]
            rows.append([f"{size} ({about})", str(length), *cells])
    return grid(["encoder", "L", "softmax", "favor+", "faster by", "of opt", "of opt+qk"], rows)


def serving(records: Records) -> str:
    """Prefill, decoding and cache of a converted decoder beside the original's."""
    record = records.get(SERVING)
    ours = "loglinear:num_features=64:window=64:sinks=4"
    rows = []
    for length in CONTEXTS:
        cells = []
        for kind in ("prefill", "one token"):
            both = [serving_row(record, kind, length, x) for x in ("sdpa", ours)]
            shown = [human_time(x["seconds"]) if x.get("seconds") else "not run" for x in both]
            ratio = f" ({times(both[0]['seconds'] / both[1]['seconds'])})" if "not run" not in shown else ""
            cells.append(" / ".join(shown) + ratio)
        caches = [serving_row(record, "one token", length, x).get("peak") for x in ("sdpa", ours)]
        cells.append(" / ".join("not run" if x is None else f"{x / 2**20:.3g} MiB" for x in caches))
        rows.append([str(length), *cells])
    head = ["tokens of the prompt", "prefill, original / converted", "a token after it", "cache"]
    return grid(head, rows)


def serving_row(record: dict[str, Any], kind: str, length: int, attention: str) -> dict[str, Any]:
    """A row of the study of serving; empty where there is none."""
    keys = (kind, length, attention)
    return next((x for x in record.get("rows", []) if (x["kind"], x["length"], x["attention"]) == keys), {})


def sparse(records: Records) -> str:
    """Encoders of two layers by their attention, sparse layers of transformers among them: time and memory."""
    return _small_encoders(records.get(SPARSE).get("rows", []))


def training_step(records: Records) -> str:
    """Encoders of two layers at 1024 tokens, softmax beside `favor+` and `nprf` with a bias: time and memory."""
    return _small_encoders(records.get(TRAINING_STEP).get("rows", []))


def _small_encoders(rows: Sequence[Mapping[str, Any]]) -> str:
    by = {(x["attention"], x["length"], x["kind"]): x for x in rows}
    lengths = sorted({x["length"] for x in rows})
    cells = []
    for name in dict.fromkeys(x["attention"] for x in rows):
        found = [by[name, n, kind] for n in lengths for kind in PASSES.values()]
        cells.append([f"`{name}`", *(f"{human_time(x['seconds'])}, {mebibytes(x['peak'])}" for x in found)])
    head = ["two layers, d = 64, 2 heads", *(f"{n} tokens, {kind}" for n in lengths for kind in PASSES.values())]
    return grid(head, cells)


def short(records: Records) -> str:
    """Many short sequences: time over SDPA's, with that of the loop over chunks in brackets."""
    rows: dict[tuple[int, str], list[str]] = {}
    for row in records.get(SHORT).get("rows", []):
        case, seconds = row["case"], row["seconds"]
        now, before = (seconds[name] / seconds["sdpa"] for name in ("favor+", "favor+:algorithm=chunked"))
        size = (case["features"], f"{case['batch']} x {case['length']}")
        rows.setdefault(size, []).append(f"{now:.2f} ({before:.2f})")
    head = [
        "m",
        "sequences x tokens",
        *(f"{task}, {x}" for task in ("bidirectional", "causal") for x in PASSES.values()),
    ]
    return grid(head, [[str(m), size, *cells] for (m, size), cells in rows.items()] or [[ABSENT] * len(head)])


def short_step(records: Records) -> str:
    """One token of `favor+` beside SDPA with a cache."""
    steps = records.get(SHORT).get("steps", {})
    rows = [[name, human_time(seconds)] for name, seconds in steps.items()] or [[ABSENT, ABSENT]]
    return grid(["one token, m = 64, 9 heads of 64", "time"], rows)


def exported(records: Records) -> str:
    """An encoder and its converted copies in torch and in onnxruntime: time of a pass, and how many times faster."""
    rows = records.get(EXPORTED).get("rows", [])
    lengths = sorted({x["length"] for x in rows})
    cells = []
    for way in dict.fromkeys(x["way"] for x in rows):
        by = {x["length"]: x for x in rows if x["way"] == way}
        found = [by.get(n, {}) for n in lengths]
        cells.append([way, *(_pass(x) for x in found)])
    return grid(["one thread", *(f"{n} tokens" for n in lengths)], cells or [[ABSENT]])


def _pass(row: Mapping[str, Any]) -> str:
    seconds, faster = row.get("seconds"), row.get("times faster")
    if seconds is None:
        return "not run" if row else ABSENT
    return human_time(seconds) + (f", {times(faster)}" if faster is not None else "")


def near(records: Records) -> str:
    """A window with `favor+` for the rest: time, beside `favor+` alone and SDPA, and memory."""
    bench, rows = records.bench(NEAR), []
    for task in ("causal", "bidirectional"):
        for backward, name in PASSES.items():
            own, alone = (bench.seconds(x, task, LONG, backward=backward) for x in (HYBRID, "favor+"))
            time = ABSENT if own is None else human_time(own)
            ratio = ABSENT if own is None or alone is None else times(own / alone)
            sdpa = bench.faster(HYBRID, "sdpa", task, LONG, backward=backward)
            rows.append([f"{task} {name}", time, ratio, sdpa, bench.beyond(HYBRID, task, LONG, backward=backward)])
    head = ["L = 16384", "window 64, 4 sinks, `favor+`", "over `favor+` alone", "SDPA takes", "memory beyond results"]
    return grid(head, rows)


def near_decode(records: Records) -> str:
    """A token after a short and a very long context."""
    bench, rows = records.bench(NEAR_DECODE), []
    for name in (HYBRID, "favor+"):
        seconds = [bench.seconds(name, "decode", n) for n in (1000, 1000000)]
        rows.append([f"`{name}`", *(ABSENT if x is None else human_time(x) for x in seconds)])
    return grid(["a token after", "1,000 tokens", "1,000,000 tokens"], rows)


def converted_lengths(records: Records) -> str:
    """Time and memory of a converted MiniLM beside the original's, by length."""
    rows = records.get("conversion/minilm-lengths.json").get("rows", [])
    lengths = sorted({x["length"] for x in rows})
    names = list(dict.fromkeys(x["attention"] for x in rows))
    by = {(x["attention"], x["length"]): x for x in rows}
    cells = [
        [f"`{x}`", *(f"{human_time(by[x, n]['seconds'])}, {mebibytes(by[x, n]['peak'])}" for n in lengths)]
        for x in names
    ]
    return grid(["one text, one thread", *(f"{n} tokens" for n in lengths)], cells)
