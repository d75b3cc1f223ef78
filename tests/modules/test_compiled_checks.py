"""What eager code refuses by value, a compiled graph refuses too, without a break: it never gives other numbers."""

from __future__ import annotations

import math

import pytest
import torch

from definition import build, close, inputs

H = 4


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()  # each test compiles anew, and the limit of recompilations is the process's


@pytest.fixture(params=["favor+", "softmax"])
def cores(request):
    core = build(request.param, torch.float32)
    return core, torch.compile(core, fullgraph=True, backend="aot_eager")


def clipped(length, window, seed=0):
    table = torch.randn(H, 2 * window + 1, generator=torch.Generator().manual_seed(seed))
    distance = torch.arange(-(length - 1), length).clamp(-window, window)
    return table[:, distance + window]


def test_a_bias_that_is_not_constant_beyond_max_distance_is_refused(cores):
    core, compiled = cores
    q, k, v = inputs(13, dtype=torch.float32)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "max_distance": 3}
        close(compiled(q, k, v, bias=clipped(13, 3), **options), core(q, k, v, bias=clipped(13, 3), **options))
        with pytest.raises(RuntimeError, match="max_distance=3 says that the bias is constant beyond that distance"):
            compiled(q, k, v, bias=clipped(13, 5), **options)
    half = clipped(13, 5)
    half[:, :10] = half[:, 9:10]  # constant in the past; the future is hidden by causality
    close(compiled(q, k, v, bias=half, **options), core(q, k, v, bias=half, **options))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bias_with_nan_or_inf_is_refused(cores, bad):
    core, compiled = cores
    q, k, v = inputs(13, dtype=torch.float32)
    hidden = torch.zeros(H, 25)
    hidden[:, 20] = -math.inf
    close(compiled(q, k, v, bias=hidden), core(q, k, v, bias=hidden))
    wrong = torch.zeros(H, 25)
    wrong[1, 7] = bad
    with pytest.raises(RuntimeError, match=r"bias must not have NaN or \+inf in it"):
        compiled(q, k, v, bias=wrong)
    with pytest.raises(ValueError, match=r"bias must not have (NaN|\+inf) in it"):
        core(q, k, v, bias=wrong)


def test_a_wrong_slope_is_refused():
    core = build("favor+", torch.float32)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(13, dtype=torch.float32)
    fall = -torch.arange(-12, 13).abs().float().expand(H, -1)
    options = {"max_distance": 2, "is_causal": True}
    slope = torch.ones(H)
    close(compiled(q, k, v, bias=fall, slope=slope, **options), core(q, k, v, bias=fall, slope=slope, **options))
    with pytest.raises(RuntimeError, match="falls by it per token beyond max_distance=2, and it does not"):
        compiled(q, k, v, bias=fall, slope=2 * slope, **options)
    with pytest.raises(RuntimeError, match="slopes must be finite and at least 0"):
        compiled(q, k, v, bias=fall, slope=-slope, **options)


def test_a_bias_that_a_state_cannot_follow_is_refused():
    core = build("favor+", torch.float32)
    q, k, v = inputs(6, dtype=torch.float32)
    _, state = core(q, k, v, is_causal=True, bias=clipped(6, 2), max_distance=2, return_state=True)

    def go_on(bias):
        return core(q, k, v, is_causal=True, bias=bias, state=state)

    compiled = torch.compile(go_on, fullgraph=True, backend="aot_eager")
    close(compiled(clipped(12, 2)[:, :17]), go_on(clipped(12, 2)[:, :17]))
    with pytest.raises(RuntimeError, match="the state keeps 2 keys one by one, so the bias must be constant"):
        compiled(clipped(12, 5)[:, :17])
    with pytest.raises(ValueError, match="the state keeps 2 keys one by one, so the bias must be constant"):
        go_on(clipped(12, 5)[:, :17])


def test_a_transform_that_cannot_be_right_is_refused():
    core = build("favor+", torch.float32)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(40, dtype=torch.float32)
    how = {"bias": torch.zeros(H, 79), "is_causal": True, "algorithm": "fft"}
    close(compiled(q, k, v, **how), core(q, k, v, **how))
    with pytest.raises(RuntimeError, match="may be off by more than 10% in some row"):
        compiled(20 * q, 20 * k, v, **how)


def test_gates_out_of_range_are_refused():
    core = build("rfa-gate", torch.float32)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(5, dtype=torch.float32)
    gate = torch.full((2, H, 5), 0.5)
    close(compiled(q, k, v, gate=gate, is_causal=True), core(q, k, v, gate=gate, is_causal=True))
    with pytest.raises(RuntimeError, match=r"gate must be in \(0, 1\)"):
        compiled(q, k, v, gate=gate + 1, is_causal=True)


def test_training_goes_on_through_the_checks():
    core = build("favor+", torch.float32)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(13, dtype=torch.float32)
    grads = []
    for run in (core, compiled):
        bias = clipped(13, 3).requires_grad_()
        run(q, k, v, bias=bias, max_distance=3).square().sum().backward()
        grads.append(bias.grad)
    close(*grads)
