"""The cache of `generate`: the states of a model's layers, whose size does not grow with the context."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kernelformer.attention import State


class StateLayer(CacheLayerMixin):
    """What one layer keeps between tokens.

    Attributes:
        state: of self-attention, None before the first token.
        memory: what cross-attention keeps of the context; None where there is none.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: State | None = None
        self.memory: State | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first token makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Keys and values do not come here."""
        raise ValueError("a StateCache keeps states of kernelformer's layers, not keys and values; use a DynamicCache.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens so far."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens taken in."""
        return 0 if self.state is None else self.state.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def offload(self) -> None:
        """States are small: they stay where they are."""

    def prefetch(self) -> None:
        """States are small: they stay where they are."""

    def reset(self) -> None:
        """Forget everything."""
        self.state = self.memory = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Samples by their index: what beam search does between steps."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
        if self.memory is not None:
            self.memory = self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sample several times."""
        kept = self.state if self.state is not None else self.memory
        if kept is not None:
            self.reorder_cache(torch.arange(kept.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """A sum cannot forget its last tokens."""
        raise ValueError(
            f"a state cannot go back by {tokens_to_remove} tokens; keep the state before them (states never change), "
            f"or generate without assistance."
        )


class StateCache(Cache):
    """The states of all layers of a model, as `generate` carries them from token to token.

    Args:
        num_layers: of the decoder.
    """

    layers: list[StateLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Size of all states in bytes."""
        kept = (x for layer in self.layers for x in (layer.state, layer.memory))
        return sum(x.nbytes for x in kept if x is not None)

    @property
    def is_initialized(self) -> bool:
        """Whether any token was taken in."""
        return self.get_seq_length() > 0
