"""Heads of two kinds in one core: each as its own core would attend, all at once and in pieces."""

from __future__ import annotations

import copy

import pytest
import torch

import kernelformer as kf
from kernelformer.modules import MixedCore

H, D, L = 6, 8, 13
EXACT = (1, 4)
REST = (0, 2, 3, 5)


def make(method="favor+", heads=EXACT, scale=0.5, **options):
    small = {"num_features": 16} if "num_features" in kf.method_options(method) else {}
    if method == "elu":
        options.setdefault("scale", 1.0)
    exact = kf.build_attention("softmax", head_dim=D, num_heads=len(heads), scale=scale)
    linear = kf.build_attention(method, head_dim=D, num_heads=H - len(heads), **{"scale": scale, **small, **options})
    return MixedCore(exact, linear, heads).double()


def qkv(groups=H, length=L, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, length, D, generator=gen, dtype=torch.float64) for n in (H, groups, groups)]


def mask():
    found = torch.ones(2, L, dtype=torch.bool)
    found[1, :4] = False
    return found


def apart(core, q, k, v, **options):
    """Each kind by its own core, and the heads put together one by one."""
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    out = torch.empty_like(q)
    for part, heads in ((core.exact, core.heads[0]), (core.linear, core.heads[1])):
        own = dict(options)
        if own.get("bias") is not None:
            own["bias"] = own["bias"][heads]
        found = part(q[:, heads], k[:, heads], v[:, heads], **own)
        for i, head in enumerate(heads):
            out[:, head] = found[:, i]
    return out


@pytest.mark.parametrize("groups", [H, 3, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["favor+", "loglinear", "elu", "trigonometric"])
def test_every_head_attends_as_its_own_core_does(method, causal, groups):
    core, (q, k, v) = make(method), qkv(groups)
    given = {"is_causal": causal, "key_mask": mask()}
    torch.testing.assert_close(core(q, k, v, **given), apart(core, q, k, v, **given))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(core(q, k, v, is_causal=causal)[:, EXACT], exact[:, EXACT])
    assert not torch.allclose(core(q, k, v, is_causal=causal)[:, REST], exact[:, REST], rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_each_head_has_its_own_bias(causal):
    core, (q, k, v) = make(), qkv()
    bias = torch.randn(H, 2 * L - 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = {"is_causal": causal, "key_mask": mask(), "bias": bias}
    torch.testing.assert_close(core(q, k, v, **given), apart(core, q, k, v, **given))
    weights = core.attention_matrix(q, k, **given)
    torch.testing.assert_close(weights @ v, core(q, k, v, **given))
    assert core.takes_bias
    assert not MixedCore(core.exact, kf.build_attention("gaussian", head_dim=D, num_heads=4), EXACT).takes_bias


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("method", ["favor+", "loglinear", "rfa-gate"])
def test_pieces_and_steps_give_the_whole(method, biased):
    if method == "rfa-gate" and biased:
        pytest.skip("a gate takes no bias")
    core, (q, k, v) = make(method, **({"own_gate": True} if method == "rfa-gate" else {})), qkv(3)
    reach = 4
    near = torch.randn(H, reach + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def table(past, length):
        if not biased:
            return {}
        distances = torch.arange(-(past + length - 1), length).neg().clamp(0, reach)
        return {"bias": near[:, distances], "max_distance": reach}

    want = core(q, k, v, is_causal=True, key_mask=mask(), **table(0, L))
    outs, state, at = [], None, 0
    for n in (5, 1, 1, 4, 1, 1):
        here = slice(at, at + n)
        part = [x[:, :, here] for x in (q, k, v)]
        if n == 1:
            out, state = core.step(*part, state, key_mask=mask()[:, here], bias=near if biased else None)
        else:
            out, state = core(*part, is_causal=True, key_mask=mask()[:, here], state=state, return_state=True,
                              **table(at, n))  # fmt: skip
        outs.append(out)
        at += n
    torch.testing.assert_close(torch.cat(outs, 2), want, rtol=0, atol=1e-9)
    assert state.length == L


def test_states_are_reordered_detached_and_moved_as_one():
    core, (q, k, v) = make(), qkv()
    q.requires_grad_()
    k.requires_grad_()
    _, state = core(q, k, v, is_causal=True, return_state=True)
    step = [x[:, :, :1].detach() for x in (q, k, v)]
    want, _ = core.step(*step, state)
    order = torch.tensor([1, 0, 1])
    found, after = core.step(*(x[order] for x in step), state.reorder(order).detach().to("cpu"))
    torch.testing.assert_close(found, want[order])
    assert not found.requires_grad
    assert want.requires_grad
    assert after.batch == 3
    assert state.nbytes == sum(x.nbytes for x in state.parts)
    assert state.reorder(order).reorder([0]).batch == 1


def test_a_remembered_context_is_attended_to_by_both_kinds():
    core, (q, k, v) = make(), qkv(3)
    memory = core.remember(k, v, key_mask=mask())
    want = core(q[:, :, :5], k, v, key_mask=mask())
    torch.testing.assert_close(core.recall(q[:, :, :5], memory), want)
    order = [1, 1]
    torch.testing.assert_close(core.recall(q[order][:, :, :5], memory.reorder(order)), want[order])
    with pytest.raises(ValueError, match="recall needs"):
        core.recall(q, core.exact.remember(k[:, :2], v[:, :2]))


def test_a_scale_for_all_is_taken_where_there_is_one():
    core, (q, k, v) = make(), qkv()
    torch.testing.assert_close(core(q, k, v, scale=0.25), apart(core, q, k, v, scale=0.25))
    torch.testing.assert_close(core(q, k, v, scale=0.5), core(q, k, v))
    one = [x[:, :, :1] for x in (q, k, v)]
    torch.testing.assert_close(core.step(*one, scale=0.25)[0], core(*one, is_causal=True, scale=0.25))
    other = make("elu")
    for call in (lambda: other(q, k, v, scale=0.5), lambda: other.step(*one, scale=0.5)):
        with pytest.raises(ValueError, match=r"scales of their own, 0\.5 and 1"):
            call()


def test_gradients_copies_and_draws():
    core, (q, k, v) = make("loglinear"), qkv()
    core(q, k, v).square().sum().backward()
    assert all(x.grad is not None for x in core.parameters())
    core = make()
    other = copy.deepcopy(core)
    before = other(q, k, v)
    core.resample(5)
    assert torch.equal(other(q, k, v), before)
    changed = core(q, k, v)
    assert torch.equal(changed[:, EXACT], before[:, EXACT])
    assert not torch.allclose(changed[:, REST], before[:, REST])
    other.load_state_dict(core.state_dict())
    assert torch.equal(other(q, k, v), changed)
    assert core.feature_dim == 16


@pytest.mark.parametrize("heads", [(0, 0), (1, 6), (0,), (0, 1, 2), (-1, 2)])
def test_heads_that_are_not_there_are_refused(heads):
    exact, linear = (kf.build_attention(x, head_dim=D, num_heads=n) for x, n in (("softmax", 2), ("elu", 4)))
    with pytest.raises(ValueError, match="exact heads must be 2 different numbers below 6"):
        MixedCore(exact, linear, heads)


def test_what_does_not_belong_is_refused():
    core, (q, k, v) = make(), qkv()
    one = [x[:, :, :1] for x in (q, k, v)]
    _, foreign = core.exact.step(*(x[:, :2] for x in one))
    for call in (
        lambda: core.step(*one, foreign),
        lambda: core(q, k, v, is_causal=True, state=foreign, return_state=True),
    ):
        with pytest.raises(ValueError, match="state must be one of this core's"):
            call()
    with pytest.raises(ValueError, match="takes no gate"):
        core.step(*one, gate=torch.ones(2, H, 1).double())
    with pytest.raises(ValueError, match="causal"):
        core(q, k, v, return_state=True)
    wide = kf.build_attention("softmax", head_dim=16, num_heads=2)
    with pytest.raises(ValueError, match="one head_dim, got 16 and 8"):
        MixedCore(wide, core.linear, EXACT)
    assert make("skyformer", num_landmarks=4).refusal(True) is not None
    assert core.refusal(True) is None
