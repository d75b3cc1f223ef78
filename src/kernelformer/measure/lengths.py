"""A process that runs a pretrained model and its converted selves: it is started anew for every point.

python -m kernelformer.measure.lengths < job.json > result.json
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.environment import peak, reset_peak
from kernelformer.subprocesses import end_with_parent

BASELINES = ("sdpa", "eager")  # implementations of the original
PASSES = ("forward", "forward + backward")
TOKEN = "one token"
TASKS = ("auto", "encoder", "causal")
MOST_ROUNDS = 100
TINY = 16  # tokens of the pass after which libraries, threads and their buffers are there
CHUNK = 1024  # tokens of a context that go through the model at once
SPARE = 128  # positions for tokens after a context: more than are ever timed


@dataclass(frozen=True)
class Subject:
    """Which model.

    Args:
        folder: of transformers.
        task: one of `TASKS`; ``auto``: what the model is. With random weights BERT and its kin can be ``causal``.
        random: whether its weights are drawn, and only its configuration is read.
        allow_pickle: whether weights may be read from a pickle.
        batch: sequences of a pass.
    """

    folder: str
    task: str = "auto"
    random: bool = False
    allow_pickle: bool = False
    batch: int = 1

    def build(self, length: int, head: bool = False) -> tuple[Any, list[str]]:
        """The model in evaluation mode with positions for ``length`` tokens, and what was stretched for that.

        Args:
            length: tokens.
            head: whether it predicts tokens, for generating; without one there are no numbers over the vocabulary,
                which would be as many for every attention.
        """
        model = self._drawn(head) if self.random else self._loaded(head)
        if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
            raise ValueError(
                f"{self.folder} is a {type(model).__name__}; lengths are measured of encoders and decoders of one text."
            )
        model, stretched = stretch(model, length)
        model.config.use_cache = False
        return model.eval(), stretched

    def _drawn(self, head: bool) -> Any:
        from transformers import AutoModel, AutoModelForCausalLM

        from kernelformer.hf.load import load_config

        config: Any = load_config(self.folder)
        if self.task == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # BERT and its kin attend causally then
        torch.manual_seed(0)
        kind: Any = AutoModelForCausalLM if head else AutoModel
        return kind.from_config(config, trust_remote_code=False)

    def _loaded(self, head: bool) -> Any:
        from kernelformer.hf.load import load_source

        task = "causal" if head else "auto"
        model = load_source(self.folder, task=task, allow_pickle=self.allow_pickle).model
        # Weights are mapped from their file: a pass would pay for the pages that it is the first to read.
        for x in (*model.parameters(), *model.buffers()):
            x.data = x.data.clone()
        return model if head else model.base_model

    def tokens(self, model: Any, length: int, seed: int = 0) -> Tensor:
        """The same random tokens (B, L) for every attention."""
        gen = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.get_text_config().vocab_size, (self.batch, length), generator=gen)


def room(model: Any) -> int | None:
    """Tokens that a model's table of positions has rows for; None where it has no table, as rotary models."""
    count = getattr(model.config, "max_position_embeddings", None)
    if count is None:
        return None
    rooms = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not ("pos" in name.lower() or name.endswith("wpe")):
            continue
        if count <= module.num_embeddings <= count + 2:  # OPT and its kin have two rows more
            first = 0 if module.padding_idx is None or module.num_embeddings > count else module.padding_idx + 1
            rooms.append(count - first)
    return min(rooms, default=None)


@torch.no_grad()
def stretch(model: Any, length: int) -> tuple[Any, list[str]]:
    """A model with positions for ``length`` tokens, for looking at its speed.

    Its tables of positions are stretched: between two rows the new ones lie on a line. What it says at places that it
    never saw means nothing. A model with enough positions, or without a table, is returned as it is.

    Returns:
        The model, and a line for each table that was stretched.
    """
    fits = room(model)
    if fits is None or length <= fits:
        return model, []
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - fits
    longer = type(model)(config)
    old, new, lines = model.state_dict(), longer.state_dict(), []
    for name, x in new.items():
        was = old[name]
        if was.shape == x.shape:
            x.copy_(was)
            continue
        if was.dim() != 2 or was.shape[1:] != x.shape[1:]:
            raise ValueError(f"{name} of {type(model).__name__} cannot be stretched to {length} tokens.")
        x.copy_(F.interpolate(was.T[None], size=x.shape[0], mode="linear", align_corners=True)[0].T)
        lines.append(f"{name}: {was.shape[0]} rows stretched to {x.shape[0]}")
    return longer.to(next(model.parameters()).dtype), lines


def contender(model: Any, name: str) -> Any:
    """A copy that attends in another way: one of `BASELINES`, or converted to ``method:option=value``.

    All copies have the same weights in the same place; cores are their own.
    """
    from kernelformer.hf import convert
    from kernelformer.modules.spec import parse_method

    other = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    if name in BASELINES:
        other.set_attn_implementation(name)
        return other
    method, options = parse_method(name)
    return convert(other, method, **options)


def step(model: Any, tokens: Tensor, kind: str) -> None:
    """One of `PASSES`, without dropout; the loss is the mean of squares of the last vectors."""
    training = kind == PASSES[1]
    with torch.set_grad_enabled(training):
        hidden = model(input_ids=tokens).last_hidden_state
        if training:
            hidden.square().mean().backward()


@contextmanager
def _tidy() -> Iterator[None]:
    """Collect garbage between passes, never within one."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _clean(model: Any) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()


def interleaved(calls: Mapping[str, Callable[[], float]], rounds: int, budget: float) -> dict[str, dict[str, Any]]:
    """Median seconds of each call, in rounds of one each after one that warms up.

    Args:
        calls: by name; each returns its seconds.
        rounds: at least so many.
        budget: seconds; while they last there are more rounds.
    """
    problems = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, MemoryError, ValueError) as problem:  # memory that is out, or what it cannot do
            problems[name] = {"problem": str(problem).splitlines()[0]}
    times: dict[str, list[float]] = {name: [] for name in calls if name not in problems}
    begin = time.perf_counter()
    for turn in range(max(rounds, MOST_ROUNDS) if times else 0):
        if turn >= rounds and (time.perf_counter() - begin) * (turn + 1) / turn > budget:  # another one would not fit
            break
        for name, mine in times.items():
            mine.append(calls[name]())
    return {**problems, **{name: {"seconds": statistics.median(x), "rounds": len(x)} for name, x in times.items()}}


def measure_time(
    subject: Subject, length: int, names: Sequence[str], kind: str, rounds: int, budget: float
) -> dict[str, Any]:
    """Median seconds of a pass of each contender."""
    model, _ = subject.build(length)
    tokens = subject.tokens(model, length)

    def timed(other: Any) -> Callable[[], float]:
        def call() -> float:
            start = time.perf_counter()
            try:
                step(other, tokens, kind)
                return time.perf_counter() - start
            finally:
                _clean(other)

        return call

    calls = {name: timed(contender(model, name)) for name in names}
    with _tidy():
        return interleaved(calls, rounds, budget)


def measure_memory(subject: Subject, length: int, name: str, kind: str) -> dict[str, Any]:
    """Peak resident memory of one pass beyond what was there before it: the weights, not their gradients."""
    model, _ = subject.build(length)
    other = contender(model, name)
    step(other, subject.tokens(model, min(TINY, length)), kind)
    tokens = subject.tokens(model, length)
    with _tidy():
        _clean(other)
        before = reset_peak()
        step(other, tokens, kind)
        return {name: {"peak": peak() - before}}


@torch.no_grad()
def measure_generation(
    subject: Subject, context: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Any]:
    """Median seconds of a token after a context, and the bytes of each contender's cache then."""
    from transformers import DynamicCache

    from kernelformer.hf import new_cache

    model, _ = subject.build(context + SPARE, head=True)
    calls, sizes = dict[str, Callable[[], float]](), dict[str, int]()

    def fed(other: Any, cache: Any) -> Callable[[Tensor], float]:
        def feed(tokens: Tensor) -> float:
            start = time.perf_counter()
            other(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start

        return feed

    for name in names:
        other = contender(model, name)
        cache: Any = DynamicCache() if name in BASELINES else new_cache(other)
        feed = fed(other, cache)
        for part in subject.tokens(model, context).split(CHUNK, 1):
            feed(part)
        sizes[name] = cache_bytes(cache)
        one = subject.tokens(model, 1, seed=1)
        calls[name] = lambda feed=feed, one=one: feed(one)  # type: ignore[misc]
    with _tidy():
        found = interleaved(calls, rounds, budget)
    return {name: {**x, "peak": sizes[name]} for name, x in found.items()}


def cache_bytes(cache: Any) -> int:
    """Of states, or of all keys and values."""
    own = getattr(cache, "nbytes", None)
    return own if own is not None else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


def do(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job: {contender: figures}."""
    subject, length, names, kind = Subject(**job["subject"]), job["length"], job["names"], job["kind"]
    if job["what"] == "memory":
        return measure_memory(subject, length, names[0], kind)
    timing = {"rounds": job["rounds"], "budget": job["budget"]}
    if kind == TOKEN:
        return measure_generation(subject, length, names, **timing)
    return measure_time(subject, length, names, kind, **timing)


def main() -> None:
    """Read a job, write its result."""
    end_with_parent()
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    json.dump(do(job), sys.stdout)


if __name__ == "__main__":
    main()
