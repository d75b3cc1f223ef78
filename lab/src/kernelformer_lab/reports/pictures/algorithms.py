"""Pictures of how linear attention takes its sums: the order of the products, and the state of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernelformer.modules import build_attention
from kernelformer_lab.reports.pictures.drawing import EXACT, INK, LINEAR, THIRD, bare, box, figure
from kernelformer_lab.reports.tables.records import Records

LENGTHS = (256, 1024, 4096, 16384)
HEADS, DIM, FEATURES = 8, 64, 256


def products(records: Records, path: Path) -> None:
    """The same product in two orders: through a matrix of L x L, or through one of m x d."""
    about = "(phi(Q) phi(K)^T) V needs an L x L matrix; phi(Q) (phi(K)^T V) needs one of m x d, whatever the length."
    with figure(path, about, (11, 3.2)) as drawn:
        left, right = drawn.subplots(1, 2)
        bare(left, 10.5, 5.6, "weights first: L x L numbers")
        box(left, (0, 0.5), (4.6, 4.6), "φ(Q) φ(K)ᵀ\n\nL x L", EXACT)
        left.text(5.1, 2.8, "·", fontsize=20, ha="center", va="center")
        box(left, (5.6, 0.5), (1.1, 4.6), "V\n\nL x d", THIRD)
        left.text(7.2, 2.8, "=", fontsize=16, ha="center", va="center")
        box(left, (7.7, 0.5), (1.1, 4.6), "out\n\nL x d", INK)
        bare(right, 10.5, 5.6, "keys and values first: m x d numbers")
        box(right, (0, 0.5), (1.5, 4.6), "φ(Q)\n\nL x m", LINEAR)
        right.text(2.0, 2.8, "·", fontsize=20, ha="center", va="center")
        box(right, (2.5, 2.0), (1.5, 1.5), "m x d", THIRD)
        right.text(4.5, 2.8, "=", fontsize=16, ha="center", va="center")
        box(right, (5.0, 0.5), (1.1, 4.6), "out\n\nL x d", INK)
        right.text(6.9, 2.8, "with", ha="center", va="center")
        box(right, (7.6, 2.0), (1.2, 1.5), "φ(K)ᵀ V", THIRD)
        right.text(8.2, 1.2, "one pass over\nkeys and values", ha="center", va="center", fontsize=9)


@torch.no_grad()
def kept_bytes() -> dict[str, list[int]]:
    """Bytes that a stream keeps after so many tokens, by the states of the library itself."""
    sizes, one = {}, torch.zeros(1, HEADS, 1, DIM)
    for method in ("softmax", "favor+"):
        core = build_attention(method, head_dim=DIM, num_heads=HEADS, num_features=FEATURES)
        _, state = core.step(one, one, one, None)
        # The state of exact attention is its keys and values, each token as large as the first.
        sizes[method] = [state.nbytes * (n if method == "softmax" else 1) for n in LENGTHS]
    return sizes


def _chunks(axis: Any) -> None:
    bare(axis, 10, 5.2, "a long text in chunks")
    for place in range(3):
        x = 0.2 + 3.3 * place
        box(axis, (x, 2.7), (2.2, 1.1), f"tokens\nchunk {place + 1}", LINEAR)
        box(axis, (x + 0.5, 0.6), (1.2, 1.1), "state", THIRD)
        arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.6}
        axis.annotate("", (x + 1.1, 1.7), (x + 1.1, 2.7), arrowprops=arrow)
        if place < 2:
            axis.annotate("", (x + 3.8, 1.15), (x + 1.7, 1.15), arrowprops=arrow)
            axis.annotate("", (x + 3.5, 2.7), (x + 1.7, 1.6), arrowprops=arrow)


def stream(records: Records, path: Path) -> None:
    """The state that goes from chunk to chunk, and what a stream keeps by its length."""
    sizes = kept_bytes()
    said = "; ".join(f"{name}: {', '.join(map(str, row))}" for name, row in sizes.items())
    about = f"Bytes kept after {', '.join(map(str, LENGTHS))} tokens, 8 heads of 64, 256 features. {said}."
    with figure(path, about, (11, 3.4)) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=(1.3, 1))
        _chunks(left)
        for (name, row), colour in zip(sizes.items(), (EXACT, LINEAR), strict=True):
            right.plot(LENGTHS, [x / 2**20 for x in row], marker="o", color=colour, label=name)
        right.set(xscale="log", yscale="log", xlabel="tokens so far", title="kept for the next token, MiB")
        right.set_xticks(LENGTHS, [str(x) for x in LENGTHS])
        right.minorticks_off()
        right.grid()
        right.legend()
