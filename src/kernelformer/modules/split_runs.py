"""Which tokens of a split sequence go on from rank to rank: all of them, or of packed rows a segment at each end."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.attention.ranks import Ranks
from kernelformer.modules.call import Call
from kernelformer.modules.packed import NO_ID
from kernelformer.modules.split_parts import Run

FIRST, LAST = 0, 1


class Runs:
    """The runs at the start and at the end of every rank's tokens; without segments both are all of them.

    Args:
        call: of this rank.
        sinks: how many first visible tokens of a run are sinks.
        ranks: the group.
        masked: whether any rank has a key mask.

    Attributes:
        runs: the first and the last run of this rank.
        ids: (R, B, 2), of the first and the last token of every rank, the same number everywhere without segments.
        left: (R, B) bool, whose last run is this rank's first one and before it.
        right: (R, B) bool, whose first run is this rank's last one and after it.
        single: (R, B) bool, where both runs are one.
    """

    def __init__(self, call: Call, sinks: int, ranks: Ranks, masked: bool) -> None:
        self.count, device = sinks, call.key.device
        batch, length = call.key.shape[0], call.key.shape[2]
        segments, mask = call.segment_ids, call.key_mask
        if mask is None and (sinks or masked or segments is not None):
            mask = torch.ones(batch, length, dtype=torch.bool, device=device)
        ids = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        masks = [mask, mask]
        if segments is not None:
            ids = torch.stack([segments[:, 0], segments[:, -1]], 1).long() if length else ids + NO_ID
            masks = [None if mask is None else mask & (segments == x.unsqueeze(1)) for x in ids.unbind(1)]
        every = ids.expand(ranks.size, -1, -1)
        index = [ids[:, :0]] * 2
        self.seen = self.index = every[..., :0]
        if sinks or segments is not None:
            if sinks:
                index = [_first_visible(x, sinks) for x in masks if x is not None]
            seen = [torch.zeros_like(ids[:, 0]) if x is None else x.sum(1) for x in masks]
            own = torch.cat([ids, torch.stack(seen, 1), *index], 1)
            numbers = ranks.gather_numbers(own.to(ranks.device)).to(device)
            every, self.seen, self.index = numbers.split([2, 2, 2 * sinks], 2)
            _check_order(every)
        self.ids, here = every, ranks.rank
        self.single = every[..., FIRST] == every[..., LAST]
        place = torch.arange(ranks.size, device=device).unsqueeze(1)
        self.left = (every[..., LAST] == every[here, :, FIRST]) & (place < here)
        self.right = (every[..., FIRST] == every[here, :, LAST]) & (place > here)
        fars = masks
        if sinks:
            before = (self.left * self.seen[..., LAST]).sum(0)  # tokens of the first run on other ranks
            made = [before, before * self.single[here]]
            own_seen = self.seen[here].unbind(1)
            fars = [
                None if m is None else _without(m, i, n, b, sinks)
                for m, i, n, b in zip(masks, index, own_seen, made, strict=True)
            ]
        self.runs = [Run(m, f, i) for m, f, i in zip(masks, fars, index, strict=True)]

    def first_visible(self, which: int, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Which of a run's first tokens there are, (R, B, sinks) bool, and their positions in the sequence."""
        number = torch.arange(self.count, device=self.index.device)
        valid = number < self.seen[..., which].unsqueeze(2)
        place = self.index[..., which * self.count : (which + 1) * self.count]
        return valid, place + torch.tensor(starts[:-1], device=place.device).view(-1, 1, 1)


def _first_visible(mask: Tensor, count: int) -> Tensor:
    """Places (B, count) of the first visible tokens; where there are fewer, beyond the end."""
    number = torch.arange(1, count + 1, device=mask.device).expand(mask.shape[0], -1).contiguous()
    return torch.searchsorted(mask.cumsum(1).contiguous(), number)


def _without(mask: Tensor, index: Tensor, seen: Tensor, before: Tensor, count: int) -> Tensor:
    """A mask (B, S) without the sinks among its first tokens, where ``before`` (B) others come first."""
    number = torch.arange(count, device=mask.device)
    is_sink = (number < seen.unsqueeze(1)) & (number + before.unsqueeze(1) < count)
    length = mask.shape[1]
    place = torch.where(is_sink, index, length)  # one more column takes what is elsewhere
    return torch.nn.functional.pad(mask, (0, 1)).scatter(1, place, False)[:, :length]


def _check_order(ids: Tensor) -> None:
    """Raise on all ranks where segment ids decrease from one to the next."""
    last = None
    for rank, (first, end) in enumerate(zip(ids[..., FIRST], ids[..., LAST], strict=True)):
        if not bool((first > NO_ID).all()):  # no tokens
            continue
        if last is not None and bool((first < last[1]).any()):
            row = int((first < last[1]).nonzero()[0])
            raise ValueError(
                f"segment_ids must not decrease along a row, got {int(last[1][row])} at the end of rank {last[0]} and "
                f"{int(first[row])} at the start of rank {rank} in row {row}; number the sequences of a row in their "
                f"order over all ranks."
            )
        last = (rank, end)
