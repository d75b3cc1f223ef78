"""Two processes that share a batch learn what one learns."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_training import losses, register, tiny

from kernelformer.models import KernelformerForCausalLM
from kernelformer_lab.records import read_result
from kernelformer_lab.training import StoppedError, train
from kernelformer_lab.training.checkpoints import checkpoint_of
from kernelformer_lab.training.trainer import RunTrainer

# Kernels that learn and are drawn, several forwards per step, and processes with unequal numbers of labels.
METHOD = "gmm-prf:num_features=8:components=2"


def settings():
    steps = {"batch_size": 8, "micro_batch": 2, "log_every": 1, "save_every": 100, "redraw": 2}
    steps["group_by_length"] = True
    return tiny(METHOD, **steps, select="best", model={"dropout": 0.0})


@pytest.fixture(autouse=True)
def _tasks(_threads):
    register()
    torch.set_num_threads(1)


def launch(*arguments, script=__file__, restarts=0):
    """This file, or another, on two processes, which are started again when one of them is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    options += ["--max-restarts", str(restarts)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, script, *map(str, arguments)]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=120 + 60 * restarts)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def close(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_two_processes_stop_together_survive_a_kill_and_learn_what_one_learns_with_the_same_draws(tmp_path):
    train(settings(), tmp_path / "one", quiet=True)
    two = tmp_path / "two"
    said = launch(two, "stop")  # only the second process is told, in step 5: the third draw is half used
    heads = [x.split(":")[0] for x in said]
    assert [x for x in heads if x.startswith("step")] == [f"step {i}/12" for i in range(1, 6)]
    assert heads.count("stopped") == 2  # whichever process is heard first
    assert checkpoint_of(two)[1] == 5

    shutil.copytree(two, tmp_path / "other")
    train(settings(), tmp_path / "other", resume=True, quiet=True)  # one process goes on with twice the forwards a step
    said = launch(two, "kill", 7, restarts=1)
    assert [x for x in said if x.startswith("going on")] == ["going on from step 5"] * 2
    assert said[-1].startswith("finished")
    want = buffers(tmp_path / "one")
    assert {int(x) for name, x in want.items() if name.endswith(".draw")} == {4}  # not a last one
    for folder in (two, tmp_path / "other"):
        close(losses(folder), losses(tmp_path / "one"))
        found = buffers(folder)
        assert found.keys() == want.keys()
        for name in want:
            assert torch.equal(found[name], want[name]), name
        result, one = read_result(folder), read_result(tmp_path / "one")
        assert result.best_step == one.best_step == 12
        assert result.test == pytest.approx(one.test, rel=1e-5)


def buffers(folder):
    """Draws so far; how many forwards ago it was depends on the number of processes."""
    model = KernelformerForCausalLM.from_pretrained(folder / "model")
    return {name: x for name, x in model.named_buffers() if not name.endswith(".age")}


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_ten_times_ends_by_itself_with_the_losses_of_an_undisturbed_one(tmp_path):
    launch(tmp_path / "undisturbed", "resume")
    generator = random.Random(0)
    kills = sorted(generator.sample(range(12), 5) + generator.choices(range(12), k=5))  # some before the last one saved
    said = launch(tmp_path / "killed", "kill", *kills, restarts=10)
    assert sum(x.startswith(("going on", "there is no checkpoint")) for x in said) == 11
    assert said[-1].startswith("finished")
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    result, one = (read_result(tmp_path / x) for x in ("killed", "undisturbed"))
    assert (result.value, result.loss, result.test) == (one.value, one.loss, one.test)
    want = buffers(tmp_path / "undisturbed")
    assert all(torch.equal(x, want[name]) for name, x in buffers(tmp_path / "killed").items())


def main(folder, how, *kills):
    torch.set_num_threads(1)
    register()
    step = RunTrainer.training_step
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def told(self, *args):
        if how == "stop" and self.state.global_step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        # Once for each start, at its step or after what was saved later, on one process or the other.
        if start < len(kills) and self.state.global_step >= int(kills[start]) and os.environ["RANK"] == str(start % 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args)

    RunTrainer.training_step = told
    run = settings() if how != "kill" or len(kills) == 1 else replace(settings(), save_every=1)
    try:
        train(run, folder, resume=how != "stop", log=lambda text: print(text, flush=True))
    except StoppedError:
        os.write(1, b"stopped\n")  # in one piece: both processes say it, at the same time


if __name__ == "__main__":
    main(*sys.argv[1:])
