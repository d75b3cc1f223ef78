"""Instability scores are those of the definition, of the weights before and after a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from kernelformer_lab.studies import instability
from kernelformer_lab.studies.instability import InstabilityRecorder, InstabilitySettings, instability_score, run_of


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64))
        self.register_buffer("shift", torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return SimpleNamespace(logits=x @ self.weight + self.shift)


def test_the_score_is_the_change_of_outputs_over_that_of_weights():
    model, x = Linear(), torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    before = instability.weights_of(model)
    with torch.no_grad():
        model.weight[0, 0] += 0.5
        model.weight[1, 1] -= 0.25
    # Outputs move by 3 * 0.5 and -4 * 0.25, weights by 0.5 and 0.25.
    assert instability_score(model, before, {"x": x}) == pytest.approx((1.5**2 + 1) / (0.5**2 + 0.25**2))
    assert model.weight[0, 0] == 1.5  # as it was


def test_scores_are_of_the_batch_of_the_step_and_of_the_steps_of_a_window():
    model, recorder, state = Linear(), InstabilityRecorder([1], 2), TrainerState()
    control = TrainerControl()
    recorder.on_train_begin(None, state, control, model=model)
    want = []
    for step in range(4):
        state.global_step = step
        recorder.on_step_begin(None, state, control, model=model)
        x = torch.full((1, 2), step + 1.0, dtype=torch.float64)
        model(x=x)
        with torch.no_grad():
            model.weight[0, 0] += step + 0.5
        state.global_step = step + 1
        recorder.on_step_end(None, state, control, model=model)
        want.append((step + 1.0) ** 2)
    assert recorder.scores == {1: pytest.approx(want[1:3])}
    assert model.training


def test_windows_that_overlap_or_end_too_late_are_refused(tmp_path):
    for starts in ((0, 1), (3,)):
        settings = InstabilitySettings(steps=4, starts=starts, window=2)
        with pytest.raises(ValueError, match="a window of 2 steps after step"):
            instability.STUDY.measure(settings, tmp_path)


def test_runs_have_a_constant_rate_and_no_clipping():
    run = run_of(InstabilitySettings(steps=50, seed=3), "elu")
    assert (run.schedule, run.max_grad_norm, run.warmup_steps, run.seed) == ("constant", None, 5, 3)
