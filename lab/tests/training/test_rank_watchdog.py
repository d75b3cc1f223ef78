"""A process that hangs or is gone ends the others with a sentence that names it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from test_training import register, tiny

from kernelformer_lab.training import train
from kernelformer_lab.training.callbacks import RankLostError, RankWatchdog
from kernelformer_lab.training.checkpoints import locked
from kernelformer_lab.training.trainer import RunTrainer
from rank_processes import run_ranks


def present(rank, store, world=3):
    return RankWatchdog(store, rank=rank, world=world, timeout=4, folder="out/x")


def raised(text):
    def all_reduce():
        raise RuntimeError(text)

    try:
        all_reduce()
    except RuntimeError as problem:
        return problem


WAITED, LOST = "process 0 has waited 4 s for process 2 in step 3", "process 0 has lost process 2 in step 3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Timed out waiting 4000ms for recv operation to complete",
            r"process 0 has waited 4 s for process 2 in step 3",
        ),
        ("Application timeout caused pair closure", WAITED),
        ("Connection closed by peer [127.0.0.1]:3734.", LOST),
        ("Connection reset by peer", LOST),
    ],
)
def test_the_process_that_has_noticed_nothing_is_named(text, message, monkeypatch):
    monkeypatch.setattr("kernelformer_lab.training.callbacks._GRACE", 0.0)
    store = dist.HashStore()
    first, second, third = (present(rank, store) for rank in range(3))
    first.enter("step 3")
    third.enter("step 2")
    second.explain(raised(text))
    said = first.explain(raised(text))
    assert said.startswith(message)
    assert "by all_reduce; last heard of: process 2 in step 2 (pid " in said
    assert "train out/x --resume`" in said


def test_an_error_of_another_kind_stays_what_it_is():
    alone = present(0, dist.HashStore(), world=2)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2$"), alone.watching():
        raise RuntimeError("mat1 and mat2")


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("kernelformer_lab.training.callbacks._PATIENCE", 0.05)
    alone = present(0, dist.HashStore(), world=2)
    monkeypatch.setattr(alone, "_lost", lambda: time.sleep(2))
    assert alone.explain(raised("Timed out waiting")).startswith("process 0 has waited 4 s for another process in the")


def lose_a_rank(rank, folder, how):
    """Train on two processes, of which the second hangs or ends in step 4; the first writes down how that ends."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    register()
    step, told = RunTrainer.training_step, folder / f"{how}.txt"

    def disturbed(self, *args):
        if self.state.global_step == 3 and rank == 0 and how == "gone":
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when it has noticed
        while self.state.global_step == 3 and rank == 1:
            if how == "gone" or told.exists():
                os._exit(0)
            time.sleep(0.05)
        return step(self, *args)

    RunTrainer.training_step = disturbed
    start = time.monotonic()
    with pytest.raises(RankLostError) as problem:
        train(tiny(batch_size=4), folder / how, timeout=2, log=lambda text: None)
    told.write_text(f"{time.monotonic() - start:.1f} {problem.value}")
    os._exit(0)  # the group cannot be closed in good order


def test_a_hung_process_ends_the_others_in_time_and_one_that_is_gone_does_at_once(tmp_path):
    for how in ("hung", "gone"):
        run_ranks(lose_a_rank, 2, tmp_path, how)
    hung, gone = ((tmp_path / f"{how}.txt").read_text() for how in ("hung", "gone"))
    assert "process 0 has waited 2 s for process 1 in step 4, in training_step by " in hung
    assert "process 0 has lost process 1 in step 4, in training_step by " in gone
    assert "last heard of: process 1 in step 4 (pid " in hung
    assert 2 <= float(hung.split()[0]) < 30


def wait(ready, event):
    ready.set()
    event.wait(30)


def test_processes_that_were_forked_have_no_part_in_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, event = context.Event(), context.Event()
    with locked(tmp_path):
        child = context.Process(target=wait, args=(ready, event))
        child.start()
        ready.wait(30)
    with locked(tmp_path):  # though the child lives
        assert child.is_alive()
    event.set()
    child.join()
