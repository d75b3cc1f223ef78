"""Results on record: files without the machine's paths, and one page that shows them all as they are."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess

import pytest
import typer
from test_report import HOSTILE, Page, browser
from typer.testing import CliRunner

import kernelformer as kf
from kernelformer import files
from kernelformer_lab.cli.results import results
from kernelformer_lab.records import readable_json, short_command, short_paths
from kernelformer_lab.reports import results as labels
from kernelformer_lab.reports.comparison import NONE
from kernelformer_lab.reports.results import make_record, read_results, results_page, write_results
from page_checks import check_page

ENVIRONMENT = {"date": "2026-03-04T05:06:07+00:00", "python": "3.11.7", "torch": "2.13.0", "processor": "AMD EPYC"}
DATA = "/home/somebody/.cache/data/imdb"


def run(label, seed, value, *, metric="accuracy", lost=False, **changes):
    """A run of a comparison, as `kernelformer compare` writes it."""
    evaluation = [[step, step * 0.25, value * (1 - math.exp(-step / 20))] for step in (25, 50, 75, 100)]
    settings = {
        "task": "listops",
        "attention": label,
        "task_options": {"length": 1024, "data": DATA},
        "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "steps": 100,
        "batch_size": 16,
        "learning_rate": 1e-4,
        "seed": seed,
    }
    result = {"metric": metric, "value": math.nan if lost else value, "tokens_per_second": 1000.0, "peak_bytes": 2**20}
    result |= {"parameters": 1234, "seconds": 25.0, "steps": 100, "loss": 1.5, "diverged": lost, "decode": None}
    return {"label": label, "seed": seed, "settings": settings, "evaluation": evaluation, "result": result | changes}


def compared(root, name, values, **head):
    """A folder of a comparison; ``values`` by label, one for each seed."""
    found = {"title": name, "metric": "accuracy", "higher_is_better": True, "environment": ENVIRONMENT}
    found |= {"command": f"kernelformer compare {name} --data {DATA} --out /home/somebody/out/{name}"}
    metric = head.get("metric", "accuracy")
    found["runs"] = [run(x, seed, v, metric=metric) for x, some in values.items() for seed, v in enumerate(some)]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(found | head))
    return folder


TWO = {"softmax": (0.5, 0.6), "favor+:num_features=64": (0.4, 0.5)}


def shown(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    return text, Page(text)


def cells(page, place, label):
    """The row of a label in a table of the page."""
    return next(row for row in page.tables[place] if row[0] == label)


def test_a_record_has_all_numbers_and_nothing_of_the_machine(tmp_path):
    folder = compared(tmp_path / "out", "lra-text", TWO, source="Skyformer", note="fewer steps", task="listops")
    before = (folder / "comparison.json").read_bytes()
    write_results(tmp_path / "results", [folder])
    assert sorted(os.listdir(tmp_path / "results")) == ["2026-03-04-lra-text.json", "index.html"]
    text = (tmp_path / "results" / "2026-03-04-lra-text.json").read_text()
    assert "home" not in text
    assert "somebody" not in text
    assert "NaN" not in text
    found = json.loads(text)
    assert found["command"] == "kernelformer compare lra-text --data data/imdb --out out/lra-text"
    assert (found["date"], found["task"], found["note"]) == ("2026-03-04", "listops", "fewer steps")
    assert found["settings"]["task_options"] == {"length": 1024, "data": "data/imdb"}
    assert found["runs"][0]["settings"] == {"attention": "softmax", "seed": 0}
    assert list(found)[:3] == ["title", "task", "about"]
    assert list(found)[-2:] == ["settings", "runs"]
    (record,) = read_results(tmp_path / "results")
    assert (record.name, record.date, record.source, record.seeds) == ("lra-text", "2026-03-04", "Skyformer", [0, 1])
    first = record.comparison.runs[0]
    assert first.settings["steps"] == 100
    assert first.settings["attention"] == "softmax"
    assert [p.step for p in first.evaluation] == [25, 50, 75, 100]
    assert [row.mean for row in record.comparison.summary()] == pytest.approx([0.55, 0.45])
    assert (folder / "comparison.json").read_bytes() == before


def test_errors_test_scores_and_gradients_stay_on_record_and_older_records_have_none(tmp_path):
    more = {
        "value_error": 0.0123,
        "loss_error": math.nan,
        "test": {"accuracy": 0.48, "loss": math.inf},
        "best_step": 75,
    }
    more |= {"test_error": 0.02, "grad_norm": {"median": 0.5, "p95": 2.0, "max": 7.0}}
    runs = [run("elu", 0, 0.5, **more), run("softmax", 0, 0.6)]
    write_results(tmp_path / "results", [compared(tmp_path / "out", "text", {}, runs=runs, task="listops")])
    ((new, old),) = ([x.result for x in record.comparison.runs] for record in read_results(tmp_path / "results"))
    assert (new.value_error, new.test_error, new.best_step) == (0.0123, 0.02, 75)
    assert new.test == {"accuracy": 0.48}  # what is not finite has no place in JSON
    assert new.grad_norm == {"median": 0.5, "p95": 2.0, "max": 7.0}
    assert math.isnan(new.loss_error)
    assert math.isnan(old.value_error)
    assert (old.test, old.grad_norm, old.best_step) == ({}, {}, None)


def test_a_second_record_of_a_day_replaces_the_first_and_another_day_stands_beside_it(tmp_path):
    place = tmp_path / "results"
    write_results(place, [compared(tmp_path, "text", TWO)])
    write_results(place, [compared(tmp_path, "text", {"elu": (0.7,), "softmax": (0.6,)})])
    (record,) = read_results(place)
    assert record.comparison.labels == ["elu", "softmax"]
    write_results(place, [compared(tmp_path, "text", {"elu": (0.9,), "softmax": (0.8,)})], "2026-05-01")
    assert [(x.name, x.date) for x in read_results(place)] == [("text", "2026-03-04"), ("text", "2026-05-01")]
    _, page = shown(place)
    assert cells(page, 0, "elu") == ["elu", "0.9000"]  # the newest
    assert "Before, 2026-03-04" in page.text
    assert page.text.count("Measured on") == 2


def test_a_damaged_record_does_not_stand_in_the_way_of_its_replacement(tmp_path):
    folder, place = compared(tmp_path, "text", TWO), tmp_path / "results"
    place.mkdir()
    (place / "2026-03-04-text.json").write_text("{")
    write_results(place, [folder])
    assert len(read_results(place)) == 1


def test_the_overview_has_attentions_by_tasks_with_the_best_marked(tmp_path):
    three = TWO | {"elu": (0.45, 0.47), "nprf:relative=1d:num_features=8": (0.3,)}
    lower = {"softmax": (3.0,), "favor+:num_features=64": (2.0,), "nprf:num_features=8:relative=1d": (4.0,)}
    folders = [compared(tmp_path, "a", three)]
    folders += [compared(tmp_path, "b", lower, metric="perplexity", higher_is_better=False)]
    write_results(tmp_path / "results", folders)
    text, page = shown(tmp_path / "results")
    head, *rows = page.tables[0]
    assert head == ["attention", "aaccuracy\xa0↑n = 2", "bperplexity\xa0↓n = 1"]
    assert rows == [
        ["softmax", "0.5500± 0.0707", "3.000"],
        ["favor+num_features=64", "0.4500± 0.0707", "2.000"],
        ["nprfnum_features=8, relative=1d", "0.3000n = 1", "4.000"],  # two orders of options, one attention
        ["elu", "0.4600± 0.0141", NONE],
    ]
    overview = text[text.index("<tbody") : text.index("</tbody")]
    marks = re.findall(r'<mark class="([^"]*)">([^<]*)</mark>', overview)
    assert marks == [("top", "0.5500"), ("top linear", "2.000"), ("linear", "0.4600")]
    assert page.tables[1][1] == ["softmax", "25 s1 MiB", "25 s1 MiB"]


def test_a_section_tells_what_was_done_and_how_far_it_is_from_the_paper(tmp_path):
    head = {"source": "NPRF with RPE, Table 2", "note": "a hundredth of the steps", "about": "reading proteins"}
    head |= {"baselines": {"empirical": {"accuracy": 0.0992, "perplexity": 17.8}, "coin": 0.5}}
    write_results(tmp_path / "results", [compared(tmp_path, "proteins", TWO, **head)])
    _, page = shown(tmp_path / "results")
    for part in (
        "Reading proteins.",
        "Model: 2 layers, width 64, 2 heads; task: length 1024, data data/imdb; 100 steps of 16 samples, learning rate "
        "0.0001; seeds 0, 1.",
        "Against the paper: NPRF with RPE, Table 2. A hundredth of the steps.",
        "Best is softmax (accuracy 0.5500 ± 0.0707)",
        "Measured on 2026-03-04, seeds 0, 1; all numbers: 2026-03-04-proteins.json.",
        "torch 2.13.0, processor AMD EPYC",
        "kernelformer compare proteins --data data/imdb --out out/proteins",
        "Validation accuracy over training time",
    ):
        assert part in page.text, part
    head, first, *_, guess, coin = page.tables[2]
    assert head[1:] == ["accuracy (higher is better)", "tokens/s", "peak memory", "parameters", "training"]
    assert first == ["softmax", "0.5500 ± 0.0707 (n=2)", "1,000", "1 MiB", "1,234", "25 s"]
    assert guess[:3] == ["empiricalno model", "0.0992perplexity 17.8", NONE]
    assert coin[1] == "0.5"
    assert ("a", "href", "./2026-03-04-proteins.json") in page.attributes


def test_conditions_that_differ_stay_on_record_and_speeds_are_marked_not_drawn(tmp_path):
    runs = [run("softmax", 0, 0.5), run("elu", 0, 0.4)]
    conditions = [[{"threads": 2}], [{"threads": 2}, {"threads": 1}]]
    unequal = [{**x, "conditions": y} for x, y in zip(runs, conditions, strict=True)]
    write_results(tmp_path / "a", [compared(tmp_path / "out", "same", {}, runs=runs)])
    write_results(tmp_path / "b", [compared(tmp_path / "out", "unequal", {}, runs=unequal)])
    (same,), (marked,) = read_results(tmp_path / "a"), read_results(tmp_path / "b")
    assert same.comparison.unequal == ""
    assert marked.comparison.unequal == "threads 2 (softmax, elu) and 1 (elu)"
    for folder, differ in (("a", False), ("b", True)):
        _, page = shown(tmp_path / folder)
        assert (cells(page, 1, "softmax")[1][:5] == "25 s*") == differ
        assert ("threads 2 (softmax, elu) and 1 (elu)" in page.text) == differ
        assert ("Final accuracy over training speed" in page.text) != differ
    bad = compared(tmp_path / "out", "bad", {}, runs=[{**runs[0], "conditions": [3]}])
    with pytest.raises(ValueError, match="conditions must be objects, got"):
        write_results(tmp_path / "a", [bad])


def test_time_spent_on_batches_is_said_where_it_was_measured(tmp_path):
    """Runs from before it was measured have NaN in their comparison, and go on record all the same."""
    folders = [compared(tmp_path, name, TWO) for name in ("old", "new")]
    for folder, waited in zip(folders, ((math.nan,) * 4, (0.5, 1.0, 0.25, math.nan)), strict=True):
        found = json.loads((folder / "comparison.json").read_text())
        for one, seconds in zip(found["runs"], waited, strict=True):
            one["result"]["input_seconds"] = seconds
        (folder / "comparison.json").write_text(json.dumps(found))
    write_results(tmp_path / "results", folders)
    _, page = shown(tmp_path / "results")
    assert "Of that time runs waited for their next batch at most: new 4.0%." in page.text
    assert all(math.isnan(x.result.input_seconds) for x in read_results(tmp_path / "results")[1].comparison.runs)
    write_results(tmp_path / "other", folders[:1])
    assert "waited for their next batch" not in shown(tmp_path / "other")[1].text


def test_sections_of_names_that_look_alike_have_places_of_their_own(tmp_path):
    names = ("A", "A-2", "A-1", "a", "a+1")
    write_results(tmp_path / "results", [compared(tmp_path, name, {"elu": (0.5,)}) for name in names])
    _, page = shown(tmp_path / "results")
    places = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert sorted(places) == ["a", "a-1", "a-1-1", "a-2", "a-3"]
    links = [value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href") and value[0] == "#"]
    assert set(links) == {*places, "main_content"}  # no name of a task has an underscore in its place


def test_encoders_and_decoders_that_differ_make_a_table_of_two_sides(tmp_path):
    values = {"softmax": (0.3,), "softmax > elu": (0.5,), "elu > softmax": (0.1,), "elu": (0.4,)}
    write_results(tmp_path / "results", [compared(tmp_path, "translation", values, metric="bleu", curve="loss")])
    text, page = shown(tmp_path / "results")
    assert page.tables[3] == [
        ["encoder \\ decoder", "softmax", "elu"],
        ["softmax", "0.3000", "0.5000"],
        ["elu", "0.1000", "0.4000"],
    ]
    assert [row[0] for row in page.tables[0][1:]] == ["softmax", "elu"]  # the overview has one attention a row
    assert "of different kinds" in page.text
    assert "Validation loss over training time" in page.text
    assert text.count('<mark class="top">0.5000</mark>') == 1


def test_numbers_of_features_make_a_curve_and_the_largest_goes_to_the_overview(tmp_path):
    values = {f"nprf:num_features={n}:relative=1d": (0.1 + n / 100, 0.2) for n in (8, 16, 32)} | {"softmax": (0.5, 0.6)}
    folders = [compared(tmp_path, "sweep", values), compared(tmp_path, "plain", TWO)]
    write_results(tmp_path / "results", folders)
    text, page = shown(tmp_path / "results")
    assert text.count("Final accuracy over the number of features") == 2  # the title, and what is read aloud
    rows = [row[0] for row in page.tables[0][1:]]
    assert rows == ["softmax", "favor+num_features=64", "nprfnum_features=32, relative=1d"]
    assert "nprf relative=1d" in re.sub("<[^>]*>", " ", text.split("over the number of features")[-1])


def test_an_attention_keeps_its_look_in_all_tasks(tmp_path):
    names = [*kf.list_methods()][:9]
    folders = [compared(tmp_path, "all", dict.fromkeys(names, (0.5,)))]
    folders += [compared(tmp_path, "some", dict.fromkeys(names[5:] + names[:1], (0.5,)))]
    write_results(tmp_path / "results", folders)
    text, _ = shown(tmp_path / "results")
    looks = {}
    for key, label in re.findall(r'(<svg[^>]*class="key".*?</svg>)([^<]+)', text, re.DOTALL):
        marker = re.findall(r'<path id="[^"]*-m\w+" d="([^"]*)"', key)
        looks.setdefault(label, set()).add((*sorted(set(re.findall('#[0-9a-f]{6}(?=[;"])', key))), *marker))
    assert looks.keys() == set(names)
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == 9


def test_runs_that_were_lost_are_said_and_do_not_count(tmp_path):
    folder = compared(tmp_path, "text", TWO)
    found = json.loads((folder / "comparison.json").read_text())
    found["runs"] += [run("elu", 0, 0.5, lost=True), run("elu", 1, 0.6)]
    found["runs"][-2]["evaluation"][-1][2] = math.nan
    found["runs"] += [{**run("gaussian", 0, 0.5), "result": None}]
    (folder / "comparison.json").write_text(json.dumps(found))
    write_results(tmp_path / "results", [folder])
    assert "NaN" not in (tmp_path / "results" / "2026-03-04-text.json").read_text()
    _, page = shown(tmp_path / "results")
    assert cells(page, 0, "elu")[1] == "0.6000n = 1"
    assert cells(page, 0, "gaussian")[1] == NONE
    assert "Diverged (a loss was not finite): elu (seed 0, step 100)" in page.text
    assert "Unfinished: gaussian (seed 0, step 100)" in page.text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Everything that a file can say says markup."""
    bad, tmp_path = HOSTILE[0], tmp_path_factory.mktemp("hostile")
    folders = []
    for name in ("first", "second"):
        values = {x: (0.1 + i, 0.2 + i) for i, x in enumerate(HOSTILE)} | {f"{bad} > {HOSTILE[3]}": (0.3,)}
        values |= {f"{bad}:num_features={n}": (0.1, 0.2) for n in (4, 8)}
        head = dict.fromkeys(("title", "about", "source", "note", "command", "recipe", "more"), f"{bad} {{x}} </p>\x07")
        head |= {
            "metric": "<i>m",
            "curve": "<i>c",
            "environment": {bad: bad},
            "baselines": {bad: {bad: 1.0, "<i>m": 2}},
        }
        folder = compared(tmp_path / "out", name, values, **head)
        found = json.loads((folder / "comparison.json").read_text())
        for x in found["runs"]:
            x["settings"] |= {bad: {"{0}": bad}, "model": {"{y}": bad}}
            x["result"]["scores"] = {bad: 1.5}
        (folder / "comparison.json").write_text(json.dumps(found))
        folders.append(folder)
    place = tmp_path / "results"
    place.mkdir()
    for folder, name in zip(folders, ("plain", '2026-03-04-javascript:<b>"&#'), strict=True):
        (place / f"{name}.json").write_text(make_record(folder, place)[1])
    write_results(place)
    return place


def test_nothing_from_outside_becomes_markup(hostile):
    text, page = shown(hostile)
    assert not {"script", "img", "i", "b", "u", "iframe", "object", "foreignobject", "image"} & set(page.tags)
    assert page.tags.count("style") == page.tags.count("title") == 1
    assert not [x for x in page.attributes if x[1].startswith("on") or x[2].startswith("javascript:")]
    assert "<script" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert page.text.count(HOSTILE[0]) > 20
    assert 'javascript:<b>"&#' in page.text
    check_page(text, hostile="<script")


def test_the_page_asks_for_nothing_from_outside_and_references_are_its_own(hostile):
    text, page = shown(hostile)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [(tag, value) for tag, name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert {value[1:] for _, value in links if value.startswith("#")} <= set(ids)
    assert all(value[0] == "#" or value[:2] == "./" or (tag, value) == ("link", "data:,") for tag, value in links)
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(pictures) == page.tags.count("figure") == 6
    assert all(pictures)


def test_the_same_records_give_the_same_bytes(hostile):
    before = (hostile / "index.html").read_bytes()
    write_results(hostile)
    assert (hostile / "index.html").read_bytes() == before
    assert results_page(read_results(hostile)).encode() == before


def test_a_browser_opens_the_page_without_complaint(hostile, tmp_path):
    found = browser()
    if found is None:
        pytest.skip("no Chromium; install one, or name it in KERNELFORMER_CHROMIUM")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (hostile / "index.html").as_uri()]
    made = subprocess.run([found, *options], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in made.stderr, made.stderr
    assert made.stdout.count("<figure>") == 6


def test_files_of_before_are_shown_and_files_of_other_kinds_left_out(tmp_path):
    folder = compared(tmp_path, "old", TWO)
    found = json.loads((folder / "comparison.json").read_text())
    old = {key: found[key] for key in ("title", "metric", "command", "environment", "runs")}
    (tmp_path / "bytes-old.json").write_text(json.dumps(old))
    (tmp_path / "encoder.json").write_text(json.dumps({"environment": {}, "rows": []}))
    (tmp_path / "list.json").write_text("[1]")
    written, (record,), others = write_results(tmp_path)
    assert (record.name, record.date, record.note) == ("bytes-old", "2026-03-04", "")
    assert record.comparison.higher_is_better  # as the task says
    assert [path.name for path in written] == ["index.html"]
    assert [path.name for path in others] == ["encoder.json", "list.json"]
    assert "somebody" not in (tmp_path / "index.html").read_text()


def damaged(change):
    found = {"metric": "accuracy", "environment": {}, "runs": [run("elu", 0, 0.5)]}
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"not JSON: Expecting property name.*line 1 column 2.*; put it right or remove it"),
        (b"\xff", r"not JSON: 'utf-8' codec"),
        ("[" * 100_000, "not JSON: "),
        (damaged(lambda x: x.pop("metric")), "'metric' must be of type str, got None"),
        (damaged(lambda x: x.update(runs=[])), "a comparison needs at least one run"),
        (damaged(lambda x: x.update(runs={})), "'runs' must be of type list"),
        (damaged(lambda x: x.update(runs=[3])), "run 1 of 1: not a JSON object but 3"),
        (damaged(lambda x: x["runs"][0].update(seed="x")), "run 1 of 1: seed must be an integer, got 'x'"),
        (damaged(lambda x: x["runs"][0].update(evaluation=[[1]])), "evaluation must be rows of step, seconds and"),
        (damaged(lambda x: x["runs"][0].update(result={})), "run 1 of 1: 'metric' must be of type str"),
        (damaged(lambda x: x["runs"].append(run("elu", 0, 0.5))), "are both seed 0 of 'elu'"),
        (damaged(lambda x: x["runs"].append(run("a", 0, 0.5, metric="b"))), "by 'b', the comparison is by 'accuracy'"),
        (damaged(lambda x: x.update(task="what")), "nothing says whether 'accuracy' of task 'what' is better when"),
        (damaged(lambda x: x.update(note=3)), "'note' must be of type str, got 3"),
        (damaged(lambda x: x.update(baselines={"a": "b"})), "accuracy of baseline 'a' must be a finite number"),
        (damaged(lambda x: x.update(baselines=[1])), "'baselines' must be of type dict"),
        (damaged(lambda x: x.update(higher_is_better="yes")), "higher_is_better must be True or False"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_nothing_is_written(tmp_path, content, message):
    place = tmp_path / "results"
    place.mkdir()
    (place / "bad.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as problem:
        write_results(place, [compared(tmp_path, "text", TWO)])
    assert str(problem.value).count(str(place / "bad.json")) >= 1
    (tmp_path / "text" / "comparison.json").write_bytes((place / "bad.json").read_bytes())
    (place / "bad.json").unlink()
    with pytest.raises(ValueError, match=message):
        write_results(place, [tmp_path / "text"])
    assert os.listdir(place) == []


def test_one_name_has_one_metric(tmp_path):
    place = tmp_path / "results"
    write_results(place, [compared(tmp_path, "text", TWO)])
    before = {path: path.read_bytes() for path in place.iterdir()}
    other = compared(tmp_path, "text", TWO, metric="perplexity", higher_is_better=False)
    message = (
        r"2026-03-04-text.json and .*2026-04-01-text.json are both called 'text', but one is measured by 'accuracy' "
        r"\(higher is better\) and the other by 'perplexity' \(lower is better\); rename or remove one"
    )
    with pytest.raises(ValueError, match=message):
        write_results(place, [other], "2026-04-01")
    assert {path: path.read_bytes() for path in place.iterdir()} == before


def test_what_cannot_be_added_is_said(tmp_path):
    folder = compared(tmp_path / "a", "text", TWO)
    for bad in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"has no comparison.json; name a folder where `kernelformer compare`"):
            write_results(tmp_path / "results", [bad])
    for day in ("today", "2026-13-01", "20260101", "2026-01-01T00:00"):
        with pytest.raises(ValueError, match="a date is YYYY-MM-DD, got"):
            write_results(tmp_path / "results", [folder], day)
    with pytest.raises(ValueError, match=r"two of the folders to add would be .*2026-03-04-text.json"):
        write_results(tmp_path / "results", [folder, compared(tmp_path / "b", "text", TWO)])
    with pytest.raises(ValueError, match="is not a folder"):
        write_results(tmp_path / "results")
    (tmp_path / "b" / "text" / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match="has no 'runs'"):
        write_results(tmp_path / "results", [tmp_path / "b" / "text"])
    assert not (tmp_path / "results").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no comparison on record; add one by --add FOLDER"):
        write_results(tmp_path / "empty")


def test_nothing_is_half_written_when_the_disk_is_full(tmp_path, monkeypatch):
    place = tmp_path / "results"
    write_results(place, [compared(tmp_path, "text", TWO)])
    before = {path: path.read_bytes() for path in place.iterdir()}

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_results(place, [compared(tmp_path, "text", {"elu": (0.1,)})])
    assert {path: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/home/me/.cache/data/imdb", "data/imdb"),
        ("/home/me/imdb", "imdb"),
        ("/Users/me/my data/imdb", "my data/imdb"),
        ("C:\\Users\\me\\data\\imdb", "data/imdb"),
        ("~/data/imdb/", "data/imdb"),
        ("~", "~"),
        ("/home/me", "~"),
        ("/".join(("", "root", "x")), "x"),  # the administrator's home
        ("/data", "data"),
        ("hub:/home/me/sets/imdb:plain", "hub:sets/imdb:plain"),
        ("file:///home/me/sets/imdb", "sets/imdb"),
        ("task.data=/mnt/big/sets/imdb", "task.data=sets/imdb"),
        ("https://example.org/a/b/c", "https://example.org/a/b/c"),
        ("hub:owner/name", "hub:owner/name"),
        ("out/a/b/c", "out/a/b/c"),
        ("favor+:num_features=64", "favor+:num_features=64"),
    ],
)
def test_paths_keep_two_parts_and_never_the_home_folder(text, short):
    assert short_paths(text) == short
    assert short_paths(short) == short
    command = f"kernelformer compare x --data '{text}'"
    assert short_command(command).replace("'", "") == f"kernelformer compare x --data {short}"


def test_paths_in_sentences_and_in_broken_commands_are_shortened_too():
    said = "Read from /home/me/sets/imdb (see https://a.org/b/c), 3/4 of it, tokens /s and/or more."
    assert short_paths(said, prose=True) == said.replace("/home/me/", "")
    assert short_command("compare --data '/home/me/sets/imdb") == "compare --data 'sets/imdb"


def test_the_home_folder_of_this_machine_is_one_wherever_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "people" / "me"))
    assert short_paths(f"{tmp_path}/people/me/imdb") == "imdb"
    assert short_paths(f"{tmp_path}/people/meg/imdb") == "meg/imdb"


def test_the_date_and_the_name_come_from_the_comparison_and_its_folder(tmp_path):
    folder = compared(tmp_path, "my text (2)", TWO, date="2025-01-02T03:04:05")
    assert make_record(folder, tmp_path)[0].name == "2025-01-02-my_text__2_.json"
    assert make_record(folder, tmp_path, "2024-02-29")[0].name == "2024-02-29-my_text__2_.json"
    folder = compared(tmp_path, "x", TWO, date="", environment={})
    assert re.fullmatch(r"20\d\d-\d\d-\d\d-x.json", make_record(folder, tmp_path)[0].name)


def test_records_are_json_to_read():
    value = {"a": [1, 2.5, None, "ä"], "b": {"c": [[1, 2]] * 30, "empty": {}}, "d": []}
    text = readable_json(value)
    assert json.loads(text) == value
    assert '"a": [1, 2.5, null, "\\u00e4"],\n' in text
    assert max(map(len, text.splitlines())) < 120
    with pytest.raises(ValueError, match="not JSON compliant"):
        readable_json([math.nan])


def test_labels_tell_methods_sides_and_sizes():
    assert labels.sides("elu > favor+:num_features=4") == ("elu", "favor+:num_features=4")
    assert labels.sides("a > b > c") == ("a > b > c", "a > b > c")
    assert (
        labels.normalized("nprf:relative=2d:grid=(8, 8):num_features=4")
        == "nprf:num_features=4:grid=(8, 8):relative=2d"
    )
    assert labels.normalized("elu > elu") == "elu"
    assert [part.method for part in labels.parts("2 x softmax, 4 x elu")] == ["softmax", "elu"]
    assert [labels.linear(x) for x in ("elu", "softmax", "elu > softmax", "2 x elu, 1 x gaussian", "what")] == [
        True,
        *[False] * 4,
    ]
    assert labels.sized("nprf:num_features=8 > nprf:num_features=8") == ("nprf", 8)
    assert labels.sized("nprf:num_features=8 > nprf:num_features=4") is None
    assert labels.sized("elu") is None
    assert labels.series(["elu", "favor+:num_features=64", "favor+:num_features=8", "rfa:num_features=8"]) == {
        "favor+": {8: "favor+:num_features=8", 64: "favor+:num_features=64"}
    }


def test_quadratic_methods_are_those_that_the_library_calls_so():
    assert [name for name, about in kf.list_methods().items() if "quadratic" in about] == ["softmax", "gaussian"]
    assert [name for name in kf.list_methods() if labels.exact(name)] == ["softmax", "gaussian"]
    assert not labels.exact("softmax:scale=1")


def test_the_command_adds_several_and_says_what_it_did(tmp_path):
    app = typer.Typer()
    app.command()(results)

    def call(*options):
        made = CliRunner().invoke(app, [*map(str, options), "--records", str(tmp_path / "results")])
        return made.exit_code, re.sub(r"\s+", " ", made.output)

    a, b, c = (compared(tmp_path, name, TWO) for name in "abc")
    code, said = call("--add", a, b, "--add", c, "--date", "2026-07-08")
    assert code == 0, said
    assert sorted(os.listdir(tmp_path / "results")) == [*(f"2026-07-08-{x}.json" for x in "abc"), "index.html"]
    assert "comparisons on record: 3." in said
    (tmp_path / "results" / "other.json").write_text("{}")
    assert "of another kind, and not on the page: other.json." in call()[1]
    assert '"on_record": [ ' in call("--json")[1]
    code, said = call("--add", tmp_path)
    assert (code, "has no comparison.json" in said) == (2, True)
