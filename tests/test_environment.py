"""Cores, quotas and the spinning of idle threads, as commands see them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernelformer import environment


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1)])
def test_a_quota_bounds_the_cores(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert environment.usable_cores(file) == cores
    assert environment.usable_cores(tmp_path / "none") == 8


def test_idle_cores_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    file = tmp_path / "stat"
    file.write_text("cpu  9 9 9 999 0\ncpu0 1 0 1 100 7 0\ncpu1 1 0 1 1000 0 0\ncpu2 1 0 1 50 3 0\nintr 1\n")
    assert environment._idle_ticks(file) == 160
    assert environment.free_cores(0.01, file) == 0
    assert environment.free_cores(0.01, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, environment.SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_commands_bound_spinning_before_torch_is_there_unless_the_user_has_said_otherwise(given, count):
    code = (
        "import os, sys; from kernelformer import cli; sys.argv = ['kernelformer', '--version']\n"
        "try: cli.main()\nexcept SystemExit: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    env = {x: y for x, y in os.environ.items() if x not in environment.SPIN_VARIABLES} | given
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{count} False"
