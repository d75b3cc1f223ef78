from __future__ import annotations

import pytest

from kernelformer.evidence.queue import Place


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "data", tmp_path / "out", tmp_path / "records")
