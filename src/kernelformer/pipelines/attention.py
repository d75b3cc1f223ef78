"""Attention matrices of a pretrained model and of its converted self, for a sentence or a protein (Performer, C.4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from kernelformer.data.texts import longest
from kernelformer.hf import conversion, convert, load
from kernelformer.hf.load import Source, load_source
from kernelformer.modules.spec import AttentionSpec, parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.reports.attention_pictures import Pair, attention_pairs, draw_pairs

LONGEST = 1024  # tokens: a picture has not many more points


@dataclass(frozen=True)
class AttentionPair:
    """Attention matrices of a model and of its converted self.

    Args:
        pairs: one for each attention.
        tokens: as the tokenizer reads the text.
        names: of both models.
    """

    pairs: list[Pair]
    tokens: list[str]
    names: tuple[str, str]


def run(
    original: str | Path,
    converted: str | Path | None = None,
    *,
    attention: str | None = None,
    text: str | None = None,
    sequence: str | None = None,
    allow_pickle: bool = False,
) -> AttentionPair:
    """Look at both models on one text.

    Args:
        original: folder of a pretrained model.
        converted: folder of `kernelformer.hf.save`; or instead
        attention: ``method:option=value``, to convert a copy of the original here.
        text: a sentence; or instead
        sequence: residues of a protein, one letter each.
        allow_pickle: whether weights may be read from a pickle, which can run code.
    """
    if (converted is None) == (attention is None):
        raise ValueError("give the folder of a converted model, or an attention to convert a copy with: one of them.")
    if (text is None) == (sequence is None):
        raise ValueError("give a text or the sequence of a protein: one of them.")
    method, options = ("", {}) if attention is None else parse_method(attention)
    with silent_libraries():
        source = load_source(original, allow_pickle=allow_pickle)
    if source.model.config.is_encoder_decoder:
        raise ValueError(
            f"{original} is an encoder with a decoder, whose attentions are of different texts; pictures are for "
            f"models of one text. kernelformer.reports.attention_pictures.attention_pairs gives the matrices."
        )
    if source.tokenizer is None:
        raise ValueError(f"{original} has no tokenizer that could read a text.")
    inputs = read_text(source.tokenizer, text) if text is not None else read_protein(source.tokenizer, sequence or "")
    ids: Tensor = inputs["input_ids"]
    _check_length(source, ids.shape[1])
    if attention is None:
        assert converted is not None
        model = load(converted)
    else:
        model = convert(copy.deepcopy(source.model), method, **options)
    pairs = attention_pairs(source.model, model, inputs)
    return AttentionPair(
        pairs, token_texts(source.tokenizer, ids[0].tolist()), (Path(original).resolve().name, spec(model))
    )


def _check_length(source: Source, length: int) -> None:
    room = min(LONGEST, longest(source) or LONGEST)
    if length > room:
        raise ValueError(f"the text has {length} tokens, a picture of this model takes {room}; give a shorter one.")


def read_text(tokenizer: Any, text: str) -> dict[str, Tensor]:
    """A sentence as inputs of a model."""
    inputs = dict(tokenizer(text, return_tensors="pt"))
    if inputs["input_ids"].numel() == 0 or not text.strip():
        raise ValueError(f"there is nothing to read in the text {text!r}.")
    return inputs


def read_protein(tokenizer: Any, sequence: str) -> dict[str, Tensor]:
    """Residues as inputs of a model, one token for each; written apart or together, as the tokenizer takes them.

    Raises:
        ValueError: the tokenizer does not know them.
    """
    residues = "".join(sequence.split()).upper()
    if not residues.isalpha():
        raise ValueError(f"a protein is a sequence of letters, got {sequence!r:.60}.")
    for written in (" ".join(residues), residues):
        inputs = dict(tokenizer(written, return_tensors="pt"))
        ids = inputs["input_ids"][0].tolist()
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        own = [x for x in ids if x not in special]
        if len(own) == len(residues) and tokenizer.unk_token_id not in own:
            return inputs
    raise ValueError(
        f"the tokenizer of this model does not read {residues[:12]!r} as one token a residue; is it of proteins?"
    )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token stands for, its name where that is blank."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [tokenizer.decode([x]).strip() or str(name) for x, name in zip(ids, names, strict=True)]


def spec(model: Any) -> str:
    """The attentions of a converted model in one line."""
    layers = conversion(model).layers
    names = dict.fromkeys(str(AttentionSpec.make(x.method, **x.options)) for x in layers)
    return ", ".join(names)


def table(result: AttentionPair) -> Table:
    """For the terminal: the distance of each attention's heads."""
    out = Table(title=f"Total variation distance, {result.names[0]} and {result.names[1]}, {len(result.tokens)} tokens")
    out.add_column("layer", justify="right")
    out.add_column("attention", no_wrap=True)
    for name in ("mean", "nearest head", "farthest head"):
        out.add_column(name, justify="right", no_wrap=True)
    for number, pair in enumerate(result.pairs):
        distance = pair.distance[0]
        ends = (f"{distance[i]:.3f} ({i})" for i in (int(distance.argmin()), int(distance.argmax())))
        out.add_row(str(number), pair.name, f"{distance.mean():.3f}", *ends)
    return out


def record(result: AttentionPair) -> dict[str, Any]:
    """The total variation distances of all heads, by attention, as plain values."""
    layers = [{"attention": x.name, "total_variation": x.distance[0].tolist()} for x in result.pairs]
    return {"names": list(result.names), "tokens": len(result.tokens), "layers": layers}


def picture(
    result: AttentionPair, path: Path, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> None:
    """A grid of layers and heads, or one head and its difference; see `draw_pairs`."""
    title = f"Attention of {result.names[0]}, and with {result.names[1]}"
    draw_pairs(result.pairs, result.tokens, path, names=result.names, title=title, layers=layers, heads=heads)
