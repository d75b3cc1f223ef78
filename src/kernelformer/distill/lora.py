"""LoRA on the values and outputs of converted attentions, by peft, until it is merged into the weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kernelformer.distill.train import learned
from kernelformer.errors import positive_int
from kernelformer.hf.convert import conversion

# How models name the projection of the values and that of the output, within an attention and beside it.
VALUES = ("v_proj", "value", "v_lin", "v", "Wv")
OUTPUTS = ("o_proj", "out_proj", "out_lin", "o", "Wo", "dense", "c_proj", "proj")
BESIDE = ("output.dense",)
ALPHA = 2.0  # times the rank: what peft multiplies the product by, over the rank


def lora_targets(student: nn.Module, patterns: str = "") -> list[str]:
    """Name the linear layers that LoRA is put on.

    Args:
        student: converted.
        patterns: of their names, such as ``*.v_proj,*.o_proj``; empty: projections of the values and outputs of every
            converted attention.

    Raises:
        ValueError: a pattern that fits no linear layer, or a model whose projections have other names.
    """
    layers = {name: x for name, x in student.named_modules() if isinstance(x, nn.Linear | Conv1D)}
    owners = Counter(id(x.weight) for x in student.modules() if isinstance(getattr(x, "weight", None), nn.Parameter))
    # What is merged into a weight that is tied, such as a head's, would change word embeddings too.
    linear = [name for name, x in layers.items() if owners[id(x.weight)] == 1]
    if patterns:
        wanted = [x.strip() for x in patterns.split(",") if x.strip()]
        for pattern in wanted:
            if not any(fnmatchcase(x, pattern) for x in linear):
                tied = ", whose weight is another layer's too" if any(fnmatchcase(x, pattern) for x in layers) else ""
                raise ValueError(
                    f"no linear layer of {type(student).__name__} fits {pattern!r}{tied}; it has {_kinds(linear)}."
                )
        return [x for x in linear if any(fnmatchcase(x, y) for y in wanted)]
    found = []
    for attention in conversion(student).replaced:
        parent = attention.rpartition(".")[0]
        inside = [f"{attention}.{x}" for x in (*VALUES, *OUTPUTS)]
        found += [x for x in (*inside, *(f"{parent}.{y}" for y in BESIDE)) if x in linear]
    if not found:
        raise ValueError(
            f"the projections of the values and outputs of {type(student).__name__} are not known by name; say which "
            f"layers by lora_layers, of {_kinds(linear)}."
        )
    return found


def _kinds(names: Sequence[str]) -> str:
    """Names with their numbers left out, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "*", x) for x in names)) or "none"


class Lora:
    """LoRA inside a converted model: low-rank products beside some of its linear layers are what is left to train.

        W x  ->  W x + 2 B A x        A (r, in) drawn, B (out, r) zero

    Args:
        student: converted; changed in place until `merge`.
        targets: see `lora_targets`.
        rank: r.
        seed: of A.
    """

    def __init__(self, student: nn.Module, targets: Sequence[str], rank: int, seed: int = 0) -> None:
        from peft import LoraConfig, LoraModel  # takes seconds to import

        self.before = {name: x.requires_grad for name, x in student.named_parameters()}
        rank = positive_int("rank", rank)
        config = LoraConfig(r=rank, lora_alpha=int(ALPHA * rank), target_modules=list(targets), lora_dropout=0.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tuner: Any = LoraModel(student, config, "default")
        self.student = student
        for some in learned(student).values():
            for x in some:
                x.requires_grad_(True)

    def merge(self) -> None:
        """Add the products to the weights; the model is then what it was before, with other numbers."""
        self.tuner.merge_and_unload()
        vars(self.student).pop("peft_config", None)
        for name, x in self.student.named_parameters():
            x.requires_grad_(self.before[name])
