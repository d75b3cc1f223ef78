"""Random feature attention with a gate: causal attention that forgets (Peng et al.).

    S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T          z_t = g_t z_{t-1} + (1 - g_t) phi(k_t)

Unrolled, key j weighs ``(1 - g_j) g_{j+1} ... g_i`` for query i: a log factor ``log(1 - g_j)`` of the key, which signed
maps know how to carry, and a log decay ``log g_t`` of all that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State, step
from kernelformer.attention.dispatch import attend
from kernelformer.contract import Role, SignedSpec, compute_dtype, intern_formula
from kernelformer.errors import flag
from kernelformer.feature_maps.base import FIRST, parameter
from kernelformer.feature_maps.draws import generator
from kernelformer.feature_maps.fourier import FourierSpec
from kernelformer.feature_maps.spectral import ScaledFourierMap
from kernelformer.modules.checks import Call, check_range
from kernelformer.modules.kernel import KernelCore

EDGE = 1e-6  # how near a gate comes to 0 and to 1


@dataclass(frozen=True)
class GatedSpec(SignedSpec):
    """Fourier map of all coordinates but the last, which is the log weight of a key."""

    has_factor = True
    inner: FourierSpec

    def length(self, normalize: bool) -> float | None:
        """Length of the Fourier features."""
        return self.inner.length(normalize)

    def feature_dim(self, tensors: Sequence[Tensor], head_dim: int) -> int:
        """Number of the Fourier features."""
        return self.inner.feature_dim(tensors, head_dim - 1)

    def features(
        self, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Role, normalize: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate the formula."""
        phi, _ = self.inner.features(x[..., :-1], tensors, scale, role, normalize)
        return phi, x[..., -1:] if role == "key" or not normalize else None


class GatedCore(KernelCore):
    """Random feature attention whose state forgets.

        S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T          z_t = g_t z_{t-1} + (1 - g_t) phi(k_t)
        out_t = phi(q_t) S_t / phi(q_t) z_t

    Gates come with the call, (B, H, L) in (0, 1), as `KernelAttention` computes them from its input; without them the
    core takes its own, ``sigmoid(w . k_t + b)``. They are kept 1e-6 away from 0 and 1. Causal only, always normalized.

    Args:
        own_gate: whether the core has a gate of its own, for calls without one.

    Parameters: gate_weight (H, D) and gate_bias (H), beside those of the map.

    Cost: as causal attention.
    """

    splits = False  # sums that forget are not merged by their masses alone
    takes_gate = True
    export_refusal = "forgets by a loop over stretches of the sequence"
    takes_bias = False

    def __init__(self, method: str, feature_map: ScaledFourierMap, *, own_gate: bool = True, **options: Any) -> None:
        super().__init__(method, feature_map, normalize=True, **options)
        assert isinstance(feature_map.spec, FourierSpec)
        self.gated_spec = GatedSpec(feature_map.spec)
        self.gated_key = intern_formula(self.gated_spec)
        self.own_gate = flag("own_gate", own_gate)
        self.state_heads = self.num_heads  # each has its own gate
        if own_gate:
            self.gate_weight = parameter(self.num_heads, self.head_dim)
            self.gate_bias = parameter(self.num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize with small weights and a bias of 2: a gate of 0.88 keeps some ten tokens."""
        if not self.own_gate:
            return
        gen = generator(self.feature_map.seed_number, FIRST)
        size = self.head_dim**-0.5
        draw = torch.randn(self.gate_weight.shape, generator=gen, dtype=torch.float64, device="cpu")
        self.gate_weight.copy_(size * draw)
        self.gate_bias.fill_(2.0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        intern_formula(self.gated_spec)

    def _weigh(self, call: Call, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, their log weights and the log decay of each, (B, H, L); hidden ones are 0 and change nothing."""
        gate, hidden = call.gate, None if call.key_mask is None else ~call.key_mask.unsqueeze(1)
        if hidden is not None:
            key = key.masked_fill(hidden.unsqueeze(-1), 0)
        if gate is None:
            if not self.own_gate:
                raise ValueError(f"{self.method!r} was built with own_gate=False, so it needs gate= in every call.")
            weight, bias = self.gate_weight.to(key), self.gate_bias.to(key)
            gate = torch.sigmoid(torch.linalg.vecdot(key, weight.unsqueeze(1)) + bias.unsqueeze(1))
        else:
            gate = gate.to(key.dtype)
            gate = gate if hidden is None else gate.masked_fill(hidden, 0.5)
            check_range(gate)
        gate = gate.clamp(EDGE, 1 - EDGE)
        keep = gate.log() if hidden is None else gate.log().masked_fill(hidden, 0)
        return key, torch.log1p(-gate), keep

    def _not_bidirectional(self, what: str) -> ValueError:
        return ValueError(f"{self.method!r} is causal only, got {what}: a gate forgets what came before.")

    def refusal(self, causal: bool) -> ValueError | None:
        """Return the error for a call that is not causal, or None."""
        return None if causal else self._not_bidirectional("is_causal=False")

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """Raise a ValueError: a context has no order to forget in."""
        raise self._not_bidirectional("a context")

    def _attend_unbiased(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor] | None]:
        dtype, work = call.query.dtype, compute_dtype(call.query.dtype)
        key, value = (x.to(work) for x in self._per_map_head(call.key, call.value))
        key, take, keep = self._weigh(call, key)
        out, state = attend(
            F.pad(call.query.to(work), (0, 1)),
            torch.cat([key, take.unsqueeze(-1)], -1),
            value,
            spec=self.gated_key,
            tensors=tensors,
            scale=call.scale,
            key_mask=call.key_mask,
            normalize=self.normalize,
            is_causal=True,
            state=None if call.state is None else call.state.tensors,
            streams=True,
            decay=keep,
            algorithm=call.algorithm,
        )
        return out.to(dtype), state

    def _step_unbiased(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        key, value = self._per_map_head(call.key, call.value)
        key, take, keep = self._weigh(call, key)
        out, after = step(
            self.gated_spec,
            tensors,
            F.pad(call.query, (0, 1)),
            torch.cat([key, (take - keep).unsqueeze(-1)], -1),
            value,
            self._before(call),
            scale=call.scale,
            key_mask=call.key_mask,
            normalize=True,
        )
        return out, (after[0] + keep.unsqueeze(-1), *after[1:])
