"""`torch.nn.MultiheadAttention` with a core, in torch's own Transformer and elsewhere."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import kernelformer as kf
from kernelformer.hf import convert, cores, undo
from kernelformer.hf.adapters.multihead import KernelMultiheadAttention

D, H = 16, 4


def scaled(model):
    """In float64 and evaluation mode, with weights that make attention far from uniform."""
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.normal_(std=1.5 * D**-0.5)
    return model.double().eval()


def encoder(batch_first=True, **options):
    layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.0, batch_first=batch_first, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scaled(nn.TransformerEncoder(layer, 2))


def batch(length=9, seed=1):
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden(length=9, keep=4):
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[1, keep:] = True
    return mask


def causal(length=9):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_encoder_with_exact_cores_is_itself(batch_first, norm_first):
    model, x = encoder(batch_first, norm_first=norm_first), batch()
    x = x if batch_first else x.transpose(0, 1)
    cases = [{}, {"src_key_padding_mask": hidden()}, {"mask": causal(), "is_causal": True}, {"mask": causal()},
             {"mask": causal() == 0, "src_key_padding_mask": hidden()}]  # fmt: skip
    cases[-1]["mask"] = ~cases[-1]["mask"]
    real = ~hidden() if batch_first else ~hidden().T
    want = [model(x, **given) for given in cases]
    convert(model, "softmax")
    for given, before in zip(cases, want, strict=True):
        torch.testing.assert_close(model(x, **given)[real], before[real], rtol=0, atol=1e-10)
    assert model.conversion.verified


@torch.no_grad()
@pytest.mark.parametrize("method", ["favor+", "loglinear", "elu", "nystromformer"])
def test_the_fused_path_of_torch_does_not_go_around_the_core(method):
    few = {"num_landmarks": 3} if method == "nystromformer" else {} if method == "elu" else {"num_features": 16}
    model, x = encoder(), batch()
    exact = model(x)
    convert(model, method, **few)
    found = model(x)
    assert [x.calls for x in model.conversion.layers] == [1, 1]
    assert not torch.allclose(found, exact)
    seen = []
    for core in cores(model).values():
        core.register_forward_hook(lambda core, *_: seen.append(core))
    torch.testing.assert_close(model(x), found)  # with hooks torch has no fused path
    assert len(seen) == 2
    with torch.enable_grad():  # where torch has no fused path
        torch.testing.assert_close(model.train(False)(x.requires_grad_()).detach(), found)
    padded = model(x, src_key_padding_mask=hidden())
    torch.testing.assert_close(padded[1:, :4], model(x[1:, :4]), rtol=0, atol=1e-8)


@torch.no_grad()
def test_torchs_decoder_with_exact_cores_is_itself():
    layer = nn.TransformerDecoderLayer(D, H, 24, 0.0, batch_first=True)
    model = scaled(nn.TransformerDecoder(layer, 2))
    given = {"tgt": batch(7), "memory": batch(9, 2), "tgt_mask": causal(7), "memory_key_padding_mask": hidden()}
    want = model(**given)
    convert(model, "softmax", inputs=given)
    assert [x.calls for x in model.conversion.layers] == [1] * 4
    torch.testing.assert_close(model(**given), want, rtol=0, atol=1e-10)
    undo(model)
    convert(model, "favor+", num_features=16)
    first = model(**given)
    given["tgt"] = torch.cat([given["tgt"][:, :4], batch(3, 7)], 1)
    torch.testing.assert_close(model(**given)[:, :4], first[:, :4], rtol=0, atol=1e-10)


@torch.no_grad()
def test_landmarks_across_do_not_take_the_mask_of_the_keys_for_the_queries():
    model = scaled(nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 24, 0.0, batch_first=True), 1))
    convert(model, "nystromformer", "*multihead_attn", num_landmarks=3)
    x, context = batch(9), batch(9, 2)
    whole = model(x, context, memory_key_padding_mask=hidden())
    torch.testing.assert_close(whole[1:], model(x[1:], context[1:, :4]), rtol=0, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"batch_first": True},
                                     {"add_bias_kv": True, "add_zero_attn": True}])  # fmt: skip
def test_all_shapes_and_weights_are_torchs(options):
    holder = scaled(nn.ModuleDict({"x": nn.MultiheadAttention(D, H, **options)}))
    sizes = ((4, D), (7, options.get("kdim", D)), (7, options.get("vdim", D)))
    q, k, v = (torch.randn(n, 2, d, dtype=torch.float64) for n, d in sizes)
    if options.get("batch_first"):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = hidden(7)
    cases = [{}, {"key_padding_mask": mask}, {"need_weights": False}, {"average_attn_weights": False},
             {"key_padding_mask": torch.zeros(2, 7).double().masked_fill(mask, -torch.inf)},
             {"attn_mask": torch.zeros(4, 7, dtype=torch.bool)}]  # fmt: skip
    first = (slice(0, 1), slice(None)) if options.get("batch_first") else (slice(None), slice(0, 1))
    single = [x[first].squeeze(0 if options.get("batch_first") else 1) for x in (q, k, v)]
    want = [holder["x"](q, k, v, **given) for given in cases] + [holder["x"](*single, key_padding_mask=mask[1])]
    names = set(holder.state_dict())
    convert(holder, "softmax")
    assert isinstance(holder["x"], KernelMultiheadAttention)
    assert names <= set(holder.state_dict())
    found = [holder["x"](q, k, v, **given) for given in cases] + [holder["x"](*single, key_padding_mask=mask[1])]
    for (a, b), (c, d) in zip(found, want, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-10)
        assert (b is None) == (d is None)
        if b is not None:
            torch.testing.assert_close(b, d, rtol=0, atol=1e-10)


def test_masks_of_single_pairs_are_refused():
    model, x = convert(encoder(), "favor+", num_features=16), batch(4)
    one = torch.zeros(4, 4, dtype=torch.bool)
    one[3, 0] = True
    for given, words in (
        ({"mask": one}, "cannot hide single pairs"),
        ({"mask": torch.full((4, 4), 0.5).double()}, "would be a bias"),
        ({"mask": one.expand(2 * H, 4, 4)}, "neither causal nor empty"),
    ):
        with pytest.raises(ValueError, match=words):
            model(x, **given)


def test_an_attention_without_a_place_is_refused():
    with pytest.raises(ValueError, match="itself an attention"):
        convert(nn.MultiheadAttention(D, H), "favor+")


@torch.no_grad()
def test_undoing_gives_torchs_attention_back_with_its_weights_as_they_are():
    model, x = encoder(), batch()
    want, names = model(x), list(model.state_dict())
    convert(model, "favor+", num_features=16)
    undo(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), want)
    convert(model, "favor+", num_features=16)
    state = {name: x + 0.01 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.train()
    undo(model)
    assert model.layers[0].self_attn.training
    for name, x in model.state_dict().items():
        assert torch.equal(x, state[name])


@torch.no_grad()
def test_the_first_call_of_a_model_that_was_not_tried_looks_at_its_attentions():
    model = convert(encoder(), "favor+", num_features=16)
    assert not model.conversion.verified
    assert "not verified" in str(model.conversion)
    other = copy.deepcopy(model)
    other(batch())
    assert other.conversion.verified
    assert not model.conversion.verified
    model(batch())
    assert model.conversion.verified

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.MultiheadAttention(D, H), nn.MultiheadAttention(D, H)

        def forward(self, x):
            return self.used(x, x, x)[0]

    lazy = convert(Lazy(), "favor+", num_features=16)
    with pytest.warns(UserWarning, match="did not call these converted attentions: idle"):
        lazy(torch.zeros(3, 1, D))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazy(torch.zeros(3, 1, D))
    with pytest.raises(ValueError, match="did not call idle"):
        convert(Lazy(), "favor+", inputs={"x": torch.zeros(3, 1, D)})


def test_gradients_reach_projections_and_maps():
    model = convert(encoder(), "loglinear", num_features=8)
    model(batch(), src_key_padding_mask=hidden()).square().sum().backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in model.parameters())


def test_every_method_stands_in():
    x = batch().float()
    for method in kf.list_methods():
        if method == "rfa-gate":
            continue  # causal alone
        more = {"max_length": 9} if method == "linformer" else {}
        known = kf.method_options(method)
        more |= {name: n for name, n in (("num_features", 16), ("num_landmarks", 4)) if name in known}
        model = convert(encoder().float(), method, **more)
        with torch.no_grad():
            assert torch.isfinite(model(x)).all(), method
