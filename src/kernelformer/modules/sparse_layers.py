"""Sparse attention of other papers as transformers has it: names and options, so that strings can ask for it.

These are whole layers of transformers, for self-attention in the encoders of this library, so that they train and are
measured with everything else alike; `models.sparse_layers` builds them. They are no methods: there is no core of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelformer.errors import unknown
from kernelformer.modules.papers import BIGBIRD, INFORMER, LONGFORMER, REFORMER, Paper


@dataclass(frozen=True)
class SparseLayer:
    """What the library knows about a sparse layer without importing transformers.

    Args:
        about: what it is, in one line.
        paper: where it was published.
        options: names that a string may give; the class that builds the layer explains them and has their defaults.
    """

    about: str
    paper: Paper
    options: tuple[str, ...]


SPARSE_LAYERS: dict[str, SparseLayer] = {
    "bigbird": SparseLayer(
        "blocks nearby, random ones, and the first and the last one",
        BIGBIRD,
        ("block_size", "num_random_blocks", "seed"),
    ),
    "longformer": SparseLayer("a sliding window, and first tokens that see all", LONGFORMER, ("window", "num_global")),
    "reformer": SparseLayer(
        "tokens of one bucket of a hash; queries are the keys", REFORMER, ("chunk_length", "num_hashes", "seed")
    ),
    "informer": SparseLayer(
        "the queries that stand out attend to all, the others take the mean", INFORMER, ("sampling_factor", "seed")
    ),
}


def check_sparse_options(layer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a sparse layer, if it has all of them.

    Raises:
        ValueError: an unknown option, with the known ones.
    """
    for name in options:
        if name not in SPARSE_LAYERS[layer].options:
            raise unknown(f"option for the layer {layer!r} of transformers,", name, SPARSE_LAYERS[layer].options)
    return dict(options)


def no_core(layer: str) -> ValueError:
    """The error for a sparse layer where only a method can stand."""
    return ValueError(
        f"{layer!r} is a whole layer of transformers, for the self-attention of encoders of this library "
        f"(KernelformerConfig, train, compare, study encoder), and not a method; use one of list_methods() here, such "
        f"as 'favor+'."
    )
