"""Passkey retrieval (2305.16300), and linear probes of embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.conversion.losses import pooled, standard_error
from kernelformer.conversion.texts import tokens_of
from kernelformer.errors import positive_int
from kernelformer.hf.load import Source

STEPS = 50  # of L-BFGS
DECAY = 1e-2  # of the classifier's weights
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Probe:
    """Accuracy of a probe of two models on the same texts.

    Args:
        error: standard error of ``converted - original``, text by text; None for a single text.
    """

    original: float
    converted: float
    error: float | None
    trained: int
    tested: int


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, texts: Sequence[str], length: int, batch: int) -> Tensor:
    """Mean-pooled outputs of a model, of length 1: (N, d)."""
    vectors = []
    for first in range(0, len(texts), batch):
        some = list(texts[first : first + batch])
        inputs = tokenizer(some, truncation=True, max_length=length, padding=True, return_tensors="pt")
        given = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
        vectors.append(F.normalize(pooled(model(**given)[0], given["attention_mask"]), dim=-1))
    return torch.cat(vectors)


def compare_probes(original: Tensor, converted: Tensor, labels: Tensor) -> Probe:
    """Fit a probe to the first half of the texts for each model, and try both on the other half."""
    half = check_labels(labels.tolist())
    right = [probe_right((x[:half], labels[:half]), (x[half:], labels[half:])).double() for x in (original, converted)]
    error = standard_error((right[1] - right[0]).tolist())
    return Probe(float(right[0].mean()), float(right[1].mean()), error, half, len(labels) - half)


def check_labels(labels: Sequence[int]) -> int:
    """Check that the first half of some labels has two kinds or more; returns how many that half is."""
    half = len(labels) // 2
    kinds = len(set(labels[:half]))
    if kinds < 2:
        raise ValueError(
            f"a probe needs texts of two labels or more to learn from, got {kinds} in the {half} of {len(labels)} "
            f"texts that it learns from; give more by --probe."
        )
    return half


def probe_right(train: Labelled, test: Labelled, steps: int = STEPS) -> Tensor:
    """Tell which labels multinomial logistic regression gets right, (N) bool.

    W = argmin  -mean log softmax(x W + b)_y + DECAY |W|^2 / 2          by L-BFGS, on standardized features
    """
    with torch.enable_grad():
        kinds, numbers = torch.cat([train[1], test[1]]).unique(return_inverse=True)  # labels may be any numbers
        x, y, classes = train[0].double(), numbers[: len(train[1])], len(kinds)
        mean, size = x.mean(0), x.std(0).clamp_min(1e-6)
        weight = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=steps, line_search_fn="strong_wolfe")

        def logits(vectors: Tensor) -> Tensor:
            scaled: Tensor = (vectors.double() - mean) / size
            return scaled @ weight[:-1] + weight[-1]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits(x), y) + DECAY * weight[:-1].square().sum() / 2
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        right: Tensor = logits(test[0]).argmax(-1) == numbers[len(train[1]) :]
        return right


@torch.no_grad()
def answer_log_probs(model: Any, ids: Tensor, count: int) -> tuple[Tensor, bool]:
    """Score the last tokens of a text as an answer to what stands before them.

    Args:
        ids: (L), text, question and answer.

    Returns:
        ``log p`` of each token of the answer given all before it, (count); and whether each of them is the likeliest,
        so that greedy continuation of the question is the answer.
    """
    # Logits of all positions would be L times the vocabulary.
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": count + 1} if few else {}
    logits = model(input_ids=ids[None].to(model.device), use_cache=False, **options).logits[0, -count - 1 : -1]
    wanted = ids[-count:].to(logits.device)
    log_probs = logits.float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return log_probs, bool((logits.argmax(-1) == wanted).all())


DIGITS = 5
SENTENCE = "\nThe pass key is {key}.\n"
QUESTION = "\nThe pass key is"
NUMBERS = 1000  # to choose from, for passages that come again


@dataclass(frozen=True)
class Passkey:
    """A text with a number in it, the question for it and the answer.

    Args:
        ids: (L), all tokens; the last ``answer`` are those of the number.
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


def number_tokens(source: Source, seed: int = 0) -> list[list[int]]:
    """Token ids of random numbers of five digits, each after a blank.

    None where a tokenizer has the same tokens for all of them, as that of proteins, or the model does not know some.
    """
    try:
        _question(source.tokenizer, "0" * DIGITS)
    except ValueError:
        return []
    drawn = torch.randint(10**DIGITS, (NUMBERS,), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = [f" {x:0{DIGITS}d}" for x in drawn]
    ids: list[list[int]] = source.tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids if max(map(max, ids)) < source.model.config.get_text_config().vocab_size else []


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def start_tokens(tokenizer: Any) -> list[int]:
    """The token that a tokenizer begins every text with, or none."""
    first = tokenizer.bos_token_id
    return [first] if first is not None and tokenizer("a")["input_ids"][:1] == [first] else []
