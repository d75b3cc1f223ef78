"""Report of a conversion: perplexities, texts that were used, an exact copy; and what it takes along."""

from __future__ import annotations

import copy
import importlib.util
import json
from itertools import islice

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.conversion import convert as converting  # noqa: E402
from kernelformer.conversion.measure import measure  # noqa: E402
from kernelformer.conversion.settings import ConvertSettings as Setting  # noqa: E402
from kernelformer.conversion.texts import TextRows, TextsUsed  # noqa: E402
from kernelformer.hf import convert, load  # noqa: E402
from kernelformer.hf.load import load_source  # noqa: E402
from tiny_models import inputs, padded, save_tiny, tiny, tokens  # noqa: E402

WORDS = [f"word{i}" for i in range(30)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def decoder(tiny_folder):
    return tiny_folder("LlamaForCausalLM")


@pytest.fixture(scope="module")
def encoder(tiny_folder):
    return tiny_folder("BertModel")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    gen = torch.Generator().manual_seed(0)
    rows = [" ".join(WORDS[i] for i in torch.randint(30, (n,), generator=gen)) for n in range(5, 25)]
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(rows))
    return path


def invoke(*arguments):
    done = CliRunner().invoke(app, ["convert", *map(str, arguments), "--threads", "1"])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_perplexities_of_causal_models_are_those_of_their_own_loss(kind, filled):
    teacher = tiny(kind)
    student = convert(copy.deepcopy(teacher), "favor+", num_features=8)
    ids, mask = padded(tokens(), (11, 11 if filled else 6))
    report = measure(teacher, student, [inputs(teacher, ids, mask)])
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        want = [float(x(input_ids=ids, attention_mask=mask, labels=labels).loss.exp()) for x in (teacher, student)]
    assert [report.original_perplexity, report.perplexity] == pytest.approx(want, rel=1e-5)
    assert report.perplexity != pytest.approx(report.original_perplexity, rel=1e-3)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "MPNetModel", "T5ForConditionalGeneration"])
def test_models_that_predict_no_next_token_have_no_perplexity(kind):
    teacher = tiny(kind)
    report = measure(teacher, convert(copy.deepcopy(teacher), "favor+", num_features=8), [inputs(teacher)])
    assert report.perplexity is None
    assert report.original_perplexity is None


def test_report_card_and_terminal_have_both_perplexities(decoder, text, tmp_path):
    code, said = invoke(decoder, tmp_path / "d", "--features", 4, "--text", text, "--length", 8, "--samples", 4)
    assert code == 0, said
    report = json.loads((tmp_path / "d" / "report.json").read_text())["reports"]["converted"]
    assert report["perplexity"] > 1
    assert report["original_perplexity"] > 1
    shown = f"{report['original_perplexity']:.3g}"
    assert f"| perplexity of the original | {shown} |" in (tmp_path / "d" / "README.md").read_text()
    assert "perplexity of the original" in said
    assert shown in said


def test_texts_of_an_encoder_are_counted_as_they_were_used(encoder, text, tmp_path):
    setting = Setting(features=4, distill=text, steps=3, tune=1, samples=4, batch=2)
    found = converting.run(encoder, tmp_path / "d", setting)
    source, seen = load_source(encoder), set()
    lines = text.read_text().splitlines()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    rows = TextRows([lines[i] for i in sorted(order[4:])], source.tokenizer, 64, "encoder")
    for steps, seed in ((3, 1), (1, 2)):
        for batch in islice(rows.batches(2, seed), steps):
            seen |= {tuple(x[x > 0].tolist()) for x in batch["input_ids"]}
    assert len(seen) < 16
    assert found.texts == {
        "measured on": TextsUsed("some.txt", 4, 20),
        "calibrated on": TextsUsed("some.txt", 4, 16),
        "learned from": TextsUsed("some.txt", len(seen), 16),
    }
    card = (tmp_path / "d" / "README.md").read_text()
    assert f"learned from: {len(seen)} of 16 texts of some.txt" in card
    assert "measured on: 4 of 20 texts of some.txt" in card
    assert "attention transfer: 3 steps of 2 texts" in card


def test_windows_of_a_causal_model_are_counted_with_the_texts_in_them(decoder):
    """Each text is one word again and again, so that the tokens of a window tell which texts it is of."""
    texts = [" ".join([word] * count) for word, count in zip(WORDS, [3, 9, 1, 1, 12, 2, 9, 12, 4, 4], strict=False)]
    tokenizer = load_source(decoder).tokenizer
    for length, count in ((8, 3), (8, 5), (8, 40), (57, 1), (500, 2)):
        rows = TextRows(texts, tokenizer, length, "causal")
        batches = [x["input_ids"] for seed in (0, 1) for x in islice(rows.batches(1, seed), count)]
        used = rows.used("a.txt", 10, [(count, 0), (count, 1)])
        assert used.windows == len({tuple(x.flatten().tolist()) for x in batches})
        assert used.texts == len(set(torch.cat([x.flatten() for x in batches]).tolist()))
        assert used.window_length == min(length, 57)


def test_short_texts_are_left_out_until_they_make_the_windows_that_were_asked_for(decoder, text, tmp_path):
    """Four texts of 5 to 24 tokens are less than four windows of 24."""
    asked = {"features": 4, "distill": text, "steps": 1, "batch": 1, "length": 24}
    found = converting.run(decoder, tmp_path / "d", Setting(samples=4, **asked))
    used = found.texts["measured on"]
    assert (used.windows, used.window_length) == (4, 24)
    assert 4 < used.texts == used.available - found.texts["learned from"].available
    assert not any("asked for" in x for x in found.remarks)
    found = converting.run(decoder, tmp_path / "few", Setting(samples=18, **asked))
    made = found.texts["measured on"].windows
    assert made < 18
    assert f"18 samples were asked for, and the texts to measure on make {made}" in found.remarks
    assert found.texts["learned from"].available >= 1


def test_a_causal_model_says_windows(decoder, text, tmp_path):
    options = ["--features", 4, "--distill", text, "--steps", 2, "--batch", 1, "--length", 8, "--samples", 3]
    code, said = invoke(decoder, tmp_path / "d", *options)
    assert code == 0, said
    report = json.loads((tmp_path / "d" / "report.json").read_text())
    used = report["texts"]["measured on"]
    assert (used["windows"], used["window_length"], used["available"]) == (3, 8, 20)
    assert report["reports"]["converted"]["samples"] == 3
    assert report["texts"]["learned from"]["windows"] == 2
    sentence = f"measured on 3 windows of 8 tokens from {used['texts']} of 20 texts of some.txt"
    assert sentence in said
    assert "attention transfer: 2 steps of 1 window," in (tmp_path / "d" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["MPNetModel", "BertModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_softmax_by_the_command_shows_no_error_and_says_what_it_is(kind, text, tmp_path):
    path = tmp_path / "original"
    tiny(kind, torch.float32).save_pretrained(path)
    code, said = invoke(path, tmp_path / "copy", "--attention", "softmax", "--samples", 2, "--length", 9)
    assert code == 0, said
    report = json.loads((tmp_path / "copy" / "report.json").read_text())["reports"]["converted"]
    assert report["output"] < 1e-5
    assert max(x["error"] for x in report["rows"]) < 1e-5
    if kind == "LlamaForCausalLM":
        assert report["perplexity"] == pytest.approx(report["original_perplexity"], rel=1e-5)
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "with its own softmax attention: a check" in card
    assert "It is not the original" not in card
    figures = [x.split("|") for x in card.splitlines() if x.startswith(("| output", "| attention"))]
    assert len(figures) == 1 + len(report["rows"])
    assert all(float(x[2]) < 1e-5 for x in figures)
    given = inputs(load(tmp_path / "copy"))
    with torch.no_grad():
        original = getattr(transformers, kind).from_pretrained(path).eval()
        torch.testing.assert_close(load(tmp_path / "copy")(**given)[0], original(**given)[0], rtol=1e-4, atol=1e-4)


def test_softmax_takes_no_features_and_keeps_nothing(encoder, tmp_path):
    for options, message in (
        (["--features", 8], "'softmax' has no number of features, got 8"),
        (["--keep", 1], "0 attentions were converted, so that at most 0 can be kept exact, got 1"),
    ):
        code, said = invoke(encoder, tmp_path / "d", "--attention", "softmax", *options)
        assert code == 2
        assert message in said


def sentence_files(path, modules=("", "1_Pooling", "2_Normalize")):
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (path / "modules.json").write_text(json.dumps([{"idx": i, "path": x} for i, x in enumerate(modules)]))
    (path / "config_sentence_transformers.json").write_text("{}")
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')


def test_files_of_sentence_transformers_come_along(tmp_path):
    source, target = save_tiny(tmp_path / "s", "BertModel"), tmp_path / "t"
    sentence_files(source)
    (source / "1_Pooling" / "pytorch_model.bin").write_bytes(b"pickled")
    (tmp_path / "secret").write_text("secret")
    (source / "1_Pooling" / "link.json").symlink_to(tmp_path / "secret")
    found = converting.run(source, target, Setting(features=4, samples=1))
    names = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"]
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert [x.name for x in (target / "1_Pooling").iterdir()] == ["config.json"]
    said = "; ".join(found.remarks)
    assert "1_Pooling/link.json is a link out of" in said
    assert "1_Pooling/pytorch_model.bin is pickled and was not copied; --allow-pickle does" in said
    assert load(target).conversion.replaced
    converting.run(source, target, Setting(features=4, samples=1, allow_pickle=True), force=True)
    assert (target / "1_Pooling" / "pytorch_model.bin").read_bytes() == b"pickled"


@pytest.mark.parametrize("name", ["../s", "/tmp", "..", "a/b", 3])
def test_modules_that_lie_elsewhere_are_named_and_not_copied(name, tmp_path):
    source = save_tiny(tmp_path / "s", "BertModel")
    sentence_files(source, ("", name))
    found = converting.run(source, tmp_path / "t", Setting(features=4, samples=1))
    assert f"modules.json names {name!r}, which is not the name of a folder" in found.remarks[-1]
    assert not (tmp_path / "t" / "modules.json").exists()


def test_files_of_sentence_transformers_come_along_from_the_hub(tmp_path, monkeypatch):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    blobs.mkdir()
    sentence_files(save_tiny(snapshot, "BertModel"))
    for number, file in enumerate(x for x in list(snapshot.rglob("*")) if x.is_file()):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    import huggingface_hub

    found = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: found(name, cache_dir=tmp_path, local_files_only=True, **options),
    )
    from kernelformer.conversion.convert import copy_sentence_files

    (tmp_path / "t").mkdir()
    remarks = copy_sentence_files("owner/name", tmp_path / "t")
    assert (tmp_path / "t" / "1_Pooling" / "config.json").is_file()
    assert not (tmp_path / "t" / "1_Pooling" / "config.json").is_symlink()
    assert len(remarks) == 1
    assert "nothing/there" not in remarks[0]
    (remark,) = copy_sentence_files("nothing/there", tmp_path / "t")
    assert remark.startswith("files of sentence-transformers were not copied: ")


def packed_model(path):
    """A tiny Llama as a .gguf file, with a tokenizer of bytes' kind."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    gen, width, heads, words = np.random.default_rng(0), 32, 4, 40
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(48)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = ["<s>", "</s>", "AB", *map(chr, range(ord("A"), ord("A") + words - 3))]
    writer.add_token_list(letters)
    writer.add_token_merges(["A B"])
    writer.add_token_types([3, 3] + [1] * (words - 2))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name, *size):
        writer.add_tensor(name, gen.normal(size=size, scale=0.3).astype(np.float32))

    add("token_embd.weight", words, width)
    add("output.weight", words, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(2):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
        for name, rows, columns in (
            ("attn_q", width, width), ("attn_k", width // 2, width), ("attn_v", width // 2, width),
            ("attn_output", width, width), ("ffn_gate", 48, width), ("ffn_up", 48, width), ("ffn_down", width, 48),
        ):  # fmt: skip
            add(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_by_its_path(tmp_path):
    packed_model(tmp_path / "tiny.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")  # of a folder with two, the path says which
    (tmp_path / "a.txt").write_text("ABCDEFGH\n" * 20)
    options = ["--features", 4, "--text", tmp_path / "a.txt", "--length", 8, "--samples", 2]
    code, said = invoke(tmp_path / "tiny.gguf", tmp_path / "d", *options)
    assert code == 0, said
    report = json.loads((tmp_path / "d" / "report.json").read_text())
    assert report["source"] == "tiny.gguf"
    assert report["reports"]["converted"]["perplexity"] > 1
    assert len(load(tmp_path / "d").conversion.replaced) == 2


def test_a_gguf_file_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, said = invoke(tmp_path / "a.gguf", tmp_path / "d")
    assert code == 2
    assert "needs the package gguf, which is not installed: pip install 'kernelformer[gguf]'" in said
