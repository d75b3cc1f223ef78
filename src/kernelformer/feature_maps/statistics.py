"""Moments of queries and keys for calibrated maps, and the optimal positive features for them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import wide_dtype
from kernelformer.feature_maps.base import FeatureMap

MOMENTS = "statistics.moments"  # how the name of the sums in a state dict ends; they are float64 in every model


def optimal_exponents(spread: Tensor) -> Tensor:
    """Compute ``a = (1 - 2 l - sqrt((2 l + 1)^2 + 8 l)) / 16``; l >= 0 is the mean square of a coordinate.

    It makes ``E log Var`` of the estimate smallest. It is 0 at l = 0 and negative elsewhere.
    """
    return (1 - 2 * spread - ((2 * spread + 1).square() + 8 * spread).sqrt()) / 16


class Statistics(nn.Module):
    """Moments of queries and keys of each map, summed up over calibrations, and the tensors derived from them.

    With t_l^4 = mean k_l^2 / mean q_l^2 if they are to be balanced, else t = 1, the mean over all pairs is

        M = mean (t q + k / t)(t q + k / t)^T = U diag(l) U^T

    or, where the map is not dense, its trace over D for every l, and U = I. Queries and keys are those before the
    scale, which multiplies l alone. Nothing summed up yet: t = 1, l = 0, U = I.

    Buffers: moments (2, heads, D + 1, D + 1), the sums of [x, 1] [x, 1]^T over queries, and over keys; it alone is
    saved. From it follow basis (heads, D, D), U; spread (heads, D), l; balance (heads, D), t. All in float64, whatever
    the model's dtype: they are few, and sums over many tokens.
    """

    moments: Tensor
    basis: Tensor
    spread: Tensor
    balance: Tensor

    def __init__(self, heads: int, head_dim: int, *, dense: bool, balance: bool) -> None:
        super().__init__()
        self.dense, self.balanced = dense, balance
        kind: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.register_buffer("moments", torch.zeros(2, heads, head_dim + 1, head_dim + 1, **kind))
        for name, size in (("basis", (head_dim, head_dim)), ("spread", (head_dim,)), ("balance", (head_dim,))):
            self.register_buffer(name, torch.empty(heads, *size, **kind), persistent=False)
        self.digest = ""
        self.refresh()

    def add(self, moments: Tensor) -> None:
        """Add the moments of more queries and keys, as `moments_of` returns them."""
        total = self.moments + moments.to(self.moments)
        if not bool(total.isfinite().all()):
            raise ValueError(
                "sums over these queries and keys overflow, so that nothing was counted; tokens this large cannot be "
                "attended to either: look for what makes them."
            )
        self._replace(total)

    def reset_parameters(self) -> None:
        """Clear all moments."""
        self._replace(torch.zeros_like(self.moments))

    def _replace(self, moments: Tensor) -> None:
        self._buffers["moments"] = moments
        self.refresh()

    def refresh(self) -> None:
        """Recompute everything that is derived from the moments, after they were filled."""
        if self.moments.is_meta:
            return
        with torch.inference_mode(False), torch.no_grad():  # a later call may need gradients
            device, dtype = self.moments.device, wide_dtype(self.moments)
            moments = self.moments.detach().to("cpu", torch.float64, copy=True).contiguous()
            found = self._derive(moments)
            sums = bool(moments.isfinite().all()) and bool((moments.diagonal(0, 2, 3) >= 0).all())
            if not sums or not all(bool(x.isfinite().all()) for x in found.values()):
                raise ValueError(
                    "statistics of a calibrated map hold NaN, infinities or negative squares, where sums over finite "
                    "tokens are expected; load them anew, or begin again with reset_calibration()."
                )
            self._buffers["moments"] = moments.to(device, dtype)
            for name, x in found.items():
                self._buffers[name] = x.contiguous().to(device, dtype)
            seen = bool(moments.any())
            data = ctypes.string_at(moments.data_ptr(), moments.nbytes) if seen else b""
            self.digest = hashlib.sha256(data).hexdigest()[:16] if seen else ""

    def _derive(self, moments: Tensor) -> dict[str, Tensor]:
        """Compute basis, spread and balance."""
        means = moments / moments[..., -1:, -1:].clamp_min(1)
        (q, k), (qq, kk) = means[..., :-1, -1].unbind(0), means[..., :-1, :-1].unbind(0)
        size_q, size_k = (x.diagonal(0, 1, 2) for x in (qq, kk))
        t = torch.ones_like(q)
        if self.balanced:  # a coordinate that is always 0 in one of them has nothing to balance
            t = torch.where((size_q > 0) & (size_k > 0), (size_k / size_q) ** 0.25, t)
        qk = (q * t).unsqueeze(2) * (k / t).unsqueeze(1)
        pairs = qq * t.unsqueeze(1) * t.unsqueeze(2) + kk / t.unsqueeze(1) / t.unsqueeze(2) + qk + qk.mT
        if not self.dense or not bool(moments.any()) or not bool(pairs.isfinite().all()):
            basis = torch.eye(t.shape[1], dtype=t.dtype, device=t.device).expand_as(qq)
            spread = pairs.diagonal(0, 1, 2).mean(1, keepdim=True).expand_as(t)
        else:
            spread, basis = torch.linalg.eigh(pairs)
        return {"basis": basis, "spread": spread.clamp_min(0), "balance": t}

    def features(self, omega: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute frequencies of queries and keys (heads, M, D), and constants (heads, M), from omega (heads, M, D).

        With C = (I - 4 A)^(1/2) and A = U diag(a) U^T, a the `optimal_exponents` of scale l:

            C w_i t,   C w_i / t,   w_i^T A w_i + log det(I - 4 A) / 4
        """
        a = optimal_exponents(scale * self.spread)
        shrink = 1 - 4 * a
        rotated = omega.to(self.basis) @ self.basis
        w = (rotated * shrink.sqrt().unsqueeze(1)) @ self.basis.mT
        constants = (rotated.square() @ a.unsqueeze(2)).squeeze(2) + 0.25 * shrink.log().sum(1, keepdim=True)
        t = self.balance.unsqueeze(1)
        return w * t, w / t, constants

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Statistics:
        if fn(torch.empty(0, device="cpu")).device.type == "mps":  # which has no float64
            self._buffers.update({name: x.float() for name, x in self._buffers.items() if x is not None})
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, x in before.items():
            after = self._buffers[name]
            if x is not None and after is not None and after.dtype != x.dtype:
                self._buffers[name] = x.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        *_, errors = rest
        before = self.moments.clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)
        try:
            self.refresh()
        except ValueError as problem:
            errors.append(f"{prefix.removesuffix('.')}: {problem}")
            self._buffers["moments"] = before  # what follows from them was not touched


def moments_of(query: Tensor, key: Tensor) -> Tensor:
    """Sum [x, 1] [x, 1]^T over queries and over keys, (heads, N, D) each -> (2, heads, D + 1, D + 1) in float64."""
    totals = []
    for x in (query, key):
        total = x.new_zeros(x.shape[0], x.shape[2] + 1, x.shape[2] + 1, dtype=wide_dtype(x))
        for part in x.split(4096, 1):  # float64 copies of whole sequences would be large
            wide = torch.nn.functional.pad(part.to(total.dtype), (0, 1), value=1.0)
            total.baddbmm_(wide.mT, wide)
        totals.append(total)
    return torch.stack(totals)


class CalibratedMap(FeatureMap):
    """Base class of maps that depend on statistics of queries and keys, which `calibrate` collects.

    A subclass sets ``statistics`` before `_start`; None means that there is nothing to calibrate.
    """

    statistics: Statistics | None

    @property
    def identity(self) -> dict[str, object]:
        """Identity of the map with its statistics: a state from before a calibration does not fit after it."""
        digest = "" if self.statistics is None else self.statistics.digest
        return {**super().identity, **({"statistics": digest} if digest else {})}

    @property
    def stamp(self) -> tuple[object, ...]:
        """Stamp of the map with its statistics."""
        return *super().stamp, None if self.statistics is None else self.statistics.digest

    def check_calibration(self, scale: float) -> None:
        """Raise a ValueError if a calibration would overwrite something; ``scale`` is that of the core."""

    def calibrate(self, moments: Tensor, scale: float) -> None:
        """Add more queries and keys by their `moments_of`; ``scale`` is that of the core."""
        assert self.statistics is not None
        self.statistics.add(moments)

    def reset_calibration(self) -> None:
        """Clear the statistics."""
        assert self.statistics is not None
        self.statistics.reset_parameters()

    def take_numbers(self) -> None:
        """Read seed and draw from their buffers, and refresh the statistics."""
        super().take_numbers()
        if self.statistics is not None:
            self.statistics.refresh()

    def reset_parameters(self) -> None:
        """Restore what (seed, draw) determine, without statistics."""
        if self.statistics is not None:
            self.statistics.reset_parameters()
        super().reset_parameters()
