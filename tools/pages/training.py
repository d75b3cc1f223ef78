"""Tables of models that were trained from scratch: the papers' tasks, language models, recall, cross-attention."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from pages.records import ABSENT, Records, grid, show, spread, table

PLACE = "comparisons/"
BIASED = "nprf:num_features=64:relative=1d:max_distance=64"
# Attention as the table calls it, and its label in the records.
ATTENTIONS = {
    "`softmax`": "softmax",
    "`gaussian`": "gaussian",
    "`skyformer`": "skyformer:num_landmarks=64",
    "`nystromformer`": "nystromformer:num_landmarks=64",
    "`nprf` + bias": BIASED,
    "`favor+`": "favor+:num_features=64",
    "`relu`": "relu:num_features=64",
    "`elu`": "elu",
    "`fastfood-prf`": "fastfood-prf:num_features=64",
    "`gmm-prf`": "gmm-prf:num_features=64",
}
TASKS = {
    "ListOps, short": "2026-11-16-lra-listops",
    "Text, IMDb": "2026-11-16-lra-text",
    "Image, CIFAR-10": "2026-11-16-lra-image",
    "enwik8": "2026-11-16-enwik8",
    "proteins": "2026-11-16-proteins",
    "English-German": "2026-11-16-translation",
}
LANGUAGE = {"standard library": "stdlib", "enwik8": "enwik8"}
ROTARY = {
    "`nprf` with its bias, window 64": BIASED,
    "`local:window=64:sinks=4`": "local:window=64:sinks=4:rotary=True",
    "`favor+` with window 64 and 4 sinks": "favor+:num_features=64:window=64:sinks=4:rotary=True",
    "`softmax`": "softmax:rotary=True",
    "`favor+`": "favor+:num_features=64:rotary=True",
    "`elu`": "elu:rotary=True",
}


def values(records: Records, name: str, label: str, key: str = "value") -> list[float]:
    """A figure of the runs with a label, by seed; empty where there is none."""
    runs = records.runs(f"{PLACE}{name}.json").get(label, [])
    return [run[key] if key in run else run["scores"][key] for run in runs]


def mean(records: Records, name: str, label: str, digits: int = 2) -> str:
    """The mean of a label's runs."""
    some = values(records, name, label)
    return show(fmean(some) if some else None, f"{{:.{digits}f}}")


def of_item(records: Records, item: str, attention: str, part: str = "main", scale: float = 1.0) -> str:
    """The mean of an attention's runs in an item of the evidence, with the settings that the item has now."""
    jobs = [x for x in records.rows(f"evidence/{item}.json", "jobs") if not x.get("superseded")]
    some = [scale * x["result"]["value"] for x in jobs if (x["part"], x["name"]) == (part, attention)]
    return show(fmean(some) if some else None, "{:.1f}")


def _score(record: dict[str, Any], result: dict[str, Any]) -> str:
    """A run's figure; accuracies with the standard error that so many validation samples have."""
    value, metric = result["value"], record["metric"]
    if metric == "accuracy":
        samples = record["settings"]["task_options"]["validation_samples"]
        return f"{100 * value:.1f}% ± {100 * math.sqrt(value * (1 - value) / samples):.1f}"
    if metric == "bleu":
        return f"{value:.2f} ({result['scores']['perplexity']:.1f})"
    return f"{value:.2f}"


@table
def papers_tasks(records: Records) -> str:
    """The papers' tasks, one seed each."""
    rows = [["", "accuracy", "accuracy", "accuracy", "bits per byte", "perplexity", "BLEU (perplexity)"]]
    for shown, label in ATTENTIONS.items():
        cells = []
        for name in TASKS.values():
            record, runs = records.get(f"{PLACE}{name}.json"), records.runs(f"{PLACE}{name}.json")
            cells.append(_score(record, runs[label][0]) if label in runs else "")
        rows.append([shown, *cells])
    return grid(["one seed", *TASKS], rows)


@table
def language_models(records: Records) -> str:
    """Byte language models, mean and standard deviation of three seeds."""
    names = {"`nprf` + bias (window 64)": BIASED, "`softmax`": "softmax", "`elu`": "elu"}
    names["`favor+`, 64 features"] = "favor+:num_features=64"
    rows = [[k, *(spread(values(records, f"bytes-{x}", v)) for x in LANGUAGE.values())] for k, v in names.items()]
    return grid(["bits per byte, three seeds", *LANGUAGE], rows)


@table
def rotary(records: Records) -> str:
    """Byte language models with rotary positions and windows."""
    files = [f"2026-11-17-rotary-{x}" for x in LANGUAGE.values()]
    rows = [[k, *(spread(values(records, x, v)) for x in files)] for k, v in ROTARY.items()]
    return grid(["bits per byte, three seeds", *LANGUAGE], rows)


@table
def recall(records: Records) -> str:
    """Accuracy of recall over all and at large distances, with each seed's."""
    name = "2026-11-17-recall"
    runs = records.runs(f"{PLACE}{name}.json")
    rows = []
    for label in sorted(runs, key=lambda x: -fmean(values(records, name, x))):
        far = [run["scores"]["accuracy_to_30"] for run in runs[label]]
        all_ = values(records, name, label)
        rows.append([f"`{label}`", spread(all_, 2), ", ".join(f"{x:.2f}" for x in all_), f"{fmean(far):.2f}"])
    return grid(["attention", "accuracy, three seeds", "each seed", "at distances beyond 16"], rows)


@table
def cross_attention(records: Records) -> str:
    """Cross-attention of unit vectors and of others."""
    rows = []
    for shown, name in {"`nprf`": "nprf", "`favor+`": "favor", "`softmax`": "softmax"}.items():
        file = f"2026-11-17-translation-cross-{name}"
        loss, bleu = (values(records, file, BIASED, x) for x in ("loss", "value"))
        rows.append([shown, *(cell for x, n in ((loss, 3), (bleu, 2)) for cell in _seeds(x, n))])
    return grid(["cross-attention", "validation loss, by seed", "mean", "BLEU, by seed", "mean"], rows)


def _seeds(some: list[float], digits: int) -> tuple[str, str]:
    if not some:
        return ABSENT, ABSENT
    return ", ".join(f"{x:.{digits}f}" for x in some), f"{fmean(some):.{digits}f}"
