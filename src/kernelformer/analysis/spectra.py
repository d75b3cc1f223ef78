"""Learned kernels: their shape over distance, and the spectrum behind it (KL-Transformer, Tables 4 and 9-12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.errors import positive_int, shape
from kernelformer.modules import KernelCore


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the covariances of one head: smallest, largest and mean, a row of the paper's tables."""

    layer: str
    head: int
    minimum: float
    maximum: float
    mean: float


def spectra(model: nn.Module) -> list[Spectrum]:
    """List the spectra of all heads whose feature map has a spectral density; components count together."""
    rows = []
    for name, core in model.named_modules():
        if isinstance(core, KernelCore) and core.feature_map.has_density:
            for head, values in enumerate(core.eigenvalues().flatten(1)):
                rows.append(Spectrum(name, head, float(values.min()), float(values.max()), float(values.mean())))
    return rows


@torch.no_grad()
def kernel_profile(
    core: KernelCore,
    distances: Sequence[float] | Tensor,
    *,
    point: Tensor | None = None,
    directions: int = 64,
    seed: int = 0,
) -> Tensor:
    """The kernel as a function of distance, as the current draw estimates it, averaged over random directions u.

        K(x - r u / 2, x + r u / 2)

    Shift-invariant kernels (RKS) do not depend on the point x. Positive features of a learned density do: around 0 they
    give exp(-r^2 / 2) whatever was learned, since the two points are opposite; away from it they show it.

    RKS maps have their smoothing in it. ``normalize_qk`` plays no part.

    Args:
        core: with a feature map.
        distances: r, after scaling: what the kernel itself sees.
        point: x (D), after scaling; default 0.
        directions: how many, the same for all distances and heads.
        seed: of the directions.

    Returns:
        (H, number of distances).
    """
    if not isinstance(core, KernelCore):
        raise ValueError(f"a profile needs a core with a feature map, got {type(core).__name__}.")
    phi = core.feature_map
    if phi.sees_sequence:
        raise ValueError(
            f"{core.method!r} takes its landmarks from the queries and keys of a call, so that its kernel is no "
            f"function of distance alone; use landmarks='learned', or the core's attention_matrix."
        )
    where: dict[str, Any] = {"dtype": torch.float32, "device": phi.seed.device}
    gen = torch.Generator().manual_seed(seed)
    u = torch.randn(positive_int("directions", directions), core.head_dim, generator=gen, device="cpu").to(**where)
    r = torch.as_tensor(distances, **where)
    middle = torch.zeros(core.head_dim, **where) if point is None else torch.as_tensor(point, **where)
    if r.dim() != 1 or not r.isfinite().all():
        raise ValueError(f"distances must be a list of finite numbers, got {distances}.")
    if middle.shape != (core.head_dim,):
        raise ValueError(f"point must have head_dim={core.head_dim} numbers, got shape {shape(middle)}.")
    half = 0.5 * r[:, None, None] * torch.nn.functional.normalize(u, dim=-1)
    ends = [(middle + sign * half).flatten(0, 1).expand(1, core.num_heads, -1, -1) for sign in (-1, 1)]
    values: Tensor = (phi(ends[0], "query") * phi(ends[1], "key")).sum(-1)[0].unflatten(1, (len(r), directions))
    return values.mean(2)
