"""NaN and infinities in a token reach the rows that see it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelformer as kf
from definition import close, inputs
from kernelformer.modules import MixedCore

L = 40
PLACES = {"first": 0, "middle": 21, "end of a chunk": 31, "last": L - 1}
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
METHODS = [x for x in kf.list_methods() if x not in ("skyformer", "wildcat", "nystromformer", "linformer")]
BIASED = ["softmax", "favor+", "nprf", "trigonometric", "relu", "elu", "loglinear"]
ALGORITHMS = ["direct", "windowed", "fft"]
# torch's attention is the only algorithm of softmax
PAIRS = [(x, a) for x in BIASED for a in (ALGORITHMS if x != "softmax" else [None])]


def make(method, **options):
    sizes = {} if method in ("softmax", "gaussian", "elu") else {"num_features": 16}
    core = kf.build_attention(method, head_dim=8, num_heads=4, **sizes, **options)
    return core.requires_grad_(False)


def spoil(x, place, value, sample=1, head=None):
    """A copy with one bad number in a token of one sample, in one head or in all."""
    x = x.clone()
    x[sample, slice(None) if head is None else head, place, 3] = value
    return x


def spoiled(tensors, which, place, value, head=None):
    return [spoil(x, place, value, head=head) if name in which else x for name, x in zip("qkv", tensors, strict=True)]


def check_rows(found, want, which, place, head=None):
    """Rows of the other sample, of other heads and before the token as they were; NaN where it is seen."""
    heads = slice(None) if head is None else head
    close(found[0], want[0])
    close(found[1, heads, :place], want[1, heads, :place])
    if head is not None:
        others = [x for x in range(found.shape[1]) if x != head]
        close(found[1, others], want[1, others])
    seen = found[1, heads, place : place + 1] if which == "q" else found[1, heads, place:]
    assert not seen.isfinite().any()
    if which == "q":
        close(found[1, heads, place + 1 :], want[1, heads, place + 1 :])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_token_reaches_only_the_rows_that_see_it(method, which, place, small_blocks):
    core, clean = make(method), inputs(L)
    want = core(*clean, is_causal=True)
    for value in BAD.values():
        found = core(*spoiled(clean, which, PLACES[place], value), is_causal=True)
        check_rows(found, want, which, PLACES[place])
    check_rows(
        core(*spoiled(clean, which, PLACES[place], torch.nan, head=2), is_causal=True), want, which, PLACES[place], 2
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize(("method", "algorithm"), PAIRS)
def test_a_bad_token_reaches_only_the_rows_that_see_it_with_a_bias(method, algorithm, which, place):
    core, clean = make(method), inputs(L)
    bias = 0.5 * torch.randn(4, 2 * L - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"algorithm": algorithm}
    if algorithm == "windowed":
        bias[:, : L - 1 - 5] = bias[:, L - 1 - 5 : L - 5]
        options["max_distance"] = 5
    want = core(*clean, is_causal=True, bias=bias, **options)
    for value in BAD.values():
        found = core(*spoiled(clean, which, PLACES[place], value), is_causal=True, bias=bias, **options)
        check_rows(found, want, which, PLACES[place])


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("method", [*METHODS, "softmax biased", "favor+ biased", "trigonometric biased"])
def test_gradients_of_rows_that_do_not_see_a_bad_token_are_those_without_it(method, which, small_blocks):
    core, place = make(method.removesuffix(" biased")), 21
    own = (
        {"bias": torch.linspace(-1, 1, 4 * (2 * L - 1), dtype=torch.float64).view(4, -1)} if "biased" in method else {}
    )
    clean = inputs(L)
    kept = torch.ones(2, 1, L, 1, dtype=torch.float64)
    kept[1, :, place : place + 1 if which == "q" else None] = 0

    def grads(tensors, weight):
        tensors = [x.clone().requires_grad_() for x in tensors]
        out = core(*tensors, is_causal=True, **own)
        return torch.autograd.grad(out, tensors, weight.expand_as(out))

    bad = spoiled(clean, which, place, torch.nan)
    for found, want in zip(grads(bad, kept), grads(clean, kept), strict=True):
        token = torch.ones(L, dtype=torch.bool)
        token[place] = False  # its own gradient has no meaning
        close(found[:, :, token], want[:, :, token])
    # A loss that does depend on a bad row is not differentiated as if it did not.
    assert not all(x.isfinite().all() for x in grads(bad, torch.ones_like(kept)))
    close(grads(bad, torch.ones_like(kept))[0][0], grads(clean, torch.ones_like(kept))[0][0])


@pytest.mark.parametrize("method", [*METHODS, "softmax unit", "favor+ unit"])
def test_a_bad_token_that_the_loss_does_not_depend_on_has_gradient_zero(method):
    unit = {"normalize_qk": True} if "unit" in method else {}
    core = make(method.removesuffix(" unit"), **unit)
    tensors = [x.requires_grad_() for x in spoiled(inputs(L), "qkv", 21, torch.inf)]
    for x in torch.autograd.grad(core(*tensors, is_causal=True)[0].sum(), tensors):
        assert not x[1].any()


@pytest.mark.parametrize("method", ["softmax", "gmm-prf", "gmm-rks", "loglinear"])
def test_maps_and_biases_learn_from_rows_that_do_not_see_a_bad_token(method):
    core, clean, place = make(method).double().requires_grad_(), inputs(L), 21
    bias = torch.linspace(-1, 1, 4 * (2 * L - 1), dtype=torch.float64).view(4, -1).requires_grad_()
    grads = []
    for tensors in (spoiled(clean, "qkv", place, torch.nan), clean):
        out = core(*tensors, is_causal=True, bias=bias)
        loss = out[0].sum() + out[1, :, :place].square().sum()
        grads.append(torch.autograd.grad(loss, [bias, *core.parameters()]))
    for found, want in zip(*grads, strict=True):
        close(found, want)


@pytest.mark.parametrize("method", ["softmax", "favor+", "rfa-gate"])
def test_a_bad_token_of_a_layer_reaches_only_the_rows_that_see_it(method):
    layer = kf.KernelAttention(32, 4, method, causal=True)
    clean = torch.randn(2, L, 32, generator=torch.Generator().manual_seed(0))
    bad = clean.clone()
    bad[1, 21, 3] = torch.nan
    found, want = layer(bad), layer(clean)
    close(found[0], want[0])
    close(found[1, :21], want[1, :21])
    assert found[1, 21:].isnan().all()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("method", [*METHODS, "softmax biased", "favor+ biased", "trigonometric biased"])
def test_streams_stay_clean_until_a_bad_token_and_are_nan_after_it(method, which):
    core, place, clean = make(method.removesuffix(" biased")), 9, inputs(20)
    biased = "biased" in method
    table = torch.linspace(-1, 0, 4 * 4, dtype=torch.float64).view(4, 4)  # over distances 0 to 3

    def bias(first, last):
        distances = torch.arange(-(last - 1), last - first, device="cpu").neg().clamp(0, 3)
        return {"bias": table[:, distances]} if biased else {}

    window = {"max_distance": 3} if biased and not method.startswith("softmax") else {}
    want = core(*clean, is_causal=True, **bias(0, 20))
    bad = spoiled(clean, which, place, torch.nan)

    def cut(a, b):
        return [x[:, :, a:b] for x in bad]

    with torch.no_grad():
        first, state = core(*cut(0, 6), is_causal=True, return_state=True, **bias(0, 6), **window)
        second, state = core(*cut(6, 13), is_causal=True, state=state, return_state=True, **bias(6, 13), **window)
        parts = [first, second]
        for t in range(13, 20):
            out, state = core.step(*cut(t, t + 1), state, **({"bias": table} if biased else {}))
            parts.append(out)
    check_rows(torch.cat(parts, 2), want, which, place)


@pytest.mark.parametrize(("method", "algorithm"), [x for x in PAIRS if x[0] in ("softmax", "favor+", "relu")])
def test_keys_that_a_bias_hides_may_be_bad(method, algorithm):
    core, clean, place = make(method), inputs(L), 10
    bias = torch.zeros(4, 2 * L - 1, dtype=torch.float64)
    bias[:, : L - 1 - 5] = -torch.inf  # the last six tokens are visible
    options = {"bias": bias, "algorithm": algorithm}
    want = core(*clean, is_causal=True, **options)
    found = core(*spoiled(clean, "k", place, torch.nan), is_causal=True, **options)
    assert found[1, :, place : place + 6].isnan().all()
    close(found[1, :, :place], want[1, :, :place])
    close(found[1, :, place + 6 :], want[1, :, place + 6 :])


def test_bad_tokens_on_a_grid():
    core, clean = make("favor+"), inputs(22)
    bias = torch.zeros(4, 7, 9, dtype=torch.float64)
    bias[:, :2] = -torch.inf  # rows of the grid see their own and the one before
    want = core(*clean, is_causal=True, bias=bias, num_prefix=2)
    found = core(*spoiled(clean, "v", 7, torch.inf), is_causal=True, bias=bias, num_prefix=2)
    seen = torch.zeros(22, dtype=torch.bool)
    seen[7:17] = True
    assert torch.equal(found[1].isnan().all(-1), seen.expand(4, -1))
    close(found[1][:, ~seen], want[1][:, ~seen])


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_token_behind_the_mask_reaches_nothing(method):
    core, clean = make(method), inputs(L)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[1, 9:12] = False
    want = core(*clean, is_causal=True, key_mask=mask)
    found, state = core(*spoiled(clean, "kv", 10, torch.nan), is_causal=True, key_mask=mask, return_state=True)
    close(found, want)
    assert core.step(*(x[:, :, :1] for x in clean), state)[0].isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_transform_does_not_hide_or_spread_bad_tokens(which, is_causal):
    core, clean = make("favor+"), inputs(L)
    bias = torch.zeros(4, 2 * L - 1, dtype=torch.float64)
    bad = spoiled(clean, which, 21, torch.nan)
    direct, fft = (core(*bad, bias=bias, algorithm=x, is_causal=is_causal) for x in ("direct", "fft"))
    assert direct.isnan().any()
    torch.testing.assert_close(fft, direct, equal_nan=True)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[:, 30:] = False
    hidden = spoiled(clean, "kv", 33, torch.inf)
    assert core(*hidden, bias=bias, algorithm="fft", is_causal=is_causal, key_mask=mask).isfinite().all()


def test_a_bad_gate_is_a_bad_token():
    core, clean = make("rfa-gate"), inputs(L)
    gate = torch.full((2, 4, L), 0.9, dtype=torch.float64)
    want = core(*clean, is_causal=True, gate=gate)
    bad = gate.clone()
    bad[1, 2, 21] = torch.nan
    check_rows(core(*clean, is_causal=True, gate=bad), want, "k", 21, head=2)


@pytest.mark.parametrize("method", ["softmax", "favor+", "trigonometric", "loglinear"])
def test_bad_tokens_of_grouped_keys_reach_the_heads_of_their_group(method):
    core, clean = make(method), inputs(L, G=2)
    want = core(*clean, is_causal=True)
    found, state = core(*spoiled(clean, "v", 21, torch.nan, head=1), is_causal=True, return_state=True)
    close(found[:, :2], want[:, :2])
    close(found[1, 2:, :21], want[1, 2:, :21])
    assert found[1, 2:, 21:].isnan().all()
    out, _ = core.step(*(x[:, :, :1] for x in clean), state)
    assert torch.equal(out[1].isnan().all(-1).squeeze(-1), torch.tensor([False, False, True, True]))


def test_large_numbers_are_not_taken_for_bad_ones():
    core, (q, k, v) = make("softmax"), inputs(L, dtype=torch.float32)
    v = v.sign() * 3e38  # whose sum is infinite
    assert core(q, k, v.abs(), is_causal=True)[:, :, 0].isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("method", ["softmax", "gaussian"])
def test_calls_without_numbers_to_look_at_go_on(method):
    core, x = make(method), torch.stack([inputs(9, E=8)[0], inputs(9, E=8, seed=1)[0]])
    want = torch.stack([core(y, y, y, is_causal=True) for y in x])
    close(torch.func.vmap(lambda y: core(y, y, y, is_causal=True))(x), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shape_only = fake.from_tensor(x[0])
        assert core(shape_only, shape_only, shape_only, is_causal=True).shape == x[0].shape


def test_mixed_heads_mark_their_own():
    exact, linear = (kf.build_attention(x, head_dim=8, num_heads=2) for x in ("softmax", "favor+"))
    core, clean = MixedCore(exact, linear, [0, 3]), inputs(L)
    want = core(*clean, is_causal=True)
    found, state = core(*spoiled(clean, "k", 21, torch.nan, head=3), is_causal=True, return_state=True)
    check_rows(found, want, "k", 21, head=3)
    out, _ = core.step(*(x[:, :, :1] for x in clean), state)
    assert torch.equal(out[1].isnan().all(-1).squeeze(-1), torch.tensor([False, False, False, True]))
