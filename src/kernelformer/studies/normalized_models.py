"""Replace the attention of a trained model, and measure the norms that its kernels see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.errors import integer, shape
from kernelformer.models import KernelformerPreTrainedModel
from kernelformer.models.embeddings import Embeddings
from kernelformer.modules import RelativePositions
from kernelformer.modules.core import AttentionCore

Model = TypeVar("Model", bound=KernelformerPreTrainedModel)
CORE = ".core."  # what a method itself has: draws, and what a learned kernel has learned


def reattend(model: Model, attention: str | list[str], *, seed: int | None = None) -> Model:
    """Copy a model with the same weights and another attention.

    All weights go over, biases and tables of relative positions too; draws are new, except with the same attention and
    no ``seed``, which is a copy. Absolute positions stay what they are, also where ``positions="auto"`` would choose
    others for the new attention. What a learned kernel of the new attention has to learn starts where it starts.

    Args:
        model: any but an encoder-decoder, which has three attentions; it stays as it is.
        attention: as in `KernelformerConfig`, relative positions included.
        seed: of the draws; default: the model's.

    Raises:
        ValueError: a weight that the new model has no place for, or one that it needs beside its kernels.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"reattend takes models with one kind of attention, got {type(model).__name__}, which has three; build it "
            f"with the ones you want."
        )
    config = deepcopy(model.config)
    config.attention = attention
    if seed is not None:
        config.seed = integer("seed", seed, at_least=0)
    for part in model.modules():
        if isinstance(part, Embeddings):
            config.positions = part.positions
    with torch.random.fork_rng(devices=[]):  # first weights that are thrown away should not move others' numbers
        new = type(model)(config)
    everything = model.state_dict(keep_vars=True)
    weights = {name: x for name, x in everything.items() if isinstance(x, nn.Parameter)}
    _check_places(weights, new.state_dict(keep_vars=True), model.config.attention, attention)
    same = attention == model.config.attention and seed is None
    new.load_state_dict(everything if same else weights, strict=False)
    module: nn.Module = new
    module.to(device=model.device, dtype=model.dtype)
    module.train(model.training)
    return new


def _check_places(
    weights: Mapping[str, Tensor], places: Mapping[str, Tensor], before: str | list[str], after: str | list[str]
) -> None:
    """Raise for the first weight of one of two models that the other does not have in the same shape."""
    for name, x in weights.items():
        if name not in places:
            raise ValueError(
                f"{name} of a model with {before!r} would be lost: one with {after!r} has no place for it; give an "
                f"attention with the same relative positions and learned parts."
            )
        if places[name].shape != x.shape:
            raise ValueError(
                f"{name} of a model with {before!r} is {shape(x)}, of one with {after!r} {shape(places[name])}; give "
                f"an attention with relative positions and learned parts of the same size."
            )
    for name, x in places.items():
        if isinstance(x, nn.Parameter) and CORE not in name and name not in weights:
            raise ValueError(
                f"{name} of a model with {after!r} would not be trained: one with {before!r} has no such weight; give "
                f"an attention with the same relative positions and gates."
            )


@dataclass(frozen=True)
class Norms:
    """What decides how many features a kernel needs: the norms of what it sees, ``|x| sqrt(scale)``.

    Args:
        query: mean over layers, heads and tokens.
        key: the same.
        largest: of both.
        bias: mean over layers and heads of the range of the table of relative positions; 0 without one.
    """

    query: float
    key: float
    largest: float
    bias: float


@torch.no_grad()
def kernel_norms(model: nn.Module, tokens: Tensor) -> Norms:
    """Norms of queries and keys as the kernels of a model see them, of unit length where it normalizes them.

    Args:
        model: of this library.
        tokens: (B, L).
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def measure_norms(core: AttentionCore, given: tuple[Tensor, ...]) -> None:
        query, key = (F.normalize(x, dim=-1) if core.normalize_qk else x for x in given[:2])
        size = math.sqrt(core.scale)
        seen.append((size * query.norm(dim=-1).flatten(), size * key.norm(dim=-1).flatten()))

    hooks = [x.register_forward_pre_hook(measure_norms) for x in model.modules() if isinstance(x, AttentionCore)]
    try:
        model(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    query, key = (torch.cat(x).double() for x in zip(*seen, strict=True))
    positions = [x for x in model.modules() if isinstance(x, RelativePositions) and x.scheme != "alibi"]
    tables = [x.weight.flatten(1) for x in positions]
    ranges = torch.cat([x.amax(1) - x.amin(1) for x in tables]) if tables else query.new_zeros(1)
    largest = max(float(query.max()), float(key.max()))
    return Norms(float(query.mean()), float(key.mean()), largest, float(ranges.mean()))
