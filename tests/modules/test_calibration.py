"""Statistics of queries and keys: what counts, what does not, what is refused, and how a whole model takes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kernelformer as kf
from kernelformer.feature_maps import LogLinearMap
from kernelformer.modules import MixedCore
from reference import reference_attention

H, D = 4, 8
NAN, INF = float("nan"), float("inf")


def build(method="favor#", num_features=8, **options):
    return kf.build_attention(method, head_dim=D, num_heads=H, num_features=num_features, **options).double()


def tokens(L=12, S=None, G=H, B=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = (H, L), (G, S or L), (G, S or L)
    return [torch.randn(B, *x, D, generator=gen, dtype=torch.float64) + 0.3 * i for i, x in enumerate(shapes)]


def moments(core):
    return core.feature_map.statistics.moments


def test_calls_add_up_and_hidden_tokens_leave_no_trace():
    whole, parts = build(), build()
    q, k, _ = tokens()
    whole.calibrate(q, k)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 8:] = False
    junk_q, junk_k = q[:1].clone(), k[:1].clone()
    junk_q[:, :, 8:], junk_k[:, :, 8:] = NAN, INF
    parts.calibrate(junk_q, junk_k, mask)
    parts.calibrate(q[:1, :, 8:], k[:1, :, 8:])
    parts.calibrate(q[1:], k[1:, :, :5])
    real = torch.ones(1, 0, dtype=torch.bool), torch.ones(1, 7, dtype=torch.bool)
    parts.calibrate(q[1:, :, :1], k[1:, :, 5:], query_mask=torch.ones(1, 1, dtype=torch.bool), key_mask=real[1])
    torch.testing.assert_close(moments(parts)[1], moments(whole)[1])
    assert moments(whole)[0, :, -1, -1].eq(24).all()
    parts.reset_calibration()
    assert not moments(parts).any()
    parts.calibrate(q, k)
    assert torch.equal(moments(parts), moments(whole))
    assert parts.feature_map.identity == whole.feature_map.identity


@pytest.mark.parametrize(("key_heads", "G"), [(2, 2), (2, 1), (None, 2)])
def test_grouped_queries_have_the_statistics_of_their_key_head(key_heads, G):
    core = build(num_key_heads=key_heads) if key_heads else build()
    q, k, v = tokens(G=G)
    core.calibrate(q, k)
    maps = key_heads or H
    assert moments(core).shape[1] == maps
    for i in range(maps):
        queries = q[:, i * H // maps : (i + 1) * H // maps].reshape(-1, D)
        keys = k[:, i * G // maps].reshape(-1, D)
        for x, got in zip((queries, keys), moments(core)[:, i], strict=True):
            torch.testing.assert_close(got[:-1, :-1], x.T @ x)
            torch.testing.assert_close(got[-1], torch.cat([x.sum(0), torch.tensor([len(x)])]))
    out, state = core(q, k, v, is_causal=True, return_state=True)
    assert state.tensors[1].shape[1] == maps
    torch.testing.assert_close(out, reference_attention(core, q, k, v, is_causal=True))
    bias = torch.randn(H, 23, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    distances = torch.arange(12) - torch.arange(12)[:, None] + 11
    want = reference_attention(core, q, k, v, bias=bias[:, distances])
    torch.testing.assert_close(core(q, k, v, bias=bias), want)


@pytest.mark.parametrize("G", [2, 4])
def test_far_tokens_of_grouped_queries_stand_on_the_scale_of_near_ones(G):
    core = build(num_key_heads=G, window=3, sinks=1)
    q, k, v = tokens(G=G)
    core.calibrate(q, k)
    for is_causal in (False, True):
        want = reference_attention(core, q, k, v, is_causal=is_causal)
        torch.testing.assert_close(core(q, k, v, is_causal=is_causal), want)
    with torch.no_grad():
        _, state = core(*(x[:, :, :11] for x in (q, k, v)), is_causal=True, return_state=True)
        last, _ = core.step(*(x[:, :, 11:] for x in (q, k, v)), state)
        torch.testing.assert_close(last, want[:, :, 11:])


def test_unit_vectors_are_what_counts_where_the_map_sees_them():
    core = build(normalize_qk=True)
    q, k, _ = tokens()
    core.calibrate(q, k)
    second = moments(core)[:, :, :-1, :-1].diagonal(0, 2, 3).sum(-1)
    torch.testing.assert_close(second, torch.full_like(second, 24.0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k: (q[:, :2], k[:, :2]), r"num_heads=4, got queries of shape \(2, 2, 12, 8\)"),
        (lambda q, k: (q[..., :4], k[..., :4]), r"head_dim=8, got queries of shape \(2, 4, 12, 4\)"),
        (lambda q, k: (q, k[:, :3]), "number of key heads must divide that of query heads, got 3 and 4"),
        (lambda q, k: (q.index_fill(2, torch.tensor([3]), NAN), k), "finite queries, got 8 of 96 with NaN"),
        (lambda q, k: (q, k.index_fill(2, torch.tensor([3]), INF)), "finite keys, got 8 of 96 with NaN or an inf"),
        (lambda q, k: (q[:0], k[:0]), "finite queries, got none that is real"),
        (lambda q, k: (q, k, torch.zeros(2, 12, dtype=torch.bool)), "finite queries, got none that is real"),
        (lambda q, k: (q, k, torch.ones(2, 5, dtype=torch.bool)), r"key_mask must be .*= \(2, 12\), got \(2, 5\)"),
        (lambda q, k: (q.long(), k.long()), "query must be a floating point tensor, got torch.int64"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_counted(change, said):
    core = build()
    q, k, _ = tokens()
    core.calibrate(q, k)
    before = moments(core).clone()
    with pytest.raises(ValueError, match=said):
        core.calibrate(*change(q, k))
    assert torch.equal(moments(core), before)


@pytest.mark.parametrize("method", ["favor+", "softmax", "loglinear", "local"])
def test_a_method_without_statistics_says_so(method):
    core = build(method)
    assert not core.calibrates
    with pytest.raises(ValueError, match=f"'{method}' has no statistics to calibrate; use 'favor".replace("+", r"\+")):
        core.calibrate(*tokens()[:2])
    with pytest.raises(ValueError, match=r"Sequential has no attention with statistics to calibrate; use 'favor\+\+'"):
        kf.calibrate(nn.Sequential(core), [])


@pytest.mark.parametrize(("method", "options"), [("favor#", {}), ("loglinear", {"start": "favor#"})])
def test_a_state_from_before_a_calibration_does_not_fit_after_it(method, options):
    core = build(method, **options).eval()
    q, k, v = tokens()
    core.calibrate(q, k)
    with torch.no_grad():
        _, state = core(q, k, v, is_causal=True, return_state=True)
        one = [x[:, :, :1] for x in (q, k, v)]
        _, state = core.step(*one, state)
        core.calibrate(2 * q, k)
        for call in (lambda: core.step(*one, state), lambda: core(q, k, v, is_causal=True, state=state)):
            with pytest.raises(ValueError, match=r"statistics.*start anew with state=None"):
                call()
        whole, state = core(q, k, v, is_causal=True, return_state=True)
        _, first = core(*(x[:, :, :11] for x in (q, k, v)), is_causal=True, return_state=True)
        last, _ = core.step(*(x[:, :, 11:] for x in (q, k, v)), first)
        torch.testing.assert_close(last, whole[:, :, 11:])


def test_statistics_are_saved_and_those_of_another_model_are_refused():
    core, q, k, v = build(), *tokens()
    core.calibrate(q, k)
    other = build()
    other.load_state_dict(core.state_dict())
    assert torch.equal(other(q, k, v), core(q, k, v))
    assert other.feature_map.identity == core.feature_map.identity
    with pytest.raises(RuntimeError, match=r"saved with dense=True, balance=True, this one has dense=False"):
        build("favor++").load_state_dict(core.state_dict())
    with pytest.raises(RuntimeError, match=r"saved with .*hyperbolic"):
        build().load_state_dict(build("favor+", per_head=True).state_dict())
    fewer = kf.build_attention("favor#", head_dim=D, num_heads=2, num_features=8)
    with pytest.raises(RuntimeError, match=r"size mismatch for feature_map.statistics.moments"):
        fewer.load_state_dict(core.state_dict())
    spoiled = {name: x * NAN if name.endswith("moments") else x for name, x in core.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"statistics of a calibrated map hold NaN"):
        other.load_state_dict(spoiled)
    assert torch.equal(other(q, k, v), core(q, k, v))


def test_loglinear_starts_like_the_calibrated_features_and_is_not_overwritten_once_trained():
    q, k, _ = tokens()
    core = build("loglinear", start="favor#", unit_keys=False)
    assert torch.equal(core.feature_map.w_q, build("loglinear").feature_map.w_q)
    core.calibrate(q[:1], k[:1])
    core.calibrate(q[1:], k[1:])
    phi, scale = core.feature_map, core.scale
    omega = build("loglinear").feature_map.w_q.detach()
    w_q, w_k, constants = phi.statistics.features(omega, scale)
    torch.testing.assert_close(phi.w_q.detach(), w_q)
    torch.testing.assert_close(phi.w_k.detach(), w_k)
    torch.testing.assert_close(phi.b_k.detach(), constants - 0.5 * torch.tensor(8.0).log())
    with torch.no_grad():
        phi.b_k += 0.1
    before = copy.deepcopy(core.state_dict())
    for call in (lambda: core.calibrate(q, k), lambda: kf.calibrate(core, [tuple(tokens())])):
        with pytest.raises(ValueError, match="have been trained since they started"):
            call()
    assert all(torch.equal(x, before[name]) for name, x in core.state_dict().items())
    assert kf.calibrate(core, [tuple(tokens())], reset=True) == {"": 24}
    torch.testing.assert_close(phi.w_q.detach(), w_q)
    assert "start" not in LogLinearMap(head_dim=D, num_heads=H).options


class Model(nn.Module):
    """A layer, a drop-in of torch's, and heads of two kinds, one after another; or the last one never called."""

    def __init__(self, idle=False):
        super().__init__()
        half = {"head_dim": D, "num_heads": H // 2, "num_features": 8}
        self.first = kf.KernelAttention(H * D, H, method="favor#", num_features=8, rotary=True)
        self.second = kf.MultiheadAttention(H * D, H, batch_first=True, method="favor++", num_features=8)
        self.mixed = MixedCore(kf.build_attention("softmax", **half), kf.build_attention("favor#", **half), [0, 2])
        self.idle = idle

    def forward(self, x, key_mask=None):
        x = self.first(x, key_mask=key_mask)
        x = self.second(x, x, x, key_padding_mask=None if key_mask is None else ~key_mask, need_weights=False)[0]
        heads = x.unflatten(2, (H, D)).transpose(1, 2)
        return x if self.idle else self.mixed(heads, heads, heads, key_mask=key_mask)


def test_a_model_is_calibrated_by_what_its_cores_are_called_with():
    torch.manual_seed(0)
    model = Model().train()
    x, mask = torch.randn(2, 10, H * D), torch.ones(2, 10, dtype=torch.bool)
    mask[1, 6:] = False
    alone = copy.deepcopy(model)
    cores = [name for name, core in model.named_modules() if getattr(core, "calibrates", False)]
    assert cores == ["first.core", "second.kernel", "mixed.linear"]
    for name in cores:  # by hand, at the same calls
        core = alone.get_submodule(name)
        core.register_forward_pre_hook(
            lambda core, args, given: seen.append((core, *args[:2], given.get("key_mask"), given.get("query_mask"))),
            with_kwargs=True,
        )
    seen, batches = [], [{"x": x, "key_mask": mask}, (x,), x]
    with torch.no_grad():
        for masked in (mask, None, None):
            alone.eval()(x, masked)
    for core, q, k, key_mask, query_mask in seen:
        core.calibrate(q, k, key_mask, query_mask=query_mask)
    assert kf.calibrate(model, batches) == {"first.core": 56, "second.kernel": 56, "mixed.linear": 56}
    assert model.training
    for name in cores:
        torch.testing.assert_close(moments(model.get_submodule(name)), moments(alone.get_submodule(name)))
    counted = moments(model.first.core).clone()
    kf.calibrate(model, [x])
    assert moments(model.first.core)[0, 0, -1, -1] == 76
    kf.calibrate(model, batches, reset=True)
    torch.testing.assert_close(moments(model.first.core), counted)
    q, k, _ = tokens()
    model.mixed.calibrate(q.float(), k.float())
    assert moments(model.mixed.linear)[0, 0, -1, -1] == 56 + 24


def test_a_calibration_that_fails_changes_nothing_and_idle_cores_are_named():
    torch.manual_seed(0)
    model, x = Model(idle=True), torch.randn(2, 5, H * D)
    before = copy.deepcopy(model.state_dict())
    for batches, said in (
        ([x, torch.full_like(x, NAN)], "finite queries, got"),
        (x, "got Tensor; put a single one into a list"),
        ({"x": x}, "got dict; put a single one into a list"),
        ([], "0 batches reached none of the 3 attentions"),
    ):
        with pytest.raises(ValueError, match=said):
            kf.calibrate(model, batches)
        assert all(torch.equal(y, before[name]) for name, y in model.state_dict().items())
    with pytest.warns(UserWarning, match="1 of 3 attentions saw no tokens and stay as they were: mixed.linear"):
        assert kf.calibrate(model, [x])["mixed.linear"] == 0


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_a_converted_model_attends_exactly_meanwhile_and_keeps_its_statistics(kind, tmp_path):
    pytest.importorskip("transformers")
    from kernelformer.hf import convert, cores, load
    from tiny_models import tiny

    exact, model = (convert(tiny(kind), method, num_features=8) for method in ("softmax", "favor#"))
    ids = torch.arange(24).view(2, 12) + 5
    batch = {"input_ids": ids, **({"decoder_input_ids": ids[:, :7]} if kind.startswith("T5") else {})}
    seen = {}
    for name, core in cores(exact).items():
        core.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[:2]}))
    exact(**batch)
    assert set(kf.calibrate(model, [batch], exact=True).values()) <= {14, 24, 48}
    for name, core in cores(model).items():
        alone = copy.deepcopy(core)
        alone.reset_calibration()
        alone.calibrate(*(x.detach() for x in seen[name]))
        torch.testing.assert_close(moments(core), moments(alone), msg=name)
    model.save_pretrained(tmp_path)
    for dtype in (None, torch.float32):
        other = load(tmp_path, dtype=dtype)
        for name, core in cores(other).items():
            assert torch.equal(moments(core), moments(cores(model)[name]))
    assert torch.equal(load(tmp_path)(**batch)[0], model(**batch)[0])
