"""Tables of pages are what the records give, and records say how they were made."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from kernelformer.settings import split_names
from kernelformer_lab.evidence.ledger import OUTSIDE
from kernelformer_lab.reports.results import read_results, results_page
from pages import choice, conversion, methods, scale, speed, studies, training  # noqa: F401  # each adds tables
from pages.records import (
    ABSENT,
    BEGIN,
    END,
    TABLES,
    Records,
    fill_pages,
    filled,
    grid,
    joined,
    spread,
    times,
    write_tables,
)

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
COMPARISONS = RESULTS / "comparisons"
ACIDS = "performer/amino-acids.json"


def bench_row(name, seconds, *, task="bidirectional", length=1024, backward=False, peak=None, note=""):
    case = {"task": task, "length": length, "backward": backward}
    return {"name": name, "case": case, "seconds": {"default": seconds}, "peak": peak, "results": 2**20, "note": note}


def test_every_table_of_the_pages_is_the_one_that_the_records_give():
    texts = fill_pages(RESULTS)
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
    assert not stale, "write them by `make tables`"


def test_the_short_table_and_the_long_one_begin_with_the_same_cosine():
    tables = [table(Records(RESULTS)) for table in (choice.choice_brief, choice.choice)]
    short, long = (re.search(r"a pretrained encoder, without.*? (0\.\d{3})", x)[1] for x in tables)
    assert short == long


def test_every_table_stands_on_a_page():
    shown = {name for page in fill_pages(RESULTS) for name in BEGIN.findall(page.read_text(encoding="utf-8"))}
    assert shown == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_without_records_a_table_has_no_figures_and_no_error(name, tmp_path):
    text = TABLES[name](Records(tmp_path))
    assert not re.search(r"\d\.\d+x|\d ms|MiB \||± \d", text)


def test_what_stands_around_a_table_stays(tmp_path):
    page = f"before\n<!-- table one -->\nold\n{END}\nafter\n"
    once = filled(page, Records(tmp_path), {"one": lambda _: "new"})
    assert once == f"before\n<!-- table one -->\nnew\n{END}\nafter\n"
    assert filled(once, Records(tmp_path), {"one": lambda _: "new"}) == once


def test_an_unknown_table_and_one_without_an_end_are_named_with_their_page(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    page = folder / "README.md"
    for text, problem in (
        ("<!-- table two -->\n", "no table 'two'; known are one"),
        ("<!-- table one -->\n", "no end"),
    ):
        page.write_text(text)
        with pytest.raises(ValueError, match=problem) as caught:
            write_tables(folder, {"one": lambda _: ""})
        assert str(page) in str(caught.value)
        assert page.read_text() == text


def test_a_record_that_is_put_in_place_fills_its_table(tmp_path):
    rows = [bench_row("favor+", 0.5, task="causal", length=4096), bench_row("sdpa", 3.5, task="causal", length=4096)]
    assert ABSENT in TABLES["attention"](Records(tmp_path))
    file = tmp_path / speed.ATTENTION
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"rows": rows}))
    assert f"| SDPA | {ABSENT} / 7.0x / {ABSENT} |" in TABLES["attention"](Records(tmp_path))
    assert "causal not on record / 7.0x / not on record" in choice.short(Records(tmp_path))


def test_a_contender_that_was_not_run_has_no_figure(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"rows": [bench_row("favor+", 0.5, peak=3 * 2**20), bench_row("sdpa", 1.0, note="no")]}))
    bench = Records(tmp_path).bench("bench.json")
    assert bench.faster("favor+", "sdpa", "bidirectional", 1024) == ABSENT
    assert bench.beyond("favor+", "bidirectional", 1024) == "2 MiB"


def test_figures_are_formatted_as_pages_have_them():
    assert [times(x) for x in (0.66, 7.04, 9.96, 24.6)] == ["0.7x", "7.0x", "10x", "25x"]
    assert spread([2.0, 4.0], 2) == f"3.00 ± {math.sqrt(2):.2f}"
    assert (spread([2.0], 1), spread([])) == ("2.0", ABSENT)
    assert (joined([ABSENT, ABSENT]), joined(["1x", ABSENT])) == (ABSENT, f"1x / {ABSENT}")
    assert grid(["a", "b"], [["", "1"]]) == "| a | b |\n| --- | --- |\n| | 1 |"


def test_the_script_writes_the_tables_that_changed(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "README.md").write_text(f"<!-- table figures -->\n{END}\n")
    given = [sys.executable, ROOT / "tools" / "pages", "tables", "--records", folder]
    done = [subprocess.run(given, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert done == [f"written: {folder / 'README.md'}\ntables: 1 files changed.\n", "tables: 0 files changed.\n"]


def test_figures_in_the_text_of_pages_are_those_of_the_records():
    records = Records(RESULTS)
    page = (RESULTS / "conversion" / "README.md").read_text()
    for name, method in (
        ("minilm-skyformer", "skyformer:num_landmarks=128:kernel=softmax"),
        ("minilm-loglinear", "loglinear:num_features=128"),
    ):
        assert f"{conversion.cosine(records, name, method, 'distilled'):.3f} (" in page
    baseline = records.get("comparisons/2026-11-16-proteins.json")["baselines"]["empirical baseline"]["perplexity"]
    assert f"perplexity of {baseline:.2f}" in (COMPARISONS / "README.md").read_text()
    errors = {(x[0], x[1], x[2]): x[3] for x in records.get("learned-kernels/kernels.json")["errors"]}
    quoted = [f"{errors[1.0, 'noise', 512]:.3f} against {errors[1.0, '1.0', 512]:.3f}"]
    quoted.append(f"{errors[2.5, 'noise', 512]:.2f} against {errors[2.5, '1.0', 512]:.2f}")
    assert all(x in (ROOT / "docs" / "reference" / "learned-kernels.md").read_text() for x in quoted)


def test_figures_in_the_text_on_performer_are_those_of_the_records():
    records, pages = Records(RESULTS), [RESULTS / "performer" / "README.md", ROOT / "docs" / "measured" / "figures.md"]
    first, second = (" ".join(page.read_text().split()) for page in pages)
    rows = records.get("performer/estimators.json")["output"]
    by = {(x["estimator"], x["norm"], x["draw"], x["num_features"]): x["median"] for x in rows}

    def ratios(name, norm, draws, over="positive"):
        return [
            x / by[over, norm, draw, m] for (n, y, draw, m), x in by.items() if (n, y) == (name, norm) and draw in draws
        ]

    both, trigonometric = ("iid", "orthogonal"), "trigonometric"
    plain, clamped = ratios(trigonometric, 2, both), ratios(f"{trigonometric}, clamped", 2, both)
    assert f"{round(min(plain), -1):.0f} to {round(max(plain), -3):,.0f} times larger" in first
    assert f"clamped, {max(clamped):.0f} times with 16 features, falling to {min(clamped):.0f} times with 256" in first
    short = [sorted(ratios("positive", norm, both[1:], trigonometric)) for norm in (0.5, 1)]
    assert f"{short[0][0]:.0f} to {short[0][-1]:.0f} times larger at norm 0.5, {short[1][0]:.1f} to " in first
    assert f"to {short[1][-1]:.0f} times at norm 1" in first
    acids = {x["model"]: (x["pearson"], x["standard_error"]) for x in records.get(ACIDS)["rows"]}
    for page in (first, second, " ".join(reason for _, _, reason in OUTSIDE)):
        assert "{:.3f} ± {:.3f}".format(*acids["original"]) in page
        assert "{:.3f} ± {:.3f}".format(*acids["random weights"]) in page
    depth = records.get("performer/depth.json")["rows"]
    wide = [x["hidden"] for x in depth if x["method"] == "favor+:num_features=256"]
    assert "{:.2f}, {:.2f} and {:.2f} ± ".format(*(fmean(x[i] for x in wide) for i in (1, 3, 6))) in second


def test_figures_in_the_text_of_how_tos_are_those_of_the_records():
    records, howto = Records(RESULTS), ROOT / "docs" / "howto"
    assert f"a cosine of {conversion.untrained_cosine(records):.3f} " in (howto / "convert-encoder.md").read_text()
    bits = [training.mean(records, "bytes-stdlib", x) for x in (training.BIASED, "favor+:num_features=64")]
    page = (howto / "byte-language-model.md").read_text()
    assert f"`nprf` with them has {bits[0]} bits per byte, `favor+` without {bits[1]} " in page
    page = " ".join((howto / "convert-decoder.md").read_text().split())
    kept, name = conversion.perplexities(records, "smollm2-recall-heads"), "smollm2-recall-heads"
    stages = [kept[x] / kept["original"] for x in ("as converted", "after LoRA")]
    assert f"{stages[0]:.2f} times its own perplexity as converted and {stages[1]:.2f} after" in page
    right = [conversion.found(records, name, x) for x in ("converted", "original")]
    assert f"it finds {right[0]}, where the original finds {right[1].split()[0]} " in page
    cache = {
        (x["attention"] == "sdpa", x["length"]): x["peak"] for x in records.get(speed.SERVING)["rows"] if x["peak"]
    }
    assert f"{cache[False, 16384] / 2**20:.1f} MiB at any length" in page
    assert f"{cache[True, 16384] / 2**20:.0f} MiB at 16384 tokens" in page


@pytest.mark.slow
def test_the_page_of_comparisons_is_that_of_its_records():
    assert (COMPARISONS / "index.html").read_text(encoding="utf-8") == results_page(read_results(COMPARISONS))


def test_every_record_says_how_it_was_made():
    without = []
    for path in RESULTS.rglob("*.json"):
        record = json.loads(path.read_text())
        if not {"command", "commands", "function"} & record.keys():
            without.append(str(path.relative_to(RESULTS)))
    # Its command was never written down, and the page says so.
    assert without == ["conversion/smollm2.json"]


@pytest.mark.parametrize("path", sorted(COMPARISONS.glob("*.json")), ids=lambda path: path.stem)
def test_the_command_of_a_comparison_lists_what_was_run(path):
    record = json.loads(path.read_text())
    words = shlex.split(record["command"])
    labels = list(dict.fromkeys(run["label"] for run in record["runs"]))
    if "--attention" in words:
        assert sorted(split_names(words[words.index("--attention") + 1])) == sorted(labels)
    if "--length" in words:
        assert str(record["settings"]["task_options"]["length"]) == words[words.index("--length") + 1]
