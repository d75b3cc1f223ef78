"""What `torch.export` traces: plain operations, equal to the definition, with a state of constant shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import kernelformer as kf
from definition import FORGETS, MAPPED, STREAMING, VARIANTS, WHOLE, attend, build, close, inputs, padding, signed
from kernelformer.modules.window import NO_SINK_YET

TRACED = [name for name in VARIANTS if name not in WHOLE and name not in FORGETS]
NEAR_STREAMS = ["favor+ near", "trigonometric near", "loglinear near", "favor+ window", "rfa window 1", "local"]


@pytest.fixture
def exporting(monkeypatch):
    """Cores take the operations of an exported graph, here and now: tracing them takes seconds."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", TRACED)
def test_plain_operations_equal_the_definition(variant, is_causal, exporting):
    core, tolerance = build(variant).eval(), 1e-8 if signed(variant) else None
    for length in (1, 67):
        q, k, v = inputs(length)
        for mask in (None, padding(2, length)):
            got = core(q, k, v, is_causal=is_causal, key_mask=mask)
            close(got, attend(variant, core, q, k, v, is_causal=is_causal, key_mask=mask), tolerance)


@pytest.mark.parametrize("window", [1, 64, 70])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_any_width_and_grouped_queries(window, is_causal, exporting):
    core = kf.build_attention(
        "loglinear", head_dim=8, num_heads=4, num_features=16, num_key_heads=2, window=window, sinks=3
    )
    core = core.double().eval()
    q, k, v = inputs(200, G=2)
    mask = padding(2, 200)
    got = core(q, k, v, is_causal=is_causal, key_mask=mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_exporting", lambda: False)
        close(got, core(q, k, v, is_causal=is_causal, key_mask=mask))


@pytest.mark.parametrize("variant", ["favor+", "exp", "trigonometric"])
def test_a_later_key_that_dwarfs_its_chunk_changes_no_earlier_row(variant, exporting):
    core = build(variant, torch.float32).eval()
    q, k, v = inputs(130, dtype=torch.float32, size=0.5)
    before = core(q, k, v, is_causal=True)
    far = k.clone()
    far[:, :, [20, 100]] *= 20.0  # log features grow by more than the 87 that float32 spans
    after = core(q, far, v, is_causal=True)
    assert torch.isfinite(after).all()
    close(after[:, :, :20], before[:, :, :20], 1e-5)
    want = attend(variant, core.double(), *(x.double() for x in (q, far, v)), is_causal=True)
    close(after[:, :, 20:100].double(), want[:, :, 20:100], 1e-3 if signed(variant) else 1e-4)


@pytest.mark.parametrize("place", [20, 90])
def test_keys_that_a_later_one_dwarfs_by_far_keep_their_digits(place, exporting):
    core = build("exp without projection").eval()
    q, k, v = inputs(130, size=0.1)
    k[:, :, place:, :4] += 900.0 * 8**0.25  # logarithms of some features grow by 900, where float64 ends at -745
    got = core(q, k, v, is_causal=True)
    assert torch.isfinite(got).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_exporting", lambda: False)
        close(got, core(q, k, v, is_causal=True), 1e-8)
        close(got[:, :, :place], core(*(x[:, :, :place] for x in (q, k, v)), is_causal=True), 1e-8)


def test_a_bias_is_never_left_out_of_a_graph_of_one_length(exporting):
    for method, options in (("local", {}), ("favor+", {"num_features": 8})):
        core = kf.build_attention(method, head_dim=8, num_heads=4, window=4, sinks=1, **options).double().eval()
        q, k, v = inputs(20)
        bias = torch.randn(4, 39, dtype=torch.float64)
        bias[:, :15], bias[:, 24:] = bias[:, 15:16].clone(), bias[:, 23:24].clone()
        got = core(q, k, v, bias=bias, max_distance=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_exporting", lambda: False)
            close(got, core(q, k, v, bias=bias, max_distance=4))


def test_hidden_keys_may_hold_anything(exporting):
    for variant in ("favor+", "trigonometric", "favor+ near", "softmax"):
        core, mask = build(variant).eval(), padding(2, 70)
        q, k, v = inputs(70)
        bad = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v)]
        for is_causal in (False, True):
            got = core(q, *bad, is_causal=is_causal, key_mask=mask)
            close(got, core(q, k, v, is_causal=is_causal, key_mask=mask))


@pytest.mark.parametrize("variant", [*NEAR_STREAMS, "favor+", "trigonometric", "favor+ unnormalized", "softmax"])
@pytest.mark.parametrize("length", [1, 9])
def test_a_prompt_and_steps_equal_the_whole(variant, length, exporting):
    core = build(variant).eval()
    q, k, v = inputs(24)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, : length // 2] = False  # the sinks of one sample come later
    want = attend(variant, core, q, k, v, is_causal=True, key_mask=mask)
    first = [x[:, :, :length] for x in (q, k, v)]
    out, state = core(*first, is_causal=True, key_mask=mask[:, :length], return_state=True)
    close(out, want[:, :, :length], 1e-8)
    shapes = [x.shape for x in state.tensors]
    for i in range(length, 24):
        out, state = core.step(*(x[:, :, i : i + 1] for x in (q, k, v)), state)
        close(out, want[:, :, i : i + 1], 1e-8)
        if variant != "softmax":
            assert [x.shape for x in state.tensors] == shapes


def test_absent_sinks_stay_out_of_reach(exporting):
    core = kf.build_attention("favor+", head_dim=8, num_heads=2, num_features=8, window=2, sinks=3).eval()
    q, k, v = inputs(1, H=2, G=2, dtype=torch.float32)
    _, state = core(q, k, v, is_causal=True, return_state=True)
    assert state.tensors[-1].tolist() == [[-1, NO_SINK_YET, NO_SINK_YET]] * 2
    _, state = core.step(q, k, v, state)
    assert state.tensors[-1].tolist() == [[-2, -1, NO_SINK_YET - 1]] * 2


def call(core, is_causal):
    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = core

        def forward(self, q, k, v, **more):
            return self.core(q, k, v, is_causal=is_causal, **more)

    return Call()


@pytest.mark.parametrize(
    ("variant", "is_causal", "said"),
    [
        ("skyformer", False, "takes its landmarks from the tokens"),
        ("wildcat", False, "takes its landmarks from the tokens"),
        ("nystromformer", False, "as many landmarks"),
        ("linformer", False, "as many landmarks"),
        ("rfa-gate", True, "forgets"),
        ("nprf", False, "relative position bias"),
        ("softmax", False, "relative position bias"),
        ("local", False, "relative position bias"),
    ],
)
def test_what_has_no_graph_of_any_length_says_so_by_name(variant, is_causal, said):
    core, length = build(variant, torch.float32).eval(), Dim("length", min=2)
    q, k, v = inputs(20, dtype=torch.float32)
    more = {"bias": torch.zeros(4, 39)} if "bias" in said else {}
    shapes = {x: {2: length} for x in "qkv"} | ({"more": {"bias": {1: 2 * length - 1}}} if more else {})
    with pytest.raises(ValueError, match=said) as problem:
        export(call(core, is_causal), (q, k, v), more, dynamic_shapes=shapes)
    assert f"{VARIANTS[variant][0]!r} " in str(problem.value)
    assert "dynamic length" in str(problem.value)


def most_lengths(graph, name):
    """The most axes of a tensor in a graph that grow with the length: 2 is a matrix of L x L."""
    values = {n.name: n.meta["val"] for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    batch = values[name].shape[0].node.expr.free_symbols

    def grows(n):
        return isinstance(n, torch.SymInt) and bool(n.node.expr.free_symbols - batch)

    return max(sum(grows(n) for n in x.shape) for x in values.values())


@pytest.mark.parametrize(
    "options",
    [
        {"method": "loglinear"},
        pytest.param({"method": "favor+", "causal": True, "window": 4, "sinks": 2, "rotary": True},
                     marks=pytest.mark.slow),
        pytest.param({"method": "trigonometric", "causal": True, "num_kv_heads": 1}, marks=pytest.mark.slow),
        pytest.param({"method": "softmax", "causal": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_layer_is_exported_with_dynamic_batch_and_length(options):
    size = {} if options["method"] == "softmax" else {"num_features": 8}
    layer = kf.KernelAttention(16, 2, **options, **size).eval()
    x, mask = torch.randn(2, 70, 16), padding(2, 70)
    axes = {0: Dim("batch"), 1: Dim("length")}
    with torch.no_grad():
        graph = export(layer, (x,), {"key_mask": mask}, dynamic_shapes={"x": axes, "key_mask": axes})
        assert not [n for n in graph.graph.nodes if "kernelformer" in str(n.target)]
        assert most_lengths(graph, "x") == (2 if options["method"] == "softmax" else 1)
        for batch, length in ((1, 1), (3, 64), (2, 133)):
            x, mask = torch.randn(batch, length, 16), padding(batch, length)
            close(
                graph.module()(x, key_mask=mask), layer(x, key_mask=mask), 1e-4 if "trig" in layer.core.method else None
            )


def test_every_streaming_variant_is_known_here():
    assert set(TRACED) == set(STREAMING) - set(FORGETS)
    assert set(NEAR_STREAMS) - {"local"} <= set(MAPPED)
