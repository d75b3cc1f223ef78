"""``kernelformer results``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import console, plain_errors


def results(
    folders: Annotated[list[Path] | None, typer.Argument(help="further folders to add", show_default=False)] = None,
    add: Annotated[list[Path] | None, typer.Option(help="folder of `kernelformer compare` to put on record")] = None,
    folder: Annotated[Path, typer.Option(help="of the records and their page")] = Path("results"),
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD, of what is added; default: when it was made")] = None,
) -> None:
    """Put comparisons on record, and show all that are on record on one page."""
    from kernelformer.reports.results_page import write_results

    with plain_errors():
        files, records, others = write_results(folder, [*(add or ()), *(folders or ())], date)
        for path in files:
            console.print(f"written: {path}")
        said = f"comparisons on record: {len(records)}"
        left = f"; of another kind, and not on the page: {', '.join(path.name for path in others)}" if others else ""
        console.print(f"{said}{left}.")
