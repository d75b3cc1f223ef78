"""Embeddings of tokens and of their positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernelformer.models.config import KernelformerConfig


def sinusoids(position: Tensor, width: int) -> Tensor:
    """Sinusoidal positions ``sin(p / 10000^(2i/d)), cos(p / 10000^(2i/d))``: (...) -> (..., width)."""
    half = (width + 1) // 2
    rate = torch.exp(torch.arange(half, device=position.device) * (-math.log(10000.0) / half))
    angle = position.unsqueeze(-1) * rate
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :width]


def position_table(count: int, config: KernelformerConfig) -> nn.Embedding:
    """A table of so many learned positions, whose first values are those of ``config.position_range``."""
    table = nn.Embedding(count, config.hidden_size)
    table.of_positions = True  # type: ignore[assignment]  # for the first weights
    return table


def embedding_scale(config: KernelformerConfig) -> float:
    """Factor of the embeddings."""
    return config.hidden_size**0.5 if config.embedding_scale is None else config.embedding_scale


class Embeddings(nn.Module):
    """Token vectors plus position vectors.

        x_i = s (token_i + position_i)       learned
        x_i = s token_i + sinusoid_i         sinusoidal

    with s = sqrt(d), or ``config.embedding_scale``.

    Args:
        tokens: False where vectors are always given instead: there is no table of tokens then.
    """

    def __init__(self, config: KernelformerConfig, positions: str, tokens: bool = True) -> None:
        super().__init__()
        self.positions = positions
        self.tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size) if tokens else nn.Identity()
        self.scale = embedding_scale(config)
        self.places = nn.ModuleList()
        self.sizes = [config.max_position_embeddings]
        if positions == "image":
            if config.image_size is None:
                raise ValueError("positions='image' needs image_size=(rows, columns), got None.")
            self.sizes = [*config.image_size, config.num_channels]
        if positions in ("learned", "image"):
            self.places.extend(position_table(n, config) for n in self.sizes)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def longest(self) -> int | None:
        """Tokens that there are positions for; None where there is no end."""
        return math.prod(self.sizes) if len(self.places) else None

    def forward(self, tokens: Tensor | None, position: Tensor, vectors: Tensor | None = None) -> Tensor:
        """Embed (B, L) tokens, or (B, L, d) vectors given instead, at positions (B or 1, L) -> (B, L, d)."""
        x = self.tokens(tokens) if vectors is None else vectors
        if self.longest is not None and not torch.compiler.is_exporting():
            last = int(position.max()) if position.numel() else -1
            if last >= self.longest:
                raise ValueError(
                    f"this model has {self.longest} {self.positions} positions, got a sequence of {last + 1} tokens; "
                    f"shorten it, or build the model with a larger max_position_embeddings or other positions."
                )
        if self.longest is not None:
            for table, index in zip(self.places, self._indices(position), strict=True):
                x = x + table(index)
        x = x * self.scale
        if self.positions == "sinusoidal":
            x = x + sinusoids(position, x.shape[-1]).to(x.dtype)
        y: Tensor = self.dropout(x)
        return y

    def _indices(self, position: Tensor) -> list[Tensor]:
        """Row, column and channel of pixels that come row by row, or the position itself."""
        if len(self.sizes) == 1:
            return [position]
        _, columns, channels = self.sizes
        return [position // (columns * channels), position // channels % columns, position % channels]
