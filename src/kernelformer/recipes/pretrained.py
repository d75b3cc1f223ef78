"""Pretrained models, their tokenizers and texts for them, read with care: nothing random, no code of others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.errors import choice, integer, positive_int
from kernelformer.recipes.weights import (
    TASKS,
    attempt,
    auto,
    check_folder,
    classes,
    fitting,
    has_safe_weights,
    kind_of,
    load_gguf,
    load_tokenizer,
)
from kernelformer.tasks.readers import read_texts as texts_of_file

MASKED = 0.15  # of the tokens, for masked models
LENGTH = 256  # tokens of a text, where nobody says
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """A pretrained model and what belongs to it.

    Args:
        model: of transformers, in evaluation mode.
        tokenizer: None where the folder has none.
        path: as it was given.
        task: one of `TASKS` but not ``auto``: how inputs for it are made.
        remarks: what a user should know of the way it was read.
    """

    model: Any
    tokenizer: Any
    path: str
    task: str = "encoder"
    remarks: list[str] = field(default_factory=list)


def load_source(path: str | Path, *, task: str = "auto", allow_pickle: bool = False) -> Source:
    """Read a model: a folder of transformers, a name on the hub, or a folder with one ``.gguf`` file.

    Args:
        path: of the folder, or the name.
        task: which head it gets: ``masked``, ``causal``, ``seq2seq``, none (``encoder``), or that of the folder.
        allow_pickle: read pickled weights too, by torch's loader that makes tensors and nothing else.

    Raises:
        ValueError: not a model, converted already, pickled without ``allow_pickle``, or weights that would be random.
    """
    choice("task", task, TASKS)
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"{path} is a file; give the folder of a model, or a name on the hub.")
    if not folder.is_dir() and not _HUB_NAME.fullmatch(str(path)):
        raise ValueError(f"there is no folder {path}, and a name on the hub is OWNER/NAME.")
    packed = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if packed and not (folder / "config.json").is_file():
        model, remarks = load_gguf(folder, packed, task)
        return Source(model, load_tokenizer(folder, gguf_file=packed[0].name), str(path), "causal", remarks)
    if folder.is_dir():
        check_folder(folder)
    config = attempt(path, lambda: auto("AutoConfig").from_pretrained(path, trust_remote_code=False))
    safe = not folder.is_dir() or has_safe_weights(folder, allow_pickle)
    options: dict[str, Any] = {"weights_only": True, "trust_remote_code": False, "dtype": torch.float32}
    # Of a name on the hub nobody knows what it has: None is whichever there is.
    options["use_safetensors"] = safe if folder.is_dir() or not allow_pickle else None

    def load(kind: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
        found: tuple[Any, dict[str, Any]] = attempt(
            path, lambda: kind.from_pretrained(path, config=config, output_loading_info=True, **options, **more)
        )
        return found

    model, remarks = fitting(path, classes(config, task), load)
    if config.dtype not in (None, torch.float32):
        remarks.append(f"weights in {str(config.dtype).removeprefix('torch.')} were read as float32")
    return Source(model.eval(), load_tokenizer(path), str(path), kind_of(model), remarks)


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file that are not blank: ``.jsonl`` with ``text`` in each line, or one text a line; UTF-8.

    Raises:
        ValueError: no such file, a line that is not UTF-8 or not JSON, or not one text.
    """
    texts = [x for x in texts_of_file(Path(path)) if x.strip()]
    if not texts:
        raise ValueError(f"{path} has no text in it: it is empty, or all its lines are blank.")
    return texts


def batches(
    texts: Sequence[str],
    tokenizer: Any,
    length: int,
    batch: int,
    seed: int = 0,
    *,
    task: str = "encoder",
    start: int = 0,
    skip: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Inputs of a model without end: texts in the order of a seed, in another one each time they come around.

    Each text is a row of its own, cut at ``length`` and padded to the longest of its batch; for masked models some of
    its tokens are hidden, which is what they are made for. For causal models texts are joined, with the token that ends
    a text between them, and cut into rows of ``length``: there is no padding.

    Args:
        texts: at least one.
        tokenizer: of transformers.
        length: tokens of a row.
        batch: rows.
        seed: of the order.
        task: of `Source`; ``seq2seq`` gets the text as ``decoder_input_ids`` too, after ``start``.
        start: token that a decoder begins with.
        skip: batches to leave out: a run that was stopped after so many goes on with the same ones.
    """
    positive_int("length", length)
    positive_int("batch", batch)
    rows: Sequence[Any] = packed_rows(texts, tokenizer, length) if task == "causal" else texts
    place = integer("skip", skip, at_least=0) * batch
    while True:
        chosen = [rows[i] for i in _places(place, batch, len(rows), seed)]
        place += batch
        if task == "causal":
            ids = torch.stack(chosen)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            continue
        found = tokenizer(chosen, truncation=True, max_length=length, padding=True, return_tensors="pt")
        inputs = {x: found[x] for x in ("input_ids", "attention_mask")}
        if task == "masked":
            inputs["input_ids"] = mask_tokens(inputs["input_ids"], tokenizer, seed * 1_000_003 + place)[0]
        if task == "seq2seq":
            ids = inputs["input_ids"]
            first = torch.full_like(ids[:, :1], start)
            inputs["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
        yield inputs


def some_texts(source: Source, texts: Sequence[str], length: int, rows: int, seed: int) -> tuple[list[str], int]:
    """As many texts, in the order of a seed, as `batches` needs for so many rows, and how many rows they make."""
    chosen = [texts[i] for i in _places(0, len(texts), len(texts), seed)]
    if source.task != "causal":
        return chosen[:rows], min(rows, len(texts))
    count = 0
    for number, ids in enumerate(_tokens(chosen, source.tokenizer), 1):
        count += len(ids)
        if count >= rows * length:
            return chosen[:number], rows
    return chosen, max(1, count // length)


def _tokens(texts: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Of each text, with the token that ends one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(texts), 64):
        for ids in tokenizer(list(texts[first : first + 64]), add_special_tokens=False)["input_ids"]:
            yield [*ids, *end]


def packed_rows(texts: Sequence[str], tokenizer: Any, length: int) -> list[Tensor]:
    """Rows of ``length`` tokens; one shorter row where all texts together have less."""
    stream = [x for ids in _tokens(texts, tokenizer) for x in ids]
    if not stream:
        raise ValueError("the texts have not one token.")
    whole = len(stream) // length
    rows = torch.tensor(stream[: whole * length] if whole else stream)
    return list(rows.view(max(1, whole), -1))


def mask_tokens(ids: Tensor, tokenizer: Any, seed: int, share: float = MASKED) -> tuple[Tensor, Tensor]:
    """Tokens with some of the plain ones hidden, and which (bool), by a seed."""
    plain = ~torch.isin(ids, torch.tensor(sorted(tokenizer.all_special_ids)))
    hidden = plain & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < share)
    return ids.masked_fill(hidden, tokenizer.mask_token_id), hidden


def _places(first: int, count: int, total: int, seed: int) -> list[int]:
    """Numbers ``first`` to ``first + count`` of an endless order of ``total`` rows, anew shuffled in each round."""
    orders: dict[int, list[int]] = {}
    found = []
    for place in range(first, first + count):
        turn = place // total
        if turn not in orders:
            orders[turn] = torch.randperm(
                total, generator=torch.Generator().manual_seed(seed * 1_000_003 + turn)
            ).tolist()
        found.append(orders[turn][place % total])
    return found


def longest(source: Source) -> int | None:
    """Tokens that a model has positions for; None: no limit is known."""
    found = [getattr(source.model.config.get_text_config(), "max_position_embeddings", None)]
    found.append(getattr(source.tokenizer, "model_max_length", None))  # tokenizers without a limit say 1e30
    limits = [x for x in found if isinstance(x, int) and 0 < x < 10**9]
    return min(limits, default=None)


def check_length(source: Source, length: int | None) -> int:
    """As asked for, if the model has so many positions; `LENGTH` or what it has where nobody asks."""
    limit = longest(source)
    if length is None:
        return LENGTH if limit is None else min(LENGTH, limit)
    if limit is not None and length > limit:
        raise ValueError(f"length is {length}, and {source.path} has positions for {limit} tokens; give a smaller one.")
    return positive_int("length", length)


def check_readable(source: Source, texts: Sequence[str]) -> None:
    """That a model can read texts.

    Raises:
        ValueError: it has no tokenizer, or one that knows not one token of the first texts.
    """
    if source.tokenizer is None:
        raise ValueError(
            f"{source.path} has no tokenizer (tokenizer.json, or vocab.txt for BERT's kin), so that it cannot read "
            f"texts; add one, or leave the texts out."
        )
    unknown = source.tokenizer.unk_token_id
    some = source.tokenizer([x[:2000] for x in texts[:8]], add_special_tokens=False)["input_ids"]
    seen = [x for row in some for x in row]
    if not seen or (unknown is not None and all(x == unknown for x in seen)):
        raise ValueError(
            f"the tokenizer of {source.path} knows nothing of these texts: {texts[0][:40]!r} has no token but the "
            f"unknown one. Give texts that the model was made for."
        )


def inputs_for(source: Source, texts: Sequence[str], length: int, batch: int, seed: int, skip: int = 0) -> Any:
    """`batches` for a source; see `check_readable`."""
    check_readable(source, texts)
    config = source.model.config
    start = getattr(config, "decoder_start_token_id", None) or 0
    return batches(texts, source.tokenizer, length, batch, seed, task=source.task, start=start, skip=skip)


def made_up_inputs(source: Source, length: int, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """The same without texts: random tokens, or noise for models of images."""
    config, gen = source.model.config, torch.Generator().manual_seed(seed)
    from kernelformer.hf.attentions import try_inputs

    tried = try_inputs(source.model)
    while True:
        if "input_ids" not in tried:
            yield {name: torch.randn(batch, *x.shape[1:], generator=gen, dtype=x.dtype) for name, x in tried.items()}
            continue
        size = config.get_text_config().vocab_size
        ids = torch.randint(size, (2, batch, length), generator=gen)
        yield {name: torch.ones_like(ids[0]) if "mask" in name else ids[i % 2] for i, name in enumerate(tried)}
