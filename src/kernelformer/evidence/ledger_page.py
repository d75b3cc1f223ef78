"""The ledger as one HTML page with a picture for every item."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelformer.analysis.differences import Mean, mean_over_seeds
from kernelformer.evidence.base import MAIN, PAPERS, TRAINING, Claim, Item
from kernelformer.evidence.rules import ALWAYS, SAMPLES, mean_of, runs_of, shown, value_of
from kernelformer.formatting import short_names
from kernelformer.reports.figures import COLOURS
from kernelformer.reports.page import figure, safe, section, table, whole_page

if TYPE_CHECKING:
    from kernelformer.evidence.ledger import Judged
    from kernelformer.evidence.outside import Outside

ABOUT = (
    "What the four papers claim, what this library gets at the size of two CPU cores, and whether that supports the "
    "claim, contradicts it or leaves it open. A verdict needs a difference of more than two standard errors over seeds "
    "and samples together, or Student's quantile where that is larger. A difference taken sample by sample leaves out "
    "what is hard for both models. Rules are in the records."
)
OVERLAP = (
    "Bars are standard errors of each mean. Differences sample by sample have smaller ones, so that they can be told "
    "also where bars overlap."
)


def page_text(judged: Sequence[Judged], outside: Sequence[Outside]) -> str:
    """The whole page."""
    parts = [_overview(judged)]
    for paper, number in PAPERS.items():
        for each in judged:
            if each.item.paper == paper:
                parts.append(_item(each, f"{paper} ({number})" if number else "beyond the papers"))
    rows = [[safe(x.paper), safe(x.where), _coded(x.reason)] for x in outside]
    parts.append(section("Other items of the papers", table("Other items", ["paper", "item", "where it stands"], rows)))
    return whole_page("Ledger of the papers' claims", ABOUT, "\n".join(parts), "ledger")


def _coded(text: str) -> str:
    """A text whose parts between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe(text))


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {verdict.replace(" ", "")}">{safe(verdict)}</span>'


def _overview(judged: Sequence[Judged]) -> str:
    rows = [
        [
            f'<a href="#{safe(x.item.name)}">{safe(x.item.name)}</a>',
            safe(f"{x.item.paper}, {x.item.where}"),
            safe(x.progress),
            ", ".join(_verdict(finding.verdict) for finding in x.findings),
        ]
        for x in judged
    ]
    return section("Items", table("Items", ["item", "stands for", "on record", "claims"], rows))


def _claim(claim: Claim) -> str:
    return _coded(claim.text) + (f"<br><small>{_coded(claim.late)}</small>" if claim.late else "")


def _item(each: Judged, paper: str) -> str:
    item = each.item
    rows = [
        [_claim(claim), safe(claim.printed), _coded(finding.ours) or "–", _verdict(finding.verdict)]  # noqa: RUF001
        for claim, finding in each.claims
    ]
    measured = _rows(item, each.entries)
    rules = "".join(f"<li>{_coded(claim.text)}: <small>{_coded(claim.rule.text)}</small></li>" for claim in item.claims)
    parts = [
        f"<p>{safe(item.about)}.</p>",
        f'<p class="soft">{safe(paper)}, {safe(item.where)}. Size: {safe(item.size)}. On record: '
        f"{safe(each.progress)}; <code>kernelformer reproduce {safe(item.name)}</code>, about {item.hours:g} core "
        "hours.</p>",
        table(f"Claims of {item.name}", ["claim", "printed", "here", "verdict"], rows),
        f"<details><summary>Rules</summary><ul>{rules}</ul></details>",
        *_pictures(item, measured),
        *([f'<p class="soft">{safe(OVERLAP)}</p>'] if _has_samples(each.entries) else []),
        *_figures(item, measured),
    ]
    return section(item.name, *parts, anchor=item.name)


def _has_samples(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether runs on record can be compared sample by sample."""
    return any(SAMPLES in entry.get("probes", {}) for entry in entries)


@dataclass(frozen=True)
class _Row:
    """What is on record of one attention, or of one variant of a study: a value a seed, and their mean."""

    part: str
    name: str
    values: list[float]
    mean: Mean | None
    seeds: int


def _rows(item: Item, entries: Sequence[Mapping[str, Any]]) -> list[_Row]:
    """All that was measured, part by part; the seeds of a study are parts of their own there, and one here."""
    rows = []
    for part, name in dict.fromkeys((x["part"], x["name"]) for x in entries if x["kind"] == TRAINING):
        runs = runs_of(entries, part, name)
        values = [x for x in (value_of(run, item.value) for run in runs) if math.isfinite(x)]
        rows.append(_Row(part, name, values, mean_of(entries, part, name, item.value), len(runs)))
    records = [item.study_values(x["record"]) for x in entries if "record" in x and item.study_values is not None]
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if math.isfinite(record.get(name, math.nan))]
        rows.append(_Row(MAIN, name, values, mean_over_seeds(values) if values else None, len(records)))
    return rows


def _figures(item: Item, rows: Sequence[_Row]) -> list[str]:
    """A table of all that was measured, what no claim is about among it: mean, standard error, seeds."""
    if not rows:
        return []
    cells = [
        [
            safe(x.part),
            f"<code>{safe(x.name)}</code>",
            "none" if x.mean is None else shown(x.mean),
            f"{x.seeds}, {x.seeds - len(x.values)} without" if len(x.values) < x.seeds else str(x.seeds),
        ]
        for x in rows
    ]
    made = table(f"Figures of {item.name}", ["part", "attention", safe(item.unit or "value"), "seeds"], cells)
    return [f"<details><summary>All figures</summary>{made}</details>"]


def _pictures(item: Item, rows: Sequence[_Row]) -> list[str]:
    """A panel for each part: means with standard errors, and a point for each seed."""
    panels = []
    for index, part in enumerate(dict.fromkeys(x.part for x in rows)):
        mine = [x for x in rows if x.part == part]
        if any(x.values for x in mine):
            panels.append(_panel(item, part, mine, f"{item.name}-{index}"))
    return [f'<div class="figures">{"".join(panels)}</div>'] if panels else []


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Names with the options alone that tell them apart, or that make another method of one; the table has all."""
    parts = {name: name.split(":") for name in names if ">" not in name}

    def common(head: str | None) -> set[str]:
        """The options that all have, of one method or of any."""
        mine = [set(x) for x in parts.values() if head in (None, x[0])]
        return set.intersection(*mine) if len(mine) > 1 or head is not None else set()

    everywhere, told = common(None), {name: name for name in names}
    for name, (head, *options) in parts.items():
        own = common(head)
        kept = [x for x in options if (x not in own or x.split("=")[0] in ALWAYS) and x not in everywhere]
        told[name] = ":".join([head, *kept])
    short = short_names(told.values(), 26)
    return {name: short[label] for name, label in told.items()}


def _panel(item: Item, part: str, rows: Sequence[_Row], anchor: str) -> str:
    short = _labels([x.name for x in rows])

    def draw(axis: Any) -> None:
        for place, row in enumerate(rows):
            colour = COLOURS[place % 7]
            axis.plot(row.values, [place] * len(row.values), "o", color=colour, alpha=0.4, markersize=4)
            if row.mean is not None:
                error = row.mean.error if math.isfinite(row.mean.error) else 0.0
                axis.errorbar([row.mean.value], [place], xerr=[error], fmt="D", color=colour, capsize=3)
        axis.set_yticks(range(len(rows)), [short[x.name] for x in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(item.unit or "value")

    told = "; ".join(f"{x.name} {x.mean.value:.4g}" for x in rows if x.mean is not None)
    title = item.unit or "value"
    title = title if part == MAIN else f"{title}, {part}"
    return figure(anchor, title, f"{title}: {told}", draw, height=0.9 + 0.32 * len(rows))
