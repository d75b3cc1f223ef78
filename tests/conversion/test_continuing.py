"""Text from a converted decoder."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.generation import write_on
from kernelformer.hf import convert, load
from tiny_models import VOCABULARY, tiny, word_tokenizer


def decoder(folder, **options):
    model = tiny("LlamaForCausalLM", torch.float32, num_key_value_heads=1, eos_token_id=3)
    convert(model, "favor+", num_features=16, **options).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


def test_the_text_is_that_of_generate_and_the_cache_stays_at_one_size(tmp_path):
    folder = decoder(tmp_path / "x")
    found = write_on(folder, "word1 word2 word3", tokens=20, temperature=0)
    assert found.tokens == 20
    assert found.constant
    assert list(found.cache) == list(range(found.prompt, found.prompt + 20))
    model, words = load(folder), [VOCABULARY.index(f"word{i}") for i in (1, 2, 3)]
    ids = torch.tensor([[2, *words, 3] if found.prompt == 5 else words])
    plain = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, use_cache=False)
    said = word_tokenizer().decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert found.text.split() == said.split()


def test_layers_that_keep_every_key_are_told_of(tmp_path):
    folder = decoder(tmp_path / "x", layers=[0])
    assert not write_on(folder, "word1", tokens=5).constant
    words = ["--prompt", "word1 word2", "--tokens", "5", "--threads", "1"]
    result = CliRunner().invoke(app, ["continue", str(folder), *words])
    assert result.exit_code == 0, result.output
    assert "exact attention keeps every key" in result.output


def test_drawing_follows_the_seed(tmp_path):
    folder = decoder(tmp_path / "x")
    first, same, other = (write_on(folder, "word1", tokens=12, temperature=2.0, seed=x).text for x in (1, 1, 2))
    assert first == same != other


def test_what_cannot_write_is_refused(tmp_path):
    convert(tiny("BertModel", torch.float32), "elu").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="does not go on with a text"):
        write_on(tmp_path / "bert", "word1", tokens=3)
    folder = decoder(tmp_path / "x")
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        write_on(folder, "word1", tokens=3)
