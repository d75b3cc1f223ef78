"""Attention matrices of a model and of its converted self, and the pictures of them."""

from __future__ import annotations

import copy

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.hf import convert, cores, save  # noqa: E402
from kernelformer_lab.analysis import attention_pictures as recipe  # noqa: E402
from kernelformer_lab.analysis.attention_pictures import (  # noqa: E402
    Pair,
    attention_pairs,
    draw_pairs,
    label,
    spread,
    total_variation,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "sat", "$", "中", *"acdefghik"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}


def bert(kind="BertModel", seed=3, **options):
    torch.manual_seed(seed)
    # Larger weights than at the start of a training, so that attention is not flat.
    config = transformers.BertConfig(**{**SMALL, "initializer_range": 0.3, **options})
    return getattr(transformers, kind)(config).eval()


def ids(rows=1, length=7):
    return torch.randint(5, 40, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(path)
    bert().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted")
    save(convert(bert(), "favor+", num_features=8), path)
    return path


def by_hand(model, tokens):
    """softmax(Q K^T / sqrt(D)) of the first layer, from its projections."""
    layer = model.encoder.layer[0].attention.self
    hidden = model.embeddings(tokens)
    q, k = (x(hidden).unflatten(-1, (2, 8)).transpose(1, 2) for x in (layer.query, layer.key))
    return torch.softmax(q @ k.mT / 8**0.5, -1), q, k


def test_the_originals_matrix_is_the_softmax_of_its_own_queries_and_keys():
    model, tokens = bert().double(), ids(2)
    pairs = attention_pairs(model, convert(copy.deepcopy(model), "softmax"), {"input_ids": tokens})
    assert [x.name for x in pairs] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    with torch.no_grad():
        want, _, _ = by_hand(model, tokens)
    torch.testing.assert_close(pairs[0].exact, want)
    for pair in pairs:
        torch.testing.assert_close(pair.converted, pair.exact)
        assert pair.distance.shape == (2, 2)
        assert pair.distance.max() < 1e-12


def test_the_converted_matrix_times_the_values_is_its_output():
    model, tokens = bert().double(), ids()
    other = convert(copy.deepcopy(model), "favor+", num_features=8)
    outputs = []
    core = cores(other)["encoder.layer.1.attention.self"]
    handle = core.register_forward_hook(lambda _, given, out: outputs.append((given[2], out)))
    pairs = attention_pairs(model, other, {"input_ids": tokens})
    handle.remove()
    ((value, out),) = outputs
    torch.testing.assert_close(pairs[1].converted @ value, out)
    assert pairs[1].distance.min() > 0.01


def test_later_layers_are_at_the_converted_models_own_queries():
    """Its second layer reads what its own first layer made of the text."""
    model, tokens = bert().double(), ids()
    other = convert(copy.deepcopy(model), "favor+", layers=[0], num_features=8)
    first, second = attention_pairs(model, other, {"input_ids": tokens})
    assert first.distance.min() > 0.01
    assert second.distance.min() > 1e-4  # exact attention, and yet not the same


def test_padded_keys_have_no_weight_in_either():
    model, tokens = bert(), ids(2)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    pairs = attention_pairs(
        model, convert(copy.deepcopy(model), "favor+", num_features=8), {"input_ids": tokens, "attention_mask": mask}
    )
    for pair in pairs:
        for weights in (pair.exact, pair.converted):
            assert weights[1, ..., 4:].abs().max() == 0
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 7))


def test_a_causal_model_with_grouped_keys():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config).eval()
    pairs = attention_pairs(model, convert(copy.deepcopy(model), "favor+", num_features=8), {"input_ids": ids()})
    model.set_attn_implementation("eager")
    for pair, want in zip(pairs, model(ids(), output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(pair.exact, want)
        assert pair.converted.triu(1).abs().max() == 0


def test_biases_and_heads_of_two_kinds_are_in_the_matrices():
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=40)
    model = transformers.T5EncoderModel(config).eval()
    other = convert(copy.deepcopy(model), "favor+", num_features=8, exact_heads={0: [1]})
    pair = attention_pairs(model, other, {"input_ids": ids()})[0]
    assert pair.distance[0, 1] < 1e-6 < 1e-3 < pair.distance[0, 0]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(pair.exact, model(ids(), output_attentions=True).attentions[0])


def test_a_layer_that_is_called_again_is_a_pair_of_its_own():
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**SMALL, embedding_size=8)
    model = transformers.AlbertModel(config).eval()
    first, second = attention_pairs(model, convert(copy.deepcopy(model), "elu"), {"input_ids": ids()})
    assert second.name == f"{first.name} (call 2)"


def test_models_are_left_as_they_were():
    model = bert().train()
    other = convert(copy.deepcopy(model), "elu")
    before = model.config._attn_implementation
    attention_pairs(model, other, {"input_ids": ids()})
    assert model.config._attn_implementation == before
    assert model.training
    assert other.training
    assert not any(x._forward_hooks for x in other.modules())


def test_a_head_on_one_of_the_models_does_no_harm():
    model = bert("BertForMaskedLM")
    other = convert(copy.deepcopy(model.bert), "elu")
    assert len(attention_pairs(model, other, {"input_ids": ids()})) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (torch.nn.Linear(2, 2), bert()), "original model must be one of transformers, got Linear"),
        (lambda: (bert(), bert()), "was not converted"),
        (lambda: (convert(bert(), "elu"), convert(bert(), "elu")), "is converted itself"),
        (lambda: (bert(), convert(bert(num_hidden_layers=3), "elu")), "calls 2 attentions and the converted model 3"),
        (
            lambda: (bert(), convert(bert(num_attention_heads=4), "elu")),
            r"shapes \(1, 2, 7, 7\) and \(1, 4, 7, 7\)",
        ),
    ],
)
def test_models_that_do_not_belong_together_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        attention_pairs(*make(), {"input_ids": ids()})


def test_total_variation_is_0_for_equal_rows_and_1_for_disjoint_ones():
    one = torch.eye(4)
    assert total_variation(one, one) == 0
    assert total_variation(one, one.flip(0)) == 1
    assert total_variation(one, torch.full((4, 4), 0.25)) == 0.75


def test_evenly_spread_numbers():
    assert spread(12, 4) == [0, 4, 7, 11]
    assert spread(3, 4) == [0, 1, 2]
    assert spread(5, 1) == [0]


@pytest.mark.parametrize(
    ("token", "want"),
    [("$x$", "$x$"), ("a\x07b", "a<U+0007>b"), ("中", "<U+4E2D>"), ("é", "é"), ("x" * 20, "x" * 11 + "…")],
)
def test_tokens_become_labels_that_can_be_drawn(token, want):
    assert label(token) == want


def test_negative_weights_and_odd_tokens_are_drawn(tmp_path, recwarn):
    gen = torch.Generator().manual_seed(0)
    exact, other = torch.rand(2, 1, 2, 5, 5, generator=gen)
    pair = Pair("a", exact, other - 0.5)
    tokens = ["$a_1$", "\\frac{", "中", "\x00", "#"]
    for heads in (None, [1]):
        draw_pairs([pair], tokens, tmp_path / "a.png", heads=heads)
        assert (tmp_path / "a.png").stat().st_size > 10000
    assert not [x for x in recwarn if "Glyph" in str(x.message)]
    with pytest.raises(ValueError, match="there are 4 tokens"):
        draw_pairs([pair], tokens[:4], tmp_path / "b.png")


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (["--prompt", "the cat sat $ 中"], "7 tokens"),
        (["--prompt", "the cat", "--layers", "1", "--heads", "0"], "4 tokens"),
        (["--sequence", "acd EFG"], "8 tokens"),
    ],
)
def test_the_command_draws_a_converted_folder(folder, converted, tmp_path, more, shown):
    done = CliRunner().invoke(app, ["attention", str(folder), str(converted), *more, "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert shown in done.output
    assert "favor+:num_features=8" in done.output
    assert (tmp_path / "new" / "attention.png").stat().st_size > 10000


def test_a_sentence_in_a_file_does_the_same_as_a_prompt(folder, converted, tmp_path):
    (tmp_path / "text.txt").write_text("the cat\n")
    command = ["attention", str(folder), str(converted), "--threads", "1", "--layers", "0-1", "--heads", "0", "--out"]
    for name, words in {"file": ["--text", str(tmp_path / "text.txt")], "prompt": ["--prompt", "the cat"]}.items():
        done = CliRunner().invoke(app, [*command, str(tmp_path / name), *words])
        assert done.exit_code == 0, done.output
    first, second = (tmp_path / name / "attention.png" for name in ("file", "prompt"))
    assert first.read_bytes() == second.read_bytes()


def test_an_attention_instead_of_a_converted_folder(folder):
    found = recipe.run(folder, attention="softmax", text="the cat sat")
    assert found.tokens == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    assert found.names == (folder.name, "softmax")
    assert max(float(x.distance.max()) for x in found.pairs) < 1e-5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompt", "the"], "give the folder of a converted model, or an attention"),
        (["--attention", "elu"], "give a text or the sequence of a protein"),
        (["--attention", "elu", "--prompt", "the", "--sequence", "ac"], "one of them"),
        (["--attention", "elo", "--prompt", "the"], "did you mean 'elu'?"),
        (["--attention", "elu", "--prompt", " "], "nothing to read in the text ' '"),
        (["--attention", "elu", "--sequence", "ac-d"], "a protein is a sequence of letters"),
        (["--attention", "elu", "--sequence", "acxd"], "does not read 'ACXD' as one token a residue"),
        (["--attention", "elu", "--prompt", "the", "--layers", "2"], "attentions 0 to 1, got layer 2"),
        (["--attention", "elu", "--prompt", "the", "--heads", "2"], "heads 0 to 1, got head 2"),
        (["--attention", "elu", "--prompt", "the", "--layers", "x"], "--layers takes numbers from 0 and ranges"),
        (["--attention", "elu", "--prompt", "cat " * 600], "has 602 tokens, a picture of this model takes 512"),
    ],
)
def test_wrong_input_of_the_command_is_named(folder, tmp_path, more, message):
    done = CliRunner().invoke(app, ["attention", str(folder), *more, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
