"""Encoders: the bare model, classification of sequences, pairs, series and images, masked language modelling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from kernelformer.errors import shape
from kernelformer.models.base import FirstToken, KernelformerPreTrainedModel, mean_loss, refuse_unknown
from kernelformer.models.blocks import Stack, last_segments, visible
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.embeddings import Embeddings, embedding_scale, position_table
from kernelformer.modules.context import active_ranks, agreeing, needs_whole, tokens_before
from kernelformer.modules.packed import segment_positions
from kernelformer.modules.spec import has_positions
from kernelformer.parallel.context import IGNORED


def choose_positions(config: KernelformerConfig, specs: list[str], own: str = "sinusoidal") -> str:
    """Resolve ``auto`` positions: none where every block has relative or rotary positions, else the model's own."""
    if config.positions != "auto":
        return config.positions
    return "none" if all(has_positions(x) for x in specs) else own


def check_tokens(tokens: Tensor | None, vectors: Tensor | None, vocab_size: int) -> Tensor:
    """Check tokens (B, L) against the vocabulary, or take vectors (B, L, d); returns whichever is given."""
    if (tokens is None) == (vectors is None):
        raise ValueError("give either input_ids or inputs_embeds, got both or neither.")
    if vectors is not None:
        return vectors
    assert tokens is not None
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(f"input_ids must be (batch, tokens) integers, got {shape(tokens)} in {tokens.dtype}.")
    if not torch.compiler.is_compiling() and not tokens.is_meta and tokens.numel():
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"input_ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}.")
    return tokens


class KernelformerModel(KernelformerPreTrainedModel):
    """The encoder: tokens (B, L) -> vectors (B, L, d).

    Args:
        config: of the model.
        first_token: whether a learned vector goes in front of every sequence; its output comes first.
        tokens: False where ``inputs_embeds`` are always given: there is no table of tokens then.
    """

    def __init__(self, config: KernelformerConfig, first_token: bool = False, tokens: bool = True) -> None:
        super().__init__(config)
        specs = config.encoder_specs
        self.embeddings = Embeddings(config, choose_positions(config, specs), tokens)
        self.first = FirstToken(config.hidden_size) if first_token else None
        self.stack = Stack(
            config, specs, causal=False, length=config.max_position_embeddings, num_prefix=int(first_token)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode tokens, (B, L) -> last_hidden_state (B, L, d).

        Args:
            input_ids: (B, L) tokens.
            attention_mask: (B, L), 1 = real.
            inputs_embeds: (B, L, d), in place of embeddings of tokens, and multiplied by ``embedding_scale`` too.
            position_ids: (B, L); default 0 to L - 1, or from 0 in each segment.
            segment_ids: (B, L) integers that do not decrease along a row: packed sequences, each of which is alone.
            kwargs: of other Hugging Face models, None or False.
        """
        refuse_unknown(self, kwargs)
        with agreeing():
            given = check_tokens(input_ids, inputs_embeds, self.config.vocab_size)
            key_mask, segments = visible(attention_mask, given.shape[1]), last_segments(segment_ids, given.shape[1])
            if position_ids is None and segments is not None:
                position_ids = segment_positions(segments)
            elif position_ids is None:
                start = tokens_before(given.shape[1])
                position_ids = torch.arange(start, start + given.shape[1], device=given.device).unsqueeze(0)
            x = self.embeddings(input_ids, position_ids, inputs_embeds)
        if self.first is not None:
            if segments is not None:
                raise ValueError("a first token stands for a whole row, got segment_ids; use pooling='mean'.")
            x, key_mask = self.first(x, key_mask)
            added = x.shape[1] - position_ids.shape[1]  # it stands at 0, before all others
            position_ids = nn.functional.pad(position_ids + 1, (added, 0))
        tokens = {"key_mask": key_mask, "segment_ids": segments, "position_ids": position_ids}
        return BaseModelOutput(last_hidden_state=self.stack(x, **tokens))


class Pooler(nn.Module):
    """One vector per sequence: the first token's, or the mean of the real ones; (B, L, d) -> (B, d)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Pool (B, L, d) -> (B, d); the mask (B, L) says which tokens of all ranks a mean is over."""
        ranks = active_ranks()
        first = x[:, 0] if ranks is None else x[:, :1].sum(1)  # zeros of a rank without tokens
        if self.kind == "cls":
            return first if ranks is None else ranks.gather([first], torch.is_grad_enabled())[0][0]
        if ranks is None and attention_mask is None:
            return x.mean(1)
        weight = x.new_ones(*x.shape[:2], 1) if attention_mask is None else attention_mask.to(x.dtype).unsqueeze(-1)
        total, count = (x * weight).sum(1), weight.sum(1)
        if ranks is not None:
            total, count = (y.sum(0) for y in ranks.gather([total, count], torch.is_grad_enabled()))
        return total / count.clamp_min(1)


class Head(nn.Sequential):
    """Two layers from a pooled vector to classes."""

    def __init__(self, inputs: int, config: KernelformerConfig) -> None:
        width = config.classifier_size or config.hidden_size
        super().__init__(
            nn.Linear(inputs, width),
            ACT2FN[config.classifier_act],
            nn.Dropout(config.dropout),
            nn.Linear(width, int(config.num_labels or 0)),
        )


class KernelformerForSequenceClassification(KernelformerPreTrainedModel):
    """Encoder, pooling and two layers: tokens (B, L) -> logits (B, classes)."""

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        self.model = KernelformerModel(config, first_token=config.pooling == "cls")
        self.pooler = Pooler(config.pooling)
        self.head = Head(config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify sequences, (B, L) -> logits (B, classes).

        Labels (B) give the mean cross-entropy; the other arguments are those of `KernelformerModel`.
        """
        refuse_unknown(self, kwargs)
        hidden = self.model(input_ids, attention_mask, inputs_embeds, position_ids).last_hidden_state
        logits = self.head(self.pooler(hidden, attention_mask))
        loss: Any = None if labels is None else mean_loss(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class KernelformerForMatching(KernelformerPreTrainedModel):
    """Dual encoder for pairs of documents, as Long Range Arena matches them.

    head([a, b, a * b, a - b])          a, b: the pooled documents, by one encoder
    """

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        self.model = KernelformerModel(config, first_token=config.pooling == "cls")
        self.pooler = Pooler(config.pooling)
        self.head = Head(4 * config.hidden_size, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        other_input_ids: Tensor | None = None,
        other_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify pairs, (B, L) and (B, L') -> logits (B, classes).

        Args:
            input_ids: (B, L), the first documents.
            attention_mask: (B, L), 1 = real.
            other_input_ids: (B, L'), the second documents.
            other_attention_mask: (B, L').
            labels: (B), for the mean cross-entropy.
            kwargs: of other Hugging Face models, None or False.
        """
        refuse_unknown(self, kwargs)
        if input_ids is None or other_input_ids is None:
            raise ValueError("a pair needs input_ids and other_input_ids, got only one of them or none.")
        pairs = ((input_ids, attention_mask), (other_input_ids, other_attention_mask))
        a, b = (self.pooler(self.model(ids, mask).last_hidden_state, mask) for ids, mask in pairs)
        logits = self.head(torch.cat([a, b, a * b, a - b], -1))
        loss: Any = None if labels is None else mean_loss(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class KernelformerForMaskedLM(KernelformerPreTrainedModel):
    """Encoder and a prediction for every token: (B, L) -> (B, L, vocabulary)."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.tokens.weight"}  # noqa: RUF012  (transformers' own name)

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        self.model = KernelformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Predict the token at each position, (B, L) -> logits (B, L, vocabulary).

        Labels (B, L), -100 where nothing was hidden, give the mean cross-entropy; the other arguments are those of
        `KernelformerModel`. With ``sparse_prediction`` the logits of a training step are those of the labels alone,
        (N, vocabulary).
        """
        refuse_unknown(self, kwargs)
        hidden = self.model(input_ids, attention_mask, inputs_embeds, position_ids, segment_ids).last_hidden_state
        if self.training and labels is not None and self.config.sparse_prediction:
            chosen = labels != IGNORED
            hidden, labels = hidden[chosen], labels[chosen]
        logits = self.lm_head(hidden)
        loss: Any = None if labels is None else mean_loss(logits, labels, num_items_in_batch, per_token=True)
        return MaskedLMOutput(loss=loss, logits=logits)


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
