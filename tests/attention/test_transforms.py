"""Derivatives by torch's other ways (forward mode, vmap, twice): right, or refused by name; never silently wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kernelformer as kf
from definition import build, inputs

H = 4
REFUSED = "carries a forward-mode tangent, which is not supported; use reverse mode"
METHODS = (
    "softmax",
    "gaussian",
    "favor+",
    "gmm-rks",
    "loglinear",
    "rfa-gate",
    "skyformer",
    "linformer",
)
f64 = {"dtype": torch.float64}


class Calling(torch.nn.Module):
    """One call of a core as a module, so that `functional_call` can exchange its parameters."""

    def __init__(self, core, call):
        super().__init__()
        self.core, self.call = core, call

    def forward(self, tensors):
        return self.call(self.core, **tensors)


def result(of):
    """What a function returns, or what it says when it refuses."""
    try:
        return of(), ""
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return None, str(error)


def calls(core):
    """Name, call and tensors of every way to use a core."""
    q, k, v = inputs(5, B=1)
    gen = torch.Generator().manual_seed(1)
    three = {"q": q, "k": k, "v": v}
    bias = {**three, "bias": torch.randn(H, 9, generator=gen, **f64)}
    for causal in (False, True):
        if core.refusal(causal) is not None:
            continue
        yield f"causal {causal}", lambda c, q, k, v, on=causal: c(q, k, v, is_causal=on), three
        for algorithm in ("direct", "fft", "windowed") if core.takes_bias and core.feature_dim else ():
            yield (
                f"{algorithm} {causal}",
                lambda c, q, k, v, bias, on=causal, by=algorithm: c(q, k, v, bias=bias, is_causal=on, algorithm=by),
                bias,
            )
    if core.takes_bias:
        yield "bias", lambda c, q, k, v, bias: c(q, k, v, bias=bias), bias
        yield (
            "matrix",
            lambda c, q, k, bias: c.attention_matrix(q, k, bias=bias),
            {x: bias[x] for x in ("q", "k", "bias")},
        )
    if core.takes_gate:
        gate = {**three, "gate": 0.1 + 0.8 * torch.rand(1, H, 5, generator=gen, **f64)}
        yield "gate", lambda c, q, k, v, gate: c(q, k, v, gate=gate, is_causal=True), gate
    elif core.refusal(False) is None:
        yield "recall", lambda c, q, k, v: c.recall(q, c.remember(k, v)), three
    if core.method in ("skyformer", "linformer"):
        return
    first, second = ([x[:, :, i : i + 1] for x in (q, k, v)] for i in range(2))
    state = core.step(*first)[1]
    yield "step", lambda c, q, k, v: c.step(q, k, v, state)[0], dict(zip("qkv", second, strict=True))
    if core.takes_bias:
        near = torch.randn(H, 3, generator=gen, **f64)
        before = core.step(*first, bias=near)[1].detach()
        yield "step bias", lambda c, bias: c.step(*second, before, bias=bias)[0], {"bias": near}


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_mode_derivative_is_right_or_refused(method):
    core = build(method)
    refused, right = set(), set()
    for name, call, tensors in calls(core):
        module = Calling(core, call)
        learned = {f"core.{n}": x.detach() for n, x in core.named_parameters()}
        for what in (*tensors, *learned):
            x = {**tensors, **learned}[what]

            def of(y, module=module, what=what, tensors=tensors):
                if what in tensors:
                    return module({**tensors, what: y})
                return torch.func.functional_call(module, {what: y}, (tensors,))

            way = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
            got, error = result(lambda of=of, x=x, way=way: torch.func.jvp(of, (x,), (way,))[1])
            if error:
                assert "forward-mode tangent" in error or "forward AD" in error  # ours, or that of torch's attention
                refused.add(what)
                continue
            step = 1e-6
            with torch.no_grad():
                slope = (of(x + step * way) - of(x - step * way)) / (2 * step)
            torch.testing.assert_close(got, slope, rtol=1e-4, atol=1e-5, msg=lambda m, at=(name, what): f"{at}: {m}")
            right.add(what)
    if core.feature_dim:
        assert not refused
        assert {"q", "k", "v"} <= right
    if core.takes_bias:
        assert "bias" in right  # by torch's own operations, which have the formula


def test_a_slope_takes_no_tangent():
    core = kf.build_attention("loglinear", head_dim=8, num_heads=H, num_features=8)
    q, k, v = inputs(5, dtype=torch.float32)
    bias, slope = torch.zeros(H, 9), torch.zeros(H)
    of, one = lambda t: core(q, k, v, bias=bias, max_distance=2, slope=t), torch.ones_like(slope)
    with pytest.raises(ValueError, match=f"^slope {REFUSED}"):
        torch.func.jvp(of, (slope,), (one,))
    with pytest.raises(ValueError, match=f"^slope {REFUSED}"):
        torch.func.jacfwd(of)(slope)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=f"^slope {REFUSED}"):
        of(forward_ad.make_dual(slope, one))
    of(slope)  # without a tangent, all is well


def test_tangents_of_gates_learned_maps_and_samples_are_right():
    core, gated = build("loglinear"), build("rfa-gate")
    near = kf.build_attention("favor+", head_dim=8, num_heads=H, num_features=8, window=2, sinks=1).double()
    q, k, v = inputs(5)
    gate = torch.full((2, H, 5), 0.5, **f64)

    def by_map(weight):
        return torch.func.functional_call(core, {"feature_map.b_k": weight}, (q, k, v))

    for of, at in (
        (lambda t: gated(q, k, v, gate=t, is_causal=True), gate),
        (by_map, core.feature_map.b_k.detach()),
        (lambda t: core(t, k, v, is_causal=True), q),
        (lambda t: core(q, t, v), k),
        (lambda t: near(q, t, v, is_causal=True), k),
        (torch.func.vmap(lambda t: core(t, k, v)), torch.stack([q, 2 * q])),
    ):
        way = torch.randn(at.shape, generator=torch.Generator().manual_seed(2), **f64)
        with torch.no_grad():
            want = (of(at + 1e-6 * way) - of(at - 1e-6 * way)) / 2e-6
        torch.testing.assert_close(torch.func.jvp(of, (at,), (way,))[1], want, rtol=1e-4, atol=1e-6)
        with forward_ad.dual_level():
            out = of(forward_ad.make_dual(at, way))
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, want, rtol=1e-4, atol=1e-6)


def test_the_tangent_of_a_table_of_positions_is_that_of_its_entries():
    layer = kf.KernelAttention(16, 2, "nprf", num_features=8, causal=True, relative="1d", max_distance=2).double()
    x = torch.randn(2, 5, 16, **f64)

    def by_layer(weight):
        return torch.func.functional_call(layer, {"positions.weight": weight}, (x,))

    at = layer.positions.weight.detach()
    way = torch.randn(at.shape, generator=torch.Generator().manual_seed(2), **f64)
    want = (by_layer(at + 1e-6 * way) - by_layer(at - 1e-6 * way)).detach() / 2e-6
    torch.testing.assert_close(torch.func.jvp(by_layer, (at,), (way,))[1], want, rtol=1e-4, atol=1e-6)
    with forward_ad.dual_level():
        out = by_layer(forward_ad.make_dual(at, way))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, want, rtol=1e-4, atol=1e-6)


def test_a_compiled_core_drops_no_tangent():
    core = kf.build_attention("favor+", head_dim=8, num_heads=H, num_features=8)
    q, k, v = inputs(5, dtype=torch.float32)
    bias = torch.randn(H, 9)
    compiled = torch.compile(core, backend="eager")
    compiled(q, k, v, bias=bias)
    want = torch.func.jvp(lambda x: core(q, k, v, bias=x), (bias,), (bias,))[1]
    with forward_ad.dual_level():
        out = compiled(q, k, v, bias=forward_ad.make_dual(bias, bias))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, want)
        assert forward_ad.unpack_dual(compiled(q, k, v, bias=bias)).tangent is None  # nothing to lose here


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_is_right_or_refused(method):
    core = build(method)
    causal = method == "rfa-gate"
    q, k, v = inputs(3, B=1, grad=True)

    def slope(x):
        return torch.autograd.grad(core(x, k, v, is_causal=causal).square().sum(), x, create_graph=True)[0]

    got, error = result(lambda: torch.autograd.grad(slope(q).sum(), q)[0])
    if error:  # that of torch's own attention
        assert method in ("softmax", "linformer")
        assert "is not implemented" in error
        return
    steps = 1e-6 * torch.eye(q.numel(), **f64).view(-1, *q.shape)
    want = [(slope(q + x) - slope(q - x)).sum() / 2e-6 for x in steps]
    torch.testing.assert_close(got.flatten(), torch.stack(want), rtol=1e-4, atol=1e-5)


OPERATORS = {  # method, options, algorithm, and whether there is a bias
    "direct": ("favor+", {}, None, False),
    "sums": ("loglinear", {}, "chunked", False),
    "banded": ("favor+", {}, None, True),
    "near and far": ("loglinear", {"window": 3, "sinks": 1}, None, False),
    "near and far with a bias": ("favor+", {"window": 3, "sinks": 1, "beta": "learned"}, None, True),
    "near": ("local", {"window": 2, "sinks": 1}, None, True),
    "gaussian": ("gaussian", {}, None, False),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_second_derivatives_of_operators_pass_gradgradcheck(kind, is_causal):
    method, options, algorithm, is_biased = OPERATORS[kind]
    more = {"num_features": 6} if method not in ("local", "gaussian") else {}
    core = kf.build_attention(method, head_dim=4, num_heads=H, **more, **options).double()
    mask = torch.tensor([[True, False, True, True, True, True]])
    leaves = inputs(6, B=1, G=2, D=4, E=3, grad=True)
    entries = torch.randn(H, 5, generator=torch.Generator().manual_seed(1), **f64).requires_grad_()

    def run(q, k, v, b, *_):
        bias = {"bias": b[:, torch.arange(-5, 6).clamp(-2, 2) + 2], "max_distance": 2} if is_biased else {}
        return core(q, k, v, is_causal=is_causal, key_mask=mask, algorithm=algorithm, **bias)

    everything = [*leaves, entries, *core.parameters()]
    assert torch.autograd.gradgradcheck(run, everything, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("options", [{}, {"window": 3, "sinks": 1}], ids=["all", "near and far"])
@pytest.mark.parametrize("is_biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("algorithm", [None, "chunked"])
def test_a_gradient_penalty_is_that_of_plain_operations(algorithm, is_biased, options, is_causal):
    core = kf.build_attention("loglinear", head_dim=4, num_heads=H, num_features=6, **options).double()
    x, entries = (torch.randn(*n, generator=torch.Generator().manual_seed(1), **f64) for n in ((2, H, 9, 4), (H, 5)))
    x, entries = x.requires_grad_(), entries.requires_grad_()
    index = torch.arange(-8, 9).clamp(-2, 2) + 2

    def attend(x, entries, algorithm):
        bias = {"bias": entries[:, index], "max_distance": 2} if is_biased else {}
        both = x.tanh()  # queries and keys are one tensor
        return core(both, both, x, is_causal=is_causal, algorithm=algorithm, **bias)

    def penalty(run):
        learned = [x, entries, *core.parameters()]
        grads = torch.autograd.grad(run().sin().sum(), learned, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), learned, materialize_grads=True)

    want = penalty(lambda: attend(x, entries, "plain"))
    for run in (attend, partial(checkpoint, attend, use_reentrant=False)):
        for a, b in zip(penalty(partial(run, x, entries, algorithm)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_with_a_graph_of_calls_without_tokens_are_empty():
    core = kf.build_attention("favor+", head_dim=4, num_heads=H, num_features=6, window=3).double()
    leaves = inputs(0, D=4, grad=True)
    assert all(not x.numel() for x in torch.autograd.grad(core(*leaves).sum(), leaves, create_graph=True))


def test_the_gradients_of_dropped_weights_are_the_same_with_a_graph_and_have_none_themselves():
    core = kf.build_attention("local", head_dim=4, num_heads=H, window=3, attention_dropout=0.5).double().train()
    leaves = inputs(7, D=4, grad=True)
    out = core(*leaves).sin().sum()
    first, second = (torch.autograd.grad(out, leaves, retain_graph=True, create_graph=x) for x in (False, True))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        second[0].sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_vmap_and_reverse_mode_of_torch_func_are_right_or_refused(method):
    core = build(method)
    causal = method == "rfa-gate"
    q, k, v = inputs(5, grad=True)
    several = torch.stack([q, 2 * q]).detach()

    def attend(x, algorithm=None):
        return core(x, k, v, is_causal=causal, algorithm=algorithm)

    for algorithm in (None, "plain") if core.takes_loops and not core.takes_gate else (None,):
        one = partial(attend, algorithm=algorithm)
        got, error = result(partial(torch.func.vmap(one), several))
        if not error:
            torch.testing.assert_close(got, torch.stack([attend(x) for x in several]))
        slope, refused = result(partial(torch.func.grad(lambda x, one=one: one(x).sin().sum()), q))
        if not refused:
            torch.testing.assert_close(slope, torch.autograd.grad(attend(q).sin().sum(), q)[0])
        for problem in (error, refused):
            assert not problem or f"{method!r} does not support the transform of torch.func" in problem
            assert not problem or algorithm is None, "what is named instead must work"
