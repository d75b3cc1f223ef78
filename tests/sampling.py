"""Statistics of random maps: one number per draw, judged by standard errors."""

from __future__ import annotations

import math

import torch

SIGMAS = 5
HEADS = 50  # of a map that is drawn for each head: so many independent draws at once


def pair(size=0.7, d=4):
    gen = torch.Generator().manual_seed(3)
    x, y = (torch.randn(d, generator=gen, dtype=torch.float64) for _ in range(2))
    return size * x / x.norm(), size * y / y.norm()


def estimates(make, x, y, count=2000):
    """K(x, y) by phi(x) . phi(y), one number per independent draw; a map has one for each of its heads."""
    phi = make().double()
    points = torch.stack([x, y]).expand(1, phi.heads, 2, -1)
    kernels = []
    for t in range(math.ceil(count / phi.heads)):
        phi.resample(t)
        a, b = phi(points)[0].detach().unbind(1)
        kernels.append((a * b).sum(-1))
    return torch.cat(kernels)


def within(sample, want):
    standard_error = sample.std() / math.sqrt(len(sample))
    assert abs(sample.mean() - want) < SIGMAS * standard_error, (float(sample.mean()), float(want))
