"""Who runs in the benchmark: our methods, torch's own attention, and the peers that are installed.

Every contender takes the same random queries, keys and values, and is checked against its definition, in float64 and
with its own frequencies, before it is timed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.reference import positive_attention, signed_attention, visibility
from kernelformer.contract import PositiveSpec, SignedSpec
from kernelformer.modules import KernelCore, build_attention, method_options, parse_method
from kernelformer.modules.baselines import BaselineCore
from kernelformer.modules.gated import GatedCore

Task = Literal["bidirectional", "causal", "decode"]
SMALL = 256  # length at which contenders are checked
TASKS: tuple[Task, ...] = ("bidirectional", "causal", "decode")


@dataclass(frozen=True)
class Case:
    """One size of one task; ``length`` is the context for decoding."""

    task: Task
    length: int
    backward: bool = False
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    features: int = 256

    @property
    def causal(self) -> bool:
        """Whether a query sees only what came before it."""
        return self.task != "bidirectional"

    @property
    def title(self) -> str:
        """For tables."""
        if self.task == "decode":
            return f"decode one token, context {self.length}"
        return f"{self.task} forward{' + backward' if self.backward else ''}, L = {self.length}"

    def inputs(self, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The same q, k, v (B, H, L, D) for every contender."""
        gen = torch.Generator().manual_seed(0)
        size = (self.batch, self.heads, length or self.length, self.head_dim)
        q, k, v = (torch.randn(size, generator=gen) for _ in range(3))
        return q, k, v


class Contender(ABC):
    """One way to compute attention."""

    tolerance = 1e-4
    layout: Literal["heads", "tokens"] = "heads"  # (B, H, L, D), or (B, L, H, D)

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, case: Case) -> str | None:
        """Why it cannot run a case, or None."""
        return "decodes by recomputing" if case.task == "decode" else None

    @abstractmethod
    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention function, in its own layout."""

    @abstractmethod
    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the function last built should give, (B, H, L, D), from float64 inputs."""

    def error(self, case: Case) -> float:
        """Worst relative error of a row at a small length, against the definition."""
        q, k, v = case.inputs(SMALL)
        with torch.no_grad():
            got = self._heads(self.build(case)(*(self._own(x) for x in (q, k, v)))).double()
            want = self.definition(case, q.double(), k.double(), v.double())
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())

    def _own(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if self.layout == "tokens" else x

    def _heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.layout == "tokens" else x

    def runner(self, case: Case) -> Callable[[], Any]:
        """A call that does the case once, on inputs that are made here."""
        call = self.build(case)
        q, k, v = (self._own(x) for x in case.inputs())
        if not case.backward:

            def forward() -> Tensor:
                with torch.no_grad():
                    return call(q, k, v)

            return forward
        grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

        def train() -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = call(*leaves)
            return out, *torch.autograd.grad(out, leaves, grad)

        return train


class Kernelformer(Contender):
    """One of our methods."""

    def refuses(self, case: Case) -> str | None:
        """Exact methods have no state to decode from."""
        streams = self.method not in ("softmax", "gaussian")
        return None if case.task != "decode" or streams else "cannot stream"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.method, self.options = parse_method(name)

    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The core itself."""
        sizes = {"num_features": case.features, "max_length": max(case.length, SMALL)}
        known = method_options(self.method)
        options = {**{name: x for name, x in sizes.items() if name in known}, **self.options}
        self.core = build_attention(self.method, head_dim=case.head_dim, num_heads=case.heads, **options)
        return lambda q, k, v: self.core(q, k, v, is_causal=case.causal)

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By `attention.reference`, by the explicit matrix for exact methods, or by the method itself in float64."""
        core, scale = self.core, self.core.scale
        if isinstance(core, BaselineCore | GatedCore):
            out: Tensor = copy.deepcopy(core).double()(q, k, v, is_causal=case.causal)
            return out
        q, k = core._units(q, k, None)
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        if not isinstance(core, KernelCore):
            scores = scale * (q @ k.transpose(-1, -2))
            if self.method == "softmax":
                return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
            return torch.where(visible, torch.exp(-0.5 * scale * torch.cdist(q, k).square()), 0.0) @ v
        phi = core.feature_map
        q, k = phi.align(q, k, None)
        tensors = phi.prepare(q, k, None, scale)
        if isinstance(phi.spec, PositiveSpec):
            logs = (phi.spec.log_features(q, tensors, scale, "query"), phi.spec.log_features(k, tensors, scale, "key"))
            return positive_attention(*logs, v, visible)
        assert isinstance(phi.spec, SignedSpec)
        (phi_q, size_q), (phi_k, size_k) = (
            _mapped(phi.spec, x, tensors, scale, role) for x, role in ((q, "query"), (k, "key"))
        )
        guard = not phi.spec.nonnegative
        return signed_attention(phi_q, phi_k, v, visible, core.normalize, guard, (size_q, size_k))

    def runner(self, case: Case) -> Callable[[], Any]:
        """Decoding: one step after another, whatever the context."""
        if case.task != "decode":
            return super().runner(case)
        self.build(case)
        q, k, v = case.inputs(1)
        with torch.no_grad():
            _, self.state = self.core.step(q, k, v)

        def step() -> Tensor:
            with torch.no_grad():
                out, self.state = self.core.step(q, k, v, self.state)
            return out

        return step


def _mapped(spec: SignedSpec, x: Tensor, tensors: Sequence[Tensor], scale: float, role: Any) -> tuple[Tensor, Tensor]:
    """Features with their factor, and their lengths as the guard takes them."""
    phi, factor = spec.features(x, tensors, scale, role)
    length = spec.length(False)
    size = phi.norm(dim=-1, keepdim=True) if length is None else phi.new_full((*phi.shape[:-1], 1), length)
    return (phi, size) if factor is None else (phi * factor.exp(), size * factor.exp())


class Sdpa(Contender):
    """torch's `scaled_dot_product_attention`."""

    def refuses(self, case: Case) -> str | None:
        """Everything works, at a quadratic price."""
        return None

    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The function itself; causal if there is a triangle to speak of."""
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal and q.shape[2] > 1)

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The softmax of the explicit matrix."""
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(case.head_dim)
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v

    def runner(self, case: Case) -> Callable[[], Any]:
        """Decoding: one query against a cache of the context."""
        if case.task != "decode":
            return super().runner(case)
        call = self.build(case)
        _, k, v = case.inputs()
        q = case.inputs(1)[0]

        def step() -> Tensor:
            with torch.no_grad():
                return call(q, k, v)

        return step


def _positive_definition(omega: Tensor, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positive features of frequencies omega (M, D), by definition."""
    root = case.head_dim**-0.25
    logs = [x * root @ omega.T - 0.5 * (x * root).square().sum(-1, keepdim=True) for x in (q, k)]
    visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
    return positive_attention(logs[0], logs[1], v, visible)


class PerformerPytorch(Contender):
    """performer-pytorch's FastAttention."""

    tolerance = 1e-3

    def refuses(self, case: Case) -> str | None:
        """Its causal form keeps prefix sums and takes long and much memory."""
        if case.task == "causal" and (case.length > 4096 or case.backward):
            return "too slow or too large"
        return super().refuses(case)

    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """With as many frequencies as we draw."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from performer_pytorch.performer_pytorch import FastAttention

            self.module = FastAttention(case.head_dim, nb_features=case.features, causal=case.causal)
        module: Callable[[Tensor, Tensor, Tensor], Tensor] = self.module
        return module

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Its own estimator, from its own frequencies: 1e-4 is added to every feature, after one maximum for all keys,
        and 1e-6 to every sum of the causal form.

        At these norms that is far from the estimator without it, so the plain definition would not recognize it.
        """
        features = []
        for x, axes in ((q, (-1,)), (k, (-1, -2))):
            x = x * case.head_dim**-0.25
            z = x @ self.module.projection_matrix.double().T
            features.append(torch.exp(z - z.amax(axes, keepdim=True) - 0.5 * x.square().sum(-1, keepdim=True)) + 1e-4)
        phi_q, phi_k = features
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        weights = torch.where(visible, phi_q @ phi_k.transpose(-1, -2), 0.0)
        extra = 1e-6 * math.sqrt(case.features) * phi_q.sum(-1, keepdim=True) if case.causal else 0.0
        return weights @ v / (weights.sum(-1, keepdim=True) + extra)


class FastTransformers(Contender):
    """pytorch-fast-transformers' causal linear attention in C++, with its hyperbolic FAVOR features."""

    tolerance = 1e-3
    layout = "tokens"

    def refuses(self, case: Case) -> str | None:
        """The C++ kernel is the causal one."""
        return None if case.task == "causal" else "has no kernel of its own for it"

    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """As many features as ours; half as many frequencies, since it uses each twice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fast_transformers.attention.causal_linear_attention import CausalLinearAttention
            from fast_transformers.feature_maps import Favor
            from fast_transformers.masking import LengthMask, TriangularCausalMask

            self.module = CausalLinearAttention(case.head_dim, feature_map=Favor.factory(n_dims=case.features)).eval()
            self.module.feature_map.new_feature_map(torch.device("cpu"))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = q.shape[1]
            everyone = LengthMask(torch.full((q.shape[0],), length), max_len=length)
            out: Tensor = self.module(q, k, v, TriangularCausalMask(length), everyone, everyone)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From its own frequencies."""
        omega = self.module.feature_map.omega.double().T
        return _positive_definition(torch.cat([omega, -omega]), case, q, k, v)


class NystromAttention(Contender):
    """nystrom-attention's layer without its projections, as published: 256 landmarks, convolution of length 33."""

    tolerance = 1e-3
    layout = "tokens"
    landmarks = 256

    def refuses(self, case: Case) -> str | None:
        """Its landmarks are means over the whole sequence."""
        if case.length % self.landmarks:
            return f"pads to a multiple of {self.landmarks}"
        return None if case.task == "bidirectional" else "is not causal"

    def build(self, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The projections are replaced by what they would give."""
        from nystrom_attention import NystromAttention as Peer

        width = case.heads * case.head_dim
        self.module: Any = Peer(width, case.head_dim, case.heads, num_landmarks=self.landmarks).eval()
        del self.module.to_qkv
        self.module.to_out = torch.nn.Identity()

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.module.to_qkv = lambda _: _Chunks([x.flatten(2) for x in (q, k, v)])
            out: Tensor = self.module(q.flatten(2)).view(q.shape)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax through segment means, by its own iteration from one start value for all, and its convolution."""
        q = q * case.head_dim**-0.5
        mean_q, mean_k = (x.unflatten(2, (self.landmarks, -1)).mean(3) for x in (q, k))
        a, m, c = ((x @ y.transpose(-1, -2)).softmax(-1) for x, y in ((q, mean_k), (mean_q, mean_k), (mean_q, k)))
        z = m.transpose(-1, -2) / (m.sum(-1).max() * m.sum(-2).max())
        eye = torch.eye(self.landmarks, dtype=m.dtype)
        for _ in range(self.module.pinv_iterations):
            p = m @ z
            z = 0.25 * z @ (13 * eye - p @ (15 * eye - p @ (7 * eye - p)))
        weight = self.module.res_conv.weight.double()
        out: Tensor = a @ z @ (c @ v) + F.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=case.heads)
        return out


class _Chunks(list[Tensor]):
    """Queries, keys and values where a layer expects one tensor of all three."""

    def chunk(self, count: int, dim: int) -> list[Tensor]:
        """All three."""
        return self


PEERS: dict[str, tuple[str, Callable[[str], Contender]]] = {
    "performer-pytorch": ("performer_pytorch", PerformerPytorch),
    "fast-transformers": ("fast_transformers", FastTransformers),
    "nystrom-attention": ("nystrom_attention", NystromAttention),
}


def installed_peers() -> list[str]:
    """The peers that can be imported here."""
    return [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module)]


def contender(name: str) -> Contender:
    """By name: a method of ours, with options or without (see `parse_method`), ``sdpa``, or a peer."""
    if name == "sdpa":
        return Sdpa(name)
    if name in PEERS:
        return PEERS[name][1](name)
    return Kernelformer(name)
