"""Distance of a converted model from its original: the figures, by their definition and on every kind of model."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

import tiny_models

pytest.importorskip("transformers")

from kernelformer.conversion.measure import (
    CEILING,
    Norms,
    Report,
    Row,
    log_variance,
    measure,
    predicted_error,
)
from kernelformer.hf import convert, cores
from kernelformer.modules import MixedCore, build_attention
from tiny_models import HEADS, tiny

CALLS = {
    "BertForMaskedLM": 2,
    "AlbertModel": 2,
    "MPNetModel": 2,
    "LlamaForCausalLM": 2,
    "T5ForConditionalGeneration": 6,
    "BartForConditionalGeneration": 6,
}


def make(kind):
    return tiny(kind, torch.float32)


def inputs(model):
    batch = tiny_models.inputs(model, *tiny_models.padded(tiny_models.tokens(), (11, 7)))
    if model.config.is_encoder_decoder:
        batch["decoder_attention_mask"] = torch.ones(2, 7, dtype=torch.long)
        batch["decoder_attention_mask"][0, 5:] = 0
    return batch


@pytest.mark.parametrize("name", list(CALLS))
def test_exact_attention_has_no_error_and_features_have_one_in_every_call(name):
    teacher = make(name)
    batch = inputs(teacher)
    same = measure(teacher, convert(copy.deepcopy(teacher), "softmax"), [batch])
    assert len(same.rows) == CALLS[name]
    assert max(x.error for x in same.rows) < 1e-5
    assert all(x.predicted is None and x.reason == "exact" for x in same.rows)
    assert same.output < 1e-5
    other = measure(teacher, convert(copy.deepcopy(teacher), "favor+", num_features=8), [batch])
    assert min(x.error for x in other.rows) > 1e-3
    assert all(x.predicted > 0 and not x.reason for x in other.rows)
    parts = {"encoder", "decoder"} if teacher.config.is_encoder_decoder else {"layers"}
    assert set(other.hidden) == parts
    assert all(x[0] < 1e-6 < x[1] for x in other.hidden.values())
    assert other.output > 1e-4
    assert (other.cosine is None) == (name not in ("BertForMaskedLM", "AlbertModel", "MPNetModel"))
    assert (other.agreement is None) == name.endswith("Model")
    json.dumps(other.as_json(), allow_nan=False)


def test_shared_layers_are_told_apart_by_their_calls():
    teacher = make("AlbertModel")
    report = measure(teacher, convert(copy.deepcopy(teacher), "favor+", num_features=8), [inputs(teacher)])
    assert [x.call for x in report.rows] == [0, 1]
    assert len({x.name for x in report.rows}) == 1
    assert report.rows[0].error != report.rows[1].error


def test_the_figures_by_their_definition():
    """Of the first layer, whose inputs are the same in both models."""
    teacher = make("BertForMaskedLM")
    student = convert(copy.deepcopy(teacher), "favor+", num_features=16)
    batch = inputs(teacher)
    report = measure(teacher, student, [batch])
    attention = teacher.bert.encoder.layer[0].attention.self
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        hidden = teacher.bert.embeddings(batch["input_ids"])
        q, k, v = (
            x(hidden).unflatten(-1, (HEADS, 8)).transpose(1, 2)
            for x in (attention.query, attention.key, attention.value)
        )
        core = cores(student)["bert.encoder.layer.0.attention.self"]
        exact = build_attention("softmax", head_dim=8, num_heads=HEADS)
        off, size = (
            x.transpose(1, 2)[real].square().sum((0, 2))
            for x in (core(q, k, v, key_mask=real) - exact(q, k, v, key_mask=real), exact(q, k, v, key_mask=real))
        )
        want, got = (x(**batch, output_hidden_states=True) for x in (teacher, student))
    row = report.rows[0]
    assert row.error == pytest.approx(float((off.sum() / size.sum()).sqrt()), rel=1e-4)
    assert row.heads == pytest.approx((off / size).sqrt().tolist(), rel=1e-4)
    norms = q.transpose(1, 2)[real].norm(dim=-1) * 8**-0.25
    assert row.query.rms == pytest.approx(float(norms.square().mean().sqrt()), rel=1e-5)
    assert row.query.largest == pytest.approx(float(norms.max()), rel=1e-5)
    x, y = want.hidden_states[2][real], got.hidden_states[2][real]
    relative = ((x - y).square().sum(-1) / x.square().sum(-1)).mean().sqrt()
    assert report.hidden["layers"][2] == pytest.approx(float(relative), rel=1e-4)
    same = (want.logits.argmax(-1) == got.logits.argmax(-1))[real]
    assert report.agreement == pytest.approx(float(same.double().mean()))
    assert (report.samples, report.tokens) == (2, int(real.sum()))


@pytest.mark.parametrize("method", ["favor+", "favor+hyperbolic", "trigonometric"])
def test_the_predicted_variance_is_that_of_many_draws(method):
    gen = torch.Generator().manual_seed(0)
    q, k = 0.2 * torch.randn(2, 1, 1, 3, 4, dtype=torch.float64, generator=gen)
    draws = 4000  # one for each head
    core = build_attention(
        method, head_dim=4, num_heads=draws, num_features=4, draw="iid", per_head=True, normalize=False, scale=1.0
    ).double()
    exact = (q @ k.mT).exp()
    many = core.attention_matrix(q.expand(1, draws, 3, 4), k.expand(1, draws, 3, 4))
    found = ((many - exact) / exact).square()[0]
    want = log_variance(method, q, k, core.feature_map.num_features, 1.0)[0, 0].exp()
    assert ((found.mean(0) - want).abs() < 5 * found.std(0) / draws**0.5).all()


def test_there_is_a_prediction_only_where_a_formula_holds():
    q, k = torch.randn(2, 1, 2, 3, 4)
    weights = torch.full((1, 2, 3, 3), 1 / 3)

    def found(method, scale=0.5, **options):
        core = build_attention(method, head_dim=4, num_heads=2, **options)
        return predicted_error(core, q, k, weights, scale)

    assert found("softmax") == "exact"
    assert found("loglinear") == "learned"
    assert found("hedgehog") == "learned"
    assert found("elu") == "no formula"
    assert found("favor+", kernel="gaussian") == "another kernel"
    assert found("favor+", normalize_qk=True) == "another kernel"
    assert found("favor+", scale=0.3) == "another kernel"
    small = found("favor+", num_features=40)
    torch.testing.assert_close(found("favor+", num_features=4), 10 * small)
    mixed = MixedCore(*(build_attention(x, head_dim=4, num_heads=1) for x in ("softmax", "favor+")), [1])
    assert predicted_error(mixed, q, k, weights, 0.5)[1] == 0
    huge = predicted_error(build_attention("favor+", head_dim=4, num_heads=2), 50 * q, 50 * q, weights, 0.5)
    assert math.sqrt(float(huge.max())) <= CEILING * 1.01


def row(name, error, heads, method="favor+"):
    return Row(name, 0, method, Norms(1, 1), Norms(1, 1), error, heads, None, "")


def test_the_worst_heads_are_those_with_the_largest_errors():
    rows = (
        row("a", 0.2, (0.1, 0.9)),
        row("b", 0.5, (0.5, 0.6)),
        row("c", 0.0, (0.0, 0.0), "softmax"),
        row("d", 0.1, (0.8, 0.0)),
        row("a", 0.7, (0.2, 0.3)),  # called again
        row("e", math.nan, (math.nan, 0.0)),
    )
    report = Report(rows, {}, 0.0, None, None, 1, 1)
    assert report.worst_heads(3, ["a", "b", "d"]) == {"a": [1], "d": [0], "b": [1]}
    assert report.worst_heads(1, ["a", "e"]) == {"e": [0]}
    with pytest.raises(ValueError, match=r"2 heads were converted, so that at most 1 can be kept exact, got 2"):
        report.worst_heads(2, ["b"])


def test_both_models_are_left_as_they_were():
    teacher = make("BertForMaskedLM").train()
    teacher.bert.embeddings.eval()
    student = convert(copy.deepcopy(teacher), "favor+", num_features=8)
    modes = [x.training for model in (teacher, student) for x in model.modules()]
    implementation = teacher.config._attn_implementation
    state = copy.deepcopy(teacher.state_dict())
    measure(teacher, student, [inputs(teacher)])
    assert [x.training for model in (teacher, student) for x in model.modules()] == modes
    assert teacher.config._attn_implementation == implementation
    assert all(torch.equal(x, state[name]) for name, x in teacher.state_dict().items())


def test_what_cannot_be_measured_is_named():
    teacher = make("BertForMaskedLM")
    student = convert(copy.deepcopy(teacher), "favor+", num_features=8)
    with pytest.raises(ValueError, match="not one batch of inputs"):
        measure(teacher, student, [])
    with pytest.raises(ValueError, match="was not converted"):
        measure(teacher, teacher, [inputs(teacher)])
    with pytest.raises(ValueError, match="models of transformers can be measured, got Linear"):
        measure(torch.nn.Linear(2, 2), student, [])
