"""All chunks at once: the definition again, with a bounded number of operators and nothing that the host reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import kernelformer as kf
from definition import FORGETS, VARIANTS, WHOLE, attend, build, close, inputs, padding
from kernelformer.attention import dispatch, near_far, reference
from kernelformer.attention.near_far_call import NAMES, NearFarCall
from kernelformer.attention.plain import biased, layout, positive
from kernelformer.attention.plain import positive as scan
from kernelformer.modules import bias as bias_checks
from kernelformer.modules import window as near_stream
from kernelformer.modules.spec import parse_attention
from kernelformer_lab.bench.attention import Case
from kernelformer_lab.bench.benchmark import job
from reference import reference_attention

NO_MAP = [name for name in VARIANTS if VARIANTS[name][0] in ("softmax", "gaussian", "linformer", "nystromformer")]
COVERED = [name for name in VARIANTS if name not in (*NO_MAP, *FORGETS)]
# One of each kind: by formula, tied, per head, untied per query head, unnormalized, unit vectors, signed with and
# without a factor and a guard, learned, landmarks, near keys, sinks alone, no far part. Others with `make test-all`.
QUICK = (
    "signed formula",
    "favor+",
    "favor+ per head",
    "favor#",
    "loglinear unnormalized",
    "trigonometric",
    "trigonometric unnormalized",
    "relu",
    "tanh",
    "skyformer softmax",
    "favor+ near",
    "trigonometric near",
    "hyperbolic sinks",
    "local",
)
KINDS = [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in COVERED]
both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])


@pytest.fixture
def small(monkeypatch):
    """Chunks of 16 tokens, two of them in a group and a segment, so that short sequences cross all seams."""
    monkeypatch.setattr(layout, "CHUNK", 16)
    monkeypatch.setattr(scan, "GROUP", 2)
    monkeypatch.setattr(positive, "KEYS", 8)
    monkeypatch.setattr(layout, "CPU_SEGMENT", 48 * 2 * 4 * 24)
    monkeypatch.setattr(layout, "SHORTEST", 16)


def same_with_gradients(out, want, leaves):
    close(out, want)
    g = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    pairs = (torch.autograd.grad(x, leaves, g, materialize_grads=True, allow_unused=True) for x in (out, want))
    for got, expected in zip(*pairs, strict=True):
        close(got, expected)


@pytest.mark.parametrize("variant", KINDS)
@both
def test_equals_the_definition_with_gradients(variant, is_causal, small):
    if is_causal and variant in WHOLE:
        pytest.skip("landmarks see the whole sequence")
    core = build(variant)
    for L, S, masked in [
        (1, 1, False),
        (71, 71, True),
        (20, 53, False),
        (64, 13, False),
    ]:
        qkv = inputs(L, S, G=2, grad=True)
        leaves = [*qkv, *core.parameters()]
        key_mask = padding(2, S) if masked else None
        out = core(*qkv, is_causal=is_causal, key_mask=key_mask, algorithm="plain")
        same_with_gradients(out, attend(variant, core, *qkv, is_causal=is_causal, key_mask=key_mask), leaves)


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "loglinear near"])
@both
def test_equals_the_definition_at_the_default_sizes(variant, is_causal):
    core, qkv = build(variant), inputs(150, grad=True)
    out = core(*qkv, is_causal=is_causal, algorithm="plain")
    same_with_gradients(out, attend(variant, core, *qkv, is_causal=is_causal), qkv)


@both
@pytest.mark.parametrize(("L", "S", "window", "masked"), [(1, 1, 0, False), (71, 71, 20, True), (40, 13, 1, False)])
def test_a_windowed_bias_equals_the_definition_with_gradients(L, S, window, masked, is_causal, monkeypatch):
    monkeypatch.setattr(biased, "CHUNK", 16)
    core, qkv = build("favor+ per head"), inputs(L, S, G=2, grad=True)
    entries = (3 * torch.randn(4, 2 * window + 1, dtype=torch.float64)).requires_grad_()
    near = torch.arange(1 - L, S).clamp(-window, window) + window
    key_mask = padding(2, S) if masked else None
    how = {"is_causal": is_causal, "key_mask": key_mask}
    out = core(*qkv, **how, bias=entries[:, near], max_distance=window, algorithm="plain")
    matrix = entries[:, near][:, torch.arange(S) - torch.arange(L).unsqueeze(1) + L - 1]
    want = attend("favor+ per head", core, *qkv, **how, bias=matrix)
    same_with_gradients(out, want, [*qkv, entries])


@both
def test_a_bias_within_a_window_of_near_keys_equals_the_chunks(is_causal, small):
    core, qkv = build("favor+ near"), inputs(71, G=2, grad=True)
    entries = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    near = torch.arange(-70, 71).clamp(-4, 4) + 4
    for mask in (None, padding(2, 71)):
        how = {"is_causal": is_causal, "key_mask": mask, "max_distance": 4}
        out, want = (core(*qkv, **how, bias=entries[:, near], algorithm=x) for x in ("plain", "chunked"))
        same_with_gradients(out, want, [*qkv, entries, *core.parameters()])


@both
@pytest.mark.parametrize("L", [64, 128])  # whole chunks: nothing is padded, so that views stay views
def test_grouped_queries_and_near_keys_of_whole_chunks_equal_the_definition(L, is_causal):
    core, qkv = build("favor+ near"), inputs(L, G=2, grad=True)
    out = core(*qkv, is_causal=is_causal, algorithm="plain")
    same_with_gradients(out, attend("favor+ near", core, *qkv, is_causal=is_causal), qkv)


def falling(L, S, window):
    """A random bias up to a distance and a line beyond it, as a table, as a matrix, and its slope."""
    slope, away = torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.float64), torch.arange(1 - L, S)
    entries = torch.randn(4, 2 * window + 1, dtype=torch.float64)
    line = slope.unsqueeze(1) * (away.abs() - window).clamp_min(0)
    table = entries[:, away.clamp(-window, window) + window] - line
    return table, table[:, torch.arange(S) - torch.arange(L).unsqueeze(1) + L - 1], slope


@pytest.mark.parametrize(("L", "S", "window"), [(71, 71, 20), (40, 13, 1), (9, 9, 0)])
def test_a_causal_bias_with_a_slope_equals_the_definition_with_gradients(L, S, window, monkeypatch):
    monkeypatch.setattr(biased, "CHUNK", 16)
    core, qkv = build("favor+ per head"), inputs(L, S, G=2, grad=True)
    (table, matrix, slope), key_mask = falling(L, S, window), padding(2, S)
    how = {"is_causal": True, "key_mask": key_mask}
    out = core(*qkv, **how, bias=table, max_distance=window, slope=slope, algorithm="plain")
    same_with_gradients(out, attend("favor+ per head", core, *qkv, **how, bias=matrix), qkv)


@both
def test_a_slope_beyond_near_keys_equals_the_chunks(is_causal, small):
    core, qkv = build("favor+ near"), inputs(71, G=2, grad=True)
    table, _, slope = falling(71, 71, 4)
    for mask in (None, padding(2, 71)):
        how = {"is_causal": is_causal, "key_mask": mask, "max_distance": 4, "bias": table, "slope": slope}
        out, want = (core(*qkv, **how, algorithm=x) for x in ("plain", "chunked"))
        same_with_gradients(out, want, [*qkv, *core.parameters()])


def test_graphs_of_earlier_versions_with_a_slope_go_forward_alone(small, monkeypatch):
    core, qkv, calls = build("favor+ near"), inputs(71, G=2), []
    table, _, slope = falling(71, 71, 4)
    attend = dispatch.run_plain

    def seen(name, **given):
        calls.append(NearFarCall(**{x: given[x] for x in NAMES}))
        return attend(name, **given)

    monkeypatch.setattr(dispatch, "run_plain", seen)
    with torch.no_grad():
        want = core(*qkv, is_causal=True, max_distance=4, bias=table, slope=slope)
    (call,) = calls
    inputs_ = (*call.tensor_arguments, *call.settings)
    results = near_far.OPERATOR.forward(*inputs_, False)
    close(results[0], want)
    with pytest.raises(ValueError, match="export the model again"):
        near_far._backward(want, [], *results, *inputs_, False, False)


@pytest.mark.parametrize("variant", ["favor+ per head", "favor+ near", "trigonometric"])
@pytest.mark.parametrize("kind", ["level", "slope", "wide", "of any reach"])
def test_a_stream_with_a_bias_equals_the_chunks(variant, kind, small, monkeypatch):
    monkeypatch.setattr(biased, "CHUNK", 16)
    if variant == "favor+ near" and kind == "of any reach":
        pytest.skip("near keys need a bias that is constant beyond a distance")
    core, qkv, window = build(variant), inputs(91, grad=True), 5 if variant == "favor+ near" else 20
    table, _, slope = falling(91, 91, window)
    if kind != "slope":
        table, slope = table.gather(1, torch.arange(181).clamp(90 - window, 90 + window).expand(4, -1)), None
    if kind == "wide":
        table = 40 * table
    reach = None if kind == "of any reach" else window

    def part(a, b, algorithm, state=None):
        """Tokens a to b, whose bias is over distances from 1 - b on."""
        how = {"is_causal": True, "return_state": True, "max_distance": reach, "slope": slope}
        given = [x[:, :, a:b] for x in qkv]
        return core(*given, **how, bias=table[:, 91 - b : 90 + b - a], algorithm=algorithm, state=state)

    whole, end = part(0, 91, "chunked")
    first, state = part(0, 50, "plain")
    second, state = part(50, 51, "chunked", state)
    third, state = part(51, 91, "plain", state)
    got = torch.cat([first, second, third], 2)
    close(got, whole)
    has_shift = variant != "favor+ near" and reach is not None
    kept = [x.tensors[0].exp().mT * x.tensors[1] if has_shift else x.tensors[1] for x in (state, end)]
    close(*kept)
    sums = [x.square().sum() + y.square().sum() for x, y in zip((got, whole), kept, strict=True)]
    for a, b in zip(*(torch.autograd.grad(x, qkv) for x in sums), strict=True):
        close(a, b)


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "favor+ near"])
@both
def test_gradcheck(variant, is_causal, small):
    core = build(variant)
    leaves = inputs(7, B=1, G=2, E=3, grad=True)
    key_mask = torch.tensor([[True, True, False, True, True, True, True]])

    def run(*x):
        return core(*x[:3], is_causal=is_causal, key_mask=key_mask, algorithm="plain")

    assert gradcheck(run, [*leaves, *core.parameters()], atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(
    "variant", ["favor+", "loglinear unnormalized", "trigonometric", "relu", "favor+ near", "local"]
)
def test_split_and_resume_equals_whole_and_the_state_is_that_of_the_chunks(variant, small):
    core, qkv = build(variant), inputs(91, G=2, grad=True)
    leaves, key_mask = [*qkv, *core.parameters()], padding(2, 91)

    def part(a, b, algorithm, state=None):
        cut = (x[:, :, a:b] for x in qkv)
        how = {"is_causal": True, "key_mask": key_mask[:, a:b], "return_state": True}
        return core(*cut, **how, algorithm=algorithm, state=state)

    whole, end = part(0, 91, "chunked")
    first, state = part(0, 50, "plain")
    second, state = part(50, 51, "chunked", state)
    third, state = part(51, 91, "plain", state)
    got = torch.cat([first, second, third], 2)
    close(got, whole)
    assert state.length == 91
    for a, b in zip(state.tensors, end.tensors, strict=True):
        close(a, b)
    sums = [x.square().sum() + y.tensors[1].square().sum() for x, y in ((got, state), (whole, end))]
    for a, b in zip(*(torch.autograd.grad(x, leaves) for x in sums), strict=True):
        close(a, b)


@both
@pytest.mark.parametrize("variant", ["favor+", "favor+ unnormalized", "trigonometric", "favor+ near"])
def test_rows_without_a_key_are_zero_and_hidden_keys_may_hold_anything(variant, is_causal):
    core, (q, k, v) = build(variant), inputs(70)
    key_mask = torch.ones(2, 70, dtype=torch.bool)
    key_mask[0], key_mask[1, :9] = False, False
    k, v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = core(*leaves, is_causal=is_causal, key_mask=key_mask, algorithm="plain")
    assert not out[0].any()
    assert not is_causal or not out[1, :, :9].any()
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert not any(x.isnan().any() for x in (out, dq, dk, dv))
    assert not dk[:, :, :9].any() and not dv[0].any()  # noqa: PT018


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "favor+ near"])
@both
@pytest.mark.parametrize(("B", "L", "S"), [(2, 0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 3)])
def test_calls_without_tokens_or_samples(variant, is_causal, B, L, S):
    core, leaves = build(variant), inputs(L, S, B=B, grad=True)
    out = core(*leaves, is_causal=is_causal, algorithm="plain")
    assert out.shape == (B, 4, L, 6)
    assert not out.any()
    assert all(not x.any() for x in torch.autograd.grad(out.sum(), leaves))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "favor+ near"])
def test_half_precision_keeps_its_dtype_and_the_sums_their_precision(variant, dtype, is_causal):
    core = build(variant, dtype)
    leaves = [x.requires_grad_() for x in inputs(70, dtype=dtype)]
    out = core(*leaves, is_causal=is_causal, algorithm="plain")
    assert out.dtype == dtype
    close(
        out, attend(variant, core, *(x.detach().double() for x in leaves), is_causal=is_causal), torch.finfo(dtype).eps
    )
    assert all(x.dtype == dtype and not x.isnan().any() for x in torch.autograd.grad(out.sum(), leaves))


def log_space(core, q, k, v):
    """The definition of a positive map in float64, where no key can dwarf another."""
    tensors = core.feature_map.prepare(q, k, None, core.scale)
    logs = [core.feature_map.spec.log_features(x, tensors, core.scale, r) for x, r in ((q, "query"), (k, "key"))]
    visible = reference.visibility(q.shape[2], k.shape[2], is_causal=True, key_mask=None)
    return reference.positive_attention(*logs, v, visible, core.normalize)


@pytest.mark.parametrize(
    ("method", "options"),
    [("favor+", {}), ("favor+hyperbolic", {}), ("elu", {}), ("favor+", {"kernel": "gaussian", "normalize": False})],
)
def test_a_later_key_of_the_same_chunk_however_large_takes_nothing_from_a_row(method, options):
    """Norms fall along the sequence, so that features grow by hundreds of e-foldings."""
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=32, **options)
    q, k, v = inputs(100, D=8)
    k = k * torch.linspace(15, 1, 100, dtype=k.dtype).view(1, 1, -1, 1)
    k[:, :, 50] *= 40
    runs = []
    for model, dtype in ((core, torch.float32), (copy.deepcopy(core).double(), torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = model(*leaves, is_causal=True, algorithm="plain") if dtype == torch.float32 else log_space(model, *leaves)
        runs.append(
            (out, *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view(out.shape).to(out)))
        )
    for single, double in zip(*runs, strict=True):
        assert not single.isnan().any()
        assert float((single.detach().double() - double.detach()).norm() / double.detach().norm()) < 2e-4


@both
@pytest.mark.parametrize("kind", ["window", "slope of near keys", "bias", "slope"])
def test_rows_with_near_keys_and_a_bias_lose_nothing_to_large_keys_either(kind, is_causal):
    """The same keys; far ones behind the largest, on either side, count as the definition has them."""
    if kind == "slope" and not is_causal:
        pytest.skip("goes by chunks")
    near = {"window": 6, "sinks": 1} if kind in ("window", "slope of near keys") else {}
    core, (q, k, v) = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=32, **near), inputs(100, D=8)
    k = k * torch.linspace(15, 1, 100, dtype=k.dtype).view(1, 1, -1, 1)
    k[:, :, 50] *= 40
    table, _, slope = falling(100, 100, 5)
    if "slope" not in kind:
        table, slope = table.gather(1, torch.arange(199).clamp(94, 104).expand(4, -1)), None
    table = table.float()
    matrix = table.double()[:, torch.arange(100) - torch.arange(100).unsqueeze(1) + 99]
    bias = {} if kind == "window" else {"bias": table, "max_distance": 5}
    if slope is not None:
        bias["slope"] = slope.float()
    runs = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        if dtype == torch.float32:
            out = core(*leaves, is_causal=is_causal, algorithm="plain", **bias)
        else:
            exact = copy.deepcopy(core).double()
            out = reference_attention(exact, *leaves, is_causal=is_causal, bias=matrix if bias else None)
        runs.append(
            (out, *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view(out.shape).to(out)))
        )
    for single, double in zip(*runs, strict=True):
        assert not single.isnan().any()
        assert float((single.detach().double() - double.detach()).norm() / double.detach().norm()) < 2e-4


def test_near_keys_of_small_weights_stay_numbers_beside_a_signed_map():
    core, (q, k, v) = build("tanh near", torch.float32), inputs(20, dtype=torch.float32)
    q = -150 * k / k.square().sum(-1, keepdim=True).sqrt()  # its own key has a score around -150
    exact = attend("tanh near", copy.deepcopy(core).double(), q.double(), k.double(), v.double(), is_causal=True)
    out = core(q, k, v, is_causal=True, algorithm="plain")
    close(out[:, :, :5].double(), exact[:, :, :5], 1e-4)  # rows without far keys


@pytest.mark.parametrize("norm", [1, 16, 64])
def test_worst_row_in_float32_at_large_norms(norm):
    core = kf.build_attention("favor+", head_dim=64, num_heads=1, num_features=64)
    q, k, v = inputs(200, B=1, H=1, G=1, D=64)
    q, k = (x / x.norm(dim=-1, keepdim=True) * norm * 64**0.25 for x in (q, k))
    want = log_space(copy.deepcopy(core).double(), q, k, v)
    got = core(q.float(), k.float(), v.float(), is_causal=True, algorithm="plain").double()
    worst = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    assert worst < {1: 2e-6, 16: 1e-4, 64: 1e-3}[norm]


# Operators that launch nothing on a device: views, and memory without contents.
FREE = {
    *("view", "reshape", "_reshape_alias", "_unsafe_view", "as_strided", "expand", "expand_as", "transpose", "permute"),
    *("t", "mT", "unsqueeze", "squeeze", "flatten", "unflatten", "unfold", "slice", "select", "narrow", "split"),
    *("split_with_sizes", "chunk", "unbind", "detach", "alias", "to", "resolve_conj", "resolve_neg", "result_type"),
    *("empty", "empty_like", "empty_strided", "new_empty", "resize_"),
}
# Operators that are one launch, or a copy and one, whatever they are made of on a CPU.
WHOLE_OPERATORS = {"bmm": 1, "mm": 1, "baddbmm_": 1, "addmm": 2, "baddbmm": 2, "cummax": 1, "aminmax": 1, "roll": 1}


def launches(run):
    """Operators of a call that would launch something on a device, as the profiler sees them, all others opened."""

    def count(event):
        name = event.name.removeprefix("aten::")
        if name in WHOLE_OPERATORS:
            return WHOLE_OPERATORS[name]
        inside = sum(count(x) for x in event.cpu_children)
        return inside or int(event.name.startswith("aten::") and name not in FREE)

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(count(x) for x in seen.events() if x.cpu_parent is None)


class NoWaiting(TorchDispatchMode):
    """Refuses operators that hide others, and what waits for a device or copies from the host."""

    waits = (
        "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item", "lift_fresh",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        assert namespace == "aten", f"{func} hides operators"
        assert not name.startswith(self.waits), f"{func} waits for the device"
        assert name != "_to_copy" or (kwargs or {}).get("device") is None, f"{func} to another device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(x is not None and x.dtype == torch.bool for x in args[1]), f"{func} by a mask has to count"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def accelerator(monkeypatch):
    """Let the code take the CPU for a device that it must not wait for."""
    for module in (layout, dispatch):
        monkeypatch.setattr(module, "ACCELERATORS", ("cpu",))
    for module in (near_stream, bias_checks, biased, dispatch):
        monkeypatch.setattr(module, "readable_without_sync", lambda x: False)


def within(length, window, heads):
    """The arguments for a bias that is constant beyond a distance."""
    entries = torch.randn(heads, 2 * window + 1, generator=torch.Generator().manual_seed(3))
    return {
        "bias": entries[:, torch.arange(1 - length, length).clamp(-window, window) + window],
        "max_distance": window,
    }


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("options", "bias", "most"),
    [({}, False, (25, 50)), ({"window": 64, "sinks": 4}, False, (80, 75)), ({}, True, (65, 75))],
    ids=["plain", "near and far", "bias"],
)
def test_launches_are_few_and_grow_with_the_logarithm_of_the_length(options, bias, most, is_causal, accelerator):
    core = kf.build_attention("favor+", head_dim=64, num_heads=2, num_features=64, **options)
    counts = []
    for length in (512, 8192, 16384):
        q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
        how = {"is_causal": is_causal, **(within(length, 64, 2) if bias else {})}
        counts.append(launches(lambda given=(q, k, v), how=how: core(*given, **how)))
    assert counts[1] <= most[is_causal]
    assert counts[1] - counts[0] <= 2 * 4  # 4 doublings
    assert counts[2] - counts[1] <= 8 * 2  # one more level of the scan


def test_the_count_opens_custom_operators():
    core, qkv = build("favor+"), inputs(600)
    loop = launches(lambda: core(*qkv, is_causal=True, algorithm="chunked"))
    assert loop > launches(lambda: core(*qkv, is_causal=True, algorithm="plain"))


NO_WAITING = {
    "linear": ("favor+", {}, {}),
    "signed": ("trigonometric", {}, {}),
    "near and far": ("favor+", {"window": 8, "sinks": 2}, {}),
    "signed near and far": ("trigonometric", {"window": 8, "sinks": 2}, {}),
    "bias": ("favor+", {}, {"window": 5}),
    "slope": ("favor+", {}, {"window": 5, "slope": True}),
    "bias of near keys": ("favor+", {"window": 8, "sinks": 2}, {"window": 5}),
    "slope of near keys": ("favor+", {"window": 8, "sinks": 2}, {"window": 5, "slope": True}),
}


@pytest.mark.parametrize("kind", NO_WAITING)
def test_nothing_waits_for_the_device(kind, accelerator):
    """Forward and backward, with a mask, grouped queries and a state before and after."""
    method, options, positions = NO_WAITING[kind]
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16, **options)
    q, k, v = inputs(70, G=2, dtype=torch.float32, grad=True)
    key_mask, first, second, slope = padding(2, 70), {}, {}, None
    if positions:
        first = within(70, positions["window"], 4)
        second = {**within(140, positions["window"], 4)}
        if "slope" in positions:
            slope = torch.tensor([0.5, 0.1, 0.02, 0.0])
            for how, length in ((first, 70), (second, 140)):
                beyond = (torch.arange(1 - length, length).abs() - positions["window"]).clamp_min(0)
                how |= {"bias": how["bias"] - slope.unsqueeze(1) * beyond, "slope": slope}
        second["bias"] = second["bias"][:, : 140 + 70 - 1].clone()
    with NoWaiting():
        if slope is None or options:
            core(q, k, v, key_mask=key_mask, **first).sum().backward()
            core(q, k, v, **first).sum().backward()
        core(q, k, v, is_causal=True, **first).sum().backward()
        out, state = core(q, k, v, is_causal=True, key_mask=key_mask, return_state=True, **first)
        out, state = core(q, k, v, is_causal=True, key_mask=key_mask, state=state, return_state=True, **second)
        (out.sum() + state.tensors[1].sum()).backward()
    assert all(x.grad is not None for x in (q, k, v))


@both
def test_a_bias_that_nobody_may_look_at_and_that_is_too_wide_gives_nan(is_causal, accelerator):
    core, (q, k, v) = build("favor+", torch.float32), inputs(40, dtype=torch.float32)
    how = within(40, 5, 4)
    for entry in (-70.0, -torch.inf):
        wide = how["bias"].clone()
        wide[1, 39] = entry
        out = core(q, k, v, is_causal=is_causal, bias=wide, max_distance=5)
        assert out[:, 1].isnan().all()
        assert not out[:, [0, 2, 3]].isnan().any()


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, False),
        pytest.param({"window": 8, "sinks": 2}, False, marks=pytest.mark.slow),
        pytest.param({}, True, marks=pytest.mark.slow),
    ],
    ids=["plain", "near and far", "bias"],
)
@both
def test_it_is_traced_as_one_graph(options, bias, is_causal):
    if not options and not bias and not is_causal:
        pytest.skip("a part of the causal graph")
    core = kf.build_attention("favor+", head_dim=8, num_heads=2, num_features=16, **options)
    leaves = inputs(40, H=2, G=2, dtype=torch.float32, grad=True)
    how = within(40, 5, 2) if bias else {}

    def run(*x):
        return core(*x, is_causal=is_causal, algorithm="plain", **how)

    out, want = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    close(out, want)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, want)), strict=True):
        close(a, b)


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", [pytest.param("bidirectional", marks=pytest.mark.slow), "causal"])
def test_memory_is_that_of_the_formula(task, backward):
    case = Case(task, 8192, backward=backward)
    figures = job("memory", case, ["favor+:algorithm=plain"], heap="default", threads=2, budget=1.0)
    mapped = case.batch * case.heads * case.length * case.features
    assert mapped <= layout.SEGMENT
    states = mapped * (case.head_dim + 1) / 64
    numbers = 3 * mapped if task == "bidirectional" else 14 * mapped + 2 * states  # see `attend`
    more = 1 if not backward else 2 if task == "bidirectional" else 3
    assert figures["peak"] - figures["results"] < 4 * numbers * more


def test_an_algorithm_that_a_call_cannot_have_is_named():
    q, k, v = inputs(9, dtype=torch.float32)

    def core(method="favor+", **options):
        return kf.build_attention(method, head_dim=8, num_heads=4, num_features=8, **options)

    for made, how, message in (
        (core(), {"algorithm": "paralel"}, "unknown algorithm 'paralel'"),
        (core(), {"algorithm": "fft"}, "only mean something with a bias"),
        (core("softmax"), {}, "methods with a feature map, got algorithm='plain' for 'softmax'"),
        (core("linformer", max_length=9), {}, "for 'linformer'"),
    ):
        with pytest.raises(ValueError, match=message):
            made(q, k, v, **{"algorithm": "plain", **how})


def test_it_is_chosen_on_accelerators_and_waits_for_the_device_only_where_pairs_are_needed(accelerator):
    q, k, v = inputs(9, dtype=torch.float32)
    bias = {"bias": torch.zeros(4, 17), "max_distance": 3}
    for method, how, parallel in (("favor+", {}, True), ("favor+", {**bias, "slope": torch.zeros(4)}, False)):
        core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=8)
        with NoWaiting() if parallel else pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
            core(q, k, v, **how)
        close(core(q, k, v, **how), core(q, k, v, **how, algorithm="chunked"))


def test_an_algorithm_named_for_a_bias_is_taken_on_accelerators_too(accelerator, monkeypatch):
    taken, original = [], dispatch.fft_attention
    monkeypatch.setattr(dispatch, "fft_attention", lambda call: taken.append(call) or original(call))
    q, k, v = inputs(9, dtype=torch.float32)
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=8)
    core(q, k, v, bias=torch.zeros(4, 17), algorithm="fft")
    assert taken


def test_layers_and_attention_strings_take_the_name():
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    layers = [
        kf.KernelAttention(32, 4, "favor+", num_features=8, causal=True, algorithm=a) for a in ("plain", "chunked")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    close(layers[0](x), layers[1](x))
    with pytest.raises(ValueError, match="is for a relative bias"):
        kf.KernelAttention(32, 4, "favor+", algorithm="fft")
    with pytest.raises(ValueError, match="for 'softmax'"):
        kf.KernelAttention(32, 4, "softmax", algorithm="plain")
    assert parse_attention("favor+:algorithm=plain")[1] == {"algorithm": "plain"}
    q, k, v = inputs(20, dtype=torch.float32)
    close(kf.kernel_attention(q, k, v, algorithm="plain"), kf.kernel_attention(q, k, v))


def test_the_name_of_earlier_versions_is_an_alias():
    q, k, v = inputs(20, dtype=torch.float32)
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=8)
    assert torch.equal(core(q, k, v, algorithm="parallel"), core(q, k, v, algorithm="plain"))
    assert kf.KernelAttention(32, 4, "favor+", algorithm="parallel").algorithm == "plain"
    with pytest.raises(ValueError, match="for 'softmax'"):
        kf.KernelAttention(32, 4, "softmax", algorithm="parallel")
