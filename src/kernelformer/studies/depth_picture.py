"""The picture of `studies.depth`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelformer.studies.depth import Result

TITLES = {
    "own": "each attention by itself",
    "hidden": "hidden states, layers 1 to n approximated",
    "output": "last hidden states, layers 1 to n approximated",
}


def picture(result: Result, path: Path) -> None:
    """Draw relative errors over the layers, means and standard deviations over draws, a panel for each of `TITLES`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TITLES), figsize=(14, 5.2), sharey=True, constrained_layout=True)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for index, method in enumerate(result.methods):
            means, deviations = (x if name == "own" else x[1:] for x in result.spread(method, name))  # without n = 0
            numbers = range(1, 1 + len(means))
            line = "--" if "window" in method else "-"
            axis.errorbar(
                numbers,
                means,
                yerr=deviations,
                color=f"C{index % 10}",
                linestyle=line,
                marker="o",
                markersize=4,
                capsize=2,
                label=method,
            )
        axis.set_title(title)
        axis.set_xlabel("layer n")
        axis.axhline(1, color="grey", linestyle=":", linewidth=1)
        axis.grid(True, alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("relative error")
    axes[0].set_yscale("log")  # trigonometric features are several times as far off as all others
    axes[0].yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
