"""Pretrained models, their tokenizers and texts for them, read with care: nothing random, no code of others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.readers import read_texts as texts_of_file
from kernelformer.data.text_rows import TextRows, batches
from kernelformer.errors import choice, positive_int
from kernelformer.hf.pretrained import (
    TASKS,
    attempt,
    auto,
    check_folder,
    classes,
    fitting,
    gguf_file,
    has_safe_weights,
    hub_options,
    kind_of,
    load_gguf,
    load_tokenizer,
)

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
    """Read a model: a folder of transformers, a name on the hub, a ``.gguf`` file, or a folder with one.

    Args:
        path: of the folder or the file, or the name.
        task: which head it gets: ``masked``, ``causal``, ``seq2seq``, none (``encoder``), or that of the folder.
        allow_pickle: read pickled weights too, by torch's loader that makes tensors and nothing else.

    Raises:
        ValueError: not a model, converted already, pickled without ``allow_pickle``, or weights that would be random.
    """
    choice("task", task, TASKS)
    folder = Path(path)
    packed = gguf_file(folder)
    if packed is not None:
        model, remarks = load_gguf(packed, task)
        tokenizer = load_tokenizer(packed.parent, gguf_file=packed.name)
        return Source(model, tokenizer, str(path), "causal", remarks)
    if folder.is_file():
        raise ValueError(f"{path} is a file and not a .gguf; give the folder of a model, or a name on the hub.")
    if not folder.is_dir() and not _HUB_NAME.fullmatch(str(path)):
        raise ValueError(f"there is no folder {path}, and a name on the hub is OWNER/NAME.")
    if folder.is_dir():
        check_folder(folder)
    hub = {} if folder.is_dir() else hub_options(str(path))
    config = attempt(path, lambda: auto("AutoConfig").from_pretrained(path, trust_remote_code=False, **hub))
    safe = not folder.is_dir() or has_safe_weights(folder, allow_pickle)
    options: dict[str, Any] = {"weights_only": True, "trust_remote_code": False, "dtype": torch.float32}
    # Of a name on the hub nobody knows what it has: None is whichever there is.
    options["use_safetensors"] = safe if folder.is_dir() or not allow_pickle else None

    def load(kind: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
        found: tuple[Any, dict[str, Any]] = attempt(
            path, lambda: kind.from_pretrained(path, config=config, output_loading_info=True, **hub, **options, **more)
        )
        return found

    model, remarks = fitting(path, classes(config, task), load)
    if config.dtype not in (None, torch.float32):
        remarks.append(f"weights in {str(config.dtype).removeprefix('torch.')} were read as float32")
    return Source(model.eval(), load_tokenizer(path, **hub), str(path), kind_of(model), remarks)


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file that are not blank: ``.jsonl`` with ``text`` in each line, or one text a line; UTF-8.

    Raises:
        ValueError: no such file, a line that is not UTF-8 or not JSON, or not one text.
    """
    texts = [x for x in texts_of_file(Path(path)) if x.strip()]
    if not texts:
        raise ValueError(f"{path} has no text in it: it is empty, or all its lines are blank.")
    return texts


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


def first_token(source: Source) -> int:
    """That a decoder begins with."""
    return getattr(source.model.config, "decoder_start_token_id", None) or 0


def rows_for(source: Source, texts: Sequence[str], length: int) -> TextRows:
    """Rows of inputs for a source; see `check_readable`."""
    check_readable(source, texts)
    return TextRows(texts, source.tokenizer, length, source.task)


def inputs_for(source: Source, texts: Sequence[str], length: int, batch: int, seed: int) -> Any:
    """`batches` for a source; see `check_readable`."""
    check_readable(source, texts)
    return batches(texts, source.tokenizer, length, batch, seed, task=source.task, start=first_token(source))


def made_up_inputs(source: Source, length: int, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """The same without texts: random tokens, or noise for models of images."""
    config, gen = source.model.config, torch.Generator().manual_seed(seed)
    from kernelformer.hf.find import try_inputs

    tried = try_inputs(source.model)
    while True:
        if "input_ids" not in tried:
            yield {name: torch.randn(batch, *x.shape[1:], generator=gen, dtype=x.dtype) for name, x in tried.items()}
            continue
        size = config.get_text_config().vocab_size
        ids = torch.randint(size, (2, batch, length), generator=gen)
        yield {name: torch.ones_like(ids[0]) if "mask" in name else ids[i % 2] for i, name in enumerate(tried)}
