"""Savings of a served converted decoder: the study's figures, and that it resumes where it was stopped."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kernelformer.hf import convert, new_cache  # noqa: E402
from kernelformer_lab.studies import lengths  # noqa: E402
from kernelformer_lab.studies import serving as study  # noqa: E402
from kernelformer_lab.studies.lengths import TOKEN, curve, prefill  # noqa: E402
from kernelformer_lab.studies.serving import ServingSettings  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_gc")

SPEC = "favor+:num_features=4:window=4:sinks=1"
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """A small model, and jobs in this process, which are listed."""
    done = []

    def run(work, *, threads, allocator, **given):
        done.append((given["what"], given["length"], *given["names"]))
        return json.loads(json.dumps(work(**json.loads(json.dumps(given)))))

    monkeypatch.setattr(study, "SIZES", SMALL)
    monkeypatch.setattr(lengths, "run_in_process", run)
    return done


def test_a_prompt_in_pieces_leaves_the_state_of_the_whole():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).double().eval()
    convert(model, "favor+", num_features=4, window=4, sinks=1)
    tokens = torch.arange(23)[None]
    logits = []
    for chunk in (23, 5):
        cache = new_cache(model)
        prefill(model, tokens, cache, chunk)
        with torch.no_grad():
            logits.append(model(tokens[:, :1], past_key_values=cache).logits)
        assert cache.get_seq_length() == 24
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)


def test_the_study_measures_both_and_goes_on_where_it_was_stopped(here, tmp_path):
    given = {"attention": (SPEC,), "chunk": 8, "rounds": 1, "budget": 0.01}
    settings, serving = ServingSettings(lengths=(8, 32), **given), study.STUDY
    serving.measure(ServingSettings(lengths=(8,), **given), tmp_path)
    assert here == [("memory", 8, "sdpa"), ("memory", 8, SPEC), ("time", 8, "sdpa", SPEC)]
    here.clear()
    steps = []
    result = serving.measure(settings, tmp_path, progress=lambda: steps.append(1))
    assert {x[1] for x in here} == {32}
    assert len(steps) == serving.steps(settings)
    caches = {name: curve(result.rows, TOKEN, name, "peak") for name in ("sdpa", SPEC)}
    assert caches["sdpa"][32] == 4 * caches["sdpa"][8] == 2 * 2 * 32 * 8 * 4
    assert caches[SPEC][32] == caches[SPEC][8]  # the window is full
    assert all(x["tokens per second"] > 0 for x in result.rows)
    assert [x.row_count for x in serving.tables(result)] == [4, 4, 4, 2]
    with pytest.raises(ValueError, match="has figures of another model or machine"):
        serving.measure(ServingSettings(lengths=(8,), **{**given, "chunk": 4}), tmp_path)


def test_what_takes_too_long_is_not_run(here, tmp_path):
    settings = ServingSettings(lengths=(8, 512), attention=(SPEC,), rounds=1, budget=0.01, limit=1e-2, memory=False)
    study.STUDY.measure(settings, tmp_path)
    assert [x[1] for x in here] == [8]
    (line, *_) = study.tables(study.STUDY.measure(settings, tmp_path))
    assert line.row_count == 4


def test_settings_of_serving_are_checked(tmp_path):
    for wrong, words in (
        ({"attention": ()}, "attention must name at least one"),
        ({"attention": ("nothing",)}, "nothing"),
        ({"rounds": 1000}, "rounds must be at most 100, got 1000"),
    ):
        with pytest.raises(ValueError, match=words):
            study.steps(ServingSettings(**wrong))
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="bert"):
        study.STUDY.measure(ServingSettings(model=str(tmp_path / "bert"), lengths=(8,)), tmp_path)
