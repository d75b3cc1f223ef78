"""Performer: proteins (Fig. 6, 7, 16, Table 2), ImageNet64 (Fig. 7), PG-19 and LM1B (Fig. 5); App. A.2 to A.6 for all.

"Performer" without more is generalized attention with ReLU; "Performer-SOFTMAX" is FAVOR+.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer_lab.recipes.papers import base
from kernelformer_lab.recipes.papers.base import CAUSAL, Recipe, brief, network, pair
from kernelformer_lab.training.config import Run

RELU, FAVOR = "relu:num_features=256:eps=1e-3", "favor+:num_features=256"
UNPROJECTED = "relu:projection=False:eps=1e-3"
LINFORMER = "linformer:rank=600"
REGULAR: dict[str, Any] = network(6, 8, 512, 2048)  # "the regular default size" of Sec. 4.1
PROTEIN = network(36, 8, 512, 1024)
# App. A.2; the activation is said in App. D.4.
DEFAULTS: dict[str, Any] = {
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-9,
    "redraw": 1000,
    "eval_every": 1000,
    "save_every": 1000,
}
UNSAID = (
    "full: the paper fills its chips and does not say the batch size, nor how often it redraws: here every 1,000 steps."
)
PROJECTED = (
    "full: relu has 256 drawn features, as App. A.4 says, and beside it none: its code by default neither projects nor "
    "redraws."
)
REFORMER = "The paper's Reformer is here for encoders alone, as the layer of transformers (docs/reference/models.md)."
LEARNED = "full: Linformer's mixtures are learned, in the paper drawn anew."
UNREDRAWN = "without redrawing: --set redraw=none"
CUT = (
    "redraws every 100 steps until the rate falls to a quarter, a rate three times as high that decays, gradients up "
    "to norm 1 instead of 0.5, decay 0.01 instead of 0.1, eps 1e-8, no dropout."
)
SHORT = brief(
    300,
    3e-3,
    50,
    batch_size=8,
    bias_lr=3e-2,  # at the model's own rate a table would hardly move in so few steps
    schedule="cosine",
    max_grad_norm=1.0,
    weight_decay=0.01,
    eps=1e-8,
    redraw=100,
)
SMALL = network(3, 4, 96, 384, dropout=0.0)


def _full(
    task: str, attention: str, sizes: dict[str, Any], steps: int, batch_size: int, **options: Any
) -> partial[Run]:
    """A run of the paper; ``options`` are those of the task."""
    model = {**sizes, "dropout": 0.1, "hidden_act": "relu"}
    own: dict[str, Any] = {"task_options": options, "model": model, "steps": steps, "batch_size": batch_size}
    return partial(Run, task=task, attention=attention, **own, **DEFAULTS)


PROTEINS_UNI = pair(
    "next amino acid of single proteins",
    "Performer, Fig. 6 left and Table 2 (UNI), App. A and C",
    full=_full("proteins", RELU, PROTEIN, 500_000, 256, length=1024),
    compared=("softmax", RELU, UNPROJECTED, FAVOR, "elu"),
    cpu={**SHORT, "task_options": {"length": 256}, "model": SMALL},
    small=CAUSAL,
    note=(
        "The data is TrEMBL of January 2019.",
        UNSAID,
        PROJECTED,
        REFORMER,
        f"Fig. 15 left, lucky and unlucky draws: --attention {FAVOR} --seeds 2, with redrawing and {UNREDRAWN}.",
        "cpu: 3 layers of width 96, the first 255 amino acids; " + CUT,
    ),
)

PROTEINS_BID = pair(
    "hidden amino acids of single proteins",
    "Performer, Fig. 6 right and Table 2 (BID), App. A and C",
    full=_full("proteins-masked", RELU, PROTEIN, 500_000, 256, length=1024),
    compared=("softmax", RELU, UNPROJECTED, FAVOR, LINFORMER, "elu"),
    cpu={**SHORT, "task_options": {"length": 256}, "model": SMALL},
    note=(
        "The data is TrEMBL of January 2019.",
        UNSAID,
        PROJECTED,
        LEARNED,
        REFORMER,
        "cpu: 3 layers of width 96, the first 256 amino acids; " + CUT,
    ),
)


def _long(about: str, source: str, sizes: dict[str, Any], compared: tuple[str, ...], *note: str) -> Recipe:
    return pair(
        about,
        source,
        full=_full("proteins", compared[0], sizes, 100_000, 2048, length=8192, concatenate=True),
        compared=compared,
        cpu={**SHORT, "task_options": {"length": 1024}, "batch_size": 2, "model": SMALL},
        small=CAUSAL,
        note=(
            *note,
            "full: its steps are not said: here 100,000.",
            "cpu: windows of 1024, 3 layers of width 96; " + CUT,
        ),
    )


PROTEINS_LONG = _long(
    "next amino acid of proteins one after another, 8192 tokens",
    "Performer, Fig. 7 right and Sec. 4.5, App. A and C",
    REGULAR,
    (RELU, UNPROJECTED, FAVOR),
    "full: the batch is 8 for each of 16 x 16 chips; how often it redraws is not said: here every 1,000 steps.",
    PROJECTED,
)
PROTEINS_SMALL = _long(
    "the same with the small Transformer that fits into memory",
    "Performer, Fig. 7 right and Sec. 4.5, App. A and C",
    network(3, 8, 256, 256),
    ("softmax",),
    "full: the paper has 1, 2 and 3 layers (--set model.num_hidden_layers=1).",
    "full: its batch is not said: as the Performer's.",
)

PIXELS = pair(
    "next value of 64 x 64 images in colour, 12288 tokens",
    "Performer, Fig. 7 left, App. A and D.2 (ImageNet64)",
    full=_full("pixels", RELU, REGULAR, 100_000, 64, size=64),
    compared=(RELU, UNPROJECTED, FAVOR, "favor+regularized:num_features=256"),
    cpu={**SHORT, "task_options": base.SMALL_IMAGES, "model": SMALL, "batch_size": 4},
    small=CAUSAL,
    note=(
        "full: --set model.num_hidden_layers=12 is the paper's other depth.",
        UNSAID,
        PROJECTED,
        REFORMER,
        "cpu: images made 16 x 16, 768 tokens; 3 layers of width 96; " + CUT,
    ),
)

PG19 = pair(
    "hidden tokens of the books of PG-19",
    "Performer, Fig. 5 right and App. A.1.1",
    full=_full("masked", FAVOR, REGULAR, 100_000, 256, length=1024, vocab_size=32_768),
    compared=("softmax", FAVOR, "favor+regularized:num_features=256", "trigonometric:num_features=256", LINFORMER),
    cpu={**SHORT, "task_options": base.SHORT_TEXTS, "model": SMALL, "batch_size": 16},
    note=(
        "full: sequence length and steps are not said, here 1024 and 100,000.",
        "The vocabulary is of byte pairs, the paper's a unigram one; perplexity is per token, the paper's per word.",
        UNSAID,
        LEARNED,
        f"Fig. 5's positive features {UNREDRAWN}.",
        "cpu: windows of 128 of 4,000 tokens, 3 layers of width 96; " + CUT,
    ),
)

LM1B = pair(
    "language model whose first weights are those of a softmax Transformer",
    "Performer, Fig. 5 left (LM1B)",
    full=_full("words", FAVOR, REGULAR, 100_000, 256, length=512, vocab_size=32_768),
    compared=("softmax", FAVOR, "trigonometric:num_features=256"),
    cpu={**SHORT, "task_options": base.SHORT_WORDS, "model": SMALL},
    small=CAUSAL,
    note=(
        "First train with --attention softmax, then --set start=FOLDER of that run.",
        "full: vocabulary, length and steps are not said, here 32,768, 512 and 100,000.",
        UNSAID,
        "cpu: 4,000 sub-words, windows of 256, 3 layers of width 96; " + CUT,
    ),
)


def _kernels(features: int) -> list[str]:
    """Fig. 16's eight functions, normalized and not (Fig. 17)."""
    functions = ("sigmoid", "exp", "relu", "abs", "gelu", "cos", "tanh", "identity")
    options = (f"activation={f}:num_features={features}:eps=1e-3" for f in functions)
    return [f"relu:{x}{more}" for x in options for more in ("", ":normalize=False")]


KERNELS = pair(
    "next amino acid of single proteins, by eight functions f of generalized attention",
    "Performer, Fig. 16 and 17, App. D.3",
    full=_full("proteins", RELU, REGULAR, 100_000, 512, length=512),
    compared=_kernels(256),
    cpu={**SHORT, "attention": "relu:num_features=64", "task_options": {"length": 128}, "model": SMALL},
    small=["softmax", *_kernels(64)],
    note=(
        "The data is TrEMBL of January 2019.",
        "full: the model, its steps and whether it is causal are not said: the regular size, 100,000 and yes; nor how "
        "often it redraws: here every 1,000 steps.",
        "full: the batch is 128 for each of 2 x 2 devices.",
        "Several of these functions can be negative: runs may end in NaN, as they do in the paper.",
        "cpu: 3 layers of width 96, the first 127 amino acids; " + CUT,
    ),
)

PERFORMER: dict[str, Recipe] = {
    "performer-protein-uni": PROTEINS_UNI,
    "performer-protein-bid": PROTEINS_BID,
    "performer-protein-kernels": KERNELS,
    "performer-protein-long": PROTEINS_LONG,
    "performer-protein-long-small": PROTEINS_SMALL,
    "performer-imagenet64": PIXELS,
    "performer-pg19": PG19,
    "performer-lm1b": LM1B,
}
