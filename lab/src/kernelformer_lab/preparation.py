"""Token shards of texts, written once and read by any number of processes: `prepare`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelformer.files import PART, write_json
from kernelformer.settings import SEED, SKIP_BAD, Settings, option
from kernelformer_lab.data.shards import (
    INDEX,
    Shard,
    ShardIndex,
    ShardSplit,
    ShardWriter,
    dtype_for,
    read_index,
    verify,
)
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.data.text_files import RULE, TextStream
from kernelformer_lab.data.tokenization import TOKENIZER, ShardTokenizer, rounds, shard_tokenizer
from kernelformer_lab.records import plain
from kernelformer_lab.training.checkpoints import locked

UNFINISHED = "prepare.json"  # there from the first file to the last
_ROUND = 1 << 22  # bytes that are tokenized at once, by all threads of the library
_OURS = re.compile(rf"(?:{'|'.join(SPLITS)})-\d+(?:\.documents)?\.bin|{re.escape(TOKENIZER)}|{UNFINISHED}|\..*{PART}")

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(Settings):
    """Settings of `prepare`; see `data.text_files.TextStream` for the texts."""

    texts: tuple[str, ...] = option(
        help="files (plain text, or .jsonl, .csv, .tsv with a column of texts) and folders",
        argument=True,
        path=True,
        shown="TEXTS",
    )
    tokenizer: str = option(help="bytes, a tokenizer.json, a folder with one, or a name on the hub", path=True)
    out: Path = option(help="folder for the shards and their index")
    column: str = option("text", "of the texts, in .jsonl, .csv and .tsv files")
    pattern: str | None = option(None, "which files of a folder, as a glob; default: **/*.txt")
    validation_share: float = option(0.05, "held out of texts without splits of their own", least=0)
    test_share: float = option(0.05, "the same for the test", least=0)
    shard_tokens: int = option(1 << 24, "tokens of a shard", least=1)
    skip_bad: bool = option(False, SKIP_BAD, switch=True)
    seed: int = option(0, f"{SEED} of the division of rows", least=0)


def prepare(
    settings: PrepareSettings,
    *,
    command: str = "",
    log: Log = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShardIndex:
    """Tokenize texts into shards.

    The folder gets ``SPLIT-NNNNN.bin``, plain little-endian integers (uint8 for bytes, uint16 or uint32 by the size of
    the vocabulary); ``SPLIT-NNNNN.documents.bin``, 64-bit integers that say after how many tokens of the split the
    documents end that end in this shard; ``tokenizer.json``; and at the end ``index.json`` (see
    `data.shards.ShardIndex`). Where the tokenizer has a token for the end of a text, it stands after every
    document; not after a plain text that was given as a file and is divided by position.

    Every file is whole or not there. A folder that is finished with the same settings and texts (names and sizes) is
    compared with its hashes and left as it is; an unfinished one is started anew; any other folder that is not empty is
    refused.

    Args:
        settings: what to make of which texts.
        command: what the user typed, for the record.
        log: called with sentences.
        progress: called with the bytes that were read so far, and with those of all texts.

    Raises:
        ValueError: texts, tokenizer or folder cannot be used; no text at all.
        TrainingError: another process is at it.

    Cost: about 3 million characters a second on one core; holds a shard of each split in memory.
    """
    tokenizer = shard_tokenizer(settings.tokenizer)
    shares = {"validation_share": settings.validation_share, "test_share": settings.test_share}
    stream = TextStream(
        settings.texts,
        column=settings.column,
        pattern=settings.pattern,
        seed=settings.seed,
        skip_bad=settings.skip_bad,
        raw=tokenizer.tokenizer is None,
        **shares,
    )
    out = settings.out.expanduser()
    made = {"settings": plain(settings), "texts": stream.sources(), "split_rule": RULE, "command": command}
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / ".lock").touch()
    with locked(out, "prepares shards in"):
        finished = _enter(out, made, tokenizer, log)
        if finished is not None:
            return finished
        with _writing(out):
            write_json(out / UNFINISHED, made)
            tokenizer.save(out)
        splits = _write_shards(out, stream, tokenizer, settings.shard_tokens, log, progress)
        _check_amounts(splits, stream, settings, log)
        name = dtype_for(tokenizer.size)
        index = ShardIndex(name, tokenizer.size, tokenizer.record(), settings.shard_tokens, splits, made)
        with _writing(out):
            index.write(out)
            (out / UNFINISHED).unlink()
    return index


def _write_shards(
    out: Path, stream: TextStream, tokenizer: ShardTokenizer, whole: int, log: Log, progress: Callable[[int, int], None]
) -> dict[str, ShardSplit]:
    """Tokenize all pieces, a round at a time, and write what they give."""

    def written(shard: Shard) -> None:
        log(f"{shard.file}: {shard.tokens:,} tokens, ends of documents: {shard.documents:,}")

    dtype = np.dtype(dtype_for(tokenizer.size)).newbyteorder("<")
    writers = {split: ShardWriter(out, split, dtype, whole, written) for split in SPLITS}
    for pieces in rounds(stream.pieces(), lambda x: len(x.content), _ROUND):
        for piece, tokens in zip(pieces, tokenizer.encode([x.content for x in pieces]), strict=True):
            if piece.complete and tokenizer.end is not None:
                tokens = np.append(tokens, tokens.dtype.type(tokenizer.end))
            with _writing(out):
                writers[piece.split].add(tokens, len(piece.content), ends=piece.ends)
        progress(stream.done, sum(stream.sizes))
    with _writing(out):
        return {split: ShardSplit(x.close(), x.text_bytes) for split, x in writers.items()}


def _check_amounts(splits: dict[str, ShardSplit], stream: TextStream, settings: PrepareSettings, log: Log) -> None:
    """Raise if there is nothing to train on; say what else is empty, and which rows were left out."""
    for remark in stream.remarks:
        log(remark)
    if not splits["train"].tokens:
        names = ", ".join(str(x["name"]) for x in stream.sources()[:3])
        raise ValueError(
            f"{names}: no text for training, {sum(stream.sizes):,} bytes in {len(stream.items)} files; give texts that "
            f"are not empty, or smaller shares than {settings.validation_share:g} and {settings.test_share:g}."
        )
    for split in SPLITS:
        if not splits[split].tokens:
            log(f"the {split} split is empty: a larger {split}_share, or files named {split}, would fill it")


def _enter(out: Path, made: dict[str, Any], tokenizer: ShardTokenizer, log: Log) -> ShardIndex | None:
    """Look at what is in the folder: the index of a finished one, or None when it is ready to be filled."""
    if (out / INDEX).exists():
        index = read_index(out)
        _check_same(out, index, made, tokenizer)
        verify(out, index)
        log(f"{out} is finished, and all its files are as they were written; nothing is left to do")
        return index
    there = [x for x in sorted(out.iterdir()) if x.name != ".lock"]
    others = [x.name for x in there if not _OURS.fullmatch(x.name)]
    if others or (there and not (out / UNFINISHED).exists()):
        names = ", ".join((others or [x.name for x in there])[:5])
        raise ValueError(f"{out} is not empty and holds no shards of ours, found {names}; give another --out.")
    if there:
        log(f"{out} holds an unfinished preparation; starting anew")
        with _writing(out):
            for path in there:
                path.unlink()
    return None


def _check_same(out: Path, index: ShardIndex, made: dict[str, Any], tokenizer: ShardTokenizer) -> None:
    """Raise if a finished folder was made with other settings or another tokenizer, or of other texts."""
    before = {**index.made["settings"], "texts": index.made["texts"], "tokenizer": index.tokenizer}
    now = {**made["settings"], "texts": made["texts"], "tokenizer": tokenizer.record()}
    skipped = ("out",)  # the folder may have been renamed
    different = [
        f"{name} {before.get(name)!r} and {now[name]!r}"
        for name in now
        if name not in skipped and before.get(name) != now[name]
    ]
    if different:
        raise ValueError(
            f"{out} is finished with other settings, there and here: {'; '.join(different)}. Take the same settings, "
            f"or another folder by --out."
        )


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn errors of writing into one with a way out."""
    try:
        yield
    except OSError as problem:
        raise ValueError(
            f"{out} cannot be written: {problem.strerror}; make room or give another folder by --out, and start again: "
            f"what is unfinished there is started anew."
        ) from None
