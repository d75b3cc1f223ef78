"""Attention matrices of a model and of its conversion, side by side (Performer, C.4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.texts import longest
from kernelformer.errors import shape
from kernelformer.formatting import visible
from kernelformer.hf import conversion, convert, cores, load
from kernelformer.hf.attend import attend_exactly
from kernelformer.hf.find import probing
from kernelformer.hf.load import Source, load_source
from kernelformer.modules.calibration import evaluating
from kernelformer.modules.spec import AttentionSpec, parse_method
from kernelformer.quiet import silent_libraries
from kernelformer_lab.figures import drawing
from kernelformer_lab.figures import table as text_table

_CALL = ("is_causal", "key_mask", "scale", "query_mask", "bias", "max_distance", "slope", "num_prefix", "algorithm")


ZERO = -1e-6  # below it a weight is negative, and not rounded
LEGEND = "TV: total variation distance of rows, mean over queries (0 equal, 1 apart). Colours by the root of a weight."


class Pair(NamedTuple):
    """One attention of both models, on the same tokens.

    Args:
        name: of the module in the converted model; a module that is called again has the number of the call behind it.
        exact: (B, H, L, S), the original's weights.
        converted: (B, H, L, S), those of the converted model.
    """

    name: str
    exact: Tensor
    converted: Tensor

    @property
    def distance(self) -> Tensor:
        """Total variation distance of the two matrices, (B, H)."""
        return total_variation(self.exact, self.converted)


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Mean over queries of half the L1 distance of two rows: 0 where they are equal, 1 where nothing is in common.

    Rows of signed and of unnormalized methods are no distributions; there it may be larger.

    Args:
        one: (*, L, S).
        other: (*, L, S).

    Returns:
        (*).
    """
    return (one - other).abs().sum(-1).mean(-1) / 2


def attention_pairs(original: Any, converted: Any, inputs: Mapping[str, Any]) -> list[Pair]:
    """The weights of every attention of two models, each at the queries and keys that it has there itself.

        A = attention(Q, K, I)      unit vectors in place of the values      (Performer, C.4)

    Beyond the first layer queries and keys differ too: errors of earlier layers are in them, and whatever tuning
    changed.

    Args:
        converted: by `kernelformer.hf.convert`, or loaded by `kernelformer.hf.load`; with or without a head, as long as
            the attentions are those of the original.
        inputs: of both models, ``input_ids`` and so on.

    Returns:
        One for each call of an attention, in the order of the calls.

    Raises:
        ValueError: the models do not have the same attentions.

    Cost: O(B H L S) memory for each attention.
    """
    for which, model in (("original", original), ("converted", converted)):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"the {which} model must be one of transformers, got {type(model).__name__}.")
    if hasattr(original, "conversion"):
        raise ValueError(f"the original {type(original).__name__} is converted itself; load the pretrained one.")
    kept = [x.name for x in conversion(converted).layers if x.reason]  # as the original has them: nothing to compare
    every, ours = _exact_matrices(original, inputs), _converted_matrices(converted, inputs)
    exact = [x for x in every if not any(_same(x[0], name) for name in kept)]
    if len(exact) != len(ours):
        raise ValueError(
            f"the original calls {len(exact)} attentions and the converted model {len(ours)}; were they made from the "
            f"same model? Attentions inside torch.nn.MultiheadAttention cannot be seen in an original."
        )
    pairs, count = [], dict[str, int]()
    for (first, want), (second, got) in zip(exact, ours, strict=True):
        if not _same(first, second):
            raise ValueError(f"the original attends in {first}, the converted model in {second}: other models.")
        if want.shape != got.shape:
            raise ValueError(f"{second} has weights of shapes {shape(want)} and {shape(got)}: other models.")
        count[second] = count.get(second, 0) + 1
        pairs.append(Pair(second if count[second] == 1 else f"{second} (call {count[second]})", want, got))
    return pairs


def _same(first: str, second: str) -> bool:
    """Tell whether two names mean the same attention, in models with and without a head."""
    return f".{first}".endswith(f".{second}") or f".{second}".endswith(f".{first}")


def _exact_matrices(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Name and weights of every call, through transformers' own attention, with its masks and biases."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: list[tuple[str, Tensor]] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        unit = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        weights, _ = attend_exactly(module, query, key, unit, mask, **options)  # (B, L, H, S)
        seen.append((names[id(module)], weights.transpose(1, 2)))
        return attend_exactly(module, query, key, value, mask, **options)

    with torch.no_grad(), evaluating(model), probing(model, attend):
        model(**inputs)
    return seen


def _converted_matrices(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Name and weights of every call of a core."""
    seen: list[tuple[str, Tensor]] = []

    def watch(name: str, core: Any) -> Any:
        def record(_: nn.Module, given: tuple[Tensor, ...], options: dict[str, Any], out: Any) -> None:
            own = {key: options[key] for key in _CALL if key in options}
            seen.append((name, core.attention_matrix(given[0], given[1], **own)))

        return core.register_forward_hook(record, with_kwargs=True)

    handles = [watch(name, core) for name, core in cores(model).items()]
    try:
        with torch.no_grad(), evaluating(model):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def spread(count: int, wanted: int) -> list[int]:
    """``wanted`` numbers below ``count``, evenly apart from the first to the last; all where there are not more."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [0]
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def chosen(pairs: Sequence[Pair], layers: Sequence[int] | None, heads: Sequence[int] | None) -> list[tuple[int, int]]:
    """Choose attentions and heads to draw, (attention, head) row by row; None: a few, evenly apart."""
    fewest = min(x.exact.shape[1] for x in pairs)
    rows = spread(len(pairs), 3) if layers is None else list(layers)
    for row in rows:
        if not 0 <= row < len(pairs):
            raise ValueError(f"these models have attentions 0 to {len(pairs) - 1}, got layer {row}.")
    columns = spread(fewest, 4) if heads is None else list(heads)
    for column in columns:
        if not 0 <= column < fewest:
            raise ValueError(f"these attentions have heads 0 to {fewest - 1}, got head {column}.")
    return [(row, column) for row in rows for column in columns]


def label(token: str, longest: int = 12) -> str:
    """Write a token as it can be drawn: nothing invisible, nothing that the font lacks, and not too long."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    shown = visible(token)
    shown = "".join(x if font.get_char_index(ord(x)) else f"<U+{ord(x):04X}>" for x in shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def draw_pairs(
    pairs: Sequence[Pair],
    tokens: Sequence[str],
    path: Path,
    *,
    names: tuple[str, str] = ("original", "converted"),
    title: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """Draw the first sample's matrices as a PNG: a grid of pairs, or of one head a large pair and its difference.

    Both matrices of a pair have one scale of colours, from 0 to their largest weight, by its square root, so that small
    weights are seen too; weights below zero have a colour of their own.

    Args:
        pairs: of `attention_pairs`.
        tokens: one for each query and key; they are labels where they fit.
        layers: numbers of attentions, from 0; None: three, evenly apart.
        heads: numbers of heads, from 0; None: four, evenly apart.
    """
    places = chosen(pairs, layers, heads)
    for pair in pairs:
        if pair.exact.shape[-2:] != (len(tokens), len(tokens)):
            raise ValueError(f"{pair.name} has {shape(pair.exact)} weights, and there are {len(tokens)} tokens.")
    import matplotlib as mpl

    single, columns = len(places) == 1, len({column for _, column in places})
    least, most, matrices = (3.2, 8.0, 3) if single else (1.5, 2.3, 2)
    side = min(most, max(least, 0.1 * len(tokens)))  # of a matrix, in inches
    points = min(8.0, 65 * side / len(tokens))  # font size at which every token has a line
    labels = [label(x) for x in tokens] if points >= 4.5 else []
    room = max(map(len, labels), default=3) * 0.0086 * points
    rows = len(places) // columns
    size = (max(5.2, room + columns * matrices * (side + 0.4)), rows * (side + 0.4) + room + 0.7)
    with mpl.rc_context({"font.size": 7}), drawing(path, size, rows, columns * matrices, dpi=160) as (figure, axes):
        signed = False
        for (row, column), cell in zip(places, axes.reshape(len(places), matrices), strict=True):
            pair = pairs[row]
            weights = [x[0, column].float().cpu().numpy() for x in (pair.exact, pair.converted)]
            distance = f"TV {float(pair.distance[0, column]):.3f}"
            titles = (f"layer {row}, head {column}\n{names[0]}", f"{distance}\n{names[1]}")
            signed |= _draw_pair(figure, cell, weights, titles if single else (titles[0], f"{distance}\nconverted"))
        for axis in axes.flat:
            axis.tick_params(length=2, pad=2)
            axis.locator_params(integer=True, nbins=4)
            if labels:
                axis.set_xticks(range(len(labels)), labels, rotation=90, size=points)
                axis.set_yticks(range(len(labels)), labels, size=points)
            axis.label_outer()
        figure.suptitle(title, x=0.01, ha="left", size=10)
        figure.supxlabel(LEGEND + (" Orange: below zero." if signed else ""), x=0.01, ha="left", color="#5b6270")


def _draw_pair(figure: Any, cell: Sequence[Any], weights: Sequence[Any], titles: Sequence[str]) -> bool:
    """Draw both matrices with their scale, and in a third place their difference; True: some weights are below 0."""
    import matplotlib as mpl
    from matplotlib.colors import CenteredNorm, PowerNorm

    most, signed = max(float(x.max()) for x in weights), min(float(x.min()) for x in weights) < ZERO
    colours = mpl.colormaps["Blues"].with_extremes(under="#d55e00")
    norm = PowerNorm(0.5, vmin=ZERO, vmax=max(most, -ZERO))
    for axis, x, text in zip(cell, weights, titles, strict=False):
        image = axis.imshow(x, cmap=colours, norm=norm, aspect="auto")
        axis.set_title(text, size=7.5, pad=2, loc="left")
    bar = figure.colorbar(image, ax=cell[1], extend="min" if signed else "neither")
    bar.set_ticks([0, most / 4, most], labels=["0", f"{most / 4:.2g}", f"{most:.2g}"])
    for axis in cell[2:]:
        image = axis.imshow(weights[1] - weights[0], cmap="RdBu_r", norm=CenteredNorm(), aspect="auto")
        axis.set_title("difference", size=7.5, pad=2, loc="left")
        figure.colorbar(image, ax=axis)
    return signed


LONGEST = 1024  # tokens: a picture has not many more points


@dataclass(frozen=True)
class AttentionPair:
    """Attention matrices of a model and of its converted self.

    Args:
        tokens: as the tokenizer reads the text.
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
            f"models of one text. kernelformer_lab.analysis.attention_pictures.attention_pairs gives the matrices."
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
    """Decode each token; its name where its text is blank."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [tokenizer.decode([x]).strip() or str(name) for x, name in zip(ids, names, strict=True)]


def spec(model: Any) -> str:
    """The attentions of a converted model in one line."""
    layers = conversion(model).layers
    names = dict.fromkeys(str(AttentionSpec.make(x.method, **x.options)) for x in layers)
    return ", ".join(names)


def table(result: AttentionPair) -> Table:
    """Table for the terminal with the distances of each attention's heads."""
    rows = []
    for number, pair in enumerate(result.pairs):
        distance = pair.distance[0]
        ends = (f"{distance[i]:.3f} ({i})" for i in (int(distance.argmin()), int(distance.argmax())))
        rows.append((str(number), pair.name, f"{distance.mean():.3f}", *ends))
    title = f"Total variation distance, {result.names[0]} and {result.names[1]}, {len(result.tokens)} tokens"
    return text_table(title, ("layer", "attention", "mean", "nearest head", "farthest head"), rows, left=2)


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
