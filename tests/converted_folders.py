"""Folders of small converted models, for tests of what reads them."""

from __future__ import annotations

import json

import torch

from kernelformer.hf import convert, cores
from tiny_models import tiny


def saved(folder, kind="BertForMaskedLM", method="loglinear", dtype=torch.float64, **options):
    """A converted model whose map has learned something, in a folder."""
    options.setdefault("num_features", 16)
    model = convert(tiny(kind, dtype), method, **options)
    with torch.no_grad():
        for core in cores(model).values():
            core.resample(3)
            for x in core.parameters():
                x.add_(0.1)
    model.save_pretrained(folder)
    return model


def change(folder, **values):
    """Change the configuration, as somebody who knows what they do."""
    (folder / "hashes.json").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
