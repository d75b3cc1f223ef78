"""What the attentions of an original see: queries, keys and values of a batch, kept for several steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernelformer.hf.capture import AttentionCall, attention_calls

Batch = Mapping[str, Tensor]


class Watched:
    """An original whose attentions are watched on batch after batch.

    Args:
        teacher: the original, in evaluation mode.
        names: of the attentions to record.
        autocast: the precision of its pass, such as ``torch.bfloat16``.
    """

    def __init__(self, teacher: PreTrainedModel, names: Iterable[str], autocast: torch.dtype | None = None) -> None:
        self.teacher, self.names, self.autocast = teacher, set(names), autocast

    def __call__(self, batch: Batch) -> list[AttentionCall]:
        """Run the original on a batch; the calls, in their order."""
        with torch.autocast(self.teacher.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return attention_calls(self.teacher, batch, outputs=False, only=self.names)


@dataclass(frozen=True)
class Reuse:
    """How often, and in which order, what was seen of a batch serves.

    Batches come in blocks of ``block``: first each once, as the original is run on it; then again, ``times`` in all, in
    an order that the step's number gives. So a step costs a pass of the original only now and then, and a run that
    was stopped goes on by its number of steps alone.

    Args:
        block: batches that are kept at a time.
        times: each of them serves.
    """

    block: int = 1
    times: int = 1

    def first_batch(self, step: int) -> int:
        """Number of the first batch of the block that a step, counted from 0, belongs to."""
        return step // (self.block * self.times) * self.block

    def batches_of(self, steps: int) -> int:
        """Number of batches that the first steps use."""
        blocks, rest = divmod(steps, self.block * self.times)
        return blocks * self.block + min(rest, self.block)

    def steps(self, watched: Watched, batches: Iterator[Batch], first: int, last: int) -> Iterator[Turn]:
        """Yield what each step from ``first`` on works with; ``batches`` begin with `first_batch` of ``first``.

        Args:
            watched: the original.
            batches: inputs.
            first: number of the first step.
            last: number of the step before which to end: no batch is taken that would not be used.
        """
        whole = self.block * self.times
        start, kept = first // whole * whole, dict[int, tuple[list[AttentionCall], int]]()
        for step in range(start, last):
            turn, place = divmod(step % whole, self.block)
            if place == 0 and turn == 0:
                kept.clear()
            if place == 0:
                gen = torch.Generator().manual_seed(step)
                order = torch.randperm(self.block, generator=gen).tolist() if turn else list(range(self.block))
            number = order[place]
            if turn == 0:
                batch = next(batches)
                kept[number] = watched(batch), real_tokens(batch)
            if step >= first:
                calls, tokens = kept[number]
                yield Turn(step, calls, seed=(step // whole) * self.block + number, turn=turn, tokens=tokens)


@dataclass(frozen=True)
class Turn:
    """What a step works with.

    Args:
        step: its number, from 0.
        calls: of the original's attentions on one batch.
        seed: number of the batch.
        turn: how often it has served before.
        tokens: of the batch that are no padding.
    """

    step: int
    calls: list[AttentionCall]
    seed: int
    turn: int
    tokens: int


def real_tokens(batch: Batch) -> int:
    """Tokens of a batch that are no padding."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return batch["input_ids"].numel() if "input_ids" in batch else len(next(iter(batch.values())))
