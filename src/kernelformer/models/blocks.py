"""Blocks of attention and feed-forward, and stacks of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from kernelformer.cache import StateCache
from kernelformer.lazy import LAYERS
from kernelformer.models.config import KernelformerConfig
from kernelformer.modules import KernelAttention, RelativePositions, method_options
from kernelformer.modules.spec import POSITION_OPTIONS, parse_attention


class Block(GradientCheckpointingLayer):
    """Self-attention, cross-attention where there is any, and feed-forward, each around a residual connection.

    x <- x + part(norm(x))        norm_first;  else  x <- norm(x + part(x))
    """

    def __init__(
        self, config: KernelformerConfig, index: int, attention: nn.Module, cross: KernelAttention | None = None
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
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Apply the block, (B, L, d) -> (B, L, d).

        Masks (B, L) and (B, S) are bool, True = attend; segments are (B, L); positions (B or 1, L) are what rotary ones
        turn by.
        """
        tokens = {"key_mask": key_mask, "segment_ids": segment_ids}
        if self.attention.rotary is not None:
            tokens["position_ids"] = position_ids
        x = self._around(x, self.attention_norm, lambda h: self._attend(h, tokens, past_key_values))
        if self.cross is not None and self.cross_norm is not None:
            x = self._around(
                x, self.cross_norm, lambda h: self._attend_context(h, context, context_mask, past_key_values)
            )
        return self._around(x, self.feed_norm, lambda h: self.narrow(self.activation(self.wide(h))))

    def _around(self, x: Tensor, norm: nn.LayerNorm, part: Any) -> Tensor:
        if self.norm_first:
            y: Tensor = x + self.dropout(part(norm(x)))
        else:
            y = norm(x + self.dropout(part(x)))
        return y

    def _attend(self, x: Tensor, tokens: dict[str, Tensor | None], cache: StateCache | None) -> Tensor:
        """Attend among tokens, of which the mask, the segments and rotary positions are known."""
        if cache is None:
            out: Tensor = self.attention(x, **tokens)
            return out
        assert isinstance(self.attention, KernelAttention)  # no other layer is causal
        kept = cache.layers[self.index]
        if x.shape[1] == 1:
            y, kept.state = self.attention.step(x, kept.state, **tokens)
        else:
            y, kept.state = self.attention(x, **tokens, state=kept.state, return_state=True)
        return y

    def _attend_context(
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

    ``length`` is the longest sequence, without ``num_prefix`` tokens before it or the grid, for methods and positions
    with a table of it; ``part`` is its number in the model, so that an encoder and a decoder draw differently.
    """

    def __init__(
        self,
        config: KernelformerConfig,
        specs: Sequence[str],
        *,
        causal: bool,
        length: int,
        cross: Sequence[str] | None = None,
        grid: tuple[int, int] | None = None,
        num_prefix: int = 0,
        part: int = 0,
    ) -> None:
        super().__init__()
        shared: dict[str, RelativePositions] | None = {} if config.share_bias else None
        common: dict[str, Any] = {"length": length, "grid": grid, "num_prefix": num_prefix, "shared": shared}
        blocks = []
        for i, spec in enumerate(specs):
            seed = draw_seed(config.seed, part, i, 0)
            own: nn.Module
            if parse_attention(spec)[0] in LAYERS:
                own = make_layer(config, spec, causal=causal, seed=seed, length=length + num_prefix)
            else:
                own = make_attention(config, spec, causal=causal, seed=seed, **common)
            other = None
            if cross is not None:
                other = make_attention(
                    config, cross[i], causal=False, seed=draw_seed(config.seed, part, i, 1), length=length
                )
                if causal and other.core.mixes_queries:
                    raise ValueError(
                        f"cross-attention by {cross[i]!r} mixes all queries, later ones included, which a decoder must "
                        f"not see; use 'softmax', or a method with a feature map such as 'favor+'."
                    )
            blocks.append(Block(config, i, own, other))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else nn.Identity()

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Apply all blocks, (B, L, d) -> (B, L, d); options are those of a `Block`."""
        for block in self.blocks:
            x = block(x, context, **options)
        y: Tensor = self.norm(x)
        return y


def draw_seed(*numbers: int) -> int:
    """Hash the model's seed and the position of an attention in it: no two attentions draw the same frequencies."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "big")


def make_layer(config: KernelformerConfig, spec: str, *, causal: bool, seed: int, length: int) -> nn.Module:
    """Build a layer of another distribution, see `kernelformer.lazy.LAYERS`."""
    name, options = parse_attention(spec)
    if causal:
        raise ValueError(
            f"{name!r} is here for encoders, and this model is causal; use a method of list_methods(), such as "
            f"'favor+', or 'local' for near tokens."
        )
    if config.head_dim is not None:
        raise ValueError(
            f"{name!r} of transformers divides hidden_size among the heads, got head_dim={config.head_dim}; leave it "
            f"out."
        )
    if "seed" in LAYERS[name].options:
        options.setdefault("seed", seed)
    layer: nn.Module = LAYERS[name].load()(config.hidden_size, config.num_attention_heads, length, **options)
    return layer


def make_attention(
    config: KernelformerConfig,
    spec: str,
    *,
    causal: bool,
    seed: int,
    length: int,
    grid: tuple[int, int] | None = None,
    num_prefix: int = 0,
    shared: dict[str, RelativePositions] | None = None,
) -> KernelAttention:
    """Build the layer that a spec asks for, with what it leaves open taken from the model.

    Relative positions of a kind that is in ``shared`` are those, and others go there.
    """
    method, options = parse_attention(spec)
    known = method_options(method)
    if "seed" in known and options.get("projection", True):
        options.setdefault("seed", seed)
    if "max_length" in known:  # linformer
        options.setdefault("max_length", length + num_prefix)
    kind = ""
    if "relative" in options:
        own = {name: options.pop(name) for name in POSITION_OPTIONS if name in options}
        if own["relative"] == "2d":
            own = {"grid": grid, "num_prefix": num_prefix, **own}
            if own["grid"] is None:
                raise ValueError(
                    f"{spec!r} needs tokens on a grid: an image model, or grid=(rows,columns) in the spec."
                )
        elif "max_distance" not in own and own.get("scheme", "table") == "table":
            own = {"max_length": length + num_prefix, **own}
        kind = repr(sorted(own.items()))
        options |= own if shared is None or kind not in shared else {"relative": shared[kind]}
    layer = KernelAttention(
        config.hidden_size, config.num_attention_heads, method, causal=causal, head_dim=config.head_dim, **options
    )
    if shared is not None and layer.positions is not None:
        shared.setdefault(kind, layer.positions)
    return layer


def last_segments(segment_ids: Tensor | None, tokens: int, past: int = 0) -> Tensor | None:
    """The segments of the last L tokens, of ids (B, past + L); None where there are none."""
    return None if segment_ids is None else _last(segment_ids, tokens, past, "segment_ids")


def _last(x: Tensor, tokens: int, past: int, what: str) -> Tensor:
    """The columns of the last L tokens, (B, past + L) -> (B, L)."""
    if x.dim() != 2 or x.shape[1] != past + tokens:
        before = f"{past} in the cache and {tokens} new ones" if past else f"{tokens}"
        raise ValueError(f"{what} must be (batch, tokens) with a column for each of {before}, got {tuple(x.shape)}.")
    return x[:, past:]


def visible(attention_mask: Tensor | None, tokens: int, past: int = 0, what: str = "attention_mask") -> Tensor | None:
    """Make of a Hugging Face mask (B, past + L) a key mask of the last L tokens; None where it hides none of them."""
    if attention_mask is None:
        return None
    mask = _last(attention_mask, tokens, past, what).bool()
    if not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask
