"""One run of a comparison in a process of its own, so that its memory and its threads are its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from kernelformer.errors import StoppedError, TrainingError
from kernelformer.files import write_json, write_text
from kernelformer.generation import room, sample_bytes
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


CONTEXTS = (128, 512, 2048, 8192)
CHUNK = 2048  # tokens of a prefill that go through the model at once


@torch.inference_mode()
def decode_costs(
    model: KernelformerForCausalLM, contexts: Sequence[int] = CONTEXTS, repeats: int = 30
) -> tuple[tuple[int, float, int], ...]:
    """Measure the median seconds of a token and the bytes of the state after some contexts, in this order.

    Contexts that a model has no positions for are left out.
    """
    model.train(False)
    cache, seen, rows = model.new_cache(), 0, list[tuple[int, float, int]]()
    gen = torch.Generator().manual_seed(0)

    def feed(count: int) -> None:
        tokens = torch.randint(model.config.vocab_size, (1, count), generator=gen).to(model.device)
        model(tokens, past_key_values=cache, logits_to_keep=1)

    for context in sorted(contexts):
        if model.longest is not None and context + repeats + 1 > model.longest:
            break
        while seen < context:
            count = min(CHUNK, context - seen)
            feed(count)
            seen += count
        feed(1)  # a warm-up
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            feed(1)
            times.append(time.perf_counter() - start)
        seen += repeats + 1
        rows.append((context, median(times), cache.nbytes))
    return tuple(rows)


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
