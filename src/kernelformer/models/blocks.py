"""Blocks of attention and feed-forward, and stacks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from kernelformer.hf import StateCache
from kernelformer.models.config import KernelformerConfig
from kernelformer.modules import KernelAttention, RelativePositions, method_options
from kernelformer.modules.build import POSITION_OPTIONS, parse_attention


class Block(GradientCheckpointingLayer):
    """Self-attention, cross-attention where there is any, and feed-forward, each around a residual connection.

        x <- x + part(norm(x))        norm_first;  else  x <- norm(x + part(x))

    Args:
        config: of the model.
        index: of the block in its stack.
        attention: from tokens to tokens.
        cross: from tokens to a context.
    """

    def __init__(
        self,
        config: KernelformerConfig,
        index: int,
        attention: KernelAttention,
        cross: KernelAttention | None = None,
    ) -> None:
        super().__init__()
        self.index, self.norm_first = index, config.norm_first
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention, self.cross = attention, cross
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.cross_norm = None if cross is None else nn.LayerNorm(width, eps=eps)
        self.wide = nn.Linear(width, config.feed_forward)
        self.activation = ACT2FN[config.hidden_act]
        self.narrow = nn.Linear(config.feed_forward, width)
        self.feed_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.dropout)
        for part in (attention.out, self.narrow, *(() if cross is None else (cross.out,))):
            part.feeds_residual = True  # first weights of such are smaller

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
    ) -> Tensor:
        """(B, L, d) -> (B, L, d); masks (B, L) and (B, S) bool, True = attend."""
        x = self._around(x, self.attention_norm, lambda h: self._attend(h, key_mask, past_key_values))
        if self.cross is not None and self.cross_norm is not None:
            x = self._around(x, self.cross_norm, lambda h: self._look_up(h, context, context_mask, past_key_values))
        return self._around(x, self.feed_norm, lambda h: self.narrow(self.activation(self.wide(h))))

    def _around(self, x: Tensor, norm: nn.LayerNorm, part: Any) -> Tensor:
        if self.norm_first:
            y: Tensor = x + self.dropout(part(norm(x)))
        else:
            y = norm(x + self.dropout(part(x)))
        return y

    def _attend(self, x: Tensor, key_mask: Tensor | None, cache: StateCache | None) -> Tensor:
        if cache is None:
            out: Tensor = self.attention(x, key_mask=key_mask)
            return out
        kept = cache.layers[self.index]
        if x.shape[1] == 1:
            y, kept.state = self.attention.step(x, kept.state, key_mask=key_mask)
        else:
            y, kept.state = self.attention(x, key_mask=key_mask, state=kept.state, return_state=True)
        return y

    def _look_up(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, cache: StateCache | None
    ) -> Tensor:
        assert self.cross is not None
        if context is None:
            raise ValueError("this block attends to an encoder's output, and none was given.")
        if cache is None:
            out: Tensor = self.cross(x, context, context_mask)
            return out
        kept = cache.layers[self.index]
        if kept.memory is None:
            kept.memory = self.cross.remember(context, context_mask)
        return self.cross.recall(x, kept.memory)


class Stack(nn.Module):
    """Blocks one after another, and the norm at their end.

    Args:
        config: of the model.
        specs: the attention of each block.
        causal: whether tokens see only those before them.
        cross: the attention of each block to a context.
        grid: (rows, columns), for tokens on a grid.
        num_prefix: tokens before the sequence or the grid.
        seed: added to the configuration's, so that an encoder and a decoder draw differently.
    """

    def __init__(
        self,
        config: KernelformerConfig,
        specs: Sequence[str],
        *,
        causal: bool,
        cross: Sequence[str] | None = None,
        grid: tuple[int, int] | None = None,
        num_prefix: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        shared: dict[str, RelativePositions] = {}
        common: dict[str, Any] = {"grid": grid, "num_prefix": num_prefix, "shared": shared}
        blocks = []
        for i, spec in enumerate(specs):
            own = make_attention(config, spec, causal=causal, seed=seed + 2 * i, **common)
            other = None
            if cross is not None:
                other = make_attention(config, cross[i], causal=False, seed=seed + 2 * i + 1)
                if causal and other.core.mixes_queries:
                    raise ValueError(
                        f"cross-attention by {cross[i]!r} mixes all queries, later ones included, which a decoder must "
                        f"not see; use 'softmax', or a method with a feature map such as 'favor+'."
                    )
            blocks.append(Block(config, i, own, other))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else nn.Identity()

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """(B, L, d) -> (B, L, d); options are those of a `Block`."""
        for block in self.blocks:
            x = block(x, context, **options)
        y: Tensor = self.norm(x)
        return y


def make_attention(
    config: KernelformerConfig,
    spec: str,
    *,
    causal: bool,
    seed: int,
    grid: tuple[int, int] | None = None,
    num_prefix: int = 0,
    shared: dict[str, RelativePositions] | None = None,
) -> KernelAttention:
    """The layer that a spec asks for, with what it leaves open taken from the model."""
    method, options = parse_attention(spec)
    known = method_options(method)
    if "seed" in known and options.get("projection", True):
        options.setdefault("seed", config.seed + seed)
    if "max_length" in known:  # linformer
        options.setdefault("max_length", config.max_position_embeddings + num_prefix)
    relative = options.get("relative")
    if relative == "2d":
        if grid is None and "grid" not in options:
            raise ValueError(f"{spec!r} needs tokens on a grid: an image model, or grid=(rows,columns) in the spec.")
        options.setdefault("grid", grid)
        options.setdefault("num_prefix", num_prefix)
    elif relative is not None and "max_distance" not in options and options.get("scheme", "table") == "table":
        options.setdefault("max_length", config.max_position_embeddings + num_prefix)
    if relative is not None and config.share_bias and shared is not None:
        kind = repr(sorted((name, options[name]) for name in POSITION_OPTIONS if name in options))
        if kind in shared:
            for name in POSITION_OPTIONS:
                options.pop(name, None)
            options["relative"] = shared[kind]
    layer = KernelAttention(config.hidden_size, config.num_attention_heads, method, causal=causal, **options)
    if layer.positions is not None and config.share_bias and shared is not None:
        shared.setdefault(kind, layer.positions)
    return layer


def visible(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The last ``tokens`` columns of a Hugging Face mask (B, past + L) as a key mask; None where nothing is hidden."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask must be (batch, tokens) with at least {tokens} columns, got {tuple(attention_mask.shape)}."
        )
    mask = attention_mask[:, attention_mask.shape[1] - tokens :].bool()
    if not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask
