"""Encoders of real-valued sequences: sensors, audio, genomes as signals."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from kernelformer.errors import shape
from kernelformer.models.base import KernelformerPreTrainedModel, mean_loss, refuse_unknown
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.embeddings import embedding_scale
from kernelformer.models.encoder import Head, KernelformerModel, Pooler


class KernelformerForSeries(KernelformerPreTrainedModel):
    """Values of several channels through an encoder: (B, L, channels) -> logits (B, classes), or a number (B, 1).

        x_i = W value_i + b + position_i        one vector for each moment, in place of a token's

    Values should be about 0 in the mean and 1 in size, as the task ``series`` makes them. ``num_labels=1`` is a
    regression.
    """

    main_input_name = "values"
    family = "series"

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.num_channels, config.hidden_size)
        self.scale = 1 / embedding_scale(config)  # embeddings are multiplied by it
        self.model = KernelformerModel(config, first_token=config.pooling == "cls", tokens=False)
        self.pooler = Pooler(config.pooling)
        self.head = Head(config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify series, (B, L, channels) -> logits (B, classes).

        Args:
            values: (B, L, channels) of floating point.
            attention_mask: (B, L), 1 = real; what stands elsewhere is not read, NaN included.
            labels: (B), for the mean cross-entropy, or the squared error of numbers.
            position_ids: (B, L); default 0 to L - 1.
            kwargs: of other Hugging Face models, None or False.
        """
        refuse_unknown(self, kwargs)
        channels = self.config.num_channels
        if values is None or values.dim() != 3 or values.shape[-1] != channels or not values.is_floating_point():
            given = None if values is None else f"{shape(values)} in {values.dtype}"
            raise ValueError(f"values must be (batch, length, channels) = (B, L, {channels}) numbers, got {given}.")
        if attention_mask is not None and attention_mask.shape == values.shape[:2]:
            values = values.masked_fill(attention_mask.unsqueeze(-1) == 0, 0)  # a NaN there would reach gradients
        x = self.project(values.to(self.project.weight.dtype)) * self.scale
        hidden = self.model(None, attention_mask, x, position_ids).last_hidden_state
        logits = self.head(self.pooler(hidden, attention_mask))
        loss: Any = None if labels is None else mean_loss(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
