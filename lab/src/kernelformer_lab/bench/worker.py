"""The measuring process: reads one job from stdin, calls its function and writes the result to stdout.

`measure.harness.run_in_process` starts it, anew for every job.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from kernelformer_lab.subprocesses import end_with_parent


def main() -> None:
    """Run one job; its result is the last line of stdout, since libraries may print before it."""
    end_with_parent()
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    function = getattr(importlib.import_module(job["module"]), job["function"])
    print("\n" + json.dumps(function(**job["arguments"])))


if __name__ == "__main__":
    main()
