"""Choice of the attentions that stay exact: those that the output needs, whatever their own errors are."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kernelformer.conversion.keep import choose_exact, greedy  # noqa: E402
from kernelformer.conversion.losses import output_divergence  # noqa: E402
from kernelformer.conversion.measure import measure  # noqa: E402
from kernelformer.hf import convert, cores  # noqa: E402
from tiny_models import inputs, padded, tiny, tokens  # noqa: E402

OPTIONS = {"num_features": 4}


def batch(model):
    return inputs(model, *padded(tokens(), (11, 7)))


@torch.no_grad()
def divergence_with(teacher, exact, names, given):
    """By its definition: convert all but some, and compare."""
    student = convert(copy.deepcopy(teacher), "favor+", [x for x in names if x not in exact], **OPTIONS)
    return output_divergence(given, teacher(**given), student(**given))


def test_an_attention_that_errs_and_goes_unheard_is_not_kept():
    """By its own error it would be the first; what it computes hardly reaches the rest of the model."""
    teacher = tiny("BertModel", num_hidden_layers=4)
    first = teacher.encoder.layer[0].attention
    first.self.query.weight.data *= 2
    first.output.dense.weight.data *= 1e-4
    student = convert(copy.deepcopy(teacher), "favor+", **OPTIONS)
    given = batch(teacher)
    errors = {x.name: x.error for x in measure(teacher, student, [given]).rows}
    loud, names = max(errors, key=errors.__getitem__), list(errors)
    assert loud == "encoder.layer.0.attention.self"
    for count in (1, 2):
        kept = choose_exact(teacher, student, [given], count)
        assert len(kept) == count
        assert loud not in kept
        local = sorted(errors, key=errors.__getitem__)[-count:]
        assert divergence_with(teacher, kept, names, given) < divergence_with(teacher, local, names, given)


@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "MPNetModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "AlbertModel"]
)
def test_one_kept_and_one_converted_are_the_best_of_all(kind):
    teacher = tiny(kind, **({"num_layers": 1, "num_decoder_layers": 1} if "T5" in kind else {}))
    student = convert(copy.deepcopy(teacher), "favor+", **OPTIONS)
    names, given = list(cores(student)), batch(teacher)
    if len(names) < 2:
        with pytest.raises(ValueError, match="1 attentions were converted, so that at most 0 can be kept exact, got 1"):
            choose_exact(teacher, student, [given], 1)
        return
    for count in {1, len(names) - 1}:
        sets = list(itertools.combinations(names, count))
        best = min(sets, key=lambda x: divergence_with(teacher, x, names, given))
        assert choose_exact(teacher, student, [given], count) == list(best)


def test_the_model_is_left_as_it_was():
    teacher = tiny("BertModel").train()
    student = convert(copy.deepcopy(teacher), "favor+", **OPTIONS)
    before, modes = cores(student), [x.training for x in student.modules()]
    given = batch(teacher)
    choose_exact(teacher, student, [given], 1)
    assert all(cores(student)[name] is core for name, core in before.items())
    assert [x.training for x in student.modules()] == modes


def test_a_model_that_breaks_down_is_worse_than_any():
    cost = {(): float("inf"), ("a",): float("inf"), ("b",): 3.0, ("b", "a"): 2.0}
    assert greedy(lambda x: cost[tuple(x)], ["a", "b"], 2) == ["b", "a"]


def test_choosing_one_at_a_time_is_that_of_trying_all_and_tries_fewer():
    """Cost where the share of a name grows with those chosen before."""
    gen = torch.Generator().manual_seed(0)
    names = [f"layer{i}" for i in range(12)]
    own = dict(zip(names, torch.rand(12, generator=gen).tolist(), strict=True))
    tried = []

    def cost(chosen):
        tried.append(tuple(chosen))
        return sum(own[x] for x in chosen) ** 1.5

    want, chosen = sorted(names, key=own.__getitem__)[:6], greedy(cost, names, 6)
    assert chosen == want
    assert len(tried) < 1 + 12 + 11 + 10 + 9 + 8 + 7


def test_divergence_is_that_of_the_definition():
    teacher = tiny("LlamaForCausalLM")
    student = convert(copy.deepcopy(teacher), "favor+", **OPTIONS)
    given = batch(teacher)
    with torch.no_grad():
        want, got = teacher(**given), student(**given)
    real = given["attention_mask"].bool()
    p, q = (x.logits[real].softmax(-1) for x in (want, got))
    assert output_divergence(given, want, got) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    encoder = tiny("BertModel")
    other = convert(copy.deepcopy(encoder), "favor+", **OPTIONS)
    with torch.no_grad():
        x, y = (z(**given).last_hidden_state[real] for z in (encoder, other))
        found = output_divergence(given, encoder(**given), other(**given))
    assert found == pytest.approx(float(((x - y).square().sum(-1) / x.square().sum(-1)).mean()))


def test_as_many_classes_as_tokens_are_no_tokens():
    """Logits of a sample then have the shape of the mask, which has nothing to hide in them."""
    teacher = tiny("BertForSequenceClassification", num_labels=11)
    student = convert(copy.deepcopy(teacher), "favor+", **OPTIONS)
    given = batch(teacher)
    assert given["attention_mask"].shape == (2, 11)
    with torch.no_grad():
        want, got = teacher(**given), student(**given)
    p, q = (x.logits.softmax(-1) for x in (want, got))
    assert output_divergence(given, want, got) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    off, size = (x.square().sum(-1) for x in (got.logits - want.logits, want.logits))
    assert measure(teacher, student, [given]).output == pytest.approx(float((off / size).mean().sqrt()))
