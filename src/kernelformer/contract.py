"""The contract between feature maps and attention algorithms.

Whole mapped tensors do not fit (L = 65536, H = 8, M = 256: 512 MiB each), so a fast algorithm never sees them. A map
hands over a `Spec`, an immutable description without tensors, and the tensors that it depends on (frequencies, later
landmarks). An algorithm binds the two once per call and then maps one chunk of queries or keys at a time into a buffer
that it reuses; for gradients it maps the chunk again and multiplies the gradient of the features by the Jacobian
(``vjp``).

Two families:

- positive maps give ``log phi``, so that the algorithms can stabilize them exactly (`PositiveSpec`);
- signed maps give ``phi`` and, where its size varies exponentially, one log factor per row (`SignedSpec`).

A spec must say the formula of its map, which is called on every chunk; chunks made for speed (`bind`) are an addition.

Letters: B batch, H query heads, G key heads, N a block of B x G rows, L queries, S keys, C rows of a chunk,
D head dimension, M features, E value dimension.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

Role = Literal["query", "key"]
Family = Literal["positive", "signed"]
Formula = Callable[[Tensor, Sequence[Tensor], Role], Tensor]
VJP = Callable[[Tensor], tuple[Tensor, ...]]


class Workspace:
    """Named buffers, allocated once per call and reused by every chunk: fresh ones would cost more than the work."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._flat: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, name: str, *size: int) -> Tensor:
        """Return a contiguous tensor of this size over the buffer of this name; its contents are undefined."""
        view = self._views.get((name, size))
        if view is None:
            count, flat = math.prod(size), self._flat.get(name)
            if flat is None or flat.numel() < count:
                flat = self._flat[name] = torch.empty(count, dtype=self.dtype, device=self.device)
                self._views.clear()  # some are of the buffer before
            view = self._views[name, size] = flat[:count].view(size)
        return view


class PositiveChunks:
    """A positive map bound to its tensors, evaluated chunk by chunk: by its formula, differentiated by `torch.func`.

    A backward pass maps a chunk and then asks for its gradient, so that once a gradient has been asked for, the graph
    of the last evaluation is kept until it is used: the formula is evaluated once there, not twice. Subclasses have
    quicker products.

    The formula takes x (1, N, C, D), tensors (1, N, ...) each, and the role, and gives ``log phi`` (1, N, C, M). With
    ``learn`` the gradients of the tensors, (N, ...) each, are summed up, in ``grads`` or from zeros.
    """

    def __init__(self, formula: Formula, tensors: Sequence[Tensor], learn: bool, grads: Sequence[Tensor] = ()) -> None:
        self.formula, self.tensors, self.learn = formula, list(tensors), learn
        if learn and not grads:
            grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
        self.grads = list(grads)
        self._graphs: dict[Role, tuple[Tensor, Tensor, VJP]] | None = None

    def _outputs(self, role: Role, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.formula(x.unsqueeze(0), [t.unsqueeze(0) for t in tensors], role)[0]

    def _evaluate(self, x: Tensor, role: Role) -> Tensor:
        """Log features (N, C, M) at x (N, C, D); not to be overwritten."""
        if self._graphs is None:
            return self._outputs(role, x, *self.tensors)
        self._graphs[role] = x, *self._linearize(x, role)
        return self._graphs[role][1]

    def _linearize(self, x: Tensor, role: Role) -> tuple[Tensor, VJP]:
        learned, fixed = (self.tensors, ()) if self.learn else ((), self.tensors)
        # torch.func differentiates inside of a custom operator too, where autograd is off.
        y, vjp = torch.func.vjp(lambda x, *t: self._outputs(role, x, *t, *fixed), x, *learned)[:2]
        return y, vjp

    def _vjp(self, x: Tensor, role: Role, grad: Tensor, out: Tensor) -> Tensor:
        """Gradient at x, written into out, from that of the log features."""
        self._graphs = self._graphs or {}
        known, _, vjp = self._graphs.pop(role, (None, None, None))
        if known is not x or vjp is None:
            vjp = self._linearize(x, role)[1]
        dx, *others = vjp(grad)
        for total, grad in zip(self.grads, others, strict=True):
            total += grad
        return out.copy_(dx)

    def tensor_grads(self) -> list[Tensor]:
        """Return the gradients of the bound tensors, (N, ...) each, summed over all vector-Jacobian products so far."""
        return self.grads

    def queries(self, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Compute ``out = log phi(x) + shift``: x (N, C, D), shift (N, 1, M), out (N, C, M), which is returned.

        Under normalization a summand that is the same for all features of a row may be left out: it cancels.
        """
        return torch.add(self._evaluate(x, "query"), shift, out=out)

    def keys(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute ``out = log phi(x)^T``: x (N, C, D), out (N, M, C), which is returned."""
        return out.copy_(self._evaluate(x, "key").transpose(1, 2))

    def key_rows(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute `keys` row by row, out (N, C, M)."""
        return out.copy_(self._evaluate(x, "key"))

    def vjp_queries(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Gradient of `queries` at x, grad (N, C, M) -> out (N, C, D); adds to `tensor_grads` if bound to learn."""
        return self._vjp(x, "query", grad, out)

    def vjp_keys(self, x: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """Gradient of `keys` at x, grad (N, M, C) -> out (N, C, D); adds to `tensor_grads` if bound to learn."""
        return self._vjp(x, "key", grad.transpose(1, 2).contiguous(), out)

    def at(self, row: int, head: int = 0) -> PositiveChunks:
        """Return the same map for one row of N; gradients of its tensors are added to those of the whole.

        For maps that tell query heads apart, ``head`` is the one of the row's group whose queries are meant.
        """
        tensors, grads = ([x[row : row + 1] for x in some] for some in (self.tensors, self.grads))
        return PositiveChunks(self.formula, tensors, self.learn, grads)


@dataclass(frozen=True)
class Spec(ABC):
    """An immutable, tensor-free description of a map; equal specs are the same map for the same tensors."""

    family: ClassVar[Family]

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """Number of features M; tensors (B or 1, H or 1, ...) as the map provides them.

        By default the width of what the formula gives for one row of zeros.
        """
        like = tensors[0] if tensors else torch.empty(0)
        return self._example(like.new_zeros(1, 1, 1, head_dim), [x[:1, :1] for x in tensors]).shape[-1]

    @abstractmethod
    def _example(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Features of x, to count them."""


@dataclass(frozen=True)
class PositiveSpec(Spec):
    """A map with positive features, defined by its formula `log_features`."""

    family: ClassVar[Family] = "positive"
    tied: ClassVar[bool] = True  # whether queries and keys have the same map, so that one product can serve both

    @abstractmethod
    def log_features(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Definition: ``log phi(sqrt(scale) x)``, (B, H, C, D) -> (B, H, C, M), by differentiable operations."""

    def log_shares(self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role) -> Tensor:
        """Log features up to what cancels under normalization: a summand per query, and one summand for all keys.

        The chunks bound under normalization must leave out the same of the keys, for a state may go from one to the
        other.
        """
        return self.log_features(x, tensors, scale, role)

    def bind(self, tensors: Sequence[Tensor], scale: float, normalize: bool, learn: bool) -> PositiveChunks:
        """Bind the map to tensors (N, ...) in the dtype of the arithmetic; by default through the formula itself."""
        formula = self.log_shares if normalize else self.log_features
        return PositiveChunks(lambda x, given, role: formula(x, given, scale, role), tensors, learn)

    def _example(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return self.log_features(x, tensors, 1.0, "key")


@dataclass(frozen=True)
class SignedSpec(Spec):
    """A map with signed features, defined by its formula `features`."""

    family: ClassVar[Family] = "signed"

    @property
    def nonnegative(self) -> bool:
        """True if no feature can be negative, so that no guard against a vanishing denominator is needed."""
        return False

    @property
    def guarded(self) -> bool:
        """True if the guard keeps a denominator from vanishing; without it, a row with denominator zero is zero."""
        return not self.nonnegative

    @property
    def has_factor(self) -> bool:
        """True if keys carry a log factor."""
        return False

    def length(self, normalize: bool) -> float | None:
        """Length ``|phi(x)|`` that the guard assumes, up to the log factor; None: the guard measures it."""
        return None

    @abstractmethod
    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Definition: values (B, H, C, M) and log factors (B, H, C, 1) or None, by differentiable operations.

        Under normalization a factor that all features of all rows share may be left out, if the chunks bound under
        normalization leave it out too, for a state may go from one to the other.
        """

    def _example(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return self.features(x, tensors, 1.0, "key")[0]


# Compiled graphs carry tensors, numbers and strings only: a spec travels as its repr, which says all of it.
_SPECS: dict[str, Spec] = {}


def intern_formula(spec: Spec) -> str:
    """Store a spec under a string, its spec_id, from which `lookup` returns it.

    Specs that differ but print alike, as those of a class that was defined twice, are numbered.
    """
    spec_id, count = sys.intern(repr(spec)), 1
    while _SPECS.setdefault(spec_id, spec) != spec:
        count += 1
        spec_id = f"{spec!r} #{count}"
    return spec_id


def lookup(spec_id: str) -> Spec:
    """Return the spec stored under ``spec_id``."""
    return _SPECS[spec_id]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of arithmetic and states, at least float32: float16 sums lose a fifth of the result at L = 1024."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype of small, long or badly conditioned sums: float64, where the device has it."""
    return x.dtype if x.device.type == "mps" else torch.float64


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable autocast, so that sums keep their precision; only where it is on, since entering costs time."""
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)  # the meta device has none
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def transforms_active() -> bool:
    """True within transforms of `torch.func` and forward-mode AD, for which operators have no rules."""
    if torch.compiler.is_compiling():
        no_tangents()
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def no_tangents(**inputs: Tensor | Sequence[Tensor] | None) -> None:
    """Raise an error for forward-mode tangents: operators have no formula for them, and torch would drop them silently.

    A compiled graph cannot see them, so that it is refused within any level of forward mode; where a break is allowed,
    what follows runs, and is checked, without it.
    """
    if forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling():
        raise ValueError("a compiled graph cannot see forward-mode tangents, which are not supported; call it outside.")
    for name, given in inputs.items():
        for x in () if given is None else (given,) if isinstance(given, Tensor) else given:
            while torch._C._functorch.is_batchedtensor(x):  # vmap cannot ask for a tangent, what it wraps can
                x = torch._C._functorch.get_unwrapped(x)
            if forward_ad.unpack_dual(x).tangent is not None:
                raise ValueError(
                    f"{name.replace('_', ' ')} carries a forward-mode tangent, which is not supported; use reverse "
                    f"mode, backward() or torch.autograd.grad, instead of jvp, jacfwd or dual_level."
                )


def within_transforms(method: str, attend: Callable[[Any], tuple[Tensor, Any]], call: Any) -> tuple[Tensor, Any]:
    """Attend; if the operators of a method have no rule for a transform of torch.func, name an alternative."""
    try:
        return attend(call)
    except RuntimeError as problem:
        raise RuntimeError(
            f"{method!r} does not support the transform of torch.func (grad, vjp, jacrev, vmap) that it is called in; "
            f"use backward() or torch.autograd.grad, and a batch dimension instead of vmap, or algorithm='plain', "
            f"which feature maps without a gate have."
        ) from problem
