"""Contenders of other runtimes and devices: onnxruntime's attention, and flash-linear-attention's kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention.reference import log_attention, visibility
from kernelformer.measure.case import Attention, Case, Contender

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
