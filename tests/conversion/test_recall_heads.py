"""Heads of a decoder that find again what stands far back."""

from __future__ import annotations

import pytest
import torch

from kernelformer.conversion.keep import recall_scores
from kernelformer.conversion.measure import best_heads
from kernelformer.conversion.texts import BEGINNING, Repeats, recall_row
from tiny_models import HEADS, VOCAB, tiny

GAP = 16


@pytest.fixture(scope="module")
def model():
    return tiny("LlamaForCausalLM", torch.float32, max_position_embeddings=256)


@pytest.fixture(scope="module")
def rows():
    return list(torch.randint(VOCAB, (3, 150), generator=torch.Generator().manual_seed(1)))


def repeated(rows):
    return [recall_row(x, GAP, number) for number, x in enumerate(rows)]


def test_scores_are_the_weight_on_what_came_next(model, rows):
    wanted = torch.zeros(2, 4, dtype=torch.float64)
    count = 0
    model.set_attn_implementation("eager")
    for number, row in enumerate(rows):
        ids, copies = Repeats(gap=GAP).row(row, number)
        with torch.no_grad():
            weights = torch.stack(model(ids[None], output_attentions=True).attentions)[:, 0]  # (layers, H, L, L)
        for copy in copies:
            for i in range(BEGINNING, copy.length - 1):
                assert ids[copy.second + i + 1] == ids[copy.first + i + 1]
                wanted += weights[:, :, copy.second + i, copy.first + i + 1]
                count += 1
    model.set_attn_implementation("sdpa")
    scores = recall_scores(model, repeated(rows))
    assert count > 10
    for layer in range(2):
        for head in range(4):
            name = f"model.layers.{layer}.self_attn"
            assert scores[name, head] == pytest.approx(float(wanted[layer, head]) / count, rel=1e-4)


def test_of_a_layer_that_is_called_several_times_the_best_call_counts(rows):
    model = tiny("AlbertModel", torch.float32, max_position_embeddings=256)
    for parameter in model.parameters():
        parameter.data.zero_()  # so that all weights are 1 / L
    scores = recall_scores(model, repeated(rows))
    assert list(scores.values()) == pytest.approx([1 / 150] * HEADS)


def test_only_some_attentions_are_scored_and_short_rows_say_nothing(model, rows):
    scores = recall_scores(model, repeated(rows), ["model.layers.1.self_attn"])
    assert set(scores) == {("model.layers.1.self_attn", i) for i in range(4)}
    assert recall_scores(model, repeated([x[:20] for x in rows])) == {}


def test_heads_are_chosen_by_score():
    scores = {("a", 0): 0.1, ("a", 1): 0.5, ("b", 0): 0.4, ("b", 1): 0.6}
    assert best_heads(scores, 3) == {"a": [1], "b": [0, 1]}
    with pytest.raises(ValueError, match=r"4 heads were converted, so that at most 3 can be kept exact, got 4"):
        best_heads(scores, 4)
