"""The state of a stream, and a map's tensors between its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from kernelformer.attention.positive import EMPTY
from kernelformer.contract import PositiveSpec, Spec
from kernelformer.formatting import human_bytes

MadeBy = tuple[tuple[str, object], ...]


def state_shapes(spec: Spec, features: int, width: int) -> list[tuple[int, int]]:
    """The last two sizes of a state's tensors: log_mass and mean, or log_scale, kv, k_sum and norm_sum."""
    if isinstance(spec, PositiveSpec):
        return [(features, 1), (features, width)]
    return [(1, 1), (features, width), (features, 1), (1, 1)]


def empty_sums(spec: Spec, lead: Sequence[int], features: int, width: int, like: Tensor) -> list[Tensor]:
    """The tensors of the state of no keys, (*lead, ...) each."""
    log, *sums = state_shapes(spec, features, width)
    return [like.new_full((*lead, *log), EMPTY), *(like.new_zeros(*lead, *x) for x in sums)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that tensors keep, in bytes: all of what they are views of, and what they share once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A map's tensors for the calls of a stream, and the weights that they were made from.

    Weights are compared by identity, memory and version counter, which counts all writes but those through ``.data``.
    """

    tensors: tuple[Tensor, ...]
    weights: tuple[tuple[Mapping[str, object], str, object, tuple[int, int] | None], ...]
    how: tuple[object, ...]  # what else they depend on

    @staticmethod
    def of(tensors: Sequence[Tensor], module: nn.Module, how: tuple[object, ...]) -> Prepared:
        """Record that tensors were made from the parameters and floating point buffers of a module."""
        weights: list[tuple[Mapping[str, object], str, object, tuple[int, int] | None]] = []
        modules = [module]
        for one in modules:  # grows on the way
            for held in (one._parameters, one._buffers):
                weights += [(held, n, x, mark(x)) for n, x in held.items() if x is not None and x.is_floating_point()]
            parts = [(n, x) for n, x in one._modules.items() if x is not None]
            weights += [(one._modules, n, x, None) for n, x in parts]
            modules += [x for _, x in parts]
        return Prepared(tuple(tensors), tuple(weights), how)

    def made_from(self, how: tuple[object, ...]) -> bool:
        """Return True if the weights are still in their places, unwritten since, and all else is the same too."""
        if self.how != how:
            return False
        for held, name, x, known in self.weights:
            if held.get(name) is not x or (known is not None and mark(cast(Tensor, x)) != known):
                return False
        return True


def mark(x: Tensor) -> tuple[int, int]:
    """Version and memory of a tensor; inference tensors have no version counter."""
    return 0 if x.is_inference() else x._version, x.data_ptr()


@dataclass(frozen=True, eq=False)
class State:
    """State of an attention core after the keys and values so far.

    Immutable: a step returns a new state, so an old one can be stepped from again. Picklable, and small: M (E + 1)
    numbers per key head.

    Args:
        tensors: (B, G, ...) each; their meaning is the method's own.
        length: number of tokens taken in, padding included.
        made_by: the core that made it, by its settings and its draw: another one cannot go on from it. Learned weights
            are not looked at: after they have changed, start anew.
        fits: sizes and types of inputs that are known to go with it, so that a stream is checked once.
        near: the buffers that its last keys lie in, where a stream writes them in place.
        last_id: (B), the segment that each sample is in, of a stream of packed sequences; the tensors hold no other.
    """

    tensors: tuple[Tensor, ...]
    length: int
    made_by: MadeBy
    fits: tuple[object, ...] = ()
    near: object | None = None
    last_id: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "fits": (), "near": None}

    def __repr__(self) -> str:
        """One line: the method, how many tokens, and the tensors' shapes, size, types and devices."""
        methods = " and ".join(str(x) for name, x in self.made_by if name == "method")
        shapes = ", ".join(str(tuple(x.shape)) for x in self.tensors)
        kinds = [str(x.dtype).removeprefix("torch.") for x in self.tensors] + [str(x.device) for x in self.tensors]
        said = [methods or "unknown method", f"{self.length} tokens", f"shapes {shapes or 'none'}"]
        return f"{type(self).__name__}({', '.join([*said, human_bytes(self.nbytes), *dict.fromkeys(kinds)])})"

    @property
    def batch(self) -> int:
        """The number of samples, B."""
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that it keeps, in bytes, see `storage_bytes`."""
        return storage_bytes(self.tensors)

    def to(self, device: torch.device | str) -> State:
        """The same on another device."""
        last_id = None if self.last_id is None else self.last_id.to(device)
        return replace(self, tensors=tuple(x.to(device) for x in self.tensors), fits=(), last_id=last_id)

    def detach(self) -> State:
        """The same, cut off from the graph: gradients of later tokens stop here."""
        if not any(x.requires_grad for x in self.tensors):
            return self
        return replace(self, tensors=tuple(x.detach() for x in self.tensors))

    def reorder(self, index: Tensor | Sequence[int]) -> State:
        """Samples by their index, repeats allowed: what beam search does between steps."""
        order = torch.as_tensor(index)
        order = order if order.numel() else order.long()  # torch takes [] for floats
        tensors = tuple(x.index_select(0, order.to(x.device)) for x in self.tensors)
        last_id = None if self.last_id is None else self.last_id[order.to(self.last_id.device)]
        return replace(self, tensors=tensors, fits=(), last_id=last_id)

    def fill(self, samples: Tensor, values: Sequence[float]) -> State:
        """The same with ``values[n]`` in all of tensor n of some samples, (B) bool."""
        pairs = zip(self.tensors, values, strict=True)
        return replace(self, tensors=tuple(x.masked_fill(samples.view(-1, *[1] * (x.dim() - 1)), y) for x, y in pairs))
