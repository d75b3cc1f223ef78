"""Learning the Transformer Kernel: Tables 6 and 7 (Long Range Arena), Table 8 (WikiText-103, GLUE), App. E (sparsity).

Table 6 follows the code of Long Range Arena, so what it leaves open is taken from there: eps of Adam, gradients that
are never shortened, norms before each part, a classifier with a ReLU and the feed-forward part's width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer.recipes.papers.base import Recipe, arena_rate, network, pair, several, steps_of
from kernelformer.recipes.papers.glue import SAMPLES, START, TITLES
from kernelformer.tasks.glue import GLUE
from kernelformer.training.config import Run

# Both components of the mixtures have one covariance and opposite means (footnote 2).
KERNELS = ("gmm-rks:tied=True", "fastfood-rks", "generative-rks", "gmm-prf:tied=True", "fastfood-prf", "generative-prf")
TABLE_7 = {
    "listops": (256, 64, 256, 256, 64, 128),
    "text": (128, 64, 256, 256, 64, 128),
    "retrieval": (64, 32, 128, 128, 32, 64),
    "image": (128, 8, 128, 128, 8, 8),
}
ARENA: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-9,
    "max_grad_norm": None,
    "redraw": 100,  # Sec. 2.2
    "eval_every": 500,
    "save_every": 1000,
}
# What the sizes for a CPU share: rates for a short run.
SHORT: dict[str, Any] = {
    "schedule": "cosine",
    "max_grad_norm": 1.0,
    "save_every": None,
    "eval_batch_size": 32,
}
SMALL = network(2, 2, 64, 128, head_dim=32, dropout=0.0, classifier_size=64)


def kernels(task: str) -> list[str]:
    """Softmax and the paper's methods with their numbers of samples (Table 7)."""
    return ["softmax", *(f"{x}:num_features={m}" for x, m in zip(KERNELS, TABLE_7[task], strict=True))]


def _arena(layers: int, heads: int, width: int, feed: int, **more: Any) -> dict[str, Any]:
    """A model of Table 6."""
    own = {"hidden_act": "gelu", "positions": "sinusoidal", "pooling": "cls", "dropout": 0.1}
    return network(layers, heads, width, feed, **{**own, **more}, classifier_size=feed, classifier_act="relu")


LISTOPS = pair(
    "ListOps of Long Range Arena: nested operators over digits, lengths 500 to 2000",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=partial(
        Run,
        task="listops",
        attention="fastfood-prf:num_features=64",
        model=_arena(6, 8, 512, 2048, head_dim=64),
        batch_size=32,
        weight_decay=0.1,
        **arena_rate(5e-3, 1000, 10_000),
        **ARENA,
    ),
    compared=kernels("listops"),
    cpu={
        **SHORT,
        "task_options": {
            "min_length": 10,
            "max_length": 128,
            "max_depth": 6,
            "max_args": 5,
            "train_samples": 50_000,
            "validation_samples": 1000,
            "test_samples": 1000,
        },
        "model": SMALL,
        "steps": 800,
        "learning_rate": 2e-3,
        "warmup_steps": 80,
        "eval_every": 200,
    },
    note="cpu: expressions of 11 to 127 tokens, at most 6 deep, with up to 5 arguments; 2 layers of width 64.",
)

TEXT = pair(
    "Text of Long Range Arena: reviews of IMDb, positive or negative, byte by byte",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=partial(
        Run,
        task="text",
        attention="fastfood-prf:num_features=64",
        task_options={"data": "hub:stanfordnlp/imdb", "length": 4000},
        model=_arena(4, 4, 256, 1024, head_dim=64),
        batch_size=32,
        weight_decay=0.1,
        **arena_rate(5e-2, 8000, 20_000),
        **ARENA,
    ),
    compared=kernels("text"),
    cpu={
        **SHORT,
        "task_options": {"length": 512, "validation_samples": 500},
        "model": SMALL,
        "steps": 400,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "warmup_steps": 40,
        "eval_every": 100,
    },
    note="The paper's Table 2 has accuracies on the validation set. cpu: the first 512 bytes; 2 layers of width 64.",
)

RETRIEVAL = pair(
    "Retrieval of Long Range Arena: does one paper cite the other? two texts, byte by byte",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=partial(
        Run,
        task="retrieval",
        attention="fastfood-prf:num_features=32",
        task_options={"length": 4000},
        model=_arena(4, 4, 128, 512, head_dim=32),
        batch_size=32,
        weight_decay=0.1,
        **arena_rate(5e-2, 8000, 5000),
        **ARENA,
    ),
    compared=kernels("retrieval"),
    cpu={
        **SHORT,
        "task_options": {"length": 256, "pairs": "halves", "validation_samples": 500},
        "model": SMALL,
        "steps": 400,
        "batch_size": 16,
        "learning_rate": 2e-3,
        "warmup_steps": 40,
        "eval_every": 100,
    },
    note=(
        "5,000 steps end before the warm-up of 8,000 does. The classifier has one hidden layer, in LRA two. "
        "cpu: halves of single texts, as of IMDb, of 256 bytes; 2 layers of width 64."
    ),
)

IMAGE = pair(
    "Image of Long Range Arena: CIFAR-10 as 1024 grey pixels",
    "Learning the Transformer Kernel, Tables 6 and 7 (App. C.2)",
    full=partial(
        Run,
        task="grey",
        attention="gmm-rks:tied=True:num_features=128",
        task_options={"data": "hub:uoft-cs/cifar10"},
        model=_arena(1, 8, 128, 128, head_dim=8, dropout=0.3, positions="learned"),
        steps=steps_of(200, 45_000, 256),
        batch_size=256,
        learning_rate=5e-4,
        weight_decay=0.0,
        warmup_steps=175,
        schedule="cosine",
        **ARENA,
    ),
    compared=kernels("image"),
    cpu={
        **SHORT,
        "task_options": {"validation_samples": 500},
        "model": network(1, 2, 64, 128, head_dim=16, dropout=0.0, classifier_size=128),
        "steps": 300,
        "batch_size": 16,
        "learning_rate": 2e-3,
        "warmup_steps": 30,
        "eval_every": 100,
    },
    note="200 epochs of 45,000 images, a tenth being the validation. cpu: one layer of width 64, 2 heads of 16.",
)

TABLE_8: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "batch_size": 64,
    "schedule": "linear",
    "redraw": 100,
    "eval_every": 1000,
    "save_every": 1000,
}
BERT_LIKE = network(3, 10, 300, 512, head_dim=64, dropout=0.1, hidden_act="gelu", positions="sinusoidal")
SHORT_SENTENCES = network(2, 4, 96, 192, head_dim=32, dropout=0.0)
WORDPIECE = {"kind": "wordpiece", "vocab_size": 30_522, "length": 512}
TRIED = ["softmax", *several(KERNELS, (64, 128))]
WORDS = 103_227_021  # of WikiText-103
PRETRAINING = steps_of(5, WORDS // 512, 64)

WIKITEXT = pair(
    "masked language modelling of WikiText-103, before fine-tuning",
    "Learning the Transformer Kernel, Table 8 and Sec. 3.3",
    full=partial(
        Run,
        task="masked",
        attention="fastfood-prf:num_features=64",
        task_options={"data": "hub:Salesforce/wikitext:wikitext-103-raw-v1", **WORDPIECE},
        model=BERT_LIKE,
        steps=PRETRAINING,
        learning_rate=5e-4,
        warmup_steps=10_000,
        **TABLE_8,
    ),
    compared=TRIED,
    cpu={
        **SHORT,
        "task_options": {"length": 128, "vocab_size": 4000, "validation_samples": 128},
        "model": SHORT_SENTENCES,
        "steps": 500,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "warmup_steps": 50,
        "eval_every": 100,
    },
    note=(
        f"Five epochs of {WORDS:,} words in windows of 512 are {PRETRAINING:,} steps; the paper's are of its tokens, "
        f"whose number it does not say, nor the vocabulary's: BERT's 30,522. cpu: 4,000 tokens, windows of 128, 2 "
        f"layers of width 96."
    ),
)


def _fine_tuning(name: str) -> Recipe:
    steps = steps_of(10, SAMPLES[name], 64)
    return pair(
        f"GLUE: {TITLES[name]}",
        "Learning the Transformer Kernel, Table 8 and Sec. 3.3",
        full=partial(
            Run,
            task="sentences",
            attention="fastfood-prf:num_features=64",
            task_options={**GLUE[name], **WORDPIECE},
            model={**BERT_LIKE, "pooling": "cls", "classifier_size": 128, "classifier_act": "tanh"},
            steps=steps,
            learning_rate=1e-4,
            warmup_steps=steps // 10,
            **TABLE_8,
        ),
        compared=TRIED,
        cpu={
            **SHORT,
            "task_options": {"length": 128, "vocab_size": 4000, "validation_samples": 1000},
            "model": SHORT_SENTENCES,
            "steps": 500,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "warmup_steps": 50,
            "eval_every": 100,
        },
        note=(
            f"The paper tries the learning rates 2e-3, 5e-4, 1e-4, 2e-5, 5e-6. 10 epochs of {SAMPLES[name]:,} samples. "
            f"{START} cpu: 2 layers of width 96, as kl-wikitext."
        ),
    )


SPARSITY = pair(
    "sum of the values that are marked as relevant: which kernels learn to ignore?",
    "Learning the Transformer Kernel, App. E",
    full=partial(
        Run,
        task="sparsity",
        attention="gmm-prf:tied=True:num_features=64",
        task_options={"train_samples": 160_000, "validation_samples": 40_000, "relevance": 0.1, "length": 200},
        model=network(3, 4, 64, 64, head_dim=16, positions="learned", pooling="cls", classifier_size=64),
        steps=400_000,
        batch_size=400,
        learning_rate=5e-6,
        beta2=0.98,
        eps=1e-9,
        weight_decay=0.1,
        schedule="constant",
        max_grad_norm=None,
        redraw=100,
        eval_every=400,
        save_every=4000,
    ),
    compared=["softmax", *several(("gmm-rks:tied=True", "gmm-prf:tied=True"), (64,))],
    cpu={
        "task_options": {"length": 48, "train_samples": 16_000, "validation_samples": 2000, "test_samples": 2000},
        "steps": 800,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "warmup_steps": 40,
        "eval_every": 100,
        "eval_batch_size": 100,
        "save_every": None,
        "max_grad_norm": 1.0,
    },
    note=(
        "The paper's three data sets: --set task.relevance=0.1, 0.5, 0.9. It does not say how many steps: here 1,000 "
        "epochs. Heads are of 16, so 4. The answer is read off a learned token in front, in the paper off the first "
        "pair. cpu: 48 pairs. `kernelformer study sparsity` draws the learning curves of the three."
    ),
)

LEARNED_KERNELS: dict[str, Recipe] = {
    "kl-listops": LISTOPS,
    "kl-text": TEXT,
    "kl-retrieval": RETRIEVAL,
    "kl-image": IMAGE,
    "kl-wikitext": WIKITEXT,
    **{f"kl-glue-{x}": _fine_tuning(x) for x in ("sst2", "mrpc", "qqp", "mnli", "qnli", "wnli", "rte", "cola")},
    "kl-sparsity": SPARSITY,
}
