"""Context parallelism: one sequence over several ranks, each of which holds a contiguous part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from kernelformer.attention.ranks import Ranks
from kernelformer.modules.context import split_over


@contextmanager
def context_parallel(group: dist.ProcessGroup | None = None) -> Iterator[Ranks]:
    """Let the ranks of a group hold one sequence, part by part in the order of the ranks.

        with context_parallel(group):
            loss = model(my_tokens, labels=my_tokens).loss
            loss.backward()                  # here too: checkpointed layers run again
        sum_gradients(model, group)

    Within the block every attention of this library sees the tokens of all ranks; everything else works on one's own.
    What it gives, gradients included, is what one process with the whole sequence would have. All ranks make the same
    calls in the same order, with as many samples, and parts that may differ in length. A causal layer needs what is
    left of the ranks before, a bidirectional one of all: a state of constant size, and near tokens where there are any.

    Methods with a state of constant size can do it, `local` too. Those that look at the whole sequence at once
    (landmarks, but learned ones), that keep every key, or that forget (rfa-gate) raise a ValueError.

    Args:
        group: a process group of torch.distributed; None: all processes. A group of one changes nothing.

    Yields:
        the ranks: ``rank``, ``size``, ``starts(length)`` and the bytes ``sent`` so far.

    Cost per layer: one all-gather of B G (M (E + 1) [twice with near tokens] + w (D + E)) numbers forward and as many
    backward, whatever the length.
    """
    with split_over(Ranks(group)) as ranks:
        yield ranks
