"""``kernelformer prepare``."""

from __future__ import annotations

import shlex
import sys

from kernelformer.cli.common import console, plain_errors, progress_bar, say
from kernelformer.cli.derive import takes
from kernelformer.formatting import human_bytes
from kernelformer.pipelines.prepare_settings import PrepareSettings


@takes(PrepareSettings)
def prepare(settings: PrepareSettings) -> None:
    """Tokenize texts once, into shards that `train shards` reads; also corpora larger than the memory."""
    with plain_errors():
        from kernelformer.pipelines.prepare import prepare as prepare_shards

        with progress_bar() as progress:
            bar = progress.add_task("", total=None)
            index = prepare_shards(
                settings,
                command=shlex.join(["kernelformer", *sys.argv[1:]]),
                log=lambda text: say(progress, bar, text),
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        for name, split in index.splits.items():
            documents = f"{split.documents:,} document{'s' * (split.documents != 1)}"
            console.print(f"{name}: {split.tokens:,} tokens of {documents}, {human_bytes(split.text_bytes)} of text")
        console.print(f"shards: {settings.out}   train by: kernelformer train shards --data {settings.out}")
