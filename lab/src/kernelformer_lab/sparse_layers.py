"""Sparse attention layers of transformers in the blocks of our encoders: BigBird, Longformer, Reformer and Informer.

Each wraps the attention module of transformers as it is and adds what its models do around it: padding to a multiple of
a block, masks in its own form, the projection of the output. So all else of a model is that of the other methods, as
Skyformer (2111.00035), Sec. 5 compares: only the self-attention is replaced.

Sizes have the defaults of transformers, or less in a model for short sequences: the largest power of two with which a
token sees at most half of the longest sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BigBirdConfig, BigBirdModel, LongformerConfig, ReformerConfig
from transformers import initialization as init
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.informer.modeling_informer import InformerProbSparseAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from kernelformer.errors import integer, positive_int
from kernelformer.modules.context import needs_whole
from kernelformer.quiet import silent_libraries

# Of Reformer's masks, as its models in transformers set them.
MASK_VALUES = {
    "self_mask_value_float16": -1e3,
    "self_mask_value_float32": -1e5,
    "mask_value_float16": -1e4,
    "mask_value_float32": -1e9,
}


class SparseAttention(nn.Module):
    """Base of the layers: padding, masks and the output's projection around an attention module of transformers.

    All of them are built with the width d, the number of heads, which divides it, and the longest sequence.

    Args:
        width: d.
        layer: the module of transformers.
        multiple: the module takes lengths that are multiples of it.
        least: the shortest length that it takes.
    """

    rotary = None  # as `KernelAttention` has them: a block asks
    positions = None

    def __init__(self, width: int, layer: nn.Module, *, multiple: int = 1, least: int = 1) -> None:
        super().__init__()
        self.multiple, self.least = multiple, least
        self.layer = layer
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """(B, L, d) -> (B, L, d); key_mask (B, L) is bool, True = attend, and what stands elsewhere is not read."""
        if segment_ids is not None:
            raise ValueError(
                f"{type(self).__name__} has no packed sequences, got segment_ids; give each sequence a row of its own."
            )
        needs_whole(type(self).__name__, "use a method with a feature map such as 'favor+'")
        length = x.shape[1]
        if key_mask is not None:
            x = x.masked_fill(~key_mask.unsqueeze(-1), 0)
        extra = padded_length(length, self.multiple, self.least) - length
        if extra:
            key_mask = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
            x, key_mask = F.pad(x, (0, 0, 0, extra)), F.pad(key_mask, (0, extra))
        y: Tensor = self.out(self._attend(x, key_mask)[:, :length])
        return y

    @abstractmethod
    def _attend(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attend by the module of transformers, (B, L, d) -> (B, L, d), L being a length that it takes."""


class BigBirdLayer(SparseAttention):
    """BigBird (2007.14062): a block sees its neighbours, random blocks, the first and the last block, which see all.

    Random blocks are drawn once and for all from the seed, as in the paper. In evaluation transformers would put the
    first block in the place of all of them; here the same blocks serve, so that a model is evaluated as it was trained.

    Sequences too short for random blocks are padded to (6 + 2 num_random_blocks) blocks, where transformers would turn
    to full attention. The last block of a padded sequence may be padding, which then is what all others see globally:
    padding to another number of blocks is another attention.

    Args:
        block_size: default 64, at most a sixteenth of the longest sequence.
        num_random_blocks: of each block; at least 1, without which transformers' code fails.
        seed: of the random blocks.

    Cost: O(L (5 + num_random_blocks) block_size) for the attention; but transformers (5.23) also writes the weights
    into a matrix of L x L, unused here, so that memory is quadratic.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        length: int,
        *,
        block_size: int | None = None,
        num_random_blocks: int = 3,
        seed: int = 0,
    ) -> None:
        blocks = positive_int("num_random_blocks", num_random_blocks)
        size = positive_int("block_size", _fitting(64, length, 16) if block_size is None else block_size)
        least = (6 + 2 * blocks) * size
        config = BigBirdConfig(
            hidden_size=width,
            num_attention_heads=num_heads,
            block_size=size,
            num_random_blocks=blocks,
            max_position_embeddings=padded_length(length, size, least),
        )
        layer = BigBirdBlockSparseAttention(config, seed=integer("seed", seed, at_least=0))
        super().__init__(width, layer, multiple=size, least=least)

    def train(self, mode: bool = True) -> BigBirdLayer:
        """Set the mode, but for the module of transformers, which would lose its random blocks in evaluation."""
        super().train(mode)
        self.layer.train()  # it has no dropout
        return self

    def _attend(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        real = x.new_ones(x.shape[:2]) if key_mask is None else key_mask.to(x.dtype)
        blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, self.multiple)
        with _numpy_state_kept():
            out: Tensor = self.layer(
                x, band_mask=band, from_mask=rows, to_mask=columns, from_blocked_mask=blocked, to_blocked_mask=blocked
            )[0]
        return out


class LongformerLayer(SparseAttention):
    """Longformer (2004.05150): a token sees window / 2 tokens on each side and the first ones, which see all.

    The first tokens have projections of their own. Padding changes nothing.

    Args:
        window: even; default 512, at most half of the longest sequence.
        num_global: first tokens that see all and are seen by all; transformers' classifier has 1.

    Cost: O(L window).
    """

    def __init__(
        self, width: int, num_heads: int, length: int, *, window: int | None = None, num_global: int = 1
    ) -> None:
        size = positive_int("window", max(2, _fitting(512, length, 2)) if window is None else window)
        if size % 2:
            raise ValueError(f"window must be even, half of it on each side, got {size}; use {size + 1}.")
        config = LongformerConfig(
            hidden_size=width,
            num_attention_heads=num_heads,
            num_hidden_layers=1,
            attention_window=[size],
            attention_probs_dropout_prob=0.0,
        )
        super().__init__(width, LongformerSelfAttention(config, layer_id=0), multiple=size)
        self.num_global = positive_int("num_global", num_global)

    def _attend(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        hidden = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else ~key_mask
        first = (torch.arange(x.shape[1], device=x.device) < self.num_global) & ~hidden
        # Below 0: hidden, 0: seen from nearby, above 0: seen by all.
        kind = x.new_zeros(x.shape[:2]).masked_fill(hidden, -10000.0).masked_fill(first, 10000.0)
        out: Tensor = self.layer(
            x, attention_mask=kind, is_index_masked=hidden, is_index_global_attn=first, is_global_attn=bool(first.any())
        )[0]
        return out


class _LSHSelfAttention(LSHSelfAttention):
    def reset_constants(self) -> None:
        """Set the constants of its masks, which are buffers that are not saved: a loaded model has none of them."""
        for name, value in MASK_VALUES.items():
            init.constant_(getattr(self, name), value)


class ReformerLayer(SparseAttention):
    """Reformer (2001.04451): tokens are sorted by the bucket of a random hash; a chunk sees itself and the one before.

    Queries are the keys, divided by their norm as keys, and a token does not see itself unless it sees nothing else.
    Only its attention is here: reversible layers are of Reformer's whole model, which saves memory by them.

    Hashes are drawn anew in every forward of training, and are always the same ones in evaluation. Sequences of at most
    chunk_length tokens are attended to in full.

    Args:
        chunk_length: default 64, at most a quarter of the longest sequence.
        num_hashes: rounds.
        seed: of the hashes in evaluation.

    Cost: O(num_hashes L (chunk_length + log L)).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        length: int,
        *,
        chunk_length: int | None = None,
        num_hashes: int = 1,
        seed: int = 0,
    ) -> None:
        size = positive_int("chunk_length", _fitting(64, length, 4) if chunk_length is None else chunk_length)
        config = ReformerConfig(
            hidden_size=width,
            num_attention_heads=num_heads,
            attention_head_size=width // num_heads,
            attn_layers=["lsh"],
            lsh_attn_chunk_length=size,
            num_hashes=positive_int("num_hashes", num_hashes),
            max_position_embeddings=padded_length(length, size),
        )
        layer: Any = _LSHSelfAttention(config)  # type: ignore[no-untyped-call]
        with silent_libraries():  # its own rule, of which it would remark that the configuration has no number
            layer._set_num_buckets(padded_length(length, size))
        super().__init__(width, layer, multiple=size)
        self.seed = integer("seed", seed, at_least=0)

    def _attend(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        with _fixed_draws(x, None if self.training else self.seed):
            out: Tensor = self.layer(x, attention_mask=key_mask).hidden_states
        return out


class InformerLayer(SparseAttention):
    """ProbSparse attention of Informer (2012.07436): queries that stand out attend to all keys, others take mean(V).

    A query stands out if its largest logit is far above its mean one; that is judged by keys drawn anew in every
    forward of training, and by the same ones in evaluation. sampling_factor ceil(ln(1 + L)) queries are chosen.

    Padding is hidden from the queries that attend, but transformers has no mask for the choice of queries and for the
    mean: with padding they are another choice and a smaller mean.

    Args:
        sampling_factor: c.
        seed: of the keys in evaluation.

    Cost: O(L^2): transformers (5.23) draws min(c L ln L, L) = L keys where the paper draws c ln L, so that all logits
    are made once.
    """

    def __init__(self, width: int, num_heads: int, length: int, *, sampling_factor: int = 5, seed: int = 0) -> None:
        factor = positive_int("sampling_factor", sampling_factor)
        layer: Any = InformerProbSparseAttention(width, num_heads, sampling_factor=factor)
        layer.out_proj = nn.Identity()  # `out` is in its place, as in all layers here
        super().__init__(width, layer)
        self.seed = integer("seed", seed, at_least=0)

    def _attend(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        mask = None
        if key_mask is not None:
            lowest = torch.finfo(x.dtype).min
            row = x.new_zeros(x.shape[:2]).masked_fill(~key_mask, lowest)
            mask = row[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        with _fixed_draws(x, None if self.training else self.seed):
            out: Tensor = self.layer(x, attention_mask=mask)[0]
        return out


def padded_length(length: int, multiple: int, least: int = 1) -> int:
    """The smallest multiple that holds ``length`` and ``least`` tokens."""
    return -(-max(length, least) // multiple) * multiple


def _fitting(largest: int, length: int, share: int) -> int:
    """The largest power of two up to ``largest`` of which ``share`` fit into the length, but at least 1."""
    return int(min(largest, 1 << max(0, (length // share).bit_length() - 1)))


@contextmanager
def _numpy_state_kept() -> Iterator[None]:
    """Give numpy its random state back: BigBird sets a seed for all of the process."""
    state = np.random.get_state()  # noqa: NPY002  (the global generator is what it seeds)
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


@contextmanager
def _fixed_draws(x: Tensor, seed: int | None) -> Iterator[None]:
    """Draw by a seed, and leave torch's random state as it was; None: draw as training does."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([x.device.index or 0] if x.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
