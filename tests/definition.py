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
    "nprf": ("nprf", {"num_features": M}),
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
    "skyformer learned": ("skyformer", {"num_landmarks": 8, "landmarks": "learned"}),
    "skyformer learned softmax": (
        "skyformer",
        {"num_landmarks": 8, "landmarks": "learned", "kernel": "softmax", "gamma": 0.1},
    ),
    "nystromformer": ("nystromformer", {"num_landmarks": 6}),
    "nystromformer all": ("nystromformer", {"num_landmarks": 50, "rounds": 8}),
    "linformer": ("linformer", {"max_length": 150, "rank": 7}),
    "rfa": ("rfa", {"num_features": M}),
    "rfa shared": ("rfa", {"num_features": 9, "draw": "iid", "per_head": False}),
    "rfa-gate": ("rfa-gate", {"num_features": M}),
    "rfa-gate shared": ("rfa-gate", {"num_features": 9, "per_head": False}),
    "loglinear free keys": ("loglinear", {"num_features": M, "unit_keys": False}),
    "loglinear unnormalized": ("loglinear", {"num_features": M, "per_head": False, "normalize": False}),
}
# Landmarks from the whole sequence: not causal.
WHOLE = [
    name
    for name, (method, options) in VARIANTS.items()
    if (method == "skyformer" and options.get("landmarks") != "learned") or method in ("nystromformer", "linformer")
]
FORGETS = [name for name, (method, _) in VARIANTS.items() if method == "rfa-gate"]  # causal only
STREAMING = [name for name in VARIANTS if name not in WHOLE]
MAPPED = [name for name in STREAMING if VARIANTS[name][0] not in ("softmax", "gaussian")]


def build(variant: str, dtype: torch.dtype = torch.float64, **more) -> torch.nn.Module:
    method, options = VARIANTS[variant]
    core = kf.build_attention(method, **{**SIZES, **options, **more})
    learn_something(core)
    return core.to(dtype)


def learn_something(core: torch.nn.Module) -> None:
    """What is learned moves away from its start, where a formula may be right by accident."""
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for x in core.parameters():
            x += 0.2 * torch.randn(x.shape, generator=gen)


def hadamard(dim: int) -> torch.Tensor:
    """Entries (-1)^(number of ones that i and j share)."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=torch.float64)


def frequencies(core, dtype: torch.dtype) -> torch.Tensor:
    """(heads, M, D) from what the map keeps, as the paper writes it."""
    fm, options = core.feature_map, core.test_options
    if core.method.startswith("gmm"):
        S, mu, n = fm.S.to(dtype), fm.mu.to(dtype), fm.noise.to(dtype)
        if S.dim() == 3:
            S = torch.diag_embed(S)
        if options.get("tied"):
            S, mu = torch.cat([S, S], 1), torch.cat([mu, -mu], 1)
        heads = [
            torch.cat([torch.stack([S[h, c] @ n_i + mu[h, c] for n_i in n[h]]) for c in range(S.shape[1])])
            for h in range(S.shape[0])
        ]
        return torch.stack(heads)
    if core.method.startswith("fastfood"):
        heads, blocks, d = fm.P.shape
        H, eye = hadamard(d).to(dtype), torch.eye(d, dtype=dtype)

        def V(h, b):
            S, G, B = (torch.diag(x[h, b].to(dtype)) for x in (fm.S, fm.G, fm.B))
            return S @ H @ G @ eye[fm.P[h, b]] @ H @ B / (options.get("sigma", 1.0) * math.sqrt(d))

        rows = [torch.cat([V(h, b) for b in range(blocks)]) for h in range(heads)]
        return torch.stack(rows)[:, :, : core.head_dim]
    if core.method.startswith("rfa"):
        return fm.noise.to(dtype) * fm.sigma.to(dtype)[:, None]
    if core.method.startswith("generative"):
        net, h = fm.generator, fm.noise.to(dtype).flatten(0, 1)
        weights = [x.to(dtype) for x in net.weights]
        for layer, (gain, shift) in enumerate(zip(net.gains, net.shifts, strict=True)):
            h = h @ weights[layer].T
            h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
            h = h * gain.to(dtype) + shift.to(dtype)
            h = torch.where(h > 0, h, 0.01 * h)
        return torch.tanh(h @ weights[-1].T + net.bias.to(dtype)).view(fm.noise.shape)
    return fm.omega.to(dtype)


def mode(variant: str) -> dict:
    """How a variant is called where it does not matter."""
    return {"is_causal": True} if variant in FORGETS else {}


def inputs(L=13, S=None, *, B=2, H=4, G=4, D=8, E=6, dtype=torch.float64, seed=0, size=1.0, grad=False):
    gen = torch.Generator().manual_seed(seed)
    S = L if S is None else S
    shapes = ((B, H, L, D), (B, G, S, D), (B, G, S, E))
    out = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    out[0], out[1] = out[0] * size, out[1] * size
    return [x.to(dtype).requires_grad_(grad) for x in out]


def phi(core, x: torch.Tensor, role: str) -> torch.Tensor:
    """Features of x (B, H, L, D), already scaled."""
    options, fm = core.test_options, core.feature_map
    half = 0.5 * x.square().sum(-1, keepdim=True)
    heads = x.shape[1]
    if core.method == "loglinear":
        w, b = (fm.w_q, fm.b_q) if role == "query" else (fm.w_k, fm.b_k)
        w, b = w.to(x.dtype).expand(heads, -1, -1), b.to(x.dtype).expand(heads, -1)
        logs = torch.einsum("bhld,hmd->bhlm", x, w) + b[:, None]
        return logs.softmax(-1) if role == "key" and options.get("unit_keys", True) else torch.exp(logs)
    projects = core.method != "elu" and options.get("projection", True)
    omega = frequencies(core, x.dtype) if projects else None  # (1 or H, M, D)
    m = omega.shape[-2] if projects else x.shape[-1]
    z = torch.einsum("bhld,hmd->bhlm", x, omega.expand(heads, -1, -1)) if projects else x
    if core.method.endswith("-prf"):
        return torch.exp(z - 2 * half) / math.sqrt(m)
    if core.method.endswith("-rks"):
        smoothing = options.get("smoothing", 1.0)
        smoothing = (2 * fm.num_features) ** -0.5 if smoothing == "noise" else smoothing
        both = torch.cat([torch.cos(z), torch.sin(z)], -1) / math.sqrt(m)
        return torch.cat([both, torch.full_like(both[..., :1], math.sqrt(smoothing))], -1) if smoothing else both
    kernel = options.get("kernel", "softmax")
    if core.method in ("favor+", "favor+regularized", "nprf"):
        return torch.exp(z - (half if kernel == "softmax" else 2 * half)) / math.sqrt(m)
    if core.method == "favor+hyperbolic":
        both = torch.cat([torch.exp(z), torch.exp(-z)], -1)
        return torch.exp(-(half if kernel == "softmax" else 2 * half)) * both / math.sqrt(2 * m)
    if core.method.startswith("rfa"):
        return torch.cat([torch.cos(z), torch.sin(z)], -1) / math.sqrt(m)
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


def splitmix(x: int) -> int:
    """The finalizer of splitmix64, in 64 bits."""
    mask = (1 << 64) - 1
    x = ((x & mask) ^ ((x & mask) >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return (x ^ (x >> 31)) & ((1 << 53) - 1)


def landmarks(core, q, k, key_mask, query_mask) -> list[list[torch.Tensor]]:
    """The landmarks of every sample and head, (s, D) each, from queries and keys of all query heads, scaled."""
    options, fm = core.test_options, core.feature_map
    B, H = q.shape[:2]
    if options.get("landmarks") == "learned":
        return [[fm.Z[h].to(q.dtype) for h in range(H)]] * B
    s, gamma = options["num_landmarks"], options.get("gamma", 1e-3)
    out = []
    for b in range(B):
        parts = []
        for x, mask, slots, stream in ((q, query_mask, s // 2, 0), (k, key_mask, s - s // 2, 1)):
            tokens = x[b] if mask is None else x[b][:, mask[b]]
            parts.append((tokens, min(slots, x.shape[2]), stream))
        heads = []
        for h in range(H):
            if options.get("landmarks") == "segments":
                means = []
                for tokens, slots, _ in parts:
                    n = tokens.shape[1]
                    which = torch.tensor([i * slots // n for i in range(n)])
                    means += [tokens[h][which == i].mean(0) for i in range(slots) if bool((which == i).any())]
                heads.append(torch.stack(means) if means else tokens.new_zeros(0, q.shape[-1]))
                continue
            numbers = [
                [splitmix(i + int(fm.salt[stream])) for i in range(tokens.shape[1])] for tokens, _, stream in parts
            ]
            Z = torch.cat([_smallest(t[h], n, slots) for (t, slots, _), n in zip(parts, numbers, strict=True)])
            if options.get("landmarks") == "leverage":
                again = []
                for (tokens, slots, _), n in zip(parts, numbers, strict=True):
                    kappa = gaussian(tokens[h], Z)
                    inverse = torch.linalg.inv(gaussian(Z, Z) + gamma * torch.eye(len(Z), dtype=Z.dtype))
                    score = (1 - (kappa @ inverse * kappa).sum(-1)).clamp_min(gamma).tolist()
                    waits = [-math.log((u + 0.5) / 2**53) / r for u, r in zip(n, score, strict=True)]
                    again.append(_smallest(tokens[h], waits, slots))
                Z = torch.cat(again)
            heads.append(Z)
        out.append(heads)
    return out


def _smallest(tokens, numbers, slots):
    order = sorted(range(len(numbers)), key=lambda i: numbers[i])[:slots]
    return tokens[order]


def gaussian(x, y):
    return torch.exp(-0.5 * (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1))


def together(q, k, key_mask, query_mask):
    """Means and variances of queries and keys made equal, sample by sample and head by head."""
    moved_q, moved_k = [], []
    for b in range(q.shape[0]):
        mine = slice(None) if key_mask is None else key_mask[b]
        theirs = slice(None) if query_mask is None else query_mask[b]
        real_q, real_k = q[b][:, theirs], k[b][:, mine]
        if real_q.shape[1] == 0 or real_k.shape[1] == 0:
            moved_q.append(q[b]), moved_k.append(k[b])
            continue
        var_q, var_k = (x.var(1, correction=0, keepdim=True) for x in (real_q, real_k))
        floor = 1e-2 * (var_q + var_k) + torch.finfo(q.dtype).tiny ** 0.5
        t = ((var_k + floor) / (var_q + floor)) ** 0.25
        moved_q.append(q[b] * t)
        moved_k.append((k[b] - real_k.mean(1, keepdim=True)) / t + t * real_q.mean(1, keepdim=True))
    return torch.stack(moved_q), torch.stack(moved_k)


def nystrom(core, q, k, key_mask, query_mask) -> torch.Tensor:
    """kappa(Q, Z) (M + gamma I)^-1 kappa(Z, K), (B, H, L, S), for scaled q and k of all query heads."""
    gamma = core.test_options.get("gamma", 1e-3)
    rows = []
    for b, heads in enumerate(landmarks(core, q, k, key_mask, query_mask)):
        for h, Z in enumerate(heads):
            ridge = gaussian(Z, Z) + gamma * torch.eye(len(Z), dtype=Z.dtype)
            rows.append(gaussian(q[b, h], Z) @ torch.linalg.inv(ridge) @ gaussian(Z, k[b, h]))
    return torch.stack(rows).view(*q.shape[:2], q.shape[2], k.shape[2])


def signed(variant: str) -> bool:
    """Whether small denominators, or inverses, multiply rounding."""
    method, options = VARIANTS[variant]
    return (
        method in ("trigonometric", "skyformer", "nystromformer", "rfa", "rfa-gate")
        or method.endswith("-rks")
        or options.get("activation") in ("gelu", "cos", "tanh", "identity")
    )


def attend(variant: str, core, q, k, v, *, is_causal=False, key_mask=None, query_mask=None, bias=None):
    """The definition of a variant; without a query_mask the key_mask holds for as many queries as keys.

    bias: (H, L, S), added to the logarithms of the weights.
    """
    if query_mask is None and q.shape[2] == k.shape[2]:
        query_mask = key_mask
    method, options = VARIANTS[variant]
    core.test_options = options
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    unit = options.get("normalize_qk") or method.startswith(("rfa", "nprf"))
    scale = 1.0 if unit or method == "elu" else q.shape[-1] ** -0.5
    if unit and key_mask is not None:
        k = torch.where(key_mask[:, None, :, None], k, 0.0)
    if unit:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
    q, k = q * math.sqrt(scale), k * math.sqrt(scale)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if is_causal:
        visible = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    bound, tilt = 0.0, 1.0 if bias is None else bias.exp()
    if method == "softmax":
        weights = torch.exp(q @ k.transpose(-1, -2))
    elif method == "gaussian":
        weights = torch.exp(-0.5 * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    elif method in ("nystromformer", "linformer"):
        return baseline(core, q, k, v, key_mask, query_mask)
    elif method == "skyformer":
        clean = k if key_mask is None else torch.where(key_mask[:, None, :, None], k, 0.0)
        if options.get("align"):
            q, clean = together(q, clean, key_mask, query_mask)
        weights = nystrom(core, q, clean, key_mask, query_mask)
        if options.get("kernel") == "softmax":
            size_q, size_k = (torch.exp(0.5 * x.square().sum(-1, keepdim=True)) for x in (q, clean))
            weights = size_q * weights * size_k.transpose(-1, -2)
            bound = (
                1e-2
                * options["gamma"]
                * size_q
                * torch.where(visible, tilt * size_k.transpose(-1, -2), 0.0).sum(-1, keepdim=True)
            )
    else:
        phi_q, phi_k = phi(core, q, "query"), phi(core, k, "key")
        weights = phi_q @ phi_k.transpose(-1, -2)
        if signed(variant):
            norms = torch.where(visible, tilt * phi_k.norm(dim=-1).unsqueeze(-2), 0.0).sum(-1, keepdim=True)
            bound = 1e-2 * phi_q.norm(dim=-1, keepdim=True) * norms
    if method == "rfa-gate":
        kept = forgetting(core, k, visible, key_mask)
        weights = weights * kept
        norms = (phi_k.norm(dim=-1).unsqueeze(-2) * kept).sum(-1, keepdim=True)
        bound = 1e-2 * (
            phi_q.norm(dim=-1, keepdim=True) * (phi_k.norm(dim=-1).unsqueeze(-2) * kept).sum(-1, keepdim=True)
        )
    weights = torch.where(visible, tilt * weights, 0.0)
    kernelized = method == "gaussian" or (method == "skyformer" and options.get("kernel") != "softmax")
    if not options.get("normalize", not kernelized):
        return weights @ v
    total = weights.sum(-1, keepdim=True)
    total = torch.maximum(total, bound) if isinstance(bound, torch.Tensor) else total
    seen = visible.any(-1, keepdim=True) & (total > 0)
    return torch.where(seen, weights @ v / torch.where(seen, total, 1.0), 0.0)


def forgetting(core, k, visible, key_mask):
    """(1 - g_j) g_{j+1} ... g_i for the gates of the core, token by token; hidden tokens keep everything."""
    g = torch.sigmoid(
        torch.einsum("bhld,hd->bhl", k, core.gate_weight.to(k.dtype)) + core.gate_bias.to(k.dtype)[:, None]
    )
    B, H, S = g.shape
    L = visible.shape[-2]
    real = torch.ones(B, S, dtype=torch.bool) if key_mask is None else key_mask
    keep = torch.where(real[:, None], g, 1.0)
    rows, row = [], torch.zeros(B, H, S, dtype=k.dtype)
    for i in range(L):
        if i < S:
            fresh = torch.where(real[:, None, i], 1 - g[:, :, i], 0.0)
            row = row * keep[:, :, i : i + 1]
            row = torch.cat([row[:, :, :i], fresh.unsqueeze(-1), row[:, :, i + 1 :]], -1)
        rows.append(row)
    return torch.stack(rows, 2)


def baseline(core, q, k, v, key_mask, query_mask):
    """Nystromformer and Linformer, sample by sample, with real tokens only; q and k are scaled."""
    options = core.test_options
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    parts = []
    for b in range(q.shape[0]):
        real = torch.ones(k.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        rows = []
        for h in range(q.shape[1]):
            keys, values = k[b, h][real], v[b, h][real]
            if len(keys) == 0:
                rows.append(out[b, h])
                continue
            if core.method == "linformer":
                E, F_ = (x.to(q.dtype)[:, : k.shape[2]][:, real] for x in (core.E, core.F))
                rows.append(torch.softmax(q[b, h] @ (E @ keys).T, -1) @ (F_ @ values))
                continue
            queries = q[b, h]
            asked = queries if query_mask is None else queries[query_mask[b]]
            slots = min(options["num_landmarks"], len(asked), len(keys))
            mean_q, mean_k = (means(x, slots) for x in (asked, keys))
            A = torch.softmax(mean_q @ mean_k.T, -1)
            V = A.T / (A.sum(0).max() * A.sum(1).max())
            eye = torch.eye(len(A), dtype=A.dtype)
            for _ in range(options.get("rounds", 6)):
                AV = A @ V
                V = 0.25 * V @ (13 * eye - AV @ (15 * eye - AV @ (7 * eye - AV)))
            row = torch.softmax(queries @ mean_k.T, -1) @ V @ torch.softmax(mean_q @ keys.T, -1) @ values
            if options.get("conv"):
                whole = torch.where(real[:, None], v[b, h], 0.0)
                half = options["conv"] // 2
                padded = F.pad(whole, (0, 0, half, half))
                row = row + sum(w.to(q.dtype) * padded[i : i + len(whole)] for i, w in enumerate(core.conv_weight[h]))
            rows.append(row)
        parts.append(torch.stack(rows))
    return torch.stack(parts)


def means(x, slots):
    which = torch.tensor([i * slots // len(x) for i in range(len(x))])
    return torch.stack([x[which == i].mean(0) for i in range(slots) if bool((which == i).any())])


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """Equal up to the tolerance of the dtype, relative to the largest entry."""
    assert got.shape == want.shape, f"shapes {tuple(got.shape)} and {tuple(want.shape)}"
    if got.dtype == torch.bool:
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
