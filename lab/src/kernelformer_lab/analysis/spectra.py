"""Learned kernels: their shape over distance, and the spectrum behind it (KL-Transformer, Tables 4 and 9-12)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.errors import choice, number, positive_int, shape
from kernelformer.feature_maps import FeatureMap, MixtureMap
from kernelformer.kernels import gaussian_kernel, softmax_kernel
from kernelformer.modules import KernelCore


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the covariances of one head: smallest, largest and mean, a row of the paper's tables.

    Args:
        layer: name of the core in the model.
        head: its number, from 0.
        learned: whether the covariance is a parameter (GMM); else it is that of the frequencies as a sample, of the
            draw that the map has: the paper finds it "not well defined" for FastFood and Generative, and leaves it out.
    """

    layer: str
    head: int
    minimum: float
    maximum: float
    mean: float
    learned: bool = True


def spectra(model: nn.Module) -> list[Spectrum]:
    """List the spectra of all heads whose feature map has a spectral density; components count together.

        eigenvalues of S S^T = squared singular values of S            (KL-Transformer, Tables 4, 9-12)

    By singular values in float64: the smallest are of the size 1e-8, below what a float32 product keeps.
    """
    return [
        _row(name, head, values, isinstance(core.feature_map, MixtureMap))
        for name, core in _cores_with_density(model)
        for head, values in enumerate(_eigenvalues(core.feature_map))
    ]


def squared_log_variances(model: nn.Module) -> list[Spectrum]:
    """The squares of log S^2 of diagonal mixtures, by head, in the form of the spectra.

    The authors' code has T = log S^2 for a parameter, and what Tables 10 and 12 print as eigenvalues of GMM-PRF is
    what T^2 is at the start: mean 2 / (D + heads), at most 6 / (D + heads). The eigenvalues, exp(T), are near 1 then.
    """
    return [
        _row(name, head, values, learned=True)
        for name, core in _cores_with_density(model)
        if isinstance(core.feature_map, MixtureMap) and core.feature_map.diagonal
        for head, values in enumerate(_eigenvalues(core.feature_map).log().square())
    ]


def _cores_with_density(model: nn.Module) -> list[tuple[str, KernelCore]]:
    cores = [(name, core) for name, core in model.named_modules() if isinstance(core, KernelCore)]
    return [(name, core) for name, core in cores if core.feature_map.has_density]


def _row(layer: str, head: int, values: Tensor, learned: bool) -> Spectrum:
    return Spectrum(layer, head, float(values.min()), float(values.max()), float(values.mean()), learned)


@torch.no_grad()
def _eigenvalues(phi: FeatureMap) -> Tensor:
    """Eigenvalues of the covariances of each head, (H, n) in float64."""
    if isinstance(phi, MixtureMap):
        roots = phi.S.double()
        values = roots.square() if phi.diagonal else torch.linalg.svdvals(roots).square()
    else:
        omega = phi.frequencies(torch.float64)
        centred = omega - omega.mean(1, keepdim=True)
        values = torch.linalg.svdvals(centred).square() / omega.shape[1]
        values = nn.functional.pad(values, (0, omega.shape[2] - values.shape[-1]))  # fewer frequencies than dimensions
    values = values.flatten(1)
    return values.repeat_interleave(phi.num_heads // values.shape[0], 0)


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


KERNELS = {"softmax": softmax_kernel, "gaussian": gaussian_kernel}


@torch.no_grad()
def score_spectrum(query: Tensor, key: Tensor, kernel: str, scale: float | None = None) -> Tensor:
    """Singular values of the scores before normalization, descending, by SVD in float64.

        exp(scale q_i . k_j)  or  exp(-scale |q_i - k_j|^2 / 2)

    Args:
        query: (*, L, D).
        key: (*, S, D).
        kernel: ``softmax`` or ``gaussian``.
        scale: default 1 / sqrt(D).

    Returns:
        (*, min(L, S)).
    """
    choice("kernel", kernel, KERNELS)
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(f"a spectrum needs queries and keys, got shapes {shape(query)} and {shape(key)}.")
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    values: Tensor = torch.linalg.svdvals(KERNELS[kernel](query.double() * root, key.double() * root))
    return values


def condition_number(singular: Tensor, rank: float = 1.0) -> Tensor:
    """The largest singular value over the one at a share ``rank`` of the spectrum, (*); 1 is the smallest of all.

    Float64 resolves ratios up to about 1e16. Smaller shares say how fast the spectrum falls where that is not enough.
    """
    share = number("rank", rank, above=0)
    if share > 1:
        raise ValueError(f"rank is a share of the spectrum, at most 1, got {rank}.")
    last = max(1, round(share * singular.shape[-1])) - 1
    return singular[..., 0] / singular[..., last]
