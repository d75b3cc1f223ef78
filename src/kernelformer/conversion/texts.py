"""Texts for a pretrained model as rows of its inputs, in an order that a seed gives, and how many of them were used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.conversion.readers import each_text, json_rows
from kernelformer.errors import integer, positive_int
from kernelformer.hf.find import try_inputs
from kernelformer.hf.load import Source

SHORTEST, LONGEST = 12, 40  # tokens of a passage
SPACING = 128  # tokens of a row for each passage
TRIES = 8  # to find a place for one
BEGINNING = 2  # tokens of a copy that are too few to know it by
NUMBERED = 0.5  # of the passages get a number, which nothing but the first passage tells


@dataclass(frozen=True)
class Copy:
    """A passage and its copy."""

    first: int
    second: int
    length: int

    @property
    def places(self) -> tuple[int, int]:
        """Positions at which the two begin."""
        return self.first, self.second


@dataclass(frozen=True)
class Repeats:
    """Repetition of passages in rows of tokens.

    A model that copies attends from a token of the second passage to what followed the same token in the first one:
    the sharp and far attention that ordinary text has little of.

    Args:
        gap: tokens between a passage and its copy, at least.
        numbers: token ids of numbers to put into passages, see `passkey.number_tokens`.
    """

    share: float = 1.0
    gap: int = 64
    numbers: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share of the rows must be 0 to 1, got {self.share!r}.")
        positive_int("gap", self.gap)

    def fits(self, length: int) -> bool:
        """Return True if a row of so many tokens has room for a passage and its copy."""
        return length >= self.gap + 2 * SHORTEST

    def row(self, ids: Tensor, seed: int) -> tuple[Tensor, list[Copy]]:
        """Repeat passages of a row, or leave it as it is."""
        gen = torch.Generator().manual_seed(seed)
        if float(torch.rand((), generator=gen)) >= self.share:
            return ids, []
        ids, copies = ids.clone(), list[Copy]()
        for _ in range(max(1, len(ids) // SPACING)):
            copy = self._place(len(ids), copies, gen)
            if copy is None:
                continue
            passage = ids[copy.first : copy.first + copy.length]
            if self.numbers and float(torch.rand((), generator=gen)) < NUMBERED:
                number = self.numbers[_draw(0, len(self.numbers), gen)][: copy.length - 2]
                place = _draw(1, copy.length - len(number), gen)
                passage[place : place + len(number)] = torch.tensor(number)
            ids[copy.second : copy.second + copy.length] = passage
            copies.append(copy)
        return ids, copies

    def _place(self, length: int, others: Sequence[Copy], gen: torch.Generator) -> Copy | None:
        """Find room for a passage and its copy beside others; None where there is none."""
        if not self.fits(length):
            return None
        for _ in range(TRIES):
            tokens = _draw(SHORTEST, min(LONGEST, (length - self.gap) // 2) + 1, gen)
            least = tokens + self.gap
            second = _draw(least, length - tokens + 1, gen)
            copy = Copy(_draw(0, second - least + 1, gen), second, tokens)
            taken = [(y, other.length) for other in others for y in other.places]
            if all(x + tokens <= y or y + room <= x for x in copy.places for y, room in taken):
                return copy
        return None


def recall_row(ids: Tensor, gap: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat passages of a row, and say where a model that copies looks.

        i = b + t looks at j = a + t + 1        passage from a on, its copy from b on, t from `BEGINNING` on

    Returns:
        Token ids (L), queries i (N) and keys j (N); N is 0 where the row is too short.
    """
    ids, copies = Repeats(gap=gap).row(ids, seed)
    empty = torch.zeros(0, dtype=torch.long)
    inside = [(x, torch.arange(BEGINNING, x.length - 1)) for x in copies]
    queries = torch.cat([empty, *(x.second + t for x, t in inside)])
    return ids, queries, torch.cat([empty, *(x.first + t + 1 for x, t in inside)])


def _draw(first: int, end: int, gen: torch.Generator) -> int:
    return int(torch.randint(first, end, (), generator=gen))


LENGTH = 256  # default tokens of a text
MASKED = 0.15  # of the tokens, for masked models


class TextRows:
    """Rows of a model's inputs that are made of texts.

    For causal models texts are joined, with the token that ends a text between them, and cut into windows of ``length``
    tokens: there is no padding. For all others each text is a row of its own, padded to the longest of its batch; for
    masked models some of its tokens are hidden.

    Args:
        task: of `Source`; ``seq2seq`` gets the text as ``decoder_input_ids`` too.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, length: int, task: str) -> None:
        self.tokenizer, self.length, self.task = tokenizer, positive_int("length", length), task
        self.rows: Sequence[Any] = texts
        self.ends: list[int] = []  # of each text among the joined tokens
        if task == "causal":
            tokens = list(tokens_of(texts, tokenizer))
            self.ends = list(accumulate(map(len, tokens)))
            self.rows = _windows([x for ids in tokens for x in ids], length)

    def batches(
        self, batch: int, seed: int, *, start: int = 0, skip: int = 0, repeats: Repeats | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield inputs without end, in the order of a seed, another one in each round.

        Args:
            skip: batches to leave out: a run that was stopped after so many resumes with the same ones.
        """
        positive_int("batch", batch)
        if batch > 1 and self.task != "causal" and self.tokenizer.pad_token_id is None:
            raise ValueError(
                f"the tokenizer has no padding token, so that texts of different lengths cannot stand in one batch of "
                f"{batch}; give --batch 1, or name one as pad_token in tokenizer_config.json."
            )
        first_row = integer("skip", skip, at_least=0) * batch
        while True:
            chosen = [self.rows[i] for i in order(first_row, batch, len(self.rows), seed)]
            if self.task == "causal" and repeats is not None:
                numbers = range(seed * 1_000_003 + first_row, seed * 1_000_003 + first_row + batch)
                chosen = [repeats.row(x, number)[0] for x, number in zip(chosen, numbers, strict=True)]
            first_row += batch
            if self.task == "causal":
                ids = torch.stack(chosen)
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                continue
            more: dict[str, Any] = {"padding": batch > 1, "return_tensors": "pt"}
            tokens = self.tokenizer(chosen, truncation=True, max_length=self.length, **more)
            inputs = {x: tokens[x] for x in ("input_ids", "attention_mask")}
            if self.task == "masked":
                inputs["input_ids"] = mask_tokens(inputs["input_ids"], self.tokenizer, seed * 1_000_003 + first_row)[0]
            if self.task == "seq2seq":
                ids = inputs["input_ids"]
                first = torch.full_like(ids[:, :1], start)
                inputs["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
                inputs["decoder_attention_mask"] = inputs["attention_mask"]
            yield inputs

    def used(self, file: str, available: int, draws: Iterable[tuple[int, int]]) -> TextsUsed:
        """Count the texts that the first rows of some orders have used, each once.

        Args:
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
    """Part of a file of texts that was used.

    Args:
        windows: of joined texts that a causal model has read; None where each text is a row of its own.
    """

    file: str
    texts: int
    available: int
    windows: int | None = None
    window_length: int | None = None

    def __str__(self) -> str:
        """Write it as ``8 windows of 256 tokens from 9 of 2000 texts of FILE``, or ``160 of 2000 texts of FILE``."""
        texts = f"{self.texts} of {self.available} text{'s' * (self.available > 1)} of {self.file}"
        if self.windows is None:
            return texts
        return f"{self.windows} window{'s' * (self.windows > 1)} of {self.window_length} tokens from {texts}"


def some_texts(
    texts: Sequence[str], tokenizer: Any, length: int, rows: int, seed: int, task: str
) -> tuple[list[str], int]:
    """Choose as many texts as it takes for a number of rows.

    Returns:
        The texts, and how many rows they make: fewer than wanted where all texts together make fewer.
    """
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
    """Yield the token ids of each text, with the token that ends one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(texts), 64):
        for ids in tokenizer(list(texts[first : first + 64]), add_special_tokens=False)["input_ids"]:
            yield [*ids, *end]


def _windows(stream: list[int], length: int) -> list[Tensor]:
    if not stream:
        raise ValueError("the texts have not one token.")
    whole = len(stream) // length
    rows = torch.tensor(stream[: whole * length] if whole else stream)
    return list(rows.view(max(1, whole), -1))


def mask_tokens(ids: Tensor, tokenizer: Any, seed: int, share: float = MASKED) -> tuple[Tensor, Tensor]:
    """Hide some tokens behind the mask token, as masked models are trained.

    Returns:
        The tokens (B, L), and which were hidden (B, L) bool.
    """
    plain = ~torch.isin(ids, torch.tensor(sorted(tokenizer.all_special_ids)))
    hidden = plain & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share)
    return ids.masked_fill(hidden, tokenizer.mask_token_id), hidden


def order(first: int, count: int, total: int, seed: int) -> list[int]:
    """List ``count`` numbers, from ``first`` on, of an endless order of ``total`` rows, shuffled anew in each round."""
    rounds: dict[int, list[int]] = {}
    rows = []
    for position in range(first, first + count):
        turn = position // total
        if turn not in rounds:
            gen = torch.Generator().manual_seed(seed * 1_000_003 + turn)
            rounds[turn] = torch.randperm(total, generator=gen).tolist()
        rows.append(rounds[turn][position % total])
    return rows


def read_texts(path: str | Path) -> list[str]:
    """Read the texts of a file that are not blank: ``.jsonl`` with ``text`` in each line, or one text a line; UTF-8.

    Raises:
        ValueError: no such file, a line that is not UTF-8 or not JSON, or not one text.
    """
    texts = [x for x in each_text(Path(path)) if x.strip()]
    if not texts:
        raise ValueError(f"{path} has no text in it: it is empty, or all its lines are blank.")
    return texts


def longest(source: Source) -> int | None:
    """Number of tokens that a model has positions for; None where no limit is known."""
    positions = getattr(source.model.config.get_text_config(), "max_position_embeddings", None)
    longest_text = getattr(source.tokenizer, "model_max_length", None)  # tokenizers without a limit say 1e30
    return min((x for x in (positions, longest_text) if isinstance(x, int) and 0 < x < 10**9), default=None)


def check_length(source: Source, length: int | None) -> int:
    """Check the length of texts for a model.

    Args:
        length: tokens; None: `LENGTH`, or fewer where the model has fewer positions.
    """
    limit = longest(source)
    if length is None:
        return LENGTH if limit is None else min(LENGTH, limit)
    if limit is not None and length > limit:
        raise ValueError(f"length is {length}, and {source.path} has positions for {limit} tokens; give a smaller one.")
    return positive_int("length", length)


def check_readable(source: Source, texts: Sequence[str]) -> None:
    """Check that a model can read texts."""
    if source.tokenizer is None:
        raise ValueError(
            f"{source.path} has no tokenizer (tokenizer.json, or vocab.txt for models like BERT), so that it cannot "
            f"read texts; add one, or leave the texts out."
        )
    unknown = source.tokenizer.unk_token_id
    some = source.tokenizer([x[:2000] for x in texts[:8]], add_special_tokens=False)["input_ids"]
    seen = [x for row in some for x in row]
    if not seen or (unknown is not None and all(x == unknown for x in seen)):
        raise ValueError(
            f"the tokenizer of {source.path} knows nothing of these texts: {texts[0][:40]!r} has no token but the "
            f"unknown one. Give texts that the model was made for."
        )
    words = source.model.config.get_text_config().vocab_size
    if max(seen) >= words:
        raise ValueError(
            f"the tokenizer of {source.path} is of another model: {texts[0][:40]!r} has token {max(seen)}, and the "
            f"model knows {words}; put its own tokenizer there."
        )


def first_token(source: Source) -> int:
    """Token that a decoder begins with."""
    return getattr(source.model.config, "decoder_start_token_id", None) or 0


def rows_for(source: Source, texts: Sequence[str], length: int) -> TextRows:
    """Make rows of inputs for a source; see `check_readable`."""
    check_readable(source, texts)
    return TextRows(texts, source.tokenizer, length, source.task)


def made_up_inputs(source: Source, length: int, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield inputs for a source without texts: random tokens, or noise for models of images."""
    config, gen = source.model.config, torch.Generator().manual_seed(seed)
    tried = try_inputs(source.model)
    while True:
        if "input_ids" not in tried:
            yield {name: torch.randn(batch, *x.shape[1:], generator=gen, dtype=x.dtype) for name, x in tried.items()}
            continue
        size = config.get_text_config().vocab_size
        ids = torch.randint(size, (2, batch, length), generator=gen)
        yield {name: torch.ones_like(ids[0]) if "mask" in name else ids[i % 2] for i, name in enumerate(tried)}


def read_labelled(path: Path, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Read some texts of a ``.jsonl`` with their labels, in the order of a seed.

    Args:
        path: each line that is not blank has ``text`` and an integer ``label`` of at least 0.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"a probe needs 'text' and 'label' in each line of a .jsonl, got {path}.")
    rows: list[tuple[str, int]] = []
    for position, row in json_rows(path):
        if isinstance(row, str):
            raise ValueError(f"{path}, {position}: {row}.")
        text, label = row.get("text"), row.get("label")
        if not isinstance(text, str) or type(label) is not int or not 0 <= label < 2**63:
            raise ValueError(f"{path}, {position}: a probe needs 'text' and an integer 'label' from 0 to 2^63 - 1.")
        rows.append((text, label))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return [rows[i][0] for i in order], [rows[i][1] for i in order]
