"""Skyformer (2111.00035): stability of training, and the tasks of its Table 1."""

from __future__ import annotations

from typing import Any

from kernelformer.evidence.base import Claim, Item, Training
from kernelformer.evidence.rules import Above, AtLeast

PAPER = "Skyformer"
SKYFORMER, NYSTROM = "skyformer:num_landmarks=64", "skyformer:num_landmarks=64:kernel=softmax"
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
LARGEST = "result.grad_norm.max"


def _rate(rate: float) -> str:
    return f"rate {rate:g}"


STABILITY = Item(
    "stability",
    PAPER,
    "Sec. 1, 5, Fig. 2",
    "Accuracy, largest gradient norms and divergences at four learning rates, from a good one to 64 times that, "
    "without gradient clipping, landmarks new every 10 steps",
    "ListOps of 11 to 127 tokens instead of 500 to 2000, 300 steps instead of 50,000",
    tuple(
        Training(
            _rate(rate),
            "sky-listops",
            ("softmax", "gaussian", SKYFORMER, NYSTROM),
            {
                "learning_rate": rate,
                "steps": 300,
                "warmup_steps": 30,
                "schedule": "constant",
                "redraw": 10,
                "max_grad_norm": None,
                "eval_every": 100,
                "log_every": 1,
            },
        )
        for rate in RATES
    ),
    (
        Claim(
            "Gaussian kernelized attention trains at rates where softmax does not",
            "Sec. 1: a slight change of the rate may cause failure; no figures",
            Above("gaussian", "softmax", _rate(RATES[2]), name="accuracy", scale=100),
        ),
        Claim(
            "Gaussian kernelized attention has smaller gradients at a large rate",
            "Sec. 4.1: a more reasonable condition number",
            Above("gaussian", "softmax", _rate(RATES[2]), path=LARGEST, name="the largest gradient norm", below=True),
        ),
        Claim(
            "The Nystrom method on softmax itself trains unstably, Skyformer does not",
            "Sec. 5: numerical instability observed",
            Above(SKYFORMER, NYSTROM, _rate(RATES[2]), name="accuracy", scale=100),
        ),
    ),
    0.8,
    unit="accuracy",
)

TABLE_1 = ("softmax", "gaussian", SKYFORMER, "nystromformer:num_landmarks=64", "favor+:num_features=64")
ACCURACY = "result.test.accuracy"
# The paper's protocol: the best weights on validation, then the test.
BEST: dict[str, Any] = {"select": "best", "task.test_samples": 2000}
SPARSE = ("bigbird", "longformer", "reformer", "informer")  # by the modules of transformers
LEARNED = ("gmm-prf:num_features=32:draw=iid", "fastfood-prf:num_features=64")


def _at_least(first: str, second: str) -> AtLeast:
    return AtLeast(first, second, path=ACCURACY, name="test accuracy", scale=100, margin=0.04)


def _arena(name: str, recipe: str, column: str, printed: str, size: str, hours: float, **settings: Any) -> Item:
    attentions = (*TABLE_1, *LEARNED, *settings.pop("more", ()))
    return Item(
        name,
        PAPER,
        f"Table 1, {column}",
        f"Test accuracy on {column} of Long Range Arena, of the weights that are best on the validation split",
        size,
        (Training("main", recipe, attentions, {**BEST, **{key.replace("__", "."): x for key, x in settings.items()}}),),
        (
            Claim("Skyformer is comparable to softmax or better", printed, _at_least(SKYFORMER, "softmax")),
            Claim(
                "Gaussian kernelized attention is comparable to softmax or better",
                printed,
                _at_least("gaussian", "softmax"),
            ),
            Claim(
                "Skyformer is better than Performer",
                printed,
                Above(SKYFORMER, "favor+:num_features=64", path=ACCURACY, name="test accuracy", scale=100),
            ),
        ),
        hours,
        value=ACCURACY,
        unit="test accuracy",
    )


ARENA = (
    _arena(
        "listops",
        "sky-listops",
        "ListOps",
        "softmax 38.4, Gaussian 38.8, Skyformer 38.7, Performer 38.0%",
        "expressions of 11 to 127 tokens instead of 500 to 2000, 1,500 steps instead of 50,000",
        1.6,
        steps=1500,
        task__validation_samples=2000,
        eval_every=500,
        more=SPARSE,
    ),
    _arena(
        "text",
        "sky-text",
        "Text",
        "softmax 62.0, Gaussian 60.2, Skyformer 64.7, Performer 64.2%",
        "the first 1024 bytes of 4000, 600 steps of 16 instead of 50,000",
        5.0,
        task__data="data:imdb",
        task__length=1024,
        task__validation_samples=2000,
        steps=600,
        batch_size=16,
        learning_rate=2e-3,
        eval_every=300,
    ),
    _arena(
        "image",
        "sky-image",
        "Image",
        "softmax 40.6, Gaussian 41.3, Skyformer 40.8, Performer 41.4%",
        "1,000 steps of 16 instead of 50,000 of 256",
        8.0,
        task__data="data:cifar10",
        task__validation_samples=2000,
        steps=1000,
        batch_size=16,
        warmup_steps=100,
        eval_every=500,
    ),
    _arena(
        "retrieval",
        "sky-retrieval",
        "Retrieval",
        "softmax 80.7, Gaussian 81.8, Skyformer 82.1, Performer 80.0%",
        "articles of enwik8 of which one links to the other or not, the first 512 bytes of each, instead of papers of "
        "which one cites the other by 4000; 1,000 steps instead of 50,000",
        6.0,
        task__data="data:enwik8-links",
        task__pairs="rows",
        task__length=512,
        task__validation_samples=2000,
        steps=1000,
        eval_every=500,
    ),
    _arena(
        "pathfinder",
        "sky-pathfinder",
        "Pathfinder",
        "softmax 65.3, Gaussian 70.7, Skyformer 70.7, Performer 66.3%",
        "drawings of 14 x 14 pixels with paths of 3 dashes and no distractors instead of 32 x 32, 4,000 steps of 32",
        8.0,
        task__size=14,
        task__dashes=3,
        steps=4000,
        eval_every=500,
    ),
)
