"""Contenders of others: the peers that are installed, and an algorithm as its paper prints it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.reference import log_attention, positive_attention, visibility
from kernelformer.modules import KernelCore, build_attention
from kernelformer_lab.bench.case import Attention, Case, Contender
from kernelformer_lab.bench.harness import too_large

OPSET, CONTRIB = 17, "com.microsoft"  # of the graph, and the domain of onnxruntime's own operators
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


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
