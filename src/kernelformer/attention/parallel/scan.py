"""Sums of all chunks before each one, relative to a scale of their own, in a few products.

    states_c = sum_{a < c} exp(edges_{a+1} - edges_c - fade (c - a - 1)) sums_a

Within a group of r chunks this is a product with the triangle of decays, all of them at most 1, which also gives the
sum of the group; the sums of the groups are summed up in the same way, and added. Levels: log n / log r.
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


def later_than(size: int, like: Tensor) -> Tensor:
    """What hides later ones when it is subtracted, (size, size): inf above the diagonal, 0 elsewhere."""
    return like.new_full((size, size), torch.inf).triu_(1)


def states_before(sums: Tensor, edges: Tensor, later: Tensor, fade: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums over all chunks before each one, and over all of them.

    Args:
        sums: (N, n, M, W), that of chunk c relative to ``exp(edges_{c+1})``.
        edges: (N, n + 1, M), or (N, n + 1, 1) for all features; rises along n but for the fade. No gradient.
        later: `later_than` of `GROUP` + 1 or more.
        fade: (N, 1, 1), what sums lose in the logarithm from one edge to the next; None means nothing.

    Returns:
        (N, n, M, W), that of chunk c relative to ``exp(edges_c)``, and (N, M, W), relative to ``exp(edges_n)``.

    Cost: O(n r M W) time for r = n^(1/levels), at most `GROUP`.
    """
    rows, count, features, width = sums.shape
    group = group_size(count)
    if group == count:
        all_of_them = _triangle(sums, edges.mT, later, fade)  # (N, M, n + 1, W)
        return all_of_them[:, :, :-1].transpose(1, 2), all_of_them[:, :, -1]
    groups = -(-count // group)
    missing = groups * group - count
    if missing:  # chunks after the last, with nothing in them
        sums = torch.cat([sums, sums.new_zeros(rows, missing, features, width)], 1)
        last = edges[:, -1:].expand(-1, missing, -1)
        if fade is not None:
            last = last - fade * torch.arange(1, missing + 1, device=fade.device).unsqueeze(1)
        edges = torch.cat([edges, last], 1)
    tops = edges.unfold(1, group + 1, group)  # (N, groups, M, group + 1)
    per_group = None if fade is None else fade.repeat_interleave(groups, 0)
    inside = _triangle(sums.reshape(-1, group, features, width), tops.flatten(0, 1), later, per_group)
    inside = inside.unflatten(0, (rows, groups))
    of_groups = None if fade is None else group * fade
    before, whole = states_before(inside[:, :, :, -1], edges[:, ::group], later, of_groups)
    gaps = tops[..., :1] - tops[..., :-1]
    if fade is not None:
        gaps = gaps - fade.unsqueeze(3) * torch.arange(group, device=fade.device)
    states = inside[:, :, :, :-1]
    states.addcmul_(gaps.exp_().unsqueeze(-1), before.unsqueeze(3))
    return states.transpose(2, 3).flatten(1, 2)[:, :count], whole


def _triangle(sums: Tensor, tops: Tensor, later: Tensor, fade: Tensor | None) -> Tensor:
    """The sums before each chunk of one group and after the last, (N, M, r + 1, W); tops are (N, M or 1, r + 1)."""
    count = sums.shape[1]
    gaps = tops[..., 1:].unsqueeze(-2) - tops.unsqueeze(-1)  # (N, M or 1, r + 1, r)
    hidden = later[: count + 1, 1 : count + 1]
    if fade is not None:
        places = torch.arange(count + 1, device=fade.device)
        hidden = hidden + fade.unsqueeze(3) * (places.unsqueeze(1) - places[1:])
    decay = gaps.sub_(hidden).exp_()
    if tops.shape[1] == 1:  # one decay for all features
        return (decay.squeeze(1) @ sums.flatten(2)).view(-1, count + 1, *sums.shape[2:]).transpose(1, 2)
    return decay @ sums.transpose(1, 2)
