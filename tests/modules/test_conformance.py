"""What every method promises; a new one passes by being in `definition.VARIANTS`."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.autograd import gradcheck

from definition import (
    FORGETS,
    MAPPED,
    NEARS,
    STREAMING,
    TOLERANCE,
    VARIANTS,
    WHOLE,
    attend,
    build,
    close,
    inputs,
    mode,
    padding,
    signed,
)
from reference import reference_attention

# Windows of maps whose kind has another one with a window, and which pass without, and the special cases of another
# map: with `make test-all`.
SLOW = (
    "favor+ spherical",
    "favor+ givens",
    "favor+ hadamard chi",
    "regularized iid",
    "sigmoid",
    "gelu",
    "cos",
    "relu without eps",
    "exp without projection",
    "exp unnormalized",
    "elu unnormalized",
    "gmm-rks diagonal",
    "rfa shared",
    "rfa-gate shared",
    "loglinear free keys",
    "favor++",
    "favor++ unnormalized",
    "loglinear like favor#",
    "favor# near",
    "hedgehog near",
    "wildcat greedy",
    "skyformer pivoted",
    "favor+ per head near",
    "fastfood-prf by rows near",
    "gmm-rks near",
    "tanh near",
    "skyformer learned softmax near",
)


def listed(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


every = pytest.mark.parametrize("variant", listed(VARIANTS))
streaming = pytest.mark.parametrize("variant", listed(STREAMING))
causal = pytest.mark.parametrize("variant", listed(name for name in VARIANTS if name not in WHOLE))
both = pytest.mark.parametrize(
    ("variant", "is_causal"),
    [
        pytest.param(
            name,
            is_causal,
            id=f"{name}-{'causal' if is_causal else 'bidirectional'}",
            marks=[pytest.mark.slow] if name in SLOW else [],
        )
        for name in VARIANTS
        for is_causal in (False, True)
        if not (is_causal and name in WHOLE) and not (not is_causal and name in FORGETS)
    ],
)


@both
@pytest.mark.parametrize(("L", "S"), [(1, 1), (7, 7), (8, 8), (9, 9), (37, 37), (20, 33), (40, 13)])
def test_equals_the_definition_with_gradients(variant, is_causal, L, S, small_blocks):
    core = build(variant)
    for masked in (False, True):
        qkv = inputs(L, S, grad=True)
        leaves = [*qkv, *core.parameters()]
        key_mask = padding(2, S) if masked else None
        out = core(*qkv, is_causal=is_causal, key_mask=key_mask)
        want = attend(variant, core, *qkv, is_causal=is_causal, key_mask=key_mask)
        close(out, want)
        g = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        for got, expected in zip(
            torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g), strict=True
        ):
            close(got, expected)


@both
def test_equals_the_definition_at_the_default_chunks(variant, is_causal):
    core = build(variant)
    qkv = inputs(131, grad=True)
    leaves = [*qkv, *core.parameters()]
    out = core(*qkv, is_causal=is_causal)
    want = attend(variant, core, *qkv, is_causal=is_causal)
    close(out, want)
    for got, expected in zip(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        close(got, expected)


@both
def test_float32_equals_the_definition_in_float64(variant, is_causal):
    core = build(variant, torch.float32)
    q, k, v = inputs(150)
    got = core(q.float(), k.float(), v.float(), is_causal=is_causal)
    assert got.dtype == torch.float32
    # A signed denominator near its guard multiplies rounding by up to 1 / GUARD.
    tolerance = 100 * TOLERANCE[torch.float32] if signed(variant) else None
    close(got, attend(variant, core, q, k, v, is_causal=is_causal), tolerance)


@both
def test_gradcheck(variant, is_causal, small_blocks):
    core = build(variant)
    leaves = inputs(5, 5, B=1, H=4, G=2, E=3, grad=True)
    key_mask = torch.tensor([[True, True, False, True, True]])
    learned = list(core.parameters())  # gradcheck moves them in place

    def run(*x):
        return core(*x[:3], is_causal=is_causal, key_mask=key_mask)

    # Entry by entry for one map of each family; all gradients are compared with the definition's besides.
    fast = variant not in ("favor+", "trigonometric", "gaussian")
    assert gradcheck(run, [*leaves, *learned], atol=1e-6, fast_mode=fast)


@both
def test_grouped_queries_are_repeated_keys(variant, is_causal, small_blocks):
    core = build(variant)
    q, k, v = inputs(21, G=2)
    repeated = core(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=is_causal)
    close(core(q, k, v, is_causal=is_causal), repeated)
    close(repeated, attend(variant, core, q, k, v, is_causal=is_causal))


@causal
def test_the_future_cannot_change_the_past(variant, small_blocks):
    core = build(variant)
    q, k, v = inputs(29)
    before = core(q, k, v, is_causal=True)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 20:] = 3 * torch.randn_like(k2[:, :, 20:])
    v2[:, :, 20:] = 100.0
    after = core(q, k2, v2, is_causal=True)
    close(after[:, :, :20], before[:, :, :20])
    assert (after[:, :, 20:] - before[:, :, 20:]).abs().max() > 1e-3


@both
def test_one_sample_cannot_change_another(variant, is_causal, small_blocks):
    core = build(variant, torch.float32)
    q, k, v = inputs(19, B=3, dtype=torch.float32)
    before = core(q, k, v, is_causal=is_causal)
    for x in (q, k, v):
        x[1] = 40 * torch.randn_like(x[1])
    after = core(q, k, v, is_causal=is_causal)
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@both
def test_padded_equals_unpadded_and_hidden_keys_may_hold_anything(variant, is_causal, small_blocks):
    core = build(variant)
    q, k, v = inputs(12)
    want = core(q, k, v, is_causal=is_causal)
    junk = [torch.full((2, 4, 5, x.shape[-1]), float("nan"), dtype=x.dtype) for x in (k, v)]
    key_mask = torch.cat([torch.ones(2, 12, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)], 1)
    leaves = [q.clone(), torch.cat([k, junk[0]], 2), torch.cat([v, junk[1]], 2)]
    if is_causal:
        leaves[0] = torch.cat([q, torch.zeros(2, 4, 5, 8, dtype=q.dtype)], 2)
    leaves = [x.requires_grad_() for x in leaves]
    got = core(*leaves, is_causal=is_causal, key_mask=key_mask)
    close(got[:, :, :12], want)
    dq, dk, dv = torch.autograd.grad(got[:, :, :12].sum(), leaves)
    for x in (dk, dv):
        assert torch.equal(x[:, :, 12:], torch.zeros_like(x[:, :, 12:]))
    assert not any(x.isnan().any() for x in (dq, dk, dv))


@streaming
def test_hidden_tokens_amid_others_may_hold_anything_and_leave_no_trace_in_a_state(variant, small_blocks):
    core, clean = build(variant), inputs(40)
    key_mask = torch.ones(2, 40, dtype=torch.bool)
    key_mask[1, 9:12] = False
    bad = [x.masked_fill(~key_mask[:, None, :, None], float("nan")) for x in clean]
    want, clean_state = core(*clean, is_causal=True, key_mask=key_mask, return_state=True)
    got, state = core(*bad, is_causal=True, key_mask=key_mask, return_state=True)
    real = key_mask[:, None, :, None].expand_as(got)
    close(got[real], want[real])
    token = [x[:, :, :1] for x in clean]
    close(core.step(*token, state)[0], core.step(*token, clean_state)[0])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in FORGETS])
@pytest.mark.parametrize(("L", "S", "real"), [(12, 12, 9), (12, 12, 3), (7, 16, 3), (16, 7, 3)])
def test_masked_keys_of_cross_attention_are_cut_keys(variant, L, S, real):
    """Every query is real, however many keys there are and however few of them are."""
    core = build(variant)
    q, k, v = inputs(L, S)
    key_mask = torch.zeros(2, S, dtype=torch.bool)
    key_mask[:, 2 : 2 + real] = True
    masks = {"key_mask": key_mask, "query_mask": torch.ones(2, L, dtype=torch.bool)}
    got = core(q, k, v, **masks)
    close(got, attend(variant, core, q, k, v, **masks))
    # Linformer has a weight for every position, and a window counts positions.
    if not variant.startswith("linformer") and variant not in NEARS:
        close(got, core(q, k[:, :, 2 : 2 + real], v[:, :, 2 : 2 + real], query_mask=masks["query_mask"]))


@pytest.mark.parametrize("variant", WHOLE)
def test_padded_queries_may_hold_anything_and_get_outputs(variant):
    core = build(variant)
    q, k, v = inputs(12)
    key_mask = padding(2, 12)
    want = core(q, k, v, key_mask=key_mask)
    close(want, attend(variant, core, q, k, v, key_mask=key_mask))  # of hidden queries, too
    junk = q.masked_fill(~key_mask[:, None, :, None], float("nan"))
    got = core(junk, k, v, key_mask=key_mask)
    real = key_mask[:, None, :, None].expand_as(got)
    close(got[real], want[real])


@both
def test_a_row_without_a_visible_key_is_zero_and_has_no_gradient(variant, is_causal, small_blocks):
    core = build(variant)
    leaves = inputs(11, grad=True)
    key_mask = torch.ones(2, 11, dtype=torch.bool)
    key_mask[0] = False
    key_mask[1, :9] = False
    out = core(*leaves, is_causal=is_causal, key_mask=key_mask)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    if is_causal:
        assert torch.equal(out[1, :, :9], torch.zeros_like(out[1, :, :9]))
    for x in torch.autograd.grad(out.sum(), leaves):
        assert torch.equal(x[0], torch.zeros_like(x[0]))
        assert not x.isnan().any()


@both
@pytest.mark.parametrize(("L", "S"), [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_lengths_zero_and_one(variant, is_causal, L, S):
    core = build(variant)
    leaves = inputs(L, S, grad=True)
    out = core(*leaves, is_causal=is_causal)
    assert out.shape == (2, 4, L, 6)
    if S == 0:
        assert torch.equal(out, torch.zeros_like(out))
    assert all(not x.isnan().any() for x in torch.autograd.grad(out.sum(), leaves))


@streaming
@pytest.mark.parametrize("G", [4, 2])
def test_step_by_step_equals_parallel_equals_split_and_resume(variant, G, small_blocks):
    core = build(variant)
    q, k, v = inputs(27, G=G)
    key_mask = padding(2, 27)

    def cut(a, b):
        return q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]

    whole, end = core(q, k, v, is_causal=True, key_mask=key_mask, return_state=True)
    state, parts = None, []
    for t in range(5):
        out, state = core.step(*cut(t, t + 1), state, key_mask=key_mask[:, t : t + 1])
        parts.append(out)
    out, state = core(*cut(5, 19), is_causal=True, key_mask=key_mask[:, 5:19], state=state, return_state=True)
    parts.append(out)
    for t in range(19, 27):
        out, state = core.step(*cut(t, t + 1), state, key_mask=key_mask[:, t : t + 1])
        parts.append(out)
    close(torch.cat(parts, 2), whole)
    assert state.length == end.length == 27
    for a, b in zip(state.tensors, end.tensors, strict=True):
        close(a, b)


@streaming
def test_gradients_flow_through_a_state(variant, small_blocks):
    core = build(variant)
    qkv = inputs(23, G=2, grad=True)
    leaves = [*qkv, *core.parameters()]
    key_mask = padding(2, 23)
    want = torch.autograd.grad(core(*qkv, is_causal=True, key_mask=key_mask).square().sum(), leaves)
    first = [x[:, :, :9] for x in qkv]
    out, state = core(*first, is_causal=True, key_mask=key_mask[:, :9], return_state=True)
    middle = [x[:, :, 9:10] for x in qkv]
    one, state = core.step(*middle, state, key_mask=key_mask[:, 9:10])
    rest = [x[:, :, 10:] for x in qkv]
    last = core(*rest, is_causal=True, key_mask=key_mask[:, 10:], state=state)
    got = torch.autograd.grad(torch.cat([out, one, last], 2).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        close(a, b)


@every
def test_eval_twice_save_and_load_and_deepcopy_give_the_same_numbers(variant):
    core = build(variant, torch.float32)
    core.resample(3)
    q, k, v = inputs(17, dtype=torch.float32)
    want = core.eval()(q, k, v, **mode(variant))
    assert torch.equal(core(q, k, v, **mode(variant)), want)
    assert torch.equal(copy.deepcopy(core)(q, k, v, **mode(variant)), want)
    file = io.BytesIO()
    torch.save(core.state_dict(), file)
    file.seek(0)
    other = build(variant, torch.float32)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(q, k, v, **mode(variant)), want)
    if variant in MAPPED:
        assert other.feature_map.draw_number == 3
        core.resample()
        other.resample()
        assert torch.equal(other(q, k, v, **mode(variant)), core(q, k, v, **mode(variant)))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_the_sums_their_precision(variant, is_causal, dtype):
    core = build(variant, dtype)
    q, k, v = inputs(70, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = core(*leaves, is_causal=is_causal)
    assert out.dtype == dtype
    want = attend(variant, core, *(x.detach().double() for x in leaves), is_causal=is_causal)
    if want.abs().max() > torch.finfo(dtype).max:
        return  # what cannot be written down in the dtype needs not be right in it
    # Ours sum in float32, so only the output is rounded; torch's own kernel decides for itself.
    tolerance = TOLERANCE[dtype] if "softmax" in variant else torch.finfo(dtype).eps
    close(out, want, tolerance)
    assert all(x.dtype == dtype and not x.isnan().any() for x in torch.autograd.grad(out.sum(), leaves))


@both
def test_tokens_first_layout_gives_the_same(variant, is_causal, small_blocks):
    core = build(variant)
    q, k, v = inputs(26)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    close(core(*strided, is_causal=is_causal), core(q, k, v, is_causal=is_causal))


@both
def test_the_attention_matrix_gives_the_output(variant, is_causal):
    core = build(variant)
    q, k, v = inputs(15, 15)
    matrix = core.attention_matrix(q, k, is_causal=is_causal)
    assert matrix.shape == (2, 4, 15, 15)
    want = matrix @ v
    if core.method == "wildcat":
        want = want.clamp(v.amin(2, keepdim=True), v.amax(2, keepdim=True))
    close(want, core(q, k, v, is_causal=is_causal))
    if is_causal:
        assert torch.equal(matrix.triu(1), torch.zeros_like(matrix))


@every
def test_a_scale_in_the_call_replaces_the_default(variant):
    core = build(variant)
    q, k, v = inputs(9)
    root = (0.3 / core.scale) ** 0.5
    how = mode(variant)
    if core.normalize_qk:
        assert (core(q, k, v, scale=0.3, **how) - core(q, k, v, **how)).abs().max() > 1e-4
    elif core.calibrates:  # of statistics at the scale of the call
        close(core(q, k, v, scale=0.3, **how), reference_attention(core, q, k, v, scale=0.3, **how))
    elif variant != "elu near":  # whose near tokens have a scale of their own
        close(core(q, k, v, scale=0.3, **how), core(q * root, k * root, v, **how))


@streaming
def test_batches_of_any_size_agree_with_one_sample_at_a_time(variant):
    core = build(variant)
    q, k, v = inputs(6, B=9)
    whole = core(q, k, v, is_causal=True)
    close(whole, torch.cat([core(q[i : i + 1], k[i : i + 1], v[i : i + 1], is_causal=True) for i in range(9)]))
