"""Several parts of the keys of a row, each with sums of its own, in one normalization.

    out_i = sum_parts e^log num / max(sum_parts e^log den, GUARD sum_parts e^log guard)

No eps, and no scale that the parts would have to share: the larger of two is what both are brought to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.attention.engine import Part
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.reference import GUARD

NOTHING = -EMPTY  # log denominator of a row that sees no key: no weight is anything against it


def merge(a: Part, b: Part) -> Part:
    """The sums of both; ``a.num`` and ``b.num`` may be overwritten."""
    log = torch.maximum(a.log, b.log)
    left, right = (a.log - log).exp_(), (b.log - log).exp_()
    den = _sum(left, a.den, right, b.den)
    guard = None
    if a.guard is not None or b.guard is not None:
        guard = _sum(left, a.den if a.guard is None else a.guard, right, b.den if b.guard is None else b.guard)
    num = a.num.mul_(left.unsqueeze(-1)).addcmul_(b.num, right.unsqueeze(-1))
    return Part(num, log, den, guard)


def _sum(left: Tensor, a: Tensor | None, right: Tensor, b: Tensor | None) -> Tensor:
    return (left if a is None else left * a) + (right if b is None else right * b)


def finish(part: Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, in the place of the numerators; the log of what they were divided by; where that is the guard.

    Shapes (*, L, E), (*, L) and (*, L). A row that sees no key is zero, and its log denominator is `NOTHING`.
    """
    num, log, den, guard = part
    seen = log > EMPTY / 2
    if den is None:
        return num.mul_(seen.unsqueeze(-1)), log.masked_fill(~seen, NOTHING), None
    guarded = None
    if guard is not None:
        bound = GUARD * guard
        guarded = den < bound
        den = torch.maximum(den, bound)
    seen = seen & (den > torch.finfo(den.dtype).tiny)
    inverse = den.reciprocal().masked_fill_(~seen, 0)
    total = den.log().add_(log).masked_fill_(~seen, NOTHING)
    return num.mul_(inverse.unsqueeze(-1)), total, guarded
