"""The parts of a hybrid by themselves are what they are called."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kernelformer.conversion.judge import (  # noqa: E402
    CONVERTED,
    KERNEL,
    NEAR,
    ORIGINAL,
    hybrids,
    kernel_alone,
    near_alone,
    part_figures,
)
from kernelformer.conversion.measure import measure  # noqa: E402
from kernelformer.hf import convert  # noqa: E402
from tiny_models import inputs, outputs, padded, tiny, tokens  # noqa: E402

NEARBY = {"window": 3, "sinks": 1}
HYBRIDS = [
    ("LlamaForCausalLM", "favor+", {"num_features": 4}),
    ("LlamaForCausalLM", "loglinear", {"num_features": 4}),
    ("GPT2LMHeadModel", "elu", {}),
    ("BertForMaskedLM", "wildcat", {"num_landmarks": 4}),
    ("BertModel", "favor+", {"num_features": 4, "normalize_qk": True}),
]


def batch(model):
    return inputs(model, *padded(tokens(), (11, 7)))


@pytest.mark.parametrize(("kind", "method", "options"), HYBRIDS)
@pytest.mark.parametrize("heads", [None, {0: [1]}])
def test_window_alone_is_local_and_kernel_alone_is_the_map_without_a_window(kind, method, options, heads):
    teacher = tiny(kind)
    given = batch(teacher)

    def converted(name, **own):
        return convert(copy.deepcopy(teacher), name, exact_heads=heads, **own)

    student = converted(method, **options, **NEARBY)
    unit = {"normalize_qk": True} if "normalize_qk" in options else {}
    both = outputs(student, **given)
    with near_alone(student):
        torch.testing.assert_close(outputs(student, **given), outputs(converted("local", **NEARBY, **unit), **given))
    with kernel_alone(student):
        torch.testing.assert_close(outputs(student, **given), outputs(converted(method, **options), **given))
    assert torch.equal(outputs(student, **given), both)


def test_a_part_is_given_back_after_an_error():
    student = convert(tiny("LlamaForCausalLM"), "favor+", num_features=4, **NEARBY)
    before = [(x, x.near, x.near_alone) for x in hybrids(student)]
    for part in (near_alone, kernel_alone):
        with pytest.raises(KeyError), part(student):
            raise KeyError
        assert [(x, x.near, x.near_alone) for x in hybrids(student)] == before


def test_sinks_alone_are_all_that_is_seen_where_there_is_no_window():
    """Every token but the first sees the first alone, whatever stands between them."""
    student = convert(tiny("LlamaForCausalLM", num_hidden_layers=1), "favor+", num_features=4, sinks=1)
    ids = tokens(1)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 60
    with near_alone(student):
        first, second = (outputs(student, input_ids=x) for x in (ids, other))
    assert torch.equal(first[0, 4:], second[0, 4:])


def test_figures_of_both_parts_together_are_those_of_the_report():
    teacher = tiny("LlamaForCausalLM")
    student = convert(copy.deepcopy(teacher), "favor+", num_features=4, **NEARBY)
    given = batch(teacher)
    figures, report = part_figures(teacher, student, [given]), measure(teacher, student, [given])
    assert list(figures) == [ORIGINAL, CONVERTED, NEAR, KERNEL]
    assert figures[CONVERTED].perplexity == pytest.approx(report.perplexity)
    assert figures[ORIGINAL].perplexity == pytest.approx(report.original_perplexity)
    assert figures[CONVERTED].agreement == pytest.approx(report.agreement)
    assert len({figures[x].perplexity for x in figures}) == 4


@pytest.mark.parametrize("method", ["favor+", "local"])
def test_a_model_that_is_no_hybrid_has_no_parts(method):
    teacher = tiny("BertModel")
    student = convert(copy.deepcopy(teacher), method)
    assert list(part_figures(teacher, student, [batch(teacher)])) == [ORIGINAL, CONVERTED]


def test_accuracy_is_of_hidden_tokens_alone_with_the_error_of_its_difference():
    teacher = tiny("BertForMaskedLM")
    student = convert(copy.deepcopy(teacher), "favor+", num_features=4)
    given = batch(teacher)
    answers = given["input_ids"].clone()
    hidden = torch.zeros_like(answers, dtype=torch.bool)
    hidden[:, 1:6] = True
    given["input_ids"] = answers.masked_fill(hidden, 1)
    best = {ORIGINAL: outputs(teacher, **given).argmax(-1), CONVERTED: outputs(student, **given).argmax(-1)}
    answers[0, 1:4] = best[ORIGINAL][0, 1:4]
    answers[1, 1:3] = best[CONVERTED][1, 1:3]
    figures = part_figures(teacher, student, [given], [answers])
    right = {name: (x == answers)[hidden].double() for name, x in best.items()}
    for name, x in right.items():
        assert figures[name].accuracy == pytest.approx(float(x.mean()))
    difference = right[CONVERTED] - right[ORIGINAL]
    assert figures[CONVERTED].accuracy_error == pytest.approx(float(difference.std() / 10**0.5))
