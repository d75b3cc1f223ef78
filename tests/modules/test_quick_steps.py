"""Steps of a stream that are not checked again: the same numbers, and every change is seen."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import kernelformer as kf
from definition import build, close, inputs
from kernelformer.modules import AttentionCore
from kernelformer.modules import core as cores


@pytest.fixture
def taken(monkeypatch):
    """Lists whether a step went without checks, for every step after a state."""
    done, checked = [], []
    check, step = cores.check_inputs, AttentionCore.step

    def watched(self, query, key, value, state=None, **how):
        checked.clear()
        try:
            return step(self, query, key, value, state, **how)
        finally:
            if state is not None:
                done.append(not checked)

    monkeypatch.setattr(cores, "check_inputs", lambda *given, **how: checked.append(1) or check(*given, **how))
    monkeypatch.setattr(AttentionCore, "step", watched)
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
    assert taken[8:] == [False, True, True, True]
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
        assert taken == [False, False, True, True, True, True]
        core.resample()
        with pytest.raises(ValueError, match="start anew"):
            core.step(*token, state)
        core.resample(0)
        assert torch.equal(core.step(*token, state)[0], kept)
        core.scale = 2.0
        with pytest.raises(ValueError, match="start anew"):
            core.step(*token, state)
        with pytest.raises(ValueError, match="start anew"):
            kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=24, seed=1).step(*token, state)
        assert taken[6:] == [False, True, False, False]


def test_a_step_with_gradients_has_them_and_a_saved_state_goes_on(taken):
    core = build("favor+")
    q, k, v = inputs(2)
    with torch.no_grad():
        state = stream(core, q[:, :, :1], k[:, :, :1], v[:, :, :1])[1]
        quick = core.step(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], state)[0]
        again = pickle.loads(pickle.dumps(state))
        close(core.step(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], again)[0], quick)
    assert taken == [True, False]
    assert again.fits == ()
    value = v[:, :, 1:].requires_grad_()
    out = core.step(q[:, :, 1:], k[:, :, 1:], value, state)[0]
    close(out, quick)
    assert torch.autograd.grad(out.sum(), value)[0].abs().sum() > 0


@pytest.mark.parametrize("method", ["favor+", "gmm-prf", "loglinear"])
def test_a_weight_written_through_data_is_seen_by_the_next_stream(method):
    """Such writes pass by the version counter: the stream itself may go on with the map that it has prepared."""
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16).eval()
    token = inputs(1, E=8, dtype=torch.float32)
    with torch.no_grad():
        _, state = core.step(*token)
        core.step(*token, state)
        for x in core.parameters():
            x.data.add_(0.3)
        out, after = core.step(*token)
        fresh = copy.deepcopy(core)
        want, _ = fresh.step(*token)
        assert torch.equal(out, want)
        assert torch.equal(core.step(*token, after)[0], fresh.step(*token, after)[0])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("variant", ["favor+", "loglinear", "trigonometric"])
def test_a_window_slides_over_sinks_masks_and_beams(variant, window):
    core = build(variant, window=window, sinks=2)
    q, k, v = inputs(12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 6] = False
    want = core(q, k, v, is_causal=True, key_mask=mask)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            rows, state = [], None
            for t in range(12):
                at = slice(t, t + 1)
                row, state = core.step(q[:, :, at], k[:, :, at], v[:, :, at], state, key_mask=mask[:, at])
                rows.append(row)
        close(torch.cat(rows, 2), want)
        assert state.length == 12


def test_a_million_tokens_count_each():
    core = kf.build_attention("favor+", head_dim=8, num_heads=2, num_features=8, window=2, sinks=1)
    q, k, v = (x[:, :, :1] for x in inputs(1, B=1, H=2, G=2, E=8, dtype=torch.float32))
    with torch.no_grad():
        state = core(*(x.expand(-1, -1, 8, -1) for x in (q, k, v)), is_causal=True, return_state=True)[1]
        log_mass = state.tensors[0].double() + torch.tensor(1e6).double().log()
        state = replace(state, tensors=(log_mass, *state.tensors[1:]))
        for _ in range(100):
            _, state = core.step(q, k, v, state)
    grown = (state.tensors[0] - log_mass).exp()
    torch.testing.assert_close(grown, torch.full_like(grown, 1 + 100 / 5e6), rtol=1e-9, atol=0)
