"""Items of evidence by name, in the order in which the queue runs them."""

from __future__ import annotations

from collections.abc import Sequence

from kernelformer.errors import unknown
from kernelformer_lab.evidence.base import Item
from kernelformer_lab.evidence.items.beyond import RECALL
from kernelformer_lab.evidence.items.learned_kernels import (
    EIGENVALUES,
    GRADIENTS,
    REVIEW_SENTENCES,
    SNLI,
    SPARSITY,
    VARIANCE,
)
from kernelformer_lab.evidence.items.performer import PROTEINS, REDRAWING, TRANSFER
from kernelformer_lab.evidence.items.relative import CIFAR, ENWIK8, FEATURES, MAPS_ITEM, NORMALIZED, TRANSLATION
from kernelformer_lab.evidence.items.skyformer import IMAGE, LISTOPS, PATHFINDER, RETRIEVAL, STABILITY, TEXT

# What says most for its time comes first.
ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        VARIANCE,
        EIGENVALUES,
        STABILITY,
        ENWIK8,
        SPARSITY,
        GRADIENTS,
        SNLI,
        REVIEW_SENTENCES,
        RECALL,
        MAPS_ITEM,
        FEATURES,
        LISTOPS,
        REDRAWING,
        TRANSFER,
        CIFAR,
        IMAGE,
        RETRIEVAL,
        NORMALIZED,
        PROTEINS,
        PATHFINDER,
        TEXT,
        TRANSLATION,
    )
}


def find_items(names: Sequence[str]) -> list[Item]:
    """Items by their names; all of them where none is named."""
    for name in names:
        if name not in ITEMS:
            raise unknown("item", name, ITEMS)
    return [ITEMS[name] for name in names or ITEMS]
