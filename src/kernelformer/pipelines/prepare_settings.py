"""Settings of the preparation of token shards, which are also the options of ``kernelformer prepare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelformer.settings import SEED, SKIP_BAD, Settings, option


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(Settings):
    """What to make of which texts.

    Args:
        texts: paths of files and folders, see `data.text_stream.TextStream`.
        tokenizer: "bytes", a ``tokenizer.json``, a folder with one or of a run, or a name on the hub.
        out: folder of the shards.
        column: of the texts in ``.jsonl``, ``.csv`` and ``.tsv`` files.
        pattern: which files of a folder, as a glob; None: "**/*.txt".
        validation_share: of texts that have no splits of their own.
        test_share: the same for the test; training has the rest.
        shard_tokens: tokens of a shard.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        seed: of the division of rows.
    """

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
