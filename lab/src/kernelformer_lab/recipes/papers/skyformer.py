"""Skyformer: Sec. 5, five tasks of Long Range Arena with one small model.

What the paper leaves open is taken from its code: AdamW (0.9, 0.999, 1e-6) without decay, a linear schedule with a
warm-up by task, dropout 0.1, that of exact attention weights too, learned positions, norms before each part, landmarks
that are new at every step, gamma = 0.1, and how often it validates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kernelformer_lab.recipes.papers import base
from kernelformer_lab.recipes.papers.base import Recipe, brief, network, pair
from kernelformer_lab.training.config import Run

SOURCE = "Skyformer, Table 1 and Sec. 5"
LANDMARKS = "skyformer:num_landmarks=128:gamma=0.1"
ATTENTIONS = (
    "softmax:attention_dropout=0.1",
    "gaussian:attention_dropout=0.1",
    "nystromformer:num_landmarks=128",
    "linformer:rank=128",
    "favor+:num_features=128",
    "informer",
    "reformer",
    "bigbird",
    LANDMARKS,
)
MODEL = network(2, 2, 64, 128, pooling="mean", dropout=0.1, positions="learned")
_short = partial(
    brief, model={"dropout": 0.0}, schedule="cosine", eval_batch_size=32, redraw=100, redraw_to_end=False, select="last"
)
# Of the paper's code: batch size, learning rate, steps of warm-up, and from evaluation to evaluation.
CODE = {
    "text": (16, 1e-4, 80, 500),
    "listops": (32, 1e-4, 1000, 500),
    "retrieval": (16, 2e-4, 800, 1000),
    "pathfinder": (128, 2e-4, 312, 500),
    "grey": (256, 1e-4, 175, 50),
}
NOTE = (
    "The paper averages three seeds: --seeds 3.",
    "full: the weights that are best on validation count, and are scored on the test; its code begins to look for them "
    "after a fifth of the steps.",
    "full: landmarks are new at every step, in its code in evaluation too; redraw=1 is for all methods, its Performer "
    "keeps one draw.",
    "full: 0.1 of the weights of softmax and gaussian are dropped, as in its code; the other methods drop none there "
    "either.",
    "full: gamma is 0.1, as in its code, in the paper small; the inverse is exact, there six rounds of an iteration.",
    "Gradients are not cut, in its code each entry at 1; the first beta is 0.9, there it goes from 0.95 to 0.85 and "
    "back.",
    "First weights are normal with 1 / sqrt(inputs), in its code uniform and 1.7 times smaller; tokens and positions "
    "start at size 1, there at 0.02.",
    "Table 1's Informer, Reformer and Big Bird are the layers of transformers (docs/reference/models.md).",
)
SHORTER = (
    "rates 10 to 40 times as high, by a cosine instead of a line; no dropout; landmarks and features stay for 100 "
    "steps, the last from where the rate falls to a quarter; gamma is 0.001, and the last weights count."
)


def _arena(about: str, task: str, note: Sequence[str], options: dict[str, Any], cpu: dict[str, Any]) -> Recipe:
    """A recipe of Sec. 5.

    Args:
        about: one line.
        task: its name.
        note: what differs in this task, and how the cpu size is made.
        options: of the task.
        cpu: what differs at the size for a CPU.
    """
    names = ("batch_size", "learning_rate", "warmup_steps", "eval_every")
    own: dict[str, Any] = dict(zip(names, CODE[task], strict=True))
    full = partial(
        Run,
        task=task,
        attention=LANDMARKS,
        task_options=options,
        model=MODEL,
        steps=50_000,
        **own,
        beta1=0.9,
        beta2=0.999,
        eps=1e-6,
        weight_decay=0.0,
        max_grad_norm=None,
        schedule="linear",
        redraw=1,
        redraw_to_end=True,
        select="best",
        save_every=1000,
    )
    return pair(about, SOURCE, full=full, compared=ATTENTIONS, cpu=cpu, note=(*NOTE, *note))


SKYFORMER: dict[str, Recipe] = {
    "sky-text": _arena(
        "Text of Long Range Arena: reviews of IMDb, positive or negative, byte by byte",
        "text",
        (
            "full: validation is IMDb's test split, as in Long Range Arena: nothing is held back from training, and "
            "the best weights are chosen on the test.",
            f"cpu: the first 256 bytes, in batches of 32; validation is a share of the training reviews; {SHORTER}",
        ),
        {"data": "hub:stanfordnlp/imdb", "length": 4000, "validation_split": "test"},
        _short(
            500,
            4e-3,
            100,
            task_options={"length": 256, "validation_samples": 1000, "validation_split": None},
            batch_size=32,
        ),
    ),
    "sky-listops": _arena(
        "ListOps of Long Range Arena: nested operators over digits, lengths 500 to 2000",
        "listops",
        (f"cpu: expressions of 11 to 127 tokens, at most 6 deep, with up to 5 arguments; {SHORTER}",),
        {},
        _short(800, 2e-3, 200, task_options=base.SHORT_LISTOPS),
    ),
    "sky-retrieval": _arena(
        "Retrieval of Long Range Arena: does one paper cite the other? two texts, byte by byte",
        "retrieval",
        (f"cpu: halves of single texts, as of IMDb, of 256 bytes; {SHORTER}",),
        {"length": 4000},
        _short(400, 2e-3, 100, task_options=base.SHORT_PAIRS),
    ),
    "sky-pathfinder": _arena(
        "Pathfinder of Long Range Arena: are two marked ends those of one dashed path? 1024 pixels",
        "pathfinder",
        (
            "Images are drawn here, in Long Range Arena by the program of Linsley et al. (2018).",
            f"cpu: images of 16 x 16, paths of 4 dashes without distractors, in batches of 32; {SHORTER}",
        ),
        {},
        _short(
            600,
            2e-3,
            100,
            task_options={
                "size": 16,
                "dashes": 4,
                "distractors": 0,
                "train_samples": 20_000,
                "validation_samples": 1000,
                "test_samples": 1000,
            },
            batch_size=32,
        ),
    ),
    "sky-image": _arena(
        "Image of Long Range Arena: CIFAR-10 as 1024 grey pixels",
        "grey",
        (f"cpu: 300 steps with batches of 8; {SHORTER}",),
        {"data": "hub:uoft-cs/cifar10"},
        _short(300, 2e-3, 50, task_options={"validation_samples": 500}, batch_size=8, warmup_steps=25),
    ),
}
