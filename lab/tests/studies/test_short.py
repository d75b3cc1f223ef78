"""The study of short sequences and of one token."""

from __future__ import annotations

import json

import pytest

from kernelformer.errors import WorkerError
from kernelformer_lab.studies import STUDIES
from kernelformer_lab.studies import short as study
from kernelformer_lab.studies.settings import ShortSettings
from pages import speed
from pages.records import Records

SMALL = {"sizes": ("3x4", "1x40"), "features": (8,), "heads": 2, "head_dim": 8, "step_features": 8, "budget": 0.001}


@pytest.fixture
def here(monkeypatch):
    """Jobs in this process; there is no compiler."""

    def run(work, *, threads, **given):
        if given.get("compiles"):
            raise WorkerError("no compiler")
        return json.loads(json.dumps(work(**json.loads(json.dumps(given)))))

    monkeypatch.setattr(study, "run_in_process", run)


def test_every_case_is_timed_shown_and_recorded(here, tmp_path):
    settings, short, done = ShortSettings(**SMALL, contexts=(5,), compiled=True), STUDIES["short"], []
    result = short.run(settings, tmp_path / "speed" / "short", progress=lambda: done.append(1))
    assert len(done) == short.steps(settings)
    assert len(result.rows) == 2 * 2 * 2
    assert all(set(x["seconds"]) == {"favor+", "favor+:algorithm=chunked", "sdpa"} for x in result.rows)
    assert list(result.steps) == ["step", "step without its quick way", "sdpa, 5 tokens"]
    assert result.note == "not compiled: no compiler"
    first, second = short.tables(result)
    assert (first.row_count, second.row_count) == (2, 3)
    short.save(settings, result, tmp_path / "speed" / "short")
    records = Records(tmp_path)
    assert speed.short_speed(records).count("\n") == 3
    assert "3 x 4" in speed.short_speed(records)
    assert speed.short_step(records).count("\n") == 4
    short.picture(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_size_that_is_none_is_named():
    with pytest.raises(ValueError, match="sizes are sequences x tokens, as 512x8, got '8'"):
        study.steps(ShortSettings(sizes=("8",)))
