"""``kernelformer convert`` from a folder to a folder, and everything that can be wrong with either."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from itertools import islice

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.conversion import checkpoint  # noqa: E402
from kernelformer.conversion import convert as converting  # noqa: E402
from kernelformer.conversion import report as conversion_report  # noqa: E402
from kernelformer.conversion.settings import ConvertSettings as Setting  # noqa: E402
from kernelformer.conversion.texts import TextRows, check_length, read_texts  # noqa: E402
from kernelformer.hf import load  # noqa: E402
from kernelformer.hf.load import load_source  # noqa: E402
from kernelformer.hf.pretrained import tokenizer_of_vocabulary  # noqa: E402
from kernelformer.settings import parse_layers  # noqa: E402
from tiny_models import HEADS, SPECIAL, VOCAB, VOCABULARY, WORDS, save_tiny, tiny, write_sentences  # noqa: E402


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_folder("BertForMaskedLM")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("text") / "some.jsonl", range(5, 25))


def bare(folder, weights="safetensors", tokenizer=False, **options):
    """A folder with a configuration and weights as another program may have left them."""
    folder.mkdir(parents=True)
    made = tiny("BertForMaskedLM", torch.float32)
    record = {**made.config.to_dict(), "architectures": ["BertForMaskedLM"], **options}
    if weights == "safetensors":
        made.save_pretrained(folder)
    else:
        torch.save(made.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(record))
    if tokenizer:
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


def invoke(*arguments):
    done = CliRunner().invoke(app, ["convert", *map(str, arguments), "--threads", "1"])
    return done.exit_code, " ".join(done.output.split())


def hashes(folder):
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in sorted(folder.iterdir())}


def test_the_command_writes_a_model_that_loads_and_leaves_the_source_alone(text, tmp_path, pictures, monkeypatch):
    model = save_tiny(tmp_path / "tiny", "BertForMaskedLM", size=0.5)  # of which errors can be predicted
    before, target = hashes(model), tmp_path / "new" / "linear"
    code, said = invoke(model, target, "--attention", "favor+:draw=hadamard", "--features", 16, "--text", text)
    assert code == 0, said
    assert "relative error of each attention" in said
    assert hashes(model) == before
    assert [x.name for x in target.parent.iterdir()] == ["linear"]
    loaded, tokenizer = load(target), transformers.AutoTokenizer.from_pretrained(target)
    assert loaded.conversion.layers[1].options == {"draw": "hadamard", "num_features": 16}
    assert loaded(**tokenizer("word1 word2", return_tensors="pt")).logits.shape == (1, 4, VOCAB)
    report = json.loads((target / "report.json").read_text())
    rows = report["reports"]["converted"]["rows"]
    assert [x["method"] for x in rows] == ["favor+"] * 2
    assert all(x["predicted"] > 0 and len(x["heads"]) == HEADS for x in rows)
    assert report["texts"]["measured on"]["texts"] == 8
    card = (target / "README.md").read_text()
    assert "favor+, draw = hadamard, num\\_features = 16" in card
    assert "replaced: 2 of 2 attentions" in card
    assert 'kernelformer.hf.load("linear")' in card
    monkeypatch.chdir(target.parent)
    shown = {}
    exec(card.split("```python\n")[1].split("```")[0], shown)  # as a reader of the card would
    assert shown["model"].conversion == loaded.conversion
    assert str(tmp_path) not in card + json.dumps(report)
    assert (target / "report.png").stat().st_size > 10000


def test_distillation_lowers_the_error_and_learns_nothing_from_what_is_measured(model, text, tmp_path):
    setting = Setting(features=16, distill=text, steps=30, tune=2, samples=4)
    found = converting.run(model, tmp_path / "d", setting)
    assert {x: (y.texts, y.available) for x, y in found.texts.items()} == {
        "measured on": (4, 20),
        "calibrated on": (4, 16),
        "learned from": (16, 16),
    }
    assert {x: len(y) for x, y in found.losses.items()} == {"transfer": 30, "tune": 2}
    before, after = (sum(x.error for x in found.reports[y].rows) for y in ("converted", "distilled"))
    assert after < before
    assert not (tmp_path / "d.partial").exists()
    assert "attention transfer: 30 steps of 4 texts" in (tmp_path / "d" / "README.md").read_text()


def test_a_stopped_distillation_goes_on_where_it_was(model, text, tmp_path):
    setting = Setting(features=16, distill=text, steps=8, samples=4)

    def stop(said):
        if said.startswith("transfer: step 5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converting.run(model, tmp_path / "d", setting, log=stop)
    assert [x.name for x in tmp_path.iterdir()] == ["d.partial"]
    kept = torch.load(tmp_path / "d.partial" / checkpoint.FILE, weights_only=True)
    assert len(kept["losses"]["transfer"]) == 5
    with pytest.raises(ValueError, match=r"d\.partial is of another call \(steps\); repeat that one"):
        converting.run(model, tmp_path / "d", Setting(features=16, distill=text, steps=9, samples=4))
    found = converting.run(model, tmp_path / "d", setting)
    assert found.losses["transfer"][:5] == kept["losses"]["transfer"]
    assert len(found.losses["transfer"]) == 8
    whole = converting.run(model, tmp_path.parent / f"{tmp_path.name}-whole", setting)
    assert found.losses == whole.losses  # to the last bit, the optimizer's memory and the schedule included
    assert "transfer was resumed after step 5" in " ".join(found.remarks)
    assert [x.name for x in tmp_path.iterdir()] == ["d"]


def test_a_damaged_state_of_a_distillation_is_named(model, text, tmp_path):
    kept = checkpoint.Checkpoint(checkpoint.Checkpoint.folder_for(tmp_path / "d"), {})
    kept.save(torch.nn.Linear(64, 64), {"transfer": [1.0]}, now=True)
    path = kept.folder / checkpoint.FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # in the midst of the weights
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"no readable progress\.pt: \S+ in it has another checksum\).* --force to"):
        converting.run(model, tmp_path / "d", Setting(features=16, text=text))


def test_a_partial_folder_of_somebody_else_is_never_removed(model, text, tmp_path):
    (tmp_path / "d.partial").mkdir()
    (tmp_path / "d.partial" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"d\.partial is of another call \(it has no readable progress\.pt: "):
        converting.run(model, tmp_path / "d", Setting(features=16, text=text), force=True)
    assert (tmp_path / "d.partial" / "mine.txt").read_text() == "mine"


def test_what_the_output_needs_most_stays_exact(model, text, tmp_path):
    setting = Setting(attention="favor+", features=4, text=text, keep=1, keep_heads=1)
    found = converting.run(model, tmp_path / "k", setting)
    everything, rest = found.reports["all converted"], found.reports["converted"]
    (kept,) = (x["name"] for x in found.conversion if x["method"] == "softmax")
    assert (found.texts["chosen on"].texts, found.texts["chosen on"].available) == (8, 12)  # those not measured on
    assert all(x.error < 1e-5 for x in rest.rows if x.name == kept)
    (other,) = (x for x in found.conversion if x["name"] != kept)
    worst = max(range(HEADS), key=next(x for x in everything.rows if x.name == other["name"]).heads.__getitem__)
    assert list(other["exact_heads"]) == [worst]
    assert rest.output < everything.output
    with pytest.raises(ValueError, match="2 attentions were converted, so that at most 1 can be kept exact, got 2"):
        converting.run(model, tmp_path / "l", Setting(text=text, keep=2))


@pytest.mark.parametrize("keep", [0, 1])
def test_calibrated_features_take_the_statistics_of_other_texts(model, text, tmp_path, keep):
    found = converting.run(
        model, tmp_path / "c", Setting(attention="favor#", features=8, text=text, samples=4, keep=keep)
    )
    assert (found.texts["calibrated on"].texts, found.texts["calibrated on"].available) == (4, 16)
    sums = [x for name, x in load(tmp_path / "c").named_buffers() if name.endswith("statistics.moments")]
    assert len(sums) == 2 - keep
    assert all((x[:, :, -1, -1] > 20).all() for x in sums)


def test_some_layers_alone_are_converted(model, tmp_path):
    found = converting.run(model, tmp_path / "k", Setting(features=4, layers="1", samples=2, batch=2))
    assert [x["method"] for x in found.conversion] == ["softmax", "wildcat"]  # of an encoder, without training
    assert found.setting.attention == "wildcat:window=32:sinks=1"
    assert "random tokens" in found.remarks[-1]


def test_layers_are_numbers_ranges_or_patterns():
    assert parse_layers("0-3, 5") == [0, 1, 2, 3, 5]
    assert parse_layers("-1,encoder.*") == [-1, "encoder.*"]
    for text, message in (("3-1", "end before they begin; say 1-3"), ("1,,2", "patterns of names, got '1,,2'")):
        with pytest.raises(ValueError, match=message):
            parse_layers(text)


def test_features_are_whatever_the_method_calls_them():
    assert Setting(attention="skyformer", features=7).method() == ("skyformer", {"num_landmarks": 7})
    assert Setting(attention="linformer", features=7).method() == ("linformer", {"rank": 7})
    assert Setting(attention="loglinear").method() == ("loglinear", {"num_features": 128})
    assert Setting(attention="elu").method() == ("elu", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention", "elu", "--features", 8], "'elu' has no number of features, got 8; leave --features out"),
        (["--attention", "favor+:num_features=4", "--features", 8], "say the same thing; leave one out"),
        (["--attention", "favour"], "unknown method 'favour'; did you mean"),
        (["--layers", "7"], "this model has 2 attentions, numbered from 0, got 7"),
        (["--layers", "decoder.*"], "unknown attention 'decoder.*'"),
        (["--task", "seq2seq"], "a model of type 'bert' is not for the task 'seq2seq'"),
        (["--task", "other"], "unknown task 'other'"),
        (["--length", 65], "length is 65, and"),
        (["--steps", 3], "need texts to learn from; give them by --distill"),
        (["--text", "nothing.txt"], "there is no file nothing.txt"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(model, tmp_path, options, message):
    code, said = invoke(model, tmp_path / "d", *options)
    assert code == 2
    assert message in said
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_neither_a_folder_nor_in_the_cache_ends_at_once_without_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    start = time.monotonic()
    code, said = invoke("nosuch/model", tmp_path / "d")
    assert time.monotonic() - start < 10  # the libraries alone would try for half a minute
    assert code == 2
    assert "there is no folder nosuch/model" in said
    assert "the hub cannot be asked (http://127.0.0.1:9: " in said
    assert "Retrying" not in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the hub cannot be asked (HF_HUB_OFFLINE is set)" in invoke("nosuch/model", tmp_path / "d")[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no text in it"), (b" \n\n", "has no text in it"), (b"word1\n\xff\n", "line 2: not UTF-8")],
)
def test_unfit_texts_are_named(model, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    for option in ("--text", "--distill"):
        code, said = invoke(model, tmp_path / "d", option, tmp_path / "a.txt")
        assert code == 2
        assert message in said
        assert "a.txt" in said
    assert not (tmp_path / "d").exists()


def test_too_few_texts_and_texts_of_another_world_are_named(model, tmp_path):
    (tmp_path / "a.txt").write_text("word1\n" * 3)
    with pytest.raises(ValueError, match="has 3 texts, of which 8 are left out to measure on"):
        converting.run(model, tmp_path / "d", Setting(distill=tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_text("qqq zzz\n")
    with pytest.raises(ValueError, match="knows nothing of these texts: 'qqq zzz'"):
        converting.run(model, tmp_path / "d", Setting(text=tmp_path / "b.txt"))


def test_a_method_that_learns_nothing_is_not_distilled(model, text, tmp_path):
    with pytest.raises(ValueError, match=r"'favor\+' has nothing to learn by attention transfer; give --tune"):
        converting.run(model, tmp_path / "d", Setting(attention="favor+", distill=text, steps=3))
    with pytest.raises(ValueError, match=r"'favor\+' learns nothing without --tune"):
        converting.run(model, tmp_path / "d", Setting(attention="favor+", distill=text))
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_model_is_named(model, text, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")
    (tmp_path / "untyped").mkdir()
    (tmp_path / "untyped" / "config.json").write_text("{}")
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "config.json").write_text((model / "config.json").read_text())
    cut = bare(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    other = bare(tmp_path / "other", model_type="never-heard-of")
    for source, message in (
        (
            tmp_path / "empty",
            "is not the folder of a model: it has neither config.json nor a .gguf file, found nothing",
        ),
        (tmp_path / "odd", "is not JSON"),
        (tmp_path / "untyped", "has no model_type"),
        (tmp_path / "light", "has a config.json but no weights"),
        (cut, "no model could be read from"),
        (other, "no model could be read from"),
        (tmp_path / "no" / "such" / "folder", "there is no folder"),
        (text, "is a file and not a .gguf; give the folder of a model"),
    ):
        code, said = invoke(source, tmp_path / "d")
        assert code == 2, said
        assert message in said
        assert not (tmp_path / "d").exists()


def test_a_converted_model_is_not_converted_again(model, tmp_path):
    converting.run(model, tmp_path / "once", Setting(features=4, samples=1))
    code, said = invoke(tmp_path / "once", tmp_path / "twice")
    assert code == 2
    assert "was converted already" in said


def test_pickled_weights_need_to_be_allowed(tmp_path):
    folder = bare(tmp_path / "old", weights="pickle", tokenizer=True)
    code, said = invoke(folder, tmp_path / "d")
    assert code == 2
    assert "are pickled (pytorch_model.bin)" in said
    assert "--allow-pickle" in said
    before = hashes(folder)
    code, said = invoke(folder, tmp_path / "d", "--allow-pickle", "--features", 4, "--samples", 1)
    assert code == 0, said
    assert hashes(folder) == before
    assert (tmp_path / "d" / "tokenizer.json").is_file()


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_never_runs_code(tmp_path, capsys):
    folder = bare(tmp_path / "evil", weights="pickle")
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no model could be read from"):
        load_source(folder, allow_pickle=True)
    assert "run" not in capsys.readouterr().out


def test_an_architecture_that_nobody_knows_is_told_by_its_weights(tmp_path):
    source = load_source(bare(tmp_path / "masked", architectures=["Mystery"]))
    assert type(source.model).__name__ == "BertForMaskedLM"
    assert source.task == "masked"
    save_tiny(tmp_path / "encoder", "BertModel")
    record = json.loads((tmp_path / "encoder" / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(record))
    source = load_source(tmp_path / "encoder")
    assert type(source.model).__name__ == "BertModel"
    assert source.remarks == ["its weights are those of BertModel, not of BertForMaskedLM"]
    with pytest.raises(ValueError, match=r"some would be random: BertForMaskedLM lacks cls\.predictions"):
        load_source(tmp_path / "encoder", task="masked")


def test_weights_that_are_missing_or_left_over_are_told(tmp_path):
    folder = bare(tmp_path / "some", weights="pickle")
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({**weights, "cls.species.weight": torch.ones(2)}, folder / "pytorch_model.bin")
    assert load_source(folder, allow_pickle=True).remarks == [
        "BertForMaskedLM does not use these weights: cls.species.weight"
    ]
    del weights["bert.encoder.layer.1.output.dense.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"BertForMaskedLM lacks bert\.encoder\.layer\.1\.output\.dense\.weight"):
        load_source(folder, allow_pickle=True)


def test_a_missing_tokenizer_is_named_only_where_texts_need_it(text, tmp_path):
    folder = bare(tmp_path / "mute")
    with pytest.raises(ValueError, match="has no tokenizer"):
        converting.run(folder, tmp_path / "d", Setting(text=text))
    found = converting.run(folder, tmp_path / "d", Setting(features=4, samples=2))
    assert "no texts were given" in found.remarks[-1]


def test_attention_that_is_not_covered_is_named(tmp_path):
    size = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.DebertaV2Model(transformers.DebertaV2Config(**size)).save_pretrained(tmp_path / "deberta")
    code, said = invoke(tmp_path / "deberta", tmp_path / "d")
    assert code == 2
    assert "has no attention" in said
    assert "nothing was converted" in said.lower()
    assert not (tmp_path / "d").exists()


def test_gguf_files_are_one_in_a_folder_and_need_their_package(tmp_path, monkeypatch):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"has 2 \.gguf files \(a\.gguf, b\.gguf"):
        load_source(tmp_path)
    (tmp_path / "b.gguf").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package gguf, which is not installed: pip install 'kernelformer"):
        load_source(tmp_path)


def test_targets_that_would_harm_something_are_refused(model, tmp_path):
    setting = Setting(features=4, samples=1)
    for target in (model, model / "inside", model.parent):
        with pytest.raises(ValueError, match="are within one another"):
            converting.run(model, target, setting, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="is there already; give another folder, or --force"):
        converting.run(model, tmp_path / "mine", setting)
    with pytest.raises(ValueError, match="is not a converted model, so that --force does not remove it"):
        converting.run(model, tmp_path / "mine", setting, force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_force_replaces_a_converted_model_and_a_failure_leaves_the_old_one(model, tmp_path, monkeypatch):
    target = tmp_path / "d"
    converting.run(model, target, Setting(attention="loglinear", features=4, samples=1))
    old = hashes(target)

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(converting, "write_text", fail)
        with pytest.raises(OSError, match="disk full"):
            converting.run(model, target, Setting(attention="loglinear", features=8, samples=1), force=True)
    assert hashes(target) == old
    converting.run(model, target, Setting(attention="loglinear", features=8, samples=1), force=True)
    assert load(target).conversion.layers[0].options == {"num_features": 8}
    assert [x.name for x in tmp_path.iterdir()] == ["d"]


def test_names_of_others_are_shown_and_not_obeyed(text, tmp_path):
    name = "<img src=x> [a](b) `c` ``` | *d*"
    folder = bare(tmp_path / name, tokenizer=True)
    target = tmp_path / "a```b"
    converting.run(folder, target, Setting(features=4, samples=1, text=text))
    card = (target / "README.md").read_text()
    assert "<img" not in card
    assert "[a](b)" not in card
    assert card.count("```") == 2  # one block of code, begun and ended
    assert conversion_report.plain("a_b|<c>") == "a\\_b\\|&lt;c&gt;"


def test_texts_come_around_in_another_order_and_resume_by_count(model):
    source = load_source(model)
    texts = [f"word{i}" for i in range(5)]

    def ids(count, **options):
        found = islice(TextRows(texts, source.tokenizer, 8, "encoder").batches(2, 3, **options), count)
        return [int(row[1]) for x in found for row in x["input_ids"]]

    first = ids(10)
    assert sorted(first[:5]) == sorted(first[5:10]) == sorted(first[10:15])
    assert len({tuple(first[i : i + 5]) for i in (0, 5, 10)}) > 1
    assert ids(6, skip=4) == first[8:]
    assert ids(10) == first


def test_rows_of_causal_models_are_packed_without_padding(model):
    tokenizer = load_source(model).tokenizer
    texts = [" ".join(WORDS[: 3 + i]) for i in range(6)]
    rows = next(TextRows(texts, tokenizer, 8, "causal").batches(3, 0))
    assert rows["input_ids"].shape == (3, 8)
    assert bool(rows["attention_mask"].all())
    assert not (rows["input_ids"] == tokenizer.pad_token_id).any()
    assert next(TextRows(["word1 word2"], tokenizer, 8, "causal").batches(1, 0))["input_ids"].shape == (1, 2)
    both = next(TextRows(texts, tokenizer, 8, "seq2seq").batches(3, 0, start=9))
    assert both["decoder_input_ids"][:, 0].tolist() == [9] * 3
    assert torch.equal(both["decoder_input_ids"][:, 1:], both["input_ids"][:, :-1])


def test_a_vocabulary_alone_makes_a_tokenizer(tmp_path):
    path = tmp_path / "vocab.txt"

    def pieces(vocabulary, text):
        path.write_text("\n".join([*SPECIAL, *vocabulary]))
        tokenizer = tokenizer_of_vocabulary(path)
        tokenizer.save_pretrained(tmp_path / "saved")
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        found = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == found
        return tokenizer.convert_ids_to_tokens(found)[1:-1]

    assert pieces("ACDEFGHIKLMNPQRSTVWY", "MKXV A") == ["M", "K", "[UNK]", "V", "A"]
    assert pieces(["C", "l", "Cl", "(", ")", "[NH3+]"], "CCl(C)[NH3+]") == ["C", "Cl", "(", "C", ")", "[NH3+]"]
    assert pieces(["run", "##s", "Film"], "runs Film") == ["run", "##s", "Film"]
    assert pieces(["run", "##s", "film"], "Runs Film") == ["run", "##s", "film"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\nA", r"has no sep_token \(\[SEP\] or <eos>\)"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nA\nA", "has 'A' in two lines"),
        (b"[PAD]\n\xff", "line 2: not UTF-8"),
    ],
)
def test_an_unfit_vocabulary_is_named(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tokenizer_of_vocabulary(tmp_path / "vocab.txt")


def test_lengths_are_those_that_the_model_has(model, text):
    source = load_source(model)
    assert check_length(source, None) == 64
    assert check_length(source, 12) == 12
    assert len(read_texts(text)) == 20
