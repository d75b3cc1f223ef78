"""What a conversion says of itself: tables for the terminal, a picture, a model card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.distill.measure import Report, Row
from kernelformer.formatting import human_time, visible
from kernelformer.hf.licence import NOT_STATED
from kernelformer.hf.load import auto_classes
from kernelformer.reports.conversion_result import ConversionResult
from kernelformer.reports.judgement import Judgement, card_section, probe_sentence
from kernelformer.reports.judgement import tables as judgement_tables
from kernelformer.reports.markdown import code, plain, table

STEEP = 8.0  # a relative error from which on an axis is logarithmic: a few tokens of decoders have huge states
HOPELESS = 100.0  # a predicted error beyond which the number says nothing


def tables(result: ConversionResult) -> list[Table]:
    """For the terminal: attention by attention, how errors add up, and the judgement."""
    return [_attentions(result), _depths(result), *([] if result.judged is None else judgement_tables(result.judged))]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _predicted(row: Row) -> str:
    if row.predicted is None:
        return row.reason
    return f"{row.predicted:.2g}" if row.predicted < HOPELESS else f"over {HOPELESS:g}"


def _called(row: Row, start: int = 0) -> str:
    """Its name from a place on, and which call it is where there are several."""
    return f"{row.name[start:]} ({row.call + 1})" if row.call else row.name[start:]


def _common(names: Sequence[str]) -> int:
    """Length of what all names begin with, in whole parts, the last part left out."""
    parts = [x.split(".")[:-1] for x in names]
    same = 0
    while all(len(x) > same and x[same] == parts[0][same] for x in parts):
        same += 1
    return len(".".join(parts[0][:same]) + ".") if same else 0


def _attentions(result: ConversionResult) -> Table:
    labels = list(result.reports)
    table = Table(title=f"{visible(result.source)}: relative error of each attention, at the original's inputs")
    start = _common([x.name for x in result.reports[labels[-1]].rows])
    table.add_column("attention", overflow="fold")
    table.add_column("method", no_wrap=True)
    for name in ("|q| rms, max", "|k| rms, max", "predicted", *labels, "worst head"):
        table.add_column(name, justify="right")
    for rows in zip(*(result.reports[x].rows for x in labels), strict=True):
        last = rows[-1]
        worst = max(range(len(last.heads)), key=last.heads.__getitem__)
        table.add_row(
            visible(_called(last, start)),
            last.method,
            *(f"{x.rms:.3g}, {x.largest:.3g}" for x in (last.query, last.key)),
            _predicted(last),
            *(_number(x.error) for x in rows),
            f"{worst}: {_number(last.heads[worst])}",
        )
    return table


def _depths(result: ConversionResult) -> Table:
    reports: list[Report] = list(result.reports.values())
    table = Table(title="The model by itself: relative error of hidden states, where errors add up")
    for name in ("after", *result.reports):
        table.add_column(name, justify="left" if name == "after" else "right")
    for part in reports[0].hidden:
        for i, values in enumerate(zip(*(x.hidden[part] for x in reports), strict=True)):
            prefix = "" if part == "layers" else f"{part} "
            table.add_row(f"{prefix}layer {i}" if i else f"{prefix}embeddings", *map(_number, values))
    for name, whole in figures(result).items():
        table.add_row(name, *map(_number, whole), style="bold")
    return table


def figures(result: ConversionResult) -> dict[str, list[float | None]]:
    """Figures of the whole model, one for each report."""
    reports: list[Report] = list(result.reports.values())
    rows: dict[str, list[float | None]] = {
        "perplexity": [x.perplexity for x in reports],
        "perplexity of the original": [x.original_perplexity for x in reports],
        "output, relative error": [x.output for x in reports],
        "same best token, share": [x.agreement for x in reports],
        "mean outputs, cosine": [x.cosine for x in reports],
    }
    return {name: values for name, values in rows.items() if any(x is not None for x in values)}


def picture(result: ConversionResult, path: Path) -> None:
    """Errors by layer: of each attention by itself, and of the hidden states as they add up (Performer, Fig. 14)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    reports: dict[str, Report] = result.reports
    parts = list(next(iter(reports.values())).hidden)
    curves = {stage: x for stage, x in result.curves.items() if len(x) > 1}
    count = 1 + len(parts) + len(curves)
    figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 3.8), squeeze=False, constrained_layout=True)
    first, *others = axes[0][: 1 + len(parts)]
    for axis, (stage, points) in zip(axes[0][1 + len(parts) :], curves.items(), strict=True):
        axis.plot([x[1] / 60 for x in points], [x[3] for x in points], marker="o", color="C2")
        axis.set_title(f"{stage}: loss of held-out texts")
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.2)
    for index, (label, report) in enumerate(reports.items()):
        numbers = list(range(len(report.rows)))
        color = f"C{index}"
        first.plot(numbers, [x.error for x in report.rows], marker="o", color=color, label=label)
        for axis, part in zip(others, parts, strict=True):
            values = report.hidden[part]
            axis.plot(range(len(values)), values, marker="o", color=color, label=label)
    last = list(reports.values())[-1]
    low, high = [min(x.heads) for x in last.rows], [max(x.heads) for x in last.rows]
    first.fill_between(range(len(low)), low, high, color=f"C{len(reports) - 1}", alpha=0.15, linewidth=0)
    known = [(i, x.predicted) for i, x in enumerate(last.rows) if x.predicted is not None and x.predicted < HOPELESS]
    if known:
        first.plot(*zip(*known, strict=True), linestyle=":", color="grey", label="predicted, of the weights")
    first.set_title("each attention by itself (shade: its heads)")
    first.set_xlabel("attention, in the order of the calls")
    for axis, part in zip(others, parts, strict=True):
        axis.set_title("hidden states, errors added up" if part == "layers" else f"hidden states of the {part}")
        axis.set_xlabel("layers")
    for axis in (first, *others):
        if axis.get_ylim()[1] > STEEP:
            axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("relative error")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(True, alpha=0.2)
    first.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def model_card(result: ConversionResult, name: str) -> str:
    """README.md of a converted model.

    Args:
        result: what was done.
        name: of the folder.
    """
    layers = result.conversion
    replaced = [x for x in layers if x["method"] != "softmax"]
    grows = [x for x in layers if x["method"] == "softmax" and "linear already" not in x.get("reason", "")]
    heads = {x["name"]: x["exact_heads"] for x in replaced if x["exact_heads"]}
    options = replaced[0]["options"] if replaced else {}
    method = replaced[0]["method"] if replaced else "softmax"
    said = ", ".join(f"{x} = {y}" for x, y in options.items()) or "defaults"
    auto = next(iter(auto_classes(result.model)), "AutoModel")
    sections = [
        _front_matter(result),
        f"# {plain(name)}",
        f"{plain(result.source)} ({plain(result.model)}) with "
        + (
            "linear-time attention in place of softmax attention."
            if replaced
            else "its own softmax attention: a check."
        ),
        "```python\nimport kernelformer.hf  # transformers knows this folder after it\n"
        f"from transformers import {auto}\n\n"
        f"model = {auto}.from_pretrained({code(name)})  # path of this folder; or kernelformer.hf.load({code(name)})\n"
        "```",
        "After that import pipelines and sentence-transformers open the folder, too; without it no program does.",
        "## What was done",
        "\n".join(
            f"- {x}"
            for x in (
                f"source: {plain(result.source)}, class {plain(result.model)}",
                f"licence of the source: {plain(result.licence or NOT_STATED)}",
                f"attention: {plain(method)}, {plain(said)}",
                f"replaced: {len(replaced)} of {len(layers)} attentions",
                f"kept exact: {_kept(result)}",
                *_near(options),
                f"exact heads: {_heads(result)}",
                *_learning(result),
                *(f"{what}: {plain(used)}" for what, used in result.texts.items()),
                f"length of texts: at most {result.length} tokens",
                *(f"note: {plain(x)}" for x in result.remarks),
            )
        ),
        "## Figures",
        _figures(result),
        "![errors by layer](report.png)",
        "Relative errors against the original. Of a single attention it is that of its output at the original's "
        "queries, keys and values; hidden states are those of the model running by itself, where errors add up. All "
        "of them are in report.json.",
        card_section(result.judged).rstrip(),
        "## What it is not good for",
        _limits(result, linear=bool(replaced), quadratic=bool(grows or heads)),
        "## Versions",
        ", ".join(f"{plain(x)} {plain(y)}" for x, y in result.environment.items() if x in VERSIONS),
    ]
    return "\n\n".join(sections) + "\n"


VERSIONS = ("kernelformer", "torch", "transformers", "python")


def _front_matter(result: ConversionResult) -> str:
    """Metadata that the hub reads; what is not surely a name of its kind is left out."""
    lines = ["library_name: kernelformer", "tags: [linear-attention, kernelformer]"]
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", result.source, re.ASCII):
        lines.append(f"base_model: {result.source}")
    if re.fullmatch(r"[a-z][a-z0-9.-]*", result.licence):
        lines.append(f"license: {result.licence}")
    return "\n".join(["---", *lines, "---"])


def _kept(result: ConversionResult) -> str:
    """What was kept exact, and why."""
    setting, kept = result.setting, [x for x in result.conversion if x["method"] == "softmax"]
    reasons: dict[str, list[str]] = {}
    asked = [f"not among --layers {setting.layers}"] if setting.layers else []
    asked += [f"the output needs them most, --keep {setting.keep}"] if setting.keep else []
    by_heads = {name for heads in result.exact_heads.values() for name in heads}
    for x in kept:
        why = "all its heads are" if x["name"] in by_heads else " or ".join(asked)
        reasons.setdefault(x.get("reason") or why, []).append(x["name"])
    parts = (f"{plain(', '.join(names))}{f' ({plain(why)})' if why else ''}" for why, names in reasons.items())
    return "; ".join(parts) or "none"


def _near(options: dict[str, Any]) -> list[str]:
    """What a hybrid attends to exactly in the attentions that were replaced."""
    window, sinks = options.get("window"), options.get("sinks", 0)
    if window is None and not sinks:
        return []
    near = [f"tokens less than {window} away"] if window is not None else []
    near += ["the first token" if sinks == 1 else f"the first {sinks} tokens"] if sinks else []
    return [f"exact within each replaced attention: {' and '.join(near)}"]


def _heads(result: ConversionResult) -> str:
    """Heads that stay exact, and why."""
    parts = []
    for why, heads in result.exact_heads.items():
        named = "; ".join(f"{plain(name)}: {', '.join(map(str, x))}" for name, x in heads.items())
        parts.append(f"{named} ({plain(why)})")
    return "; ".join(parts) or "none"


def _learning(result: ConversionResult) -> list[str]:
    lora = result.setting.lora
    stages = {"transfer": "attention transfer", "tune": f"LoRA of rank {lora}" if lora else "tuning of all weights"}
    rows = "window" if any(x.windows is not None for x in result.texts.values()) else "text"
    rows += "s" * (result.setting.batch > 1)
    lines = [
        f"{stages.get(x, x)}: {len(losses)} steps of {result.setting.batch} {rows}, "
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}{_held_out(result, x)}"
        for x, losses in result.losses.items()
        if losses
    ]
    if not lines:
        return ["distillation: none"]
    if result.tokens is None:
        steps = sum(map(len, result.losses.values()))
        counted = f"at most {steps * result.setting.batch * result.length:,}, repeats counted"
    else:
        counted = f"{result.tokens:,}"
    time = [] if result.seconds is None else [f"time of distillation: {human_time(result.seconds)}"]
    return [*lines, f"tokens learned from: {counted}", *time]


def _held_out(result: ConversionResult, stage: str) -> str:
    """The best look at held-out texts, and the figure after the stage, where there are any."""
    values = [x[3] for x in result.curves.get(stage, [])]
    said = f", of held-out texts {values[0]:.4g} to {min(values):.4g}" if values else ""
    figures = {x: y for x, y in result.spent.get(stage, {}).items() if x not in ("seconds", "tokens", "rate")}
    return said + "".join(f"; {name} after it {value:.4g}" for name, value in figures.items())


def _figures(result: ConversionResult) -> str:
    reports: dict[str, Report] = result.reports
    rows = [[name, *map(_number, values)] for name, values in figures(result).items()]
    for i, some in enumerate(zip(*(x.rows for x in reports.values()), strict=True)):
        rows.append([f"attention {i}: {plain(_called(some[-1]))}", *(_number(x.error) for x in some)])
    return table(["", *reports], rows)


def _limits(result: ConversionResult, *, linear: bool, quadratic: bool) -> str:
    last: Report = list(result.reports.values())[-1]
    used = result.texts.get("measured on", f"{last.samples} rows of random tokens")
    lines = [
        f"{'It is not the original: its' if linear else 'Its'} output differs by {last.output:.2g} (relative), "
        f"measured on {plain(used)}, at most {result.length} tokens each. {_task(result)}; try it on yours before you "
        f"rely on it.",
        "Texts of another kind or much longer than these were not looked at.",
        "Attention dropout is left out in training, since there are no weights to drop.",
        "Short inputs: below a few hundred tokens exact attention is as fast and exact.",
    ]
    if quadratic:
        lines.append("What was kept exact still takes time and, in generation, memory that grow with the length.")
    if linear and not any(result.losses.values()):
        lines.append("Nothing was distilled: weights that were trained with softmax attention meet another one.")
    return "\n".join(f"- {x}" for x in lines)


def _task(result: ConversionResult) -> str:
    judged: Judgement | None = result.judged
    if judged is None or judged.probe is None:
        return "How well it does at a task has not been measured"
    return f"Of tasks it was tried on one: {probe_sentence(judged.probe)}"
