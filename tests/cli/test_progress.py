"""Progress: on stderr, with the time left, and only on a terminal."""

from __future__ import annotations

import io

import pytest

from kernelformer.cli import common as progress
from kernelformer.cli.common import VisibleConsole, console, following, part_done


@pytest.fixture
def terminal(monkeypatch):
    out = io.StringIO()
    shown = VisibleConsole(file=out, width=120, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "errors", shown)
    return out


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("transfer: step 30 of 300, 1,000 tokens, 0.1 min, loss 2", 0.1),
        ("elu, seed 0: step 150/1,500: loss 2.0", 0.1),
        ("tune: step 7, 1,000 tokens, 0.5 of 2.0 min, loss 2", 0.25),
        ("choosing what stays exact: change 1 of 4", 0.25),
        ("reading a/b of 2025", None),
        ("step 1 of 0", None),
    ],
)
def test_a_sentence_tells_how_much_is_done(text, part):
    assert part_done(text) == part


def test_a_bar_shows_what_is_done_and_what_is_left(terminal):
    with following(2, inner=True) as job:
        job.log("elu: step 50/100")
        assert job.bars.tasks[0].completed == 0.5
        job.advance()
        job.bars.refresh()
        assert job.bars.tasks[0].percentage == 50
    assert "50%" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def test_stages_have_bars_of_their_own(terminal):
    with following() as job:
        job.log("reading x")
        assert job.bars.tasks[0].total is None
        job.log("transfer: step 3 of 4")
        assert job.bars.tasks[0].completed == 0.75
        job.log("tune: step 1 of 4")
        assert job.bars.tasks[0].completed == 0.25


def test_where_time_decides_the_bar_follows_the_clock(terminal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with following(seconds=60) as job:
        now[0] += 15
        job.log("error of favor+")
        assert job.bars.tasks[0].completed == 15
        now[0] += 1000
        job.log("the last")
        assert job.bars.tasks[0].completed == 60


def test_in_a_pipe_and_with_json_there_are_lines_alone(terminal, monkeypatch, capsys):
    monkeypatch.setattr(console, "stderr", True)
    with following(3) as job:
        job.log("a sentence")
        job.advance()
    assert terminal.getvalue() == "a sentence\n"
    monkeypatch.setattr(console, "stderr", False)
    monkeypatch.setattr(progress, "errors", VisibleConsole(file=(out := io.StringIO()), width=120))
    with following(3) as job:
        job.log("a sentence")
        job.advance()
    assert out.getvalue() == "a sentence\n"
    assert capsys.readouterr() == ("", "")
