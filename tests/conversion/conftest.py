"""Conversions without their picture, which takes longer to draw than all the rest."""

from __future__ import annotations

import pytest


@pytest.fixture
def pictures():
    """For tests that look at the picture: the others go without."""


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    report = pytest.importorskip("kernelformer.conversion.report")
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "picture", lambda result, path: None)
