"""Text from a trained or converted model: streamed, counted, timed, and shown as it is."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli import generate as command
from kernelformer.cli.app import app
from kernelformer.generation import ByteStreamer, Sampled, room, sample_bytes, write_on
from kernelformer.hf import convert, load
from kernelformer.models import MODELS, KernelformerConfig
from tiny_models import VOCABULARY, tiny, word_tokenizer


def small(attention, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MODELS["causal-lm"](KernelformerConfig(attention=attention, **sizes, **more))


BOUNDED = [
    ("elu", {"positions": "learned", "max_position_embeddings": 30}),
    ("nprf:num_features=8:relative=1d", {"max_position_embeddings": 30}),
    ("nprf:num_features=8:relative=1d:max_length=30", {}),
]


@pytest.mark.parametrize(("attention", "settings"), BOUNDED)
def test_a_model_writes_as_far_as_it_has_positions(attention, settings):
    model = small(attention, **settings)
    assert room(model, "abc") == 28
    assert sample_bytes(model, "abc", tokens=28).tokens == 28
    with pytest.raises(ValueError, match=r"for 30 tokens: after a prompt of 3 bytes it can write 28, got tokens=29"):
        sample_bytes(model, "abc", tokens=29)
    assert room(small("elu"), "abc") is None


def test_the_bytes_of_writing_are_those_of_a_cache_that_has_taken_single_tokens():
    model = small("nprf:num_features=8:relative=1d:max_distance=8")
    ids, cache = torch.zeros(1, 20, dtype=torch.long), model.new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        prompt = cache.nbytes
        model(ids[:, :1], past_key_values=cache)
    assert sample_bytes(model, "a" * 20, tokens=12).state_bytes == cache.nbytes > prompt  # windows get room once


def test_sampled_text_is_streamed_and_counted():
    parts = []
    made = sample_bytes(small("elu"), "a", tokens=12, write=parts.append)
    assert made.tokens == 12
    assert made.state_bytes > 0
    assert "".join(parts) == made.text
    assert sample_bytes(small("elu"), "a", tokens=12).text == made.text
    assert sample_bytes(small("elu"), "a", tokens=12, temperature=0).text != made.text
    assert sample_bytes(small("elu", use_cache=False), "a", tokens=5).state_bytes == 0
    with pytest.raises(ValueError, match="at least one character"):
        sample_bytes(small("elu"), "", tokens=3)
    with pytest.raises(ValueError, match="over 256 bytes, this one has 16"):
        sample_bytes(small("elu", vocab_size=16), "a", tokens=3)


def test_a_model_writes_beyond_its_training_length_without_a_reminder(capfd):
    sample_bytes(small("elu", max_position_embeddings=4), "a", tokens=12)
    assert capfd.readouterr() == ("", "")


def test_text_goes_out_with_its_control_characters_visible(monkeypatch, capsys):
    text = ":smile: [bold]x[/]\t\x1b[31m" + 200 * "y" + "\n"

    def fake(model, prompt, write, **settings):
        write(text)
        return Sampled(text, len(text), 1.0, 0)

    monkeypatch.setattr(command, "sample_bytes", fake)
    command.write_sample(None, "a\r", tokens=3)
    out, err = capsys.readouterr()
    assert out == "a<U+000D>" + text.replace("\x1b", "<U+001B>")
    assert "bytes in 1.0 s" in err


def test_a_character_in_two_tokens_is_written_when_it_is_whole():
    parts = []
    streamer = ByteStreamer(parts.append)
    streamer.put(torch.tensor([[97]]))
    for byte in "é!".encode():
        streamer.put(torch.tensor([byte]))
    streamer.put(torch.tensor([0xC3]))
    streamer.end()
    assert "".join(parts) == "é!\N{REPLACEMENT CHARACTER}"


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
