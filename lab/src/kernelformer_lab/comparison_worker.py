"""One run of a comparison in a process of its own, so that its memory and its threads are its own."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch

from kernelformer.errors import StoppedError, TrainingError
from kernelformer.files import write_json, write_text
from kernelformer.generation import decode_costs, room, sample_bytes
from kernelformer.models import MODELS, KernelformerForCausalLM
from kernelformer_lab.records import RESULT, SAMPLE, Result, read_object
from kernelformer_lab.subprocesses import end_with_parent
from kernelformer_lab.tasks import TASKS
from kernelformer_lab.training.config import Run
from kernelformer_lab.training.evaluation import load_run
from kernelformer_lab.training.session import train

PROMPT = "def "
LENGTH = 300  # bytes of a sample
STOPPED = 130  # as the shell says of Ctrl-C
ERROR = "error: "  # before the reason of a failure, to tell it from what libraries say


def main(request: str) -> int:
    """Train what the request says and measure how the model decodes; lines on stdout, why it failed on stderr."""
    end_with_parent()
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    run, folder = Run.from_json(asked["run"]), Path(asked["folder"])
    try:
        result = train(
            run,
            folder,
            resume=asked["resume"],
            command=asked["command"],
            log=_log,
        )
        if not result.diverged and issubclass(MODELS[TASKS[run.task].model], KernelformerForCausalLM):
            measure_decoding(run, folder, result)
    except KeyboardInterrupt:
        return STOPPED
    except (ValueError, OSError, TrainingError) as problem:
        print(f"{ERROR}{problem}", file=sys.stderr)
        return STOPPED if isinstance(problem, StoppedError) else 2
    return 0


def _log(text: str) -> None:
    """One line to whoever started this process; where nobody reads any more, the run still saves before it stops."""
    with suppress(BrokenPipeError):
        print(text, flush=True)


def measure_decoding(run: Run, folder: Path, result: Result) -> None:
    """Add what decoding costs to the result of a language model, and a text of one over bytes; once."""
    sample = folder / SAMPLE if run.task == "bytes" else None
    if sample is not None and sample.exists() and result.decode is None:
        sample.unlink()  # of the model before the run was made longer
    if result.decode is not None and (sample is None or sample.exists()):
        return
    _, model = load_run(folder)
    assert isinstance(model, KernelformerForCausalLM)
    if result.decode is None:
        write_json(folder / RESULT, {**read_object(folder / RESULT), "decode": decode_costs(model)})
    if sample is not None and not sample.exists():
        fits = room(model, PROMPT)
        length = LENGTH if fits is None else min(LENGTH, fits)
        write_text(sample, PROMPT + sample_bytes(model, PROMPT, tokens=length).text if length > 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
