"""``kernelformer results``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import console, plain_errors


def results(
    folders: Annotated[list[Path] | None, typer.Argument(help="further folders to add", show_default=False)] = None,
    add: Annotated[list[Path] | None, typer.Option(help="folder of `kernelformer compare` to put on record")] = None,
    folder: Annotated[Path, typer.Option(help="of the records and their page")] = Path("results"),
    tables: Annotated[
        bool, typer.Option("--tables", help="only write the tables of README.md, docs and FOLDER from the records")
    ] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="only draw the pictures of README.md and docs, into docs/images")
    ] = False,
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD, of what is added; default: when it was made")] = None,
) -> None:
    """Put comparisons on record, and show all that are on record on one page."""
    from kernelformer.reports.results_page import write_results

    with plain_errors():
        if tables:
            _write_tables(folder, [*(add or ()), *(folders or ()), *([date] if date else ())])
            return
        if pictures:
            _draw_pictures(folder)
            return
        files, records, others = write_results(folder, [*(add or ()), *(folders or ())], date)
        for path in files:
            console.print(f"written: {path}")
        said = f"comparisons on record: {len(records)}"
        left = f"; of another kind, and not on the page: {', '.join(path.name for path in others)}" if others else ""
        console.print(f"{said}{left}.")


def _write_tables(folder: Path, others: Sequence[object]) -> None:
    """Write the tables of all pages; nothing else can be asked for with them."""
    from kernelformer.reports.tables import TABLES
    from kernelformer.reports.tables.fill import write_tables

    if others:
        raise ValueError(f"--tables goes with --folder alone, got also {others[0]}; call the command twice.")
    changed = write_tables(folder, TABLES)
    for path in changed:
        console.print(f"written: {path}")
    console.print(f"pages with changed tables: {len(changed)}.")


def _draw_pictures(folder: Path) -> None:
    """Draw the pictures of README.md and docs, from the records and by the library."""
    from kernelformer.reports.pictures import write_pictures

    for path in write_pictures(folder):
        console.print(f"written: {path}")
