"""Hedgehog's map: its formula at the start, and that it can be fitted, converted to, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch

import kernelformer as kf
from kernelformer.feature_maps import HedgehogMap
from kernelformer.feature_maps.untied import UntiedSpec

SIZES = {"head_dim": 6, "num_heads": 2}


def test_it_starts_as_the_softmax_of_both_signs():
    phi = HedgehogMap(**SIZES).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    assert phi.feature_dim == 12
    for role in ("query", "key"):
        want = torch.cat([(0.5 * x).softmax(-1), (-0.5 * x).softmax(-1)], -1)  # x times the root of the scale
        torch.testing.assert_close(phi(x, role, scale=0.25), want)


@pytest.mark.parametrize("m", [4, 6, 9])
def test_w_starts_with_orthogonal_rows_that_queries_and_keys_share(m):
    phi = HedgehogMap(**SIZES, num_features=m, seed=3)
    assert torch.equal(phi.w_q, phi.w_k)
    assert phi.w_q.shape == (2, m, 6)
    for w in phi.w_q:
        for block in w.split(6):
            torch.testing.assert_close(block @ block.T, torch.eye(len(block)))
    same = HedgehogMap(**SIZES, num_features=m, seed=4)
    assert torch.equal(phi.w_q, same.w_q) == (m == 6)


@pytest.mark.parametrize("role", ["query", "key"])
def test_chunks_and_their_gradients_are_those_of_the_formula(role):
    spec, scale, x = UntiedSpec(query_units=2, key_units=2, mirrored=True), 0.3, torch.randn(3, 5, 4).double()
    tensors = [torch.randn(3, 7, 4).double().requires_grad_() for _ in range(2)]
    x.requires_grad_()
    want = spec.log_features(x[None], [w[None] for w in tensors], scale, role)[0]
    grad, shift = torch.randn_like(want), torch.randn(3, 1, 14).double()
    wanted = torch.autograd.grad(want, [x, *tensors], grad, materialize_grads=True)
    with torch.no_grad():
        chunks, out = spec.bind(tensors, scale, True, True), torch.empty_like(x)
        if role == "query":
            torch.testing.assert_close(chunks.queries(x, shift, torch.empty_like(want)), want + shift)
            chunks.vjp_queries(x, grad, out)
        else:
            torch.testing.assert_close(chunks.keys(x, torch.empty(3, 14, 5).double()), want.mT)
            chunks.vjp_keys(x, grad.mT.contiguous(), out)
    for a, b in zip([out, *chunks.tensor_grads()], wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_of_another_size_are_refused():
    sizes = {"head_dim": 8, "num_heads": 2}
    core = kf.build_attention("hedgehog", **sizes)
    other = kf.build_attention("hedgehog", **sizes, num_features=5)
    with pytest.raises(RuntimeError, match="was saved with num_features=5, this one has num_features=8"):
        core.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="num_features must be an integer of at least 1, got 0"):
        kf.build_attention("hedgehog", **sizes, num_features=0)


def test_a_converted_model_is_fitted_to_the_attention_of_the_original():
    pytest.importorskip("transformers")
    from kernelformer.conversion.tune import transfer
    from kernelformer.hf import convert
    from tiny_models import inputs, tiny

    teacher = tiny("BertModel", torch.float32)
    student = convert(copy.deepcopy(teacher), "hedgehog")
    batch = inputs(teacher)
    losses = transfer(student, teacher, iter([batch] * 30), steps=30, lr=0.1)
    assert losses[-1] < 0.75 * losses[0]
