"""The picture of `studies.amino_acids`: BLOSUM62 and the similarities of each model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernelformer.analysis.substitutions import AMINO_ACIDS, blosum62, pairs_of

if TYPE_CHECKING:
    from kernelformer.studies.amino_acids import Result

GROUPS = "AVILMCFWYHKRDENQSTGP"  # by their chemistry, so that similar ones stand together
COLUMNS = 4


def picture(result: Result, path: Path) -> None:
    """Draw heat maps of all matrices, diagonals left out, each with colours from its smallest to its largest pair."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    order = [AMINO_ACIDS.index(x) for x in GROUPS]
    panels = [("BLOSUM62", blosum62())]
    for row in result.rows:
        title = f"{row.model}\nPearson {row.pearson:.3f} ± {row.standard_error:.3f}"
        panels.append((title, torch.tensor(row.similarity, dtype=torch.float64)))
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 4.3 * lines), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (title, matrix) in zip(axes.flat, panels, strict=False):
        axis.set_axis_on()
        shown = matrix[order][:, order].fill_diagonal_(math.nan)
        values = pairs_of(matrix)
        image = axis.imshow(shown.numpy(), cmap="Blues", vmin=float(values.min()), vmax=float(values.max()))
        axis.set_title(title, fontsize="medium")
        axis.set_xticks(range(len(GROUPS)), list(GROUPS), fontsize="x-small")
        axis.set_yticks(range(len(GROUPS)), list(GROUPS), fontsize="x-small")
        figure.colorbar(image, ax=axis, shrink=0.75)
    figure.savefig(path, dpi=130)
    plt.close(figure)
