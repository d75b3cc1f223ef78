"""Similarity of amino acids: BLOSUM62, correlations, attention that amino acids receive, and the study."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer_lab.studies import amino_acids
from kernelformer_lab.studies.amino_acids import (
    AMINO_ACIDS,
    AminoAcidsSettings,
    attention_similarity,
    blosum62,
    pairs_of,
    pearson,
    renamed_correlations,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def protein_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("proteins")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(AMINO_ACIDS)])}
    transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False).save_pretrained(path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(3)
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(vocabulary), **sizes))
    with torch.no_grad():
        for x in model.bert.encoder.parameters():
            x.mul_(10)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    gen = torch.Generator().manual_seed(0)
    rows = ["".join(AMINO_ACIDS[i] for i in torch.randint(20, (n,), generator=gen)) for n in (50, 44, 60, 38, 41)]
    path = tmp_path_factory.mktemp("text") / "proteins.txt"
    path.write_text("\n".join([*rows, "X"]))
    return path


def test_blosum62_is_symmetric_with_known_entries():
    scores = blosum62()
    assert torch.equal(scores, scores.T)
    entry = {pair: int(scores[AMINO_ACIDS.index(pair[0]), AMINO_ACIDS.index(pair[1])]) for pair in ("DE", "FY", "WW")}
    assert entry == {"DE": 2, "FY": 3, "WW": 11}
    assert int(scores.sum()) == -426
    assert int(scores.diagonal().sum()) == 116
    assert (scores.diagonal() >= scores.max(0).values).all()


def test_correlations_are_those_of_torch():
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 30, generator=gen, dtype=torch.float64)
    assert float(pearson(x, y)) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))


def test_amino_acids_are_similar_if_their_shares_go_together_over_heads():
    gen = torch.Generator().manual_seed(0)
    received = torch.rand(7, 5, generator=gen, dtype=torch.float64) + 0.1
    share = received / received.sum(-1, keepdim=True)
    torch.testing.assert_close(attention_similarity(received), torch.corrcoef(share.T))
    torch.testing.assert_close(attention_similarity(3 * received), attention_similarity(received))
    with pytest.raises(ValueError, match=r"at least two heads, got \(1, 5\)"):
        attention_similarity(received[:1])


def test_renamings_leave_nothing_of_a_correlation():
    scores, gen = blosum62(), torch.Generator().manual_seed(0)
    values = renamed_correlations(scores, scores, 200, gen)
    assert float(values.max()) < 0.9  # the right names give 1
    assert abs(float(values.mean())) < 5 * float(values.std()) / 200**0.5
    assert pairs_of(scores).shape == (190,)


def test_received_attention_is_the_sum_over_residues_alone(protein_model):
    source = amino_acids.load_source(protein_model)
    model = amino_acids._model(source, amino_acids.ORIGINAL, 0)
    tokens = source.tokenizer(["A C X C", "A C D E F G"], padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    found = amino_acids.received_attention(model, inputs, amino_acids.residue_ids(source))
    assert found.shape == (2, 4, 20)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[1][0, 1].double()  # of the first sample
    real = [1, 2, 4]  # 0 is [CLS], 3 the unknown X, 5 [SEP], then padding
    want = {"A": weights[real][:, [1]].sum(), "C": weights[real][:, [2, 4]].sum()}
    for letter, value in want.items():
        assert float(found[0, 3, AMINO_ACIDS.index(letter)]) == pytest.approx(float(value))
    assert float(found[0, :, AMINO_ACIDS.index("W")].abs().max()) == 0


def test_the_study_compares_models_and_goes_on(protein_model, sequences, tmp_path):
    given = ["--text", str(sequences), "--samples", "5", "--length", "40", "--batch", "2", "--resamples", "20"]
    where = ["--threads", "1", "--out", str(tmp_path)]

    def call(attention, *more):
        arguments = ["study", "amino-acids", str(protein_model), *given, "--attention", attention, *where, *more]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    first = call("favor+:num_features=4")
    assert first.exit_code == 0, first.output
    second = call("favor+:num_features=4,softmax")
    assert second.exit_code == 0, second.output
    record = json.loads((tmp_path / "amino-acids.json").read_text())
    rows = {x["model"]: x for x in record["rows"]}
    assert list(rows) == ["original", "random weights", "favor+:num_features=4", "softmax"]
    original, exact = rows["original"], rows["softmax"]
    assert exact["pearson"] == pytest.approx(original["pearson"], abs=1e-4)
    assert rows["random weights"]["pearson"] != pytest.approx(original["pearson"], abs=1e-2)
    assert len(original["resampled"]) == 20
    assert 1 <= original["places"]["DE"] <= 190
    assert 0 < original["chance"] <= 1
    assert record["residues"] == 198
    assert (tmp_path / "amino-acids.png").read_bytes().startswith(b"\x89PNG")
    assert "has figures of another seed" in call("elu", "--seed", "1").output


def test_what_cannot_be_read_is_refused(protein_model, sequences):
    with pytest.raises(ValueError, match="has 5 sequences of two residues or more, and 9 were asked for"):
        amino_acids.chosen_sequences(AminoAcidsSettings(model="m", text=sequences, sequences=9))
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"])}
    words = transformers.BertTokenizer(vocab=vocabulary)
    source = replace(amino_acids.load_source(protein_model), tokenizer=words)
    with pytest.raises(ValueError, match="has no token for each of the amino acids"):
        amino_acids.residue_ids(source)
