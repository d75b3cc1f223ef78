"""``kernelformer reproduce``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kernelformer.cli.common import Json, console, following, goes_on, plain_errors, show_json
from kernelformer.cli.options import starting

if TYPE_CHECKING:
    from kernelformer_lab.evidence.base import Item
    from kernelformer_lab.evidence.queue import Place


def item_names(incomplete: str) -> list[str]:
    """Items of ``kernelformer reproduce``."""
    from kernelformer_lab.evidence.items import ITEMS

    return starting(incomplete, ITEMS)


def reproduce(
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ITEM]...", help="names of --list; default: all, in their order", autocompletion=item_names
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="show the items and how far they are, the claims of those named, and stop")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="every item in seconds, on made-up data: does all of it run?")
    ] = False,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="stop after so many hours; default: when all is done")
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="write the ledger from what is on record, and stop")] = False,
    claim: Annotated[
        int | None, typer.Option(help="with --first-seed: the number of the claim of one item that is measured again")
    ] = None,
    first_seed: Annotated[
        int | None, typer.Option(min=1, help="the smallest of new seeds, for a claim that is measured again")
    ] = None,
    data: Annotated[
        Path, typer.Option(help="folder with a folder for each data set: imdb, enwik8, ... (docs/measured/evidence.md)")
    ] = Path("data"),
    records: Annotated[Path, typer.Option(help="folder of the records and the ledger")] = Path("results/evidence"),
    out: Annotated[Path, typer.Option(help="folder for the runs, also those to resume")] = Path("out/reproduce"),
    as_json: Json = False,
) -> None:
    """Measure what the papers claim, item by item, and write the ledger of claims, figures and verdicts.

    Two runs of one thread go side by side; nothing that is on record is run again, and a stopped queue resumes where
    it was.
    """
    from kernelformer_lab.evidence.base import AGAIN
    from kernelformer_lab.evidence.items import find_items
    from kernelformer_lab.evidence.queue import Place

    with plain_errors(goes_on):
        chosen = find_items(items or [])
        if claim is not None or first_seed is not None:
            if claim is None or first_seed is None or len(chosen) != 1:
                raise ValueError(
                    "--claim N and --first-seed S go together, with one item: its claim N is measured again with seeds "
                    "from S on."
                )
            chosen = [chosen[0].again(claim, first_seed)]
        again = AGAIN if claim is not None else ""
        place = Place(data, out / again, records / again)
        if list_:
            rows = _listing(chosen, place)
            console.print(_table(rows))
            for line in [*(_claims(rows) if items else []), *_remarks(rows)]:
                _say(line)
            if as_json:
                show_json(rows)
            return
        if quick:
            _quick(chosen)
        elif page:
            _write_page(records)
        else:
            _run(chosen, place, hours, records)
        if as_json and not quick:
            show_json(_listing(chosen, place))


def _say(line: str) -> None:
    """Print a line as it is: names and paths in brackets are no markup."""
    console.print(line)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("item", "paper", "stands for", "jobs left", "core hours", "data that is missing")
    table.columns[0].no_wrap = True
    for x in rows:
        left = "?" if x["damage"] else f"{x['jobs_left']} of {x['jobs']}"
        table.add_row(
            x["item"], x["paper"], x["stands_for"], left, f"{x['core_hours']:g}", ", ".join(x["missing_data"])
        )
    return table


def _listing(items: list[Item], place: Place) -> list[dict[str, Any]]:
    """Claims and progress of each item, as plain values."""
    from kernelformer_lab.evidence.queue import missing_data
    from kernelformer_lab.evidence.records import claims_as_json, damage, left, superseded

    rows = []
    for item in items:
        wrong = damage(item, place.records)
        jobs = item.jobs() if wrong else left(item, place.records)
        missing = dict.fromkeys(name for job in jobs for name in missing_data(job, place.data))
        rows.append(
            {
                "item": item.name,
                "paper": item.paper,
                "stands_for": item.where,
                "about": item.about,
                "differs": item.differs,
                "claims": claims_as_json(item),
                "core_hours": item.hours,
                "jobs": len(item.jobs()),
                "jobs_left": len(jobs),
                "missing_data": list(missing),
                "superseded": 0 if wrong else superseded(item, place.records),
                "damage": wrong,
            }
        )
    return rows


def _claims(rows: list[dict[str, Any]]) -> list[str]:
    """Claims of items and their rules, in lines."""
    return [
        line
        for x in rows
        for line in (
            f"\n{x['item']}: {x['about']}.",
            f"Differs from the paper: {x['differs']}.",
            *(
                f"- {claim['claim']} (paper: {claim['printed']})\n  {claim['rule'].replace('`', '')}"
                for claim in x["claims"]
            ),
        )
    ]


def _remarks(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each item that has a damaged record, or jobs of settings that it no longer has."""
    lines = [f"{x['item']} is left out: {x['damage']}" for x in rows if x["damage"]]
    old = [f"{x['item']} ({x['superseded']})" for x in rows if x["superseded"]]
    kept = "jobs on record of settings that their items no longer have; they stay there, and are not judged"
    return [*lines, *([f"{kept}: {', '.join(old)}"] if old else [])]


def _run(items: list[Item], place: Place, hours: float | None, ledger: Path) -> None:
    from kernelformer_lab.evidence.queue import pending, run_queue

    rows = _listing(items, place)
    for x in rows:
        if x["missing_data"] and not x["damage"]:
            _say(
                f"{x['item']} is left out: {place.data} has no {', '.join(x['missing_data'])} "
                "(docs/measured/evidence.md)"
            )
    for line in _remarks(rows):
        _say(line)
    whole = [item for item, x in zip(items, rows, strict=True) if not x["damage"]]
    with following(len(pending(whole, place))) as job:
        failed = run_queue(items, place, hours=hours, log=job.log, progress=job.advance)
    for line in failed:
        _say(f"failed: {line}")
    _write_page(ledger)
    if failed:
        raise typer.Exit(1)


def _quick(items: list[Item]) -> None:
    from kernelformer_lab.evidence.queue import Place, make_data, run_here, shrunk

    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder) / "data", Path(folder) / "out", Path(folder) / "records")
        make_data(place.data)
        small = [shrunk(item) for item in items]
        with following(sum(len(item.jobs()) for item in small)) as job:
            count = run_here(small, place, job.log, job.advance)
        _write_page(place.records, shown=False)
    console.print(f"all {count} jobs of {len(items)} items ran, in the smallest size; nothing was put on record")


def _write_page(records: Path, shown: bool = True) -> None:
    from kernelformer_lab.evidence.ledger import write_ledger

    for path in write_ledger(records):
        if shown:
            _say(f"written: {path}")
