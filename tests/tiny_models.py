"""Small random models of transformers, whose attention is far from uniform, their tokenizer and texts."""

from __future__ import annotations

import json
import string

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DIGITS = [*map(str, range(10)), *(f"##{i}" for i in range(10))]
WORDS = [f"word{i}" for i in range(30)]
VOCABULARY = [*SPECIAL, "the", "pass", "key", "is", ".", *DIGITS, *WORDS, "##s"]
VOCAB, WIDTH, HEADS = len(VOCABULARY), 32, 4
_COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_BERT = {**_COMMON, "intermediate_size": 40, "max_position_embeddings": 64, "type_vocab_size": 2}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": HEADS,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 40}
_BART = {"d_model": WIDTH, **{f"{x}_{y}": n for x in ("encoder", "decoder") for y, n in _SIZES.items()}}
# Architecture: its configuration's class, and settings.
KINDS = {
    "BertModel": ("BertConfig", _BERT),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "BertForSequenceClassification": ("BertConfig", {**_BERT, "num_labels": 3}),
    "BertLMHeadModel": ("BertConfig", {**_BERT, "is_decoder": True, "add_cross_attention": True, **_IDS}),
    "RobertaModel": ("RobertaConfig", {**_BERT, **_IDS}),
    "AlbertModel": ("AlbertConfig", {**_BERT, "embedding_size": 16}),
    "MPNetModel": ("MPNetConfig", {**_BERT, **_IDS}),
    "DistilBertModel": ("DistilBertConfig", {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": 2, "n_heads": HEADS,
                                             "hidden_dim": 40, "max_position_embeddings": 64}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
                                       "n_positions": 64, "scale_attn_by_inverse_layer_idx": True, **_IDS}),
    "LlamaForCausalLM": ("LlamaConfig", {**_COMMON, "intermediate_size": 40, "num_key_value_heads": 2,
                                         "max_position_embeddings": 64, **_IDS}),
    "T5ForConditionalGeneration": ("T5Config", _T5),
    "T5EncoderModel": ("T5Config", _T5),
    "UMT5ForConditionalGeneration": ("UMT5Config", _T5),
    "BartForConditionalGeneration": ("BartConfig", {"vocab_size": VOCAB, "max_position_embeddings": 64, **_IDS,
                                                    "decoder_start_token_id": 2, "forced_eos_token_id": None, **_BART}),
    "ViTModel": ("ViTConfig", {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                               "intermediate_size": 40, "image_size": 16, "patch_size": 4}),
}  # fmt: skip
# Settings of a model of the library, of any kind.
SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_labels": 3,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "image_size": [8, 12],
    "num_channels": 1,
}
ENCODERS = ["BertModel", "BertForMaskedLM", "RobertaModel", "AlbertModel", "MPNetModel", "DistilBertModel",
            "T5EncoderModel"]  # fmt: skip
DECODERS = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel"]
PAIRS = ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "BartForConditionalGeneration"]


def tiny(kind, dtype=torch.float64, config=None, size=1.5, **settings):
    """A random model in evaluation mode; weights are made larger, so that some tokens count more than others."""
    name, defaults = KINDS[kind]
    if config is None:
        config = getattr(transformers, name)(**{**defaults, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).to(dtype).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() > 1:
                x.normal_(std=1.0 if "relative_attention_bias" in name else size * WIDTH**-0.5)
    return model


def word_tokenizer(words=VOCABULARY):
    return transformers.BertTokenizer(vocab={x: i for i, x in enumerate(words)})


def save_tiny(folder, kind, **settings):
    """Write a model in single precision and its tokenizer."""
    word_tokenizer().save_pretrained(folder)
    tiny(kind, torch.float32, **settings).save_pretrained(folder)
    return folder


def write_sentences(path, lengths):
    """Write random words, a row of each length."""
    gen = torch.Generator().manual_seed(0)
    rows = [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=gen)) for n in lengths]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def tokens(count=2, length=11, seed=1):
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def letters(size=VOCAB):
    """A tokenizer with a character a token."""
    ids = {x: i for i, x in enumerate((string.ascii_letters + string.digits)[:size])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_end(text, word, start):
    """Place after the first of these words that ends behind a place."""
    return next(i for i in range(start + 1, len(text) + 1) if text[:i].endswith(word))


def padded(ids, keep, side="right"):
    """Ids and attention mask of a batch whose i-th row is cut to keep[i] tokens and padded on one side."""
    out, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, n in enumerate(keep):
        place = slice(0, n) if side == "right" else slice(ids.shape[1] - n, None)
        out[i, place], mask[i, place] = ids[i, :n], 1
    return out, mask


def inputs(model, ids=None, mask=None):
    """Arguments of a model for these tokens."""
    ids = tokens() if ids is None else ids
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3)).to(model.dtype)}
    given = {"input_ids": ids}
    if mask is not None:
        given["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens(ids.shape[0], 7, seed=2)
    elif getattr(model.config, "add_cross_attention", False):
        width = model.config.hidden_size
        context = torch.randn(ids.shape[0], 9, width, generator=torch.Generator().manual_seed(4))
        given["encoder_hidden_states"] = context.to(model.dtype)
        given["encoder_attention_mask"] = torch.ones(ids.shape[0], 9, dtype=torch.long)
        given["encoder_attention_mask"][0, 6:] = 0
    return given


@torch.no_grad()
def outputs(model, **given):
    """Logits or hidden states."""
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state


def distance(a, b):
    return float((a - b).norm() / b.norm())
