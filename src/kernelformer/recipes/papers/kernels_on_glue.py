"""Learning the Transformer Kernel: Table 8 and Sec. 3.3, pre-training on WikiText-103 and fine-tuning on GLUE."""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer.recipes.papers.base import Recipe, network, pair, several, steps_of
from kernelformer.recipes.papers.glue import MISMATCHED, SAMPLES, START, TITLES
from kernelformer.recipes.papers.learned_kernels import ANY_KERNEL, CUT, KERNELS, SHORT, SMOOTHING
from kernelformer.tasks.glue import GLUE
from kernelformer.training.config import Run

TABLE_8: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "batch_size": 64,
    "schedule": "linear",
    "max_grad_norm": None,
    "redraw": 100,
    "redraw_to_end": True,
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
        *ANY_KERNEL,
        SMOOTHING,
        f"full: five epochs of {WORDS:,} words in windows of 512 are {PRETRAINING:,} steps; the paper's are of its "
        f"tokens, whose number it does not say, nor the vocabulary's: BERT's 30,522.",
        "cpu: 4,000 tokens, windows of 128, 2 layers of width 96; " + CUT,
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
            *ANY_KERNEL,
            SMOOTHING,
            "The paper tries the learning rates 2e-3, 5e-4, 1e-4, 2e-5, 5e-6, here 1e-4, and does not say how many "
            "seeds: --seeds.",
            f"full: 10 epochs of {SAMPLES[name]:,} samples.",
            "Table 13, what FastFood learns: --attention fastfood-rks:learn=none:num_features=64, and learn=S.",
            *START,
            *(MISMATCHED if name == "mnli" else ()),
            "cpu: 4,000 tokens, up to 128 a sample, 2 layers of width 96, as kl-wikitext; " + CUT,
        ),
    )


KERNELS_ON_GLUE: dict[str, Recipe] = {
    "kl-wikitext": WIKITEXT,
    **{f"kl-glue-{x}": _fine_tuning(x) for x in ("sst2", "mrpc", "qqp", "mnli", "qnli", "wnli", "rte", "cola")},
}
