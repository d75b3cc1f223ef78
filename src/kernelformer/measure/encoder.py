"""A process that runs whole encoders: it is started anew for every case, with the allocator's settings around it.

python -m kernelformer.measure.encoder < job.json > result.json
"""

from __future__ import annotations

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
from torch import Tensor, nn

from kernelformer.environment import peak, reset_peak
from kernelformer.studies.settings import ENCODER_BOUNDS
from kernelformer.subprocesses import end_with_parent

VOCABULARY = 256
PASSES = ("forward", "forward + backward")
MOST_ROUNDS = 100
TINY = 64  # tokens of the step after which libraries, threads and their buffers are there


@dataclass(frozen=True)
class Case:
    """One encoder on one sequence."""

    size: str  # its name
    heads: int
    width: int
    feed_forward: int
    layers: int
    length: int

    @property
    def title(self) -> str:
        """For progress and messages."""
        return f"{self.size}, {self.layers} layers, {self.length} tokens"

    def tokens(self, length: int | None = None) -> Tensor:
        """The same random tokens (1, L) for every attention."""
        gen = torch.Generator().manual_seed(0)
        return torch.randint(VOCABULARY, (1, length or self.length), generator=gen)


class Values(nn.Module):
    """Attention that returns V: the paper's "X" (OPT), the most that a faster attention can bring (performer Fig. 3).

    The layer around it is that of the others: it still projects queries and keys, and merges heads. In training nothing
    comes back through q and k, so their two projections have no backward pass: less work than any attention leaves.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, E) -> (B, H, L, E)."""
        return value


class ValuesAndGradients(Values):
    """The same where q and k have gradients: everything but the core itself is done as for a real attention.

    The output's gradient serves as that of q, k and v, so that it costs nothing to make; its value means nothing.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, D) -> (B, H, L, D)."""
        out: Tensor = _PassOn.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, grad


BOUNDS: dict[str, type[Values]] = dict(zip(ENCODER_BOUNDS, (Values, ValuesAndGradients), strict=True))


def build(case: Case, attention: str) -> Any:
    """The encoder with an attention spec or a bound in every block, no positions; first weights are always the same."""
    from kernelformer.models import KernelformerConfig, KernelformerModel  # slow to import, and only workers need it

    torch.manual_seed(0)
    model = KernelformerModel(
        KernelformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=case.width,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            intermediate_size=case.feed_forward,
            attention="softmax" if attention in BOUNDS else attention,
            positions="none",
            max_position_embeddings=case.length,
        )
    )
    if attention in BOUNDS:
        blocks: Any = model.stack.blocks
        for block in blocks:
            block.attention.core = BOUNDS[attention]()
    return model


def step(model: Any, tokens: Tensor, kind: str) -> None:
    """One of `PASSES`; the loss is the mean of squares of the last vectors."""
    training = kind == PASSES[1]
    model.train(training)
    with torch.set_grad_enabled(training):
        hidden = model(tokens).last_hidden_state
        if training:
            hidden.square().mean().backward()


@contextmanager
def _tidy() -> Iterator[None]:
    """Collect garbage between steps, never within one, and pass over what was there before: libraries and models."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _clean(model: Any) -> None:
    """Gradients of the last step, and what only cycles keep alive, are not the next one's to carry."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def _timed(model: Any, tokens: Tensor, kind: str) -> float:
    start = time.perf_counter()
    step(model, tokens, kind)
    seconds = time.perf_counter() - start
    _clean(model)
    return seconds


def measure_time(
    case: Case,
    wanted: Mapping[str, Sequence[str]],
    rounds: int,
    budget: float,
    timed: Callable[[Any, Tensor, str], float] = _timed,
) -> dict[str, dict[str, Any]]:
    """Median seconds of a step, by pass and attention: in rounds of one step each, after one that warms up.

    Args:
        case: the encoder.
        wanted: attentions by pass.
        rounds: at least so many.
        budget: seconds for each pass; while they last there are more rounds.
        timed: runs and times one step.
    """
    names = list(dict.fromkeys(name for some in wanted.values() for name in some))
    models = {name: build(case, name) for name in names}
    tokens = case.tokens()
    with _tidy():
        return {kind: _rounds(models, some, tokens, kind, rounds, budget, timed) for kind, some in wanted.items()}


def _rounds(
    models: Mapping[str, Any],
    names: Sequence[str],
    tokens: Tensor,
    kind: str,
    rounds: int,
    budget: float,
    timed: Callable[[Any, Tensor, str], float],
) -> dict[str, Any]:
    """`measure_time` of one pass."""
    problems = {}
    for name in names:
        try:
            timed(models[name], tokens, kind)
        except (RuntimeError, MemoryError) as problem:  # how torch says that memory is out
            problems[name] = {"problem": str(problem).splitlines()[0]}
            _clean(models[name])
    times: dict[str, list[float]] = {name: [] for name in names if name not in problems}
    begin = time.perf_counter()
    for turn in range(max(rounds, MOST_ROUNDS) if times else 0):
        if turn >= rounds and (time.perf_counter() - begin) * (turn + 1) / turn > budget:  # another one would not fit
            break
        for name, mine in times.items():
            mine.append(timed(models[name], tokens, kind))
    return {**problems, **{name: {"seconds": statistics.median(x), "rounds": len(x)} for name, x in times.items()}}


def measure_memory(case: Case, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Peak resident memory of one step beyond the weights, of the one attention that all passes want."""
    (name,) = {name for some in wanted.values() for name in some}
    model = build(case, name)
    for kind in wanted:
        step(model, case.tokens(min(TINY, case.length)), kind)
    tokens, found = case.tokens(), {}
    with _tidy():
        _clean(model)
        before = reset_peak()
        for kind in wanted:
            step(model, tokens, kind)
            found[kind] = {name: {"peak": peak() - before}}
            _clean(model)
            reset_peak()  # whatever an allocator keeps of this step counts in the next one too: `before` stays
    return found


def do(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one job."""
    case, wanted = Case(**job["case"]), job["wanted"]
    if job["kind"] == "memory":
        return measure_memory(case, wanted)
    return measure_time(case, wanted, job["rounds"], job["budget"])


def main() -> None:
    """Read a job, write its result."""
    end_with_parent()
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    json.dump(do(job), sys.stdout)


if __name__ == "__main__":
    main()
