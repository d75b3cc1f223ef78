"""Cache for `generate` that holds states of constant size instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kernelformer.attention import State
from kernelformer.attention.state import storage_bytes

_OWNER = "_kernelformer_layer"  # attribute of keys on their way from the cache to the attention


class StateLayer(CacheLayerMixin):
    """State that one layer keeps between tokens.

    A converted model hands its keys and values to `update`, which gives them back marked, so that the attention that
    gets them finds this layer again (`cached_in`). With ``cross`` the keys are those of a context.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cross: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cross = cross
        self.state: State | None = None  # of self-attention
        self.memory: State | None = None  # what cross-attention keeps of the context
        self.waits = False  # for an attention to fetch what `update` marked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first token makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return these keys and values alone, marked as this layer's."""
        self.check()
        self.waits = True
        return self._mark(key_states), value_states

    def check(self) -> None:
        """Raise if keys that were marked before have not reached an attention that knows the mark."""
        if self.waits:
            raise ValueError(
                "a StateCache is for kernelformer's models and converted ones: the attention of this model did not "
                "take its state. Use a DynamicCache, or convert the model."
            )

    def _mark(self, keys: Tensor) -> Tensor:
        keys = keys.view_as(keys)  # the mark must not stay on the caller's tensor
        setattr(keys, _OWNER, self)
        return keys

    def remember(self, memory: State, keys: Tensor) -> None:
        """Keep a context as its state; models that ask for the keys get empty ones."""
        self.memory = memory
        self.keys = self._mark(keys.new_empty(*keys.shape[:2], 0, keys.shape[3]))  # a slice would keep all of them
        self.values = self.keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens so far."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens taken in."""
        kept = self.memory if self.cross else self.state
        return 0 if kept is None else kept.length

    def get_max_length(self) -> int:
        """Longest sequence; -1: there is no limit."""
        return -1

    def offload(self) -> None:
        """Do nothing: states are small and stay where they are."""

    def prefetch(self) -> None:
        """Do nothing: states are small and stay where they are."""

    def reset(self) -> None:
        """Forget everything."""
        self.state = self.memory = None
        self.waits = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose samples by their index, as beam search does between steps."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
        if self.memory is not None:
            self.memory = self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Choose samples by their index."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample several times."""
        kept = self.state if self.state is not None else self.memory
        if kept is not None:
            self.reorder_cache(torch.arange(kept.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raise: a sum cannot forget its last tokens."""
        raise ValueError(
            f"a state cannot go back by {tokens_to_remove} tokens; keep the state before them (states never change), "
            f"or generate without assistance."
        )


def cached_in(keys: Tensor) -> StateLayer | None:
    """Find the layer of a cache that these keys come from; None where there is no `StateCache`."""
    layer: StateLayer | None = getattr(keys, _OWNER, None)
    if layer is not None:
        layer.waits = False
    return layer


def _tensors(layer: Any) -> list[Tensor]:
    """All tensors that a layer of a cache keeps."""
    if isinstance(layer, StateLayer):
        return [tensor for state in (layer.state, layer.memory) if state is not None for tensor in state.tensors]
    kept = [x for y in vars(layer).values() for x in (y if isinstance(y, list) else [y])]
    return [x for x in kept if isinstance(x, Tensor)]


class StateCache(Cache):
    """Cache of the states of all layers of a model, as `generate` carries them from token to token.

    Args:
        num_layers: of the decoder; None: as many as turn up.
        cross: of cross-attention, in the second half of transformers' `EncoderDecoderCache`.
        layers: the first ones, where some are no `StateLayer`: attentions that were not replaced keep keys and values
            in a layer of transformers.
    """

    layers: list[Any]

    def __init__(
        self, num_layers: int | None = None, *, cross: bool = False, layers: Sequence[Any] | None = None
    ) -> None:
        self.cross = cross
        given = list(layers or ())
        super().__init__(layers=[*given, *(StateLayer(cross) for _ in range((num_layers or 0) - len(given)))])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take keys and values of a converted model, see `StateLayer.update`."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.check()
        while len(self.layers) <= layer_idx:
            self.layers.append(StateLayer(self.cross))
        layer = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if layer.is_sliding and key_states.shape[2] > 1:  # it keeps a view, and with it all keys until the next token
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Raise before any layer has changed: a state cannot go back."""
        StateLayer().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Memory that all states, keys and values keep, in bytes, see `storage_bytes`.

        Windows keep room for as many tokens again from the first single token on, so that it grows once after a prompt.
        """
        return storage_bytes(tensor for layer in self.layers for tensor in _tensors(layer))

    @property
    def is_initialized(self) -> bool:
        """True if any token was taken in."""
        return self.get_seq_length() > 0
