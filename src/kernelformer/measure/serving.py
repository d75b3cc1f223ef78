"""A decoder that reads a prompt and goes on, as it is served: the original, and its converted copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelformer.measure.harness import peak_memory
from kernelformer.measure.lengths import BASELINES, SPARE, TINY, Subject, cache_bytes, contender
from kernelformer.timing import Figures, Step, time_rounds

PREFILL = "prefill"
# The sizes of SmolLM2-135M.
SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Served(Subject):
    """The decoder that is measured.

    Args:
        folder: of a pretrained one, or its ``.gguf`` file; "": a Llama of `SIZES` with random weights.
    """

    folder: str = ""

    def build(self, length: int, head: bool = True) -> tuple[Any, list[str]]:
        """Build the model with its head; see `Subject.build`."""
        model, stretched = super().build(length, head)
        if not model.can_generate():
            raise ValueError(f"{self.folder} is a {type(model).__name__}, which does not generate; give a decoder.")
        return model, stretched

    def _drawn(self, head: bool) -> Any:
        if self.folder:
            return super()._drawn(head)
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]


def empty_cache(model: Any, name: str) -> Any:
    """Make the cache that a contender generates with: transformers' own, or states."""
    from transformers import DynamicCache

    from kernelformer.hf import new_cache

    return DynamicCache(config=model.config) if name in BASELINES else new_cache(model)


@torch.no_grad()
def prefill(model: Any, tokens: Tensor, cache: Any, chunk: int) -> None:
    """Read a prompt (B, L) into a cache, ``chunk`` tokens at a time; only the last token gets logits.

    Cost: O(chunk) memory beyond the cache where all attentions are linear.
    """
    for part in tokens.split(chunk, 1):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)


class Contender:
    """One way to serve the model: it reads the prompt into a new cache, and goes on from the last one.

    Args:
        model: the original.
        name: see `measure.lengths.contender`.
        chunk: tokens that a converted model reads at once. The original reads all at once: SDPA is causal without a
            mask then, and would need one of chunk x S numbers for pieces.
    """

    def __init__(self, model: Any, name: str, chunk: int) -> None:
        self.model, self.name, self.chunk = contender(model, name), name, chunk
        self.cache: Any = None

    def read(self, tokens: Tensor) -> None:
        """Read a prompt (B, L)."""
        self.cache = empty_cache(self.model, self.name)
        prefill(self.model, tokens, self.cache, tokens.shape[1] if self.name in BASELINES else self.chunk)

    @torch.no_grad()
    def go_on(self, token: Tensor) -> None:
        """Take one token (B, 1) more."""
        self.model(input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


def measure(
    what: str, subject: Mapping[str, Any], length: int, names: Sequence[str], chunk: int, rounds: int, budget: float
) -> dict[str, dict[str, Figures]]:
    """Measure contenders in this process.

    Args:
        what: ``time`` of prefill and of a token after it, or ``memory`` of the prefill of one contender.
        subject: fields of `Served`.
        length: tokens of the prompt.
        names: of the contenders.
        chunk: see `Contender`.
        rounds: at least so many prefills and tokens of each are timed, after one that warms up.
        budget: seconds for timing all prefills, and as many for all tokens.

    Returns:
        Of each contender the figures of ``prefill`` and ``token``; ``peak`` is the memory of a prefill beyond the
        weights, and the bytes of the cache of a token.
    """
    this = Served(**subject)
    model, _ = this.build(length + SPARE)
    tokens, one = this.tokens(model, length), this.tokens(model, 1, seed=1)
    served = {name: Contender(model, name, chunk) for name in names}
    if what == "memory":
        (name, mine), *_ = served.items()
        mine.read(tokens[:, :TINY])
        return {name: {"prefill": {"peak": peak_memory(_steps(served, "read", tokens))[name]}}}
    first = time_rounds(_steps(served, "read", tokens), rounds, budget)
    ready = {name: x for name, x in served.items() if "problem" not in first[name]}
    sizes = {name: cache_bytes(x.cache) for name, x in ready.items()}
    after = time_rounds(_steps(ready, "go_on", one), rounds, budget)
    tokens_of = {name: {**x, "peak": sizes[name]} for name, x in after.items()}
    return {name: {"prefill": x, "token": tokens_of.get(name, x)} for name, x in first.items()}


def _steps(served: Mapping[str, Contender], what: str, tokens: Tensor) -> dict[str, Step]:
    calls: dict[str, Callable[..., None]] = {name: getattr(x, what) for name, x in served.items()}
    return {name: Step(partial(call, tokens)) for name, call in calls.items()}
