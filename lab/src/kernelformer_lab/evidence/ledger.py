"""The ledger as one HTML page with a picture for every item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kernelformer.errors import TrainingError
from kernelformer.files import read_json, write_text
from kernelformer.formatting import short_names
from kernelformer.page import COLOURS, Drawing, coded, figure, plain, render, safe, small, table
from kernelformer_lab.analysis.statistics import Mean, benjamini_hochberg, holm, mean_over_seeds
from kernelformer_lab.evidence.base import (
    AGAIN,
    CONTRADICTED,
    MAIN,
    MISSING_RESULT,
    NOT_SEEN,
    OPEN,
    OWN,
    PAPERS,
    SUPPORTED,
    TRAINING,
    Claim,
    Finding,
    Item,
)
from kernelformer_lab.evidence.items import ITEMS
from kernelformer_lab.evidence.records import current, read_jobs, refresh, rule_commits
from kernelformer_lab.evidence.rules import ALWAYS, SAMPLES, mean_of, runs_of, shown, value_of
from kernelformer_lab.training.checkpoints import locked

ABOUT = (
    "Claims of the four papers and questions of our own, judged by runs at the size of two CPU cores. A "
    "claim is supported "
    "if the 95% interval of the difference, over seeds and validation samples together, is on its side. If "
    "it is on the "
    "other side, the claim is not seen at this size; it is contradicted only where an item has the paper's "
    "own setting. "
    "Everything else is open. Runs with the same seed are compared as pairs."
)


def page_text(judged: Sequence[Judged], outside: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    papers = {paper: f"{paper} ({number})" if number else "beyond the papers" for paper, number in PAPERS.items()}
    overview = [
        [
            Markup('<a href="#{0}">{0}</a>').format(x.item.name),
            f"{x.item.paper}, {x.item.where}",
            x.progress,
            Markup(", ").join(
                Markup("{} {}").format(count, _verdict(verdict))
                for verdict in VERDICTS
                if (count := [y.verdict for y in x.findings].count(verdict))
            ),
        ]
        for paper in PAPERS
        for x in judged
        if x.item.paper == paper
    ]
    return render(
        Path(__file__).with_name("ledger.html"),
        "Ledger of the papers' claims",
        ABOUT,
        "ledger",
        verdicts=list(VERDICTS),
        counted=count_rows(judged),
        remarks=remarks(judged),
        overview=overview,
        items=[
            _item(x) | {"paper": told, "number": PAPERS[paper]}
            for paper, told in papers.items()
            for x in judged
            if x.item.paper == paper
        ],
        outside=[[paper, where, coded(reason)] for paper, where, reason in outside],
    )


def _verdict(verdict: str) -> Markup:
    classes = {SUPPORTED: "supports", NOT_SEEN: "notseen", CONTRADICTED: "contradicts", MISSING_RESULT: "notrun"}
    return Markup('<span class="verdict {}">{}</span>').format(classes.get(verdict, verdict), verdict)


def _item(each: Judged) -> dict[str, Any]:
    """Values of the template for one item."""
    measured = _rows(each.item, each.entries)
    claims = [
        [
            coded(claim.text) + (Markup("<br>") + small(coded(claim.second_look)) if claim.second_look else ""),
            claim.printed,
            coded(finding.ours) or "–",  # noqa: RUF001
            "" if finding.verdict == MISSING_RESULT else f"{finding.p:.2g}",
            _verdict(finding.verdict),
            "" if finding.verdict == MISSING_RESULT else rule_origin(claim, each),
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
FORMER: list[tuple[str, str, str, str, str]] = read_json(Path(__file__).with_name("changes.json"))
PAIRED = "Runs of one seed are compared as pairs; no paper's setting."
# Claims that were measured again from nothing: item, number of the claim, smallest seed.
REPEATED = (("redrawing", 1, 100), ("cifar", 1, 100), ("instability", 1, 100))
PAGE, SUMMARY, CHANGES = "ledger.html", "README.md", "changes.md"
SECOND_LOOK = r"\*"  # an asterisk, in Markdown
VERDICTS = (SUPPORTED, NOT_SEEN, CONTRADICTED, OPEN, MISSING_RESULT)
ALPHA = 0.05


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


def findings_of(item: Item, entries: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings on all claims of an item; where it has the paper's own setting, the opposite contradicts the paper."""
    findings = [claim.rule(entries) for claim in item.claims]
    if not item.paper_setting:
        return findings
    return [replace(x, verdict=CONTRADICTED) if x.verdict == NOT_SEEN else x for x in findings]


def judge(item: Item, records: Path) -> Judged:
    """Judge all claims of an item by what is on record."""
    entries = current(item, read_jobs(records, item))
    return Judged(item, entries, findings_of(item, entries))


def write_ledger(records: Path) -> list[Path]:
    """Write ``ledger.html``, with pictures, and ``README.md``, in short, into the folder of the records.

    Claims and rules in the records are brought up to date with the items, but while a queue works on them: it does so
    itself, and what it adds meanwhile must not be lost.
    """
    with suppress(TrainingError), locked(records):
        for item in ITEMS.values():
            refresh(records, item)
    judged = [judge(item, records) for item in ITEMS.values()]
    repeated = repeats(judged, records)
    records.mkdir(parents=True, exist_ok=True)
    write_text(records / PAGE, page_text(judged, OUTSIDE))
    write_text(records / SUMMARY, summary_text(judged, repeated))
    write_text(records / CHANGES, changes_text(judged))
    return [records / PAGE, records / SUMMARY]


def changes_text(judged: Sequence[Judged]) -> str:
    """The claims of the former version of the ledger with their verdicts then and now, and why they changed."""
    now = {(x.item.name, claim.text): finding for x in judged for claim, finding in x.claims}
    rows, known = [], set()
    for item, former, verdict, text, reason in FORMER:
        known.add((item, text))
        finding = now.get((item, text))
        told = "withdrawn" if finding is None else finding.verdict
        claim = plain(former) if text in ("", former) else f"{plain(former)} → {plain(text)}"
        same = told == verdict.replace("supports", SUPPORTED)
        rows.append([item, claim, verdict, told if same else f"**{told}**", reason or ("" if same else PAIRED)])
    new = [
        [x.item.name, plain(claim.text), finding.verdict]
        for x in judged
        for claim, finding in x.claims
        if (x.item.name, claim.text) not in known
    ]
    return (
        "\n\n".join(
            [
                "# What changed in the ledger",
                "The claims of the [ledger](README.md) as of version 0.2, with the verdicts of then and now. Three "
                "things changed for all: runs with the same seed are compared as pairs, a claim whose opposite is "
                "measured is *not seen at this size* unless the item has the paper's own setting, and margins stand in "
                "the words of claims.",
                _left(table(["item", "claim", "then", "now", "reason"], rows)),
                "## New claims",
                _left(table(["item", "claim", "verdict"], new)),
            ]
        )
        + "\n"
    )


def is_ours(item: Item, claim: Claim) -> bool:
    """True if no paper makes the claim."""
    return claim.ours or item.paper == OWN


def count_rows(judged: Sequence[Judged]) -> list[list[str]]:
    """Numbers of claims by verdict: a row for each paper, for all papers, and for questions of our own."""

    def row(name: str, findings: Sequence[Finding]) -> list[str]:
        verdicts = [x.verdict for x in findings]
        return [name, *(str(verdicts.count(x)) for x in VERDICTS)]

    every = [(x.item, claim, finding) for x in judged for claim, finding in x.claims]
    papers = [(item.paper, finding) for item, claim, finding in every if not is_ours(item, claim)]
    return [
        *(row(name, [x for paper, x in papers if paper == name]) for name, number in PAPERS.items() if number),
        row("all papers", [x for _, x in papers]),
        row("our own questions", [x for item, claim, x in every if is_ours(item, claim)]),
    ]


def remarks(judged: Sequence[Judged]) -> list[str]:
    """Sentences on the number of tests, on corrections for it, and on second looks."""
    every = [(claim, finding) for x in judged for claim, finding in x.claims]
    tested = [x for _, x in every if x.verdict != MISSING_RESULT]
    decided = [x.verdict != OPEN for x in tested]
    p = [x.p for x in tested]
    kept = [
        sum(d and y <= ALPHA for d, y in zip(decided, adjusted(p), strict=True))
        for adjusted in (holm, benjamini_hochberg)
    ]
    items = {x.item.name for x in judged if x.item.history}
    looked = sum(bool(claim.second_look) or x.item.name in items for x in judged for claim, _ in x.claims)
    committed = sum(rule_commits(claim, x.entries) is not None for x in judged for claim, _ in x.claims)
    return [
        f"{len(tested)} claims were tested, {sum(decided)} are decided at the level of 5% each; if none of "
        f"them were true "
        f"in either direction, about {ALPHA * len(tested):.0f} would be decided by chance. {kept[0]} "
        f"decisions stand after "
        f"Holm's correction over all tests, {kept[1]} with the false discovery rate of Benjamini and Hochberg at 5%.",
        f"{looked} claims had a second look: their rule, wording or runs were changed after results were "
        f"known, and say "
        f"how. For {committed} claims every run keeps the commit that its rule was in when it began; runs before "
        "20 November 2026 keep none. Pairing by seed was introduced then, for all claims at once, with "
        "their results known.",
    ]


def rule_origin(claim: Claim, each: Judged) -> str:
    """The commit of the runs that had the rule when they began, or what is known of a rule without one."""
    commits = rule_commits(claim, each.entries)
    if commits:
        return ", ".join(sorted(commits))
    return "changed later" if claim.second_look else "no commit kept"


def repeats(judged: Sequence[Judged], records: Path) -> list[list[str]]:
    """Rows on claims that were measured again with seeds that were not used before."""
    rows = []
    for name, number, first_seed in REPEATED:
        mine = next((x for x in judged if x.item.name == name), None)
        if mine is None or not (records / AGAIN / f"{name}.json").exists():
            continue
        again = judge(mine.item.again(number, first_seed), records / AGAIN).findings[0]
        first = mine.findings[number - 1]
        if first.gap is not None and again.gap is not None:
            apart = abs(first.gap[0] - again.gap[0]) / math.hypot(first.gap[1], again.gap[1])
            shown_gaps = [f"{value:+.3g} ± {error:.2g}" for value, error in (first.gap, again.gap)]
            claim = f"{plain(mine.item.claims[number - 1].text)} ({name}, from seed {first_seed})"
            rows.append([claim, *shown_gaps, f"{apart:.1f}", first.verdict, again.verdict])
    return rows


def summary_text(judged: Sequence[Judged], repeated: Sequence[Sequence[str]] = ()) -> str:
    """The ledger as Markdown: counts, decided claims, a table of claims for each item, and what was not attempted."""
    every = [finding for x in judged for finding in x.findings if finding.verdict != MISSING_RESULT]
    corrected = dict(zip(map(id, every), holm([x.p for x in every]), strict=True))
    discovered = dict(zip(map(id, every), benjamini_hochberg([x.p for x in every]), strict=True))
    parts = [
        "# Ledger of the papers' claims",
        f"{ABOUT} Sizes are those of two CPU cores, and each item begins with how it differs from the paper. Made by "
        f"`kernelformer reproduce` from the records beside this page; pictures and rules: [{PAGE}]({PAGE}); "
        f"what changed "
        f"since the last version of the ledger, and why: [{CHANGES}]({CHANGES}).",
        "## Summary",
        table(["claims of", *VERDICTS], count_rows(judged)),
        *remarks(judged),
        *_in_short(judged),
        *_repeated(repeated),
    ]
    for paper, number in PAPERS.items():
        mine = [x for x in judged if x.item.paper == paper]
        if not mine:
            continue
        parts.append(f"## {paper} ([{number}](https://arxiv.org/abs/{number}))" if number else "## Beyond the papers")
        for x in mine:
            rows = [
                [
                    plain(claim.text) + (f" ({plain(claim.second_look)}){SECOND_LOOK}" if claim.second_look else ""),
                    plain(claim.printed),
                    finding.ours.replace("|", "\\|") or "not run",
                    *(
                        ["", ""]
                        if finding.verdict == MISSING_RESULT
                        else [f"{finding.p:.2g}", _corrected(finding, corrected[id(finding)], discovered[id(finding)])]
                    ),
                    finding.verdict if finding.verdict in (OPEN, MISSING_RESULT) else f"**{finding.verdict}**",
                    "" if finding.verdict == MISSING_RESULT else rule_origin(claim, x),
                ]
                for claim, finding in x.claims
            ]
            record = f"[record]({x.item.name}.json), " if x.entries else ""
            parts += [
                f"### {x.item.name}: {plain(x.item.where)}",
                f"{'Differs from the paper' if number else 'Setting'}: {plain(x.item.differs)}.",
                f"{plain(x.item.about)} ({record}{x.progress}, about {x.item.hours:g} core hours)."
                + (f" Second look: {plain(x.item.history)}." if x.item.history else ""),
                _left(table(["claim", "printed", "here", "p", "also by", "verdict", "rule"], rows)),
            ]
    rows = [[paper, plain(where), reason] for paper, where, reason in OUTSIDE]
    parts += ["## Other items of the papers", _left(table(["paper", "item", "where it stands"], rows))]
    return "\n\n".join(parts) + "\n"


def _repeated(rows: Sequence[Sequence[str]]) -> list[str]:
    """The section on claims that were measured again."""
    if not rows:
        return []
    head = ["claim", "difference on record", "again", "standard errors apart", "verdict", "again"]
    told = (
        f"Measured again from nothing, with seeds that were not used before ([records]({AGAIN})): differences that are "
        "less than two standard errors apart agree."
    )
    return ["## Measured again", told, _left(table(head, rows))]


def _corrected(finding: Finding, by_holm: float, discovered: float) -> str:
    """Corrections for the number of tests that a decision survives."""
    if finding.verdict == OPEN:
        return ""
    return "Holm, BH" if by_holm <= ALPHA else "BH" if discovered <= ALPHA else "neither"


def _in_short(judged: Sequence[Judged]) -> list[str]:
    """The claims of papers by their verdict, decided ones in words, the others by the names of their items."""
    parts, papers = [], list(PAPERS)
    judged = sorted(judged, key=lambda x: papers.index(x.item.paper))
    for verdict in (SUPPORTED, NOT_SEEN, CONTRADICTED):
        claims = [
            f"- {plain(claim.text)} ({_source(x.item, claim)})."
            for x in judged
            for claim, finding in x.claims
            if finding.verdict == verdict
        ]
        parts += [f"{verdict.capitalize()}:", "\n".join(claims)] if claims else []
    for verdict in (OPEN, MISSING_RESULT):
        names = [x.item.name for x in judged for finding in x.findings if finding.verdict == verdict]
        told = (f"{name} ({names.count(name)})" if names.count(name) > 1 else name for name in dict.fromkeys(names))
        parts += [f"{verdict.capitalize()}, claims of: {', '.join(told)}."] if names else []
    return parts


def _source(item: Item, claim: Claim) -> str:
    """Source and item of a claim, with a mark where something of it was decided late."""
    whose = "our question" if is_ours(item, claim) else item.paper
    return f"{whose}, {item.name}{SECOND_LOOK if claim.second_look or item.history else ''}"


def _left(text: str) -> str:
    """A table whose columns are all texts."""
    return text.replace("---:", "---", -1)
