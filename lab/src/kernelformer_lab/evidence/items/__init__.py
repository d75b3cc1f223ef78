"""Items of evidence by name, in the order in which the queue runs them."""

from __future__ import annotations

from collections.abc import Sequence

from kernelformer.errors import unknown
from kernelformer_lab.evidence.base import Item
from kernelformer_lab.evidence.items import beyond, learned_kernels, performer, relative, skyformer

# What says most for its time comes first.
_ORDER = (
    "estimators instability variance eigenvalues stability enwik8 scratch learned maps features transfer recall snli "
    "sentences sparsity gradients listops redrawing cifar image retrieval normalized proteins pathfinder text "
    "translation rates listops-long functions deep pathfinder-long"
)
_EVERY = {
    x.name: x
    for module in (beyond, learned_kernels, performer, relative, skyformer)
    for x in vars(module).values()
    if isinstance(x, Item)
}
ITEMS: dict[str, Item] = {name: _EVERY[name] for name in _ORDER.split()}


def find_items(names: Sequence[str]) -> list[Item]:
    """Items by their names; all of them where none is named."""
    for name in names:
        if name not in ITEMS:
            raise unknown("item", name, ITEMS)
    return [ITEMS[name] for name in names or ITEMS]
