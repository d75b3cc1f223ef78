"""Cores and layers in the settings that people run them in."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernelformer as kf
from definition import SIZES, STREAMING, VARIANTS, build, close, inputs

METHODS = list(kf.list_methods())
NEEDS = {"linformer": {"max_length": 64}}
CAUSAL = [m for m in METHODS if m not in ("skyformer", "wildcat", "nystromformer", "linformer")]
BIDIRECTIONAL = [m for m in METHODS if m != "rfa-gate"]
MODES = [(m, False) for m in BIDIRECTIONAL] + [(m, True) for m in CAUSAL]


def core_of(method, **options):
    return kf.build_attention(method, head_dim=8, num_heads=4, **{**NEEDS.get(method, {}), **options})


def layer_of(method, **options):
    torch.manual_seed(0)
    return kf.KernelAttention(32, 4, method, **{**NEEDS.get(method, {}), **options})


def test_the_methods_have_a_line_each():
    assert METHODS == [
        "softmax", "gaussian", "local", "favor+", "favor+hyperbolic", "favor+regularized", "favor++", "favor#", "nprf",
        "trigonometric", "relu", "elu",
        "gmm-rks", "gmm-prf", "fastfood-rks", "fastfood-prf", "generative-rks", "generative-prf", "skyformer",
        "wildcat", "nystromformer", "linformer", "rfa", "rfa-gate", "loglinear", "hedgehog",
    ]  # fmt: skip
    assert all(about for about in kf.list_methods().values())
    assert "num_features" in kf.method_options("favor+")
    assert "num_features" not in kf.method_options("elu")


@pytest.mark.parametrize("method", METHODS)
def test_every_listed_option_is_taken(method):
    values = {
        "num_features": 12, "seed": 3, "draw": "iid", "norms": "sqrt", "per_head": True, "kernel": "gaussian",
        "normalize": False, "normalize_qk": True, "scale": 0.5, "hyperbolic": True, "regularized": True,
        "activation": "sigmoid", "projection": True, "eps": 0.1, "components": 4, "tied": True, "mean_std": 0.0,
        "covariance": "full", "smoothing": 0.5, "learn": "S", "sigma": 2.0, "transform": "fwht", "width": 7, "depth": 1,
        "num_landmarks": 6, "gamma": 0.1, "inverse": "iterative", "landmarks": "segments", "rounds": 3, "conv": 3,
        "max_length": 20, "rank": 5, "own_gate": True, "align": False, "unit_keys": False, "balance": True,
        "start": "favor#", "pivots": "greedy",
        "attention_dropout": 0.1, "num_key_heads": 2, "window": 3, "sinks": 1, "beta": "zero", "near_scale": 0.4,
    }  # fmt: skip
    options = {name: values[name] for name in kf.method_options(method) if name not in ("hyperbolic", "regularized")}
    if "window" in options and "normalize" in options:
        options["normalize"] = True  # near tokens share the normalization
    if method == "skyformer":
        options["landmarks"] = "learned"  # landmarks of tokens are each query head's own
        options["kernel"] = "softmax"  # as that of near tokens
    if method.startswith("gmm"):
        options["start"] = "xavier"
    if method.startswith("fastfood"):
        options["num_features"] = 16  # a multiple of head_dim
    core = kf.build_attention(method, head_dim=8, num_heads=4, **options)
    grouped = inputs(5, G=options.get("num_key_heads", 4), dtype=torch.float32)
    assert core(*grouped, is_causal=method == "rfa-gate").isfinite().all()


@pytest.mark.parametrize(("method", "causal"), MODES)
def test_a_layer_is_projections_around_the_core(method, causal):
    layer = layer_of(method, causal=causal, num_kv_heads=2)
    x = torch.randn(2, 11, 32)
    key_mask = torch.ones(2, 11, dtype=torch.bool)
    key_mask[0, 7:] = False

    def heads(linear):
        return linear(x).view(2, 11, -1, 8).transpose(1, 2)

    gate = {} if layer.gate is None else {"gate": torch.sigmoid(layer.gate(x)).transpose(1, 2)}
    qkv = (heads(layer.query), heads(layer.key), heads(layer.value))
    core = layer.core(*qkv, is_causal=causal, key_mask=key_mask, **gate)
    close(layer(x, key_mask=key_mask), layer.out(core.transpose(1, 2).reshape(2, 11, 32)))


def test_a_layer_attends_to_a_context():
    layer = layer_of("favor+", context_dim=20)
    x, context = torch.randn(2, 5, 32), torch.randn(2, 9, 20)
    y = layer(x, context, torch.ones(2, 9, dtype=torch.bool))
    assert y.shape == (2, 5, 32)
    assert (layer(x, 2 * context) - y).abs().max() > 1e-3


@pytest.mark.parametrize("method", CAUSAL)
def test_a_layer_steps_and_resumes(method):
    layer = layer_of(method, causal=True, num_kv_heads=2)
    x = torch.randn(2, 10, 32)
    want = layer(x)
    y, state = layer(x[:, :6], return_state=True)
    parts = [y]
    for t in range(6, 10):
        y, state = layer.step(x[:, t : t + 1], state)
        parts.append(y)
    close(torch.cat(parts, 1), want)


def test_a_layer_replaces_multihead_attention_in_a_transformer_and_learns():
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(7, 32)
            self.attention = kf.KernelAttention(32, 4, num_features=32, causal=True)
            self.head = torch.nn.Linear(32, 7)

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head(x + self.attention(x))

    model = Block()
    kf.redraw(model, every=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):  # the token before the last is the answer
        tokens = torch.randint(0, 7, (16, 12))
        tokens[:, 1] = tokens[:, 0]
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, 1], tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(("method", "is_causal"), MODES)
def test_compiled_without_a_graph_break(method, is_causal):
    torch._dynamo.reset()
    core = core_of(method)
    compiled = torch.compile(lambda *x: core(*x, is_causal=is_causal).tanh(), fullgraph=True, backend="aot_eager")
    found = []
    for run in (compiled, lambda *x: core(*x, is_causal=is_causal).tanh()):
        leaves = inputs(37, G=2, dtype=torch.float32, grad=True)
        out = run(*leaves)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_a_compiled_layer_steps_and_trains_with_inductor():
    torch._dynamo.reset()
    layer = layer_of("favor+", causal=True)
    x = torch.randn(2, 9, 32)
    compiled = torch.compile(layer, fullgraph=True)
    close(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.query.weight.grad.abs().max() > 0
    step = torch.compile(layer.step, fullgraph=True)
    state, parts = None, []
    for t in range(4):
        y, state = step(x[:, t : t + 1], state)
        parts.append(y)
    close(torch.cat(parts, 1), layer(x)[:, :4])


def test_redrawing_a_compiled_model_does_not_compile_it_again():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    layer = layer_of("favor+", causal=True)
    compiled = torch.compile(layer, backend="aot_eager")
    kf.redraw(compiled, every=1)
    x = torch.randn(2, 9, 32)
    for _ in range(10):
        y = compiled(x)
    assert layer.core.feature_map.draw_number == 9
    assert counters["stats"]["unique_graphs"] == 1
    close(y, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_autocast(method, dtype):
    layer = layer_of(method, causal=method in CAUSAL)
    x = torch.randn(2, 33, 32)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    close(y, layer(x))
    y.sum().backward()
    assert layer.key.weight.grad.dtype == torch.float32
    if method in CAUSAL and method not in ("softmax", "gaussian"):
        with torch.autocast("cpu", dtype=dtype):
            one, state = layer.step(x[:, :1])
        assert one.dtype == dtype
        assert state.tensors[1].dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_recomputes_with_the_same_draw(use_reentrant):
    class Model(torch.nn.Module):
        def __init__(self, save):
            super().__init__()
            self.layer, self.save = layer_of("favor+"), save

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=use_reentrant) if self.save else self.layer(x)

    plain, saving = Model(False), Model(True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    for model in (plain, saving):
        kf.redraw(model, every=1)
    for _ in range(3):
        grads = [torch.autograd.grad(m(x).square().sum(), [x], retain_graph=True)[0] for m in (plain,)]
        x.grad = None
        saving(x).square().sum().backward()
        close(x.grad, grads[0])


def test_redraw_counts_training_forwards_of_the_root_and_resumes():
    model = torch.nn.Sequential(layer_of("favor+", seed=1), layer_of("relu", seed=2), layer_of("elu"))
    handle = kf.redraw(model, every=3)
    maps = [layer.core.feature_map for layer in model]
    x = torch.randn(1, 4, 32)
    draws = []
    for _ in range(7):
        model(x)
        draws.append([phi.draw_number for phi in maps])
    assert [d[0] for d in draws] == [0, 0, 0, 1, 1, 1, 2]
    assert [d[1] for d in draws] == [d[0] for d in draws]
    assert {d[2] for d in draws} == {0}  # elu draws nothing
    model.eval()(x)
    assert maps[0].draw_number == 2

    resumed = torch.nn.Sequential(layer_of("favor+"), layer_of("relu"), layer_of("elu"))
    kf.redraw(resumed, every=3)
    resumed.load_state_dict(model.state_dict())
    for both in (model.train(), resumed.train()):
        for _ in range(3):
            out = both(x)
        both.last = out
    assert resumed[0].core.feature_map.draw_number == 3
    assert torch.equal(model.last, resumed.last)
    assert torch.equal(model[1].core.feature_map.omega, resumed[1].core.feature_map.omega)

    handle.remove()
    for _ in range(4):
        model(x)
    assert maps[0].draw_number == 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_redrawing_between_forward_and_backward_leaves_the_graph_its_own_draw(is_causal):
    core = build("favor+")
    leaves = inputs(9, grad=True)
    want = torch.autograd.grad(core(*leaves, is_causal=is_causal).sum(), leaves)
    out = core(*leaves, is_causal=is_causal)
    core.resample()
    for got, expected in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
        close(got, expected)


def test_two_forwards_before_one_backward_may_straddle_a_redraw():
    layer = layer_of("favor+")
    x = torch.randn(2, 5, 32)
    kf.redraw(layer, every=1)
    (layer(x).square().sum() + layer(x).square().sum()).backward()
    assert layer.core.feature_map.draw_number == 1
    assert layer.query.weight.grad.isfinite().all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_the_root_does_not_count_the_recomputation(use_reentrant):
    layer = layer_of("favor+")
    kf.redraw(layer, every=1)
    x = torch.randn(2, 5, 32, requires_grad=True)
    for number in range(3):
        checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
        assert layer.core.feature_map.draw_number == number


def test_a_half_precision_model_keeps_its_draw():
    core = build("favor+", torch.float32)
    omega = core.feature_map.omega.clone()
    core.half().bfloat16().to(torch.float16).float()
    assert torch.equal(core.feature_map.omega, omega)
    assert core.feature_map.seed_number == 0
    assert core.double().feature_map.omega.dtype == torch.float64
    assert torch.equal(core.feature_map.omega.float(), omega)


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "relu", "elu"])
def test_a_state_is_small_picklable_movable_and_reorders(variant):
    core = build(variant, torch.float32)
    q, k, v = inputs(40, B=3, dtype=torch.float32)
    _, state = core(q, k, v, is_causal=True, return_state=True)
    _, short = core(*(x[:, :, :2] for x in (q, k, v)), is_causal=True, return_state=True)
    assert state.nbytes == short.nbytes
    assert state.length == 40
    one = inputs(1, B=3, dtype=torch.float32, seed=5)
    want, _ = core.step(*one, state)
    restored = pickle.loads(pickle.dumps(state))
    assert torch.equal(core.step(*one, restored)[0], want)
    assert torch.equal(core.step(*one, copy.deepcopy(state))[0], want)
    assert torch.equal(core.step(*one, state)[0], want), "a step must not change the state that it came from"
    assert state.to("meta").tensors[0].device.type == "meta"
    order = torch.tensor([2, 0, 0, 1])
    again, _ = core.step(*(x[order] for x in one), state.reorder(order))
    close(again, want[order])
    assert not any(x.requires_grad for x in state.detach().tensors)


def test_a_pickled_core_works_in_another_process(tmp_path):
    core = build("favor+", torch.float32)
    q, k, v = inputs(5, dtype=torch.float32)
    torch.save((core, q, k, v, core(q, k, v)), tmp_path / "core.pt")
    code = (
        "import sys, torch; core, q, k, v, want = torch.load(sys.argv[1], weights_only=False);"
        "assert torch.equal(core(q, k, v), want)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "core.pt")], check=True)


def test_an_emptied_model_draws_again():
    layer = kf.KernelAttention(32, 4, device="meta", seed=5).to_empty(device="cpu")
    layer.core.feature_map.reset_parameters()
    want = kf.KernelAttention(32, 4, seed=5).core.feature_map
    assert torch.equal(layer.core.feature_map.omega, want.omega)
    assert int(layer.core.feature_map.seed) == 5


def test_a_core_built_in_inference_mode_works():
    with torch.inference_mode():
        core = copy.deepcopy(kf.build_attention("favor+", head_dim=8, num_heads=4))
        core.resample()
        out, state = core(*inputs(5, dtype=torch.float32), is_causal=True, return_state=True)
        core.step(*inputs(1, dtype=torch.float32), state)
    assert out.isfinite().all()


@pytest.mark.parametrize("change", ["built", "resampled", "reset", "loaded"])
def test_a_core_changed_in_inference_mode_trains(change):
    fast = ("favor+", {"head_dim": 512, "num_heads": 1, "num_features": 512, "draw": "hadamard"})
    some = ("favor+", "favor+ near", "favor#", "gmm-prf", "fastfood-rks", "loglinear", "rfa")
    for method, options in (fast, *(VARIANTS[x] for x in some)):
        settings = {**SIZES, **options}
        core = kf.build_attention(method, **settings)
        with torch.inference_mode():
            if change == "built":
                core = kf.build_attention(method, **settings)
            elif change == "resampled":
                core.resample()
            elif change == "reset":
                core.feature_map.reset_parameters()
            else:
                core.load_state_dict(core.state_dict())
        D, H = core.head_dim, core.num_heads
        leaves = inputs(5, D=D, H=H, G=H, dtype=torch.float32, grad=True)
        core(*leaves).sum().backward()
        core.resample()
        core(*leaves).sum().backward()


def test_long_streams_do_not_drift():
    """A running logarithm in float32 loses a digit every few ten thousand tokens."""
    core = kf.build_attention("favor+", head_dim=8, num_heads=1, num_features=16)
    gen = torch.Generator().manual_seed(0)
    L = 20000
    q, k, v = (torch.randn(1, 1, L, 8, generator=gen) for _ in range(3))
    v = v + torch.linspace(0, 3, L).view(1, 1, L, 1)
    whole = copy.deepcopy(core).double()(*(x.double() for x in (q, k, v)), is_causal=True)
    state, errors = None, []
    with torch.no_grad():
        for t in range(L):
            out, state = core.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            if t >= L - 50:
                errors.append(float((out - whole[:, :, t : t + 1]).norm() / whole[:, :, t : t + 1].norm()))
    assert sum(errors) / len(errors) < 5e-6
    assert float((core(q, k, v, is_causal=True) - whole).norm() / whole.norm()) < 2e-6


def test_the_model_can_be_built_on_the_meta_device_and_moved():
    with torch.device("meta"):
        layer = kf.KernelAttention(32, 4)
    assert layer.query.weight.device.type == "meta"
    assert layer.core.feature_map.omega.device.type == "cpu"
    core = build("favor+", torch.float32).to("meta")
    shapes = [x.to("meta") for x in inputs(5, dtype=torch.float32)]
    for is_causal in (False, True):
        assert core(*shapes, is_causal=is_causal).shape == (2, 4, 5, 6)
    out, state = core.step(*(x[:, :, :1] for x in shapes))
    assert core.step(*(x[:, :, :1] for x in shapes), state)[0].shape == out.shape == (2, 4, 1, 6)


def test_calls_and_steps_on_the_meta_device_have_shapes():
    shapes = [x.to("meta") for x in inputs(5, dtype=torch.float32)]
    bias = torch.zeros(4, 9, device="meta")
    for variant in ("softmax", "favor+", "favor+ near", "favor+ window", "local", "rfa-gate"):
        core = build(variant, torch.float32)
        assert core(*shapes, is_causal=True).shape == (2, 4, 5, 6)  # of a core on the CPU too
        core.to("meta")
        if core.takes_bias:
            assert core(*shapes, is_causal=True, bias=bias, max_distance=2).shape == (2, 4, 5, 6)
        state = None
        with torch.no_grad():
            for _ in range(3):
                out, state = core.step(*(x[:, :, :1] for x in shapes), state)
        assert out.shape == (2, 4, 1, 6)


@pytest.mark.parametrize("variant", STREAMING)
def test_inference_mode(variant):
    core = build(variant, torch.float32)
    with torch.inference_mode():
        out, state = core(*inputs(9, dtype=torch.float32), is_causal=True, return_state=True)
        core.step(*inputs(1, dtype=torch.float32), state)
    assert out.isfinite().all()


def test_gradients_reach_tensors_that_a_map_learns(small_blocks):
    """No map of this version learns its frequencies, but the contract promises that one can."""
    from kernelformer.attention.dispatch import attend

    for variant in ("favor+", "hyperbolic", "favor+ per head", "trigonometric", "relu", "gelu", "exp"):
        core = build(variant)
        phi = core.feature_map
        leaves = inputs(5, B=1, E=3, grad=True)
        omega = phi.tensors(torch.float64)[0].clone().requires_grad_()
        settings = {"spec": phi.spec_id, "tensors": [omega], "scale": 0.4, "normalize": core.normalize}

        def both(*x, settings=settings):
            settings = {**settings, "tensors": [x[3]]}
            return [attend(*x[:3], **settings, is_causal=causal)[0] for causal in (False, True)]

        assert torch.autograd.gradcheck(both, (*leaves, omega), atol=1e-6, fast_mode=True)
