"""Attention with a relative bias by fast Fourier transforms (NPRF with RPE, Algorithm 1).

    Y_m = T (phi_m(k) [v, 1])      T_ij = exp(b_{j-i})      out_i = sum_m phi_m(q_i) Y_mi[:E] / sum_m phi_m(q_i) Y_mi[E]

A Toeplitz product is a circular convolution of twice the length. Features are taken some at a time, the sequence along
the last axis; the backward pass does each group again, by transforms too. On a grid every row is followed by C - 1
empty places: then distances on the grid are distances in the sequence, and one transform does for both axes.

A transform's rounding is absolute: rows with small sums lose digits. `is_safe` says beforehand where that cannot show;
afterwards rows that may have lost all but one are an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD
from kernelformer.attention.relative.call import Layout, RelativeCall
from kernelformer.contract import PositiveSpec, SignedSpec, compute_dtype, lookup

BLOCK = 1 << 22  # numbers in one transformed block
LIMIT = 1e-4  # error of a row that is not accepted
LOST = 0.1  # nor this one where a transform was asked for by name


def _fast_size(least: int) -> int:
    """The smallest number of factors 2, 3 and 5 that is at least this: what transforms are fast for."""
    best = 1 << max(least - 1, 0).bit_length()
    for three in (1, 3, 9):
        for five in (1, 5, 25):
            factor = three * five
            best = min(best, factor << max(-(-least // factor) - 1, 0).bit_length())
    return best


class Places:
    """Places of the tokens in the sequence that is transformed, and the table over its distances."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        wide = 2 * layout.cols - 1
        self.length = layout.rows * wide if layout.rows else layout.L
        self.keys = layout.rows * wide if layout.rows else layout.S
        self.size = _fast_size(self.length + self.keys - 1)
        grid = torch.arange(layout.rows * layout.cols, device=device)
        self.index = grid // max(layout.cols, 1) * wide + grid % max(layout.cols, 1) if layout.rows else None

    def spread(self, x: Tensor) -> Tensor:
        """Tokens (..., n) at their places."""
        if self.index is None:
            return x
        out = x.new_zeros(*x.shape[:-1], self.length)
        placed: Tensor = out.index_copy(-1, self.index, x)
        return placed

    def gather(self, x: Tensor) -> Tensor:
        """The inverse."""
        return x if self.index is None else x.index_select(-1, self.index)

    def spectrum(self, factors: Tensor) -> Tensor:
        """Of the table (H, *layout.table), so that a product with it is ``sum_j factor_{j-i} x_j``."""
        flat = factors.flatten(1)
        if self.layout.rows:
            flat = torch.nn.functional.pad(flat, (self.layout.cols - 1, self.layout.cols - 1))
        spectrum: Tensor = torch.fft.rfft(flat.flip(1), n=self.size)
        return spectrum

    def apply(self, spectrum: Tensor, x: Tensor) -> Tensor:
        """``sum_j factor_{j-i} x_j`` along the last axis, (..., S) -> (..., L)."""
        y: Tensor = torch.fft.irfft(torch.fft.rfft(self.spread(x), n=self.size) * spectrum, n=self.size)
        return self.gather(y[..., self.keys - 1 : self.keys - 1 + self.length])


def _features(
    query: Tensor, key: Tensor, call: RelativeCall, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Features (B, H, n, M) up to factors that cancel, and their lengths (B, H, n) for the guard, or None."""
    known, tensors, scale = lookup(call.spec), call.tensors, call.scale
    if isinstance(known, PositiveSpec):
        lq = known.log_shares(query, tensors, scale, "query")
        lk = known.log_shares(key, tensors, scale, "key")
        if hidden is not None:
            lk = lk.masked_fill(hidden, -torch.inf)
        shift = lk.detach().amax(2, keepdim=True).clamp_min(EMPTY)
        lq = lq + shift
        return (lq - lq.detach().amax(3, keepdim=True)).exp(), (lk - shift).exp(), None, None
    assert isinstance(known, SignedSpec)
    phi_q, _ = known.features(query, tensors, scale, "query", True)
    phi_k, factor = known.features(key, tensors, scale, "key", True)
    length = known.length(True)
    sizes = [x.norm(dim=-1) if length is None else x.new_full(x.shape[:-1], length) for x in (phi_q, phi_k)]
    if factor is not None:
        if hidden is not None:
            factor = factor.masked_fill(hidden, -torch.inf)
        size = (factor - factor.detach().amax(2, keepdim=True).clamp_min(EMPTY)).exp()
        phi_k, sizes[1] = phi_k * size, sizes[1] * size.squeeze(-1)
    if hidden is not None:
        phi_k, sizes[1] = phi_k.masked_fill(hidden, 0), sizes[1].masked_fill(hidden.squeeze(-1), 0)
    return (phi_q, phi_k, sizes[0], sizes[1]) if known.guarded else (phi_q, phi_k, None, None)


def _block(phi_q: Tensor, phi_k: Tensor, columns: Tensor, spectrum: Tensor, places: Places) -> Tensor:
    """Some features of one head: (m, L), (m, S), (E + 1, S) -> (E + 1, L)."""
    y = places.apply(spectrum, phi_k.unsqueeze(1) * columns)
    return (phi_q.unsqueeze(1) * y).sum(0)


def fft_attention(call: RelativeCall) -> Tensor:
    """Attend with a relative bias by transforms: (B, H, L, E), zero where no key is visible; no window, no state.

    Cost: O(M (E + 1) n log n) time, n = L + S; memory of a few blocks of `BLOCK` numbers, and the mapped tokens.
    """
    layout, key_mask, is_causal = call.layout, call.key_mask, call.is_causal
    query, key = call.normalized()
    dtype = compute_dtype(query.dtype)
    work = [x.to(dtype) for x in (query, key, call.value)]
    hidden = None
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        work[1:] = [x.masked_fill(hidden, 0) for x in work[1:]]
    phi_q, phi_k, size_q, size_k = _features(work[0], work[1], call, hidden)
    table = call.bias.to(dtype)
    if is_causal:
        table = layout.hide_future(table)
    peak = table.detach().flatten(1).amax(1).clamp_min(0 if layout.prefix else EMPTY)
    factors = (table - peak.view(-1, *[1] * (table.dim() - 1))).exp()
    plain = (-peak).exp()
    places = Places(layout, query.device)
    spectra = places.spectrum(factors)
    columns = torch.cat([work[2], work[2].new_ones(*work[2].shape[:3], 1)], 3).transpose(2, 3)  # (B, H, E + 1, S)
    phi_q, phi_k = phi_q.transpose(2, 3), phi_k.transpose(2, 3)  # (B, H, M, n)
    start, M = layout.prefix, phi_q.shape[2]
    step = max(1, BLOCK // (columns.shape[2] * places.size))
    rows = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            total = columns.new_zeros(columns.shape[2], layout.L - start)
            for m in range(0, M, step):
                parts = (phi_q[b, h, m : m + step, start:], phi_k[b, h, m : m + step, start:], columns[b, h, :, start:])
                total = total + checkpoint(_block, *parts, spectra[h], places, use_reentrant=False)
            if start:
                total = _with_prefix(total, phi_q[b, h], phi_k[b, h], columns[b, h], plain[h], start, is_causal)
            rows.append(total)
    sums = torch.stack(rows).view(*query.shape[:2], columns.shape[2], layout.L).transpose(2, 3)
    den = sums[..., -1:]
    if size_q is not None and size_k is not None:
        norms = _counts(size_k, factors, plain, places, is_causal)
        den = torch.maximum(den, GUARD * (size_q * norms).unsqueeze(-1))
    with torch.no_grad():  # a row that sees nothing has rounding for a sum
        real = den.new_ones(query.shape[0], layout.S) if key_mask is None else key_mask.to(dtype)
        seen = _counts(
            real.unsqueeze(1).expand(-1, query.shape[1], -1), (factors > 0).to(dtype), plain * 0 + 1, places, is_causal
        )
        visible = seen > 0.5
        _check_rounding(den.squeeze(-1), visible, phi_q, phi_k, factors, start)
    some = ~(den <= 0) & visible.unsqueeze(-1)
    return torch.where(some, sums[..., :-1] / torch.where(some, den, 1.0), 0.0).to(query.dtype)


def _check_rounding(den: Tensor, visible: Tensor, phi_q: Tensor, phi_k: Tensor, factors: Tensor, start: int) -> None:
    """Raise where rounding may be `LOST` of what a ``visible`` row is divided by (B, H, L), after the prefix.

    That of a feature's sums is about ``eps |factors| |phi_m|``, in Euclidean norms: measured, errors are 0.02 to 1 of
    this. Features are (B, H, M, n).
    """
    sizes = torch.linalg.vector_norm(phi_k, dim=3, keepdim=True) * torch.finfo(den.dtype).eps
    noise = (phi_q.abs() * sizes).sum(2) * torch.linalg.vector_norm(factors.flatten(1), dim=1).unsqueeze(1)
    lost = ((noise > LOST * den) & visible)[..., start:].any()
    wrong = (
        f"algorithm='fft' may be off by more than {LOST:.0%} in some row: a transform's rounding is absolute, and the "
        f"log weights of this call differ by too much; use algorithm='direct', or None, which takes 'fft' only where "
        f"it is safe."
    )
    if torch.compiler.is_compiling():
        if lost.device.type in ("cpu", "cuda"):
            torch._assert_async(~lost, wrong)
    elif not lost.is_meta and bool(lost):
        raise ValueError(wrong)


def _counts(weights: Tensor, factors: Tensor, plain: Tensor, places: Places, is_causal: bool) -> Tensor:
    """``sum_j factor_{j-i} w_j`` of numbers w (B, H, S), one feature that all queries share: (B, H, L)."""
    start = places.layout.prefix
    total = places.apply(places.spectrum(factors), weights[..., start:])
    if not start:
        return total
    plain = plain.view(1, -1, 1)
    before = weights[..., :start].sum(-1, keepdim=True)
    own = weights[..., :start].cumsum(-1) if is_causal else weights.sum(-1, keepdim=True).expand(-1, -1, start)
    return torch.cat([own * plain, total + before * plain], -1)


def _with_prefix(
    total: Tensor, phi_q: Tensor, phi_k: Tensor, columns: Tensor, plain: Tensor, start: int, is_causal: bool
) -> Tensor:
    """Add the tokens before the grid, whose bias is 0: (E + 1, L - start) -> (E + 1, L); phi (M, n), columns (., S)."""
    before = phi_q[:, start:].T @ phi_k[:, :start] @ columns[:, :start].T  # of the grid's queries
    weights = phi_q[:, :start].T @ phi_k
    if is_causal:
        weights = weights.tril()
    return torch.cat([weights @ columns.T * plain, total.T + before * plain]).T


@torch.no_grad()
def is_safe(call: RelativeCall) -> bool:
    """True if the rounding of a transform stays below `LIMIT` in every row, for any queries.

    The error of a feature's sums is about ``eps |factors| |phi_m|``, in Euclidean norms. A row's own sum of it is no
    less than the smallest factor times the sum of what it sees. Signed maps can cancel, so they are never safe; nor is
    a bias that hides keys, since what a row sees is not known then.
    """
    known, layout, is_causal = lookup(call.spec), call.layout, call.is_causal
    if not isinstance(known, PositiveSpec) or bool(call.bias.isneginf().any()):
        return False
    dtype = compute_dtype(call.query.dtype)
    logs = known.log_shares(call.normalized()[1].to(dtype), call.tensors, call.scale, "key")
    if call.key_mask is not None:
        logs = logs.masked_fill(~call.key_mask[:, None, :, None], -torch.inf)
    table = call.bias.to(dtype)
    table = (layout.hide_future(table) if is_causal else table).flatten(1)
    spread = 0.5 * (2 * table).logsumexp(1) - table.masked_fill(table == -torch.inf, torch.inf).amin(1)  # (H)
    size = 0.5 * (2 * logs).logsumexp(2)  # (B, H, M)
    seen = logs[:, :, 0] if is_causal else logs.logsumexp(2)
    worst = (size - seen).amax(2) + spread
    eps = torch.finfo(dtype).eps * math.log2(max(layout.L + layout.S, 2))
    return bool((worst < math.log(LIMIT / eps)).all())
