"""Learning rates of tables of relative positions."""

from __future__ import annotations

import argparse

import pytest

from kernelformer.modules import RelativePositions
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.evaluation import load_run
from kernelformer_lab.training.session import train

RUN = Run(
    task="bytes",
    attention="nprf:num_features=8:relative=1d:max_distance=4",
    task_options={"data": argparse.__file__, "length": 32, "validation_samples": 2},
    model={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    steps=4,
    batch_size=2,
)


def test_tables_of_positions_have_their_own_learning_rate(tmp_path):
    moved = {}
    for rate in (None, 0.1):
        run = Run.from_json({**RUN.as_json(), "learning_rate": 1e-4, "bias_lr": rate, "schedule": "constant"})
        train(run, tmp_path / str(rate), quiet=True)
        _, model = load_run(tmp_path / str(rate))
        (table,) = (x for x in model.modules() if isinstance(x, RelativePositions))
        moved[rate] = float(table.weight.detach().abs().max())
    # Adam moves an entry by about the learning rate in each step.
    assert moved[None] == pytest.approx(4e-4, rel=0.5)
    assert moved[0.1] == pytest.approx(0.4, rel=0.5)


def test_a_learning_rate_must_be_positive():
    with pytest.raises(ValueError, match="bias_lr must be a finite number above 0, got 0"):
        Run.from_json({**RUN.as_json(), "bias_lr": 0})
