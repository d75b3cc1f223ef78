"""One token of a positive map under normalization, without gradients: `recurrent.step` by fewer operators.

A step is a dozen operators on small tensors, each of which costs more to call than to compute. The same arithmetic as
there: a new key's share as a sigmoid, types promoted inside of operators, sums in place where nobody else sees the
tensor, and as few views as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernelformer.contract import PositiveSpec

Logs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def log_rows(spec: PositiveSpec, tensors: Sequence[Tensor], scale: float) -> Logs:
    """A function of a key (B, G, 1, D) and queries (B, H, 1, D) that gives their `log_shares`, (B G, M) and (B H, M).

    They are in memory of their own.
    """
    product = spec.bind_rows(tensors, scale)

    def by_product(key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        assert product is not None
        width = key.shape[3]
        keys = key.reshape(-1, width)
        both = product(torch.cat((keys, query.reshape(-1, width))))
        return both[: keys.shape[0]], both[keys.shape[0] :]

    def by_formula(key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        batch, groups, _, width = key.shape
        rows = query.reshape(batch, groups, query.shape[1] // groups, width)
        if spec.tied:
            both = spec.log_shares(torch.cat((key, rows), 2), tensors, scale, "key")
            new, logits = both[:, :, :1], both[:, :, 1:]
        else:  # copies, since a formula may give its argument back, and what it gives is written to
            new = spec.log_shares(key.clone(), tensors, scale, "key")
            logits = spec.log_shares(rows.clone(), tensors, scale, "query")
        return new.reshape(batch * groups, new.shape[3]), logits.reshape(-1, logits.shape[3])

    return by_formula if product is None else by_product


def quick_step(
    logs: Logs, query: Tensor, key: Tensor, value: Tensor, state: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Take in one key and value, then answer one query.

    Args:
        logs: see `log_rows`.
        query: (B, H, 1, D) in the dtype of the arithmetic.
        key: (B, G, 1, D), likewise.
        value: (B, G, 1, E), likewise.
        state: log_mass (B, G, M, 1) and mean (B, G, M, E) before it.

    Returns:
        (B, H, 1, E) and the tensors of the state after.
    """
    new, logits = logs(key, query)
    rows, features = new.shape  # B G, M
    log_mass, mean = state
    before = log_mass.reshape(rows, features)
    if before.dtype != torch.float64:  # as after a prefill; see `recurrent`
        before = before.double()
    total = torch.logaddexp(before, new)
    share = new.sub_(before).sigmoid_()
    width = mean.shape[3]
    means = torch.lerp(mean.reshape(rows, features, width), value.reshape(rows, 1, width), share.unsqueeze(2))
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        weights = logits.add_(total).softmax(1).unsqueeze(1)
    else:
        weights = logits.view(rows, groups, features).add_(total.unsqueeze(1)).softmax(2)
    out = torch.bmm(weights, means).view(*query.shape[:2], 1, width)
    return out, (total.view(log_mass.shape), means.view(mean.shape))
