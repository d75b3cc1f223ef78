"""``kernelformer prepare``."""

from __future__ import annotations

import shlex
import sys

from kernelformer.cli.common import Json, console, following, plain_errors, show_json
from kernelformer.cli.options import takes
from kernelformer.formatting import human_bytes
from kernelformer_lab.preparation import PrepareSettings
from kernelformer_lab.preparation import prepare as prepare_shards


@takes(PrepareSettings)
def prepare(settings: PrepareSettings, as_json: Json = False) -> None:
    """Tokenize texts once, into shards that `train shards` reads; also corpora larger than the memory."""
    with plain_errors():
        with following() as job:
            index = prepare_shards(
                settings, command=shlex.join(["kernelformer", *sys.argv[1:]]), log=job.log, progress=job.reach
            )
        for name, split in index.splits.items():
            documents = f"{split.documents:,} document{'s' * (split.documents != 1)}"
            console.print(f"{name}: {split.tokens:,} tokens of {documents}, {human_bytes(split.text_bytes)} of text")
        if as_json:
            names = ("tokens", "documents", "text_bytes")
            splits = {name: {x: getattr(split, x) for x in names} for name, split in index.splits.items()}
            show_json({"out": str(settings.out), "splits": splits})
        console.print(f"shards: {settings.out}   train by: kernelformer train shards --data {settings.out}")
