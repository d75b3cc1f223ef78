"""What a stream of tokens does not have to do again at every step: prepare the map, and check its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelformer.attention import State, step
from kernelformer.attention.state import Prepared
from kernelformer.attention.step import Logs, log_rows, quick_step
from kernelformer.contract import PositiveSpec, autocasts, compute_dtype
from kernelformer.modules.checks import Call

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore
    from kernelformer.modules.kernel import KernelCore


def prepare_map(core: KernelCore, call: Call) -> Prepared:
    """The map's tensors: in a stream those of the call before where they are still right, else made anew.

    With a bias they are for keys that are repeated for every query head. With gradients they belong to a graph, and a
    compiled step cannot compare weights: both make them each time.
    """
    phi = core.feature_map
    keeps = call.in_stream and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    biased = core._by_query_head(call)
    weights: list[Tensor] = []
    how: tuple[object, ...] = ()
    if keeps:
        weights, kind = phi.learned_weights(), (compute_dtype(call.query.dtype), call.query.device)
        how = (*kind, call.scale, biased, phi.seed_number, phi.draw_number, torch.is_inference_mode_enabled())
        kept = core._prepared  # read once: a stream in another thread may put its own here at any time
        if call.state is not None and kept is not None and kept.made_from(weights, how):
            return kept
    tensors = phi.prepare(call.query, call.key, call.key_mask, call.scale, call.real_queries)
    tensors = phi.for_query_heads(tensors) if biased else tensors
    if not keeps:
        return Prepared(tuple(tensors))
    core._prepared = prepared = Prepared.of(tensors, weights, how)
    return prepared


def quick_step_of(core: KernelCore, call: Call, prepared: Prepared) -> QuickStep | None:
    """How this step and those after it go by fewer operators; None where more than the map attends, or with gradients.

    The core keeps it, so that a state holds no tensor of a map.
    """
    if not call.fits or prepared.weights is None or torch.is_grad_enabled():
        return None
    others = core.has_near or core.normalize_qk or core.takes_gate or call.bias is not None
    if others or call.segment_ids is not None or core._key_heads(call.key) != call.key.shape[1]:
        return None
    core._quick = quick = QuickStep(core, call, prepared)
    return quick


class QuickStep:
    """A step after one that was checked: same core, same settings and weights, inputs of the same kind, no gradients.

    Args:
        core: that made the step before.
        call: of it.
        prepared: the map's tensors.
    """

    def __init__(self, core: KernelCore, call: Call, prepared: Prepared) -> None:
        phi = core.feature_map
        self.core: Any = weakref.ref(core)
        self.map, self.prepared = phi, prepared
        self.scale, self.normalize, self.numbers = call.scale, core.normalize, (phi.seed_number, phi.draw_number)
        self.places = phi.weight_places()
        self.inference = torch.is_inference_mode_enabled()
        self.kinds = call.fits[:9]  # shapes, dtypes and devices, as the caller gave them
        self.dtype: Any = call.fits[3]
        self.computed = compute_dtype(call.query.dtype)
        self.logs: Logs | None = None
        if core.normalize and isinstance(phi.spec, PositiveSpec):
            self.logs = log_rows(phi.spec, prepared.tensors, call.scale)

    def _same_core(self, core: Any) -> bool:
        """Whether nothing was changed of the core, its map and its weights."""
        phi = self.map
        if core is not self.core() or core._modules["feature_map"] is not phi or core.scale != self.scale:
            return False
        if core.normalize != self.normalize or core.normalize_qk or core.has_near:
            return False
        if (phi.seed_number, phi.draw_number) != self.numbers or torch.is_inference_mode_enabled() != self.inference:
            return False
        weights: list[Any] = [place.get(name) for place, name in self.places]
        return not any(x is None for x in weights) and self.prepared.made_from(weights, self.prepared.how)

    def take(
        self, core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, state: State
    ) -> tuple[Tensor, State] | None:
        """Attend with one token; None where something is not as it was, so that all has to be checked again."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocasts("cpu") or not self._same_core(core):
            return None
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            return None
        shapes = (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype)
        if (*shapes, query.device, key.device, value.device) != self.kinds or state.last_id is not None:
            return None
        if self.dtype != self.computed:
            query, key, value = (x.to(self.computed) for x in (query, key, value))
        out, after = self.attend(query, key, value, state.tensors)
        out = out if self.dtype == self.computed else out.to(self.dtype)
        return out, State(after, state.length + 1, state.made_by, state.fits, quick=state.quick)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attend with one token in the dtype of the arithmetic: (B, H, 1, E), and the tensors of the state after it."""
        if self.logs is not None:
            return quick_step(self.logs, query, key, value, before)
        how: dict[str, Any] = {"scale": self.scale, "normalize": self.normalize}
        return step(self.map.spec, self.prepared.tensors, query, key, value, before, **how)
