"""The inputs of attention with a relative bias, and where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.positive import EMPTY
from kernelformer.contract import compute_dtype

Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Places of L queries and S keys."""

    L: int
    S: int
    offset: int = 0  # position of the first query, counted from the first key
    rows: int = 0  # of a grid; 0 for a sequence
    cols: int = 0
    prefix: int = 0  # tokens before the grid, with bias 0 to and from everything

    @property
    def table(self) -> tuple[int, ...]:
        """Shape of the bias, after the heads."""
        return (2 * self.rows - 1, 2 * self.cols - 1) if self.rows else (max(self.L + self.S - 1, 0),)

    def hide_future(self, bias: Tensor) -> Tensor:
        """The table with -inf where the key comes after the query; in a grid, tokens come row by row."""
        if self.rows:
            future = torch.ones(self.table, dtype=torch.bool, device=bias.device)
            future[: self.rows - 1] = False
            future[self.rows - 1, : self.cols] = False
        else:
            future = torch.arange(self.table[0], device=bias.device) > self.L - 1 + self.offset
        return bias.masked_fill(future, -torch.inf)


def constant_beyond(bias: Tensor, middle: int, is_causal: bool = False) -> int:
    """The distance beyond which a table (H, T) is constant on each side of entry ``middle``, or on its left; O(H T)."""
    reach = 0
    for side in (bias[:, : middle + 1].flip(1), *(() if is_causal else (bias[:, middle:],))):
        if side.shape[1] < 2:
            continue
        same = (side == side[:, -1:]).all(0).flip(0)
        reach = max(reach, side.shape[1] - 1 - int(same.cumprod(0).sum()) + 1)
    return reach


NO_WINDOW = -1

# The operators' arguments for a call, in the order of `RelativeCall.tensor_arguments` and `RelativeCall.settings`.
TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor[] tensors, Tensor bias, Tensor? slope, "
    "Tensor[] state, Tensor[] right_state"
)
SETTINGS = "str spec, float scale, bool is_causal, SymInt window, SymInt[] layout, bool unit"
_NAMES = [x.split()[1] for x in TENSORS.split(", ")]
NUM_TENSORS, NUM_SETTINGS = len(_NAMES), SETTINGS.count(", ") + 1


@dataclass(frozen=True, kw_only=True)
class RelativeCall:
    """The inputs of one call of attention with a relative bias.

        out_i = sum_j w_ij v_j / sum_j w_ij      w_ij = exp(b_{j-i}) phi(q_i) . phi(k_j)      (NPRF with RPE, Eq. 10)

    A call may be a part of a longer sequence: keys beyond the window of all of its queries then come as sums,
    `state` for those before the keys of the call and `right_state` for those after them, four tensors each,

        exp(shift) kv = sum_j f_j phi(k_j) v_j^T      exp(shift) ks = sum_j f_j phi(k_j)
        exp(shift) ns = sum_j f_j |phi(k_j)|          f_j = exp(-slope (d_j - window)), 1 without a slope

    shift (B, H, 1, M), or (B, H, 1, 1) for signed maps, kv (B, H, M, E), ks (B, H, M, 1) and ns (B, H, 1, 1). In
    `state` d_j is the distance of key j from the *first* query of the call, in `right_state` that from its *last*
    query, the keys of the call between them counted; all d_j exceed the window. The sums that `relative_attention`
    returns are therefore the state of a call whose first query comes right after the last key. The table's entry at the
    window is not in the sums. phi is the map as it is bound under normalization (`PositiveSpec.log_shares`,
    `SignedSpec.features` with ``normalize=True``), which leaves out the same of all keys. ns counts for maps with a
    guard, for others it may be 0. A side without keys has ``shift = EMPTY`` and zeros, or no tensors at all.
    `sums_of_state` makes these tensors of the state of a map.

    The shift is a gauge, since only exp(shift) times the sums counts: autograd takes it for a constant, and gradients
    go to kv, ks and ns alone. A shift made of what is learned needs its gradient put into the sums, as `sums_of_state`
    does.

    Args:
        query: (B, H, L, D).
        key: (B, H, S, D).
        value: (B, H, S, E).
        bias: (H, L + S - 1) over distances j - i, or (H, 2R - 1, 2C - 1) on a grid; -inf = hidden.
        spec: of the map, as `contract.intern_formula` names it.
        tensors: of the map, (B or 1, H or 1, ...) in the dtype of the arithmetic.
        scale: the map sees ``sqrt(scale) x``.
        layout: of the tokens.
        key_mask: (B, S) bool, True = attend.
        is_causal: key j is visible to query i iff j <= i + layout.offset.
        window: the bias is a straight line beyond this distance on each side; None: nothing is known of it. The
            gradient of a tail goes to the entry at the window.
        slope: (H), the fall of that line per token; None: it is level.
        state: sums of earlier keys, all of them beyond the window, as `relative_attention` returned them, or ().
        right_state: the same of later keys, for bidirectional calls.
        normalize_qk: divide queries and keys by their L2 norm first.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    spec: str
    tensors: Sequence[Tensor]
    scale: float
    layout: Layout
    key_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    slope: Tensor | None = None
    state: Sequence[Tensor] = ()
    right_state: Sequence[Tensor] = ()
    normalize_qk: bool = False

    @property
    def tensor_arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator that `TENSORS` declares."""
        found = [getattr(self, x) for x in _NAMES]
        return tuple(list(x) if isinstance(x, tuple | list) else x for x in found)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments of an operator that `SETTINGS` declares."""
        x, window = self.layout, NO_WINDOW if self.window is None else self.window
        layout = [x.L, x.S, x.offset, x.rows, x.cols, x.prefix]
        return self.spec, self.scale, self.is_causal, window, layout, self.normalize_qk

    @staticmethod
    def of(tensor_arguments: Sequence[Any], settings: Sequence[Any]) -> RelativeCall:
        """The call that an operator's arguments stand for."""
        spec, scale, is_causal, window, layout, normalize_qk = settings
        return RelativeCall(
            **dict(zip(_NAMES, tensor_arguments, strict=True)),
            spec=spec,
            scale=scale,
            layout=Layout(*layout),
            is_causal=is_causal,
            window=None if window == NO_WINDOW else window,
            normalize_qk=normalize_qk,
        )

    def normalized(self) -> tuple[Tensor, Tensor]:
        """Queries and keys, over their L2 norm where that is asked for."""
        query, key = self.query, self.key
        if not self.normalize_qk:
            return query, key
        if self.key_mask is not None:  # the gradient of a norm must not see what the mask hides
            key = key.masked_fill(~self.key_mask[:, None, :, None], 0)
        dtype = compute_dtype(query.dtype)
        return F.normalize(query.to(dtype), dim=-1), F.normalize(key.to(dtype), dim=-1)


def sums_of_state(state: Sequence[Tensor], positive: bool) -> list[Tensor]:
    """The shift, kv, ks and ns of a `RelativeCall.state` from the state of a map for every query head, differentiably.

        positive:  shift = log_mass^T, kv = mean, ks = 1, ns = 0
        signed:    shift = log_scale, and kv, k_sum and norm_sum as they are

    Both hold sums of the same features if these are the sums of whole rows (`key_sums` with ``normalize=True,
    parts=False``). A shift is a constant to autograd: the gradient of log_mass or log_scale goes through the sums, by a
    factor that is 1. Of no keys (a log mass or scale of EMPTY or less): EMPTY and zeros.
    """
    log, *sums = state
    real = log > EMPTY / 2
    if not positive:
        # Maps without a log factor leave the scale at that of no keys: their sums are in units of 1.
        some = (sums[0] != 0).any(-2, keepdim=True).any(-1, keepdim=True) | (sums[1] != 0).any(-2, keepdim=True)
        log = log.masked_fill(~real, EMPTY).masked_fill(~real & some, 0)
        shift = log.detach()
        gain = (log - shift).exp()
        return [shift, *(x * gain for x in sums)]
    log = log.masked_fill(~real, EMPTY)
    shift = log.detach()
    ks = (log - shift).exp().masked_fill(~real, 0)
    return [shift.transpose(-2, -1), sums[0] * ks, ks, log.new_zeros(*log.shape[:-2], 1, 1)]


def state_of_sums(sums: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `sums_of_state` for a positive map, differentiably."""
    shift, kv, ks, _ = sums
    some = ks > 0
    mass = torch.where(some, ks, 1.0)
    return [torch.where(some, mass.log() + shift.detach().mT, EMPTY), kv / mass]
