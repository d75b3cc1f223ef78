"""One regression test for each fault that other linear-attention libraries are known for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import kernelformer as kf
from definition import MAPPED, VARIANTS, build, close, inputs, mode

LINEAR = ["favor+", "favor+hyperbolic", "trigonometric", "relu", "elu"]


def core_of(method, **options):
    return kf.build_attention(method, head_dim=8, num_heads=4, **options)


@pytest.mark.parametrize("method", LINEAR)
def test_padding_leaves_the_denominator_too(method):
    """A library that zeroes only the values of padded keys divides by their weights all the same."""
    core = core_of(method)
    q, k, v = inputs(20, dtype=torch.float32)
    key_mask = torch.arange(20) < 12
    got = core(q, k, v, key_mask=key_mask.expand(2, -1))
    close(got, core(q, k[:, :, :12], v[:, :, :12]))
    values_only = core(q, k, v * key_mask[:, None])
    assert (got - values_only).abs().max() > 0.05


@pytest.mark.parametrize("method", LINEAR)
def test_a_future_key_cannot_reach_the_past_through_the_stabilizer(method):
    """One global maximum over the keys, with an eps in the features, lets a large future key change past outputs."""
    core = core_of(method)
    q, k, v = inputs(100, dtype=torch.float32)
    before = core(q, k, v, is_causal=True)
    for size in (0.0, 10.0, 40.0):  # the largest and the smallest features that a key can have
        k2 = k.clone()
        k2[:, :, 90:] = size * k2[:, :, 90:]
        close(core(q, k2, v, is_causal=True)[:, :, :90], before[:, :, :90])


@pytest.mark.parametrize("variant", MAPPED)
def test_buffers_are_drawn_at_construction_and_forward_never_draws(variant):
    """Zeros until the first redraw, or a draw inside forward, make the first call or every call another function."""
    core = build(variant, torch.float32)
    omega = core.feature_map.omega
    if omega is not None:
        assert omega.abs().min(dim=-1).values.max() > 0
        assert omega.isfinite().all()
        assert torch.linalg.matrix_rank(omega[0].double()) == min(omega.shape[1:])
    q, k, v = inputs(9, dtype=torch.float32)
    state = torch.random.get_rng_state()
    how = mode(variant)
    outs = [core.train()(q, k, v, **how), core(q, k, v, **how), core.eval()(q, k, v, **how)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("variant", MAPPED)
def test_everything_random_is_in_the_state_dict(variant):
    core, other = build(variant, torch.float32, **_seed(variant, 1)), build(variant, torch.float32, **_seed(variant, 2))
    q, k, v = inputs(9, dtype=torch.float32)
    if core.feature_map.omega is not None:
        assert (core(q, k, v, **mode(variant)) - other(q, k, v, **mode(variant))).abs().max() > 1e-4
    missing = other.load_state_dict(core.state_dict())
    assert not missing.missing_keys
    assert torch.equal(core(q, k, v, **mode(variant)), other(q, k, v, **mode(variant)))
    core.resample()
    other.resample()  # the seed came with the weights
    assert torch.equal(core(q, k, v, **mode(variant)), other(q, k, v, **mode(variant)))


def _seed(variant, seed):
    method, options = VARIANTS[variant]
    if not isinstance(method, str):
        return {"seed": seed}
    return {"seed": seed} if "seed" in kf.method_options(method) and options.get("projection", True) else {}


def test_training_and_decoding_use_one_draw():
    layer = kf.KernelAttention(32, 4, causal=True)
    x = torch.randn(2, 12, 32)
    kf.redraw(layer, every=2)
    for _ in range(5):
        trained = layer(x)
    state, parts = None, []
    for t in range(12):
        y, state = layer.step(x[:, t : t + 1], state)
        parts.append(y)
    close(torch.cat(parts, 1), trained)


def test_elu_plus_one_is_not_rounded_to_zero_in_bfloat16():
    """elu(-8) + 1 is 3.4e-4, and 0 in bfloat16: keys vanish and rows become 0 / 0."""
    x = torch.full((1, 1, 4, 8), -8.0, dtype=torch.bfloat16)
    assert (F.elu(x) + 1 == 0).all()
    core = kf.build_attention("elu", head_dim=8, num_heads=1)
    v = torch.randn(1, 1, 4, 8).bfloat16()
    for is_causal in (False, True):
        out = core(x, x, v, is_causal=is_causal)
        want = (
            v.float().cumsum(2) / torch.arange(1, 5).view(1, 1, 4, 1) if is_causal else v.float().mean(2, keepdim=True)
        )
        close(out.float(), want.expand_as(out.float()), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", LINEAR)
def test_sums_are_not_taken_in_half_precision(method, dtype):
    """Sums over 4096 keys in float16 overflow or stall; in float32 the error is that of the inputs and the output."""
    core = core_of(method)
    q, k, v = (x.to(dtype) for x in inputs(4096, B=1))
    v = v + 3  # a sum that grows
    whole = copy.deepcopy(core).double()(q.double(), k.double(), v.double())
    assert float((core(q, k, v).double() - whole).abs().max() / whole.abs().max()) < 2 * torch.finfo(dtype).eps
    _, state = core(q, k, v, is_causal=True, return_state=True)
    assert all(x.dtype == torch.float32 for x in state.tensors)


def test_a_chunk_is_a_number_of_rows_not_a_number_of_chunks(monkeypatch):
    """Taken for a count, a chunk size of 64 cuts a long sequence into 64 long pieces, and memory grows with the
    length."""
    from kernelformer.attention import blocks, positive

    seen = []
    original = positive.PositiveSums.causal

    def spy(self, state, inputs):
        many, rows, _ = inputs.xk.shape
        seen.append((many * rows * state[1].shape[1], rows))
        return original(self, state, inputs)

    monkeypatch.setattr(positive.PositiveSums, "causal", spy)
    core = core_of("favor+")
    for length in (64, 1000, 20000):
        core(*inputs(length, B=1, dtype=torch.float32), is_causal=True)
    assert {rows for _, rows in seen} == {blocks.CAUSAL_CHUNK}
    assert max(numbers for numbers, _ in seen) <= blocks.BUFFER


@pytest.mark.parametrize("method", ["trigonometric", "rfa", "gmm-rks"])
def test_near_and_far_keys_of_a_signed_map_do_not_depend_on_the_size_of_values(method):
    core, (q, k, v) = core_of(method, num_features=16, window=4).double(), inputs(50)
    for causal in (False, True):
        close(core(q, k, v * 1e9, is_causal=causal) / 1e9, core(q, k, v, is_causal=causal))


def test_a_call_without_tokens_leaves_a_stream_with_a_window_as_it_was():
    core, (q, k, v) = core_of("favor+", num_features=16, window=8).double(), inputs(50)
    outs, state, start = [], None, 0
    for count in (1, 0, 49):
        part = slice(start, start + count)
        out, state = core(q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True, state=state, return_state=True)
        outs, start = [*outs, out], start + count
    close(torch.cat(outs, 2), core(q, k, v, is_causal=True))


def test_a_large_bias_within_a_window_has_finite_gradients():
    """The last block of 65 tokens has 63 rows without a token, whose sums of weights are no numbers."""
    core, (q, k, v) = core_of("favor+", num_features=16, window=4), inputs(65, dtype=torch.float32)
    bias = torch.zeros(4, 129)
    bias[:, 62:67] = 100.0
    out = core(q, k, v.requires_grad_(), is_causal=True, bias=bias, max_distance=4)
    assert torch.autograd.grad(out.sum(), v)[0].isfinite().all()


def test_elu_has_its_slope_at_zero():
    core, (q, k, v) = core_of("elu").double(), inputs(5)
    k[:, :, 2] = 0
    assert torch.autograd.gradcheck(lambda k: core(q, k, v), k.requires_grad_(), atol=1e-4)


@pytest.mark.parametrize("method", ["rfa", "favor+"])
def test_hidden_keys_do_not_dwarf_earlier_ones_under_a_slope(method):
    core, (q, k, v) = core_of(method, num_features=16, window=4), inputs(300, dtype=torch.float32)
    slope, mask = torch.full((4,), 0.5), (torch.arange(300) < 20).expand(2, -1)
    bias = -slope.unsqueeze(1) * (torch.arange(599) - 299).abs()
    out = core(q, k, v, is_causal=True, key_mask=mask, bias=bias, max_distance=4, slope=slope)
    assert (out != 0).any(-1).all()


def test_weights_of_long_queries_sum_to_one_beside_a_window():
    """Logarithms of sums of 10,000 are rounded to 1e-3."""
    core, (q, k, v) = core_of("favor+", num_features=16, window=4), inputs(100, dtype=torch.float32)
    mask = (torch.arange(100) < 50).expand(2, -1)
    for size in (16, 1000):
        out = core(F.normalize(q, dim=-1) * size, k, torch.ones_like(v), is_causal=True, key_mask=mask)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", ["rfa", "favor+"])
def test_graphs_of_a_window_have_gradients(method):
    core, (q, k, v) = core_of(method, num_features=8, window=5), inputs(40, dtype=torch.float32)
    q.requires_grad_()
    found = [
        torch.autograd.grad(attend(q, k, v, is_causal=True).sum(), q)[0]
        for attend in (core, torch.compile(core, backend="aot_eager"))
    ]
    close(*found)
