"""Long texts with a number hidden in them, which a causal language model is asked for at the end (2305.16300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.texts import tokens_of
from kernelformer.errors import positive_int
from kernelformer.hf.load import Source

DIGITS = 5
SENTENCE = "\nThe pass key is {key}.\n"
QUESTION = "\nThe pass key is"
NUMBERS = 1000  # to choose from, for passages that come again


@dataclass(frozen=True)
class Passkey:
    """A text with a number in it, the question for it and the answer.

    Args:
        ids: (L), all tokens; the last ``answer`` are those of the number.
        answer: tokens of the number.
        key: the number, `DIGITS` digits.
        depth: share of the text before the sentence with the number.
        distance: tokens from the end of that sentence to the answer.
    """

    ids: Tensor
    answer: int
    key: str
    depth: float
    distance: int


def passkeys(texts: Sequence[str], tokenizer: Any, length: int, count: int, seed: int = 0) -> list[Passkey]:
    """Hide a number of five digits in each of some texts.

        beginning of a text, SENTENCE with the number, rest of the text, QUESTION, the number

    The depths are ``(i + 1/2) / count`` for i < count; the numbers and the places where the surrounding text begins are
    drawn. Texts are joined, and begin again where they are shorter than that.

    Args:
        texts: to hide it in.
        tokenizer: of transformers.
        length: L, tokens of each with question and answer.
        count: how many.
        seed: of the draws; another length has others.

    Raises:
        ValueError: there is no room for a sentence and a question, the texts have no tokens, or all numbers have the
            same.
    """
    positive_int("count", count)
    joined = [x for ids in tokens_of(texts, tokenizer) for x in ids]
    if not joined:
        raise ValueError("the texts have not one token.")
    gen = torch.Generator().manual_seed(seed * 1_000_003 + length)
    return [_hide(joined, tokenizer, length, (i + 0.5) / count, gen) for i in range(count)]


def _hide(joined: Sequence[int], tokenizer: Any, length: int, depth: float, gen: torch.Generator) -> Passkey:
    key = "".join(map(str, torch.randint(10, (DIGITS,), generator=gen).tolist()))
    place = int(torch.randint(len(joined), (), generator=gen))
    start, sentence = start_tokens(tokenizer), _encode(tokenizer, SENTENCE.format(key=key))
    question, answer = _question(tokenizer, key)
    room = length - len(start) - len(sentence) - len(question) - len(answer)
    if room < 0:
        raise ValueError(
            f"a text of {length} tokens has no room for a sentence of {len(sentence)} and a question of "
            f"{len(question) + len(answer)}; give a passkey length of at least {length - room}."
        )
    filler = list(islice(cycle(joined), place, place + room))
    before = round(depth * room)
    ids = [*start, *filler[:before], *sentence, *filler[before:], *question, *answer]
    return Passkey(torch.tensor(ids), len(answer), key, depth, room - before + len(question))


def _question(tokenizer: Any, key: str) -> tuple[list[int], list[int]]:
    """Tokens of the question, and of the number as the tokenizer writes it there.

    What the tokens of any two numbers begin with, a blank for example, belongs to the question.
    """
    other = "".join(str((int(x) + 5) % 10) for x in key)
    ids, others = (_encode(tokenizer, f"{QUESTION} {x}") for x in (key, other))
    same = next((i for i, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y), None)
    if same is None:
        raise ValueError(f"this tokenizer cannot tell the numbers {key} and {other} apart; give passkeys=0.")
    return ids[:same], ids[same:]


def tells_numbers(tokenizer: Any) -> bool:
    """Whether a tokenizer has different tokens for different numbers; that of proteins has none for any."""
    try:
        _question(tokenizer, "0" * DIGITS)
    except ValueError:
        return False
    return True


def number_tokens(tokenizer: Any, seed: int = 0) -> list[list[int]]:
    """Token ids of random numbers of five digits, each after a blank; none where a tokenizer has no digits.

    Args:
        tokenizer: of transformers.
        seed: of the numbers.
    """
    if not tells_numbers(tokenizer):
        return []
    drawn = torch.randint(10**DIGITS, (NUMBERS,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids: list[list[int]] = tokenizer([f" {x:0{DIGITS}d}" for x in drawn], add_special_tokens=False)["input_ids"]
    return ids


def knows_numbers(source: Source) -> bool:
    """Whether a model has different tokens for different numbers, all of them in its vocabulary."""
    tokens = number_tokens(source.tokenizer)
    return bool(tokens) and max(map(max, tokens)) < source.model.config.get_text_config().vocab_size


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def start_tokens(tokenizer: Any) -> list[int]:
    """The token that a tokenizer begins every text with, or none."""
    first = tokenizer.bos_token_id
    return [first] if first is not None and tokenizer("a")["input_ids"][:1] == [first] else []
