"""Feature maps by hand, as the papers write them: whole tensors, any dtype, apart from the chunks and the specs.

Only draws, parameters and settings are read off a map. Inputs are as the kernel sees them, i.e. after multiplication by
``sqrt(scale)``, with one row per query head: (B, H, L, D).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import Role
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.elementwise import GeneralizedMap
from kernelformer.feature_maps.fastfood import FastFoodMap
from kernelformer.feature_maps.formula import FormulaMap
from kernelformer.feature_maps.fourier import TrigonometricMap
from kernelformer.feature_maps.hedgehog import HedgehogMap
from kernelformer.feature_maps.loglinear import LogLinearMap
from kernelformer.feature_maps.optimal import OptimalMap
from kernelformer.feature_maps.positive import PositiveMap
from kernelformer.feature_maps.rfa import ScaledFourierMap
from kernelformer.feature_maps.spectral import GenerativeMap, MixtureMap, SpectralMap

_ACTIVATIONS = {
    "relu": torch.relu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "gelu": F.gelu,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "identity": torch.clone,
}
_NONNEGATIVE = ("relu", "exp", "sigmoid", "abs", "elu")


def log_phi(feature_map: FeatureMap, x: Tensor, role: Role, scale: float = 1.0) -> Tensor | None:
    """``log phi(x)``, (B, H, L, D) -> (B, H, L, M), of the maps that are exponentials; None for the others.

    ``scale``, which x has in it already, is of the statistics of calibrated maps, which have not.

    favor+          w_i . x - |x|^2 / 2 - log(m) / 2            softmax kernel      (Performer, Eq. 7)
                    w_i . x - |x|^2 - log(m) / 2                Gaussian kernel
    hyperbolic      both signs of w_i, log(2m) instead of log(m)                    (Performer, Lemma 1)
    favor++, #      w_i^T A w_i + w_i^T (I - 4 A)^(1/2) y - |y|^2 / 2 + log det(I - 4 A) / 4 - log(m) / 2, y balanced
    prf             w_i . x - |x|^2 - log(M) / 2                                    (KL-Transformer, Eq. 9)
    loglinear       w_i . x + b_i, of keys less its log-sum-exp over i
    hedgehog        w_i . x less its log-sum-exp over i, then the same of -w_i . x
    """
    options = feature_map.options
    squares = x.square().sum(-1, keepdim=True)
    if isinstance(feature_map, FormulaMap):
        if type(feature_map).log_phi is FormulaMap.log_phi:
            return None
        return feature_map.log_phi(x, _formula_tensors(feature_map, x), role, **feature_map.formula_settings)
    if isinstance(feature_map, LogLinearMap):
        weight, bias = (feature_map.w_q, feature_map.b_q) if role == "query" else (feature_map.w_k, feature_map.b_k)
        logs = _project(x, weight) + _by_head(bias.to(x.dtype), x.shape[1]).unsqueeze(1)
        return logs.log_softmax(-1) if role == "key" and options["unit_keys"] else logs
    if isinstance(feature_map, HedgehogMap):
        z = _project(x, feature_map.w_q if role == "query" else feature_map.w_k)
        return torch.cat([z.log_softmax(-1), (-z).log_softmax(-1)], -1)
    if isinstance(feature_map, OptimalMap):
        return _optimal(feature_map, x, role, scale)
    if isinstance(feature_map, PositiveMap):
        z = _project(x, frequencies(feature_map, x.dtype))
        z = torch.cat([z, -z], -1) if options["hyperbolic"] else z
        half = 0.5 if options["kernel"] == "softmax" else 1.0
        return z - half * squares - 0.5 * math.log(z.shape[-1])
    if isinstance(feature_map, SpectralMap) and options["features"] == "prf":
        z = _project(x, frequencies(feature_map, x.dtype))
        return z - squares - 0.5 * math.log(z.shape[-1])
    return None


def phi(feature_map: FeatureMap, x: Tensor, role: Role, scale: float = 1.0) -> Tensor:
    """``phi(x)``, (B, H, L, D) -> (B, H, L, M).

        trigonometric   exp(|x|^2 / 2) / sqrt(m) [cos(w_i . x), sin(w_i . x)]           (Performer, Eq. 5)
        rks, rfa        1 / sqrt(M) [cos(w_i . x), sin(w_i . x)], and sqrt(s)           (KL-Transformer, Eq. 3)
        generalized     (f(w_i . x) + eps) / sqrt(m)                                    (Performer, Sec. 2.2)

    and the exponentials of `log_phi`.
    """
    logs = log_phi(feature_map, x, role, scale)
    if logs is not None:
        return logs.exp()
    options = feature_map.options
    if isinstance(feature_map, FormulaMap):
        return feature_map.phi(x, _formula_tensors(feature_map, x), role, **feature_map.formula_settings)
    if isinstance(feature_map, GeneralizedMap):
        z = _project(x, frequencies(feature_map, x.dtype)) if options["projection"] else x
        if options["activation"] == "elu":
            return (F.elu(z) + 1) / math.sqrt(z.shape[-1])
        eps = float(str(options["eps"]))
        return (_ACTIVATIONS[str(options["activation"])](z) + eps) / math.sqrt(z.shape[-1])
    z = _project(x, frequencies(feature_map, x.dtype))
    both = torch.cat([z.cos(), z.sin()], -1) / math.sqrt(z.shape[-1])
    if isinstance(feature_map, TrigonometricMap):
        return both * torch.exp(0.5 * x.square().sum(-1, keepdim=True)) if options["kernel"] == "softmax" else both
    if isinstance(feature_map, SpectralMap):
        smoothing = options["smoothing"]
        smoothing = (2 * feature_map.num_features) ** -0.5 if smoothing == "noise" else float(str(smoothing))
        return torch.cat([both, torch.full_like(both[..., :1], math.sqrt(smoothing))], -1) if smoothing else both
    raise TypeError(f"{type(feature_map).__name__} has no definition by hand.")


def is_signed(feature_map: FeatureMap) -> bool:
    """Whether features can be negative, so that the denominator has a guard."""
    if isinstance(feature_map, FormulaMap):
        return type(feature_map).log_phi is FormulaMap.log_phi and not feature_map.nonnegative
    if isinstance(feature_map, GeneralizedMap):
        return feature_map.options["activation"] not in _NONNEGATIVE
    positive = PositiveMap | LogLinearMap | OptimalMap | HedgehogMap
    return not isinstance(feature_map, positive) and feature_map.options.get("features") != "prf"


def frequencies(feature_map: FeatureMap, dtype: torch.dtype) -> Tensor:
    """The frequencies w from what a map keeps, (heads, M, D), as its paper writes them.

    gmm          w_{c,i} = S_c n_i + mu_c                                           (KL-Transformer, Eq. 5)
    fastfood     V = 1 / (sigma sqrt(d)) S H G P H B                                (KL-Transformer, Eq. 6)
    generative   w_i = g(n_i)                                                       (KL-Transformer, Eq. 8)
    rfa          w_i = sigma * n_i
    """
    if isinstance(feature_map, MixtureMap):
        return _mixture(feature_map, dtype)
    if isinstance(feature_map, FastFoodMap):
        return _fastfood(feature_map, dtype)
    if isinstance(feature_map, GenerativeMap):
        return _generated(feature_map, dtype)
    if isinstance(feature_map, ScaledFourierMap):
        return feature_map.noise.to(dtype) * feature_map.sigma.to(dtype)[:, None]
    assert feature_map.omega is not None
    return feature_map.omega.to(dtype)


def _optimal(feature_map: OptimalMap, x: Tensor, role: Role, scale: float) -> Tensor:
    """OPRF and SDERF; A as a function of the matrix M."""
    assert feature_map.statistics is not None
    assert feature_map.omega is not None
    squares = x.square().sum(-1, keepdim=True)
    moments, omega = feature_map.statistics.moments.to(x.dtype), feature_map.omega.to(x.dtype)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    constant = 0.5 * math.log(feature_map.num_features)
    if not bool(moments.any()):  # favor+
        return _project(x, omega) - 0.5 * squares - constant
    (q, k), (qq, kk) = ((moments / moments[..., -1:, -1:])[..., :-1, part] for part in (-1, slice(-1)))
    t = torch.diag_embed((kk / qq).diagonal(0, 1, 2) ** 0.25) if feature_map.options["balance"] else eye.expand_as(qq)
    q, k = t @ q.unsqueeze(2), t.inverse() @ k.unsqueeze(2)
    M = scale * (t @ qq @ t + t.inverse() @ kk @ t.inverse() + q @ k.mT + k @ q.mT)
    if not feature_map.options["dense"]:
        M = eye * M.diagonal(0, 1, 2).mean(1)[:, None, None]
    A = (eye - 2 * M - _root((2 * M + eye) @ (2 * M + eye) + 8 * M)) / 16
    y = torch.einsum("bhld,hde->bhle", x, _by_head(t if role == "query" else t.inverse(), x.shape[1]))
    constants = torch.einsum("hmd,hde,hme->hm", omega, A, omega) + 0.25 * torch.logdet(eye - 4 * A).unsqueeze(1)
    z = _project(y, omega @ _root(eye - 4 * A)) + _by_head(constants, x.shape[1]).unsqueeze(1)
    return z - 0.5 * y.square().sum(-1, keepdim=True) - constant


def _root(x: Tensor) -> Tensor:
    """The square root of positive matrices, by the iteration of Denman and Beavers."""
    root, inverse = x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    for _ in range(20):
        root, inverse = (root + inverse.inverse()) / 2, (inverse + root.inverse()) / 2
    return root


def _mixture(feature_map: MixtureMap, dtype: torch.dtype) -> Tensor:
    S, mu, noise = (x.to(dtype) for x in (feature_map.S, feature_map.mu, feature_map.noise))
    if S.dim() == 3:
        S = torch.diag_embed(S)
    if feature_map.options["tied"]:
        S, mu = torch.cat([S, S], 1), torch.cat([mu, -mu], 1)
    heads = [
        torch.cat([torch.stack([S[h, c] @ n + mu[h, c] for n in noise[h]]) for c in range(S.shape[1])])
        for h in range(S.shape[0])
    ]
    return torch.stack(heads)


def _fastfood(feature_map: FastFoodMap, dtype: torch.dtype) -> Tensor:
    heads, blocks, dim = feature_map.P.shape
    device = feature_map.P.device
    H, eye = hadamard_matrix(dim).to(device, dtype), torch.eye(dim, dtype=dtype, device=device)
    size = float(str(feature_map.options["sigma"])) * math.sqrt(dim)

    def block(h: int, b: int) -> Tensor:
        S, G, B = (torch.diag(x[h, b].to(dtype)) for x in (feature_map.S, feature_map.G, feature_map.B))
        product: Tensor = S @ H @ G @ eye[feature_map.P[h, b]] @ H @ B / size
        return product

    rows = [torch.cat([block(h, b) for b in range(blocks)]) for h in range(heads)]
    return torch.stack(rows)[:, :, : feature_map.head_dim]


def _generated(feature_map: GenerativeMap, dtype: torch.dtype) -> Tensor:
    net, h = feature_map.generator, feature_map.noise.to(dtype).flatten(0, 1)
    weights = [x.to(dtype) for x in net.weights]
    for weight, gain, shift in zip(weights, net.gains, net.shifts, strict=False):
        h = h @ weight.T
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
        h = h * gain.to(dtype) + shift.to(dtype)
        h = torch.where(h > 0, h, 0.01 * h)
    return torch.tanh(h @ weights[-1].T + net.bias.to(dtype)).view(feature_map.noise.shape)


def hadamard_matrix(dim: int) -> Tensor:
    """The Hadamard matrix (dim, dim) in float64: entries (-1)^(number of ones that i and j share)."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=torch.float64)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Something of each map, (heads of the map, ...), as one for each query head."""
    return x.repeat_interleave(heads // x.shape[0], 0)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """``w_i . x``, (B, H, L, D) by (heads, M, D) -> (B, H, L, M)."""
    return torch.einsum("bhld,hmd->bhlm", x, _by_head(weight.to(x.dtype), x.shape[1]))


def _formula_tensors(feature_map: FormulaMap, x: Tensor) -> list[Tensor]:
    return [_by_head(t[0], x.shape[1]).unsqueeze(0) for t in feature_map.tensors(x.dtype)]
