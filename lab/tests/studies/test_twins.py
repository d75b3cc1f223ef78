"""Our models and plain PyTorch ones of the same size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelformer_lab.studies import STUDIES, twins
from kernelformer_lab.studies.settings import TwinsSettings
from samples import few_samples

SMALL = {"image_size": 8, "patch": 4, "width": 16, "layers": 1, "heads": 2, "steps": 1, "batch": 4, "seeds": 1}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(twins, "EVALUATED", 32)
    options = few_samples("images", tmp_path, {"channels": 1, "size": 8})
    return TwinsSettings(images=options["data"], **SMALL)


def test_twins_have_the_size_of_our_models_but_for_the_head_and_see_the_same_tokens(settings):
    for task in twins.tasks(settings):
        ours, plain = (twins.build(task, x, settings) for x in (twins.OURS, twins.PLAIN))
        counts = [sum(x.numel() for x in model.stack.parameters()) for model in (getattr(ours, "model", ours), plain)]
        assert counts[0] == counts[1]


def test_images_alone_need_a_folder_of_them(settings):
    assert [x.name for x in twins.tasks(replace(settings, images=None))] == ["listops", "bytes"]
    with pytest.raises(ValueError, match="needs a folder of images"):
        twins.tasks(replace(settings, images=None, tasks=("images",)))


def test_a_plain_language_model_does_not_see_later_tokens_nor_a_classifier_padding(settings):
    _, listops, text = twins.tasks(settings)
    model = twins.build(text, twins.PLAIN, settings).eval()
    ids = torch.arange(12).view(1, -1)
    changed = ids.clone()
    changed[:, 8:] = 99
    before, after = (model(input_ids=x).logits for x in (ids, changed))
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])
    model = twins.build(listops, twins.PLAIN, settings).eval()
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, 8:] = 0
    before, after = (model(input_ids=x.clamp_max(9), attention_mask=mask).logits for x in (ids, changed))
    torch.testing.assert_close(before, after)


def test_the_study_trains_each_once_and_draws(settings, tmp_path):
    study = STUDIES["twins"]
    said = []
    result = study.run(settings, tmp_path, said.append)
    assert len(result) == len(said) == study.steps(settings) == sum(map(len, twins.VARIANTS.values()))
    assert study.run(settings, tmp_path, said.append) == result
    assert len(said) == len(result)
    assert {x["task"] for x in twins.summary(result)} == {"images", "listops", "bytes"}
    twins.picture(result, tmp_path / "twins.png")
    assert (tmp_path / "twins.png").stat().st_size > 10_000
