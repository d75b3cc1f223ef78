"""Whole encoders as contenders of a measurement: the paper's two, with any attention or a bound on it.

The bounds are attention that returns V, the most that a faster attention can bring: "X" or OPT in Performer
(2009.14794), Fig. 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.measure import settings
from kernelformer.measure.harness import clean_model, peak_memory, run_pass
from kernelformer.measure.settings import PASSES
from kernelformer.timing import Figures, Step, time_rounds

VOCABULARY = 256
TINY = 64  # tokens of the step after which libraries, threads and their buffers are there


@dataclass(frozen=True)
class Case:
    """One encoder and the length of the sequence that it runs on."""

    size: str  # its name
    heads: int
    width: int
    feed_forward: int
    layers: int
    length: int

    @property
    def title(self) -> str:
        """Name of the case in progress and messages."""
        return f"{self.size}, {self.layers} layers, {self.length} tokens"

    def tokens(self, length: int | None = None) -> Tensor:
        """Return random tokens (1, L), the same for every attention."""
        gen = torch.Generator().manual_seed(0)
        return torch.randint(VOCABULARY, (1, length or self.length), generator=gen)


class Values(nn.Module):
    """Attention that returns V: "X" or OPT in Performer (2009.14794), Fig. 3.

    The layer around it is that of the others: it still projects queries and keys, and merges heads. In training nothing
    comes back through q and k, so their two projections have no backward pass: less work than any attention leaves.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, E) -> (B, H, L, E)."""
        return value


class ValuesAndGradients(Values):
    """Attention that returns V and gives q and k gradients: all but the core itself is done as for a real attention.

    The output's gradient serves as that of q, k and v, so that it costs nothing to make; its value means nothing.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """(B, H, L, D), (B, H, L, D), (B, H, L, D) -> (B, H, L, D)."""
        out: Tensor = _PassOn.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out


class _PassOn(torch.autograd.Function):
    """Return V, and the output's gradient as that of q, k and v."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, grad


BOUNDS: dict[str, type[Values]] = dict(zip(settings.BOUNDS, (Values, ValuesAndGradients), strict=True))


def build(case: Case, attention: str) -> Any:
    """Build the encoder with an attention spec or a bound in every block, without positions.

    Its first weights are the same for every attention.
    """
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
    """Run one of `PASSES` of an encoder on tokens (1, L)."""
    model.train(kind == PASSES[1])
    run_pass(lambda: model(tokens).last_hidden_state, kind)


def measure(
    kind: str, case: Mapping[str, Any], wanted: Mapping[str, Sequence[str]], rounds: int, budget: float
) -> dict[str, dict[str, Figures]]:
    """Measure encoders in this process: {pass: {attention: figures}}.

    Args:
        kind: ``time``, or ``memory`` of one attention.
        case: fields of `Case`.
        wanted: attentions by pass.
        rounds: at least so many steps of each are timed.
        budget: seconds for timing each pass.
    """
    this = Case(**case)
    if kind == "memory":
        return measure_memory(this, wanted)
    names = dict.fromkeys(name for some in wanted.values() for name in some)
    models, tokens = {name: build(this, name) for name in names}, this.tokens()
    return {
        each: time_rounds({name: _step(models[name], tokens, each) for name in some}, rounds, budget)
        for each, some in wanted.items()
    }


def measure_memory(case: Case, wanted: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Figures]]:
    """Return the peak resident bytes of a step beyond the weights, of the one attention that all passes want."""
    (name,) = {name for some in wanted.values() for name in some}
    model, tokens = build(case, name), case.tokens()
    for kind in wanted:
        step(model, case.tokens(min(TINY, case.length)), kind)
    clean_model(model)
    peaks = peak_memory({kind: _step(model, tokens, kind) for kind in wanted})
    return {kind: {name: {"peak": count}} for kind, count in peaks.items()}


def _step(model: Any, tokens: Tensor, kind: str) -> Step:
    return Step(lambda: step(model, tokens, kind), lambda: clean_model(model))
