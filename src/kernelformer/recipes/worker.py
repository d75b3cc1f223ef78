"""One run of a comparison in a process of its own, so that its memory is its own."""

from __future__ import annotations

import json
import sys

import torch

from kernelformer.training.run import Run, StoppedError, TrainingError
from kernelformer.training.session import train


def main(request: str) -> int:
    """Train what the request says; lines on stdout, the reason of a failure on stderr."""
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    try:
        train(
            Run.from_json(asked["run"]),
            asked["folder"],
            resume=asked["resume"],
            command=asked["command"],
            tell=lambda text: print(text, flush=True),
        )
    except (ValueError, OSError, TrainingError) as problem:
        print(problem, file=sys.stderr)
        return 130 if isinstance(problem, StoppedError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
