"""Training on token shards: every step has its part of the fixed order, on any number of processes, after any stop."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from test_two_ranks import launch

from kernelformer_lab.data.shards import order_at
from kernelformer_lab.records import read_result
from kernelformer_lab.training import Run, StoppedError, evaluate, train
from kernelformer_lab.training.checkpoints import checkpoint_of
from kernelformer_lab.training.trainer import RunTrainer
from samples import write_shards, write_text

LENGTH, BATCH, STEPS, STOP = 33, 6, 9, 4
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def settings(folder, **more):
    task = {"data": str(folder / "shards"), "length": LENGTH, "validation_samples": 4}
    given = {"steps": STEPS, "batch_size": BATCH, "log_every": 1, "seed": 3, "task_options": task, **more}
    return Run("shards", "elu", model=MODEL, **given)


def watch(monkeypatch, seen, stop=None):
    """Let training tell the tokens of each step, and be stopped in the step ``stop``."""
    step = RunTrainer.training_step

    def told(self, model, inputs, *rest):
        seen[self.state.global_step].extend(inputs["input_ids"].tolist())
        if self.state.global_step + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, model, inputs, *rest)

    monkeypatch.setattr(RunTrainer, "training_step", told)


def wanted(folder):
    """The windows of each step, from the text itself: little enough of it for several epochs."""
    text = np.frombuffer((folder / "text.txt").read_bytes(), np.uint8)
    train = text[: len(text) - 2 * round(len(text) * 0.05)]
    size = (len(train) - 1) // (LENGTH - 1)
    assert size < STEPS * BATCH / 2
    windows = [train[i * (LENGTH - 1) :][:LENGTH].tolist() for i in range(size)]
    order = order_at(np.arange(STEPS * BATCH), size, 3).reshape(STEPS, BATCH)
    return {step: [windows[i] for i in row] for step, row in enumerate(order.tolist())}


@pytest.fixture
def corpus(tmp_path, _threads):
    torch.set_num_threads(1)
    write_shards(tmp_path / "shards", write_text(tmp_path / "text.txt", 17), shard_tokens=100)
    return tmp_path


@pytest.mark.slow
def test_steps_have_their_part_of_the_order_on_one_and_two_processes_and_after_a_stop(corpus, monkeypatch):
    want = wanted(corpus)
    whole = defaultdict(list)
    watch(monkeypatch, whole)
    train(settings(corpus, micro_batch=2), corpus / "one", quiet=True)
    assert whole == want
    monkeypatch.undo()

    launch(corpus, script=__file__)
    ranks = [json.loads((corpus / f"rank{i}.json").read_text()) for i in (0, 1)]
    for step in range(STOP):  # micro-batches of one window: the first of rank 0, the second of rank 1, and so on
        parts = [rank[str(step)] for rank in ranks]
        assert [x for pair in zip(*parts, strict=True) for x in pair] == want[step]
    assert checkpoint_of(corpus / "two")[1] == STOP

    rest = defaultdict(list)
    watch(monkeypatch, rest)
    train(settings(corpus, micro_batch=1, workers=0), corpus / "two", resume=True, quiet=True)
    assert rest == {step: want[step] for step in range(STOP, STEPS)}
    one, two = (read_result(corpus / name) for name in ("one", "two"))
    assert two.loss == pytest.approx(one.loss, rel=1e-4)
    scores = evaluate(corpus / "two", split="test")
    assert scores["bits_per_byte"] == pytest.approx(scores["bits_per_token"])
    assert scores["perplexity"] == pytest.approx(np.exp(scores["loss"]))


def main(folder):
    """One of two processes, with a worker each, that are stopped in a step."""
    torch.set_num_threads(1)
    place, rank = Path(folder), os.environ["RANK"]
    seen = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, seen, STOP)
        with pytest.raises(StoppedError):
            train(settings(place, micro_batch=1, workers=1), place / "two", quiet=True)
    (place / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
