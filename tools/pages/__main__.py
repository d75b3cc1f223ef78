"""``python tools/pages tables`` and ``python tools/pages pictures``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder is the package `pages`
    from pages import choice, conversion, methods, scale, speed, studies, training  # noqa: F401  # each adds tables
    from pages.pictures import write_pictures
    from pages.records import write_tables

    parser = argparse.ArgumentParser(description="Write what README, docs and results show of the records.")
    parser.add_argument("what", choices=["tables", "pictures"])
    parser.add_argument(
        "--records", type=Path, default=Path("results"), help="folder of the records (default: results)"
    )
    given = parser.parse_args()
    try:
        written = (write_tables if given.what == "tables" else write_pictures)(given.records)
    except ValueError as problem:
        sys.exit(f"error: {problem}")
    for path in written:
        print(f"written: {path}")
    print(f"{given.what}: {len(written)} files changed.")
