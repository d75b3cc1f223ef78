"""Small data sets in the layout of each task, for tests of what is made of tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kernelformer_lab.tasks import TASKS
from kernelformer_lab.tasks.base import MadeSamples

WORDS = re.findall(r"\w+", "the cat sat on a mat and then it went home to sleep in its warm bed while rain fell")
ACIDS = list("ACDEFGHIKLMNPQRSTVWY")
ROWS = {"train": 24, "validation": 6, "test": 6}


def sentence(rng: np.random.Generator, shortest: int = 3, longest: int = 12) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(shortest, longest + 1))))


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    return write_rows(path, ({"text": x} for x in texts))


def write_splits(folder: Path, row: Callable[[np.random.Generator, int], Any]) -> Path:
    """``train``, ``validation`` and ``test.jsonl``; row is a function of a generator and of the number."""
    rng = np.random.default_rng(0)
    for split, count in ROWS.items():
        write_rows(folder / f"{split}.jsonl", (row(rng, i) for i in range(count)))
    return folder


def write_images(folder: Path, rows: int = 32, columns: int = 32, classes: int = 10) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        images = rng.integers(0, 256, (count, rows, columns, 3), np.uint8)
        np.savez(folder / f"{split}.npz", images=images, labels=np.arange(count) % classes)
    return folder


def write_series(folder: Path, length: int = 20, channels: int = 1, classes: int = 2) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        labels = np.arange(count) % classes
        np.savez(folder / f"{split}.npz", series=rng.standard_normal((count, length, channels)), labels=labels)
    return folder


def write_text(path: Path, sentences: int = 400) -> Path:
    rng = np.random.default_rng(0)
    path.write_text("".join(f"{sentence(rng)}.\n" for _ in range(sentences)))
    return path


def write_shards(folder: Path, text: Path, tokenizer: str = "bytes", **more: Any) -> Path:
    from kernelformer_lab.preparation import PrepareSettings, prepare

    prepare(PrepareSettings(texts=(str(text),), tokenizer=tokenizer, out=folder, **more))
    return folder


def write_proteins(path: Path, count: int = 40) -> Path:
    rng = np.random.default_rng(0)
    path.write_text("".join("".join(rng.choice(ACIDS, int(rng.integers(20, 90)))) + "\n" for _ in range(count)))
    return path


def few_samples(task: str, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write data for a task with these options, and return the options that make a run of it a matter of seconds."""
    cache = {"cache": str(folder / "cache")}
    made = {"train_samples": 16, "validation_samples": 4, "test_samples": 4}
    label = options.get("label", "label")
    if task in ("listops", "pathfinder"):
        return {**made, **cache}
    if issubclass(TASKS[task], MadeSamples):
        return made
    if task in ("bytes", "masked", "words"):
        given = {"data": str(write_text(folder / "text.txt")), "length": 32, "validation_samples": 4}
        return given if task == "bytes" else {**given, **cache, "vocab_size": 300}
    if task == "shards":
        data = write_shards(folder / "shards", write_text(folder / "text.txt"))
        return {"data": str(data), "length": 32, "validation_samples": 4}
    if task in ("proteins", "proteins-masked"):
        return {"data": str(write_proteins(folder / "proteins.txt")), "length": 64}
    if task in ("grey", "images", "pixels"):
        return {"data": str(write_images(folder / "images")), "validation_samples": 2, **cache}
    if task == "series":
        return {"data": str(write_series(folder / "series")), "length": 64}
    if task == "text":
        data = write_splits(folder / "rows", lambda rng, i: {"text": sentence(rng), "label": i % 2})
        return {"data": str(data), "length": 64}
    if task == "retrieval":
        data = write_splits(folder / "rows", lambda rng, i: {"text": sentence(rng, 8)})
        return {"data": str(data), "length": 64, "pairs": "halves"}
    if task == "translation":
        names = options.get("source", "en"), options.get("target", "de")
        data = write_splits(folder / "rows", lambda rng, i: {x: sentence(rng) for x in names})
        return {"data": str(data), "vocab_size": 300, "length": 32, "bleu_samples": 2, **cache}
    if task == "sentences":
        columns = [x for x in (options.get("text", "text"), options.get("other")) if x]
        classes = options.get("labels", 2)

        def row(rng, i):
            return {**{x: sentence(rng) for x in columns}, label: float(i % 5) if classes == 1 else i % classes}

        return {"data": str(write_splits(folder / "rows", row)), "vocab_size": 300, "length": 64, **cache}
    raise NotImplementedError(task)


def change_study(monkeypatch, name: str, **changes: Any) -> None:
    """Give a study other functions."""
    module = import_module(f"kernelformer_lab.studies.{name}")
    monkeypatch.setattr(module, "STUDY", replace(module.STUDY, **changes))
