"""Spectra of attention's score matrices (Skyformer, Theorem 2 and App. F)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernelformer.errors import choice, number, shape
from kernelformer.kernels import gaussian_kernel, softmax_kernel

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


@torch.no_grad()
def statistical_dimension(query: Tensor, key: Tensor, epsilons: Sequence[float], scale: float | None = None) -> Tensor:
    """d_stat of the completed Gaussian scores, as a function of the ridge (Skyformer, Theorem 2).

        d_stat = Tr(C' (C' + lambda I)^-1)       C' = kappa([Q; K], [Q; K]),  lambda = epsilon |C|,  C = kappa(Q, K)

    Landmarks needed for a spectral error of ``epsilon |C|`` grow with it.

    Args:
        query: (*, L, D).
        key: (*, S, D).
        epsilons: of the ridge, relative to the spectral norm of C.
        scale: default 1 / sqrt(D).

    Returns:
        (*, number of epsilons); at most L + S.
    """
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    both = torch.cat([query, key], -2).double() * root
    values = torch.linalg.eigvalsh(gaussian_kernel(both, both)).clamp_min(0)
    norm = score_spectrum(query, key, "gaussian", scale)[..., :1]
    ridges = norm * torch.tensor([number("epsilon", x, above=0) for x in epsilons], dtype=norm.dtype)
    dimensions: Tensor = (values.unsqueeze(-2) / (values.unsqueeze(-2) + ridges.unsqueeze(-1))).sum(-1)
    return dimensions
