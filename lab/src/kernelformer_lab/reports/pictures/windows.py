"""The picture of near and far: which keys a query attends to exactly, and which by the kernel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kernelformer.modules import build_attention
from kernelformer_lab.reports.pictures.drawing import EXACT, LINEAR, figure
from kernelformer_lab.reports.tables.records import Records

LENGTH, WINDOW, SINKS = 24, 5, 2


@torch.no_grad()
def parts(causal: bool) -> Tensor:
    """For each query and key (L, S): 0 not seen, 1 by the kernel, 2 exactly; read off the library's own weights."""
    q = k = torch.zeros(1, 1, LENGTH, 8)  # all logits are 0: a weight is positive where a key is seen
    options = {"head_dim": 8, "num_heads": 1, "window": WINDOW, "sinks": SINKS}
    near = build_attention("local", **options).attention_matrix(q, k, is_causal=causal) > 0
    seen = build_attention("favor+", num_features=16, **options).attention_matrix(q, k, is_causal=causal) > 0
    return (seen.int() + near.int())[0, 0]


def near_and_far(records: Records, path: Path) -> None:
    """A window and sinks, causal and bidirectional."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    about = (
        f"Keys that a query sees exactly (window {WINDOW}, {SINKS} sinks) and by the kernel, causal and bidirectional."
    )
    with figure(path, about, (9, 4.4)) as drawn:
        colours = ListedColormap(["#00000000", f"{LINEAR}70", EXACT])
        for axis, causal in zip(drawn.subplots(1, 2), (True, False), strict=True):
            cells = axis.pcolormesh(parts(causal).numpy(), cmap=colours, vmin=0, vmax=2, edgecolors="#7d859030")
            cells.set_rasterized(True)
            axis.invert_yaxis()
            axis.set_aspect("equal")
            axis.set(
                xticks=[], yticks=[], xlabel="keys", ylabel="queries", title="causal" if causal else "bidirectional"
            )
        shown = {"exactly, by softmax": EXACT, "by the kernel": f"{LINEAR}70"}
        patches = [Patch(facecolor=colour, label=name) for name, colour in shown.items()]
        drawn.legend(handles=patches, loc="outside lower center", ncols=2)
