"""Skyformer: Sec. 5, five tasks of Long Range Arena with one small model.

What the paper leaves open is taken from its code: AdamW (0.9, 0.999, 1e-6) without decay, a linear schedule with a
warm-up by task, dropout 0.1, learned positions, norms before each part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer.recipes.papers.base import Recipe, network, pair
from kernelformer.training.config import Run

SOURCE = "Skyformer, Table 1 and Sec. 5"
ATTENTIONS = (
    "softmax",
    "gaussian",
    "nystromformer:num_landmarks=128",
    "linformer:rank=128",
    "favor+:num_features=128",
    "skyformer:num_landmarks=128",
)
MODEL = network(2, 2, 64, 128, pooling="mean", dropout=0.1, positions="learned")
SHORT: dict[str, Any] = {
    "model": {"dropout": 0.0},
    "schedule": "cosine",
    "save_every": None,
    "eval_batch_size": 32,
    "redraw": 100,
}


def _arena(about: str, task: str, note: str, options: dict[str, Any], cpu: dict[str, Any], **own: Any) -> Recipe:
    """A recipe of Sec. 5.

    Args:
        about: one line.
        task: its name.
        note: how the cpu size is made.
        options: of the task.
        cpu: what differs at the size for a CPU.
        own: batch_size, learning_rate and warmup_steps.
    """
    full = partial(
        Run,
        task=task,
        attention="skyformer:num_landmarks=128",
        task_options=options,
        model=MODEL,
        steps=50_000,
        beta1=0.9,
        beta2=0.999,
        eps=1e-6,
        weight_decay=0.0,
        max_grad_norm=None,
        schedule="linear",
        eval_every=500,
        save_every=1000,
        **own,
    )
    more = "The paper takes the best of all evaluations, here the last counts; its code cuts each gradient at 1."
    return pair(about, SOURCE, full=full, compared=ATTENTIONS, cpu={**SHORT, **cpu}, note=f"{more} {note}")


SKYFORMER: dict[str, Recipe] = {
    "sky-text": _arena(
        "Text of Long Range Arena: reviews of IMDb, positive or negative, byte by byte",
        "text",
        "cpu: the first 256 bytes, in batches of 32.",
        {"data": "hub:stanfordnlp/imdb", "length": 4000},
        {
            "task_options": {"length": 256, "validation_samples": 1000},
            "batch_size": 32,
            "steps": 500,
            "learning_rate": 4e-3,
            "warmup_steps": 50,
            "eval_every": 100,
        },
        batch_size=16,
        learning_rate=1e-4,
        warmup_steps=80,
    ),
    "sky-listops": _arena(
        "ListOps of Long Range Arena: nested operators over digits, lengths 500 to 2000",
        "listops",
        "cpu: expressions of 11 to 127 tokens, at most 6 deep, with up to 5 arguments.",
        {},
        {
            "task_options": {
                "min_length": 10,
                "max_length": 128,
                "max_depth": 6,
                "max_args": 5,
                "train_samples": 50_000,
                "validation_samples": 1000,
                "test_samples": 1000,
            },
            "steps": 800,
            "learning_rate": 2e-3,
            "warmup_steps": 80,
            "eval_every": 200,
        },
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=1000,
    ),
    "sky-retrieval": _arena(
        "Retrieval of Long Range Arena: does one paper cite the other? two texts, byte by byte",
        "retrieval",
        "cpu: halves of single texts, as of IMDb, of 256 bytes.",
        {"length": 4000},
        {
            "task_options": {"length": 256, "pairs": "halves", "validation_samples": 500},
            "steps": 400,
            "learning_rate": 2e-3,
            "warmup_steps": 40,
            "eval_every": 100,
        },
        batch_size=16,
        learning_rate=2e-4,
        warmup_steps=800,
    ),
    "sky-pathfinder": _arena(
        "Pathfinder of Long Range Arena: are two marked ends those of one dashed path? 1024 pixels",
        "pathfinder",
        "cpu: images of 16 x 16 with shorter paths.",
        {},
        {
            "task_options": {
                "size": 16,
                "dashes": 4,
                "distractors": 0,
                "train_samples": 20_000,
                "validation_samples": 1000,
                "test_samples": 1000,
            },
            "batch_size": 32,
            "steps": 600,
            "learning_rate": 2e-3,
            "warmup_steps": 60,
            "eval_every": 100,
        },
        batch_size=128,
        learning_rate=2e-4,
        warmup_steps=312,
    ),
    "sky-image": _arena(
        "Image of Long Range Arena: CIFAR-10 as 1024 grey pixels",
        "grey",
        "cpu: fewer steps with smaller batches.",
        {"data": "hub:uoft-cs/cifar10"},
        {
            "task_options": {"validation_samples": 500},
            "batch_size": 8,
            "steps": 300,
            "learning_rate": 2e-3,
            "warmup_steps": 25,
            "eval_every": 50,
        },
        batch_size=256,
        learning_rate=1e-4,
        warmup_steps=175,
    ),
}
