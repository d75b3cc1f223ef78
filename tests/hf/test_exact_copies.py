"""A copy that was converted to softmax is the original, in every figure and for every family."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kernelformer.conversion.measure import measure  # noqa: E402
from kernelformer.conversion.tune import transfer  # noqa: E402
from kernelformer.hf import convert  # noqa: E402
from kernelformer.hf.find import attention_calls  # noqa: E402
from kernelformer_lab.analysis.attention_pictures import attention_pairs  # noqa: E402
from tiny_models import ENCODERS, KINDS, VOCAB, inputs, padded, tiny, tokens  # noqa: E402

EXACT = 1e-12  # in float64


def splinter():
    """An encoder whose attention says nothing of causality, like MPNet's, and goes through the interface."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = transformers.SplinterConfig(vocab_size=VOCAB, question_token_id=3, max_position_embeddings=64, **size)
    torch.manual_seed(0)
    model = transformers.SplinterModel(config).double().eval()
    for x in model.parameters():
        if x.dim() > 1:
            x.data.normal_(std=0.3)
    return model


def make(kind):
    return splinter() if kind == "SplinterModel" else tiny(kind)


def batch(model, filling):
    if filling == "no mask":
        return inputs(model)
    if filling == "unpadded":
        return inputs(model, tokens(), torch.ones_like(tokens()))
    ids, mask = padded(tokens(), (11, 6))
    return inputs(model, ids, mask)


ALL = [*KINDS, "SplinterModel"]
FILLINGS = ["no mask", "unpadded", "padded"]


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("kind", ALL)
def test_a_softmax_copy_measured_against_its_original_shows_no_error(kind, filling):
    teacher = make(kind)
    report = measure(teacher, convert(copy.deepcopy(teacher), "softmax"), [batch(teacher, filling)])
    assert max(x.error for x in report.rows) < EXACT
    assert max(y for x in report.rows for y in x.heads) < EXACT
    assert max(x for part in report.hidden.values() for x in part) < EXACT
    assert report.output < EXACT
    assert report.agreement in (None, 1.0)
    assert report.cosine is None or report.cosine == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("filling", ["unpadded", "padded"])
@pytest.mark.parametrize("kind", [x for x in ALL if x != "ViTModel"])
def test_an_original_that_is_looked_at_computes_what_it_computes_alone(kind, filling):
    teacher = make(kind)
    given = batch(teacher, filling)
    body = teacher.base_model  # all that transfer runs, where a head attends to nothing
    with torch.no_grad():
        alone = body(**given)[0]
    linear = convert(copy.deepcopy(teacher), "loglinear", num_features=4)
    exact = convert(copy.deepcopy(teacher), "softmax")
    seen = []
    handle = body.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    transfer(linear, teacher, itertools.repeat(given), steps=1)
    measure(teacher, exact, [given])
    attention_calls(teacher, given)
    handle.remove()
    assert len(seen) == 3
    for out in seen:
        torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-6)  # some take their own softmax in float32


@pytest.mark.parametrize("kind", [*ENCODERS, "SplinterModel"])
def test_matrices_of_a_softmax_copy_are_those_of_its_original(kind):
    teacher = make(kind)
    for filling in ("unpadded", "padded"):
        given = batch(teacher, filling)
        real = given["attention_mask"].bool()
        for pair in attention_pairs(teacher, convert(copy.deepcopy(teacher), "softmax"), given):
            exact, ours = (x.transpose(1, 2)[real] for x in (pair.exact, pair.converted))
            torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
