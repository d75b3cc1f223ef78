"""Rows of files and hub data sets: formats, splits, shares, bad rows and their places."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest

from kernelformer.conversion.readers import each_text
from kernelformer_lab.data import sources
from kernelformer_lab.data.sources import Source, divide, label_value, number_value, text_value, uniform
from samples import write_rows
from sampling import SIGMAS

FIELDS = {"text": text_value, "label": label_value(2)}
LAYOUT = "'text' and 'label'"
ROWS = [{"text": f"text {i}", "label": i % 2} for i in range(40)]


def source(data, fields=FIELDS, **options):
    return Source(data, fields, layout=LAYOUT, **options)


def table(path, rows, **how):
    with path.open("w", newline="") as out:
        writer = csv.writer(out, **how)
        writer.writerows([list(rows[0]), *(list(x.values()) for x in rows)])
    return path


def numbers(rows):
    return [int(x.split()[1]) for x in rows["text"]]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The library of the hub, without a network and with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv"])
def test_the_three_formats_give_the_same_rows(tmp_path, kind):
    for split, rows in {"train": ROWS, "validation": ROWS[:3], "test": ROWS[5:9]}.items():
        path = tmp_path / f"{split}.{kind}"
        write_rows(path, rows) if kind == "jsonl" else table(path, rows, delimiter="," if kind == "csv" else "\t")
    (tmp_path / "README.md").write_text("not a split")
    found = source(tmp_path)
    assert found.rows("train") == {"text": [x["text"] for x in ROWS], "label": [x["label"] for x in ROWS]}
    assert numbers(found.rows("validation")) == [0, 1, 2]
    assert numbers(found.rows("test")) == [5, 6, 7, 8]
    assert found.remarks == []
    with pytest.raises(ValueError, match="unknown split 'valid'; did you mean 'validation'"):
        found.rows("valid")


def test_fields_of_csv_may_hold_quotes_and_line_ends_and_those_of_tsv_hold_quotes_as_they_are(tmp_path):
    texts = ['a "word", and more', "two\nlines", "two\r\nlines", "\ttab "]
    rows = [{"text": x, "label": 1} for x in texts]
    assert source(table(tmp_path / "train.csv", rows), test_share=0, validation_share=0).rows("train")["text"] == texts
    (tmp_path / "train.tsv").write_text('text\tlabel\n"open\t1\r\n\n"two" words"\t0\n')
    found = source(tmp_path / "train.tsv", test_share=0, validation_share=0).rows("train")
    assert found == {"text": ['"open', '"two" words"'], "label": [1, 0]}


def test_a_row_of_csv_is_named_by_the_line_where_it_begins(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"one\ntwo\nthree",0\n\n"four\nfive",7\n')
    with pytest.raises(ValueError, match=r"a\.csv, line 6: label must be an integer from 0 to 1, got '7'"):
        source(path).rows("train")


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_value_of_a_table_may_be_longer_than_the_standard_librarys_limit(tmp_path, kind):
    long = "x" * 140_000
    rows = [{"text": long, "label": 1}] * 2
    path = table(tmp_path / f"train.{kind}", rows, delimiter="," if kind == "csv" else "\t")
    assert source(path, test_share=0, validation_share=0).rows("train")["text"] == [long, long]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv"])
def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_rows(path, ROWS[:2]) if kind == "jsonl" else table(path, ROWS[:2], delimiter="," if kind == "csv" else "\t")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = source(path, validation_share=0, test_share=0).rows("train")
    assert numbers(found) == [0, 1]


@pytest.mark.parametrize("name", ["validation", "valid", "dev", "val"])
def test_a_validation_split_has_several_names(tmp_path, name):
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / f"{name}.jsonl", ROWS[:2])
    assert numbers(source(tmp_path).rows("validation")) == [0, 1]
    assert len(source(tmp_path).rows("train")["text"]) == 40


@pytest.mark.parametrize("second", ["train.csv", "training.jsonl"])
def test_two_files_for_one_split_are_refused(tmp_path, second):
    for name in ("train.jsonl", second, "test.jsonl"):
        write_rows(tmp_path / name, ROWS)
    names = " and ".join(sorted(["train.jsonl", second]))
    with pytest.raises(ValueError, match=re.escape(f"has {names}; keep one file for each split")):
        source(tmp_path).rows("test")


def test_a_folder_without_validation_gives_a_share_of_its_training_rows(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "test.jsonl", ROWS[:1])
    found = source(tmp_path, validation_share=0.25)
    train, validation = numbers(found.rows("train")), numbers(found.rows("validation"))
    assert sorted(train + validation) == list(range(40))
    assert train == sorted(train)
    assert validation
    assert numbers(found.rows("test")) == [0]


def test_one_file_is_divided_into_three(tmp_path):
    path = write_rows(tmp_path / "all.jsonl", ROWS)
    found = source(path, validation_share=0.2, test_share=0.3)
    parts = [numbers(found.rows(x)) for x in ("train", "validation", "test")]
    assert all(parts)
    assert sorted(x for part in parts for x in part) == list(range(40))
    other = source(path, validation_share=0.2, test_share=0.3, seed=1)
    assert numbers(other.rows("test")) != parts[2]


def test_rows_that_are_added_move_none_of_the_others(tmp_path):
    before = source(write_rows(tmp_path / "a.jsonl", ROWS[:30]), validation_share=0.3)
    after = source(write_rows(tmp_path / "b.jsonl", ROWS), validation_share=0.3)
    for split in ("train", "validation", "test"):
        assert numbers(before.rows(split)) == [x for x in numbers(after.rows(split)) if x < 30]


def test_shares_are_kept_and_neighbours_are_independent():
    count, shares = 20_000, {"validation": 0.1, "test": 0.2}
    found = divide(count, shares, seed=3)
    for split, share in shares.items():
        assert abs(len(found[split]) - share * count) < SIGMAS * (share * (1 - share) * count) ** 0.5
    both = np.isin(found["test"] + 1, found["test"]).mean()
    assert abs(both - 0.2) < SIGMAS * (0.2 * 0.8 / len(found["test"])) ** 0.5
    assert np.unique(uniform(np.arange(count), 0)).size == count


def test_a_file_is_read_once_for_both_of_its_splits(tmp_path, monkeypatch):
    read, calls = sources.read_file_rows, []
    monkeypatch.setattr(sources, "read_file_rows", lambda path: calls.append(path) or read(path))
    found = source(write_rows(tmp_path / "train.jsonl", ROWS))
    for _ in range(2):
        for split in ("validation", "train", "test"):
            assert found.rows(split) is found.rows(split)
    assert len(calls) == 1
    taken = found.take("train")
    assert found.rows("train") == taken
    assert found.rows("train") is not taken


BAD = [
    (b'{"text": "a", "label": }', r"not JSON \(Expecting value\)"),
    (b"[" * 100_000, r"not JSON \(too deep\)"),
    (b"[1, 2]", "not an object but list"),
    (b'{"text": "caf\xe9", "label": 1}', "not UTF-8: invalid continuation byte at byte 13 of the line"),
    (b'{"text": "\\ud83d", "label": 1}', r"text is not UTF-8: '\\ud83d' at character 0 is half of one"),
    (b'{"label": 1}', "it has no text, found label"),
    (b'{"text": " ", "label": 1}', "text must be a text that is not empty, got ' '"),
    (b'{"text": null, "label": 1}', "text must be a text that is not empty, got None"),
    (b'{"text": "a", "label": 2}', "label must be an integer from 0 to 1, got 2"),
    (b'{"text": "a", "label": -1}', "label must be an integer from 0 to 1, got -1"),
    (b'{"text": "a", "label": 0.5}', "label must be an integer from 0 to 1, got 0.5"),
    (b'{"text": "a", "label": true}', "label must be an integer from 0 to 1, got True"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_with_file_line_and_reason_or_left_out_and_counted(tmp_path, line, reason):
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], b"", line, *lines[4:], line]))
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 6: {reason}; mend it, or .*skip_bad=True"):
        source(path).rows("train")
    found = source(path, skip_bad=True, validation_share=0, test_share=0)
    assert numbers(found.rows("train")) == list(range(40))
    (remark,) = found.remarks
    assert re.fullmatch(rf"left out 2 of 42 rows of .*train\.jsonl as bad; the first: line 6: {reason}", remark)


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("a.csv", b"caf\xe9,1", "not UTF-8"),
        ("a.tsv", b"caf\xe9\t1", "not UTF-8: invalid continuation byte at byte 3 of the line"),
        ("a.csv", b"a,b,1", "it has 3 values, the head line has 2"),
        ("a.tsv", b"a", "it has 1 values, the head line has 2"),
        ("a.csv", b",", "text must be a text that is not empty, got ''"),
        ("a.csv", b",,", "it has 3 values, the head line has 2"),
        ("a.tsv", b"\t", "text must be a text that is not empty, got ''"),
        ("a.tsv", b"\t\t", "it has 3 values, the head line has 2"),
        ("a.csv", b'"a"b,1', r"not a row of a table \(',' expected after '\"'\)"),
        ("a.csv", b"a,x", "label must be an integer from 0 to 1, got 'x'"),
    ],
)
def test_bad_rows_of_tables_are_treated_the_same(tmp_path, name, line, reason):
    path = table(tmp_path / name, ROWS[:3], delimiter="," if name == "a.csv" else "\t")
    path.write_bytes(path.read_bytes() + line + b"\r\n" + path.read_bytes().splitlines()[1])
    with pytest.raises(ValueError, match=rf"line 5: ({reason}).*; mend it"):
        source(path).rows("train")
    found = source(path, skip_bad=True, validation_share=0, test_share=0)
    assert numbers(found.rows("train")) == [0, 1, 2, 0]
    assert re.search(rf"left out 1 of 5 rows .*: line 5: ({reason})", found.remarks[0])


def test_a_quote_that_is_never_closed_is_named_where_it_opens(tmp_path):
    path = tmp_path / "a.csv"
    for row, line in [('"bad,1\n', 3), ('"two\nlines","bad\n', 4), ('"a\r\nb\r\nc",1\n"d\n\n', 6), ('a,"', 3)]:
        path.write_text(f"text,label\ngood,1\n{row}" + "fine,0\n" * 50, newline="")
        for skip in (False, True):  # all rows after it would be left out, and counted as one
            with pytest.raises(ValueError, match=rf"a\.csv, line {line}: the quote that opens here is never closed"):
                source(path, skip_bad=skip).rows("train")


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_blank_lines_of_tables_are_skipped(tmp_path, kind):
    path = table(tmp_path / f"a.{kind}", ROWS[:3], delimiter="," if kind == "csv" else "\t")
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\r\n", b"\r\n\r\n\n"))
    found = source(path, validation_share=0, test_share=0)
    assert numbers(found.rows("train")) == [0, 1, 2]
    assert not found.remarks


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"review": "x", "label": 1}\n', "has no column 'text', found review, label; a row must have"),
        ("a.csv", b"review,stars\nx,1\n", "has no column 'text' and no 'label', found review, stars; a row must have"),
        ("a.tsv", b"x" * 5000 + b"\t1\nb\t1\n", "has no column 'text' and no 'label', found x{30}..., 1; a row"),
        ("a.csv", b"text,label,text\nx,1,y\n", r"a\.csv, line 1: two columns have one name: text, label, text"),
        ("a.csv", b"te\xfft,label\nx,1\n", r"a\.csv, line 1: not UTF-8; the first line must name the columns"),
    ],
)
def test_columns_that_do_not_fit_are_named_whatever_happens_to_bad_rows(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for skip in (False, True):
        with pytest.raises(ValueError, match=message):
            source(tmp_path / name, skip_bad=skip).rows("train")


def test_a_long_bad_value_does_not_fill_the_message(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [ROWS[0], {"text": "a", "label": "word " * 1000}])
    with pytest.raises(ValueError, match=r"got 'word word .*\.\.\. \(5,002 characters\); mend it") as problem:
        source(path).rows("train")
    assert len(str(problem.value)) < 400


def test_labels_may_be_names_or_numbers_and_names_win():
    check = label_value(["no", "yes"])
    assert [check(x) for x in ("no", "yes", 0, 1, "1", "1.0", 1.0)] == [0, 1, 0, 1, 1, 1, 1]
    for wrong in ("maybe", 2, "No", None, True, 0.5, "0.5", "1e0", float("nan")):
        with pytest.raises(
            ValueError, match=re.escape(f"must be one of no, yes or an integer from 0 to 1, got {wrong!r}")
        ):
            check(wrong)
    for wrong in (["a", "a"], ["a", 1], ["", "b"], []):
        with pytest.raises(ValueError, match="different names"):
            label_value(wrong)
    for wrong in (0, "two", 2.0):
        with pytest.raises(ValueError, match="labels must be an integer of at least 1"):
            label_value(wrong)


def test_where_a_name_is_a_number_labels_are_names_alone():
    check = label_value(["1", "2"])
    assert [check(x) for x in (1, "1", 2, "2", 1.0, "2.0")] == [0, 0, 1, 1, 0, 1]
    for wrong in (0, "0", 3, True, 1.5, None):  # 0 must not be the first: 1 is
        with pytest.raises(ValueError, match=re.escape(f"must be one of 1, 2, got {wrong!r}")):
            check(wrong)
    mixed = label_value(["none", "1"])
    assert [mixed(x) for x in ("none", 1)] == [0, 1]
    with pytest.raises(ValueError, match="must be one of none, 1, got 0"):
        mixed(0)


def test_numbers_are_finite():
    assert [number_value(x) for x in (2, "2.5", 1e3)] == [2.0, 2.5, 1000.0]
    for wrong in ("nan", "inf", "x", None, True, float("inf")):
        with pytest.raises(ValueError, match="must be a finite number, got"):
            number_value(wrong)


def test_empty_splits_say_how_many_rows_there_are_and_what_to_do(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ROWS[:2])
    with pytest.raises(
        ValueError,
        match=r"the validation split of .* is empty: 2 good rows in all; add rows, or give a "
        r"larger validation_share than 0.0",
    ):
        source(path, validation_share=0).rows("validation")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "train.jsonl", ROWS)
    (folder / "test.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"the test split of .*folder is empty: 0 good rows in all; add rows\.$"):
        source(folder).rows("test")
    (folder / "test.jsonl").write_text("{\n[\n")
    with pytest.raises(ValueError, match=r"is empty: 0 good rows in all \(left out 2 of 2 rows .*line 1: not JSON"):
        source(folder, skip_bad=True).rows("test")
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"folder has no test split, found train; add one, or evaluate another"):
        source(folder).rows("test")


def test_missing_data_is_refused_as_late_as_possible_and_a_wrong_place_at_once(tmp_path):
    nothing = source(None)
    for read in (lambda: nothing.rows("train"), nothing.fingerprint):
        with pytest.raises(ValueError, match=r"this task needs data, got None; give .* with 'text' and 'label'"):
            read()
    with pytest.raises(ValueError, match=r"there is no file or folder .*nothing; data must be one with 'text'"):
        source(tmp_path / "nothing")
    with pytest.raises(ValueError, match="said as hub:stanfordnlp/imdb"):
        source("stanfordnlp/imdb")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"a\.parquet must end in \.jsonl, \.csv, \.tsv, got '\.parquet'"):
        source(tmp_path / "a.parquet").rows("train")
    with pytest.raises(ValueError, match=r"has no train\.jsonl\|\.csv\|\.tsv, found a\.parquet; it must hold"):
        source(tmp_path).rows("train")
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"train\.jsonl cannot be read: Is a directory; give a readable file"):
        source(tmp_path).rows("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_bad": "yes"}, "skip_bad must be True or False, got 'yes'"),
        ({"validation_share": 0.5, "test_share": 0.5}, "must leave something to train on, got 0.5 and 0.5"),
        ({"test_share": -0.1}, "test_share must be a finite number of at least 0, got -0.1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        source(None, **options)


def test_a_fingerprint_tells_contents_and_names_apart(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    folder, file = source(tmp_path).fingerprint(), source(path).fingerprint()
    assert folder == file == source(tmp_path, seed=3).fingerprint()
    assert re.fullmatch(rf"train\.jsonl: 1 files, {path.stat().st_size} bytes, blake2b \w{{32}}", file)
    (tmp_path / "notes.txt").write_text("no split")
    assert source(tmp_path).fingerprint() == folder
    path.rename(tmp_path / "test.jsonl")
    moved = source(tmp_path).fingerprint()
    write_rows(tmp_path / "test.jsonl", [*ROWS[:-1], {"text": "text 39", "label": 0}])
    assert len({folder, moved, source(tmp_path).fingerprint()}) == 3


def test_a_local_folder_in_the_layout_of_the_hub_is_read_by_its_library(tmp_path, hub):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train.jsonl", [x | {"more": "unused"} for x in ROWS])
    write_rows(folder / "test.jsonl", [x | {"more": "unused"} for x in [*ROWS[:2], {"text": "text 7", "label": 5}]])
    found = source(f"hub:{folder}", validation_share=0.3)
    assert sorted(numbers(found.rows("train")) + numbers(found.rows("validation"))) == list(range(40))
    assert numbers(found.rows("train")) == numbers(source(folder, validation_share=0.3).rows("train"))
    assert found.rows("train").keys() == {"text", "label"}
    with pytest.raises(ValueError, match=r"hub:.*data, row 2: label must be an integer from 0 to 1, got 5; mend it"):
        found.rows("test")
    skipping = source(f"hub:{folder}", skip_bad=True)
    assert numbers(skipping.rows("test")) == [0, 1]
    assert "left out 1 of 3 rows" in skipping.remarks[0]
    with pytest.raises(ValueError, match=r"has no column 'review', found text, label, more; a row must have"):
        source(f"hub:{folder}", {"review": text_value}).rows("train")
    assert re.fullmatch(r"hub:.*data: test 3 \w+, train 40 \w+", found.fingerprint())
    assert source(f"hub:{folder}").fingerprint() == found.fingerprint()


def test_data_sets_that_the_hub_does_not_have_are_named(hub):
    with pytest.raises(ValueError, match=r"hub:nobody/nothing cannot be read by datasets: .*check the name and the"):
        source("hub:nobody/nothing").rows("train")
    with pytest.raises(ValueError, match=r"said as hub:OWNER/NAME or hub:OWNER/NAME:SUBSET, got 'hub:a/b/c'"):
        source("hub:a/b/c")


def test_plain_texts_are_one_a_line_and_bad_ones_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n two\n")
    assert list(each_text(tmp_path / "a.txt")) == ["one", " two"]
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt, line 2: not UTF-8: invalid start byte at byte 0 of the line"):
        list(each_text(tmp_path / "a.txt"))


@pytest.mark.parametrize(("sign", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_csv_with_another_separator_gets_a_hint(tmp_path, sign, word):
    path = tmp_path / "a.csv"
    hint = f"its values seem to be separated by {word}: write commas into a .csv"
    for row in ("good,1", "good, and long"):  # as one value, or as more than the head line has
        path.write_text(f"text{sign}label\n{row.replace(',1', sign + '1')}\n")
        with pytest.raises(ValueError, match=re.escape(hint)):
            source(path).rows("train")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has no column 'text'") as problem:
        source(path).rows("train")
    assert "separated" not in str(problem.value)
