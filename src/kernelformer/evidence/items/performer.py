"""Performer (2009.14794): redrawing, maps in a masked model, proteins."""

from __future__ import annotations

from kernelformer.evidence.base import Claim, Item, Training
from kernelformer.evidence.rules import Above, All, AtLeast

PAPER = "Performer"
FAVOR, RELU = "favor+:num_features=64", "relu:num_features=64"
SPHERE, TRIGONOMETRIC = "favor+regularized:num_features=64", "trigonometric:num_features=32"
REVIEWS = {
    "task.data": "data:imdb",
    "task.length": 128,
    "task.validation_samples": 256,
    "steps": 600,
    "warmup_steps": 60,
    "batch_size": 16,
    "eval_every": 200,
    "model.sparse_prediction": True,
}
NAME = "perplexity"
REDRAWING = Item(
    "redrawing",
    PAPER,
    "Fig. 5 right, Fig. 15",
    "Hidden words of reviews: softmax, FAVOR+ with and without redrawing, regularized, trigonometric and ReLU features",
    "IMDb by 4,000 tokens in windows of 128 instead of PG-19, 3 layers of 96 instead of 6 of 512, 600 steps",
    (
        Training("redrawn", "performer-pg19", ("softmax", FAVOR, SPHERE, TRIGONOMETRIC, RELU), REVIEWS),
        Training("one draw", "performer-pg19", (FAVOR, TRIGONOMETRIC), {**REVIEWS, "redraw": None}),
    ),
    (
        Claim(
            "Trigonometric features are worse than positive ones",
            "Fig. 5 right: unstable, far above",
            Above(FAVOR, TRIGONOMETRIC, "redrawn", name=NAME, below=True),
        ),
        Claim(
            "Redrawing makes FAVOR+ better",
            "Fig. 5 right, Fig. 15",
            Above(FAVOR, FAVOR, "redrawn", "one draw", name=NAME, below=True),
        ),
        Claim(
            "FAVOR+ with redrawing or regularized comes to softmax",
            "Fig. 5 right: matches after 200,000 steps",
            All([AtLeast(x, "softmax", "redrawn", name=NAME, below=True, margin=30.0) for x in (FAVOR, SPHERE)]),
        ),
    ),
    0.5,
    unit=NAME,
)

PROTEINS_SETTINGS = {
    "group_by_length": True,
    "task.data": "data:proteins/proteins.txt",
    "steps": 2000,
    "warmup_steps": 100,
    "task.validation_samples": 500,
    "eval_every": 500,
}
PROTEINS = Item(
    "proteins",
    PAPER,
    "Fig. 6, Table 2",
    "Next (UNI) and hidden (BID) amino acids of proteins: softmax, ReLU and FAVOR+",
    "20,000 UniProt sequences of up to 256 instead of TrEMBL, 3 layers of 96 instead of 36 of 512, 2,000 steps of 8",
    (
        Training("next", "performer-protein-uni", ("softmax", RELU, FAVOR), PROTEINS_SETTINGS),
        Training("hidden", "performer-protein-bid", ("softmax", RELU, FAVOR), PROTEINS_SETTINGS),
    ),
    (
        Claim(
            "Performer-ReLU is at least as good as the Transformer",
            "perplexity 9.17 against 9.37 (UNI), 8.36 against 9.22 (BID)",
            All([AtLeast(RELU, "softmax", part, name=NAME, below=True, margin=0.5) for part in ("next", "hidden")]),
        ),
        Claim(
            "Performer-ReLU is better than Performer-SOFTMAX (FAVOR+)",
            "Fig. 6",
            All([Above(RELU, FAVOR, part, name=NAME, below=True) for part in ("next", "hidden")]),
        ),
    ),
    1.0,
    unit=NAME,
)
