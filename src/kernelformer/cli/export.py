"""``kernelformer export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelformer.cli.common import Threads, console, following, plain_errors, use_threads
from kernelformer.cli.options import takes
from kernelformer.conversion.settings import ExportSettings


@takes(ExportSettings)
def export(
    settings: ExportSettings,
    folder: Annotated[Path, typer.Argument(help="of a run, of a saved model, or of a converted one")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make")],
    threads: Threads = None,
) -> None:
    """Write a model as ONNX, compared with torch, with a script that runs it without torch."""
    use_threads(threads)
    with plain_errors():
        from kernelformer.export.job import export_folder
        from kernelformer.formatting import human_bytes

        with following() as job:
            result = export_folder(folder, out, settings, log=job.log)
        files = ", ".join(f"{name} ({human_bytes(size)})" for name, size in result.files.items() if ".onnx" in name)
        console.print(f"{result.kind} as ONNX, opset {result.opset}: {files}")
        found = result.differences
        steps = "" if found.steps is None else f", {settings.steps} steps {found.steps:.1e}"
        console.print(
            f"largest difference from torch, over the largest output: sequences {found.sequences:.1e}, padded "
            f"{found.padded:.1e}{steps}",
        )
        if result.grows:
            layers = ", ".join(map(str, result.grows))
            console.print(f"note: the state of layers {layers} keeps every key, and grows with the text")
        name = next(x for x in result.files if x in ("generate.py", "run.py"))
        console.print(f"without torch: python {result.folder / name}")
