"""Text from a converted decoder."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.generation import write_on
from kernelformer.hf import convert, load

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30))]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 64,
}


def decoder(folder, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, eos_token_id=3, pad_token_id=0)).eval()
    convert(model, "favor+", num_features=16, **options).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


def test_the_text_is_that_of_generate_and_the_cache_stays_at_one_size(tmp_path):
    folder = decoder(tmp_path / "x")
    found = write_on(folder, "w1 w2 w3", tokens=20, temperature=0)
    assert found.tokens == 20
    assert found.constant
    assert list(found.cache) == list(range(found.prompt, found.prompt + 20))
    model = load(folder)
    ids = torch.tensor([[2, 6, 7, 8, 3]]) if found.prompt == 5 else torch.tensor([[6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, use_cache=False)
    words = [VOCABULARY[i] for i in plain[0, ids.shape[1] :]]
    assert found.text.split() == [x for x in words if not x.startswith("[")]


def test_layers_that_keep_every_key_are_told_of(tmp_path):
    folder = decoder(tmp_path / "x", layers=[0])
    assert not write_on(folder, "w1", tokens=5).constant
    result = CliRunner().invoke(app, ["continue", str(folder), "--prompt", "w1 w2", "--tokens", "5", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "exact attention keeps every key" in result.output


def test_drawing_follows_the_seed(tmp_path):
    folder = decoder(tmp_path / "x")
    first, same, other = (write_on(folder, "w1", tokens=12, temperature=2.0, seed=x).text for x in (1, 1, 2))
    assert first == same != other


def test_what_cannot_write_is_refused(tmp_path):
    torch.manual_seed(0)
    convert(BertModel(BertConfig(**SMALL)).eval(), "elu").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="does not go on with a text"):
        write_on(tmp_path / "bert", "w1", tokens=3)
    folder = decoder(tmp_path / "x")
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        write_on(folder, "w1", tokens=3)
