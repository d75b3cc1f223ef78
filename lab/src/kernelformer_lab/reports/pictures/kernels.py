"""Pictures of what a kernel is, and of how features stand for one."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from kernelformer.feature_maps import FeatureMap, PositiveMap
from kernelformer.kernels import softmax_kernel
from kernelformer.modules import build_attention
from kernelformer_lab.reports.pictures.drawing import EXACT, INK, LINEAR, THIRD, figure
from kernelformer_lab.reports.tables.records import Records

LENGTH, DIM, NORM = 48, 16, 1.7
FEATURES = (16, 64, 1024)


def smooth_tokens() -> tuple[Tensor, Tensor]:
    """Queries and keys (1, 1, L, D) that turn slowly along the sequence, so that weights have a shape to look at.

    After scaling they have the norm `NORM`.
    """
    gen = torch.Generator().manual_seed(0)
    time = torch.arange(LENGTH).unsqueeze(-1) / LENGTH
    rates = torch.arange(1, DIM // 2 + 1) * math.pi
    turned = torch.cat([torch.cos(time * rates), torch.sin(time * rates)], -1) / torch.arange(1, DIM // 2 + 1).repeat(2)
    noise = 0.12 * torch.randn(2, LENGTH, DIM, generator=gen)
    q, k = (NORM * DIM**0.25 * x / x.norm(dim=-1, keepdim=True) for x in turned + noise)
    return q[None, None], k[None, None]


@torch.no_grad()
def matrices(records: Records, path: Path) -> None:
    """Weights of exact attention, and of `favor+` with more and more features."""
    q, k = smooth_tokens()
    exact = build_attention("softmax", head_dim=DIM, num_heads=1).attention_matrix(q, k)
    shown = {"softmax": exact}
    for count in FEATURES:
        core = build_attention("favor+", head_dim=DIM, num_heads=1, num_features=count)
        shown[f"favor+, m = {count}"] = core.attention_matrix(q, k)
    about = f"Attention weights of {LENGTH} queries (rows) for {LENGTH} keys (columns): {', '.join(shown)}."
    with figure(path, about, (11, 3.5)) as drawn:
        for axis, (name, weights) in zip(drawn.subplots(1, len(shown)), shown.items(), strict=True):
            axis.imshow(weights[0, 0].numpy(), cmap="viridis", vmin=0, vmax=exact.max().item())
            error = ((weights - exact).norm() / exact.norm()).item()
            axis.set_title(name if name == "softmax" else f"{name}\nerror {error:.2f}")
            axis.set(xticks=[], yticks=[], xlabel="keys")
        drawn.axes[0].set_ylabel("queries")


@torch.no_grad()
def estimates(records: Records, path: Path) -> None:
    """The kernel of a query and keys on a circle round the origin, by formula and by features; the range over draws."""
    angles = torch.linspace(-math.pi, math.pi, 121, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    about = "exp(q . k) over the angle between q and k, exactly and by 8 and 64 positive features, at norms 1 and 2."
    with figure(path, about, (11, 3.4)) as drawn:
        for axis, norm in zip(drawn.subplots(1, 2), (1.0, 2.0), strict=True):
            keys = norm * torch.nn.functional.pad(circle, (0, DIM - 2))
            query = keys[60:61]  # at the angle 0
            for count, colour, alpha in ((8, THIRD, 0.25), (64, LINEAR, 0.4)):
                phi = PositiveMap(head_dim=DIM, num_heads=1, num_features=count)
                draws = torch.stack([_estimate(phi, query, keys, draw) for draw in range(40)])
                low, high = draws.quantile(0.1, 0), draws.quantile(0.9, 0)
                axis.fill_between(angles, low, high, color=colour, alpha=alpha, label=f"m = {count}, 80% of draws")
            exact = softmax_kernel(query, keys).flatten()
            axis.plot(angles, exact, color=EXACT, label="exp(q · k)")
            axis.set(title=f"norm of q and k: {norm:g}", xlabel="angle between q and k", xticks=[-math.pi, 0, math.pi])
            axis.set_xticklabels(["-π", "0", "π"])
            axis.set_ylim(0, 2 * exact.max().item())
            axis.axhline(0, color=INK, linewidth=0.8)
        drawn.axes[1].legend(loc="upper right")


def _estimate(phi: FeatureMap, query: Tensor, keys: Tensor, draw: int) -> Tensor:
    """The kernel of a query (1, D) and keys (S, D) by one draw of a map."""
    phi.resample(draw)
    phi_q, phi_k = phi(query[None, None], role="query"), phi(keys[None, None], role="key")
    product: Tensor = (phi_q @ phi_k.mT).flatten()
    return product
