"""Findings of `kernelformer doctor`, with and without what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from kernelformer import diagnosis
from kernelformer.cli.app import app
from kernelformer.lazy import HF
from test_imports import BLOCKED


def test_what_is_found_is_plain_and_right(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = json.loads(json.dumps(diagnosis.diagnose()))
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["self_check"]["passed"]
    assert set(found["self_check"]["errors"]) == {"bidirectional", "causal", "step by step"}
    assert found["hub"] == {"offline": True, "environment": {"HF_HUB_OFFLINE": "1"}} | found["hub"]
    models = next(x for x in found["extras"] if x["extra"] == "hf")
    assert models["installed"]["typer"] == metadata.version("typer")
    assert found["devices"][0]["device"] == "cpu"
    assert found["threads"]["torch"] >= 1


def test_a_missing_package_is_named_with_what_it_gives_and_its_command(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(diagnosis.metadata, "version", version)
    models = next(x for x in diagnosis.extras() if x["extra"] == "hf")
    assert models["missing"] == ["peft"]
    assert models["install"] == "pip install 'kernelformer[hf]'"
    (line,) = diagnosis.missing_lines({"extras": [models]})
    assert "missing peft; gives the command line, models" in line


@pytest.mark.parametrize(("share", "kept"), [(0.98, False), (0.01, True), (None, None)])
def test_memory_that_goes_back_to_the_system_gets_a_hint(share, kept, monkeypatch):
    monkeypatch.setattr(diagnosis, "_faults", lambda: share)
    found = diagnosis.allocator()
    assert found["kept"] is kept
    assert ("MALLOC_TRIM_THRESHOLD_" in (found["hint"] or "")) == (kept is False)


def test_a_check_that_fails_ends_with_code_1(monkeypatch):
    monkeypatch.setattr(diagnosis, "_distance", lambda *_: 0.5)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


def test_without_extras_the_doctor_still_tells_what_is_missing():
    code = BLOCKED.format(names=(*HF, "typer", "matplotlib")) + "from kernelformer.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "self-check: favor+ against its definition" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("the kernelformer command needs typer")
    assert done.stderr.splitlines()[-1].endswith("pip install 'kernelformer[hf]'")
