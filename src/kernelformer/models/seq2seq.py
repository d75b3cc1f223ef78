"""Encoder-decoder models, such as for translation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from kernelformer.cache import StateCache
from kernelformer.models.base import KernelformerPreTrainedModel, mean_loss, refuse_unknown
from kernelformer.models.blocks import Stack, visible
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.decoder import token_positions
from kernelformer.models.embeddings import Embeddings
from kernelformer.models.encoder import KernelformerModel, check_tokens, choose_positions
from kernelformer.modules.context import needs_whole


class KernelformerForConditionalGeneration(KernelformerPreTrainedModel, GenerationMixin):  # type: ignore[misc]  # another cache
    """Encoder-decoder with one table of tokens: (B, S) and (B, L) -> logits (B, L, vocabulary).

    Cross-attention with a feature map reads the encoder's output once into sums of constant size, so that a generated
    token costs the same whatever the source's length.
    """

    _tied_weights_keys = {  # noqa: RUF012  (transformers' own name)
        "lm_head.weight": "encoder.embeddings.tokens.weight",
        "embeddings.tokens.weight": "encoder.embeddings.tokens.weight",
    }

    family = "encoder-decoder"

    def __init__(self, config: KernelformerConfig) -> None:
        config = deepcopy(config)
        config.is_encoder_decoder = True
        super().__init__(config)
        specs = config.decoder_specs
        self.encoder = KernelformerModel(config)
        self.embeddings = Embeddings(config, choose_positions(config, specs))
        self.stack = Stack(
            config, specs, causal=True, length=config.max_position_embeddings, cross=config.cross_specs, part=1
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_encoder(self, *args: Any, **kwargs: Any) -> KernelformerModel:
        """The encoder, as `generate` asks for it."""
        return self.encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set another table of tokens."""
        self.encoder.embeddings.tokens = value
        self.embeddings.tokens = value

    def new_cache(self) -> StateCache:
        """Make an empty cache."""
        return StateCache(self.config.decoder_layers)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels one position to the right, after the start token; -100 becomes padding."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"labels need decoder_start_token_id and pad_token_id in the configuration, got {start} and {pad}."
            )
        first = labels.new_full((labels.shape[0], 1), start)
        return torch.cat([first, labels[:, :-1]], 1).masked_fill_(torch.cat([first, labels[:, :-1]], 1) == -100, pad)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Predict the target from the source, (B, S) and (B, L) -> logits (B, L, vocabulary).

        Args:
            input_ids: (B, S) of the source.
            attention_mask: (B, S), 1 = real.
            decoder_input_ids: (B, L), the target so far; default: the labels one position to the right.
            decoder_attention_mask: (B, past + L).
            encoder_outputs: of the encoder, so that it does not run again.
            past_key_values: states of the tokens before, and of the source; it is changed.
            labels: (B, L), what is wanted at each position, -100 = not counted.
            use_cache: whether to return states; default: if a cache is given.
            num_items_in_batch: labels that the loss is a mean over; default those of this call.
            kwargs: of other Hugging Face models, None or False.
        """
        refuse_unknown(self, kwargs)
        needs_whole("a model of pairs of sequences", "split those of a language model or an encoder")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        hidden: Any = encoder_outputs[0]
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        tokens = check_tokens(decoder_input_ids, None, self.config.vocab_size)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = self.new_cache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        key_mask = visible(decoder_attention_mask, tokens.shape[1], past, "decoder_attention_mask")
        position_ids = token_positions(decoder_attention_mask, tokens.shape[1], past, tokens.device)
        x = self.embeddings(tokens, position_ids)
        x = self.stack(
            x,
            hidden,
            key_mask=key_mask,
            context_mask=visible(attention_mask, hidden.shape[1]),
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        logits = self.lm_head(x)
        loss: Any = None if labels is None else mean_loss(logits, labels, num_items_in_batch)
        kept: Any = past_key_values  # transformers' type says EncoderDecoderCache
        return Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=kept, encoder_last_hidden_state=hidden)
