"""The variants that the conformance suite runs through, their tolerances, and helpers.

The definition that they are compared with is `reference`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import kernelformer as kf
from kernelformer.attention import strips
from kernelformer.attention.plain import pairs
from kernelformer.feature_maps import FormulaMap
from kernelformer.modules import KernelCore
from reference import reference_attention

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SIZES = {"head_dim": 8, "num_heads": 4}
M = 24

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "feature-map.md"


class SignedFormula(FormulaMap):
    """phi_i(x) = tanh(w_i . x + b_i) + shift: a signed map by its formula alone; b = 0 maps a token of zeros to 0."""

    def first_values(self):
        return {"b": torch.zeros(self.heads, self.num_features)}

    @staticmethod
    def phi(x, tensors, role, shift):
        omega, b = tensors
        return torch.tanh(x @ omega.mT + b.unsqueeze(-2)) + shift


def documented() -> dict:
    """The map that the documentation shows."""
    names: dict = {"__name__": __name__}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    return {"documented": (names["PolynomialMap"], {"num_features": M, "per_head": True})}


# One entry per map, kernel, draw and switch: being in this list is what makes a variant pass the conformance suite.
# A method by its name, or the class of a map that the library does not have.
VARIANTS: dict[str, tuple[str | type[FormulaMap], dict]] = {
    **documented(),
    "signed formula": (SignedFormula, {"num_features": M, "settings": {"shift": 0.5}}),
    "softmax": ("softmax", {}),
    "softmax unit": ("softmax", {"normalize_qk": True}),
    "gaussian": ("gaussian", {}),
    "gaussian normalized": ("gaussian", {"normalize": True}),
    "favor+": ("favor+", {"num_features": M}),
    "favor+ gaussian": ("favor+", {"num_features": M, "kernel": "gaussian"}),
    "favor+ unnormalized": ("favor+", {"num_features": M, "normalize": False, "kernel": "gaussian"}),
    "favor+ per head": ("favor+", {"num_features": M, "per_head": True}),
    "favor+ unit": ("favor+", {"num_features": M, "normalize_qk": True}),
    "favor++": ("favor++", {"num_features": M}),  # calibrated, as the next ones: see `calibrated`
    "favor++ unnormalized": ("favor++", {"num_features": M, "normalize": False, "normalize_qk": True}),
    "favor#": ("favor#", {"num_features": M}),
    "nprf": ("nprf", {"num_features": M}),
    "favor+ m < d": ("favor+", {"num_features": 5, "draw": "simplex"}),
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
        for f in ("relu", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "sign", "identity")
    },
    "relu without projection": ("relu", {"projection": False}),
    "relu without eps": ("relu", {"num_features": M, "eps": 0.0}),
    "exp without projection": ("relu", {"activation": "exp", "projection": False}),
    "relu unnormalized": ("relu", {"num_features": 67, "normalize": False}),
    "exp unnormalized": ("relu", {"num_features": M, "activation": "exp", "normalize": False}),
    "tanh unnormalized": ("relu", {"num_features": M, "activation": "tanh", "normalize": False}),
    "elu": ("elu", {}),
    "elu unnormalized": ("elu", {"normalize": False}),
    "gmm-rks": ("gmm-rks", {"num_features": M // 2}),
    "gmm-rks tied, no smoothing": ("gmm-rks", {"num_features": M // 2, "tied": True, "smoothing": 0}),
    "gmm-rks unnormalized": ("gmm-rks", {"num_features": M, "components": 1, "normalize": False}),
    "gmm-rks diagonal": ("gmm-rks", {"num_features": 9, "components": 3, "covariance": "diagonal", "per_head": False}),
    "gmm-prf": ("gmm-prf", {"num_features": M // 2}),
    "gmm-prf full": ("gmm-prf", {"num_features": M // 2, "covariance": "full", "tied": True}),
    "fastfood-rks": ("fastfood-rks", {"num_features": M}),
    "fastfood-rks by rows": ("fastfood-rks", {"num_features": M, "transform": "fwht", "smoothing": 0.25}),
    "fastfood-prf": ("fastfood-prf", {"num_features": M, "sigma": 1.5}),
    "fastfood-prf by rows": ("fastfood-prf", {"num_features": M, "transform": "fwht"}),
    "fastfood-prf by rows, shared, S": (
        "fastfood-prf",
        {"num_features": M, "transform": "fwht", "learn": "S", "per_head": False, "normalize": False},
    ),
    "fastfood-prf fixed": ("fastfood-prf", {"num_features": M, "learn": "none"}),
    "generative-rks": ("generative-rks", {"num_features": M, "smoothing": "noise"}),
    "generative-prf": ("generative-prf", {"num_features": M, "width": 5, "depth": 2, "per_head": True}),
    "loglinear": ("loglinear", {"num_features": M}),
    "skyformer": ("skyformer", {"num_landmarks": 8}),
    "skyformer all": ("skyformer", {"num_landmarks": 100, "gamma": 0.1}),
    "skyformer softmax": ("skyformer", {"num_landmarks": 7, "kernel": "softmax", "gamma": 0.1}),
    "skyformer aligned": ("skyformer", {"num_landmarks": 7, "kernel": "softmax", "gamma": 0.1, "align": True}),
    "skyformer segments": ("skyformer", {"num_landmarks": 6, "landmarks": "segments", "inverse": "iterative"}),
    "skyformer leverage": ("skyformer", {"num_landmarks": 8, "landmarks": "leverage", "gamma": 0.1}),
    "skyformer pivoted": ("skyformer", {"num_landmarks": 8, "landmarks": "pivoted", "gamma": 0.1}),
    "skyformer learned": ("skyformer", {"num_landmarks": 8, "landmarks": "learned"}),
    "skyformer learned softmax": (
        "skyformer",
        {"num_landmarks": 8, "landmarks": "learned", "kernel": "softmax", "gamma": 0.1},
    ),
    "wildcat": ("wildcat", {"num_landmarks": 7}),
    "wildcat greedy": ("wildcat", {"num_landmarks": 7, "pivots": "greedy"}),
    "nystromformer": ("nystromformer", {"num_landmarks": 6}),
    "nystromformer all": ("nystromformer", {"num_landmarks": 50, "rounds": 8}),
    "linformer": ("linformer", {"max_length": 150, "rank": 7}),
    "rfa": ("rfa", {"num_features": M}),
    "rfa shared": ("rfa", {"num_features": 9, "draw": "iid", "per_head": False}),
    "rfa-gate": ("rfa-gate", {"num_features": M}),
    "rfa-gate shared": ("rfa-gate", {"num_features": 9, "per_head": False}),
    "loglinear like favor#": ("loglinear", {"num_features": M, "start": "favor#"}),
    "loglinear free keys": ("loglinear", {"num_features": M, "unit_keys": False}),
    "loglinear unnormalized": ("loglinear", {"num_features": M, "per_head": False, "normalize": False}),
    "hedgehog": ("hedgehog", {}),
}
NEAR = {"window": 5, "sinks": 2}
# The same with near tokens exactly: a map of each kind, with one set of frequencies and with one per head.
VARIANTS |= {
    f"{name} near": (VARIANTS[name][0], {**VARIANTS[name][1], **NEAR})
    for name in (
        "signed formula",
        "favor+",
        "favor+ per head",
        "favor#",
        "nprf",
        "trigonometric",
        "tanh",
        "elu",
        "gmm-rks",
        "fastfood-prf by rows",
        "loglinear",
        "hedgehog",
        "skyformer softmax",
        "skyformer learned softmax",
        "wildcat",
    )
}
VARIANTS |= {
    "favor+ window": ("favor+", {"num_features": M, "window": 4, "beta": "zero"}),
    "hyperbolic sinks": ("favor+hyperbolic", {"num_features": M // 2, "sinks": 3}),
    "rfa window 1": ("rfa", {"num_features": M, "window": 1, "sinks": 1}),
    "local": ("local", {**NEAR}),
    "local unit window": ("local", {"window": 4, "sinks": 0, "normalize_qk": True}),
}
# Landmarks from the whole sequence: not causal.
WHOLE = [
    name
    for name, (method, options) in VARIANTS.items()
    if (method == "skyformer" and options.get("landmarks") != "learned")
    or method in ("nystromformer", "linformer", "wildcat")
]
NEARS = [name for name, (method, options) in VARIANTS.items() if "window" in options or "sinks" in options]
FORGETS = [name for name, (method, _) in VARIANTS.items() if method == "rfa-gate"]  # causal only
STREAMING = [name for name in VARIANTS if name not in WHOLE]
MAPPED = [name for name in STREAMING if VARIANTS[name][0] not in ("softmax", "gaussian", "local")]


def build(variant: str, dtype: torch.dtype = torch.float64, **more) -> torch.nn.Module:
    method, options = VARIANTS[variant]
    settings = {**SIZES, **options, **more}
    if isinstance(method, str):
        core = kf.build_attention(method, **settings)
    else:
        near = {name: settings.pop(name) for name in NEAR if name in settings}
        core = KernelCore(variant, method(**settings), **near)
    if core.calibrates:
        calibrated(core)
    learn_something(core)
    return core.to(dtype)


def calibrated(core: torch.nn.Module) -> None:
    """Statistics of queries and keys that differ by head, by coordinate and from each other, with means."""
    gen = torch.Generator().manual_seed(5)
    heads, dim = core.num_heads, core.head_dim
    mix = torch.randn(2, heads, dim, dim, generator=gen, dtype=torch.float64) * 0.3
    query, key = torch.randn(2, 2, heads, 40, dim, generator=gen, dtype=torch.float64) @ mix.unsqueeze(1) + 0.2

    core.calibrate(query, 2 * key)


def learn_something(core: torch.nn.Module) -> None:
    """Learned parameters move away from its start, where a formula may be right by accident."""
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for x in core.parameters():
            x += 0.2 * torch.randn(x.shape, generator=gen)


def mode(variant: str) -> dict:
    """Arguments of a variant where they do not matter."""
    return {"is_causal": True} if variant in FORGETS else {}


def inputs(L=13, S=None, *, B=2, H=4, G=4, D=8, E=6, dtype=torch.float64, seed=0, size=1.0, grad=False):
    gen = torch.Generator().manual_seed(seed)
    S = L if S is None else S
    shapes = ((B, H, L, D), (B, G, S, D), (B, G, S, E))
    out = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    out[0], out[1] = out[0] * size, out[1] * size
    return [x.to(dtype).requires_grad_(grad) for x in out]


def signed(variant: str) -> bool:
    """True if small denominators, or inverses, multiply rounding."""
    method, options = VARIANTS[variant]
    if not isinstance(method, str):
        return method is SignedFormula
    return (
        method in ("trigonometric", "skyformer", "wildcat", "nystromformer", "rfa", "rfa-gate")
        or method.endswith("-rks")
        or options.get("activation") in ("gelu", "cos", "tanh", "sign", "identity")
    )


def attend(variant: str, core, q, k, v, **how) -> torch.Tensor:
    """The definition of a variant, by hand; ``how`` is that of `reference_attention`.

    The settings that a method has by itself are known here, so that the core cannot get them wrong.
    """
    method, options = VARIANTS[variant]
    unit = bool(options.get("normalize_qk")) or method in ("rfa", "rfa-gate", "nprf")
    assert core.normalize_qk == unit
    if hasattr(core, "normalize"):
        sums = method == "gaussian" or (method == "skyformer" and options.get("kernel") != "softmax")
        assert core.normalize == options.get("normalize", not sums)
    scale = 1.0 if unit or method == "elu" else q.shape[-1] ** -0.5
    if variant in NEARS:
        near_scale = how.get("scale", 1.0 if unit else q.shape[-1] ** -0.5)
        assert core.near.scale_of(scale) == near_scale
        assert (core.window, core.sinks) == (options.get("window"), options.get("sinks", 0))
    return reference_attention(core, q, k, v, scale=scale, **how)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """Equal up to the tolerance of the dtype, relative to the largest entry."""
    assert got.shape == want.shape, f"shapes {tuple(got.shape)} and {tuple(want.shape)}"
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
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


def count_rescues(monkeypatch) -> list[int]:
    """Numbers of rows that are computed again in log space, from now on."""
    done, exact_rows, rescue = [], pairs.exact_rows, strips.Pass._rescue
    monkeypatch.setattr(pairs, "exact_rows", lambda *a: done.append(len(a[3])) or exact_rows(*a))
    monkeypatch.setattr(strips.Pass, "_rescue", lambda *a: done.append(len(a[-1])) or rescue(*a))
    return done
