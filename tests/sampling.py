"""Statistics of random maps: one number per draw, judged by standard errors."""

from __future__ import annotations

import math

import torch

SIGMAS = 5


def pair(size=0.7, d=4):
    gen = torch.Generator().manual_seed(3)
    x, y = (torch.randn(d, generator=gen, dtype=torch.float64) for _ in range(2))
    return size * x / x.norm(), size * y / y.norm()


def estimates(make, x, y, count=2000):
    """K(x, y) by phi(x) . phi(y), one number per independent draw."""
    phi = make().double()
    points = torch.stack([x, y]).view(1, 1, 2, -1)
    kernels = []
    for t in range(count):
        phi.resample(t)
        a, b = phi(points)[0, 0].detach()
        kernels.append(float(a @ b))
    return torch.tensor(kernels, dtype=torch.float64)


def within(sample, want):
    standard_error = sample.std() / math.sqrt(len(sample))
    assert abs(sample.mean() - want) < SIGMAS * standard_error, (float(sample.mean()), float(want))
