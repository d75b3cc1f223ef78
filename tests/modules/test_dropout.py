"""Dropout of a layer's output, and of the weights of exact attention."""

from __future__ import annotations

import pytest
import torch

import kernelformer as kf
from definition import inputs
from kernelformer.modules.spec import parse_attention

NEAR = {"window": 3, "sinks": 1}
# A method, its options, and the algorithm of its calls.
EXACT = [
    ("softmax", {}, None),
    ("gaussian", {}, None),
    ("gaussian", {"normalize": True}, None),
    ("local", NEAR, None),
    ("local", NEAR, "plain"),
]
CASES = [{}, {"is_causal": True}, {"key_mask": True}, {"is_causal": True, "key_mask": True}]


SHAPE = {"B": 3, "H": 2, "G": 2, "D": 4, "E": 4}


def given(case):
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return {name: mask if name == "key_mask" else x for name, x in case.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("method", "options", "algorithm"), EXACT)
def test_dropped_weights_are_zero_and_the_others_larger_by_what_is_left(method, options, algorithm, groups, case):
    q, k, _ = inputs(7, **SHAPE | {"G": groups})
    core = kf.build_attention(method, head_dim=4, num_heads=2, attention_dropout=0.25, **options)
    call = {**given(case), "algorithm": algorithm}
    whole = core.eval().attention_matrix(q, k, **call)
    plain = kf.build_attention(method, head_dim=4, num_heads=2, **options)
    torch.testing.assert_close(whole, plain.attention_matrix(q, k, **call), rtol=0, atol=0)
    torch.manual_seed(0)
    seen = core.train().attention_matrix(q, k, **call)
    kept = seen != 0
    torch.testing.assert_close(seen[kept], whole[kept] / 0.75)
    visible = whole != 0
    share = float((visible & ~kept).sum() / visible.sum())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / float(visible.sum())) ** 0.5


def test_the_weights_of_a_relative_bias_are_dropped_too():
    torch.manual_seed(0)
    layer = kf.KernelAttention(8, 2, "softmax", relative="1d", max_length=7, attention_dropout=0.5)
    x = torch.randn(2, 7, 8)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_gradients_flow_through_the_weights_that_are_left():
    q, k, v = (x[:1].requires_grad_() for x in inputs(5, **SHAPE))
    for method, options, algorithm in EXACT:
        core = kf.build_attention(method, head_dim=4, num_heads=2, attention_dropout=0.3, **options)

        def attend(*x, core=core, algorithm=algorithm):
            torch.manual_seed(3)
            return core(*x, is_causal=True, algorithm=algorithm)

        assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("method", ["favor+", "elu", "skyformer", "nystromformer", "loglinear"])
def test_methods_without_weights_refuse_to_drop_them_by_name(method):
    words = f"drops attention weights, which method '{method.replace('+', '[+]')}' never forms.*'softmax', 'gaussian'"
    with pytest.raises(ValueError, match=words):
        kf.build_attention(method, head_dim=4, num_heads=2, attention_dropout=0.1)
    with pytest.raises(ValueError, match=words):
        kf.KernelAttention(8, 2, method, attention_dropout=0.1)
    with pytest.raises(ValueError, match=words):
        parse_attention(f"{method}:attention_dropout=0.1")
    kf.KernelAttention(8, 2, method, attention_dropout=0.0)


def test_the_output_of_a_layer_is_dropped_in_training_alone():
    torch.manual_seed(0)
    layer = kf.KernelAttention(32, 2, "favor+", num_features=8, causal=True, dropout=0.25)
    x = torch.randn(4, 50, 32)
    whole, seen = layer.eval()(x), layer.train()(x)
    kept = seen != 0
    torch.testing.assert_close(seen[kept], whole[kept] / 0.75)
    share = 1 - float(kept.float().mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    one, _ = layer.step(x[:, :1])
    assert float((one == 0).float().mean()) > 0.05
    assert layer.state_dict().keys() == kf.KernelAttention(32, 2, "favor+", num_features=8).state_dict().keys()


@pytest.mark.parametrize("share", [-0.1, 1.0, "0.1", float("nan"), True])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="dropout must be"):
        kf.KernelAttention(8, 2, "favor+", dropout=share)
    with pytest.raises(ValueError, match="attention_dropout must be"):
        kf.build_attention("softmax", head_dim=4, num_heads=2, attention_dropout=share)
