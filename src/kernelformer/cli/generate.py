"""``kernelformer generate | continue``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelformer.cli.common import Threads, errors, following, literal_text, plain_errors, use_threads, write
from kernelformer.formatting import human_bytes
from kernelformer.generation import sample_bytes, write_on
from kernelformer.models import KernelformerForCausalLM
from kernelformer.models.saved import load_saved, model_folder
from kernelformer.settings import SEED

PROMPT = "def "
Text = Annotated[str | None, typer.Option(help="file with what comes before, instead of --prompt")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest each time")]
Seed = Annotated[int, typer.Option(min=0, help=f"{SEED} of the sampling")]


def generate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a saved model or of a finished run")],
    prompt: Annotated[str | None, typer.Option(help=f"what comes before; default: {PROMPT!r}")] = None,
    text: Text = None,
    tokens: Annotated[int, typer.Option(min=1, help="bytes to write")] = 500,
    temperature: Temperature = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="likeliest bytes to draw from; 0: all")] = 0,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Write text with a trained language model, in constant memory where its attention has a feature map."""
    use_threads(threads)
    with plain_errors():
        before = literal_text(prompt, text)
        model = load_saved(model_folder(folder))
        if not isinstance(model, KernelformerForCausalLM):
            raise ValueError(f"{folder} holds a {type(model).__name__}, which is not a language model.")
        write_sample(
            model, PROMPT if before is None else before, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )


def write_sample(model: KernelformerForCausalLM, prompt: str, **settings: Any) -> None:
    """Write a prompt and what the model samples after it, then how long it took, on stderr."""
    before = prompt  # written with the first byte, when nothing is left to refuse

    def show(text: str) -> None:
        nonlocal before
        text, before = before + text, ""
        write(text)

    made = sample_bytes(model, prompt, write=show, **settings)
    errors.print(
        f"\n\n{made.tokens} bytes in {made.seconds:.1f} s, {made.tokens / made.seconds:.0f} a second; "
        f"kept between two: {human_bytes(made.state_bytes)}",
        style="dim",
    )


def continue_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a converted decoder")],
    prompt: Annotated[str | None, typer.Option(help="what comes before")] = None,
    text: Text = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write")] = 200,
    temperature: Temperature = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="likeliest tokens to draw from; 0: all")] = 50,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Continue a text with a converted decoder, in constant memory."""
    use_threads(threads)
    with plain_errors():
        before = literal_text(prompt, text)
        if before is None:
            raise ValueError("there is no text to go on with; give it by --prompt, or a file by --text.")
        options = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        with following(tokens) as job:
            written = write_on(folder, before, **options, log=lambda _: job.advance())  # type: ignore[arg-type]
        write(f"{before}{written.text}\n")
        first, last = sorted(written.cache)[min(1, len(written.cache) - 1)], max(written.cache)
        errors.print(
            f"{written.tokens} tokens, {written.tokens / written.seconds:.1f} a second; "
            f"cache {written.cache[first]:,} bytes after {first} tokens and {written.cache[last]:,} after {last}"
            + ("" if written.constant else " (exact attention keeps every key)"),
            style="dim",
        )
