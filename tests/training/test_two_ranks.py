"""Two processes that share a batch learn what one learns."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_training import losses, register, tiny

from kernelformer.models import KernelformerForCausalLM
from kernelformer.records import read_result
from kernelformer.training import StoppedError, train
from kernelformer.training.checkpoints import checkpoint_of
from kernelformer.training.trainer import RunTrainer

# Kernels that learn and are drawn, several forwards per step, and processes with unequal numbers of labels.
METHOD = "gmm-prf:num_features=8:components=2"


def settings():
    steps = {"batch_size": 8, "micro_batch": 2, "log_every": 1, "save_every": 100, "redraw": 2}
    return tiny(METHOD, **steps, select="best", model={"dropout": 0.0})


@pytest.fixture(autouse=True)
def _tasks(_threads):
    register()
    torch.set_num_threads(1)


def launch(*arguments, script=__file__):
    """This file, or another, on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, script, *map(str, arguments)]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def close(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


def test_two_processes_stop_together_resume_and_learn_what_one_learns_with_the_same_draws(tmp_path):
    train(settings(), tmp_path / "one", quiet=True)
    two = tmp_path / "two"
    said = launch(two, "stop")  # only the second process is told, in step 5: the third draw is half used
    heads = [x.split(":")[0] for x in said]
    assert [x for x in heads if x.startswith("step")] == [f"step {i}/12" for i in range(1, 6)]
    assert heads.count("stopped") == 2  # whichever process is heard first
    assert checkpoint_of(two)[1] == 5

    shutil.copytree(two, tmp_path / "other")
    train(settings(), tmp_path / "other", resume=True, quiet=True)  # one process goes on with twice the forwards a step
    assert launch(two, "resume")[-1].startswith("finished")
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
    """What was drawn; how many forwards ago it was depends on the number of processes."""
    model = KernelformerForCausalLM.from_pretrained(folder / "model")
    return {name: x for name, x in model.named_buffers() if not name.endswith(".age")}


def main(folder, how):
    torch.set_num_threads(1)
    register()
    step = RunTrainer.training_step

    def told(self, *args):
        if how == "stop" and self.state.global_step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    RunTrainer.training_step = told
    try:
        train(settings(), folder, resume=how == "resume", log=lambda text: print(text, flush=True))
    except StoppedError:
        os.write(1, b"stopped\n")  # in one piece: both processes say it, at the same time


if __name__ == "__main__":
    main(*sys.argv[1:])
