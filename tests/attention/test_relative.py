"""Relative bias: every algorithm against the definition, values and gradients, all at once and token by token."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import kernelformer as kf
from definition import VARIANTS, attend, build, close, count_rescues, inputs, padding
from kernelformer.attention.dispatch import find_window
from kernelformer.attention.plain import pairs
from kernelformer.attention.relative.call import Layout, RelativeCall, constant_beyond
from kernelformer.attention.relative.fft import is_safe

MAPS = ["favor+", "nprf", "hyperbolic", "regularized", "trigonometric", "trigonometric gaussian", "relu", "tanh", "elu",
        "gmm-rks", "gmm-prf", "fastfood-prf by rows", "generative-prf", "loglinear", "rfa"]  # fmt: skip
FEW = ["favor+", "trigonometric", "relu", "gmm-rks"]
ALGORITHMS = ("direct", "fft", "windowed", "plain")
H = 4


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch):
    """Segments of 16 tokens, so that short sequences have bands and tails."""
    monkeypatch.setattr(pairs, "CHUNK", 16)


def table(L, S, window=None, size=1.0, seed=3):
    """(H, L + S - 1), constant beyond the window, with gradients of what it was made from."""
    gen = torch.Generator().manual_seed(seed)
    reach = max(L, S) if window is None else window
    own = (size * torch.randn(H, 2 * reach + 1, generator=gen, dtype=torch.float64)).requires_grad_()
    return own, own[:, torch.arange(-(L - 1), S).clamp(-reach, reach) + reach]


def matrix(bias, L, S):
    return bias[:, torch.arange(S) - torch.arange(L)[:, None] + L - 1]


def grid_matrix(bias, rows, cols, prefix):
    i = torch.arange(rows * cols)
    inner = bias[:, i // cols - (i // cols)[:, None] + rows - 1, i % cols - (i % cols)[:, None] + cols - 1]
    return torch.nn.functional.pad(inner, (prefix, 0, prefix, 0))


def relative_call(core, query, key, bias):
    """A call of the algorithms themselves, at scale 1."""
    phi, layout = core.feature_map, Layout(query.shape[2], key.shape[2])
    spec = {"spec": phi.spec_id, "tensors": phi.prepare(query, key, None, 1.0), "scale": 1.0}
    return RelativeCall(query=query, key=key, value=key, bias=bias, layout=layout, **spec)


def agrees(variant, L, S, *, algorithm, causal, window=None, mask=None, size=1.0, tolerance=1e-9):
    core = build(variant)
    own, bias = table(L, S, window, size)
    leaves = inputs(L, S, grad=True)
    parameters = [x for x in core.parameters() if x.requires_grad]
    want = attend(variant, core, *leaves, is_causal=causal, key_mask=mask, bias=matrix(bias, L, S))
    out = core(*leaves, is_causal=causal, key_mask=mask, bias=bias, algorithm=algorithm, max_distance=window)
    close(out, want, tolerance)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=want.dtype)
    wanted = torch.autograd.grad((want * grad).sum(), [*leaves, own, *parameters], allow_unused=True, retain_graph=True)
    found = torch.autograd.grad((out * grad).sum(), [*leaves, own, *parameters], allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        if y is not None:
            close(x, y, 100 * tolerance)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("variant", MAPS)
def test_every_map_and_algorithm_follows_the_definition(variant, algorithm, causal):
    agrees(variant, 37, 37, algorithm=algorithm, causal=causal, window=6 if algorithm == "windowed" else None,
           mask=padding(2, 37), tolerance=1e-8 if algorithm == "fft" else 1e-9)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("variant", FEW)
def test_hidden_keys_may_hold_anything(variant, algorithm, causal):
    core, mask, window = build(variant), padding(2, 37), 6 if algorithm == "windowed" else None
    q, k, v = inputs(37)
    how = {"is_causal": causal, "key_mask": mask, "bias": table(37, 37, window)[1].detach()}
    how |= {"algorithm": algorithm, "max_distance": window}
    bad = [x.masked_fill(~mask[:, None, :, None], math.nan) for x in (k, v)]
    close(core(q, *bad, **how), core(q, k, v, **how))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("variant", ["skyformer softmax", "skyformer aligned", "skyformer learned softmax"])
def test_landmarks_of_the_softmax_kernel_carry_a_bias(variant, algorithm):
    for causal in (False, True) if "learned" in variant else (False,):
        agrees(variant, 37, 37, algorithm=algorithm, causal=causal, window=6 if algorithm == "windowed" else None,
               mask=padding(2, 37), tolerance=1e-7)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("L", "S"), [(1, 1), (2, 2), (16, 16), (17, 15), (33, 50), (50, 33), (64, 64)])
@pytest.mark.parametrize("variant", FEW)
def test_lengths_around_the_seams(variant, L, S, algorithm, causal):
    for window in (0, 5, 16, 40) if algorithm in ("windowed", "plain") else (None,):
        agrees(variant, L, S, algorithm=algorithm, causal=causal, window=window, tolerance=1e-8)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("algorithm", ["direct", "fft", "plain"])
@pytest.mark.parametrize(("rows", "cols", "prefix"), [(3, 5, 0), (4, 6, 2), (7, 3, 1), (1, 9, 0), (2, 20, 1)])
@pytest.mark.parametrize("variant", [*FEW, "softmax"])
def test_grids(variant, rows, cols, prefix, algorithm, causal):
    L = rows * cols + prefix
    core, leaves = build(variant), inputs(L, grad=True)
    gen = torch.Generator().manual_seed(1)
    bias = torch.randn(H, 2 * rows - 1, 2 * cols - 1, generator=gen, dtype=torch.float64).requires_grad_()
    for mask in (None, padding(2, L)):
        whole = grid_matrix(bias, rows, cols, prefix)
        want = attend(variant, core, *leaves, is_causal=causal, key_mask=mask, bias=whole)
        choice = None if variant == "softmax" else algorithm
        out = core(*leaves, is_causal=causal, key_mask=mask, bias=bias, num_prefix=prefix, algorithm=choice)
        close(out, want, 1e-8)
        grad = torch.randn_like(want)
        for x, y in zip(
            *(torch.autograd.grad((z * grad).sum(), [*leaves, bias], retain_graph=True) for z in (out, want)),
            strict=True,
        ):
            close(x, y, 1e-6)


@pytest.mark.parametrize("variant", ["softmax", "softmax unit"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (13, 13), (9, 14), (14, 9)])
def test_softmax_takes_a_bias(variant, causal, L, S):
    core = build(variant)
    for mask in (None, padding(2, S)):
        own, bias = table(L, S)
        leaves = inputs(L, S, G=2, grad=True)
        want = attend(variant, core, *leaves, is_causal=causal, key_mask=mask, bias=matrix(bias, L, S))
        out = core(*leaves, is_causal=causal, key_mask=mask, bias=bias)
        close(out, want)
        for x, y in zip(
            *(torch.autograd.grad(z.square().sum(), [*leaves, own], retain_graph=True) for z in (out, want)),
            strict=True,
        ):
            close(x, y, 1e-8)


def test_softmax_does_not_round_a_bias_to_half_precision():
    core = build("softmax", torch.float32)
    bias = table(64, 64, size=20.0)[1].detach().float()
    for mask, dtype in itertools.product((None, padding(2, 64)), (torch.float16, torch.bfloat16)):
        low = [x.to(dtype) for x in inputs(64)]
        wide = [x.double() for x in low]
        want = attend("softmax", core, *wide, key_mask=mask, bias=matrix(bias.double(), 64, 64))
        rounding = 1.01 * float((want.to(dtype).double() - want).abs().max())
        with torch.autocast("cpu", dtype):
            for q, k, v in (low, [x.float() for x in low]):
                out = core(q, k, v, key_mask=mask, bias=bias)
                assert out.dtype == dtype
                assert float((out.double() - want).abs().max()) <= rounding


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("variant", ["favor+", "favor+ per head", "trigonometric"])
def test_grouped_queries_and_half_precision(variant, algorithm):
    core = build(variant)
    _, bias = table(20, 20, 5)
    q, k, v = inputs(20, G=2)
    want = attend(variant, core, q, k, v, bias=matrix(bias, 20, 20))
    close(core(q, k, v, bias=bias, algorithm=algorithm), want, 1e-8)
    half = build(variant, torch.float32)
    low = [x.bfloat16() for x in (q, k, v)]
    want = attend(variant, core, *(x.double() for x in low), bias=matrix(bias, 20, 20))
    close(half(*low, bias=bias.detach().float(), algorithm=algorithm), want)


@pytest.mark.parametrize("variant", FEW)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_bias_that_falls_for_ever(variant, causal):
    L = 70
    core, leaves = build(variant), inputs(L, grad=True)
    slope = torch.tensor([1.0, 0.3, 0.05, 0.0], dtype=torch.float64)
    bias = -slope[:, None] * torch.arange(-(L - 1), L).abs()
    want = attend(variant, core, *leaves, is_causal=causal, bias=matrix(bias, L, L))
    for window, algorithm in itertools.product((0, 7, 20), (None, "plain")):
        out = core(*leaves, is_causal=causal, bias=bias, max_distance=window, slope=slope, algorithm=algorithm)
        close(out, want, 1e-8)
        for x, y in zip(*(torch.autograd.grad(z.square().sum(), leaves, retain_graph=True) for z in (out, want)),
                        strict=True):  # fmt: skip
            close(x, y, 1e-7)


def test_hidden_distances_and_rows_that_see_nothing():
    core = build("favor+")
    q, k, v = inputs(40)
    bias = torch.full((H, 79), -torch.inf, dtype=torch.float64)
    bias[:, 39 - 3 : 39] = 0.5  # the three keys before each query
    want = attend("favor+", core, q, k, v, bias=matrix(bias, 40, 40))
    for algorithm in ALGORITHMS:
        out = core(q, k, v, bias=bias, algorithm=algorithm)
        close(out, want, 1e-8)
        assert (out[:, :, 0] == 0).all()
    close(kf.build_attention("softmax", head_dim=8, num_heads=H)(q, k, v, bias=bias)[:, :, 0], torch.zeros(2, H, 6))


@pytest.mark.parametrize("variant", ["favor+", "trigonometric"])
@pytest.mark.parametrize("window", [None, 8])
def test_rows_that_later_keys_dwarf_are_exact(variant, window, monkeypatch):
    """In float32, with the first keys e^100 times smaller (or larger) than the later ones of their tile."""
    method, options = VARIANTS[variant]
    one, two = (kf.build_attention(method, head_dim=8, num_heads=H, scale=1.0, **options).to(t)
                for t in (torch.float32, torch.float64))  # fmt: skip
    q, k, v = (x.float() for x in inputs(24, seed=4))
    unit = torch.nn.functional.normalize(k, dim=-1)
    size = torch.full((24, 1), 0.1 if variant == "favor+" else 16.0)
    size[:5] = 16.0 if variant == "favor+" else 0.1
    _, bias = table(24, 24, window)
    bias = bias.detach().float()
    done = count_rescues(monkeypatch)
    leaves = [x.requires_grad_() for x in (torch.nn.functional.normalize(q, dim=-1) * 16, unit * size, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = one(*leaves, is_causal=True, bias=bias, max_distance=window)
    phi = two.feature_map
    if variant == "favor+":
        logs = [phi.spec.log_features(x, phi.prepare(x, x, None, 1.0), 1.0, r) for x, r in
                zip(exact[:2], ("query", "key"), strict=True)]  # fmt: skip
        scores = (logs[0].unsqueeze(-2) + logs[1].unsqueeze(-3)).logsumexp(-1) + matrix(bias.double(), 24, 24)
        weights = scores.masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        want = weights @ exact[2]
    else:
        want = two(*exact, is_causal=True, bias=bias.double(), algorithm="direct")
    assert (sum(done) > 0) == (variant == "favor+")  # a signed row is relative to what it sees
    row = ((out.double() - want).norm(dim=-1) / want.norm(dim=-1)).max()
    assert row < (1e-4 if variant == "favor+" else 1e-3)  # signed weights cancel
    for x, y in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), exact), strict=True):
        close(x, y, 1e-3)


def worst(core32, core64, q, k, v, bias, **options):
    got = core32(q.float(), k.float(), v.float(), bias=bias.float(), **options)
    exact = [x.float().double() for x in (q, k, v, bias)]
    want = core64(*exact[:3], bias=exact[3], algorithm="direct", is_causal=options.get("is_causal", False))
    return float(((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("size", [1, 10, 20, 40])
@pytest.mark.parametrize("norm", [1, 4, 16])
def test_the_worst_row_in_float32_whatever_is_chosen(size, norm, causal, monkeypatch):
    """Also where transforms would be faster, as the choice is made to believe."""
    monkeypatch.setattr("kernelformer.attention.dispatch.faster_by_fft", lambda *_: True)
    monkeypatch.setattr(pairs, "CHUNK", 256)
    cores = [kf.build_attention("favor+", head_dim=16, num_heads=H, num_features=64, scale=1.0).to(t)
             for t in (torch.float32, torch.float64)]  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    L = 512
    q, k, v = (torch.randn(1, H, L, 16, generator=gen, dtype=torch.float64) for _ in range(3))
    q, k = (norm * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    bias = size * (torch.rand(H, 2 * L - 1, generator=gen, dtype=torch.float64) - 0.5)
    assert worst(*cores, q, k, v, bias, is_causal=causal) < 1e-4
    clipped = bias[:, torch.arange(-(L - 1), L).clamp(-20, 20) + L - 1]
    assert worst(*cores, q, k, v, clipped, is_causal=causal) < 1e-4


def test_the_plain_transform_would_show_and_let_the_future_move_the_past():
    """Why the choice looks at the ranges: an unsafe transform is off by whole rows, and is not causal."""
    gen = torch.Generator().manual_seed(0)
    L, core = 512, kf.build_attention("favor+", head_dim=16, num_heads=H, num_features=64, scale=1.0)
    q, k, v = (torch.randn(1, H, L, 16, generator=gen) for _ in range(3))
    q, k = (4 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    bias = torch.zeros(H, 2 * L - 1)
    other = [x.clone() for x in (k, v)]
    other[0][:, :, 300:], other[1][:, :, 300:] = other[0][:, :, 300:].flip(2), 2 * other[1][:, :, 300:]

    def moved(**options):
        before = core(q, k, v, is_causal=True, bias=bias, **options)[:, :, :300]
        after = core(q, *other, is_causal=True, bias=bias, **options)[:, :, :300]
        return float(((after - before).norm(dim=-1) / before.norm(dim=-1)).max())

    assert moved(algorithm="fft") > 1e-3
    for algorithm in (None, "direct", "windowed"):
        assert moved(algorithm=algorithm) < 1e-4
    call = relative_call(core, q, k, bias)
    assert not is_safe(replace(call, is_causal=True))
    assert is_safe(replace(call, normalize_qk=True))


@pytest.mark.parametrize("variant", ["favor+", "relu", "trigonometric"])
def test_a_transform_that_cannot_be_right_is_refused(variant):
    core, exact = build(variant, torch.float32), build(variant)
    generator, problems = torch.Generator().manual_seed(0), []
    for norm, reach in itertools.product((1.0, 4.0, 16.0), (0.0, 20.0)):
        q, k, v = inputs(256, B=1, dtype=torch.float32)
        q, k = (norm * 8**0.25 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        bias = reach * torch.rand(H, 511, generator=generator)
        want = exact(*(x.double() for x in (q, k, v)), bias=bias.double(), is_causal=True)
        try:
            error = float((core(q, k, v, bias=bias, is_causal=True, algorithm="fft") - want).abs().max())
        except ValueError as problem:
            problems.append(str(problem))
        else:
            assert error < 0.1
    assert 0 < len(problems) < 6
    assert all("algorithm='fft' may be off by more than 10% in some row" in x for x in problems)


def test_an_unclipped_table_at_zero_gets_every_gradient():
    """It is constant by value, but it is trained: a window found by value would starve the far entries."""
    q, k, v = inputs(40)
    core = build("favor+")
    bias = torch.zeros(H, 79, dtype=torch.float64, requires_grad=True)
    assert find_window(bias, Layout(40, 40)) is None
    assert find_window(bias.detach(), Layout(40, 40)) == 0
    v = v * torch.arange(40)[:, None]
    want = attend("favor+", core, q, k, v, bias=matrix(bias, 40, 40)).square().sum()
    for algorithm in (None, "direct", "fft"):
        out = core(q, k, v, bias=bias, algorithm=algorithm).square().sum()
        (grad,), (full,) = (torch.autograd.grad(x, bias, retain_graph=True) for x in (out, want))
        close(grad / 1000, full / 1000, 1e-8)
        assert (grad.abs() > 1e-6).all()


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("variant", ["softmax", "favor+", "trigonometric", "favor+ near"])
def test_gradients_beyond_max_distance_go_to_the_entries_at_it(variant, causal):
    core = build(variant)
    ways = [None] if variant == "softmax" else [None, "chunked"] if variant == "favor+ near" else [None, *ALGORITHMS]
    for algorithm, (L, S) in itertools.product(ways, ((13, 13), (50, 40), (1, 9))):
        leaves, (own, bias) = inputs(L, S), table(L, S, 3)
        want = attend(variant, core, *leaves, is_causal=causal, bias=matrix(bias, L, S)).sin().sum()
        (wanted,) = torch.autograd.grad(want, own)
        raw = bias.detach().clone().requires_grad_()
        out = core(*leaves, is_causal=causal, bias=raw, max_distance=3, algorithm=algorithm)
        (found,) = torch.autograd.grad(out.sin().sum(), raw)
        distance = torch.arange(-(L - 1), S)
        assert not found[:, distance.abs() > 3].any()
        near = distance[distance.abs() <= 3]
        close(found[:, near + L - 1], wanted[:, near + 3], 1e-7)


def test_gradients_beyond_the_window_of_a_state_go_to_the_entry_at_it():
    core, (q, k, v) = build("favor+"), inputs(20)
    zero = torch.zeros(H, 39, dtype=torch.float64)
    before = [x[:, :, :12] for x in (q, k, v)]
    _, state = core(*before, is_causal=True, bias=zero[:, :23], max_distance=3, return_state=True)
    raw = zero[:, : 12 + 2 * 8 - 1].clone().requires_grad_()
    out = core(*(x[:, :, 12:] for x in (q, k, v)), is_causal=True, bias=raw, state=state)
    (found,) = torch.autograd.grad(out.sin().sum(), raw)
    assert not found[:, : 19 - 3].any()
    assert found[:, 19 - 3 : 20].all()


def test_the_window_is_found_by_value_on_both_sides():
    gen = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 21, generator=gen)
    assert constant_beyond(bias, 10) == 10
    bias[:, :5] = bias[:, 4:5]  # constant from distance -6
    assert constant_beyond(bias, 10) == 10
    bias[:, 13:] = bias[:, 13:14]  # and from +3
    assert constant_beyond(bias, 10) == 6
    assert constant_beyond(torch.zeros(2, 21), 10) == 0
    assert constant_beyond(torch.zeros(2, 1), 0) == 0


@pytest.mark.parametrize("scheme", [
    {"max_distance": 6}, {"max_length": 80}, {"scheme": "t5", "max_distance": 16, "num_buckets": 8},
    {"scheme": "alibi"},
])  # fmt: skip
@pytest.mark.parametrize("method", ["nprf", "trigonometric", "relu"])
def test_streams_agree_with_the_parallel_form(method, scheme):
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 4, method, num_features=12, causal=True, relative="1d", **scheme).double()
    if layer.positions.scheme != "alibi":
        torch.nn.init.normal_(layer.positions.weight)
    x = torch.randn(2, 75, 16, dtype=torch.float64)
    mask = torch.ones(2, 75, dtype=torch.bool)
    mask[0, :9], mask[1, 30:33] = False, False
    with torch.no_grad():
        for key_mask in (None, mask):
            want = layer(x, key_mask=key_mask)

            def piece(a, b, mask=key_mask):
                return None if mask is None else mask[:, a:b]

            state, parts = None, []
            for t in range(75):
                y, state = layer.step(x[:, t : t + 1], state, key_mask=piece(t, t + 1))
                parts.append(y)
            close(torch.cat(parts, 1), want, 1e-8)
            first, state = layer(x[:, :21], key_mask=piece(0, 21), return_state=True)
            second, state = layer(x[:, 21:60], key_mask=piece(21, 60), state=state, return_state=True)
            last = []
            for t in range(60, 75):
                y, state = layer.step(x[:, t : t + 1], state, key_mask=piece(t, t + 1))
                last.append(y)
            close(torch.cat([first, second, *last], 1), want, 1e-8)
    if "max_length" not in scheme:
        assert state.tensors[-1].shape[1] <= 64
    else:
        assert state.tensors[-1].shape[1] == 75  # an unbounded table keeps all keys


def test_gradients_pass_gradcheck():
    for variant in ("favor+", "trigonometric"):
        core = build(variant)
        leaves = inputs(5, B=1, D=8, E=3, grad=True)
        own, _ = table(5, 5, 2)
        index = torch.arange(-4, 5).clamp(-2, 2) + 2
        for algorithm in ALGORITHMS:

            def call(q, k, v, b, core=core, algorithm=algorithm, index=index):
                return core(
                    q, k, v, bias=b[:, index], algorithm=algorithm, max_distance=2 if algorithm == "windowed" else None
                )

            assert torch.autograd.gradcheck(call, (*leaves, own), fast_mode=True)


def test_one_sample_cannot_change_another():
    core = build("favor+", torch.float32)
    _, bias = table(40, 40, 6)
    bias = bias.detach().float()
    q, k, v = inputs(40, dtype=torch.float32)
    for algorithm in ALGORITHMS:
        alone = core(q[:1], k[:1], v[:1], bias=bias, algorithm=algorithm)
        q[1], k[1] = 30 * q[1], 30 * k[1]
        assert torch.allclose(core(q, k, v, bias=bias, algorithm=algorithm)[:1], alone, atol=1e-6)


def test_layers_share_positions_and_train_them():
    torch.manual_seed(0)
    positions = kf.RelativePositions(4, max_distance=3)
    layers = torch.nn.Sequential(
        *(kf.KernelAttention(16, 4, "nprf", num_features=8, relative=positions, seed=i) for i in range(2))
    )
    assert sum(x is positions.weight for x in set(layers.parameters())) == 1
    layers(torch.randn(2, 20, 16)).square().sum().backward()
    assert (positions.weight.grad.abs() > 0).all()
    assert positions.weight.shape == (4, 7)
    again = kf.RelativePositions(4, max_distance=3)
    again.load_state_dict(positions.state_dict())


def test_t5_buckets_are_the_published_ones():
    """Of a distance, by hand: exact up to 7, then logarithmic to 128 (32 buckets, both directions)."""
    from kernelformer.modules.positions import t5_buckets

    distance = torch.tensor([0, -1, -7, -8, -11, -12, -127, -128, -1000, 1, 8, 500])
    assert t5_buckets(distance, 32, 128, False).tolist() == [0, 1, 7, 8, 8, 9, 15, 15, 15, 17, 24, 31]
    assert t5_buckets(torch.tensor([3, 0, -15, -16, -127, -900]), 32, 128, True).tolist() == [0, 0, 15, 16, 31, 31]


def test_alibi_slopes_are_the_published_ones():
    from kernelformer.modules.positions import alibi_slopes

    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    slopes = alibi_slopes(12)
    assert len(slopes) == 12
    assert math.isclose(float(slopes[8]), 2**-0.5, rel_tol=1e-6)


@pytest.mark.parametrize("variant", ["favor+", "trigonometric"])
def test_it_compiles_without_a_break(variant):
    torch._dynamo.reset()  # the limit of recompilations is the process's
    core = build(variant, torch.float32)
    q, k, v = inputs(20, dtype=torch.float32)
    _, bias = table(20, 20, 5)
    bias = bias.detach().float()
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for options in ({}, {"max_distance": 5}):
        for is_causal in (False, True):
            out = compiled(*leaves, bias=bias, is_causal=is_causal, **options)
            close(out, core(*leaves, bias=bias, is_causal=is_causal, **options))
            out.sum().backward()


BAD = [
    ({"bias": torch.zeros(H, 24)}, r"\(4, 25\) for 13 queries and 13 keys, over distances j - i from -12 to 12"),
    ({"bias": torch.zeros(3, 25)}, r"= \(4, 25\).*got \(3, 25\)"),
    ({"bias": torch.full((H, 25), math.nan)}, "NaN"),
    ({"bias": torch.full((H, 25), math.inf)}, r"\+inf in it; -inf means hidden"),
    ({"bias": torch.zeros(H, 25, dtype=torch.long)}, "floating point tensor, got torch.int64"),
    ({"bias": torch.zeros(H, 5, 7)}, r"grid of 3 x 4 after num_prefix=0 tokens has 12 tokens, got 13"),
    ({"bias": torch.zeros(H, 4, 7)}, "2 rows - 1"),
    ({"bias": torch.zeros(H, 5, 7), "num_prefix": 1, "max_distance": 3}, "grid has no window"),
    ({"bias": torch.zeros(H, 25), "num_prefix": 1}, "num_prefix=1 is for tokens before a grid"),
    ({"bias": torch.zeros(H, 25), "algorithm": "slow"}, "unknown algorithm 'slow'"),
    ({"bias": torch.zeros(H, 25), "slope": torch.ones(H)}, "max_distance, which was not given"),
    (
        {"bias": torch.zeros(H, 25), "slope": torch.ones(3), "max_distance": 2},
        r"slope must be a floating point tensor \(heads\) = \(4,\)",
    ),
    ({"algorithm": "direct"}, "algorithm only mean something with a bias"),
    ({"max_distance": 3}, "max_distance only mean something with a bias"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_wrong_bias_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        build("favor+", torch.float32)(*inputs(dtype=torch.float32), **options)


@pytest.mark.parametrize(
    "variant", ["gaussian", "favor+ unnormalized", "skyformer", "nystromformer", "linformer", "rfa-gate"]
)
def test_methods_that_cannot_carry_a_bias_say_so(variant):
    core = build(variant, torch.float32)
    with pytest.raises(ValueError, match="takes no relative position bias"):
        core(*inputs(dtype=torch.float32), bias=torch.zeros(H, 25), is_causal=variant == "rfa-gate")


def test_wrong_positions_of_a_layer_are_named():
    def layer(**options):
        return kf.KernelAttention(
            16, 4, options.pop("method", "nprf"), relative=options.pop("relative", "1d"), **options
        )

    for options, message in (
        ({}, "needs max_length="),
        ({"relative": "3d"}, "unknown relative '3d'"),
        ({"relative": "2d"}, r"needs grid=\(rows, columns\)"),
        ({"relative": "2d", "grid": (0, 3)}, "grid rows"),
        ({"method": "gaussian", "max_distance": 3}, "takes no relative positions"),
        ({"relative": kf.RelativePositions(2, max_distance=3)}, "have 2 heads, and the layer 4"),
        ({"scheme": "alibi", "max_distance": 3}, "falls for ever"),
        ({"scheme": "rope"}, "unknown scheme 'rope'"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**options)
    short = layer(max_length=8, causal=True)
    with pytest.raises(ValueError, match="max_length=8, got 9 tokens"):
        short(torch.randn(1, 9, 16))
    image = layer(relative="2d", grid=(2, 3), num_prefix=1)
    with pytest.raises(ValueError, match="has 7 tokens, got 6 queries"):
        image(torch.randn(1, 6, 16))


def test_states_with_and_without_a_bias_do_not_mix():
    core = build("favor+", torch.float32)
    q, k, v = inputs(6, dtype=torch.float32)
    _, plain = core(q, k, v, is_causal=True, return_state=True)
    _, state = core(q, k, v, is_causal=True, return_state=True, bias=torch.zeros(H, 11), max_distance=3)
    one = [x[:, :, :1] for x in (q, k, v)]
    with pytest.raises(ValueError, match="made without a bias, this call has one"):
        core.step(*one, plain, bias=torch.zeros(H, 4))
    with pytest.raises(ValueError, match="made with a bias, this call has none"):
        core.step(*one, state)
    with pytest.raises(ValueError, match=r"keeps 3 keys one by one, so bias must be \(heads, 4\)"):
        core.step(*one, state, bias=torch.zeros(H, 6))
    with pytest.raises(ValueError, match="constant beyond that distance, and it is beyond 11 only"):
        core(q, k, v, is_causal=True, state=state, bias=torch.randn(H, 17))
    with pytest.raises(ValueError, match="in step bias must be"):
        core.step(*one, state, bias=torch.zeros(3, 4))


@pytest.mark.parametrize("method", ["favor+", "trigonometric"])
def test_a_dwarfed_row_of_a_stream_remembers_the_past(method):
    """Rows done again must count what only the sums of the stream know."""
    core = kf.build_attention(method, head_dim=8, num_heads=H, num_features=64, scale=1.0).double()
    q, k, v = inputs(40, B=1)
    q, k = 0.3 * q, 0.3 * k
    big = 14.0 if method == "trigonometric" else 30.0
    k[:, :, 35 if method == "trigonometric" else slice(0, 20)] *= big / 0.3
    zero = torch.zeros(H, 79, dtype=torch.float64)
    want = core(q, k, v, is_causal=True, bias=zero, algorithm="direct")

    def cut(a, b):
        return (x[:, :, a:b] for x in (q, k, v))

    with torch.no_grad():
        _, state = core(*cut(0, 20), is_causal=True, bias=zero[:, :39], max_distance=3, return_state=True)
        got = core(*cut(20, 40), is_causal=True, bias=zero[:, :59], max_distance=3, state=state)
        close(got, want[:, :, 20:], 1e-8)
        parts = []
        for t in range(20, 40):
            y, state = core.step(*cut(t, t + 1), state, bias=zero[:, :4])
            parts.append(y)
    close(torch.cat(parts, 2), want[:, :, 20:], 1e-8)


def test_a_compiled_prefill_hands_its_state_on():
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 4, "nprf", num_features=8, causal=True, relative="1d", max_distance=3)
    torch.nn.init.normal_(layer.positions.weight)
    x = torch.randn(2, 20, 16)

    def split(x):
        first, state = layer(x[:, :9], return_state=True)
        second, _ = layer(x[:, 9:], state=state, return_state=True)
        return torch.cat([first, second], 1)

    with torch.no_grad():
        close(torch.compile(split, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize(
    "how",
    [{"algorithm": "direct"}, {"max_distance": 20}, {"max_distance": 20, "algorithm": "plain"}],
    ids=["direct", "windowed", "plain"],
)
def test_a_row_whose_only_keys_have_factors_below_float_range_is_no_empty_row(how):
    core = kf.build_attention("nprf", head_dim=4, num_heads=H, num_features=8)
    q, k, v = inputs(60, D=4, dtype=torch.float32)
    bias = (torch.arange(-59, 60).clamp(-20, 20) * -6.0).repeat(H, 1)  # exp(-120) of the largest factor at distance 0
    got = core(q, k, v, is_causal=True, bias=bias, **how)
    want = attend(
        "nprf", core.double(), q.double(), k.double(), v.double(), is_causal=True, bias=matrix(bias, 60, 60).double()
    )
    close(got.double(), want, 1e-5)


def test_a_bias_that_hides_keys_is_not_safe_for_transforms():
    core = kf.build_attention("nprf", head_dim=8, num_heads=H, num_features=8)
    q, k, _ = inputs(20, dtype=torch.float32)
    bias = torch.zeros(H, 39)
    call = relative_call(core, q / 10, k / 10, bias)
    assert is_safe(call)
    bias[:, 20:] = -torch.inf
    assert not is_safe(call)


def test_rows_that_see_nothing_are_not_done_again(monkeypatch):
    """A sliding window over right padding: half of the rows see no key, which is an answer."""
    done = count_rescues(monkeypatch)
    core = build("nprf", torch.float32)
    q, k, v = inputs(64, dtype=torch.float32)
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[:, 32:] = False
    bias = torch.full((H, 127), -torch.inf)
    bias[:, 60:67] = 0
    for is_causal in (False, True):
        out = core(q, k, v, key_mask=mask, bias=bias, max_distance=4, is_causal=is_causal)
        assert (out[:, :, 40:] == 0).all()
        assert out.isfinite().all()
    fall = -torch.arange(-63, 64).abs().float().expand(H, -1)
    out = core(q, k, v, key_mask=mask, bias=fall, max_distance=4, slope=torch.ones(H), is_causal=True)
    want = attend("nprf", build("nprf"), *(x.double() for x in (q, k, v)), is_causal=True, key_mask=mask,
                  bias=matrix(fall.double(), 64, 64))  # fmt: skip
    close(out, want)
    assert not done


def test_claims_about_the_tail_are_checked():
    core = build("favor+", torch.float32)
    leaves = inputs(dtype=torch.float32)
    bias = torch.randn(H, 25, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError, match=r"max_distance=3 says that the bias is constant beyond .* it is beyond 12 only"
    ):
        core(*leaves, bias=bias, max_distance=3)
    with pytest.raises(ValueError, match="falls by it per token beyond max_distance=3, and it does not"):
        core(*leaves, bias=torch.zeros(H, 25), max_distance=3, slope=torch.ones(H))
    for slope in (-torch.ones(H), torch.full((H,), math.nan)):
        with pytest.raises(ValueError, match="slopes must be finite and at least 0"):
            core(*leaves, bias=torch.zeros(H, 25), max_distance=3, slope=slope)
    with pytest.raises(ValueError, match=r"slope must be a floating point tensor \(heads\) = \(4,\), got float"):
        core(*leaves, bias=torch.zeros(H, 25), max_distance=3, slope=1.0)
    future = bias.clone()
    future[:, :10] = future[:, 9:10]  # constant beyond 3 in the past, not in the future, which causality hides
    core(*leaves, bias=future, max_distance=3, is_causal=True)
    assert find_window(future, Layout(13, 13), True) == 3
    assert find_window(future, Layout(13, 13)) is None


@pytest.mark.parametrize("window", [None, 2, 20])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "gmm-prf"])
def test_gradients_flow_through_the_states_of_a_stream(variant, window):
    """A prompt, some more tokens at once and three one by one: as all at once, unless a state is detached."""
    L, core = 40, build(variant)
    own, bias = table(L, L, window)
    leaves = [*inputs(L, grad=True), own, *(x for x in core.parameters() if x.requires_grad)]

    def cut(a, b):
        return [x[:, :, a:b] for x in leaves[:3]]

    def stream(change=lambda state: state):
        parts, state, past = [], None, 0
        for end in (25, 37, 38, 39, 40):
            near = bias[:, L - end : L - past + end - 1]
            y, state = core(*cut(past, end), is_causal=True, bias=near, max_distance=window, state=state,
                            return_state=True)  # fmt: skip
            parts, state, past = [*parts, y], change(state), end
        return torch.cat(parts, 2)

    want = core(*leaves[:3], is_causal=True, bias=bias, algorithm="direct")
    close(stream(), want, 1e-8)
    grad = torch.randn_like(want)
    wanted, given = (torch.autograd.grad((x * grad).sum(), leaves, retain_graph=True) for x in (want, stream()))
    for x, y in zip(given, wanted, strict=True):
        close(x, y, 1e-7)
    cut_off = torch.autograd.grad((stream(lambda state: state.detach()) * grad).sum(), leaves[1])[0]
    assert not torch.allclose(cut_off, wanted[1])


def test_a_state_knows_whether_it_fades():
    core = build("favor+", torch.float32)
    q, k, v = inputs(6, dtype=torch.float32)
    slope = torch.ones(H)
    bias = -torch.arange(-5, 6).abs().float().expand(H, -1)
    _, state = core(q, k, v, is_causal=True, bias=bias, max_distance=2, slope=slope, return_state=True)
    one = [x[:, :, :1] for x in (q, k, v)]
    with pytest.raises(ValueError, match="made with a slope, this call has none"):
        core.step(*one, state, bias=bias[:, 5:8])
    long = -torch.arange(-11, 6).abs().float().expand(H, -1)
    with pytest.raises(ValueError, match="keeps 2 keys one by one, got max_distance=3"):
        core(q, k, v, is_causal=True, bias=long, max_distance=3, slope=slope, state=state)


def test_positions_of_nothing_on_meta_and_in_half_precision():
    layer = kf.KernelAttention(16, 4, "nprf", num_features=8, relative="1d", max_distance=3)
    assert layer(torch.randn(2, 0, 16)).shape == (2, 0, 16)
    core = build("favor+", torch.float32)
    for L, S in ((0, 0), (0, 5), (5, 0)):
        for algorithm in (None, *ALGORITHMS):
            q, k, v = inputs(L, S, dtype=torch.float32, grad=True)
            out = core(q, k, v, bias=torch.zeros(H, max(L + S - 1, 0)), algorithm=algorithm)
            assert out.shape == (2, H, L, 6)
            assert (out == 0).all()
            out.sum().backward()
    alibi = kf.RelativePositions(4, scheme="alibi").to("meta").to_empty(device="cpu")
    alibi.reset_parameters()
    torch.testing.assert_close(alibi(3, 3)["bias"][0], -0.25 * torch.tensor([2.0, 1, 0, 1, 2]))
    torch.testing.assert_close(alibi.bfloat16()(600, 600)["bias"][0, 0], torch.tensor(-0.25 * 599))
    with pytest.raises(ValueError, match="grid must be a pair"):
        kf.RelativePositions(4, grid=14)


def test_biased_weights_can_be_looked_at():
    core = build("favor+")
    q, k, v = inputs(9)
    _, bias = table(9, 9, 2)
    weights = core.attention_matrix(q, k, bias=bias, max_distance=2)
    close(weights.sum(-1), torch.ones(2, H, 9, dtype=torch.float64))
    close(weights @ v, core(q, k, v, bias=bias, max_distance=2))


@pytest.mark.parametrize("scheme", [{"max_distance": 3}, {"max_distance": 0}, {"scheme": "alibi"}])
def test_long_streams_stay_small_and_right_in_float32(scheme):
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 4, "favor+", num_features=12, causal=True, relative="1d", **scheme)
    if layer.positions.scheme != "alibi":
        torch.nn.init.normal_(layer.positions.weight)
    x = torch.randn(1, 300, 16)
    with torch.no_grad():
        want, state, parts = layer(x), None, []
        sizes = set()
        for t in range(300):
            y, state = layer.step(x[:, t : t + 1], state)
            parts.append(y)
            if t > 70:
                sizes.add(state.nbytes)
    close(torch.cat(parts, 1), want, 1e-4)
    assert len(sizes) == 1


@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "padded"])
@pytest.mark.parametrize("method", ["softmax", "favor+"])
def test_a_transposed_table_is_the_same_table(method, masked):
    L, mask = 37, padding(2, 37) if masked else None
    core = kf.build_attention(method, head_dim=8, num_heads=H, **({"num_features": 16} if method == "favor+" else {}))
    own = torch.randn(2 * L - 1, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    transposed = own.T.requires_grad_()  # as an embedding of distances gives it
    assert not transposed.is_contiguous()
    for causal in (False, True):
        found, want = (
            core.double()(*inputs(L), bias=x, is_causal=causal, key_mask=mask) for x in (transposed, own.T.contiguous())
        )
        close(found, want)
        weights = core.attention_matrix(*inputs(L)[:2], bias=own.T, is_causal=causal, key_mask=mask)
        close(weights @ inputs(L)[2], found)
        found.sum().backward()
    assert torch.isfinite(transposed.grad).all()
