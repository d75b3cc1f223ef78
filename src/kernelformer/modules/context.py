"""Ranks that sequences are split over at the moment, and quantities that depend on tokens of other ranks.

Process-wide and not of a thread: activation checkpointing recomputes layers in the threads of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernelformer.attention.ranks import Ranks, RanksError

ACTIVE: list[Ranks] = []  # those of `split_over`, the innermost last


def active_ranks() -> Ranks | None:
    """Return the ranks of the innermost `split_over`, or None if every process has whole sequences."""
    return ACTIVE[-1] if ACTIVE else None


@contextmanager
def split_over(ranks: Ranks) -> Iterator[Ranks]:
    """Let every attention see the tokens of all ranks."""
    ACTIVE.append(ranks)
    try:
        yield ranks
    finally:
        ACTIVE.pop()


@contextmanager
def agreeing() -> Iterator[None]:
    """Turn an error in the block on one rank into an error on all ranks, if sequences are split."""
    ranks, problem = active_ranks(), None
    try:
        yield
    except RanksError:  # which all have raised
        raise
    except Exception as error:
        if ranks is None:
            raise
        problem = error
    if ranks is not None:
        ranks.agree(problem)


def needs_whole(what: str, way: str) -> None:
    """Raise a ValueError if sequences are split: ``what`` needs all of them."""
    ranks = active_ranks()
    if ranks is not None:
        raise ValueError(f"{what} needs whole sequences, and they are split over {ranks.size} ranks; {way}.")


def tokens_before(length: int) -> int:
    """Number of tokens on the ranks before this one, which holds ``length``; 0 if nothing is split."""
    ranks = active_ranks()
    return 0 if ranks is None else ranks.starts(length)[ranks.rank]


def real_before(mask: Tensor) -> Tensor:
    """Number of real tokens of each sample on the ranks before, (B, L) -> (B, 1)."""
    ranks = active_ranks()
    counts = mask.long().sum(1, keepdim=True)
    if ranks is None:
        return torch.zeros_like(counts)
    return ranks.gather_rows("real", counts)[: ranks.rank].sum(0)


def segment_before(ids: Tensor, real: Tensor) -> Tensor:
    """Number of real tokens, on the ranks before, of the segment that each row begins with, (B, L) -> (B, 1)."""
    ranks = active_ranks()
    none = ids.new_zeros(ids.shape[0], 1)
    if ranks is None:
        return none
    own = none.expand(-1, 3) - 1
    if ids.shape[1]:
        own = torch.stack([ids[:, 0], ids[:, -1], (real.to(ids) * (ids == ids[:, -1:])).sum(1)], 1)
    every = ranks.gather_rows("segments", own.long())
    before, here = every[: ranks.rank], every[ranks.rank]
    linked = before[..., 1] == here[:, 0]
    return (linked * before[..., 2].clamp_min(0)).sum(0).unsqueeze(1).to(ids.dtype)


def next_column(x: Tensor, fill: int) -> Tensor:
    """Numbers of the token after this rank's last, (B, L) -> (B, 1); ``fill`` if there is none."""
    ranks = active_ranks()
    column = x[:, :1] if x.shape[1] else x.new_zeros(x.shape[0], 1)
    if ranks is None:
        return torch.full_like(column, fill)
    own = torch.cat([column.long(), column.new_full(column.shape, x.shape[1]).long()], 1)
    every = ranks.gather_rows("labels", own)
    later = [y[:, :1] for y in every[ranks.rank + 1 :] if int(y[0, 1])] if x.shape[0] else []
    return later[0].to(x.dtype) if later else torch.full_like(column, fill)


def share_of_mean(total: Tensor, count: Tensor, given: Tensor | int | None = None) -> Tensor:
    """Mean over the tokens of all ranks from this rank's sum and number: its value, with the gradient of its share.

    The gradients of all ranks together are those of the mean; ``given`` is the number over all ranks, if it is known.
    """
    ranks = active_ranks()
    assert ranks is not None
    own = torch.stack([total.detach().double(), count.double()]).unsqueeze(0)
    value, number = ranks.gather_rows("loss", own).sum(0)[0].unbind()
    number = number if given is None else torch.as_tensor(given, device=total.device)
    share = total / number.to(total.dtype)
    return share + ((value / number).to(total.dtype) - share).detach()


def share_of_same(value: Tensor) -> Tensor:
    """Number that all ranks have computed alike: its value, with a gradient of one share in R."""
    ranks = active_ranks()
    assert ranks is not None
    share = value / ranks.size
    return share + (value - share).detach()
