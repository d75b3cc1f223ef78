"""The command line; what it does lives in the other packages."""

from __future__ import annotations

import sys
import warnings

from kernelformer.environment import bound_spinning
from kernelformer.lazy import MissingExtraError, require_extra


def main() -> None:
    """Run ``kernelformer``, or say what it needs."""
    bound_spinning()
    try:
        require_extra("the kernelformer command", "typer", "matplotlib")
    except MissingExtraError as problem:
        if sys.argv[1:2] == ["doctor"]:  # who has no extras is who asks what is missing
            from kernelformer.diagnosis import plain_report

            sys.exit(f"{plain_report()}\n{problem}")
        sys.exit(str(problem))
    from kernelformer.cli.app import app
    from kernelformer.cli.common import warn

    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    app()
