"""Judging a converted model beside its original."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.data.passkey import QUESTION, passkeys, tells_numbers  # noqa: E402
from kernelformer.distill.parts import CONVERTED, KERNEL, NEAR, ORIGINAL  # noqa: E402
from kernelformer.distill.passkey import answer_log_probs  # noqa: E402
from kernelformer.distill.probe import compare_probes  # noqa: E402
from kernelformer.hf.licence import licence_of  # noqa: E402
from kernelformer.pipelines import convert as converting  # noqa: E402
from kernelformer.pipelines.convert import Setting  # noqa: E402
from kernelformer.reports import conversion as conversion_report  # noqa: E402
from kernelformer.reports.markdown import put_section  # noqa: E402
from tiny_models import tiny, tokens  # noqa: E402

WORDS = ["the", "pass", "key", "is", ".", *map(str, range(10)), *(f"##{i}" for i in range(10)), "one", "two", "three"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(conversion_report, "picture", lambda result, path: None)


def folder(path, kind):
    transformers.BertTokenizer(vocab={x: i for i, x in enumerate(VOCABULARY)}).save_pretrained(path)
    tiny(kind, torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("model") / "decoder", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("model") / "encoder", "BertModel")


@pytest.fixture(scope="module")
def tokenizer(decoder):
    return transformers.AutoTokenizer.from_pretrained(decoder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """What is labelled 1 has "one" in it, what is labelled 0 "two"."""
    path = tmp_path_factory.mktemp("text") / "some.jsonl"
    rows = [{"text": f"three {['one', 'two'][i % 2]} three " * (3 + i % 5), "label": 1 - i % 2} for i in range(40)]
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    return path


@pytest.mark.parametrize("length", [24, 61])
def test_a_number_stands_in_the_text_at_its_depth_and_at_its_end(tokenizer, length):
    rows = passkeys(["one two three"], tokenizer, length, 4)
    same = passkeys(["one two three"], tokenizer, length, 4)
    assert all(torch.equal(x.ids, y.ids) for x, y in zip(rows, same, strict=True))
    assert len({x.key for x in rows}) == 4
    assert [x.depth for x in rows] == [0.125, 0.375, 0.625, 0.875]
    for row in rows:
        assert row.ids.shape == (length,)
        said = tokenizer.decode(row.ids).replace(" ", "")
        assert said.count(f"thepasskeyis{row.key}.") == 1
        assert said.endswith(f"{QUESTION.strip().replace(' ', '').lower()}{row.key}")
        assert tokenizer.decode(row.ids[-row.answer :]).replace(" ", "").replace("##", "") == row.key
        sentence = length - row.answer - row.distance
        assert tokenizer.decode(row.ids[:sentence]).replace(" ", "").endswith(f"{row.key}.")
    with pytest.raises(ValueError, match=r"a text of 9 tokens has no room .*; give a passkey length of at least 19"):
        passkeys(["one two three"], tokenizer, 9, 1)


def test_a_tokenizer_without_digits_is_not_asked_for_numbers(tokenizer):
    letters = transformers.BertTokenizer(vocab={x: i for i, x in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])})
    assert tells_numbers(tokenizer)
    assert not tells_numbers(letters)
    with pytest.raises(ValueError, match=r"cannot tell the numbers .* apart; give passkeys=0"):
        passkeys(["a"], letters, 40, 1)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertLMHeadModel"])
def test_an_answer_is_scored_as_its_tokens_are_predicted_and_right_if_greedy_continuation_gives_it(kind):
    model = tiny(kind, **({"add_cross_attention": False} if "Bert" in kind else {}))
    ids = tokens(1, 9)[0]
    greedy = model.generate(ids[None], max_new_tokens=3, min_new_tokens=3, do_sample=False, eos_token_id=None)[0]
    scores, right = answer_log_probs(model, greedy, 3)
    with torch.no_grad():
        want = model(greedy[None]).logits[0].float().log_softmax(-1)[8:11].gather(1, greedy[9:, None])[:, 0]
    torch.testing.assert_close(scores, want)
    assert right
    other = greedy.clone()
    other[-1] = (other[-1] + 1) % 60
    assert not answer_log_probs(model, other, 3)[1]


def test_a_probe_has_the_error_of_the_difference_text_by_text():
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    clear = torch.randn(200, 6, generator=gen) + 3 * labels[:, None]
    noisy = torch.randn(200, 6, generator=gen) + 0.5 * labels[:, None]
    same, worse = compare_probes(clear, clear, labels), compare_probes(clear, noisy, labels)
    assert (same.original, same.converted, same.error, same.tested) == (same.original, same.original, 0, 100)
    assert worse.converted < worse.original - 2 * worse.error
    with pytest.raises(ValueError, match="two labels or more to learn from, got 1 in the 100 of 200 texts"):
        compare_probes(clear, noisy, torch.zeros(200, dtype=torch.long))


def run(source, target, text, **options):
    return converting.run(source, target, Setting(text=text, samples=2, length=16, **options))


def test_a_converted_decoder_is_judged_in_report_card_and_terminal(decoder, text, tmp_path):
    result = run(
        decoder,
        tmp_path / "d",
        text,
        attention="favor+:window=4:sinks=1",
        features=4,
        passkey_lengths=(32, 48),
        passkeys=2,
        sample_tokens=3,
    )
    report = json.loads((tmp_path / "d" / "report.json").read_text())["judged"]
    figures = report["figures"]
    assert list(figures) == [ORIGINAL, CONVERTED, NEAR, KERNEL]
    last = result.reports["converted"]
    assert figures[CONVERTED]["perplexity"] == pytest.approx(last.perplexity)
    assert figures[ORIGINAL]["perplexity"] == pytest.approx(last.original_perplexity)
    assert [(x["length"], x["model"]) for x in report["recall"]] == [
        (length, name) for length in (32, 48) for name in (ORIGINAL, CONVERTED, NEAR)
    ]
    assert all(len(x["right"]) == 2 and x["log_prob"] < 0 < x["log_prob_error"] for x in report["recall"])
    assert all(set(x["texts"]) == {ORIGINAL, CONVERTED} for x in report["samples"])
    assert len(report["samples"]) == 2
    card = (tmp_path / "d" / "README.md").read_text()
    assert "|  | original | window and sinks alone | kernel alone | converted (both) |" in card
    assert "the kernel adds, log p" in card
    assert "exact within each replaced attention: tokens less than 4 away and the first token" in card
    assert "licence of the source: not stated by the source\\: ask there" in card


def test_heads_that_find_what_is_far_stay_exact_in_a_decoder(decoder, encoder, text, tmp_path):
    options = {"attention": "favor+:window=4:sinks=1", "features": 4, "passkeys": 0, "sample_tokens": 0}
    setting = Setting(text=text, samples=2, length=48, recall_heads=3, keep_heads=1, **options)
    result = converting.run(decoder, tmp_path / "d", setting)
    kept = sum(len(x["exact_heads"]) for x in result.conversion)
    assert kept in (3, 4)  # the worst one may be one of them
    assert "3 heads that find again what is far stay exact" in " ".join(result.remarks)
    assert "chosen on" in result.texts
    assert result.judged.figures[KERNEL].perplexity > 0
    wrong = {
        "texts of 24 tokens are too short to repeat a passage in them beyond a window of 4": (decoder, {"length": 24}),
        "recall_heads=1 needs texts: .*; give --text": (decoder, {"text": None}),
        "recall_heads=1 needs a decoder: .*; leave it out": (encoder, {}),
    }
    for message, (source, more) in wrong.items():
        asked = Setting(**{"text": text, "samples": 2, "recall_heads": 1, "attention": "favor+:window=4", **more})
        with pytest.raises(ValueError, match=message):
            converting.run(source, tmp_path / "e", asked)
    assert not (tmp_path / "e").exists()


def test_masked_models_are_judged_by_the_tokens_that_were_hidden(text, tmp_path):
    source = folder(tmp_path / "s", "BertForMaskedLM")
    result = run(source, tmp_path / "d", text, attention="wildcat:window=2", features=4)
    assert all(0 <= x.accuracy <= 1 for x in result.judged.figures.values())
    assert "hidden tokens that are found" in (tmp_path / "d" / "README.md").read_text()


def test_a_finished_folder_is_judged_later_and_its_weights_stay(encoder, text, tmp_path):
    """The probe of an exact copy is that of the original, and the section of the card is replaced, not repeated."""
    target = tmp_path / "d"
    run(encoder, target, text, attention="softmax")
    before = {x.name: hashlib.sha256(x.read_bytes()).digest() for x in target.iterdir()}
    card = (target / "README.md").read_text()
    arguments = ["judge", target, "--original", encoder, "--text", text, "--probe", "40", "--samples", "3"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "linear probe: accuracy 1.0000 on the original's embeddings and 1.0000" in done.output
    after = {x.name: hashlib.sha256(x.read_bytes()).digest() for x in target.iterdir()}
    assert {x for x in before if before[x] != after[x]} == {"report.json", "README.md"}
    assert set(before) == set(after)
    judged = (target / "README.md").read_text()
    assert judged.count("## How it was judged") == 1
    assert "Measured on 3 of 40 texts" in judged
    heads = [x for x in judged.splitlines() if x.startswith("## ")]
    assert heads == [x for x in card.splitlines() if x.startswith("## ")]


def test_a_folder_is_judged_beside_its_own_original_alone(encoder, decoder, text, tmp_path):
    run(encoder, tmp_path / "d", text, attention="elu")
    other = tmp_path / "other"
    tiny("BertModel", torch.float32, num_hidden_layers=3).save_pretrained(other)
    for original, message in ((other, "is not the original of"), (tmp_path / "d", "was converted")):
        done = CliRunner().invoke(app, ["judge", str(tmp_path / "d"), "--original", str(original)])
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("which", "options", "message"),
    [
        ("encoder", {"passkey_lengths": (32,)}, "passkey_lengths is for decoders"),
        ("encoder", {"sample_tokens": 3}, "sample_tokens is for decoders"),
        ("decoder", {"probe": 4}, "a probe is for encoders"),
        ("decoder", {"passkey_lengths": (32, 65)}, "need up to 65 positions, .* has 64"),
        ("decoder", {"passkey_lengths": (32,), "passkeys": 0}, "contradict each other"),
        ("decoder", {"sample_tokens": 3, "text": None}, "sample_tokens=3 needs texts to measure on"),
        ("encoder", {"probe": 4, "text": None}, "probe=4 needs texts with labels"),
    ],
)
def test_what_cannot_be_judged_is_said_before_anything_is_converted(which, options, message, text, tmp_path, request):
    with pytest.raises(ValueError, match=message):
        run(request.getfixturevalue(which), tmp_path / "d", **{"text": text, "attention": "elu", **options})
    assert list(tmp_path.iterdir()) == []


def test_a_section_is_put_where_it_belongs():
    page = "# a\n\n## b\n\nold\n\n## c\n\nend\n"
    assert put_section(page, "## b\n\nnew\n") == "# a\n\n## b\n\nnew\n\n## c\n\nend\n"
    assert put_section(page, "## x\n\nnew", before="## c") == "# a\n\n## b\n\nold\n\n## x\n\nnew\n\n## c\n\nend\n"
    assert put_section("# a\n", "## x\n\nnew") == "# a\n\n## x\n\nnew\n"
    assert put_section(page, "## c\n\nnew") == "# a\n\n## b\n\nold\n\n## c\n\nnew\n"


def packed(*pairs):
    """The header of a .gguf with these texts; the first of them is a list."""

    def word(x):
        return struct.pack("<Q", len(x)) + x.encode()

    first = word("general.tags") + struct.pack("<IIQ", 9, 8, 2) + word("a") + word("b")
    rest = b"".join(word(name) + struct.pack("<I", 8) + word(x) for name, x in pairs)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1 + len(pairs)) + first + rest


def test_the_licence_is_the_one_that_the_source_states(tmp_path, encoder):
    assert licence_of(encoder) == ""
    (tmp_path / "LICENSE").write_text("\n  MIT License\n\nCopyright")
    assert licence_of(tmp_path) == "MIT License (file LICENSE of the source)"
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: 'apache-2.0'\n---\n\n# license: none\n")
    assert licence_of(tmp_path) == "apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    assert licence_of(tmp_path) == "own (LICENSE)"
    alone = tmp_path / "alone"
    alone.mkdir()
    for content, licence in (
        (packed(("general.name", "x"), ("general.license", "bsd")), "bsd"),
        (packed(("general.name", "x")), ""),
        (packed(("general.license", "bsd"))[:-2], "b"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 9, 1 << 60), ""),
        (b"GGUF", ""),
    ):
        (alone / "x.gguf").write_bytes(content)
        assert licence_of(alone / "x.gguf") == licence


def test_a_card_names_the_licence_and_what_was_kept_and_obeys_no_sample(decoder, text, tmp_path, monkeypatch):
    from kernelformer.pipelines import judge as judging

    source = tmp_path / "s"
    transformers.AutoTokenizer.from_pretrained(decoder).save_pretrained(source)
    tiny("LlamaForCausalLM", torch.float32).save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr(judging, "continuation", lambda *_, **__: "# a\n## b <script>|")
    run(source, tmp_path / "d", text, attention="elu", layers="0", passkeys=0)
    card = (tmp_path / "d" / "README.md").read_text()
    assert "\nlicense: mit\n---" in card
    assert "base_model" not in card
    assert "kept exact: model.layers.1.self\\_attn (not among --layers 0)" in card
    assert "Converted model:\n\n> \\# a\n>\n> \\#\\# b &lt;script&gt;\\|\n" in card


def test_settings_of_judging_are_no_part_of_a_distillation_that_goes_on(decoder, text):
    from kernelformer.pipelines.judge_settings import JUDGED

    setting = Setting(text=text)
    parts = converting._identity(decoder, setting, converting.ConversionResult(setting, "x", "y", 16))
    assert not set(JUDGED) & set(parts)
