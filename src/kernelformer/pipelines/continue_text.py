"""Text from a converted decoder, with an eye on the size of its cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelformer.errors import number, positive_int


@dataclass(frozen=True)
class Continued:
    """Text that a model wrote, and what its cache took.

    Args:
        text: after the prompt.
        tokens: of it.
        prompt: tokens of the prompt.
        seconds: for all of it.
        cache: bytes of the cache after so many tokens of context.
    """

    text: str
    tokens: int
    prompt: int
    seconds: float
    cache: dict[int, int]

    @property
    def constant(self) -> bool:
        """Whether the cache had one size from the second token on; sums after a prompt are kept in fewer bytes."""
        return len(set(list(self.cache.values())[1:])) <= 1


def write_on(
    folder: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    log: Callable[[int], None] = lambda _: None,
) -> Continued:
    """Let a converted decoder go on with a text, by `generate`.

    Args:
        folder: of the converted model, with its tokenizer.
        prompt: not empty.
        tokens: to write; the model's sign for the end of a text is not taken.
        temperature: 0 takes the likeliest token each time.
        top_k: likeliest tokens to draw from.
        seed: of the drawing.
        log: called with the number of tokens so far.

    Raises:
        ValueError: the folder is not of a converted decoder, or has no tokenizer.
    """
    from kernelformer.hf import load, new_cache
    from kernelformer.hf.tokenizer import load_tokenizer

    positive_int("tokens", tokens)
    number("temperature", temperature, at_least=0)
    model = load(folder)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{folder} holds a {type(model).__name__}, which does not go on with a text; give a decoder.")
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer; put the original's files there.")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("the prompt has not one token; give a text to go on with.")
    watch = _Watch(new_cache(model), log)
    start = time.monotonic()
    options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    text = continuation(model, tokenizer, ids, **options, past_key_values=watch.cache, stopping_criteria=[watch])  # type: ignore[arg-type]
    return Continued(text, tokens, ids.shape[1], time.monotonic() - start, watch.sizes)


def continuation(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    **others: Any,
) -> str:
    """Write on after a text, by `generate` of any decoder of transformers.

    Args:
        model: the decoder.
        tokenizer: its own.
        ids: (1, L), the text so far.
        tokens: to write; the model's sign for the end of a text is not taken.
        temperature: 0 takes the likeliest token each time.
        top_k: likeliest tokens to draw from.
        seed: of the drawing; torch's own state of random numbers is as before afterwards.
        others: more options of `generate`.
    """
    draws = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id or 0,
            **draws,
            **others,
        )
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


class _Watch:
    """Asked by `generate` after each token whether to stop; never, but it looks at the cache."""

    def __init__(self, cache: Any, log: Callable[[int], None]) -> None:
        self.cache, self.log = cache, log
        self.sizes: dict[int, int] = {}

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.sizes[self.cache.get_seq_length()] = self.cache.nbytes
        self.log(ids.shape[1])
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
