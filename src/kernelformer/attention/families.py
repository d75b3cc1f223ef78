"""From a spec to the chunk arithmetic of its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kernelformer.attention.engine import Engine
from kernelformer.attention.positive import PositiveEngine
from kernelformer.attention.signed import SignedEngine
from kernelformer.contract import PositiveSpec, SignedSpec, Spec, Workspace


def engine_class(spec: Spec) -> type[Engine]:
    """The chunk arithmetic of a spec's family."""
    return PositiveEngine if spec.family == "positive" else SignedEngine


def make_engine(
    spec: Spec,
    tensors: Sequence[Tensor],
    scale: float,
    normalize: bool,
    learn: bool,
    work: Workspace,
    parts: bool = False,
) -> tuple[Engine, Callable[[], list[Tensor]]]:
    """Bind a spec to the rows of a block; also returns how to ask for the gradients of the bound tensors."""
    cancels = normalize and not parts
    if isinstance(spec, PositiveSpec):
        positive = spec.bind(tensors, scale, cancels, learn)
        return PositiveEngine(positive, normalize, work, parts), positive.tensor_grads
    assert isinstance(spec, SignedSpec)
    signed = spec.bind(tensors, scale, cancels, learn)
    length = spec.length(cancels)
    return SignedEngine(signed, normalize, work, parts, spec.guarded, length), signed.tensor_grads
