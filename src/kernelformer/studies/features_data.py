"""What `studies.features` measures on: vectors of given norms, and those of pretrained models on text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.data.readers import read_texts
from kernelformer.hf.capture import attention_inputs
from kernelformer.hf.find import find_attentions
from kernelformer.hf.load import Source, load_source
from kernelformer.studies.settings import FeaturesSettings as Settings

SYNTHETIC = ("isotropic", "anisotropic")
Layers = Sequence[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class About:
    """What a case is, without its tensors.

    Args:
        kind: one of `SYNTHETIC`, or the name of a model.
        norm: of all queries and keys as the kernel sees them, times sqrt(scale); None: those of a model.
        tokens: L.
        head_dim: D.
        causal: whether a token sees earlier ones only.
        query_norm: mean norm of the queries as the kernel sees them.
        key_norm: the same of the keys.
    """

    kind: str
    norm: float | None
    tokens: int
    head_dim: int
    causal: bool
    query_norm: float
    key_norm: float


@dataclass(frozen=True)
class Case:
    """Queries, keys and values (B, H, L, D), and other ones (B, H, L, D) of the same kind to calibrate on.

    Vectors are such that the default scale, 1 / sqrt(D), is theirs.
    """

    about: About
    query: Tensor
    key: Tensor
    value: Tensor
    other_query: Tensor
    other_key: Tensor


def case_names(settings: Settings) -> list[str]:
    """The names of all cases, in their order: each kind and norm, then each model."""
    synthetic = [synthetic_name(kind, norm) for kind in SYNTHETIC for norm in settings.norms]
    return [*synthetic, *(Path(x).name for x in settings.model)]


def synthetic_name(kind: str, norm: float) -> str:
    """The name of a case of given norms."""
    return f"{kind}, norm {norm:g}"


def make_case(settings: Settings, name: str) -> Case:
    """Draw or capture the case of a name."""
    for kind in SYNTHETIC:
        for norm in settings.norms:
            if name == synthetic_name(kind, norm):
                return synthetic_case(settings, kind, norm)
    index = [Path(x).name for x in settings.model].index(name)
    return captured_case(settings, settings.model[index], settings.text[min(index, len(settings.text) - 1)])


def synthetic_case(settings: Settings, kind: str, norm: float) -> Case:
    """Draw queries and keys of one norm in random directions, and Gaussian values; samples take the place of heads.

    Isotropic: all directions alike. Anisotropic: variances 1 / i in D orthogonal directions, which are random, and a
    sample's own, the same for queries and keys.
    """
    samples, length, dim = settings.samples, settings.length, settings.head_dim
    gen = torch.Generator().manual_seed(settings.seed)
    basis = torch.linalg.qr(torch.randn(samples, dim, dim, generator=gen)).Q
    spread = torch.ones(dim) if kind == "isotropic" else torch.arange(1, dim + 1) ** -0.5

    def draw() -> Tensor:
        x = (torch.randn(1, samples, length, dim, generator=gen) * spread) @ basis
        return F.normalize(x, dim=-1).mul_(norm * dim**0.25)

    vectors = [draw() for _ in range(4)]
    value = torch.randn(1, samples, length, dim, generator=gen)
    about = About(kind, norm, length, dim, False, norm, norm)
    return Case(about, vectors[0], vectors[1], value, vectors[2], vectors[3])


def captured_case(settings: Settings, path: str, text: str) -> Case:
    """Take queries, keys and values of some heads of a pretrained model on texts; other texts are to calibrate on.

    Heads are spread over all layers. Texts are the first ones that fill ``length`` tokens, cut there; if those are too
    few, the longest ones, cut to the shortest of them.

    Raises:
        ValueError: too few texts, or a model whose attentions are not all alike and to their own tokens.
    """
    source = load_source(path, allow_pickle=settings.allow_pickle)
    scale, causal = _attention_of(source, path)
    ids = _token_ids(source.tokenizer, Path(text), settings.length, 2 * settings.texts)
    own, other = (
        _some_heads(attention_inputs(source.model, input_ids=x), settings.heads) for x in ids.split(settings.texts)
    )
    dim = own[0].shape[-1]
    root = math.sqrt(scale * math.sqrt(dim))  # to the default scale, half of it on either side
    query, key, other_query, other_key = (x * root for x in (own[0], own[1], other[0], other[1]))
    norms = [float(x.norm(dim=-1).mean()) / dim**0.25 for x in (query, key)]
    about = About(Path(path).name, None, ids.shape[1], dim, causal, norms[0], norms[1])
    return Case(about, query, key, own[2], other_query, other_key)


def _attention_of(source: Source, path: str) -> tuple[float, bool]:
    """Scale and causality that all attentions of a model have."""
    if source.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, so that it cannot read a text; give a folder that has one.")
    attentions = find_attentions(source.model)
    if any(x.cross for x in attentions):
        raise ValueError(f"{path} attends to another sequence; give a model of one sequence, an encoder or a decoder.")
    ways = {(x.scale, x.causal) for x in attentions}
    if len(ways) > 1:
        raise ValueError(f"attentions of {path} differ in (scale, causal), got {sorted(ways)}; give another model.")
    return ways.pop()


def _token_ids(tokenizer: Any, path: Path, length: int, count: int) -> Tensor:
    """Token ids (count, L) of the first texts that fill ``length`` tokens, or of the longest ones."""

    def ids(text: str, most: int) -> list[int]:
        tokens: list[int] = tokenizer(text, truncation=True, max_length=most)["input_ids"]
        return tokens

    texts: list[tuple[int, str]] = []
    missing = count
    for text in read_texts(path):
        texts.append((len(ids(text, length)), text))
        missing -= texts[-1][0] == length
        if not missing:
            break
    if len(texts) < count:
        raise ValueError(f"{path} has {len(texts)} texts, and {count} are needed: half of them to calibrate on.")
    longest = sorted(texts, key=lambda x: x[0], reverse=True)[:count]  # stable: of equal ones the first
    return torch.tensor([ids(text, longest[-1][0]) for _, text in longest])


def _some_heads(layers: Layers, count: int) -> list[Tensor]:
    """Queries, keys and values (B, N, L, D) of at most ``count`` heads, each of a layer, spread over all layers."""
    heads = layers[0][0].shape[1]
    count = min(count, heads * len(layers))
    chosen = [(layers[j * len(layers) // count], j % heads) for j in range(count)]
    # A head of keys serves several heads of queries where those are grouped.
    return [
        torch.stack([layer[part][:, head * layer[part].shape[1] // heads] for layer, head in chosen], 1)
        for part in range(3)
    ]
