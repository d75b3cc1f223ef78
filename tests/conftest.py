from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads():
    torch.set_num_threads(2)


@pytest.fixture
def small_blocks(monkeypatch):
    """Chunks of a few rows, so that short sequences cross all seams."""
    from kernelformer.attention import blocks

    monkeypatch.setattr(blocks, "CAUSAL_CHUNK", 8)
    monkeypatch.setattr(blocks, "BUFFER", 3000)
