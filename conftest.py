from __future__ import annotations

import functools
import gc
import os
import sys

import pytest
import torch

# Several test processes share the cores; more threads than cores would slow all of them down.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of processes that tests start


@pytest.fixture(scope="session", autouse=True)
def _frozen():
    """Leave what was imported and collected out of garbage collections, also after the code under test unfreezes."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _threads():
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """Bounds that a test sets, by `set_limit` or an option of the command, end with it."""
    from kernelformer import files as limits

    monkeypatch.setattr(limits, "_given", {})
    for name in limits.LIMITS:
        variable = limits.environment_variable(name)
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # so that its value comes back at the end


@pytest.fixture(autouse=True)
def _tasks_of_tests():
    """Tasks that a test, or a fixture of its module, adds to the catalogue end with it: others look at all of them."""
    yield
    catalogue = sys.modules.get("kernelformer_lab.tasks.catalogue")
    for name, task in list(catalogue.TASKS.items() if catalogue else ()):
        if task.__module__.split(".")[0] != "kernelformer_lab":
            del catalogue.TASKS[name]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """``tiny_folder(kind)``: the folder of a small random model with a tokenizer, for tests that only read it."""
    from tiny_models import save_tiny

    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda kind: save_tiny(root / kind, kind))


@pytest.fixture
def small_blocks(monkeypatch):
    """Chunks of a few rows, so that short sequences cross all seams; and no matrix of weights instead of them."""
    from kernelformer.attention import blocks, dispatch

    monkeypatch.setattr(blocks, "CAUSAL_CHUNK", 8)
    monkeypatch.setattr(blocks, "BUFFER", 3000)
    monkeypatch.setattr(dispatch, "RATES", (0.0, 0.0))


@pytest.fixture
def no_matrices(monkeypatch):
    """Short sequences go by chunks too."""
    from kernelformer.attention import dispatch

    monkeypatch.setattr(dispatch, "RATES", (0.0, 0.0))


@pytest.fixture
def quick_gc(monkeypatch):
    """Measuring collects garbage before each step, which takes long in a process with the objects of many tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
