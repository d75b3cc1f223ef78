"""Distillation of converted models: the losses against their definition, what is trained and what is not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kernelformer as kf
from kernelformer.conversion.losses import attention_loss, output_loss, pooled
from kernelformer.conversion.tune import learned, learns, transfer, tune
from kernelformer.hf import convert, cores
from kernelformer.hf.find import probing
from kernelformer.modules import MixedCore
from tiny_models import VOCAB, tiny


def encoder():
    return tiny("BertModel", torch.float32)


def decoder():
    return tiny("LlamaForCausalLM", torch.float32)


def endless(length=20, batch=4, padded=True):
    gen = torch.Generator().manual_seed(0)
    for ids in itertools.cycle(torch.randint(5, VOCAB, (3, batch, length), generator=gen)):
        mask = torch.ones_like(ids)
        if padded:
            mask[0, -6:] = 0
        yield {"input_ids": ids, "attention_mask": mask}


def inputs(heads=4, groups=4, length=12, dim=8):
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(2, n, length, dim, generator=gen, dtype=torch.float64) for n in (heads, groups, groups)]


def by_definition(core, q, k, seen, scale, bias=None):
    """Mean over visible rows of KL(exact || core), by whole matrices."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = scale * q @ k.transpose(2, 3) + (0 if bias is None else bias)
    phi = core.feature_map
    weights = phi(q, "query", core.scale) @ phi(k, "key", core.scale).transpose(2, 3)
    weights = weights * (1 if bias is None else bias.exp())
    if core.has_near:  # exact weights of near keys, and a factor for the others
        sinks = seen.any(-2) & (seen.any(-2).cumsum(-1) <= core.sinks)
        i = torch.arange(q.shape[2])
        near = ((i[:, None] - i).abs() < core.window) | sinks.unsqueeze(-2)
        weights = torch.where(near, (core.scale * q @ k.mT).exp(), weights * core.beta[:, None, None].exp())
    weights = weights * seen
    got = weights / weights.sum(-1, keepdim=True)
    want = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.where(want > 0, want * (want / got).log(), 0).sum(-1)


@pytest.mark.parametrize("method", ["loglinear", "hedgehog", "gmm-prf", "fastfood-prf", "favor+"])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_loss_of_transfer_is_the_divergence_of_the_rows(method, groups):
    q, k, v = inputs(groups=groups)
    core = kf.build_attention(method, head_dim=8, num_heads=4, num_features=16).double()
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 9:] = False
    for key_mask, causal in ((None, False), (real, False), (None, True), (real, True)):
        seen = torch.ones(2, 1, 12, 12, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        rows = torch.ones(2, 12, dtype=torch.bool)
        if key_mask is not None:
            seen, rows = seen & key_mask[:, None, None], key_mask
        terms = by_definition(core, q, k, seen, 0.3)
        want = terms[rows[:, None].expand_as(terms)].mean()
        got = attention_loss(core, q, k, v, key_mask, causal, 0.3)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_of_a_window_has_its_exact_weights_and_fits_the_factor_of_the_others(causal):
    q, k, v = inputs()
    core = kf.build_attention("favor+", head_dim=8, num_heads=4, num_features=16, window=3, sinks=2).double()
    torch.nn.init.normal_(core.beta)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, :3] = False
    seen = (torch.ones(12, 12, dtype=torch.bool).tril() if causal else True) & real[:, None, None].expand(2, 1, 12, 12)
    terms = by_definition(core, q, k, seen, 0.3)
    got = attention_loss(core, q, k, v, real, causal, 0.3)
    torch.testing.assert_close(got.double(), terms[real[:, None].expand_as(terms)].mean(), rtol=1e-5, atol=1e-7)
    got.backward()
    assert (core.beta.grad != 0).all()


def test_a_relative_bias_belongs_to_both_sides():
    q, k, v = inputs()
    core = kf.build_attention("loglinear", head_dim=8, num_heads=4, num_features=12).double()
    table = torch.randn(4, 23, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    places = torch.arange(12)[None] - torch.arange(12)[:, None] + 11
    bias = table[:, places].unsqueeze(0)
    want = by_definition(core, q, k, torch.ones(2, 1, 12, 12, dtype=torch.bool), 0.3, bias).mean()
    torch.testing.assert_close(
        attention_loss(core, q, k, v, None, False, 0.3, bias).double(), want, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("causal", [False, True])
def test_signed_maps_are_fitted_to_the_outputs(causal):
    q, k, v = inputs()
    core = kf.build_attention("gmm-rks", head_dim=8, num_heads=4, num_features=12).double()
    seen = torch.ones(12, 12, dtype=torch.bool).tril() if causal else torch.ones(12, 12, dtype=torch.bool)
    exact = (0.3 * q @ k.transpose(2, 3)).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    want = (core(q, k, v, is_causal=causal) - exact).square().sum() / exact.square().sum()
    torch.testing.assert_close(attention_loss(core, q, k, v, None, causal, 0.3), want)


def test_of_mixed_heads_the_linear_ones_are_fitted():
    q, k, v = inputs()
    model = kf.build_attention("loglinear", head_dim=8, num_heads=3, num_features=12).double()
    core = MixedCore(kf.build_attention("softmax", head_dim=8, num_heads=1), model, [1])
    rest = [0, 2, 3]
    want = attention_loss(model, q[:, rest], k[:, rest], v[:, rest], None, False, 0.3)
    torch.testing.assert_close(attention_loss(core, q, k, v, None, False, 0.3), want)


@pytest.mark.parametrize("make", [encoder, decoder])
def test_transfer_fits_the_maps_and_leaves_the_backbone(make):
    teacher = make()
    student = convert(copy.deepcopy(teacher), "loglinear", num_features=16)
    before = copy.deepcopy(student.state_dict())
    told = []
    rows = endless(padded=make is encoder)
    losses = transfer(student, teacher, rows, steps=60, lr=3e-2, log=lambda *x: told.append(x))
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert [step for step, _ in told] == list(range(1, 61))
    assert [loss for _, loss in told] == losses
    for name, x in student.state_dict().items():
        learns = name.rpartition(".")[2] in ("w_q", "w_k", "b_q", "b_k")
        assert torch.equal(x, before[name]) != learns, name
    assert not any(x.training for x in student.modules())


@pytest.mark.parametrize(("make", "padded"), [(encoder, True), (encoder, False), (decoder, False), (decoder, True)])
@pytest.mark.parametrize("method", ["loglinear", "gmm-rks"])
def test_transfer_sees_the_attention_that_the_model_has(make, padded, method):
    """Causal where the model is, without padding and with: the first loss is that of the definition."""
    teacher = make()
    student = convert(copy.deepcopy(teacher), method, num_features=16)
    batch = next(endless(padded=padded))
    (loss,) = transfer(student, teacher, iter([batch]), steps=1, lr=0.0)
    own, seen = [], []

    def look(module, q, k, v, mask, **options):
        seen.append((q, k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    with torch.no_grad(), probing(teacher, look):
        teacher(**batch)
    real = batch["attention_mask"].bool()
    for core, (q, k, v) in zip(cores(student).values(), seen, strict=True):
        grouped = (q, k, v)
        k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
        pairs = real[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril(0 if make is decoder else 20)
        exact = (8**-0.5 * q @ k.transpose(2, 3)).masked_fill(~pairs, -torch.inf).softmax(-1)
        rows = real[:, None, :].expand(-1, 4, -1)
        if method == "loglinear":
            own.append(by_definition(core, q, k, pairs, 8**-0.5)[rows].mean())
        else:
            off = core(*grouped, is_causal=make is decoder, key_mask=real) - exact @ v
            own.append(off[rows].square().sum() / (exact @ v)[rows].square().sum())
    assert loss == pytest.approx(float(sum(own) / len(own)), rel=1e-4)


def test_a_method_without_parameters_has_nothing_to_transfer():
    teacher = encoder()
    student = convert(copy.deepcopy(teacher), "favor+", num_features=8)
    assert not learns(student)
    with pytest.raises(ValueError, match=r"nothing to learn here \(favor\+\)"):
        transfer(student, teacher, endless(), steps=1)


def test_layers_that_were_kept_are_not_fitted():
    student = convert(encoder(), "loglinear", layers=[1], num_features=8)
    assert list(learned(student)) == [list(cores(student))[1]]


@pytest.mark.parametrize("make", [encoder, decoder])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_tuning_comes_nearer_to_the_original_and_leaves_the_embeddings(make, autocast):
    teacher = make()
    student = convert(copy.deepcopy(teacher), "elu")
    table = student.get_input_embeddings().weight.clone()
    options = {"steps": 60, "lr": 1e-3, "autocast": autocast}
    losses = tune(student, teacher, endless(padded=make is encoder), **options)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert torch.equal(student.get_input_embeddings().weight, table)
    batch = next(endless(padded=make is encoder))
    with torch.no_grad():
        found = output_loss(
            student(**batch, output_hidden_states=True),
            teacher(**batch, output_hidden_states=True),
            batch,
        )
    assert float(found) < 1.2 * losses[-3]  # of the same batch; what was trained is there, in full precision too


def test_nothing_is_said_of_padding():
    teacher = encoder()
    batch = next(endless())
    with torch.no_grad():
        wanted = teacher(**batch, output_hidden_states=True)
        found = copy.deepcopy(wanted)
        for x in (*found.hidden_states, found.last_hidden_state):
            x[0, -6:] += 5
    assert float(output_loss(found, wanted, batch)) < 1e-6
    assert float(output_loss(found, wanted, {})) > 0.1


def test_time_ends_distillation_too():
    teacher = encoder()
    student = convert(copy.deepcopy(teacher), "loglinear", num_features=8)
    assert 1 <= len(transfer(student, teacher, endless(), steps=10**6, seconds=0.2)) < 10**4


def test_the_mean_is_over_real_tokens():
    hidden = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert pooled(hidden, torch.tensor([[1, 1, 0]])).item() == 2
    assert pooled(hidden, None).item() == pytest.approx(104 / 3)
