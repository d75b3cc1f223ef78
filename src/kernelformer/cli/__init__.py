"""The command line; what it does lives in the other packages."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run ``kernelformer``, or say what it needs."""
    missing = [name for name in ("typer", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the kernelformer command needs {', '.join(missing)}: pip install 'kernelformer[train]'")
    from kernelformer.cli.app import app

    app()
