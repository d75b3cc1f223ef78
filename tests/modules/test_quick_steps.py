"""Steps of a stream that are not checked again: the same numbers, and every change is seen."""

from __future__ import annotations

import pickle

import pytest
import torch

import kernelformer as kf
from definition import build, close, inputs
from kernelformer.modules import streaming


@pytest.fixture
def taken(monkeypatch):
    """Lists whether a quick step was taken, for every step that could be one."""
    done = []
    original = streaming.QuickStep.take

    def take(*given):
        result = original(*given)
        done.append(result is not None)
        return result

    monkeypatch.setattr(streaming.QuickStep, "take", take)
    return done


def stream(core, q, k, v, state=None):
    rows = []
    for t in range(q.shape[2]):
        row, state = core.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        rows.append(row)
    return torch.cat(rows, 2), state


# One matrix, one by head, a transform, untied, a sum of both signs, without normalization, elementwise.
@pytest.mark.parametrize(
    "variant", ["favor+", "favor+ per head", "fastfood-prf", "loglinear", "trigonometric", "favor+ unnormalized", "exp"]
)
def test_tokens_one_by_one_are_those_of_the_whole(variant, taken):
    core = build(variant)
    q, k, v = inputs(9)
    given = [x.clone() for x in (q, k, v)]
    with torch.no_grad():
        want = core(q, k, v, is_causal=True)
        close(stream(core, q, k, v)[0], want)
        assert taken == [True] * 8
        start = core(q[:, :, :5], k[:, :, :5], v[:, :, :5], is_causal=True, return_state=True)[1]
        close(stream(core, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], start)[0], want[:, :, 5:])
    for x, before in zip((q, k, v), given, strict=True):
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_and_half_precision(dtype, taken):
    core = build("favor+", torch.float32)
    q, k, v = inputs(7, G=2, dtype=dtype)
    with torch.no_grad():
        got, state = stream(core, q, k, v)
        close(got, core(q, k, v, is_causal=True), 4e-2 if dtype == torch.bfloat16 else None)
    assert all(taken)
    assert state.tensors[1].dtype == torch.float32
    assert state.length == 7


@pytest.mark.parametrize("variant", ["favor+", "favor+ per head", "loglinear", "trigonometric"])
def test_a_batch_of_none_streams(variant):
    core = build(variant)
    token = inputs(1, B=0)
    with torch.no_grad():
        out, state = stream(core, *token, stream(core, *token)[1])
    assert out.shape == (0, 4, 1, 6)
    assert state.length == 2


def test_whatever_changes_is_checked_and_seen(taken):
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=24)
    token = inputs(1, E=8, dtype=torch.float32)
    with torch.no_grad():
        state = stream(core, *token)[1]
        with pytest.raises(ValueError, match="head dimension"):
            core.step(token[0][..., :4], *token[1:], state)
        with pytest.raises(ValueError):
            core.step(*(x[:1] for x in token), state)  # of another batch
        kept = core.step(*token, state)[0]
        core.feature_map.omega.mul_(0.5)  # no number of a draw tells of it
        assert not torch.equal(core.step(*token, state)[0], kept)
        core.feature_map.omega.mul_(2.0)
        assert torch.equal(core.step(*token, state)[0], kept)
        core.feature_map.omega = core.feature_map.omega + 1
        assert not torch.equal(core.step(*token, state)[0], kept)
        assert taken == [False, False, True, True, True, False]
        core.resample()
        with pytest.raises(ValueError, match="start anew"):
            core.step(*token, state)
        core.resample(0)
        assert torch.equal(core.step(*token, state)[0], kept)  # with checks, the same arithmetic
        core.scale = 2.0
        with pytest.raises(ValueError, match="start anew"):
            core.step(*token, state)
        with pytest.raises(ValueError, match="start anew"):
            kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=24, seed=1).step(*token, state)
        assert not any(taken[6:])


def test_a_step_with_gradients_has_them_and_a_saved_state_goes_on(taken):
    core = build("favor+")
    q, k, v = inputs(2)
    with torch.no_grad():
        state = stream(core, q[:, :, :1], k[:, :, :1], v[:, :, :1])[1]
        quick = core.step(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], state)[0]
        again = pickle.loads(pickle.dumps(state))
        close(core.step(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], again)[0], quick)
    assert taken == [True]
    assert again.quick is None
    value = v[:, :, 1:].requires_grad_()
    out = core.step(q[:, :, 1:], k[:, :, 1:], value, state)[0]
    close(out, quick)
    assert torch.autograd.grad(out.sum(), value)[0].abs().sum() > 0
    assert not any(taken[1:])
