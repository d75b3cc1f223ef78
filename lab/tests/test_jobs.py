"""Workers end with the process that started them, whichever way it is ended."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A small model of bytes that trains for long, on real text that every machine has.
TRAINING = ["--data", argparse.__file__, "--length", "32", "--steps", "20000", "--threads", "1"]
for setting in (
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "batch_size=4",
    "eval_every=2",
    "log_every=1",
    "task.validation_samples=4",
    "task.test_samples=4",
):
    TRAINING += ["--set", setting]

# A parent that waits for a worker as all measurements do; the worker writes its number and would sleep for a minute.
PARENT = """
import json, os, signal, sys
from kernelformer_lab import jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
code = "import json, os, sys, time; open(json.load(sys.stdin)['file'], 'w').write(str(os.getpid())); time.sleep(60)"
jobs.COMMAND = [sys.executable, "-c", code]
jobs.call_in_process(json.dumps, {"file": sys.argv[1]}, threads=1)
"""


def wait_for(condition, seconds=90.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def runs(pid):
    """True if a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid):
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_measuring_worker_ends_with_a_signal_to_its_parent_alone(number, tmp_path):
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(pid)], stderr=subprocess.PIPE, text=True) as parent:
        wait_for(lambda: pid.exists() and pid.read_text())
        parent.send_signal(number)
        assert "KeyboardInterrupt" in parent.communicate(timeout=20)[1]
    wait_for(lambda: not runs(int(pid.read_text())), 5)


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_comparison_that_is_ended_leaves_a_checkpoint_and_no_worker(number, tmp_path):
    folder = tmp_path / "out" / "elu-seed0"
    options = ["compare", "bytes", "--attention", "elu", *TRAINING, "--out", str(tmp_path / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kernelformer", *options]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = folder / "metrics.jsonl"
            wait_for(lambda: lines.exists() and '"step": 3,' in lines.read_text())
            (worker,) = children(process.pid)
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()  # else a failure would wait for all 20,000 steps
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert f"\nstopped in {folder}" in said
    wait_for(lambda: not runs(worker), 30)
    assert json.loads(next(folder.glob("checkpoint-*/trainer_state.json")).read_text())["global_step"] >= 3
