from __future__ import annotations

import tempfile

import pytest

from kernelformer_lab.evidence.queue import Place


@pytest.fixture(autouse=True)
def _no_timings_of_other_tests(tmp_path, monkeypatch):
    """Marks of timings are in the folder for temporary files: a queue would wait for tests that run beside this one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "data", tmp_path / "out", tmp_path / "records")
