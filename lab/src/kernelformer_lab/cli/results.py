"""``kernelformer results``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Json, console, following, plain_errors, show_json


def results(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="further ones to add", show_default=False)
    ] = None,
    add: Annotated[list[Path] | None, typer.Option(help="folder of `kernelformer compare` to put on record")] = None,
    records: Annotated[Path, typer.Option(help="folder of the records and their page")] = Path("results"),
    tables: Annotated[
        bool, typer.Option("--tables", help="only write the tables of README.md, docs and results from the records")
    ] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="only draw the pictures of README.md and docs, into docs/images")
    ] = False,
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD, of what is added; default: when it was made")] = None,
    as_json: Json = False,
) -> None:
    """Put comparisons on record, and show all that are on record on one page."""
    from kernelformer_lab.reports.results import write_results

    with plain_errors():
        if tables:
            changed = _write_tables(records, [*(add or ()), *(folders or ()), *([date] if date else ())])
            if as_json:
                show_json({"written": [str(x) for x in changed]})
            return
        if pictures:
            drawn = _draw_pictures(records)
            if as_json:
                show_json({"written": [str(x) for x in drawn]})
            return
        with following() as job:
            job.log(f"making the page of {records}")
            files, shown, others = write_results(records, [*(add or ()), *(folders or ())], date)
        for path in files:
            console.print(f"written: {path}")
        if as_json:
            names = {"written": files, "on_record": [x.path for x in shown], "of_another_kind": others}
            show_json({name: [str(x) for x in paths] for name, paths in names.items()})
        said = f"comparisons on record: {len(shown)}"
        left = f"; of another kind, and not on the page: {', '.join(path.name for path in others)}" if others else ""
        console.print(f"{said}{left}.")


def _write_tables(folder: Path, others: Sequence[object]) -> list[Path]:
    """Write the tables of all pages, and return the changed ones; nothing else can be asked for with them."""
    from kernelformer_lab.reports.tables import TABLES
    from kernelformer_lab.reports.tables.fill import write_tables

    if others:
        raise ValueError(f"--tables goes with --records alone, got also {others[0]}; call the command twice.")
    changed = write_tables(folder, TABLES)
    for path in changed:
        console.print(f"written: {path}")
    console.print(f"pages with changed tables: {len(changed)}.")
    return changed


def _draw_pictures(folder: Path) -> list[Path]:
    """Draw the pictures of README.md and docs, from the records and by the library."""
    from kernelformer_lab.reports.pictures import write_pictures

    drawn = list(write_pictures(folder))
    for path in drawn:
        console.print(f"written: {path}")
    return drawn
