"""Every item in a size of seconds, on data that is made up: whether all of it runs, and nothing about the papers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelformer.files import write_text
from kernelformer.settings import options
from kernelformer_lab.evidence.base import Item, StudyPart, Training
from kernelformer_lab.recipes.catalogue import find_recipe
from kernelformer_lab.studies import find_study
from kernelformer_lab.tasks import TASKS, task_options

ATTENTIONS = 2  # of each part: what differs between attentions is tested elsewhere
RUN: dict[str, Any] = {"steps": 2, "batch_size": 4, "warmup_steps": 1, "eval_every": 2, "log_every": 1, "save_every": 2}
TASK: dict[str, Any] = {
    "train_samples": 32,
    "validation_samples": 8,
    "test_samples": 8,
    "length": 32,
    "vocab_size": 300,
    "bleu_samples": 2,
    "max_length": 32,
}
# Of studies, by name of the setting: whatever makes them short.
STUDY: dict[str, Any] = {
    "steps": 2,
    "length": 32,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "batch": 2,
    "draws": 2,
    "samples": 2,
    "texts": 1,
}
WORDS = ("film", "year", "good", "bad", "seen", "came", "ends", "all", "how", "who", "and", "it", "was", "by")
ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def shrunk(item: Item) -> Item:
    """The item with one seed, few steps and samples, and two attentions a part."""
    return replace(item, parts=tuple(_shrunk(part) for part in item.parts))


def _shrunk(part: Training | StudyPart) -> Training | StudyPart:
    if isinstance(part, StudyPart):
        known = {x.name: how.least for x, how in options(find_study(part.study).settings)}
        small = {name: max(x, int(known[name] or 0)) for name, x in STUDY.items() if name in known}
        return replace(part, settings={**part.settings, **small})
    task = find_recipe(part.recipe).task
    made = {f"task.{name}": x for name, x in TASK.items() if name in task_options(task)}
    if TASKS[task].name in ("recall", "sparsity"):
        made.pop("task.length")  # distances and sums go with it
    settings = {**part.settings, **made, **RUN}
    return replace(part, attentions=tuple(part.attentions[:ATTENTIONS]), seeds=1, settings=settings)


def make_data(folder: Path) -> None:
    """Small made-up data in the layout of the real: a folder for each name that items ask for."""
    random.seed(0)
    rows = [{"text": _sentence(12), "label": i % 2} for i in range(64)]
    _rows(folder / "imdb" / "train.jsonl", rows)
    _rows(folder / "imdb" / "test.jsonl", rows[:16])
    _rows(folder / "rotten-tomatoes" / "train.jsonl", rows)
    pairs = [{"premise": _sentence(6), "hypothesis": _sentence(4), "label": i % 3} for i in range(48)]
    _rows(folder / "snli" / "train.jsonl", pairs)
    _rows(folder / "snli" / "test.jsonl", pairs[:12])
    verses = [{"en": _sentence(6), "de": _sentence(6)} for _ in range(48)]
    _rows(folder / "bible-en-de" / "train.jsonl", verses)
    _rows(folder / "bible-en-de" / "test.jsonl", verses[:12])
    _text(folder / "enwik8" / "enwik8", "\n".join(_article(i) for i in range(120)))
    proteins = ("".join(random.choices(ACIDS, k=40)) for _ in range(64))
    _text(folder / "proteins" / "proteins.txt", "\n".join(proteins) + "\n")
    _images(folder / "cifar10")


def _article(number: int) -> str:
    """A page of a dump of Wikipedia that links to the next ones."""
    links = " ".join(f"[[Page {number + i}]]" for i in range(1, 40))
    return f"<page><title>Page {number}</title><text>{links} {_sentence(120)}</text></page>"


def _sentence(words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    _text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _images(folder: Path) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    made = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 20)):
        images = made.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        np.savez_compressed(folder / f"{name}.npz", images=images, labels=np.arange(count) % 10)
