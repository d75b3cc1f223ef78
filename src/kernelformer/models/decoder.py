"""Decoders: causal language models, over tokens and over pixels, and encoder-decoders such as for translation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from kernelformer.cache import StateCache
from kernelformer.models.base import KernelformerPreTrainedModel, mean_loss, refuse_unknown
from kernelformer.models.blocks import Stack, last_segments, visible
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.embeddings import Embeddings
from kernelformer.models.encoder import KernelformerModel, check_tokens, choose_positions
from kernelformer.modules import RelativePositions
from kernelformer.modules.context import agreeing, needs_whole, next_column, real_before, tokens_before
from kernelformer.modules.packed import segment_positions


def token_positions(
    attention_mask: Tensor | None, tokens: int, past: int, device: torch.device, segment_ids: Tensor | None = None
) -> Tensor:
    """Positions (B or 1, L) of the last tokens, counted over real ones, so that padding on the left moves nothing.

    With segments, (B, past + L), each one has positions from 0. Tokens on ranks before this one count.
    """
    if segment_ids is not None:
        return segment_positions(segment_ids, attention_mask)[:, past:]
    if attention_mask is None:
        past += tokens_before(tokens)
        return torch.arange(past, past + tokens, device=device).unsqueeze(0)
    return (real_before(attention_mask) + attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, past:]


class KernelformerForCausalLM(KernelformerPreTrainedModel, GenerationMixin):  # type: ignore[misc]  # another cache
    """Decoder: tokens (B, L) -> logits of the next ones (B, L, vocabulary).

    `generate` keeps one state per block: of constant size with a feature map; `softmax`, `gaussian` and tables of
    relative positions without ``max_distance`` keep every key.
    """

    _tied_weights_keys = {"lm_head.weight": "embeddings.tokens.weight"}  # noqa: RUF012  (transformers' own name)
    family = "decoder"

    def __init__(self, config: KernelformerConfig) -> None:
        super().__init__(config)
        specs = config.encoder_specs
        self.embeddings = Embeddings(config, choose_positions(config, specs))
        self.stack = Stack(config, specs, causal=True, length=self._length())
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _length(self) -> int:
        """The longest sequence that tables are made for."""
        return self.embeddings.longest or self.config.max_position_embeddings

    @property
    def longest(self) -> int | None:
        """Tokens that it has positions for, absolute and relative ones; None where there is no end."""
        tables = [x.max_length for x in self.modules() if isinstance(x, RelativePositions)]
        return min((x for x in (self.embeddings.longest, *tables) if x is not None), default=None)

    def new_cache(self) -> StateCache:
        """Make an empty cache."""
        return StateCache(self.config.num_hidden_layers)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position, (B, L) -> logits (B, L, vocabulary).

        Args:
            input_ids: (B, L) tokens; with a cache those after the ones that it has seen.
            attention_mask: (B, past + L), 1 = real; padding stands on the left where tokens are generated.
            position_ids: (B, L); default: counted over the real tokens, from 0 in each segment.
            past_key_values: states of the tokens before, see `new_cache`; it is changed.
            inputs_embeds: (B, L, d), in place of embeddings of tokens, and multiplied by ``embedding_scale`` too.
            labels: (B, L), the tokens themselves, -100 = not counted: token i + 1 is what is wanted after token i.
            use_cache: whether to return states; default: if a cache is given.
            logits_to_keep: how many of the last positions to predict at, or which; 0 = all.
            num_items_in_batch: labels that the loss is a mean over; default those of this call.
            segment_ids: (B, past + L) integers that do not decrease along a row: packed sequences, each of which is
                alone; the first token of a segment is no label.
            kwargs: of other Hugging Face models, None or False.
        """
        refuse_unknown(self, kwargs)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = self.new_cache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        with agreeing():
            given = check_tokens(input_ids, inputs_embeds, self.config.vocab_size)
            key_mask = visible(attention_mask, given.shape[1], past)
            segments = last_segments(segment_ids, given.shape[1], past)
            if position_ids is None:
                position_ids = token_positions(attention_mask, given.shape[1], past, given.device, segment_ids)
            x = self.embeddings(input_ids, position_ids, inputs_embeds)
        given_tokens = {"key_mask": key_mask, "segment_ids": segments, "position_ids": position_ids}
        x = self.stack(x, past_key_values=past_key_values, **given_tokens)
        if isinstance(logits_to_keep, Tensor):
            x = x[:, logits_to_keep]
        elif logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.lm_head(x)
        loss: Any = None
        if labels is not None:
            if logits.shape[1] != labels.shape[1]:
                raise ValueError(
                    f"a loss needs a prediction for each label, got {logits.shape[1]} and {labels.shape[1]}; leave "
                    f"logits_to_keep out."
                )
            wanted = torch.cat([labels[:, 1:], next_column(labels, -100)], 1)[:, : labels.shape[1]]
            if segments is not None:  # the last token of a sequence says nothing of the next one
                after = torch.cat([segments[:, 1:], next_column(segments, -1)], 1)[:, : labels.shape[1]]
                wanted = wanted.masked_fill(after != segments, -100)
            loss = mean_loss(logits, wanted, num_items_in_batch, per_token=True)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


class KernelformerForPixels(KernelformerForCausalLM):
    """Causal model of images as sequences of intensities, row by row, channels innermost.

    Positions are learned rows, columns and channels; the tokens of an image are its values from 0 to 255. Bits per
    dimension are the loss / ln 2; the first value of an image is given, not predicted.
    """

    def __init__(self, config: KernelformerConfig) -> None:
        config = deepcopy(config)
        config.positions = choose_positions(config, config.encoder_specs, "image")  # saved with the model
        super().__init__(config)


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
