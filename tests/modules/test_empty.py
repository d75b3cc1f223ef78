"""Sizes of 0: no samples, no queries, no keys, no width. Every call answers in the right shape, with gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernelformer as kf
from definition import build, close, inputs
from kernelformer.modules import MixedCore

H, GROUPS = 4, 2
SIZES = [  # B, L, S, E
    pytest.param(0, 5, 5, 6, id="no samples"),
    pytest.param(2, 0, 5, 6, id="no queries"),
    pytest.param(2, 5, 0, 6, id="no keys"),
    pytest.param(2, 0, 0, 6, id="no tokens"),
    pytest.param(2, 5, 5, 0, id="no width"),
    pytest.param(0, 0, 0, 0, id="nothing"),
]
# A map of each kind of arithmetic, and every core without one.
KINDS = [
    "softmax",
    "gaussian",
    "gaussian normalized",
    "favor+",
    "trigonometric",
    "fastfood-prf by rows",
    "loglinear",
    "rfa-gate",
    "skyformer softmax",
    "nystromformer",
    "linformer",
]
STREAMING = ["softmax", "gaussian", "favor+", "trigonometric", "loglinear", "rfa-gate"]


@pytest.fixture(scope="module")
def cores():
    return {x: build(x, torch.float32, **({"conv": 3} if x == "nystromformer" else {})) for x in KINDS}


def check(out, shape, leaves):
    """This shape, finite, and a gradient to every leaf."""
    assert out.shape == shape
    assert out.isfinite().all()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves, allow_unused=True), strict=True):
        assert grad is not None
        assert grad.shape == x.shape
        assert grad.isfinite().all()


@pytest.mark.parametrize(("B", "L", "S", "E"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_and_from_a_memory(cores, kind, B, L, S, E):
    core = cores[kind]
    if kind == "nystromformer" and L != S:
        return  # its convolution of the values needs as many queries
    shape = (B, H, L, E)
    leaves = inputs(L, S, B=B, E=E, G=GROUPS, dtype=torch.float32, grad=True)
    q, k, v = leaves
    some = torch.ones(B, S, dtype=torch.bool)
    some[:, :1] = False
    table = torch.zeros(H, max(L + S - 1, 0), requires_grad=True)
    ways = [{}, {"max_distance": 2}, {"max_distance": 0}] if core.takes_bias else []
    ways += [{"algorithm": x} for x in ("direct", "fft", "windowed") if core.takes_bias and core.feature_dim]
    for causal, mask in itertools.product((False, True), (None, some)):
        if core.refusal(causal) is not None:
            continue
        options = {"is_causal": causal, "key_mask": mask}
        out = core(q, k, v, **options)
        assert (out == 0).all() or S > 0
        check(out, shape, [*leaves, *core.parameters()])
        for way in ways:
            check(core(q, k, v, bias=table, **options, **way), shape, [*leaves, table])
        if core.takes_gate:
            gate = torch.full((B, H, S), 0.5, requires_grad=True)
            check(core(q, k, v, gate=gate, **options), shape, [*leaves, gate])
        elif not causal:
            remembered = core.recall(q, core.remember(k, v, key_mask=mask))
            check(remembered, shape, leaves)
            close(remembered, core(q, k, v, key_mask=mask, query_mask=torch.ones(B, L, dtype=torch.bool)))
            assert core.attention_matrix(q, k).shape == (B, H, L, S)


@pytest.mark.parametrize(("B", "L", "S", "E"), SIZES)
@pytest.mark.parametrize("kind", ["favor+", "trigonometric", "hyperbolic sinks", "favor+ near", "local"])
def test_all_chunks_at_once(kind, B, L, S, E):
    core = build(kind, torch.float32)
    leaves = inputs(L, S, B=B, E=E, dtype=torch.float32, grad=True)
    table = torch.zeros(H, max(L + S - 1, 0), requires_grad=True)
    ways = [{}, {"bias": table, "max_distance": 2}] if kind == "favor+" else [{}]
    for causal, mask, way in itertools.product((False, True), (None, torch.ones(B, S, dtype=torch.bool)), ways):
        options = {"is_causal": causal, "key_mask": mask, **way}
        out = core(*leaves, algorithm="plain", **options)
        check(out, (B, H, L, E), leaves)
        close(out, core(*leaves, algorithm="chunked", **options))
        assert (out == 0).all() or S > 0


@pytest.mark.parametrize("window", [None, 0, 2, "all"])  # None: no bias; "all": one without a window
@pytest.mark.parametrize("kind", STREAMING)
def test_streams_in_empty_pieces(cores, kind, window):
    core = cores[kind]
    if window is not None and not core.takes_bias:
        return
    for (B, E), cuts in itertools.product(((0, 6), (2, 0), (2, 6)), ((0, 0, 3), (0, 1, 1))):
        n = cuts[-1] + 2  # two steps after the pieces
        leaves = inputs(n, B=B, E=E, G=GROUPS, dtype=torch.float32, grad=True)
        fall = -torch.arange(n).float().clamp_max(n if window in (None, "all") else window)  # by distance
        table = torch.cat([fall.flip(0), torch.zeros(n - 1)]).expand(H, -1)

        def bias(past, length, table=table, n=n):
            if window is None:
                return {}
            return {"bias": table[:, n - past - length : n - 1 + length] if past + length else table[:, :0]}

        outs, state = [], None
        for start, end in itertools.pairwise(cuts):
            first = {"max_distance": window} if state is None and window not in (None, "all") else {}
            piece = [x[:, :, start:end] for x in leaves]
            out, state = core(
                *piece, is_causal=True, state=state, return_state=True, **bias(start, end - start), **first
            )
            assert (state.length, state.batch) == (end, B)
            outs.append(out)
            state = state.detach()
        near = {} if window is None else {"bias": fall[: n if window == "all" else window + 1].expand(H, -1)}
        if window not in (None, "all"):
            near["bias"] = -torch.arange(window + 1).float().expand(H, -1)
        for at in (n - 2, n - 1):
            out, state = core.step(*(x[:, :, at : at + 1] for x in leaves), state, **near)
            outs.append(out)
            state = state.detach()
        together = torch.cat(outs, 2)
        check(together, (B, H, n, E), leaves)
        close(together, core(*leaves, is_causal=True, **bias(0, n)))


@pytest.mark.parametrize("relative", [{}, {"relative": "1d", "max_distance": 2}, {"relative": "1d", "scheme": "alibi"}])
@pytest.mark.parametrize("method", ["softmax", "favor+"])
def test_layers(method, relative):
    layer = kf.KernelAttention(16, 4, method, causal=True, num_kv_heads=2, **relative)
    for B, L in ((0, 5), (2, 0), (0, 0)):
        x = torch.randn(B, L, 16, requires_grad=True)
        check(layer(x), (B, L, 16), [x, *layer.parameters()])
    prompt, state = layer(torch.randn(2, 0, 16), return_state=True)
    assert prompt.shape == (2, 0, 16)
    x = torch.randn(2, 3, 16)
    rows = []
    with torch.no_grad():
        for i in range(3):
            y, state = layer.step(x[:, i : i + 1], state)
            rows.append(y)
        close(torch.cat(rows, 1), layer(x))
        assert layer.step(x[:0, :1])[0].shape == (0, 1, 16)


@pytest.mark.parametrize(("B", "L", "S", "E"), SIZES)
def test_mixed_heads(B, L, S, E):
    core = MixedCore(*(kf.build_attention(x, head_dim=8, num_heads=2) for x in ("softmax", "favor+")), (0, 3))
    leaves = inputs(L, S, B=B, E=E, dtype=torch.float32, grad=True)
    q, k, v = leaves
    table = torch.zeros(H, max(L + S - 1, 0), requires_grad=True)
    for causal in (False, True):
        check(core(q, k, v, is_causal=causal), (B, H, L, E), leaves)
        check(core(q, k, v, is_causal=causal, bias=table), (B, H, L, E), [*leaves, table])
    check(core.recall(q, core.remember(k, v)), (B, H, L, E), leaves)
    one = inputs(1, B=B, E=E, dtype=torch.float32)
    assert core.step(*one, core.step(*one)[1])[0].shape == (B, H, 1, E)


@pytest.mark.parametrize("method", ["favor+", "softmax"])
def test_a_state_is_reordered_to_no_samples(method):
    core = kf.build_attention(method, head_dim=8, num_heads=H)
    one = inputs(1, B=2, E=3, dtype=torch.float32)
    nobody = core.step(*one)[1].reorder([])
    assert nobody.batch == 0
    assert core.step(*(x[:0] for x in one), nobody)[0].shape == (0, H, 1, 3)
