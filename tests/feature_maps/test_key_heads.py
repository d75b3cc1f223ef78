"""Maps by key head: what grouped queries keep is of the size of their key heads, and nothing else changes."""

import copy
import itertools
import pickle

import pytest
import torch

import kernelformer as kf
from definition import SIZES, VARIANTS, close, inputs, learn_something, padding
from kernelformer.attention.state import Prepared

G = 2
# Every per-head map, with the options that make it one.
MAPS = {
    name: VARIANTS[name]
    for name in (
        "loglinear",
        "loglinear free keys",
        "gmm-rks",
        "gmm-prf full",
        "fastfood-rks",
        "fastfood-prf by rows",
        "generative-prf",
        "rfa",
        "favor+ per head",
        "skyformer learned softmax",
    )
}
MAPS["loglinear unnormalized"] = ("loglinear", {"num_features": 24, "normalize": False})
MAPS["hedgehog"] = ("hedgehog", {"num_features": 5})  # starts with another W in each head
MAPS["trigonometric"] = ("trigonometric", {"num_features": 24, "per_head": True})
MAPS["relu"] = ("relu", {"num_features": 24, "per_head": True})
maps = pytest.mark.parametrize("name", MAPS)


def pair(name: str, key_heads: int = G, dtype: torch.dtype = torch.float64):
    """A core with maps by key head, and one with the same maps written out for each query head."""
    method, options = MAPS[name]
    core = kf.build_attention(method, **SIZES, **options, num_key_heads=key_heads)
    learn_something(core)
    whole = kf.build_attention(method, **SIZES, **options)
    numbers = ("seed", "draw", "age", "settings")
    state = {
        key: x
        if key.rsplit(".", 1)[-1] in numbers or x.shape == whole.state_dict()[key].shape
        else x.repeat_interleave(SIZES["num_heads"] // key_heads, 0)
        for key, x in core.state_dict().items()
    }
    state |= {key: x for key, x in whole.state_dict().items() if key.endswith("settings")}
    whole.load_state_dict(state)
    return core.to(dtype), whole.to(dtype)


@maps
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_outputs_and_gradients_are_those_of_the_maps_written_out(name, is_causal, key_heads, small_blocks):
    core, whole = pair(name, key_heads)
    leaves = inputs(37, G=key_heads, grad=True)
    options = {"is_causal": is_causal, "key_mask": padding(2, 37)}
    out, want = core(*leaves, **options), whole(*leaves, **options)
    close(out, want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    own, theirs = dict(core.named_parameters()), dict(whole.named_parameters())
    grads = torch.autograd.grad((out * weight).sum(), [*leaves, *own.values()], materialize_grads=True)
    wanted = torch.autograd.grad((want * weight).sum(), [*leaves, *theirs.values()], materialize_grads=True)
    for x, y in zip(grads, wanted, strict=True):  # a map that several heads share gets what each of them asks for
        close(x, y if x.shape == y.shape else y.unflatten(0, (x.shape[0], -1)).sum(1))


@maps
@pytest.mark.parametrize("key_heads", [1, 2])
def test_streams_remember_the_same_in_the_room_of_the_key_heads(name, key_heads):
    core, whole = pair(name, key_heads)
    q, k, v = inputs(12, G=key_heads)
    with torch.no_grad():
        want = whole(q, k, v, is_causal=True)
        out, state = core(q[:, :, :5], k[:, :, :5], v[:, :, :5], is_causal=True, return_state=True)
        parts = [out]
        for t in range(5, 12):
            one = slice(t, t + 1)
            out, state = core.step(q[:, :, one], k[:, :, one], v[:, :, one], state)
            parts.append(out)
        close(torch.cat(parts, 2), want)
        _, repeated = whole(q, k, v, is_causal=True, return_state=True)
        _, state = core(q, k, v, is_causal=True, return_state=True)
        assert state.nbytes * SIZES["num_heads"] == repeated.nbytes * key_heads
        close(core.recall(q, core.remember(k, v)), whole(q, k, v))


@pytest.mark.parametrize("name", [x for x in MAPS if "unnormalized" not in x])
@pytest.mark.parametrize("algorithm", ["direct", "fft", "windowed"])
def test_a_bias_is_each_query_heads_own(name, algorithm, small_blocks):
    core, whole = pair(name)
    leaves = inputs(23, G=G, grad=True)
    bias = torch.randn(4, 45, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {"bias": bias.requires_grad_(), "algorithm": algorithm}
    out, want = core(*leaves, **options), whole(*leaves, **options)
    close(out, want)
    grads, wanted = (torch.autograd.grad(x.square().sum(), [*leaves, bias]) for x in (out, want))
    for x, y in zip(grads, wanted, strict=True):
        close(x, y)


@pytest.mark.parametrize("name", ["loglinear", "gmm-rks"])
def test_a_stream_with_a_bias_goes_on_as_the_whole(name):
    core, whole = pair(name)
    q, k, v = inputs(14, G=G)
    near = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    distances = torch.arange(-13, 14).abs().clamp(max=3)
    with torch.no_grad():
        want = whole(q, k, v, is_causal=True, bias=near[:, distances])
        state, parts = None, []
        for t in range(14):
            one = slice(t, t + 1)
            out, state = core.step(q[:, :, one], k[:, :, one], v[:, :, one], state, bias=near)
            parts.append(out)
    close(torch.cat(parts, 2), want)


def test_a_row_that_a_later_key_dwarfs_is_rescued_for_the_right_head():
    core, whole = pair("loglinear free keys", dtype=torch.float32)
    q, k, v = inputs(70, G=G, dtype=torch.float32, grad=True)
    with torch.no_grad():
        k[:, :, 40] *= 200
        q[:, 1] *= 3
    outs = [x(q, k, v, is_causal=True) for x in (core, whole)]
    close(*outs)
    grads = [
        torch.autograd.grad(x.square().sum(), (q, k, v, y.feature_map.w_q))
        for x, y in zip(outs, (core, whole), strict=True)
    ]
    for x, y in zip(*grads, strict=True):
        close(x, y, 1e-4)
    with torch.no_grad():
        exact = copy.deepcopy(core).double()(q.double(), k.double(), v.double(), is_causal=True)
    close(outs[0], exact.float(), 1e-3)


@maps
def test_at_the_start_heads_of_a_group_have_the_map_of_their_key_head(name):
    method, options = MAPS[name]
    core = kf.build_attention(method, **SIZES, **options, num_key_heads=G)
    x = inputs(3)[0].float()
    phi = core.feature_map
    if not phi.sees_sequence:
        same = x[:, :1].expand(-1, 4, -1, -1)
        mapped = phi(same)
        assert mapped.shape[:2] == (2, 4)
        close(mapped[:, 0], mapped[:, 1])
        assert (mapped[:, 1] - mapped[:, 2]).abs().max() > 1e-4
        assert phi(x[:, :2], "key").shape[1] == 2
    if phi.has_density and method != "loglinear":
        assert core.covariances().shape[0] == 4


def test_weights_from_before_load_and_others_are_told_apart():
    before = kf.build_attention("loglinear", **SIZES, num_features=8)
    assert "num_key_heads" not in before.feature_map.options
    same = kf.build_attention("loglinear", **SIZES, num_features=8, num_key_heads=4)
    same.load_state_dict(before.state_dict())
    q, k, v = inputs(5, G=2, dtype=torch.float32)
    close(same(q, k, v), before(q, k, v))
    grouped = kf.build_attention("loglinear", **SIZES, num_features=8, num_key_heads=2)
    with pytest.raises(RuntimeError, match="was saved with num_key_heads=None, this one has num_key_heads=2"):
        grouped.load_state_dict(before.state_dict())


def test_key_heads_that_do_not_fit_are_refused():
    def build(method="loglinear", **options):
        return kf.build_attention(method, **SIZES, **{"num_features": 8, **options})

    with pytest.raises(ValueError, match="num_key_heads must divide num_heads, got 3 and 4"):
        build(num_key_heads=3)
    with pytest.raises(ValueError, match="num_key_heads=2 says how many maps there are, but per_head=False"):
        build("favor+", num_key_heads=2)
    with pytest.raises(ValueError, match=r"built with num_key_heads=2, got keys of 4 heads"):
        build(num_key_heads=2)(*inputs(5, dtype=torch.float32))
    with pytest.raises(ValueError, match="unknown option for method 'rfa-gate'"):
        build("rfa-gate", num_key_heads=2)
    with pytest.raises(ValueError, match="num_key_heads is for learned landmarks, got num_key_heads=2"):
        kf.build_attention("skyformer", **SIZES, num_key_heads=2)
    layer = kf.KernelAttention(32, 4, "loglinear", num_kv_heads=2, num_key_heads=2, num_features=8, causal=True)
    assert layer(torch.randn(2, 5, 32)).shape == (2, 5, 32)
    with pytest.raises(ValueError, match=r"num_key_heads=2 .* num_kv_heads=4"):
        kf.KernelAttention(32, 4, "loglinear", num_key_heads=2, num_features=8)


@maps
def test_a_state_holds_its_sums_and_no_tensor_of_the_map(name):
    core, _ = pair(name, dtype=torch.float32)
    q, k, v = inputs(6, G=G, dtype=torch.float32)
    with torch.no_grad():
        _, state = core(q, k, v, is_causal=True, return_state=True)
        for _ in range(3):
            _, state = core.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
    assert reachable_bytes(state) == state.nbytes == sum(x.nbytes for x in state.tensors)
    # Nor does a copy of the core carry what it keeps for its streams.
    fresh = len(pickle.dumps(pair(name, dtype=torch.float32)[0]))
    assert len(pickle.dumps(core)) == fresh
    assert len(pickle.dumps(copy.deepcopy(core))) == fresh


@pytest.mark.parametrize("method", ["favor+", "gmm-prf", "loglinear", "rfa"])
def test_a_stream_in_another_thread_does_not_change_the_tensors_of_this_one(method, monkeypatch):
    core = kf.build_attention(method, **SIZES, num_features=8)
    token = [x[:, :, :1] for x in inputs(1)]
    made_from = Prepared.made_from

    def interrupted(self, how):  # the other thread starts a stream between the check and the use
        same = made_from(self, how)
        core.step(*(x.float() for x in token), scale=2.0)
        return same

    with torch.no_grad():
        _, state = core.step(*token)
        want, _ = core.step(*token, state)
        monkeypatch.setattr(Prepared, "made_from", interrupted)
        out, _ = core.step(*token, state)
    close(out, want)


def test_a_stream_with_a_window_keeps_nothing_of_a_long_prompt():
    core = kf.build_attention("favor+", **SIZES, num_features=8)
    q, k, v = inputs(200, dtype=torch.float32)
    bias = torch.zeros(4, 399)
    with torch.no_grad():
        _, state = core(q, k, v, is_causal=True, bias=bias, max_distance=4, return_state=True)
        assert reachable_bytes(state) == state.nbytes < k.nbytes / 4
        sizes = set()
        for _ in range(4):
            _, state = core.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, bias=torch.zeros(4, 5))
            assert reachable_bytes(state) == state.nbytes
            sizes.add(state.nbytes)
    assert len(sizes) == 1


def reachable_bytes(*roots: object) -> int:
    """Bytes of all tensor storages that can be reached from objects through attributes and containers."""
    storages, seen, left = {}, set(), list(roots)
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (str, int, float, type, torch.dtype, torch.device)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            left += itertools.chain(x.keys(), x.values())
        elif isinstance(x, (list, tuple, set)):
            left += x
        left += vars(x).values() if hasattr(x, "__dict__") else []
    return sum(storages.values())


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("method", "options", "heads"),
    [
        ("loglinear", {}, 2),
        ("loglinear", {"num_key_heads": 4}, 4),
        ("loglinear", {"per_head": False}, 2),
        ("gmm-prf", {}, 2),
        ("favor+", {}, 2),
        ("favor+", {"per_head": True}, 2),
        ("rfa-gate", {}, 4),
        ("skyformer", {"landmarks": "learned"}, 2),
    ],
)
def test_the_cache_of_a_converted_model_is_what_it_says_and_of_the_size_of_the_keys(method, options, heads):
    from kernelformer.hf import convert, cores, new_cache

    own = {"num_landmarks": 8} if method == "skyformer" else {"num_features": 8}
    model = convert(llama(), method, **own, **options)
    cache = new_cache(model)
    ids = torch.randint(61, (1, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        sizes = set()
        for _ in range(3):
            model(input_ids=ids[:, :1], past_key_values=cache)
            sizes.add(cache.nbytes)
            assert reachable_bytes(cache) == cache.nbytes
    assert len(sizes) == 1
    assert {x.shape[1] for layer in cache.layers for x in layer.state.tensors} == {heads}
    states = sum(x.nbytes for layer in cache.layers for x in layer.state.tensors)
    assert cache.nbytes == states  # no view keeps more than itself
    assert all(isinstance(x.feature_map.num_key_heads, int) for x in cores(model).values())


def test_converted_folders_keep_their_maps_and_those_from_before_theirs(tmp_path):
    import json

    from kernelformer.hf import convert, load
    from kernelformer.hf.convert import Conversion

    model = convert(llama(), "loglinear", num_features=8)
    assert {x.options["num_key_heads"] for x in model.conversion.layers} == {2}
    model.save_pretrained(tmp_path / "new")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        close(load(tmp_path / "new")(input_ids=ids).logits, model(input_ids=ids).logits)
    rows = json.loads(json.dumps(model.conversion.as_json()))
    for row in rows:
        del row["options"]["num_key_heads"]  # as folders were written before it existed
    assert Conversion.from_json(rows).layers[0].build(0).feature_map.w_k.shape[0] == 4
    with pytest.raises(ValueError, match=r"has exact heads among its 4.*got num_key_heads=2, leave it out"):
        convert(llama(), "loglinear", exact_heads={0: [1]}, num_features=8, num_key_heads=2)
    mixed = convert(llama(), "loglinear", exact_heads={0: [1]}, num_features=8).conversion
    assert ["num_key_heads" in x.options for x in mixed.layers] == [False, True]
