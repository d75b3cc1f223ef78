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
from kernelformer.cli.common import part_done  # noqa: E402
from kernelformer.conversion import convert as converting  # noqa: E402
from kernelformer.conversion import judge as judge_pipeline  # noqa: E402
from kernelformer.conversion import keep as convert_keep  # noqa: E402
from kernelformer.conversion.judge import (  # noqa: E402
    CONVERTED,
    KERNEL,
    NEAR,
    ORIGINAL,
    Steps,
)
from kernelformer.conversion.measure import Report  # noqa: E402
from kernelformer.conversion.passkey import (  # noqa: E402
    QUESTION,
    answer_log_probs,
    compare_probes,
    number_tokens,
    passkeys,
)
from kernelformer.conversion.report import (  # noqa: E402
    NOT_JUDGED,
    Recall,
    licence_of,
)
from kernelformer.conversion.settings import ConvertSettings as Setting  # noqa: E402
from kernelformer.conversion.settings import JudgeSettings  # noqa: E402
from kernelformer.errors import StoppedError  # noqa: E402
from kernelformer.hf import convert, load  # noqa: E402
from kernelformer.hf.load import Source  # noqa: E402
from kernelformer.page import put_section  # noqa: E402
from tiny_models import SPECIAL, save_tiny, tiny, tokens, word_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def decoder(tiny_folder):
    return tiny_folder("LlamaForCausalLM")


@pytest.fixture(scope="module")
def encoder(tiny_folder):
    return tiny_folder("BertModel")


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Texts labelled 1 have "word1" in them, those labelled 0 "word2"."""
    path = tmp_path_factory.mktemp("text") / "some.jsonl"
    rows = [{"text": f"word3 word{1 + i % 2} word3 " * (3 + i % 5), "label": 1 - i % 2} for i in range(40)]
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    return path


@pytest.mark.parametrize("length", [24, 61])
def test_a_number_stands_in_the_text_at_its_depth_and_at_its_end(tokenizer, length):
    rows = passkeys(["word1 word2 word3"], tokenizer, length, 4)
    same = passkeys(["word1 word2 word3"], tokenizer, length, 4)
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
        passkeys(["word1 word2 word3"], tokenizer, 9, 1)


def test_a_tokenizer_without_digits_is_not_asked_for_numbers(tokenizer):
    letters = word_tokenizer([*SPECIAL[:4], "a"])
    model = tiny("LlamaForCausalLM")
    assert not number_tokens(Source(model, letters, ""))
    assert len(set(map(tuple, number_tokens(Source(model, tokenizer, ""))))) > 1
    model.config.vocab_size = 20  # some digits have larger tokens
    assert not number_tokens(Source(model, tokenizer, ""))
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
    assert "licence of the source: not stated by the source: ask there" in card


def test_a_conversion_that_is_stopped_while_it_is_judged_leaves_a_whole_model_that_says_so(
    decoder, text, tmp_path, monkeypatch
):
    target = tmp_path / "d"

    def stop(*_):
        assert target.is_dir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converting, "judge", stop)
        with pytest.raises(
            StoppedError, match=r"d is complete, and `.* judge \S+/d --original \S+ --text \S+` judges it"
        ):
            run(decoder, target, text, attention="elu")
    assert [x.name for x in tmp_path.iterdir()] == ["d"]
    assert load(target)(**{"input_ids": tokens(1, 9)}).logits.isfinite().all()
    assert json.loads((target / "report.json").read_text())["judged"] is None
    assert f"## How it was judged\n\n{NOT_JUDGED}\n" in (target / "README.md").read_text()
    quiet = {"passkeys": 0, "sample_tokens": 0, "samples": 2, "length": 16}
    judge_pipeline.judge_folder(target, decoder, JudgeSettings(text=text, **quiet))
    assert json.loads((target / "report.json").read_text())["judged"]["figures"]
    card = (target / "README.md").read_text()
    assert card.count("## How it was judged") == 1
    assert NOT_JUDGED not in card


def test_no_judge_writes_the_model_alone(decoder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "judge", None)
    call = ["convert", decoder, tmp_path / "d", "--text", text, "--length", 16, "--samples", 2, "--attention", "elu"]
    done = CliRunner().invoke(app, [*map(str, call), "--no-judge", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert NOT_JUDGED in " ".join(done.output.split())
    assert NOT_JUDGED in (tmp_path / "d" / "README.md").read_text()
    with pytest.raises(ValueError, match="no_judge and probe=4 contradict each other"):
        Setting(no_judge=True, probe=4)


def test_judging_that_has_no_time_measures_the_first_batch_and_names_the_rest(decoder, text, tmp_path):
    options = {"passkey_lengths": (32,), "passkeys": 2, "sample_tokens": 3, "batch": 1, "judge_minutes": 0.0}
    judged = run(decoder, tmp_path / "d", text, attention="favor+:window=4", features=4, **options).judged
    assert list(judged.figures) == [ORIGINAL, CONVERTED, NEAR, KERNEL]
    assert (judged.recall, judged.samples) == ([], [])
    assert judged.remarks == [
        "left out for time: figures of 1 of 2 batches of them",
        "left out for time: numbers hidden in 32 tokens",
        "left out for time: samples from number 1 on",
    ]


def test_steps_say_the_minutes_that_they_expect_and_end_in_time(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(Steps, "spent", property(lambda _: now[0]))
    steps = Steps("judging", 4, said.append, seconds=200)
    for what in ("a", "b"):
        assert steps.fits(100) == (what == "a")  # after nothing nobody knows
        with steps.step(what, 1):
            now[0] += 60
    assert said == ["judging: a", "judging: 1.0 of 3.3 min, b"]  # four minutes, of which there are 200 seconds
    assert part_done(said[1]) == pytest.approx(1 / 3.3)
    assert steps.fits(1.3)
    assert not steps.fits(1.4)


QUIET = {"features": 4, "passkeys": 0, "sample_tokens": 0, "samples": 2, "length": 48}


def test_heads_that_find_what_is_far_stay_exact_in_a_decoder(decoder, text, tmp_path):
    setting = Setting(text=text, attention="favor+:window=4:sinks=1", recall_heads=3, keep_heads=1, **QUIET)
    result = converting.run(decoder, tmp_path / "d", setting)
    by_reason = list(result.exact_heads.values())
    assert [sum(map(len, x.values())) for x in by_reason] == [3, 1]
    wanted = {name: {*by_reason[0].get(name, ()), *by_reason[1].get(name, ())} for x in by_reason for name in x}
    assert {x["name"]: set(x["exact_heads"]) for x in result.conversion if x["exact_heads"]} == wanted
    assert "3 heads that find again what is far stay exact" in " ".join(result.remarks)
    assert "heads that recall chosen on" in result.texts
    card = (tmp_path / "d" / "README.md").read_text()
    assert "(they find again what is far, --recall-heads 3)" in card.replace("\\", "")
    assert "(the largest errors, --keep-heads 1)" in card.replace("\\", "")
    assert "kept exact are so in every column" in card


def test_the_reason_of_an_attention_whose_heads_all_stay_exact_is_its_heads(decoder, text, tmp_path, monkeypatch):
    name = "model.layers.0.self_attn"
    monkeypatch.setattr(convert_keep, "best_heads", lambda scores, count: {name: [0, 1, 2, 3]})
    setting = Setting(text=text, attention="favor+:window=4", layers="0-1", recall_heads=4, **QUIET)
    converting.run(decoder, tmp_path / "d", setting)
    card = (tmp_path / "d" / "README.md").read_text().replace("\\", "")
    assert f"kept exact: {name} (all its heads are)" in card


@pytest.mark.parametrize("window", [4, 17])
def test_passages_are_repeated_beyond_the_window_of_any_method(decoder, text, tmp_path, monkeypatch, window):
    gaps = []
    plain = convert_keep.recall_row
    monkeypatch.setattr(convert_keep, "recall_row", lambda ids, gap, seed: (gaps.append(gap), plain(ids, gap, seed))[1])
    for method in ("local", "favor+"):
        spec = f"{method}:window={window}:sinks=1"
        options = {**QUIET, "features": None if method == "local" else 4}
        converting.run(decoder, tmp_path / method, Setting(text=text, attention=spec, recall_heads=1, **options))
    assert set(gaps) == {window}


@pytest.mark.parametrize(
    ("which", "options", "message"),
    [
        ("decoder", {"length": 24}, "rows of at most 24 tokens, and it takes 28 to repeat .*larger --length .it is 24"),
        ("decoder", {"text": None}, "recall_heads=1 needs texts: .*; give --text"),
        ("encoder", {}, "recall_heads=1 needs a decoder: .*; leave it out"),
        ("decoder", {"recall_heads": 8}, "8 heads were converted, so that at most 7 can be kept exact, got 8"),
        ("decoder", {"attention": "softmax", "features": None}, "0 heads were converted, .*, got 1"),
        ("encoder", {"recall_heads": 0, "repeats": 0.5, "text": None, "distill": "text"}, "repeats=0.5 are for decod"),
        ("decoder", {"recall_heads": 0, "repeats": 0.5}, "repeats=0.5 need texts to learn from"),
    ],
)
def test_what_of_recall_cannot_be_is_said(decoder, encoder, text, tmp_path, which, options, message):
    source = {"decoder": decoder, "encoder": encoder}[which]
    quiet = QUIET if which == "decoder" else {"features": 4, "samples": 2}
    given = {"text": text, "recall_heads": 1, "attention": "favor+:window=4", **quiet, **options}
    if given.get("distill"):
        given["distill"] = text
    with pytest.raises(ValueError, match=message):
        converting.run(source, tmp_path / "e", Setting(**given))
    assert list(tmp_path.iterdir()) == []


def test_two_choices_of_heads_do_not_keep_all_of_them(decoder, text, tmp_path, monkeypatch):
    first, second = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    monkeypatch.setattr(convert_keep, "best_heads", lambda scores, count: {first: [0, 1, 2, 3]})
    monkeypatch.setattr(Report, "worst_heads", lambda self, count, names: {second: [0, 1, 2, 3]})
    setting = Setting(text=text, attention="favor+:window=4", recall_heads=4, keep_heads=4, **QUIET)
    with pytest.raises(ValueError, match="8 heads were converted, so that at most 7 can be kept exact, got 8"):
        converting.run(decoder, tmp_path / "d", setting)


def test_a_model_that_forgets_is_told_what_to_do():
    def recall(*right):
        names = (ORIGINAL, CONVERTED, NEAR)
        rows = zip(names, right, strict=False)
        return [Recall(512, name, (100,) * 4, tuple(i < x for i in range(4)), (-1.0,) * 4) for name, x in rows]

    (said,) = judge_pipeline._lost([*recall(4, 1, 0), *recall(4, 2, 0)])
    assert said.startswith("3 of 8 hidden numbers were found, by the original 8: ")
    assert said.endswith("--recall-heads")
    assert judge_pipeline._lost([*recall(4, 1, 0), *recall(4, 3, 0)]) == []
    assert judge_pipeline._lost(recall(0, 0, 0)) == []
    assert judge_pipeline._lost([]) == []


def test_texts_without_a_token_are_no_beginnings(decoder, text, tmp_path):
    some = tmp_path / "some.jsonl"
    some.write_text('{"text": "\\u200b"}\n' * 3 + text.read_text())
    result = run(decoder, tmp_path / "d", some, attention="favor+", features=4, passkeys=0, sample_tokens=2, seed=4)
    assert len(result.judged.samples) == 2
    assert all(x.prompt for x in result.judged.samples)


def test_masked_models_are_judged_by_the_tokens_that_were_hidden(tiny_folder, text, tmp_path):
    result = run(tiny_folder("BertForMaskedLM"), tmp_path / "d", text, attention="wildcat:window=2", features=4)
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


def test_a_card_names_the_licence_and_what_was_kept_and_obeys_no_sample(text, tmp_path, monkeypatch):

    source = save_tiny(tmp_path / "s", "LlamaForCausalLM")
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "decode", lambda *_, **__: "# a\n## b <script>|")
    run(source, tmp_path / "d", text, attention="elu", layers="0", passkeys=0)
    card = (tmp_path / "d" / "README.md").read_text()
    assert "\nlicense: mit\n---" in card
    assert "base_model" not in card
    assert "kept exact: model.layers.1.self\\_attn (not among --layers 0)" in card
    assert "Converted model:\n\n> \\# a\n>\n> \\#\\# b &lt;script&gt;\\|\n" in card


def test_settings_of_judging_are_no_part_of_a_distillation_that_goes_on(decoder, text):
    from kernelformer.conversion.settings import JUDGED

    setting = Setting(text=text)
    student = convert(tiny("LlamaForCausalLM", torch.float32), "elu")
    parts = converting._identity(decoder, setting, converting.ConversionResult(setting, "x", "y", 16), student)
    assert not set(JUDGED) & set(parts)
