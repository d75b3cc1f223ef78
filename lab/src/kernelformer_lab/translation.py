"""Translations by a trained model, from the folder of its run alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelformer.errors import positive_int
from kernelformer.models import KernelformerForConditionalGeneration
from kernelformer.quiet import silent_libraries
from kernelformer_lab.records import MODEL
from kernelformer_lab.tasks import make_task
from kernelformer_lab.tasks.translation import Translation
from kernelformer_lab.training.evaluation import load_run

BATCH = 32  # sentences at once


@dataclass(frozen=True)
class Translator:
    """A trained model with the task that knows its vocabulary."""

    task: Translation
    model: KernelformerForConditionalGeneration


@dataclass(frozen=True)
class Translated:
    """Translations, one for each text.

    Args:
        texts: in the order of what they translate; of a blank text a blank one.
        cut: numbers of the texts, from 0, that were longer than the model takes.
    """

    texts: list[str]
    cut: list[int]
    seconds: float


def load_translator(
    folder: str | os.PathLike[str], *, beams: int | None = None, length_penalty: float | None = None
) -> Translator:
    """The model of a finished run with its vocabulary; data and cache need not be there any more.

    Args:
        beams: of the search; default: the run's.
        length_penalty: of the search; default: the run's.
    """
    home = Path(folder)
    run, model = load_run(home)
    if run.task != Translation.name or not isinstance(model, KernelformerForConditionalGeneration):
        raise ValueError(f"{home} was trained on {run.task!r}, which is not translation.")
    # The vocabulary beside the model is the one it was trained with: it stands for whatever the run had it from.
    options: dict[str, Any] = {**run.task_options, "data": None, "tokenizer": None}
    given = {"beams": beams, "length_penalty": length_penalty}
    task = make_task(run.task, **{**options, **{name: x for name, x in given.items() if x is not None}})
    assert isinstance(task, Translation)
    task.load_extra(home / MODEL)
    return Translator(task, model)


def translate_texts(
    model: str | os.PathLike[str] | Translator, texts: Sequence[str], *, batch_size: int = BATCH
) -> Translated:
    """Translate texts by beam search.

    Args:
        model: the folder of a finished run, or what `load_translator` made of it.
        texts: a sentence each.
        batch_size: sentences at once; it changes the speed, not the result.
    """
    positive_int("batch_size", batch_size)
    translator = model if isinstance(model, Translator) else load_translator(model)
    start = time.perf_counter()
    given = [i for i, text in enumerate(texts) if text.strip()]
    sources, cut = translator.task.encode([texts[i].strip() for i in given])
    with silent_libraries():
        written = translator.task.write(translator.model, sources, batch_size)
    whole = [""] * len(texts)
    for i, text in zip(given, written, strict=True):
        whole[i] = text
    return Translated(whole, [given[i] for i in cut], time.perf_counter() - start)
