"""``kernelformer results``."""

from __future__ import annotations

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
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD, of what is added; default: when it was made")] = None,
    as_json: Json = False,
) -> None:
    """Put comparisons on record, and show all that are on record on one page."""
    from kernelformer_lab.reports.results import write_results

    with plain_errors():
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
