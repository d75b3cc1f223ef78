"""Vision transformers: images by their patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from kernelformer.errors import shape
from kernelformer.models.base import FirstToken, KernelformerPreTrainedModel, mean_loss, refuse_unknown
from kernelformer.models.blocks import Stack
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.embeddings import position_table
from kernelformer.models.encoder import Head, Pooler, choose_positions
from kernelformer.modules.context import needs_whole


class KernelformerForImageClassification(KernelformerPreTrainedModel):
    """Patches of an image through an encoder: (B, channels, rows, columns) -> logits (B, classes).

    ``relative=2d`` in an attention spec gives it a bias over row and column differences of patches, and none to or from
    the first token of ``pooling="cls"``.
    """

    main_input_name = "pixel_values"
    input_modalities = "image"

    family = "image"

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        if config.image_size is None:
            raise ValueError("an image model needs image_size=(rows, columns), got None.")
        rows, columns = config.image_size
        size = config.patch_size
        if rows % size or columns % size:
            raise ValueError(f"image_size must be a multiple of patch_size, got {rows} x {columns} and {size}.")
        grid, specs = (rows // size, columns // size), config.encoder_specs
        positions = choose_positions(config, specs, "learned")
        if positions not in ("learned", "none"):
            raise ValueError(f"an image model has learned positions or none, got positions={positions!r}.")
        self.patches = nn.Conv2d(config.num_channels, config.hidden_size, size, stride=size)
        self.places = position_table(grid[0] * grid[1], config) if positions == "learned" else None
        first = config.pooling == "cls"
        self.tokens_per_image = grid[0] * grid[1] + int(first)
        self.first = FirstToken(config.hidden_size) if first else None
        self.dropout = nn.Dropout(config.dropout)
        self.stack = Stack(config, specs, causal=False, length=grid[0] * grid[1], grid=grid, num_prefix=int(first))
        self.pooler = Pooler(config.pooling)
        self.head = Head(config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Classify images (B, channels, rows, columns); labels (B) give the mean cross-entropy."""
        refuse_unknown(self, kwargs)
        needs_whole("an image", "give every process images of its own")
        expected = (self.config.num_channels, *(self.config.image_size or ()))
        if pixel_values is None or tuple(pixel_values.shape[1:]) != expected:
            given = None if pixel_values is None else shape(pixel_values)
            raise ValueError(f"pixel_values must be (batch, channels, rows, columns) = (B, {expected}), got {given}.")
        x = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        if self.places is not None:
            x = x + self.places(torch.arange(x.shape[1], device=x.device))
        if self.first is not None:
            x, _ = self.first(x, None)
        logits = self.head(self.pooler(self.stack(self.dropout(x)), None))
        loss: Any = None if labels is None else mean_loss(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)
