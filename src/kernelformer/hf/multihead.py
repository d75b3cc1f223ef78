"""`torch.nn.MultiheadAttention` with a core: a drop-in inside plain PyTorch models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.errors import shape
from kernelformer.modules import AttentionCore

_NESTED = "_nested_before"  # attribute of encoders of torch: what they did
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


class KernelMultiheadAttention(nn.Module):
    """The projections of a `torch.nn.MultiheadAttention` around a core; its weights keep their names.

    Attention to the same tensor is self-attention, whose queries are padded where its keys are. ``need_weights`` is
    torch's default, and asks for the L x S matrix: pass False to stay linear, as torch's own
    Transformer layers do. Dropout of the weights is left out, since there are none.

    Args:
        original: its parameters are taken over, not copied.
        core: how to attend.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    calls: int  # so far

    def __init__(self, original: nn.MultiheadAttention, core: AttentionCore) -> None:
        super().__init__()
        if original.bias_k is not None or original.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn add keys of their own, which is not covered.")
        self.embed_dim, self.num_heads, self.batch_first = original.embed_dim, original.num_heads, original.batch_first
        self.head_dim = original.head_dim
        self.dropout = original.dropout
        for name in _PROJECTIONS:
            self.register_parameter(name, getattr(original, name))
        self.out_proj = original.out_proj
        self.kernel = core
        self.calls = 0
        vars(self)["original"] = original  # not a child: its weights are here already
        # nn.TransformerEncoderLayer would go around this module by a fused kernel where this is True.
        self._qkv_same_embed_dim = False

    def restored(self) -> nn.MultiheadAttention:
        """The original, with the weights as they are now."""
        original: nn.MultiheadAttention = vars(self)["original"]
        for name in _PROJECTIONS:
            original.register_parameter(name, getattr(self, name))
        original.out_proj = self.out_proj
        return original.train(self.training)

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        weights = (
            [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's: (B, L, E) or (L, B, E) by ``batch_first``, or (L, E).

        Args:
            query: what attends.
            key: what is attended to.
            value: of the keys.
            key_padding_mask: (B, S); True, or -inf, = hidden.
            need_weights: also return the weights.
            attn_mask: (L, S), causal or empty; others are refused.
            average_attn_weights: over the heads.
            is_causal: says that ``attn_mask`` is causal.
        """
        if query.is_nested:
            raise ValueError("nested tensors are not covered; pad them, or build torch's encoder without them.")
        self.calls += 1
        single, across = query.dim() == 2, query is not key
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = self._is_causal(attn_mask, is_causal)
        hidden = _hidden(key_padding_mask, "key_padding_mask")
        q, k, v = self._project(query, key, value)
        options: dict[str, Any] = {"is_causal": causal, "key_mask": None if hidden is None else ~hidden}
        if across:  # else a mask of the keys would be taken for one of the queries
            options["query_mask"] = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        out: Tensor = self.out_proj(self.kernel(q, k, v, **options).transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            weights = self.kernel.attention_matrix(q, k, **options)
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    @staticmethod
    def _is_causal(mask: Tensor | None, is_causal: bool) -> bool:
        if mask is None:
            if is_causal:
                raise ValueError("is_causal=True says that attn_mask is causal, and none was given; give it.")
            return False
        hidden = _hidden(mask, "attn_mask")
        assert hidden is not None
        if not bool(hidden.any()):
            return False
        square = hidden.dim() == 2 and hidden.shape[0] == hidden.shape[1]
        if not square or not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            raise ValueError(
                f"attn_mask of shape {shape(mask)} is neither causal nor empty; kernel attention cannot hide single "
                f"pairs. Hide keys by key_padding_mask."
            )
        return True

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def pad_batches(model: nn.Module) -> None:
    """Torch's encoders with padded batches: they would make nested tensors of them, for a fused kernel."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and _NESTED not in vars(module):
            vars(module)[_NESTED] = module.use_nested_tensor
            module.use_nested_tensor = False


def unpad_batches(model: nn.Module) -> None:
    """Torch's encoders as they were."""
    for module in model.modules():
        if _NESTED in vars(module):
            module.use_nested_tensor = vars(module).pop(_NESTED)


def _hidden(mask: Tensor | None, what: str) -> Tensor | None:
    """Torch's masks: True, or -inf, = hidden."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(f"{what} in {mask.dtype} must be 0 or -inf, got other numbers, which would be a bias.")
    return hidden
