"""Streams of exact methods: all keys are kept, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import kernelformer as kf
from definition import close, inputs

SCHEMES = [
    {"max_length": 40},
    {"max_distance": 5},
    {"scheme": "t5", "max_distance": 16, "num_buckets": 8},
    {"scheme": "alibi"},
]


@pytest.mark.parametrize("options", SCHEMES)
def test_softmax_with_positions_steps_and_resumes(options):
    torch.manual_seed(0)
    layer = kf.KernelAttention(32, 4, "softmax", causal=True, relative="1d", **options).double()
    for x in layer.positions.parameters():
        torch.nn.init.normal_(x)
    x = torch.randn(2, 33, 32, dtype=torch.float64)
    key_mask = torch.ones(2, 33, dtype=torch.bool)
    key_mask[1, :7] = False
    for mask in (None, key_mask):
        want = layer(x, key_mask=mask)
        state, parts = None, []
        for a, b in ((0, 1), (1, 2), (2, 19), (19, 20), (20, 33)):
            part = None if mask is None else mask[:, a:b]
            if b - a == 1:
                y, state = layer.step(x[:, a:b], state, key_mask=part)
            else:
                y, state = layer(x[:, a:b], key_mask=part, state=state, return_state=True)
            parts.append(y)
        close(torch.cat(parts, 1), want)
        assert state.length == 33


def test_a_mask_appears_in_the_state_only_when_something_is_hidden():
    core = kf.build_attention("softmax", head_dim=8, num_heads=4)
    q, k, v = inputs(6, dtype=torch.float32)
    _, state = core(q, k, v, is_causal=True, return_state=True)
    assert len(state.tensors) == 2
    hidden = torch.tensor([[True], [False]])
    step = [x[:, :, :1] for x in (q, k, v)]
    _, state = core.step(*step, state, key_mask=hidden)
    assert state.tensors[2][:, -1].tolist() == [True, False]
    assert state.nbytes > 0
    again = state.reorder([1, 1])
    assert again.tensors[2][:, -1].tolist() == [False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_of_gaussian_attention_rounds_once_in_half_precision(dtype):
    core, low = kf.build_attention("gaussian", head_dim=8, num_heads=4), [x.to(dtype) for x in inputs(64)]
    whole, state, parts = core(*low, is_causal=True), None, []
    for at in range(0, 64, 8):
        out, state = core(*(x[:, :, at : at + 8] for x in low), is_causal=True, state=state, return_state=True)
        parts.append(out)
    want = core(*(x.double() for x in low), is_causal=True)
    error, once = (float((x.double() - want).abs().max()) for x in (torch.cat(parts, 2), whole))
    assert error <= 1.01 * once


@pytest.mark.parametrize("normalize", [False, True])
def test_gaussian_attention_with_a_past_is_that_of_the_whole(normalize):
    core = kf.build_attention("gaussian", head_dim=8, num_heads=4, normalize=normalize)
    q, k, v = inputs(600)
    want = core(q, k, v, is_causal=True)
    first = [x[:, :, :37] for x in (q, k, v)]
    _, state = core(*first, is_causal=True, return_state=True)
    rest = [x[:, :, 37:] for x in (q, k, v)]
    close(core(*rest, is_causal=True, state=state), want[:, :, 37:])
