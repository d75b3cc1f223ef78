"""The ledger as one HTML page with a picture for every item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kernelformer.errors import TrainingError
from kernelformer.files import read_json, write_text
from kernelformer.formatting import short_names
from kernelformer.page import COLOURS, Drawing, coded, figure, plain, render, safe, small, table
from kernelformer_lab.analysis.statistics import Mean, mean_over_seeds
from kernelformer_lab.evidence.base import (
    CONTRADICTS,
    MAIN,
    MISSING_RESULT,
    OPEN,
    OWN,
    PAPERS,
    SUPPORTS,
    TRAINING,
    Claim,
    Finding,
    Item,
)
from kernelformer_lab.evidence.items import ITEMS
from kernelformer_lab.evidence.records import current, read_jobs, refresh
from kernelformer_lab.evidence.rules import ALWAYS, SAMPLES, mean_of, runs_of, shown, value_of
from kernelformer_lab.training.checkpoints import locked

ABOUT = (
    "What the four papers claim, what this library gets at the size of two CPU cores, and whether that supports the "
    "claim, contradicts it or leaves it open. A verdict needs a difference of more than two standard errors over seeds "
    "and samples together, or Student's quantile where that is larger. A difference taken sample by sample leaves out "
    "what is hard for both models. Rules are in the records."
)


def page_text(judged: Sequence[Judged], outside: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    papers = {paper: f"{paper} ({number})" if number else "beyond the papers" for paper, number in PAPERS.items()}
    overview = [
        [
            Markup('<a href="#{0}">{0}</a>').format(x.item.name),
            f"{x.item.paper}, {x.item.where}",
            x.progress,
            Markup(", ").join(_verdict(finding.verdict) for finding in x.findings),
        ]
        for x in judged
    ]
    return render(
        Path(__file__).with_name("ledger.html"),
        "Ledger of the papers' claims",
        ABOUT,
        "ledger",
        overview=overview,
        items=[_item(x) | {"paper": told} for paper, told in papers.items() for x in judged if x.item.paper == paper],
        outside=[[paper, where, coded(reason)] for paper, where, reason in outside],
    )


def _verdict(verdict: str) -> Markup:
    return Markup('<span class="verdict {}">{}</span>').format(verdict.replace(" ", ""), verdict)


def _item(each: Judged) -> dict[str, Any]:
    """Values of the template for one item."""
    measured = _rows(each.item, each.entries)
    claims = [
        [
            coded(claim.text) + (Markup("<br>") + small(coded(claim.late)) if claim.late else ""),
            claim.printed,
            coded(finding.ours) or "–",  # noqa: RUF001
            _verdict(finding.verdict),
        ]
        for claim, finding in each.claims
    ]
    return {
        "item": each.item,
        "progress": each.progress,
        "claims": claims,
        "pictures": _pictures(each.item, measured),
        "has_samples": any(SAMPLES in entry.get("probes", {}) for entry in each.entries),
        "figures": _figures(measured),
    }


@dataclass(frozen=True)
class _Row:
    """Values on record of one attention, or of one variant of a study, by seed, and their mean."""

    part: str
    name: str
    values: list[float]
    mean: Mean | None
    seeds: int


def _rows(item: Item, entries: Sequence[Mapping[str, Any]]) -> list[_Row]:
    """Rows of all that was measured, part by part; the seeds of a study, each a part on record, are one here."""
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


def _figures(rows: Sequence[_Row]) -> list[list[str]]:
    """Rows of a table of all that was measured, also of what no claim is about: mean, standard error, seeds."""
    return [
        [
            x.part,
            Markup("<code>{}</code>").format(safe(x.name)),
            "none" if x.mean is None else shown(x.mean),
            f"{x.seeds}, {x.seeds - len(x.values)} without" if len(x.values) < x.seeds else str(x.seeds),
        ]
        for x in rows
    ]


def _pictures(item: Item, rows: Sequence[_Row]) -> list[Drawing]:
    """A panel for each part: means with standard errors, and a point for each seed."""
    panels = []
    for index, part in enumerate(dict.fromkeys(x.part for x in rows)):
        mine = [x for x in rows if x.part == part]
        if any(x.values for x in mine):
            panels.append(_panel(item, part, mine, f"{item.name}-{index}"))
    return panels


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Names with the options alone that tell them apart, or that make another method of one; the table has all."""
    parts = {name: name.split(":") for name in names if ">" not in name}

    def common(head: str | None) -> set[str]:
        """Options that all names have, of one method or of any."""
        mine = [set(x) for x in parts.values() if head in (None, x[0])]
        return set.intersection(*mine) if len(mine) > 1 or head is not None else set()

    everywhere, told = common(None), {name: name for name in names}
    for name, (head, *options) in parts.items():
        own = common(head)
        kept = [x for x in options if (x not in own or x.split("=")[0] in ALWAYS) and x not in everywhere]
        told[name] = ":".join([head, *kept])
    short = short_names(told.values(), 26)
    return {name: short[label] for name, label in told.items()}


def _panel(item: Item, part: str, rows: Sequence[_Row], anchor: str) -> Drawing:
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
    return figure(anchor, title, told, draw, height=0.9 + 0.32 * len(rows))


# Items of the papers that the queue does not measure: paper, where in it, and what measures it, or why nothing does.
OUTSIDE: list[tuple[str, str, str]] = read_json(Path(__file__).with_name("outside.json"))
PAGE, SUMMARY = "ledger.html", "README.md"
LATE = r"\*"  # an asterisk, in Markdown
VERDICTS = (SUPPORTS, CONTRADICTS, OPEN, MISSING_RESULT)


@dataclass(frozen=True)
class Judged:
    """An item with its record and the findings on its claims.

    Args:
        item: as it is now.
        entries: jobs on record of the item as it is now.
        findings: one for each of its claims.
    """

    item: Item
    entries: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]

    @property
    def claims(self) -> list[tuple[Claim, Finding]]:
        """Claims with their findings."""
        return list(zip(self.item.claims, self.findings, strict=True))

    @property
    def progress(self) -> str:
        """Number of its jobs that are on record."""
        return f"{len(self.entries)} of {len(self.item.jobs())} jobs"


def judge(item: Item, records: Path) -> Judged:
    """Judge all claims of an item by what is on record."""
    entries = current(item, read_jobs(records, item))
    return Judged(item, entries, [claim.rule(entries) for claim in item.claims])


def write_ledger(records: Path) -> list[Path]:
    """Write ``ledger.html``, with pictures, and ``README.md``, in short, into the folder of the records.

    Claims and rules in the records are brought up to date with the items, but while a queue works on them: it does so
    itself, and what it adds meanwhile must not be lost.
    """
    with suppress(TrainingError), locked(records):
        for item in ITEMS.values():
            refresh(records, item)
    judged = [judge(item, records) for item in ITEMS.values()]
    records.mkdir(parents=True, exist_ok=True)
    write_text(records / PAGE, page_text(judged, OUTSIDE))
    write_text(records / SUMMARY, summary_text(judged))
    return [records / PAGE, records / SUMMARY]


def counts(judged: Sequence[Judged]) -> dict[str, int]:
    """Count the claims by verdict."""
    verdicts = [finding.verdict for x in judged for finding in x.findings]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def summary_text(judged: Sequence[Judged]) -> str:
    """The ledger as Markdown: a table of claims by paper, and what was not attempted."""
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts(judged).items())
    parts = [
        "# Ledger of the papers' claims",
        f"Made by `kernelformer reproduce` from the records beside this page; pictures and rules: [{PAGE}]({PAGE}). "
        f"A verdict needs a difference of more than two standard errors, over seeds and over samples "
        f"together, or Student's quantile where that is larger; everything else is open. A difference taken sample by "
        f"sample leaves out what is hard for both models; in the others the errors of both are added. Sizes are those "
        f"of two CPU cores, far from the papers', so that a verdict is about the claim at this size. Claims: {told}.",
        "## In short",
        f"What of a claim with a mark ({LATE}) was decided when runs were on record, its rule, its margin or its "
        "words, stands in the table.",
        *_in_short(judged),
    ]
    for paper, number in PAPERS.items():
        mine = [x for x in judged if x.item.paper == paper]
        title = f"{paper} ([{number}](https://arxiv.org/abs/{number}))" if number else "Beyond the papers"
        rows = [
            [
                f"[{x.item.name}]({x.item.name}.json), {plain(x.item.where)}" if x.entries else x.item.name,
                plain(f"{claim.text} ({claim.late})" if claim.late else claim.text),
                plain(claim.printed),
                finding.ours.replace("|", "\\|") or plain(f"not run: {x.item.hours:g} core hours"),
                f"**{finding.verdict}**" if finding.verdict in (SUPPORTS, CONTRADICTS) else finding.verdict,
            ]
            for x in mine
            for claim, finding in x.claims
        ]
        if rows:
            head = ["item", "claim", "printed", "here", "verdict"]
            parts += [f"## {title}", _left(table(head, rows))]
        sizes = [f"- **{x.item.name}** ({x.progress}): {plain(x.item.size)}." for x in mine]
        if sizes:
            parts += ["Sizes:", "\n".join(sizes)]
    rows = [[paper, plain(where), reason] for paper, where, reason in OUTSIDE]
    parts += ["## Other items of the papers", _left(table(["paper", "item", "where it stands"], rows))]
    return "\n\n".join(parts) + "\n"


def _in_short(judged: Sequence[Judged]) -> list[str]:
    """The claims by their verdict, decided ones in words, the others by the names of their items."""
    parts, papers = [], list(PAPERS)
    judged = sorted(judged, key=lambda x: papers.index(x.item.paper))
    for verdict, title in ((SUPPORTS, "Supported at this size"), (CONTRADICTS, "Contradicted at this size")):
        claims = [
            f"- {plain(claim.text)} ({_source(x.item, claim)})."
            for x in judged
            for claim, finding in x.claims
            if finding.verdict == verdict
        ]
        parts += [f"{title}:", "\n".join(claims)] if claims else []
    for verdict, title in ((OPEN, "Open"), (MISSING_RESULT, "Not run")):
        names = [x.item.name for x in judged for finding in x.findings if finding.verdict == verdict]
        told = (f"{name} ({names.count(name)})" if names.count(name) > 1 else name for name in dict.fromkeys(names))
        parts += [f"{title}, claims of: {', '.join(told)}."] if names else []
    return parts


def _source(item: Item, claim: Claim) -> str:
    """Source and item of a claim, with a mark where something of it was decided late."""
    whose = "our question" if claim.ours and item.paper != OWN else item.paper
    return f"{whose}, {item.name}{LATE if claim.late else ''}"


def _left(text: str) -> str:
    """A table whose columns are all texts."""
    return text.replace("---:", "---", -1)
