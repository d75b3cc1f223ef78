"""The ledger as one HTML page with a picture for every item."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernelformer.evidence.base import PAPERS, TRAINING, Item, Training
from kernelformer.evidence.rules import look_up, mean_of, runs_of, shown, without
from kernelformer.formatting import short_names
from kernelformer.reports.figures import COLOURS
from kernelformer.reports.page import figure, safe, section, table, whole_page

if TYPE_CHECKING:
    from kernelformer.evidence.ledger import Judged
    from kernelformer.evidence.outside import Outside

ABOUT = (
    "What the four papers claim, what this library gets at the size of two CPU cores, and whether that supports the "
    "claim, contradicts it or leaves it open. A verdict needs a difference of more than two standard errors over seeds "
    "and validation samples together, or Student's quantile where that is larger. Rules are in the records."
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


def _item(each: Judged, paper: str) -> str:
    item = each.item
    rows = [
        [_coded(claim.text), safe(claim.printed), _coded(finding.ours) or "–", _verdict(finding.verdict)]  # noqa: RUF001
        for claim, finding in each.claims
    ]
    rules = "".join(f"<li>{_coded(claim.text)}: <small>{_coded(claim.rule.text)}</small></li>" for claim in item.claims)
    parts = [
        f"<p>{safe(item.about)}.</p>",
        f'<p class="soft">{safe(paper)}, {safe(item.where)}. Size: {safe(item.size)}. On record: '
        f"{safe(each.progress)}; <code>kernelformer reproduce {safe(item.name)}</code>, about {item.hours:g} core "
        "hours.</p>",
        table(f"Claims of {item.name}", ["claim", "printed", "here", "verdict"], rows),
        f"<details><summary>Rules</summary><ul>{rules}</ul></details>",
        *_pictures(item, each.entries),
        *_figures(item, each.entries),
    ]
    return section(item.name, *parts, anchor=item.name)


def _figures(item: Item, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of all that was trained, those that no claim is about among them: mean, standard error, seeds."""
    rows = []
    for part, name in dict.fromkeys((x["part"], x["name"]) for x in entries if x["kind"] == TRAINING):
        runs = runs_of(entries, part, name)
        mean = mean_of(entries, part, name, item.value)
        lost = without(entries, part, name, item.value)
        value = "none" if mean is None else shown(mean)
        rows.append(
            [safe(part), f"<code>{safe(name)}</code>", value, f"{len(runs)}" + (f", {lost} without" * bool(lost))]
        )
    if not rows:
        return []
    made = table(f"Figures of {item.name}", ["part", "attention", safe(item.unit or "value"), "seeds"], rows)
    return [f"<details><summary>All figures</summary>{made}</details>"]


def _pictures(item: Item, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A panel for each part of trainings: means with standard errors, and a point for each seed."""
    panels = []
    for index, part in enumerate(x for x in item.parts if isinstance(x, Training)):
        mine = [x for x in entries if x["kind"] == TRAINING and x["part"] == part.name]
        if any(math.isfinite(look_up(x, item.value)) for x in mine):
            panels.append(_panel(item, part.name, mine, f"{item.name}-{index}"))
    return [f'<div class="figures">{"".join(panels)}</div>'] if panels else []


def _panel(item: Item, part: str, entries: Sequence[Mapping[str, Any]], anchor: str) -> str:
    names = list(dict.fromkeys(x["name"] for x in entries))
    short = short_names(names, 26)
    means = {name: mean_of(entries, part, name, item.value) for name in names}

    def draw(axis: Any) -> None:
        for row, name in enumerate(names):
            values = [look_up(x, item.value) for x in entries if x["name"] == name]
            values = [x for x in values if math.isfinite(x)]
            axis.plot(values, [row] * len(values), "o", color=COLOURS[row % 7], alpha=0.4, markersize=4)
            mean = means[name]
            if mean is not None:
                error = mean.error if math.isfinite(mean.error) else 0.0
                axis.errorbar([mean.value], [row], xerr=[error], fmt="D", color=COLOURS[row % 7], capsize=3)
        axis.set_yticks(range(len(names)), [short[name] for name in names])
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlabel(item.unit or "value")

    told = "; ".join(f"{name} {mean.value:.4g}" for name, mean in means.items() if mean is not None)
    title = item.unit or "value"
    title = title if part == "main" else f"{title}, {part}"
    return figure(anchor, title, f"{title}: {told}", draw, height=0.9 + 0.32 * len(names))
