"""Contenders of the benchmark: our methods, torch's own attention, the peers that are installed, and an
algorithm as its paper prints it.

Every contender takes the same random queries, keys, values and bias, and is checked against its definition, in float64
and with its own frequencies, before it is timed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.dispatch import BIASED, LOOPS
from kernelformer.attention.reference import log_attention, positive_attention, visibility
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
from kernelformer_lab.bench.case import SMALL, Attention, Case, Contender
from kernelformer_lab.bench.harness import too_large

__all__ = ["Case", "Contender", "Kernelformer", "Sdpa", "contender", "installed_peers", "yardsticks"]
OPSET, CONTRIB = 17, "com.microsoft"  # of the graph, and the domain of onnxruntime's own operators
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
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
        self.algorithm = None if chosen is None else choice("algorithm", chosen, (*LOOPS, *BIASED))
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
        promised = any(_near_tokens(core)) or (case.backward and self.algorithm in (None, "windowed"))
        self.reach = {"max_distance": case.window} if case.bias == "window" and promised else {}
        more: dict[str, Any] = {"algorithm": self.algorithm} if self.algorithm else {}

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            how = more if bias is None else {"bias": bias, **more, **self.reach}
            out: Tensor = core(q, k, v, is_causal=case.causal, **how)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the same core in float64, in operations of torch where it knows them."""
        how: dict[str, Any] = {"algorithm": "plain"} if self.core.takes_loops else {}
        if case.bias is not None:
            how |= {"bias": case.bias_table(q.shape[2]).cpu().double(), **self.reach}
        out: Tensor = copy.deepcopy(self.core).cpu().double()(q, k, v, is_causal=case.causal, **how)
        return out

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
    """True if its weights are positive and normalized, so that they and a bias add up in log space."""
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


class OnnxRuntime(Contender):
    """onnxruntime's MultiHeadAttention, exact, in a graph of this one operator; forward only.

    Tensors go in and out as they are on the CPU; on CUDA they are bound where they lie.
    """

    layout = "tokens"

    def _refuses(self, case: Case) -> str | None:
        """No gradients, and no cache here."""
        if case.backward:
            return "has no backward pass"
        if case.device_kind not in PROVIDERS:
            return f"has no attention for {case.device_kind}"
        return super()._refuses(case)

    def build(self, case: Case) -> Attention:
        """Build the graph and its session, with as many threads as torch has."""
        import onnxruntime

        provider = PROVIDERS[case.device_kind]
        if provider not in onnxruntime.get_available_providers():
            raise RuntimeError(f"this onnxruntime has no {provider}; install onnxruntime-gpu.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(self._graph(case), options, providers=[provider])

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            bound = session.io_binding()
            for name, x in zip("qkv", (q, k, v), strict=True):
                bound.bind_input(name, *self._place(x), tuple(x.flatten(2).shape), x.data_ptr())
            bound.bind_output("out", *self._place(out), tuple(out.flatten(2).shape), out.data_ptr())
            session.run_with_iobinding(bound)
            return out

        return call

    @staticmethod
    def _place(x: Tensor) -> tuple[str, int, Any]:
        """Device, its number, and type of the elements."""
        import numpy as np

        return x.device.type, x.device.index or 0, np.float32

    @staticmethod
    def _graph(case: Case) -> bytes:
        from onnx import TensorProto, helper

        sizes: list[str | int | None] = ["batch", "length", case.heads * case.head_dim]
        given = [helper.make_tensor_value_info(x, TensorProto.FLOAT, sizes) for x in "qkv"]
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, sizes)
        node = helper.make_node(
            "MultiHeadAttention", ["q", "k", "v"], ["out"], domain=CONTRIB, num_heads=case.heads,
            unidirectional=int(case.causal), scale=1 / math.sqrt(case.head_dim),
        )  # fmt: skip
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        graph = helper.make_graph([node], "attention", given, [out])
        model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        return model

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the softmax of the explicit matrix."""
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        return log_attention(q @ k.mT / math.sqrt(case.head_dim), v, visible)


class FlashLinearAttention(Contender):
    """flash-linear-attention's simple linear attention, causal and normalized, of the features ``elu(x) + 1``.

    Its kernel takes mapped queries and keys, so that there are as many features as the head has dimensions, and the map
    is torch's.
    """

    tolerance = 5e-3  # its products are TF32
    layout = "tokens"

    def _refuses(self, case: Case) -> str | None:
        """Its kernels are in Triton, and causal."""
        if case.device_kind not in ("cuda", "xpu"):
            return "has kernels for CUDA and XPU only"
        return None if case.task == "causal" else "has no kernel of its own for it"

    def build(self, case: Case) -> Attention:
        """Return its function with the map before it."""
        from fla.ops.linear_attn import chunk_linear_attn

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by the explicit matrix of weights."""
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
        return weights @ v / weights.sum(-1, keepdim=True)


def _positive_definition(omega: Tensor, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by positive features of the frequencies omega (M, D), by definition."""
    root = case.head_dim**-0.25
    logs = [x * root @ omega.T - 0.5 * (x * root).square().sum(-1, keepdim=True) for x in (q, k)]
    visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
    return positive_attention(logs[0], logs[1], v, visible)


class PerformerPytorch(Contender):
    """FastAttention of performer-pytorch."""

    tolerance = 1e-3

    def _refuses(self, case: Case) -> str | None:
        """Its causal form keeps prefix sums and takes long and much memory."""
        if case.task == "causal" and (case.length > 4096 or case.backward):
            return "too slow or too large"
        return super()._refuses(case)

    def build(self, case: Case) -> Attention:
        """Build it with as many frequencies as we draw."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from performer_pytorch.performer_pytorch import FastAttention

            self.module = FastAttention(case.head_dim, nb_features=case.features, causal=case.causal).to(case.device)
        module: Attention = self.module
        return module

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return its own estimator, from its own frequencies.

        1e-4 is added to every feature, after one maximum for all keys, and 1e-6 to every sum of the causal form.

        At these norms that is far from the estimator without it, so the plain definition would not recognize it.
        """
        features = []
        for x, axes in ((q, (-1,)), (k, (-1, -2))):
            x = x * case.head_dim**-0.25
            z = x @ self.module.projection_matrix.cpu().double().T
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

    def _refuses(self, case: Case) -> str | None:
        """The C++ kernel is the causal one."""
        return None if case.task == "causal" else "has no kernel of its own for it"

    def build(self, case: Case) -> Attention:
        """Build it with as many features as ours; half as many frequencies, since it uses each twice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fast_transformers.attention.causal_linear_attention import CausalLinearAttention
            from fast_transformers.feature_maps import Favor
            from fast_transformers.masking import LengthMask, TriangularCausalMask

            self.module = CausalLinearAttention(case.head_dim, feature_map=Favor.factory(n_dims=case.features)).eval()
            self.module.feature_map.new_feature_map(torch.device(case.device))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = q.shape[1]
            everyone = LengthMask(torch.full((q.shape[0],), length), max_len=length, device=q.device)
            out: Tensor = self.module(q, k, v, TriangularCausalMask(length, device=q.device), everyone, everyone)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by definition, from its own frequencies."""
        omega = self.module.feature_map.omega.cpu().double().T
        return _positive_definition(torch.cat([omega, -omega]), case, q, k, v)


class NystromAttention(Contender):
    """nystrom-attention's layer without its projections, as published: 256 landmarks, convolution of length 33."""

    tolerance = 1e-3
    layout = "tokens"
    landmarks = 256

    def _refuses(self, case: Case) -> str | None:
        """Its landmarks are means over the whole sequence."""
        if case.length % self.landmarks:
            return f"pads to a multiple of {self.landmarks}"
        return None if case.task == "bidirectional" else "is not causal"

    def build(self, case: Case) -> Attention:
        """Build the layer, its projections replaced by what they would give."""
        from nystrom_attention import NystromAttention as Peer

        width = case.heads * case.head_dim
        self.module: Any = Peer(width, case.head_dim, case.heads, num_landmarks=self.landmarks).eval().to(case.device)
        del self.module.to_qkv
        self.module.to_out = torch.nn.Identity()

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.module.to_qkv = lambda _: _Chunks([x.flatten(2) for x in (q, k, v)])
            out: Tensor = self.module(q.flatten(2)).view(q.shape)
            return out

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax through segment means, by its own iteration from one start for all, and its convolution."""
        q = q * case.head_dim**-0.5
        mean_q, mean_k = (x.unflatten(2, (self.landmarks, -1)).mean(3) for x in (q, k))
        a, m, c = ((x @ y.transpose(-1, -2)).softmax(-1) for x, y in ((q, mean_k), (mean_q, mean_k), (mean_q, k)))
        z = m.transpose(-1, -2) / (m.sum(-1).max() * m.sum(-2).max())
        eye = torch.eye(self.landmarks, dtype=m.dtype)
        for _ in range(self.module.pinv_iterations):
            p = m @ z
            z = 0.25 * z @ (13 * eye - p @ (15 * eye - p @ (7 * eye - p)))
        weight = self.module.res_conv.weight.cpu().double()
        out: Tensor = a @ z @ (c @ v) + F.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=case.heads)
        return out


class _Chunks(list[Tensor]):
    """Queries, keys and values where a layer expects one tensor of all three."""

    def chunk(self, count: int, dim: int) -> list[Tensor]:
        """Return all three."""
        return self


class AlgorithmOne(Contender):
    """Algorithm 1 of NPRF with RPE (2106.12566) as it is printed, with torch's own gradients.

        D_1 = C A_1    D_2 = C A_2    out_i = phi(q_i) D_1,i / phi(q_i) D_2,i          C_ij = exp(b_{j-i})

    A_1 (n, m, e) and A_2 (n, m) hold ``phi(k_j)^T v_j`` and ``phi(k_j)`` of all keys at once, and the Toeplitz matrix C
    multiplies them by an FFT over a circulant of 2n, along the sequence, whose elements are rows as in Eq. 12. Queries
    and keys are divided by their norms; phi is favor+'s, with its frequencies and without stabilization, which vectors
    of norm 1 can do without.

    Cost: O(n log n m e) time; about 7 tensors of n x m x e, and 20 with gradients.
    """

    tolerance = 1e-3  # the rounding of an FFT is that of its largest row
    takes_bias = True

    def _refuses(self, case: Case) -> str | None:
        """It is for a bias, and for training: the paper leaves decoding open."""
        if case.bias is None:
            return "is made for a bias"
        # Beside A_1 there are its copy of length 2n, the transform of that and their product; the factors are measured.
        whole = 4 * case.batch * case.heads * case.length * case.features * case.head_dim
        return super()._refuses(case) or too_large((20 if case.backward else 7) * whole)

    def build(self, case: Case) -> Attention:
        """Build it as printed, for whole tensors."""
        core = build_attention(
            "favor+", head_dim=case.head_dim, num_heads=case.heads, num_features=case.features, normalize_qk=True
        )
        assert isinstance(core, KernelCore)
        assert core.feature_map.omega is not None
        self.omega = omega = core.feature_map.omega[0].to(case.device)  # (M, D)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            c = bias.exp()
            if case.causal:
                c = torch.cat([c[:, : q.shape[2]], c.new_zeros(len(c), q.shape[2] - 1)], 1)
            # exp(-|x|^2 / 2) / sqrt(m) is the same for all vectors of norm 1 and cancels.
            phi_q, phi_k = (torch.exp(x @ omega.T) for x in (q, k))
            d1 = _toeplitz(c, (phi_k.unsqueeze(-1) * v.unsqueeze(-2)).flatten(3)).unflatten(3, (-1, v.shape[-1]))
            d2 = _toeplitz(c, phi_k)
            above = torch.einsum("bhnm,bhnme->bhne", phi_q, d1)
            return above / (phi_q * d2).sum(-1, keepdim=True)

        return call

    def definition(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by the explicit matrix of phi(q_i) . phi(k_j) exp(b_{j-i})."""
        phi_q, phi_k = (torch.exp(F.normalize(x, dim=-1) @ self.omega.cpu().double().T) for x in (q, k))
        visible = visibility(q.shape[2], k.shape[2], is_causal=case.causal, key_mask=None)
        weights = phi_q @ phi_k.transpose(-1, -2) * case.bias_matrix(q.shape[2]).exp()
        weights = torch.where(visible, weights, 0.0)
        return weights @ v / weights.sum(-1, keepdim=True)


def _toeplitz(c: Tensor, x: Tensor) -> Tensor:
    """``y_i = sum_j c_{j-i} x_j`` by a circulant of 2n: c (H, 2n-1) and x (B, H, n, F) -> (B, H, n, F).

    Entry t of c is that of distance t - (n-1). As a convolution ``y_i = sum_j g_{i-j} x_j`` with ``g_s = c_{-s}``, so
    that c is read backwards from its middle.
    """
    n = x.shape[2]
    g = c.flip(1)
    circulant = torch.cat([g[:, n - 1 :], g.new_zeros(len(g), 1), g[:, : n - 1]], 1)  # (H, 2n)
    spectrum = torch.fft.rfft(circulant).unsqueeze(-1) * torch.fft.rfft(x, n=2 * n, dim=2)
    y: Tensor = torch.fft.irfft(spectrum, n=2 * n, dim=2)
    return y[:, :, :n]


PEERS: dict[str, tuple[str, Callable[[str], Contender]]] = {
    "performer-pytorch": ("performer_pytorch", PerformerPytorch),
    "fast-transformers": ("fast_transformers", FastTransformers),
    "nystrom-attention": ("nystrom_attention", NystromAttention),
    "flash-linear-attention": ("fla", FlashLinearAttention),
    "onnxruntime": ("onnxruntime", OnnxRuntime),
}


def installed_peers() -> list[str]:
    """Return the names of the peers that can be imported here."""
    return [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module)]


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
