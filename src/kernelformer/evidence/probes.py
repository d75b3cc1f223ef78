"""What is measured on a trained model besides its score, by name: functions from the folder of a run to plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelformer.studies.redraws_measure import eigenvalue_statistics, gradient_statistics, redraw_statistics


def redraws(folder: Path) -> dict[str, Any]:
    """How much a classifier depends on the draw of its features: 100 draws on 200 validation samples."""
    measured = redraw_statistics(folder)
    flat = {name: x["mean"] if isinstance(x, Mapping) else x for name, x in measured["figures"].items()}
    errors = {f"{name}_error": x["error"] for name, x in measured["figures"].items() if isinstance(x, Mapping)}
    return {
        **flat,
        **errors,
        "deterministic": measured["deterministic"],
        "own_accuracy": measured["own_draw"]["accuracy"],
    }


def eigenvalues(folder: Path) -> dict[str, Any]:
    """Mean, largest and smallest eigenvalues of learned covariances at the start and at the end of training."""
    measured = eigenvalue_statistics(folder)
    start, end = measured["start"], measured["end"]
    if start is None or end is None:
        return {}
    both = {
        f"{when}_{name}": side[name]
        for when, side in (("start", start), ("end", end))
        for name in ("minimum", "maximum", "mean")
    }
    return {**both, "change": end["mean"] / start["mean"], "heads": end["heads"]}


def gradients(folder: Path) -> dict[str, Any]:
    """Gradients at the classifier over redraws, at the checkpoints that are left and at the end."""
    rows = gradient_statistics(folder)
    return {"rows": rows, **rows[-1]}


PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "redraws": redraws,
    "eigenvalues": eigenvalues,
    "gradients": gradients,
}
