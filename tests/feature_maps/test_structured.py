"""Fast transforms of structured draws: the numbers of the matrix, and never those of another one."""

from __future__ import annotations

import copy

import pytest
import torch

import kernelformer as kf
from definition import close, inputs
from kernelformer.feature_maps import draws as structured
from kernelformer.feature_maps.projection import Dense

METHODS = ["favor+", "trigonometric", "relu"]


@pytest.fixture
def fast(monkeypatch):
    """Fast transforms from 8 dimensions on; the list grows with each use of one."""
    used = []
    forward = structured.FastProjection._forward
    monkeypatch.setattr(structured, "FAST_FROM", 8)
    monkeypatch.setattr(structured.FastProjection, "_forward", lambda self, x: used.append(1) or forward(self, x))
    return used


def make(method="favor+", *, monkeypatch=None, **options):
    """A core; dense with ``monkeypatch``."""
    if monkeypatch is None:
        return kf.build_attention(
            method, head_dim=8, num_heads=4, **{"num_features": 24, "draw": "hadamard", **options}
        )
    with monkeypatch.context() as patch:
        patch.setattr(structured, "FAST_FROM", 1000)
        return make(method, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"norms": "chi", "per_head": True, "seed": 3}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_outputs_and_gradients_are_those_of_the_matrix(method, options, is_causal, fast, monkeypatch):
    core, dense = make(method, **options), make(method, **options, monkeypatch=monkeypatch)
    assert core.state_dict().keys() == dense.state_dict().keys()
    assert torch.equal(core.feature_map.omega, dense.feature_map.omega)
    for draw in (0, 2):
        core.resample(draw)
        dense.resample(draw)
        leaves = inputs(37, dtype=torch.float32, grad=True)
        out, want = (x(*leaves, is_causal=is_causal) for x in (core, dense))
        assert fast
        close(out, want)
        grads, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
        for a, b in zip(grads, wanted, strict=True):
            close(a, b, 1e-4)
        fast.clear()


@pytest.mark.parametrize("change", ["written", "another tensor", "float64", "learned"])
def test_omega_is_what_counts(change, fast, monkeypatch):
    core, dense = make(), make(monkeypatch=monkeypatch)
    q, k, v = inputs(9, dtype=torch.float64 if change == "float64" else torch.float32)
    for phi in (core.feature_map, dense.feature_map):
        if change == "another tensor":
            phi.omega = phi.omega.flip(1)
        elif change == "written":
            phi.omega[0, 5, 3] += 1e-3
        elif change == "learned":
            phi.omega.requires_grad_()
    out, want = core(q, k, v), dense(q, k, v)
    assert not fast
    assert torch.equal(out, want)


def test_loaded_copied_and_moved_maps_are_fast_again(fast):
    q, k, v = inputs(9, dtype=torch.float32)
    core, other = make(seed=3, norms="chi"), make(seed=5, norms="chi")
    core.resample(4)
    other.load_state_dict(core.state_dict())
    empty = copy.deepcopy(other).to_empty(device="cpu")
    empty.feature_map.reset_parameters()
    want = core(q, k, v)
    for same in (other, copy.deepcopy(core), empty, core.half().float()):
        fast.clear()
        assert torch.equal(same(q, k, v), want)
        assert fast


def test_the_rule_takes_whole_blocks_of_hadamard_draws_alone():
    for draw, m, d, fast in [
        ("hadamard", 1024, 512, True),
        ("hadamard", 512, 256, False),
        ("hadamard", 700, 512, False),
        ("hadamard", 1536, 768, False),
        ("orthogonal", 1024, 512, False),
    ]:
        assert isinstance(structured.dense_or_fast(draw, m, d), structured.FastDraw) == fast
        assert isinstance(structured.dense_or_fast(draw, m, d), Dense)
