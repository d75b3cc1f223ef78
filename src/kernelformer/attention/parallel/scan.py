"""Running sums over chunks, relative to a scale that never falls, in a few products.

    out_c = sum_{c' <= c} exp(top_c' - top_c) sums_c'

Within a group of r chunks this is a product with the triangle of decays, all of them at most 1; the last ones of the
groups are summed up in the same way, and added. Levels: log n / log r.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 160  # chunks that are summed up by one product at most: a triangle costs n r numbers a feature


def group_size(count: int) -> int:
    """Chunks of a group: the least with which so many levels do that groups of `GROUP` would need."""
    levels, reach = 1, GROUP
    while reach < count:
        levels, reach = levels + 1, reach * GROUP
    group = 1
    while group**levels < count:
        group += 1
    return group


def filled_up(count: int) -> int:
    """So many chunks, or the few more that make whole groups."""
    return -(-count // group_size(count)) * group_size(count)


def later_than(size: int, device: torch.device) -> Tensor:
    """Which of ``size`` come after which, (size, size) bool; its upper left corners serve for fewer."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def running_sums(sums: Tensor, top: Tensor, later: Tensor) -> Tensor:
    """Sums over all chunks up to each one.

    Args:
        sums: (N, n, M, W), relative to ``exp(top)`` each; n is what `filled_up` gives.
        top: (N, n, M), or (N, n, 1) for all features; does not fall along n, and has no gradient.
        later: `later_than` of `GROUP` or more.

    Returns:
        (N, n, M, W), relative to ``exp(top)``.

    Cost: O(n r M W) time for r = n^(1/levels), at most `GROUP`.
    """
    rows, count = sums.shape[:2]
    group = group_size(count)
    if group == count:
        return _triangle(sums, top, later)
    groups = count // group
    tops = top.unflatten(1, (groups, group))
    inside = _triangle(sums.reshape(rows * groups, group, *sums.shape[2:]), tops.flatten(0, 1), later)
    inside = inside.view(rows, groups, *inside.shape[1:])
    last = _running_ends(inside[:, :, -1], tops[:, :, -1], later)
    decay = (tops[:, :-1, -1:] - tops[:, 1:]).exp_().unsqueeze(-1)
    inside[:, 1:].addcmul_(decay, last[:, :-1].unsqueeze(2))
    return inside.flatten(1, 2)


def _running_ends(sums: Tensor, top: Tensor, later: Tensor) -> Tensor:
    """The same of the ends of the groups, which may need some more to make whole groups of groups."""
    (rows, count), missing = top.shape[:2], filled_up(top.shape[1]) - top.shape[1]
    if missing:
        sums = torch.cat([sums, sums.new_zeros(rows, missing, *sums.shape[2:])], 1)
        top = torch.cat([top, top[:, -1:].expand(-1, missing, -1)], 1)
    return running_sums(sums, top, later)[:, :count]


def _triangle(sums: Tensor, top: Tensor, later: Tensor) -> Tensor:
    """The sums within one group, (N, r, M, W)."""
    count = top.shape[1]
    columns = top.mT  # (N, M or 1, r)
    gaps = columns.unsqueeze(-2) - columns.unsqueeze(-1)
    decay = gaps.masked_fill_(later[:count, :count], -torch.inf).exp_()
    if top.shape[2] == 1:  # one decay for all features
        return (decay.squeeze(1) @ sums.flatten(2)).view(sums.shape)
    return (decay @ sums.transpose(1, 2)).transpose(1, 2).contiguous()
