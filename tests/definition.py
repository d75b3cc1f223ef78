"""Attention as the papers write it, whole matrices in whatever dtype it is given: written apart from the library.

Only the frequencies, the scale and the options are read off a core; formulas, masks, guard and normalization are here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import kernelformer as kf

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SIZES = {"head_dim": 8, "num_heads": 4}
M = 24

# One entry per map, kernel, draw and switch: being in this list is what makes a variant pass the conformance suite.
VARIANTS: dict[str, tuple[str, dict]] = {
    "softmax": ("softmax", {}),
    "softmax unit": ("softmax", {"normalize_qk": True}),
    "gaussian": ("gaussian", {}),
    "gaussian normalized": ("gaussian", {"normalize": True}),
    "favor+": ("favor+", {"num_features": M}),
    "favor+ gaussian": ("favor+", {"num_features": M, "kernel": "gaussian"}),
    "favor+ unnormalized": ("favor+", {"num_features": M, "normalize": False, "kernel": "gaussian"}),
    "favor+ per head": ("favor+", {"num_features": M, "per_head": True}),
    "favor+ unit": ("favor+", {"num_features": M, "normalize_qk": True}),
    "favor+ m < d": ("favor+", {"num_features": 5}),
    **{
        f"favor+ {draw}": ("favor+", {"num_features": M, "draw": draw})
        for draw in ("iid", "spherical", "hadamard", "givens")
    },
    "favor+ hadamard chi": ("favor+", {"num_features": M, "draw": "hadamard", "norms": "chi"}),
    "hyperbolic": ("favor+hyperbolic", {"num_features": M // 2}),
    "hyperbolic gaussian": ("favor+hyperbolic", {"num_features": M // 2, "kernel": "gaussian", "normalize": False}),
    "regularized": ("favor+regularized", {"num_features": M}),
    "regularized iid": ("favor+regularized", {"num_features": M, "draw": "iid"}),
    "trigonometric": ("trigonometric", {"num_features": M}),
    "trigonometric gaussian": ("trigonometric", {"num_features": M, "kernel": "gaussian"}),
    "trigonometric unnormalized": ("trigonometric", {"num_features": M, "normalize": False}),
    **{
        f"{f}": ("relu", {"num_features": M, "activation": f})
        for f in ("relu", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity")
    },
    "relu without projection": ("relu", {"projection": False}),
    "relu without eps": ("relu", {"num_features": M, "eps": 0.0}),
    "exp without projection": ("relu", {"activation": "exp", "projection": False}),
    "relu unnormalized": ("relu", {"num_features": 67, "normalize": False}),
    "exp unnormalized": ("relu", {"num_features": M, "activation": "exp", "normalize": False}),
    "tanh unnormalized": ("relu", {"num_features": M, "activation": "tanh", "normalize": False}),
    "elu": ("elu", {}),
    "elu unnormalized": ("elu", {"normalize": False}),
}
STREAMING = [name for name, (method, _) in VARIANTS.items() if method not in ("softmax", "gaussian")]
EXACT = [name for name in VARIANTS if name not in STREAMING]


def build(variant: str, dtype: torch.dtype = torch.float64, **more) -> torch.nn.Module:
    method, options = VARIANTS[variant]
    return kf.build_attention(method, **{**SIZES, **options, **more}).to(dtype)


def inputs(L=13, S=None, *, B=2, H=4, G=4, D=8, E=6, dtype=torch.float64, seed=0, size=1.0, grad=False):
    gen = torch.Generator().manual_seed(seed)
    S = L if S is None else S
    shapes = ((B, H, L, D), (B, G, S, D), (B, G, S, E))
    out = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    out[0], out[1] = out[0] * size, out[1] * size
    return [x.to(dtype).requires_grad_(grad) for x in out]


def phi(core, x: torch.Tensor) -> torch.Tensor:
    """Features of x (B, H, L, D), already scaled."""
    options = {**core.test_options} if hasattr(core, "test_options") else {}
    fm = core.feature_map
    omega = None if fm.omega is None else fm.omega.to(x.dtype)  # (1 or H, M, D)
    half = 0.5 * x.square().sum(-1, keepdim=True)
    m = x.shape[-1] if omega is None else omega.shape[-2]
    z = x if omega is None else torch.einsum("bhld,hmd->bhlm", x, omega.expand(x.shape[1], -1, -1))
    kernel = options.get("kernel", "softmax")
    if core.method in ("favor+", "favor+regularized"):
        return torch.exp(z - (half if kernel == "softmax" else 2 * half)) / math.sqrt(m)
    if core.method == "favor+hyperbolic":
        both = torch.cat([torch.exp(z), torch.exp(-z)], -1)
        return torch.exp(-(half if kernel == "softmax" else 2 * half)) * both / math.sqrt(2 * m)
    if core.method == "trigonometric":
        both = torch.cat([torch.cos(z), torch.sin(z)], -1)
        return (torch.exp(half) if kernel == "softmax" else 1.0) * both / math.sqrt(m)
    if core.method == "elu":
        return (F.elu(z) + 1) / math.sqrt(m)
    f = {
        "relu": torch.relu,
        "exp": torch.exp,
        "sigmoid": torch.sigmoid,
        "abs": torch.abs,
        "gelu": F.gelu,
        "cos": torch.cos,
        "tanh": torch.tanh,
        "identity": lambda t: t,
    }[options.get("activation", "relu")]
    return (f(z) + options.get("eps", 1e-3)) / math.sqrt(m)


def signed(variant: str) -> bool:
    method, options = VARIANTS[variant]
    return method == "trigonometric" or options.get("activation") in ("gelu", "cos", "tanh", "identity")


def attend(variant: str, core, q, k, v, *, is_causal=False, key_mask=None):
    """The definition of a variant."""
    method, options = VARIANTS[variant]
    core.test_options = options
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scale = 1.0 if options.get("normalize_qk") or method == "elu" else q.shape[-1] ** -0.5
    if options.get("normalize_qk"):
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    q, k = q * math.sqrt(scale), k * math.sqrt(scale)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if is_causal:
        visible = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    bound = 0.0
    if method == "softmax":
        weights = torch.exp(q @ k.transpose(-1, -2))
    elif method == "gaussian":
        weights = torch.exp(-0.5 * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    else:
        phi_q, phi_k = phi(core, q), phi(core, k)
        weights = phi_q @ phi_k.transpose(-1, -2)
        if signed(variant):
            norms = torch.where(visible, phi_k.norm(dim=-1).unsqueeze(-2), 0.0).sum(-1, keepdim=True)
            bound = 1e-2 * phi_q.norm(dim=-1, keepdim=True) * norms
    weights = torch.where(visible, weights, 0.0)
    if not options.get("normalize", method != "gaussian"):
        return weights @ v
    total = weights.sum(-1, keepdim=True)
    total = torch.maximum(total, bound) if isinstance(bound, torch.Tensor) else total
    seen = visible.any(-1, keepdim=True) & (total > 0)
    return torch.where(seen, weights @ v / torch.where(seen, total, 1.0), 0.0)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """Equal up to the tolerance of the dtype, relative to the largest entry."""
    assert got.shape == want.shape, f"shapes {tuple(got.shape)} and {tuple(want.shape)}"
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    if got.numel() == 0:
        return
    got, want = got.detach().double(), want.detach().double()
    assert not got.isnan().any(), "NaN"
    error = float((got - want).abs().max()) / max(float(want.abs().max()), 1.0)
    assert error <= tolerance, f"off by {error:.2e}, allowed {tolerance:.0e}"


def padding(B: int, S: int) -> torch.Tensor:
    """A mask with left padding, right padding and holes, by sample."""
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, : S // 3] = False
    if B > 1:
        mask[1, S - S // 3 :] = False
        mask[1, S // 2] = False
    return mask
