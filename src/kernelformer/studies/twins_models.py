"""Models of plain PyTorch, of the same size as ours: what a user would write by hand, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from kernelformer.models import KernelformerConfig


class PlainTwin(nn.Module):
    """`torch.nn.TransformerEncoder` between an embedding and one linear layer, with PyTorch's own first weights.

    Positions are learned, from a standard deviation of 0.02, as vision transformers and GPT-2 have them. A classifier
    takes the mean of the real tokens; a language model is causal, and its last layer is tied to the tokens.

    Args:
        config: of our model, for the sizes.
        kind: of our model: "image", "classifier" or "causal-lm".
    """

    def __init__(self, config: KernelformerConfig, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, config.hidden_size
        if kind == "image":
            rows, columns = config.image_size or (0, 0)
            size = config.patch_size
            self.embed: nn.Module = nn.Conv2d(config.num_channels, width, size, stride=size)
            length = (rows // size) * (columns // size)
        else:
            self.embed = nn.Embedding(config.vocab_size, width)
            length = config.max_position_embeddings
        self.places = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, config.num_attention_heads, config.feed_forward, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(
            layer, config.num_hidden_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, config.vocab_size if kind == "causal-lm" else int(config.num_labels or 0))
        if kind == "causal-lm":
            nn.init.normal_(self.embed.weight, std=width**-0.5)  # a tied table has to serve as the last layer too
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """Predict, and give the mean cross-entropy; the arguments are those of our models."""
        x = self.embed(pixel_values).flatten(2).transpose(1, 2) if input_ids is None else self.embed(input_ids)
        x = x + self.places[:, : x.shape[1]]
        hidden = None if attention_mask is None else attention_mask == 0
        options: dict[str, Any] = {}
        if self.kind == "causal-lm":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
            options = {"mask": mask, "is_causal": True}
        x = self.stack(x, src_key_padding_mask=hidden, **options)
        if self.kind != "causal-lm":
            real = x.new_ones(x.shape[:2]) if hidden is None else (~hidden).to(x.dtype)
            x = (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
        logits = self.head(x)
        if labels is None:
            return ModelOutput(logits=logits)
        wanted, given = (labels[:, 1:], logits[:, :-1]) if self.kind == "causal-lm" else (labels, logits)
        return ModelOutput(loss=nn.functional.cross_entropy(given.flatten(0, -2), wanted.flatten()), logits=logits)


@torch.no_grad()
def torch_weights(model: nn.Module) -> None:
    """Give linear layers and convolutions the first weights that PyTorch has: uniform, of variance 1 / (3 inputs)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module is not getattr(
            model, "lm_head", None
        ):  # tied to tokens
            module.reset_parameters()
