"""`kf.kernel_attention`: attention by any method as a function."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernelformer as kf
from definition import inputs
from kernelformer.modules import spec as functional


@pytest.fixture(autouse=True)
def _empty_cache():
    functional._cached.cache_clear()


@pytest.mark.parametrize("method", ["softmax", "gaussian", "favor+", "nprf", "trigonometric", "elu", "skyformer"])
def test_it_is_the_core_of_the_same_settings(method):
    qkv = inputs(9, G=2, grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    core = kf.build_attention(method, head_dim=8, num_heads=4).double()
    calls = [{}, {"key_mask": mask}, {"scale": 0.3}]
    calls += [] if method == "skyformer" else [{"is_causal": True, "key_mask": mask}]
    calls += [{"bias": torch.randn(4, 17).double(), "is_causal": True}] if core.takes_bias and calls[3:] else []
    for call in calls:
        out, want = kf.kernel_attention(*qkv, method=method, **call), core(*qkv, **call)
        torch.testing.assert_close(out, want, rtol=0, atol=0)
        for a, b in zip(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(want.sum(), qkv), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert functional._cached.cache_info().currsize == 1


def test_softmax_is_torchs_function():
    q, k, v = inputs(9, grad=True)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(kf.kernel_attention(q, k, v, "softmax", is_causal=True), want)


def test_cores_are_kept_by_their_settings():
    q, k, v = inputs(9, G=2, grad=True)
    first = kf.kernel_attention(q, k, v, num_features=16, seed=1)
    for options in ({"seed": 1, "num_features": 16}, {"num_features": 16, "seed": 1, "is_causal": True}):
        kf.kernel_attention(q, k, v, **options)
    info = functional._cached.cache_info
    assert (info().misses, info().currsize) == (1, 1)
    assert not torch.equal(kf.kernel_attention(q, k, v, num_features=16, seed=2), first)
    kf.kernel_attention(*inputs(9, G=2, grad=True, dtype=torch.float32), num_features=16, seed=1)
    kf.kernel_attention(*inputs(9, G=2, grad=True, dtype=torch.bfloat16), num_features=16, seed=1)  # in float32 inside
    assert info().misses == 3
    with pytest.raises(ValueError, match="normalize must be True or False, got 1"):
        kf.kernel_attention(q, k, v, normalize=1)
    assert torch.equal(kf.kernel_attention(q, k, v, num_features=16, seed=1), first)


def test_the_cache_is_bounded():
    q, k, v = inputs(9, G=2, grad=True)
    first = kf.kernel_attention(q, k, v, num_features=4, seed=0)
    for seed in range(1, functional.CACHE + 3):
        kf.kernel_attention(q, k, v, num_features=4, seed=seed)
    assert functional._cached.cache_info().currsize == functional.CACHE
    assert torch.equal(kf.kernel_attention(q, k, v, num_features=4, seed=0), first)


def test_several_threads_get_the_same_numbers():
    q, k, v = (x.detach() for x in inputs(9, G=2, grad=True))

    def attend(seed):
        return kf.kernel_attention(q, k, v, num_features=8, seed=seed % 3)

    want = [attend(seed) for seed in range(3)]
    functional._cached.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        for seed, out in enumerate(pool.map(attend, range(24))):
            assert torch.equal(out, want[seed % 3])


@pytest.mark.parametrize(
    ("method", "options"),
    [("loglinear", {}), ("gmm-rks", {}), ("fastfood-prf", {}), ("rfa", {}), ("linformer", {"max_length": 9}),
     ("nystromformer", {"conv": 3})],
)  # fmt: skip
def test_methods_that_learn_are_refused(method, options):
    with pytest.raises(ValueError, match=rf"'{method}' learns [\d,]+ parameters, .*kf.build_attention"):
        kf.kernel_attention(*inputs(9, grad=True), method=method, **options)
    kf.kernel_attention(*inputs(9, grad=True), method="nystromformer", num_landmarks=3)


def test_a_core_that_was_built_in_inference_serves_training():
    q, k, v = inputs(9, G=2, grad=True)
    with torch.inference_mode():
        want = kf.kernel_attention(q, k, v, num_features=8)
    out = kf.kernel_attention(q, k, v, num_features=8)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), want.clone())
    assert functional._cached.cache_info().misses == 1


def test_weights_are_dropped_whenever_that_is_asked_for():
    q, k, v = inputs(9, G=2, grad=True)
    one, other = (kf.kernel_attention(q, k, v, "softmax", attention_dropout=0.5) for _ in range(2))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="never forms"):
        kf.kernel_attention(q, k, v, attention_dropout=0.5)


def test_compiled_code_calls_it():
    q, k, v = (x.detach() for x in inputs(9, G=2, grad=True))

    def attend(q, k, v):
        return kf.kernel_attention(2 * q, k, v, num_features=8, is_causal=True) + 1

    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v), attend(q, k, v))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: kf.kernel_attention(q[0], k, v), r"query must be \(batch, heads, length, head_dim\)"),
        (lambda q, k, v: kf.kernel_attention(q.long(), k, v), "floating point"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, rank=3), "option for method 'favor[+]'"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, state=None), "option for method 'favor[+]', 'state'"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, attn_mask=None), "attn_mask is .* of torch's .*; key_mask="),
        (lambda q, k, v: kf.kernel_attention(q, k, v, dropout_p=0.1), "dropout_p is .*; attention_dropout="),
        (lambda q, k, v: kf.kernel_attention(q, k, v, enable_gqa=True), "enable_gqa is .*; leave it out"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, draw={"iid"}), "draw must be a plain value"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, "nothing"), "unknown method 'nothing'"),
        (lambda q, k, v: kf.kernel_attention(q, k, v, "skyformer", is_causal=True), "'skyformer'"),
    ],
)
def test_wrong_calls_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(*inputs(9, G=2, grad=True))
