"""The programs of examples/ run, are short, and end in a table or a figure."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
# Arguments for a quick run, and what the last lines have to have.
QUICK = {
    "long_classification": (["--steps", "2", "--length", "96"], "skyformer:num_landmarks=64"),
    "byte_language_model": (["--steps", "2", "--length", "64"], "nprf:num_features=64"),
    "convert_encoder": (["--texts", "2", "--length", "128"], "window alone (local)"),
    "convert_decoder": (["--steps", "4"], "the same, fitted"),
    "stream_bytes": (["--steps", "2", "--length", "1280"], "stream.png"),
}
LONG = {
    "long_classification": ["--steps", "60", "--length", "512"],
    "byte_language_model": ["--steps", "60"],
    "convert_decoder": ["--steps", "60"],
    "stream_bytes": ["--steps", "60"],
}


def run(name, arguments, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with torch.random.fork_rng():
        values = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return values, capsys.readouterr().out.strip().splitlines()


@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs_and_ends_in_a_table_or_a_figure(name, tmp_path, monkeypatch, capsys):
    arguments, last = QUICK[name]
    _, lines = run(name, arguments, tmp_path, monkeypatch, capsys)
    assert last in lines[-1]
    if name == "stream_bytes":
        assert (tmp_path / "out" / "stream.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_on_the_page(path):
    assert len(path.read_text().splitlines()) <= 60
    assert f"]({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_an_example_learns(name, tmp_path, monkeypatch, capsys):
    values, lines = run(name, LONG[name], tmp_path, monkeypatch, capsys)
    if name == "long_classification":  # four classes, by the largest of which two fifths would be right
        assert all(float(line.split()[-2]) > 0.5 for line in lines[-3:])
    elif name == "byte_language_model":  # bytes of source without a context have more than 4.5 bits
        assert all(float(line.split()[-1]) < 4.3 for line in lines[-3:])
    elif name == "convert_decoder":
        rows = [float(line.split()[-2]) for line in lines[-5:]]
        assert rows[-1] < 1.1 * rows[0]
    else:
        part = len(values["bits"]) // 5
        mean = [sum(values["bits"][i * part : (i + 1) * part]) / part for i in range(5)]
        assert mean[1] > 2 + max(mean[0], mean[2], mean[4])  # random bytes
