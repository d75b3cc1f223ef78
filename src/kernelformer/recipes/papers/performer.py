"""Performer: proteins (Fig. 6, 7, Table 2), ImageNet64 (Fig. 7), PG-19 and LM1B (Fig. 5); App. A.2 to A.6 for all.

"Performer" without more is generalized attention with ReLU; "Performer-SOFTMAX" is FAVOR+.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer.recipes.papers.base import CAUSAL, Recipe, network, pair
from kernelformer.training.config import Run

RELU, FAVOR = "relu:num_features=256:eps=1e-3", "favor+:num_features=256"
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
UNSAID = "The paper fills its chips and does not say the batch size; nor how often it redraws: here every 1,000 steps."
SHORT: dict[str, Any] = {
    "steps": 300,
    "batch_size": 8,
    "learning_rate": 3e-3,
    "bias_lr": 3e-2,  # at the model's own rate a table would hardly move in so few steps
    "schedule": "cosine",
    "warmup_steps": 30,
    "max_grad_norm": 1.0,
    "weight_decay": 0.01,
    "eps": 1e-8,
    "redraw": 100,
    "eval_every": 50,
    "save_every": None,
}
SMALL = network(3, 4, 96, 384, dropout=0.0)


def _model(sizes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**sizes, "dropout": 0.1, "hidden_act": "relu", **more}


PROTEINS_UNI = pair(
    "next amino acid of single proteins",
    "Performer, Fig. 6 left and Table 2 (UNI), App. A and C",
    full=partial(
        Run,
        task="proteins",
        attention=RELU,
        task_options={"length": 1024},
        model=_model(PROTEIN),
        steps=500_000,
        batch_size=256,
        **DEFAULTS,
    ),
    compared=("softmax", RELU, FAVOR, "elu"),
    cpu={**SHORT, "task_options": {"length": 256}, "model": SMALL},
    small=CAUSAL,
    note=f"The data is TrEMBL of January 2019. {UNSAID} cpu: 3 layers of width 96, the first 255 amino acids.",
)

PROTEINS_BID = pair(
    "hidden amino acids of single proteins",
    "Performer, Fig. 6 right and Table 2 (BID), App. A and C",
    full=partial(
        Run,
        task="proteins-masked",
        attention=RELU,
        task_options={"length": 1024},
        model=_model(PROTEIN),
        steps=500_000,
        batch_size=256,
        **DEFAULTS,
    ),
    compared=("softmax", RELU, FAVOR, LINFORMER, "elu"),
    cpu={**SHORT, "task_options": {"length": 256}, "model": SMALL},
    note=f"The data is TrEMBL of January 2019. {UNSAID} cpu: 3 layers of width 96, the first 256 amino acids.",
)


def _long(about: str, source: str, sizes: dict[str, Any], compared: tuple[str, ...], note: str) -> Recipe:
    return pair(
        about,
        source,
        full=partial(
            Run,
            task="proteins",
            attention=compared[0],
            task_options={"length": 8192, "concatenate": True},
            model=_model(sizes),
            steps=100_000,
            batch_size=2048,
            **DEFAULTS,
        ),
        compared=compared,
        cpu={**SHORT, "task_options": {"length": 1024}, "batch_size": 2, "model": SMALL},
        small=CAUSAL,
        note=f"{note} Neither its steps nor how often it redraws are said. cpu: windows of 1024, 3 layers of width 96.",
    )


PROTEINS_LONG = _long(
    "next amino acid of proteins one after another, 8192 tokens",
    "Performer, Fig. 7 right and Sec. 4.5, App. A and C",
    REGULAR,
    (RELU, FAVOR),
    "The batch is 8 for each of 16 x 16 chips.",
)
PROTEINS_SMALL = _long(
    "the same with the small Transformer that fits into memory",
    "Performer, Fig. 7 right and Sec. 4.5, App. A and C",
    network(3, 8, 256, 256),
    ("softmax",),
    "The paper has 1, 2 and 3 layers (--set model.num_hidden_layers=1); its batch is not said: as the Performer's.",
)

PIXELS = pair(
    "next value of 64 x 64 images in colour, 12288 tokens",
    "Performer, Fig. 7 left, App. A and D.2 (ImageNet64)",
    full=partial(
        Run,
        task="pixels",
        attention=RELU,
        task_options={"size": 64},
        model=_model(REGULAR),
        steps=100_000,
        batch_size=64,
        **DEFAULTS,
    ),
    compared=(RELU, FAVOR, "favor+regularized:num_features=256"),
    cpu={
        **SHORT,
        "task_options": {"size": 16, "resize": True, "validation_samples": 64},
        "model": SMALL,
        "batch_size": 4,
    },
    small=CAUSAL,
    note=(
        f"--set model.num_hidden_layers=12 is the paper's other depth. {UNSAID} cpu: images made 16 x 16, 768 tokens; "
        f"3 layers of width 96."
    ),
)

PG19 = pair(
    "hidden tokens of the books of PG-19",
    "Performer, Fig. 5 right and App. A.1.1",
    full=partial(
        Run,
        task="masked",
        attention=FAVOR,
        task_options={"length": 1024, "vocab_size": 32_768},
        model=_model(REGULAR),
        steps=100_000,
        batch_size=256,
        **DEFAULTS,
    ),
    compared=("softmax", FAVOR, "favor+regularized:num_features=256", "trigonometric:num_features=256", LINFORMER),
    cpu={
        **SHORT,
        "task_options": {"length": 128, "vocab_size": 4000, "validation_samples": 128},
        "model": SMALL,
        "batch_size": 16,
    },
    note=(
        f"Sequence length and steps are not said, here 1024 and 100,000; the paper's vocabulary is a unigram one, its "
        f"perplexity per word. {UNSAID} cpu: windows of 128 of 4,000 tokens, 3 layers of width 96."
    ),
)

LM1B = pair(
    "language model whose first weights are those of a softmax Transformer",
    "Performer, Fig. 5 left (LM1B)",
    full=partial(
        Run,
        task="words",
        attention=FAVOR,
        task_options={"length": 512, "vocab_size": 32_768},
        model=_model(REGULAR),
        steps=100_000,
        batch_size=256,
        **DEFAULTS,
    ),
    compared=("softmax", FAVOR, "trigonometric:num_features=256"),
    cpu={
        **SHORT,
        "task_options": {"length": 256, "vocab_size": 4000, "validation_samples": 64},
        "model": SMALL,
    },
    small=CAUSAL,
    note=(
        f"First train with --attention softmax, then --set start=FOLDER of that run. Vocabulary, length and steps are "
        f"not said. {UNSAID} cpu: 4,000 sub-words, windows of 256, 3 layers of width 96."
    ),
)

PERFORMER: dict[str, Recipe] = {
    "performer-protein-uni": PROTEINS_UNI,
    "performer-protein-bid": PROTEINS_BID,
    "performer-protein-long": PROTEINS_LONG,
    "performer-protein-long-small": PROTEINS_SMALL,
    "performer-imagenet64": PIXELS,
    "performer-pg19": PG19,
    "performer-lm1b": LM1B,
}
