"""Context parallelism: one sequence over several ranks, each of which holds a contiguous part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.attention.ranks import Ranks
from kernelformer.errors import positive_int
from kernelformer.modules.context import active_ranks, next_column, share_of_mean, split_over

IGNORED = -100  # label of a token that does not count


@contextmanager
def context_parallel(group: dist.ProcessGroup | None = None) -> Iterator[Ranks]:
    """Split one sequence over the ranks of a group, in their order.

        with context_parallel(group) as ranks:
            mine = ranks.part(tokens)            # or read only these
            loss = model(mine, labels=mine).loss
            loss.backward()                      # here too: checkpointed layers run again
        sum_gradients(model, group)

    Within the block every attention of this library sees the tokens of all ranks; everything else works on one's own.
    What it gives, gradients included, is what one process with the whole sequence would have. All ranks make the same
    calls in the same order, with as many samples, and parts that may differ in length; weights are compared once for
    each attention in the block. A causal layer needs what is
    left of the ranks before, a bidirectional one of all: a state of constant size, and near tokens where there are any.

    Every rank's loss has to depend on its outputs, with a factor of 0 if need be, since a backward pass is an exchange
    too; it comes in the same order on all of them, and once. A NaN that a rank passes on reaches the gradients of its
    sample and head on the ranks before. The block counts for all threads of the process.

    Methods with a state of constant size can do it, `local` too. Those that look at the whole sequence at once
    (landmarks, but learned ones), that keep every key, or that forget (rfa-gate) raise a ValueError.

    Args:
        group: a process group of torch.distributed; None: all processes. A group of one changes nothing.

    Yields:
        the ranks: ``rank``, ``size``, ``part(tokens)``, ``starts(length)`` and the bytes ``sent`` so far.

    Cost per layer: one all-gather of a state, B G M (E + 1) numbers, forward and as many backward, whatever the length;
    with w near tokens on a side two states and B G w (D + E) numbers, on both sides three and twice as many.
    """
    with split_over(Ranks(group)) as ranks:
        yield ranks


@torch.no_grad()
def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of the ranks of a sequence, each of which has those of its own tokens.

    Afterwards all ranks have the gradients that one process with the whole sequence would have. Models of this library
    divide their losses by the tokens of all ranks; a loss of one's own has to do so too, or be a sum.

    Args:
        model: the same on all ranks.
        group: of `context_parallel`.
    """
    weights = [x for x in model.parameters() if x.requires_grad]
    for weight in weights:
        if weight.grad is None:  # nothing reached it on this rank; on another something may have
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad, group=group)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of the next tokens, over those of all ranks; within `context_parallel`.

    For models of others, a converted one of transformers among them, whose own loss knows the tokens of one rank only.
    Its value is the same on all ranks, and its gradient is a rank's share.

    Args:
        logits: (B, L, vocabulary) of this rank's tokens.
        tokens: (B, L), -100 = not counted.
    """
    wanted = torch.cat([tokens[:, 1:], next_column(tokens, IGNORED)], 1)[:, : tokens.shape[1]].flatten()
    total = F.cross_entropy(logits.flatten(0, -2).float(), wanted, ignore_index=IGNORED, reduction="sum")
    count = (wanted != IGNORED).sum()
    return total / count if active_ranks() is None else share_of_mean(total, count)


TIMEOUT = 1800  # seconds; gloo's own default


def start_group(timeout: int = TIMEOUT, backend: str | None = None) -> None:
    """Start torch.distributed for the processes of torchrun or accelerate; for one that is alone, a group of one.

    Under ``torchrun --master_addr`` all starts of ``--max-restarts`` have one store, in which gloo would find addresses
    of processes that are gone and wait for them. So what is kept there is named by the number of the start.

    Args:
        timeout: seconds that a process waits for the others, at the start and in every exchange; of a group that has
            been started already it is set.
        backend: of torch.distributed; None: that of the device.
    """
    from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # not in every build
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=positive_int("timeout", timeout))
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(limit)
        return
    store: Store = HashStore()
    rank, world = 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
