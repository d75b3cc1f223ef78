"""Sums of keys for `RelativeCall.state` from the states of the engines that attend without a bias."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernelformer.attention.positive import EMPTY


def sums_of_state(state: Sequence[Tensor], positive: bool) -> list[Tensor]:
    """The tensors of a `RelativeCall.state` or `right_state` from the state of an engine, differentiably.

        positive:  shift = log_mass^T, kv = mean, ks = 1, ns = 0
        signed:    shift = log_scale, and kv, k_sum and norm_sum as they are

    Both hold sums of the same features if the engine was bound under normalization, and not to give parts of a longer
    row (`make_engine` with ``normalize=True, parts=False``). With a slope the keys must have been taken in with their
    log factors ``-slope (d - window)``, as `fading` does, d counted as `RelativeCall` says.

    A shift is a constant to autograd. Here it is made of log_mass or log_scale, whose gradient therefore goes through
    the sums, by a factor that is 1.

    Args:
        state: log_mass (B, H, M, 1) and mean (B, H, M, E), or log_scale (B, H, 1, 1), kv (B, H, M, E),
            k_sum (B, H, M, 1) and norm_sum (B, H, 1, 1), for every query head.
        positive: of which family.

    Returns:
        shift, kv, ks and ns. Of no keys (a log mass or scale of EMPTY or less): EMPTY and zeros.
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
