"""Tables of pretrained models that were made linear."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from kernelformer_lab.analysis.statistics import mean_and_error
from pages.records import ABSENT, Records, grid, table

PLACE = "conversion/"
WILDCAT = "mean cosine of sentence embeddings to the original, nothing trained"
KEEP = "perplexity on held-out windows"
DECODERS = {
    "512 tokens, all heads linear": "smollm2-window",
    "512 tokens, with repeated passages": "smollm2-repeats",
    "512 tokens, six heads exact": "smollm2-recall-heads",
    "2048 tokens, with repeated passages": "smollm2-2048",
}
STAGES = ("original", "as converted", "after transfer", "after LoRA", "window and sinks alone", "kernel alone")
ADVISED = {"MiniLM": "minilm", "AntiBERTy": "antiberty", "SmolLM2": "smollm2", "albert-tiny": "albert-tiny"}


def _study(records: Records, name: str) -> dict[str, dict[str, Any]]:
    """Rows of the study of conversion by method, without the original."""
    rows = records.rows(f"{PLACE}{name}.json")
    return {x["method"]: x for x in rows if x["method"] != "original"}


def cosine(records: Records, name: str, method: str, stage: str = "converted") -> float | None:
    """A cosine of the study of conversion."""
    row = _study(records, name).get(method, {"scores": {}})
    value: float | None = row["scores"].get(stage, {}).get("cosine")
    return value


def _methods(records: Records, name: str) -> str:
    rows = []
    ordered = sorted(_study(records, name).items(), key=lambda x: -x[1]["scores"]["distilled"]["cosine"])
    for method, row in ordered:
        steps = " + ".join(str(row["steps"][x]) for x in ("transfer", "tune") if x in row["steps"])
        cells = [f"{row['scores'][x]['cosine']:.3f}" for x in ("converted", "distilled")]
        rows.append([f"`{method}`", *cells, steps])
    return grid(["cosine to the original", "as converted", "distilled", "steps (transfer + tuning)"], rows)


@table
def methods_distilled(records: Records) -> str:
    """MiniLM by eight methods, five minutes of distillation each."""
    return _methods(records, "minilm-methods")


@table
def methods_windows(records: Records) -> str:
    """MiniLM by methods with windows, one minute of distillation each."""
    return _methods(records, "minilm-methods-windows")


def wildcat_cosine(records: Records, attention: str, length: int) -> list[float]:
    """Cosines of an untrained conversion by `wildcat`, by seed."""
    rows = records.rows(f"{PLACE}minilm-wildcat.json", WILDCAT)
    some = [x for x in rows if (x["attention"], x["length"]) == (attention, length)]
    return [seed["cosine"] for row in some for seed in row["seeds"]]


def untrained_cosine(records: Records) -> float | None:
    """Mean cosine of MiniLM at its longest, converted by `wildcat` with a window as the command does by default."""
    some = wildcat_cosine(records, "wildcat:num_landmarks=128:window=32:sinks=1", 512)
    return fmean(some) if some else None


@table
def wildcat(records: Records) -> str:
    """Conversions by `wildcat` without training, mean and range of three seeds."""
    rows = records.rows(f"{PLACE}minilm-wildcat.json", WILDCAT)
    cells = []
    for name in dict.fromkeys(x["attention"] for x in rows):
        row = [f"`{name}`"]
        for length in (256, 512):
            some = wildcat_cosine(records, name, length)
            row.append(f"{fmean(some):.3f} ({min(some):.3f} to {max(some):.3f})" if some else "")
        cells.append(row)
    return grid(["cosine, three seeds", "256 tokens", "512 tokens"], cells)


@table
def antiberty(records: Records) -> str:
    """Accuracy at masked residues, nothing trained."""
    rows = []
    for row in records.rows(f"{PLACE}antiberty.json"):
        scores = row["scores"].get("converted") or row["scores"]["original"]
        name = row["method"] if row["method"] == "original" else f"`{row['method']}`"
        rows.append([name, f"{100 * scores['accuracy']:.1f}%", f"{scores['perplexity']:.2f}"])
    return grid(["", "accuracy at masked residues", "perplexity"], rows)


def perplexities(records: Records, name: str) -> dict[str, float]:
    """Perplexities of a converted decoder: original, as converted, after transfer and tuning, and of its parts."""
    record = records.get(f"{PLACE}{name}.json")
    if not record:
        return {}
    figures, reports = record["judged"]["figures"], record["reports"]
    original = figures["original"]["perplexity"]
    stages = (
        original,
        reports["converted"]["perplexity"],
        record["spent"]["transfer"]["perplexity ratio"] * original,
        reports["distilled"]["perplexity"],
        figures["window and sinks alone"]["perplexity"],
        figures["kernel alone"]["perplexity"],
    )
    return dict(zip(STAGES, stages, strict=True))


@table
def decoders(records: Records) -> str:
    """SmolLM2 converted in four ways: perplexity and its ratio to the original's."""
    rows = []
    for shown, name in DECODERS.items():
        figures = perplexities(records, name)
        if not figures:
            rows.append([shown, *[ABSENT] * (len(STAGES) + 1)])
            continue
        base = figures["original"]
        cells = [f"{x:.1f}" if k == "original" else f"{x:.1f} ({x / base:.3f})" for k, x in figures.items()]
        spent = records.get(f"{PLACE}{name}.json")["spent"]
        minutes = " + ".join(f"{spent[x]['seconds'] / 60:.1f}" for x in ("transfer", "tune"))
        rows.append([shown, minutes, *cells])
    return grid(["perplexity (times the original's)", "minutes", *STAGES], rows)


def hidden_numbers(records: Records, name: str, model: str) -> dict[int, dict[str, Any]]:
    """Passkey retrieval by a model of a conversion, by the length of the text."""
    record = records.get(f"{PLACE}{name}.json")
    rows = record["judged"]["recall"] if record else []
    return {x["length"]: x for x in rows if x["model"] == model}


def found(records: Records, name: str, model: str) -> str:
    """Number of hidden numbers that a model found, of how many."""
    rows = hidden_numbers(records, name, model).values()
    return f"{sum(sum(x['right']) for x in rows)} of {sum(len(x['right']) for x in rows)}" if rows else ABSENT


@table
def passkeys(records: Records) -> str:
    """Hidden numbers found, and the log-probability of a digit, by the length of the text."""
    lengths, rows = (512, 1024, 2048, 4096), []
    for shown, name in DECODERS.items():
        for model in ("original", "converted", "window and sinks alone"):
            some = hidden_numbers(records, name, model)
            cells = [
                f"{sum(some[n]['right'])} of {len(some[n]['right'])} ({some[n]['log_prob']:.2f})" if n in some else ""
                for n in lengths
            ]
            rows.append([shown, model, *cells])
    return grid(["conversion", "model", *(f"{n} tokens" for n in lengths)], rows)


@table
def recall_heads(records: Records) -> str:
    """Hidden numbers found by SmolLM2 with six heads exact, by the length of the text."""
    rows, name = [], "smollm2-recall-heads"
    for shown, model in {"original": "original", "converted, six heads exact": "converted"}.items():
        some = hidden_numbers(records, name, model).values()
        rows.append([shown, *(f"{sum(x['right'])} of {len(x['right'])} ({x['log_prob']:.2f})" for x in some)])
    return grid(["tokens", *map(str, hidden_numbers(records, name, "original"))], rows)


@table
def kernel_gain(records: Records) -> str:
    """Gain of the kernel in the log-probability of a digit, text by text: mean and standard error."""
    lengths, rows = (512, 1024, 2048, 4096), []
    for shown, name in DECODERS.items():
        whole, near = (hidden_numbers(records, name, x) for x in ("converted", "window and sinks alone"))
        cells = []
        for n in lengths:
            if n not in whole:
                cells.append("")
                continue
            gaps = [a - b for a, b in zip(whole[n]["log_probs"], near[n]["log_probs"], strict=True)]
            cells.append("{:.2f} ± {:.2f}".format(*mean_and_error(gaps)))
        rows.append([shown, *cells])
    return grid(["log-probability of a digit, converted minus window and sinks", *map(str, lengths)], rows)


@table
def keep(records: Records) -> str:
    """Perplexities by the attentions that are kept exact, by seed."""
    seeds = records.rows(f"{PLACE}smollm2-keep.json", KEEP)
    names = ["original", "keep 20", "last ten linear", "ten smallest own errors linear", "all linear"]
    rows = []
    for name in names:
        some = [x[name] for x in seeds]
        rows.append([name, *(f"{x['perplexity'] if isinstance(x, dict) else x:.1f}" for x in some)])
    return grid(["perplexity", *(f"seed {x['seed']}" for x in seeds)], rows)


@table
def normalized(records: Records) -> str:
    """Increase of the loss by random features in models trained with exact attention."""
    rows = []
    for name, model in records.get(f"{PLACE}normalized.json").get("models", {}).items():
        base, cells = model["bits_per_byte"], []
        for some in model["converted"]:
            if some["features"] in (16, 256):
                cells.append(f"{some['mean'] - base:+.2f} ± {some['standard_error']:.2f}")
        norms = model["norms"]
        rows.append([name, f"{base:.2f}", f"{norms['query']:.1f}, {norms['key']:.1f}", *cells])
    return grid(["trained", "bits per byte", "norms of q, k", "m = 16", "m = 256"], rows)


def _loss(kind: str, value: float) -> float:
    return math.log(value) if kind == "perplexity ratio" else 1 - value


@table
def advice_checks(records: Records) -> str:
    """Error of advice: the measured loss over the expected one."""
    off: dict[str, list[float]] = {"measured": [], "predicted": []}
    for name in ADVISED.values():
        record = records.get(f"advice/{name}.json")
        for x in record.get("checks", []):
            gap = math.log(_loss(record["kind"], x["got"]["value"]) / _loss(record["kind"], x["expected"]))
            off[x["way"]].append(math.exp(abs(gap)))
    rows = [
        [shown, str(len(some)), str(sum(x <= 1.5 for x in some)), f"{max(some):.2f} times" if some else ""]
        for shown, some in (("run before, on other texts", off["measured"]), ("predicted", off["predicted"]))
    ]
    return grid(["", "checks", "loss got within 1.5 times that expected", "farthest off"], rows)


@table
def advice_checked(records: Records) -> str:
    """Every check of advice: the expected figure and the measured one."""
    rows = []
    for shown, name in ADVISED.items():
        for x in records.rows(f"advice/{name}.json", "checks"):
            size = "" if x["features"] is None else f", {x['features']}"
            got = [f"{value:.3f}" for value in (x["expected"], x["got"]["value"])]
            rows.append([shown, f"`{x['attention']}`{size}", x["way"], *got])
    return grid(["model", "attention, features", "expected by being", "expected", "got"], rows)
