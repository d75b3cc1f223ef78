"""Texts as rows of a model's inputs, in an order that a seed gives, and how many of them were used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernelformer.errors import integer, positive_int

MASKED = 0.15  # of the tokens, for masked models


class TextRows:
    """Rows of a model's inputs that are made of texts.

    For causal models texts are joined, with the token that ends a text between them, and cut into windows of ``length``
    tokens: there is no padding. For all others each text is a row of its own.

    Args:
        texts: at least one.
        tokenizer: of transformers.
        length: tokens of a row, at most.
        task: of `Source`.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, length: int, task: str) -> None:
        self.tokenizer, self.length, self.task = tokenizer, positive_int("length", length), task
        self.rows: Sequence[Any] = texts
        self.ends: list[int] = []  # of each text among the joined tokens
        if task == "causal":
            tokens = list(tokens_of(texts, tokenizer))
            self.ends = list(accumulate(map(len, tokens)))
            self.rows = _windows([x for ids in tokens for x in ids], length)

    def batches(self, batch: int, seed: int, *, start: int = 0, skip: int = 0) -> Iterator[dict[str, Tensor]]:
        """Inputs without end; see the function `batches`."""
        positive_int("batch", batch)
        place = integer("skip", skip, at_least=0) * batch
        while True:
            chosen = [self.rows[i] for i in order(place, batch, len(self.rows), seed)]
            place += batch
            if self.task == "causal":
                ids = torch.stack(chosen)
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                continue
            tokens = self.tokenizer(chosen, truncation=True, max_length=self.length, padding=True, return_tensors="pt")
            inputs = {x: tokens[x] for x in ("input_ids", "attention_mask")}
            if self.task == "masked":
                inputs["input_ids"] = mask_tokens(inputs["input_ids"], self.tokenizer, seed * 1_000_003 + place)[0]
            if self.task == "seq2seq":
                ids = inputs["input_ids"]
                first = torch.full_like(ids[:, :1], start)
                inputs["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
                inputs["decoder_attention_mask"] = inputs["attention_mask"]
            yield inputs

    def used(self, file: str, available: int, draws: Iterable[tuple[int, int]]) -> TextsUsed:
        """What the first rows of some orders have used, each counted once.

        Args:
            file: name of the texts' file.
            available: texts that there were to choose from.
            draws: number of rows and seed of each order.
        """
        rows = {i for count, seed in draws for i in order(0, count, len(self.rows), seed)}
        if self.task != "causal":
            return TextsUsed(file, len(rows), available)
        texts: set[int] = set()
        for i in rows:
            first, last = i * self.length, i * self.length + len(self.rows[i])
            texts.update(range(bisect_right(self.ends, first), bisect_left(self.ends, last) + 1))
        return TextsUsed(file, len(texts), available, len(rows), len(self.rows[0]))


@dataclass(frozen=True)
class TextsUsed:
    """What was used of a file of texts.

    Args:
        file: its name.
        texts: that were used, in part or whole.
        available: that there were to choose from.
        windows: of joined texts that a causal model has read; None where each text is a row of its own.
        window_length: tokens of a window.
    """

    file: str
    texts: int
    available: int
    windows: int | None = None
    window_length: int | None = None

    def __str__(self) -> str:
        """``8 windows of 256 tokens from 9 of 2000 texts of FILE``, or ``160 of 2000 texts of FILE``."""
        texts = f"{self.texts} of {self.available} text{'s' * (self.available > 1)} of {self.file}"
        if self.windows is None:
            return texts
        return f"{self.windows} window{'s' * (self.windows > 1)} of {self.window_length} tokens from {texts}"


def batches(
    texts: Sequence[str],
    tokenizer: Any,
    length: int,
    batch: int,
    seed: int = 0,
    *,
    task: str = "encoder",
    start: int = 0,
    skip: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Inputs of a model without end: texts in the order of a seed, in another one each time they come around.

    Each text is a row of its own, cut at ``length`` and padded to the longest of its batch; for masked models some of
    its tokens are hidden, which is what they are made for. For causal models texts are joined, with the token that ends
    a text between them, and cut into rows of ``length``: there is no padding.

    Args:
        texts: at least one.
        tokenizer: of transformers.
        length: tokens of a row.
        batch: rows.
        seed: of the order.
        task: of `Source`; ``seq2seq`` gets the text as ``decoder_input_ids`` too, after ``start``.
        start: token that a decoder begins with.
        skip: batches to leave out: a run that was stopped after so many goes on with the same ones.
    """
    yield from TextRows(texts, tokenizer, length, task).batches(batch, seed, start=start, skip=skip)


def some_texts(
    texts: Sequence[str], tokenizer: Any, length: int, rows: int, seed: int, task: str
) -> tuple[list[str], int]:
    """As many texts, in the order of a seed, as `batches` needs for so many rows, and how many rows they make."""
    chosen = [texts[i] for i in order(0, len(texts), len(texts), seed)]
    if task != "causal":
        return chosen[:rows], min(rows, len(texts))
    count = 0
    for number, ids in enumerate(tokens_of(chosen, tokenizer), 1):
        count += len(ids)
        if count >= rows * length:
            return chosen[:number], rows
    return chosen, max(1, count // length)


def tokens_of(texts: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Of each text, with the token that ends one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(texts), 64):
        for ids in tokenizer(list(texts[first : first + 64]), add_special_tokens=False)["input_ids"]:
            yield [*ids, *end]


def packed_rows(texts: Sequence[str], tokenizer: Any, length: int) -> list[Tensor]:
    """Rows of ``length`` tokens; one shorter row where all texts together have less."""
    return _windows([x for ids in tokens_of(texts, tokenizer) for x in ids], length)


def _windows(stream: list[int], length: int) -> list[Tensor]:
    if not stream:
        raise ValueError("the texts have not one token.")
    whole = len(stream) // length
    rows = torch.tensor(stream[: whole * length] if whole else stream)
    return list(rows.view(max(1, whole), -1))


def mask_tokens(ids: Tensor, tokenizer: Any, seed: int, share: float = MASKED) -> tuple[Tensor, Tensor]:
    """Tokens with some of the plain ones hidden, and which (bool), by a seed."""
    plain = ~torch.isin(ids, torch.tensor(sorted(tokenizer.all_special_ids)))
    hidden = plain & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share)
    return ids.masked_fill(hidden, tokenizer.mask_token_id), hidden


def order(first: int, count: int, total: int, seed: int) -> list[int]:
    """Numbers ``first`` to ``first + count`` of an endless order of ``total`` rows, anew shuffled in each round."""
    rounds: dict[int, list[int]] = {}
    places = []
    for place in range(first, first + count):
        turn = place // total
        if turn not in rounds:
            gen = torch.Generator().manual_seed(seed * 1_000_003 + turn)
            rounds[turn] = torch.randperm(total, generator=gen).tolist()
        places.append(rounds[turn][place % total])
    return places
