"""The ledger: for every item of the papers what is claimed, what came out here, at which size, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelformer.errors import TrainingError
from kernelformer.evidence.base import CONTRADICTS, MISSING_RESULT, OPEN, OWN, PAPERS, SUPPORTS, Claim, Finding, Item
from kernelformer.evidence.items import ITEMS
from kernelformer.evidence.ledger_page import page_text
from kernelformer.evidence.outside import OUTSIDE
from kernelformer.evidence.records import current, read_jobs, refresh
from kernelformer.files import write_text
from kernelformer.reports.markdown import plain, table
from kernelformer.training.checkpoints import locked

PAGE, SUMMARY = "ledger.html", "README.md"
LATE = r"\*"  # an asterisk, in Markdown
VERDICTS = (SUPPORTS, CONTRADICTS, OPEN, MISSING_RESULT)


@dataclass(frozen=True)
class Judged:
    """An item with what is on record of it and what that says of its claims.

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
        """How many of its jobs are on record."""
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
    """How many claims have which verdict."""
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
    rows = [[x.paper, plain(x.where), x.reason] for x in OUTSIDE]
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
    """Whose claim it is, its item, and whether something of it was decided late."""
    whose = "our question" if claim.ours and item.paper != OWN else item.paper
    return f"{whose}, {item.name}{LATE if claim.late else ''}"


def _left(text: str) -> str:
    """A table whose columns are all texts."""
    return text.replace("---:", "---", -1)
