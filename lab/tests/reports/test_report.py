"""Reports of comparisons: run folders are read strictly, numbers are right, and nothing from outside becomes markup."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from kernelformer import files
from kernelformer.formatting import human_bytes, human_time, visible
from kernelformer_lab.reports.comparison import (
    NONE,
    Comparison,
    cells,
    comparison_table,
    draw_curves,
    read_run,
    words,
    write_report,
)
from page_checks import check_page

HOSTILE = (
    "<script>alert(1)</script>",
    'a"b&c',
    "$\\frac$ _x\x1b[31m",
    "</style><img src=x onerror=alert(1)>",
    "日本:語",
)
VOID = {"meta", "link", "wbr", "br"}
METRIC = "bits_per_byte"


def curve(value, *, steps=200, start=5.0, diverges=None):
    lines = []
    for step in range(10, steps + 1, 10):
        at = {"step": step, "seconds": step * 0.1, "tokens": step * 64}
        now = value + start * math.exp(-step / 30)
        loss = math.nan if diverges is not None and step >= diverges else now
        lines.append({**at, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0})
        if step % 50 == 0:
            lines.append({**at, "eval_loss": loss, f"eval_{METRIC}": loss})
    return lines


def make_run(root, label, seed, *, value=2.0, result=True, lines=None, named=True, settings=None, **changes):
    """A folder as training leaves it; labels that are no file names stand in the settings."""
    folder = root / f"{label}-seed{seed}" if named else root / f"run{len(list(root.iterdir()))}"
    folder.mkdir(parents=True)
    run = {"task": "bytes", "model": {"hidden_size": 64}, "attention": label, **(settings or {})}
    if not named:
        run |= {"label": label, "seed": seed}
    head = {"run": run, "environment": {"torch": "2.13"}, "command": f"train --attention '{label}' --seed {seed}"}
    (folder / "run.json").write_text(json.dumps(head))
    text = "".join(json.dumps(line) + "\n" for line in (curve(value) if lines is None else lines))
    (folder / "metrics.jsonl").write_text(text)
    if result:
        end = {"metric": METRIC, "value": value, "tokens_per_second": 1000.0, "peak_bytes": 2**20, "parameters": 1000}
        end |= {"seconds": 20.0, "steps": 200, "decode": None, **changes}
        (folder / "result.json").write_text(json.dumps(end))
    return folder


def compare(*folders, higher=False, title="A comparison", about="Of fake runs."):
    return Comparison(title, METRIC, higher, about, [read_run(folder) for folder in folders])


class Page(HTMLParser):
    """Checks nesting, and keeps what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.attributes, self.tables, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.stack == []
        self.tables = [[[cell.strip() for cell in row] for row in rows] for rows in self.tables]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), attrs
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        assert self.stack.pop() == tag

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if "style" not in self.stack:
            self.text += data
        if "td" in self.stack or "th" in self.stack:
            self.tables[-1][-1][-1] += data


def written(comparison, tmp_path, **options):
    path = tmp_path / "report.html"
    write_report(comparison, path, **options)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture
def three(tmp_path):
    """Two labels with three seeds, one with one; numbers that differ."""
    root = tmp_path / "runs"
    rng = np.random.default_rng(0)
    folders = {}
    for label, seeds in (("favor+:num_features=8", 3), ("softmax", 3), ("elu", 1)):
        for seed in range(seeds):
            spec = {
                "value": 2 + 0.1 * len(folders) + 0.01 * float(rng.standard_normal()),
                "tokens_per_second": float(rng.uniform(1e3, 9e3)),
                "peak_bytes": int(rng.integers(2**24, 2**28)),
                "parameters": 12345 + len(label),
                "seconds": float(rng.uniform(30, 500)),
                "decode": [[2**k, float(rng.uniform(1e-3, 1e-2)), 1000 * k] for k in (7, 4, 10)],
            }
            folders[make_run(root, label, seed, **spec)] = (label, spec)
    return folders


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(make_run(tmp_path, "favor+:num_features=8", 3, value=1.5, decode=[[256, 2e-3, 10], [128, 1e-3, 9]]))
    assert (run.label, run.seed, run.state, run.step) == ("favor+:num_features=8", 3, "finished", 200)
    assert run.settings["model"] == {"hidden_size": 64}
    assert run.environment == {"torch": "2.13"}
    assert run.command == "train --attention 'favor+:num_features=8' --seed 3"
    assert [p.step for p in run.training] == list(range(10, 201, 10))
    assert [p.step for p in run.evaluation] == [50, 100, 150, 200]
    assert run.training[0].values["learning_rate"] == 1e-3
    assert run.evaluation[-1].values == pytest.approx({"loss": 1.5, METRIC: 1.5}, abs=0.01)
    assert run.result.decode == ((128, 1e-3, 9), (256, 2e-3, 10))
    other = read_run(make_run(tmp_path, "a/b", 7, named=False))
    assert (other.label, other.seed) == ("a/b", 7)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", None, r"run\.json is missing; the folder of a run has"),
        ("metrics.jsonl", None, r"metrics\.jsonl is missing"),
        ("run.json", "{", r"run\.json: not JSON: .*line 1 column 2.*; put it right, or train anew in another folder"),
        ("run.json", "[]", r"run\.json: not a JSON object but \[\]"),
        ("run.json", '{"run": {}, "command": ""}', "'environment' must be of type dict, got None"),
        ("run.json", '{"run": {"seed": "x"}, "environment": {}, "command": ""}', "seed must be an integer, got 'x'"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2', r"metrics\.jsonl, line 1: not JSON: Expecting.*; remove that line"),
        ("metrics.jsonl", '\n{"step": 1\n', r"metrics\.jsonl, line 2: not JSON"),
        ("metrics.jsonl", "3\n", "line 1: not a JSON object but 3"),
        ("metrics.jsonl", b'{"step": "\xff"}\n', r"line 1: not JSON: 'utf-8' codec"),
        ("metrics.jsonl", '{"seconds": 1}\n', "line 1: step must be an integer of at least 0, got None"),
        ("metrics.jsonl", '{"step": 1, "seconds": NaN, "tokens": 1}\n', "line 1: seconds must be a finite number"),
        ("metrics.jsonl", '{"step": 1, "seconds": 1, "tokens": 1}\n', "line 1: neither 'loss' .* nor 'eval_loss'"),
        ("metrics.jsonl", '{"step": 1, "seconds": 1, "tokens": 1, "loss": null}\n', "line 1: loss must be a number"),
        ("result.json", "{}", "result.json: 'metric' must be of type str, got None; remove the file, and resuming"),
        ("result.json", '{"metric": "m", "decode": [[1, 2]]}', r"decode must be null or rows of context"),
        ("result.json", '{"metric": "m", "value": true}', "value must be a number"),
        ("result.json", '{"metric": "m", "value": 1, "tokens_per_second": -1}', "tokens_per_second must be a finite"),
    ],
)
def test_a_broken_folder_says_where_and_why(tmp_path, file, content, message):
    folder = make_run(tmp_path, "x", 0)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_label_and_seed_must_come_from_somewhere(tmp_path):
    folder = make_run(tmp_path, "x", 0).rename(tmp_path / "plain")
    with pytest.raises(ValueError, match="got None and None; give both in the settings, or name the folder"):
        read_run(folder)


@pytest.mark.parametrize(
    "tail", ['{"step": 210, "sec', '{"step": 210, "x": "\u00e4'.encode()[:-1].decode("latin-1"), ""]
)
def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path, tail):
    folder = make_run(tmp_path, "x", 0, result=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(tail.encode("latin-1"))
    run = read_run(folder)
    assert (run.step, run.state) == (200, "unfinished")


def test_a_whole_last_line_counts_without_its_line_break(tmp_path):
    folder = make_run(tmp_path, "x", 0, lines=[])
    (folder / "metrics.jsonl").write_text('{"step": 5, "seconds": 1, "tokens": 1, "loss": 2}')
    assert read_run(folder).step == 5


def test_a_resumed_run_counts_its_later_lines(tmp_path):
    first, second = curve(3.0, steps=150), curve(2.0)
    again = read_run(make_run(tmp_path, "x", 0, lines=first + [line for line in second if line["step"] > 100]))
    assert [p.step for p in again.training] == list(range(10, 201, 10))
    assert [p.step for p in again.evaluation] == [50, 100, 150, 200]
    assert [p.values["loss"] > 3 for p in again.evaluation] == [True, True, False, False]
    back = read_run(make_run(tmp_path, "y", 0, lines=first + [line for line in second if 100 < line["step"] < 120]))
    assert (back.step, back.evaluation[-1].step) == (110, 100)


def test_a_run_diverges_by_a_loss_or_by_its_result(tmp_path):
    assert read_run(make_run(tmp_path, "a", 0, lines=curve(2.0, diverges=100), result=False)).state == "diverged"
    assert read_run(make_run(tmp_path, "b", 0, value=math.inf, lines=curve(2.0))).state == "diverged"
    assert read_run(make_run(tmp_path, "c", 0)).state == "finished"


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        compare()
    one, same = make_run(tmp_path, "a", 0), make_run(tmp_path, "a", 0, named=False)
    with pytest.raises(ValueError, match="are both seed 0 of 'a'; keep one"):
        compare(one, same)
    with pytest.raises(ValueError, match="are both seed 0 of 'a'"):
        compare(one, one)
    with pytest.raises(ValueError, match="was measured by 'accuracy', the comparison is by 'bits_per_byte'"):
        compare(one, make_run(tmp_path, "b", 0, metric="accuracy"))


def test_numbers_are_those_of_the_runs_in_the_report_and_in_the_terminal(three, tmp_path):
    comparison = compare(*three)
    _, page = written(comparison, tmp_path)
    head, *rows = page.tables[0]
    assert head[:2] == ["label", "bits per byte (lower is better)"]
    for label, final, speed, memory, parameters, seconds, decode in rows:
        specs = [spec for name, spec in three.values() if name == label]
        values, speeds, peaks, times = (
            np.array([spec[key] for spec in specs]) for key in ("value", "tokens_per_second", "peak_bytes", "seconds")
        )
        numbers = [float(x) for x in re.findall(r"\d+\.\d+", final)]
        spread = [np.std(values, ddof=1)] if len(specs) > 1 else []  # one seed has none
        assert numbers == pytest.approx([np.mean(values), *spread], abs=5.1e-4)
        assert final.endswith(f"(n={len(specs)})")
        assert speed == f"{np.median(speeds):,.0f}"
        assert parameters == f"{12345 + len(label):,}"
        assert float(memory.removesuffix(" MiB")) == pytest.approx(peaks.max() / 2**20, rel=5.1e-3)
        assert float(seconds.removesuffix(" s")) == pytest.approx(np.median(times), rel=5.1e-3)
        longest = np.median([max(spec["decode"])[1] for spec in specs])
        assert float(decode.removesuffix(" ms at 1,024")) == pytest.approx(1e3 * longest, rel=5.1e-3)
    means = [float(row[1].split()[0]) for row in rows]
    assert means == sorted(means)
    assert len(rows) == 3
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_table(comparison))
    shown = [re.split(r"\s{2,}", line.strip()) for line in out.getvalue().splitlines()]
    assert all(row in shown for row in rows)


def test_test_scores_errors_and_gradients_are_shown_where_there_are_some(tmp_path):
    norms = {"median": 0.5, "p95": 2.0, "max": 40.0}
    more = {"value_error": 0.04, "test": {METRIC: 2.5}, "test_error": 0.03, "grad_norm": norms, "best_step": 150}
    new = make_run(tmp_path, "elu", 0, value=2.25, **more)
    old = make_run(tmp_path, "softmax", 0, value=3.0)
    comparison = compare(new, old)
    head, lines = cells(comparison)
    assert head[1:4] == ["bits per byte (lower is better)", "test bits per byte", "tokens/s"]
    assert [line[1:3] for line in lines] == [["2.250 (n=1)", "2.500"], ["3.000 (n=1)", NONE]]
    _, page = written(comparison, tmp_path)
    shown = next(rows for rows in page.tables if rows[0][:3] == ["run", "seed", "state"])
    assert [row[3:6] for row in shown[1:]] == [["2.25 ± 0.04", "2.5 ± 0.03", "0.5, 2, 40"], ["3", NONE, NONE]]
    assert len(comparison_table(comparison).columns) == len(head)
    assert "test bits per byte" not in cells(compare(old))[0]


def test_the_order_follows_the_sense_of_the_metric(three):
    up, down = ([row.label for row in compare(*three, higher=higher).summary()] for higher in (True, False))
    assert up == down[::-1]
    assert cells(compare(*three, higher=True))[0][1] == "bits per byte (higher is better)"


def test_what_came_out_is_said_in_words(tmp_path):
    def said(*values, **options):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        folders = [
            make_run(root, name, seed, value=value, **options)
            for name, some in zip("abc", values, strict=False)
            for seed, value in enumerate(some)
        ]
        return " ".join(words(compare(*folders)))

    text = said((2.0, 2.1), (1.0, 1.1))
    assert "Best is b (bits per byte 1.050 ± 0.071), ahead of a (2.050 ± 0.071) by 1, which is beyond the" in text
    assert "within the spread over seeds (0.3): the two cannot be told apart" in said((2.0, 2.3), (2.1, 2.4))
    assert "ahead of a (2.000) by 0.9; with one seed there is no spread" in said((2.0,), (1.0, 1.2), (3.0,))
    assert "Best are a and b, level at bits per byte 2.000." in said((2.0,), (2.0,))
    assert "a (bits per byte 2.000) is the only one with a value." in said((2.0,))
    text = said((2.0,), (math.nan,))
    assert "is the only one with a value" in text
    assert "Diverged (a loss was not finite): b (seed 0, step 200)." in text


def test_the_fastest_are_named_with_their_lead(tmp_path):
    decode = [[128, 1e-3, 4096], [256, 2e-3, 4096]]
    slow = make_run(tmp_path, "a", 0, tokens_per_second=500.0, decode=[[128, 3e-3, 9], [512, 1e-9, 9]])
    text = " ".join(words(compare(slow, make_run(tmp_path, "b", 0, tokens_per_second=1500.0, decode=decode))))
    assert "Fastest in training is b with 1,500 tokens/s, 3 times a, the slowest." in text
    assert (
        "With a context of 128 tokens b decodes fastest: 1 ms a token, 4 KiB of state; a takes 3 times as long." in text
    )


def environment(folder, resumed=(), **here):
    """The same run, made under these conditions."""
    head = json.loads((folder / "run.json").read_text())
    head["environment"] |= here
    head["resumed"] = [{"step": 100, "environment": {**head["environment"], **x}} for x in resumed]
    (folder / "run.json").write_text(json.dumps(head))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 1}, "threads 2 (a) and 1 (b)"),
        ({"processor": "Another"}, "processor One (a) and Another (b)"),
        ({"resumed": [{"threads": 1}]}, "threads 2 (a, b) and 1 (b)"),
        ({"threads": 1, "torch": "3"}, "threads 2 (a) and 1 (b); torch 2.13 (a) and 3 (b)"),
    ],
)
def test_speeds_under_different_conditions_are_marked_with_the_reason_and_not_compared(changes, reason, tmp_path):
    decode = [[128, 0.001, 64]]
    one = environment(make_run(tmp_path, "a", 0, decode=decode), threads=2, processor="One")
    two = make_run(tmp_path, "b", 0, tokens_per_second=4000.0, decode=decode)
    comparison = compare(one, environment(two, **{"threads": 2, "processor": "One", **changes}))
    said = f"Not comparable, since measured under different conditions: {reason}."
    head, lines = cells(comparison)
    for name, shown in zip(head, lines[0], strict=True):
        assert ("*" in shown) == (name in ("tokens/s", "peak memory", "training", "decoding a token")), name
    out = io.StringIO()
    Console(file=out, width=400).print(comparison_table(comparison))
    assert f"* {said}" in " ".join(out.getvalue().split())
    told = " ".join(words(comparison))
    assert reason in told
    assert "times" not in told
    assert "fastest" not in told.lower()
    _, page = written(comparison, tmp_path)
    assert said in page.text
    assert "Training speed, tokens/s * (not comparable)" in page.text


def test_speeds_under_the_same_conditions_are_compared_also_after_a_resume(tmp_path):
    one = environment(make_run(tmp_path, "a", 0), threads=2)
    two = environment(make_run(tmp_path, "b", 0, tokens_per_second=4000.0), threads=2, resumed=[{"date": "later"}])
    old = make_run(tmp_path, "c", 0)  # an older record that does not tell its threads
    comparison = compare(one, two, old)
    assert comparison.unequal == ""
    assert "4 times" in " ".join(words(comparison))
    assert not any("*" in x for line in cells(comparison)[1] for x in line)


def test_diverged_and_unfinished_runs_stand_beside_the_others(tmp_path):
    runs = tmp_path / "runs"
    comparison = compare(
        make_run(runs, "good", 0, value=2.0),
        make_run(runs, "good", 1, value=9.0, result=False, lines=curve(9.0, steps=100)),
        make_run(runs, "lost", 0, lines=curve(1.0, diverges=100), value=math.nan),
        make_run(runs, "open", 0, lines=curve(1.0, steps=60), result=False),
        make_run(runs, "empty", 0, lines=[], result=False),
    )
    _, page = written(comparison, tmp_path)
    rows = [row[:3] for row in page.tables[0][1:]]
    assert rows == [
        ["good1 of 2 unfinished (step 100)", "2.000 (n=1)", "1,000"],
        ["lost1 of 1 diverged (step 200)", NONE, "1,000"],  # it ran to the end, so its speed is known
        ["open1 of 1 unfinished (step 60)", NONE, NONE],
        ["empty1 of 1 unfinished (step 0)", NONE, NONE],
    ]
    states = [row[2] for row in page.tables[1][1:]]
    assert states == ["finished", "unfinished", "diverged", "unfinished", "unfinished"]


def test_the_head_of_a_page_leaves_out_what_the_task_says_of_its_data(tmp_path):
    about = "modelling of bytes; Python's own sources by default"
    _, page = written(compare(make_run(tmp_path / "runs", "a", 0), about=about), tmp_path)
    assert "modelling of bytes" in page.text
    assert "own sources" not in page.text


def test_steps_are_whole_on_their_axis(tmp_path):
    from matplotlib.figure import Figure

    comparison = compare(make_run(tmp_path / "runs", "a", 0))
    axis = Figure(figsize=(4.6, 3)).subplots()
    draw_curves(axis, comparison, {0: {18: (1.0, 3.0), 19: (2.0, 2.5), 20: (3.0, 2.0)}}, 0, True)
    assert all(x.is_integer() for x in axis.get_xticks().tolist())


@pytest.mark.parametrize("lines", [[], None])
def test_a_comparison_without_results_still_makes_a_page(tmp_path, lines):
    _, page = written(compare(make_run(tmp_path / "runs", "a", 0, result=False, lines=lines)), tmp_path)
    assert "No run has finished with a finite bits per byte" in page.text
    assert ("Learning curves" in page.text) == (lines is None)
    assert "Speed and memory" not in page.text
    assert "Decoding" not in page.text


def test_decoding_is_shown_only_if_somebody_did(three, tmp_path):
    _, page = written(compare(*three), tmp_path)
    assert "Decoding" in page.text
    plain = compare(make_run(tmp_path / "more", "a", 0), make_run(tmp_path / "more", "b", 0))
    _, page = written(plain, tmp_path)
    assert "Decoding" not in page.text
    assert "decoding a token" not in page.text


@pytest.fixture
def hostile(tmp_path):
    folders = []
    for index, label in enumerate(HOSTILE):
        settings = {"note": label, label: {label: [label]}}
        decode = [[2**k, 1e-3 * (k + index), 2**k] for k in (5, 8)]
        where = tmp_path / "runs"
        where.mkdir(exist_ok=True)
        folders += [
            make_run(where, label, seed, named=False, settings=settings, value=2.0 + seed / 10 + index, decode=decode)
            for seed in range(2)
        ]
    lost = make_run(tmp_path / "runs", "<b>lost", 0, named=False, lines=curve(1.0, diverges=100), result=False)
    return compare(*folders, lost, title="<title>&\"'", about="<i>\x00about</i>")


def test_nothing_from_outside_becomes_markup(hostile, tmp_path):
    text, page = written(hostile, tmp_path, samples={"<u>name": "<script>\x07\u202e\ttab\nline</script>\ud800"})
    assert not {"script", "img", "i", "b", "u", "iframe", "object", "foreignobject", "image"} & set(page.tags)
    assert page.tags.count("style") == page.tags.count("title") == 1
    assert not [x for x in page.attributes if x[1].startswith("on") or "javascript:" in x[2]]
    assert "<script" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    for label in HOSTILE:
        assert page.text.count(visible(label)) > 4, label
    assert "<script><U+0007><U+202E>\ttab\nline</script><U+D800>" in page.text
    assert "<i><U+0000>about</i>" in page.text
    check_page(text, hostile="<script")


def test_the_page_asks_for_nothing_from_outside(hostile, tmp_path):
    text, page = written(hostile, tmp_path)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    policy = next(value for tag, name, value in page.attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "script-src" not in policy
    for tag, name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#") or (tag, value) == ("link", "data:,")


def test_figures_do_not_share_references(hostile, tmp_path):
    text, page = written(hostile, tmp_path)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")}
    assert used | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert "metadata" not in page.tags
    assert [value for tag, name, value in page.attributes if (tag, name) == ("html", "lang")] == ["en"]
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(pictures) == page.tags.count("figure") == 8
    assert all(pictures)


def test_the_same_runs_give_the_same_bytes(hostile, tmp_path):
    assert written(hostile, tmp_path)[0] == written(hostile, tmp_path)[0]


def test_a_label_keeps_its_colour_and_no_two_look_alike(tmp_path):
    runs = [make_run(tmp_path / "runs", f"m{i:02}", 0, value=2.0 - i, decode=[[64, 1e-3, 64]]) for i in range(12)]
    text, _ = written(compare(*runs), tmp_path)
    looks = {}
    for key, label in re.findall(r'(<svg[^>]*class="key".*?</svg>)(m\d\d)', text, re.DOTALL):
        colours, marker = (
            set(re.findall('#[0-9a-f]{6}(?=[;"])', key)),
            re.findall(r'<path id="[^"]*-m\w+" d="([^"]*)"', key),
        )
        looks.setdefault(label, set()).add((tuple(sorted(colours)), *marker))
    assert len(looks) == 12
    assert all(len(look) == 1 for look in looks.values())  # in the table and in both legends
    assert len(set.union(*looks.values())) == 12


def test_common_settings_stand_once_and_others_by_label(three, tmp_path):
    _, page = written(compare(*three), tmp_path)
    cells_ = [row for rows in page.tables for row in rows]
    assert ["model.hidden_size", "64"] in cells_
    assert ["attention", "favor+:num_features=8", "softmax", "elu"] in cells_
    assert "train --attention 'softmax' --seed 2" in page.text


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    comparison = compare(make_run(tmp_path / "runs", "a", 0))
    path = tmp_path / "new" / "report.html"
    write_report(comparison, path)
    before = path.read_text()
    assert os.listdir(path.parent) == ["report.html"]

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_report(comparison, path, samples={"a": "text"})
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["report.html"]
    with pytest.raises(ValueError, match=r"must be a file, got the folder .*; add a name"):
        write_report(comparison, path.parent)


def test_values_are_shown_with_units():
    assert [*map(human_time, (3e-6, 0.0125, 1.5, 599, 36000))] == ["3 µs", "12.5 ms", "1.5 s", "599 s", "10 h"]
    assert [*map(human_bytes, (0, 999, 2**20, 1.5 * 2**30))] == ["0 B", "999 B", "1 MiB", "1.5 GiB"]
    assert visible("a\tb\x9b\u2028\ufffe\n", keep="\n") == "a<U+0009>b<U+009B><U+2028><U+FFFE>\n"


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("KERNELFORMER_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def test_a_browser_opens_the_report_without_complaint(hostile, tmp_path):
    found = browser()
    if found is None:
        pytest.skip("no Chromium; install one, or name it in KERNELFORMER_CHROMIUM")
    path = tmp_path / "report.html"
    write_report(hostile, path, samples={"<u>": "</pre><script>console.error(1)</script>"})
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    run = subprocess.run([found, *options], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in run.stderr, run.stderr
    assert "<script" not in run.stdout
    assert run.stdout.count("<figure>") == 8
    for title in ("Results", "Learning curves", "Speed and memory", "Decoding", "Samples", "Commands to reproduce"):
        assert f"<h2>{title}</h2>" in run.stdout
