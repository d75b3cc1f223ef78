"""Contenders of the benchmark: our methods, torch's own attention, and those of others (`measure.peers`).

Every contender takes the same random queries, keys, values and bias, and is checked against its definition, in float64
and with its own frequencies, before it is timed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.parallel.attend import LOOPS
from kernelformer.attention.reference import log_attention, visibility
from kernelformer.attention.relative.dispatch import ALGORITHMS
from kernelformer.contract import PositiveSpec
from kernelformer.errors import choice
from kernelformer.modules import (
    METHODS,
    AttentionCore,
    AttentionSpec,
    KernelCore,
    build_attention,
    method_options,
    parse_method,
)
from kernelformer.modules.reference import reference_attention
from kernelformer_lab.bench.case import SMALL, Attention, Case, Contender
from kernelformer_lab.bench.harness import too_large
from kernelformer_lab.bench.peers import PEERS, AlgorithmOne, installed_peers

__all__ = ["Case", "Contender", "Kernelformer", "Sdpa", "contender", "installed_peers", "yardsticks"]
FILLED = 4096  # an unbounded table keeps all keys; more of them take too long to fill one by one


class Kernelformer(Contender):
    """One of our methods.

    The option ``algorithm`` is one of its calls; ``bias=none`` leaves the bias of a case out, so that one run shows
    what it costs; the others are those of `build_attention`.
    """

    takes_bias = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        spec = AttentionSpec.parse(name)
        chosen = spec.values.get("algorithm")
        self.algorithm = None if chosen is None else choice("algorithm", chosen, (*LOOPS, *ALGORITHMS))
        if self.algorithm == "fft":
            self.tolerance = 1e-3  # the rounding of an FFT is that of its largest row
        bias = spec.values.get("bias")
        self.has_bias = bias is None or choice("bias", bias, ("none",)) != "none"
        self.method, self.options = parse_method(str(spec.without(["algorithm", "bias"])))

    def _own_case(self, case: Case) -> Case:
        """The case as this contender takes it."""
        return case if self.has_bias else replace(case, bias=None)

    def refuses(self, case: Case) -> str | None:
        """Return why it cannot run a case, or None if it can."""
        return super().refuses(self._own_case(case))

    def error(self, case: Case) -> float:
        """Return the worst relative error of an output row against the definition, at a small length."""
        return super().error(self._own_case(case))

    def _refuses(self, case: Case) -> str | None:
        """A state of all keys would have to be filled first; a bias needs a definition to be checked against."""
        if case.task == "decode" and METHODS[self.method].quadratic:
            return "keeps all keys; the peer 'sdpa' is timed with them"
        if case.bias is None:
            if self.algorithm is None:
                return None
            if case.task == "decode" or not self._core(case).takes_loops:
                return "has no algorithms to choose from"
            return None if self.algorithm in LOOPS else f"algorithm={self.algorithm} is for a bias only"
        core = self._core(case)
        if self.algorithm and (case.task == "decode" or not isinstance(core, KernelCore)):
            return "has no algorithms to choose from"
        if self.method != "softmax" and not _is_positive(core):
            return "only softmax and normalized positive maps are defined with a bias here"
        if core.has_near and (case.bias != "window" or case.window > _near_tokens(core)[0]):
            return "a bias has to end within the window of near tokens"
        if case.task == "decode" and case.bias == "full" and case.length > FILLED:
            return f"would keep all keys; contexts up to {FILLED}"
        return None

    def _core(self, case: Case) -> AttentionCore:
        sizes = {"num_features": case.features, "max_length": max(case.length, SMALL)}
        known = method_options(self.method)
        options = {**{name: x for name, x in sizes.items() if name in known}, **self.options}
        core = build_attention(self.method, head_dim=case.head_dim, num_heads=case.heads, **options)
        return core.to(case.device)

    def build(self, case: Case) -> Attention:
        """Return the core itself; a trained bias within a window is promised to be one, since values cannot show it."""
        self.core = core = self._core(case)
        more: dict[str, Any] = {"algorithm": self.algorithm} if self.algorithm else {}
        promised = any(_near_tokens(core)) or (case.backward and self.algorithm in (None, "windowed"))
        if case.bias == "window" and promised:
            more["max_distance"] = case.window

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            how = more if bias is None else {"bias": bias, **more}
            out: Tensor = core(q, k, v, is_causal=case.causal, **how)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By `modules.reference`, with the core's own draw."""
        bias = None if case.bias is None else case.bias_matrix(q.shape[2])
        return reference_attention(copy.deepcopy(self.core).cpu().double(), q, k, v, is_causal=case.causal, bias=bias)

    def runner(self, case: Case) -> Callable[[], Any]:
        """return the call; in decoding one step after another, after the whole context, or full windows of a bias."""
        case = self._own_case(case)
        if case.task != "decode":
            return super().runner(case)
        self.build(case)
        bias = None if case.bias is None else case.past_bias()
        # One more than the window, so that a key has left it and the state holds what is older.
        count = min(case.length, 1 + max(sum(_near_tokens(self.core)), 0 if bias is None else bias.shape[1]))
        q, k, v = case.inputs(count)
        self.state: State | None = None

        def take(t: int) -> Tensor:
            one = slice(t, t + 1)
            with torch.no_grad():
                out, self.state = self.core.step(q[:, :, one], k[:, :, one], v[:, :, one], self.state, bias=bias)
            return out

        if bias is None:
            self._read(case)
        for t in range(0 if bias is None else count):
            take(t)
        return lambda: take(count - 1)

    def _read(self, case: Case) -> None:
        """Take the context of a case into the state, some tokens at a time; the same ones over and over."""
        tokens = case.inputs(min(case.length, FILLED))
        with torch.no_grad():
            for start in range(0, case.length, FILLED):
                part = [x[:, :, : case.length - start] for x in tokens]
                _, self.state = self.core(*part, is_causal=True, state=self.state, return_state=True)


def _near_tokens(core: AttentionCore) -> tuple[int, int]:
    """Window and sinks of a core, 0 where it has none."""
    return getattr(core, "window", None) or 0, getattr(core, "sinks", 0)


def _is_positive(core: AttentionCore) -> bool:
    """Whether its weights are positive and normalized, so that they and a bias add up in log space."""
    return isinstance(core, KernelCore) and core.normalize and isinstance(core.feature_map.spec, PositiveSpec)


class Sdpa(Contender):
    """torch's `scaled_dot_product_attention`; a bias is its additive mask, without a matrix of L x L.

    With the queries in reverse, query r = L-1-i sees key j at the entry t = j - i + L-1 = j + r of the bias, so that
    the mask is a view of it with the strides (2L-1, 1, 1).

    A mask that needs a gradient takes torch off its tiled kernel, and matrices of L x L are made.

    Args:
        trains_bias: ask for the gradient of the bias; else the tiled kernel stays, and there is no such gradient.
    """

    takes_bias = True

    def __init__(self, name: str, trains_bias: bool = True) -> None:
        super().__init__(name)
        self.trains_bias = trains_bias

    def _refuses(self, case: Case) -> str | None:
        """Everything works, at a quadratic price."""
        if not self.trains_bias:
            return None if case.bias and case.backward else "is sdpa where no bias is trained"
        matrix = 4 * case.batch * case.heads * case.length**2
        return too_large(4 * matrix) if case.bias and case.backward else None  # the factor is measured

    def build(self, case: Case) -> Attention:
        """Return the function itself; causal only with more than one token, since a single query sees all keys."""

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            length = q.shape[2]
            if bias is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal and length > 1)
            if case.causal and length > 1:
                bias = torch.cat([bias[:, :length], bias.new_full((len(bias), length - 1), -torch.inf)], 1)
            size = (q.shape[0], len(bias), length, k.shape[2])
            mask = bias.contiguous().as_strided(size, (0, bias.shape[1], 1, 1))
            return F.scaled_dot_product_attention(q.flip(2), k, v, attn_mask=mask).flip(2)

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the softmax of the explicit matrix."""
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(case.head_dim)
        return log_attention(scores, v, visible, bias=case.bias_matrix(q.shape[2]))

    def runner(self, case: Case) -> Callable[[], Any]:
        """Return the call; in decoding it is one query against a cache of the context."""
        if case.task != "decode":
            return super().runner(case)
        call = self.build(case)
        _, k, v = case.inputs()
        q = case.inputs(1)[0]
        # The query is the last token: key j is at distance j - (L-1), which is entry j.
        bias = None if case.bias is None else case.bias_table()[:, : case.length].contiguous()

        def step() -> Tensor:
            with torch.no_grad():
                return call(q, k, v, bias)

        return step


YARDSTICKS: dict[str, Callable[[str], Contender]] = {
    "sdpa": Sdpa,
    "sdpa-fixed": lambda name: Sdpa(name, trains_bias=False),
    "algorithm-1": AlgorithmOne,
}


def yardsticks(*, bias: bool, backward: bool) -> list[str]:
    """Return what a run is compared with by default: torch, and what others offer for such cases.

    A peer that cannot run on a case's device says so in its row.
    """
    if not bias:
        return ["sdpa", *installed_peers()]
    return ["sdpa", *(["sdpa-fixed"] if backward else []), "algorithm-1"]


def contender(name: str) -> Contender:
    """Return a contender by its name: a method of ours, as `parse_method` reads it, or what it is compared with.

    Those are ``sdpa``, with a bias also ``sdpa-fixed`` (which gives it no gradient) and ``algorithm-1``, and the peers.
    """
    if name in YARDSTICKS:
        return YARDSTICKS[name](name)
    if name in PEERS:
        return PEERS[name][1](name)
    return Kernelformer(name)
