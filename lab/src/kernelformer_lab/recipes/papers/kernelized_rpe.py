"""Stable, fast and accurate: kernelized attention with relative positional encoding; Sec. 4, App. A, Table 5.

Language is here, `rpe_on_images` has images.

One table of relative positions for all layers (Sec. 3.1). What the paper leaves open of its encoder-decoder is that of
fairseq for IWSLT, which has its other sizes: a feed-forward part of 1024 with ReLU, norms after each part, decay 1e-4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer_lab.recipes.papers import base
from kernelformer_lab.recipes.papers.base import CAUSAL, FEATURES, FULL, IMAGES, Recipe, brief, network, pair, steps_of
from kernelformer_lab.recipes.papers.learned_kernels import GLUE, MISMATCHED, START
from kernelformer_lab.training.config import Run

PAPER = "Kernelized attention with relative positional encoding"
SHARED = {"share_bias": True}
OWN = {"share_bias": False, "dropout": 0.0}

DRAWN = (
    "full: frequencies are drawn iid (Eq. 5), once: the paper does not say whether it redraws; orthogonal ones are its "
    "ablation (draw=orthogonal)."
)
CUT = (
    "draws are orthogonal, new every 100 steps until the rate falls to a quarter; gradients are cut to norm 1; each "
    "layer has a bias of its own, at ten times the rate; no dropout."
)
CLIPPED = "a bias reaches 64 tokens; " + CUT


def _short(steps: int, rate: float, every: int, **more: Any) -> dict[str, Any]:
    own = {"bias_lr": 10 * rate, "schedule": "cosine", "max_grad_norm": 1.0, "precision": "float32", "redraw": 100}
    return brief(steps, rate, every, **{"batch_size": 16, **own, **more})


def prf(features: int) -> str:
    """Positive features as the paper draws them."""
    return f"favor+:num_features={features}:draw=iid"


def with_bias(features: int, relative: str = "1d") -> str:
    """The paper's method: positive features of unit vectors with relative positions."""
    return f"nprf:num_features={features}:draw=iid:relative={relative}"


TABLE_5: dict[str, Any] = {
    "max_grad_norm": 1.0,
    "weight_decay": 0.01,
    "schedule": "linear",
    "beta1": 0.9,
    "eps": 1e-6,
    "precision": "bf16",
    "save_every": 10_000,
}
BASE = network(12, 12, 768, 3072, dropout=0.1, hidden_act="gelu", norm_first=False, **SHARED)
SENTENCE_MODEL = network(2, 4, 96, 192, norm_first=True, **OWN)
VOCABULARY = {"length": 512, "kind": "bpe", "lowercase": True, "vocab_size": 30_522}
UNSAID = (
    "full: the number of features of pre-trained models is not said: 64, as many as a head is wide; nor the "
    "vocabulary's: 30,522."
)

PRETRAIN = pair(
    "masked language modelling of 160 GB of text with BERT-base",
    f"{PAPER}, Sec. 4.1 and Table 5",
    full=partial(
        Run,
        task="masked",
        attention=with_bias(64),
        task_options={**VOCABULARY, "mask_share": 0.15},
        model=BASE,
        steps=1_000_000,
        batch_size=2048,
        learning_rate=2e-4,
        warmup_steps=20_000,
        beta2=0.999,
        eval_every=10_000,
        **TABLE_5,
    ),
    compared=("softmax", with_bias(64)),
    cpu=_short(500, 3e-3, 100, task_options=base.SHORT_TEXTS, model=SENTENCE_MODEL),
    note=(
        DRAWN,
        UNSAID,
        "full: half precision is bfloat16.",
        "cpu: 4,000 tokens, windows of 128, 2 layers of width 96, norms first; " + CLIPPED,
    ),
)


def _fine_tuning(name: str) -> Recipe:
    accuracy = {"glue": "accuracy"} if name in ("mrpc", "qqp") else {}
    epochs = 5 if name in ("mnli", "qqp", "qnli") else 10
    steps = steps_of(epochs, GLUE[name].samples, 32)
    return pair(
        f"GLUE: {GLUE[name].title}",
        f"{PAPER}, Table 1 and Table 5",
        full=partial(
            Run,
            task="sentences",
            attention=with_bias(64),
            task_options={**GLUE[name].options, **VOCABULARY, **accuracy},
            model={**BASE, "pooling": "cls", "classifier_act": "tanh"},
            steps=steps,
            batch_size=32,
            learning_rate=2e-5,
            warmup_steps=round(0.06 * steps),
            beta2=0.98,
            eval_every=1000,
            **TABLE_5,
        ),
        compared=("softmax", with_bias(64)),
        cpu=_short(500, 1e-3, 100, task_options=base.SHORT_SENTENCES, model=SENTENCE_MODEL),
        note=(
            DRAWN,
            UNSAID,
            "The paper has the best of the learning rates 5e-6, 1e-5, 2e-5, 3e-5, 4e-5 and batches of 16 and 32, each "
            "the median of five seeds; `compare` has one of them and the mean over --seeds.",
            f"full: {epochs} epochs of {GLUE[name].samples:,} samples.",
            *START,
            *(MISMATCHED if name == "mnli" else ()),
            "cpu: 4,000 tokens, up to 128 a sample, 2 layers of width 96, as rpe-pretrain; " + CLIPPED,
        ),
    )


SECTION_4_2: dict[str, Any] = {
    "steps": 150_000,
    "batch_size": 64,
    "warmup_steps": 6000,
    "schedule": "inverse_sqrt",
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": None,
    "eval_every": 1000,
    "save_every": 1000,
}
WIKITEXT = pair(
    "language model of WikiText-103",
    f"{PAPER}, Sec. 4.2 and Table 2",
    full=partial(
        Run,
        task="words",
        attention=with_bias(64),
        task_options={"data": "hub:Salesforce/wikitext:wikitext-103-raw-v1", "length": 512, "vocab_size": 32_768},
        model=network(6, 8, 512, 2048, dropout=0.1, **SHARED),
        learning_rate=2e-3,
        **SECTION_4_2,
    ),
    compared=("softmax", "elu", "rfa:num_features=64:draw=iid", "rfa-gate:num_features=64:draw=iid", with_bias(64)),
    cpu=_short(300, 3e-3, 50, task_options=base.SHORT_WORDS, model=network(3, 4, 96, 384, **OWN), batch_size=8),
    small=(*CAUSAL, f"rfa:num_features={FEATURES}", f"rfa-gate:num_features={FEATURES}"),
    note=(
        DRAWN,
        "The paper quotes the other methods from RFA's; here all train alike, those without a bias with absolute "
        "positions.",
        "full: by 32,768 sub-words, the paper by the words of the data set; compare the perplexity per word.",
        "cpu: 4,000 sub-words, windows of 256, 3 layers of width 96; " + CLIPPED,
    ),
)

ENCODER, DECODER = 16, 24
TRANSLATION = pair(
    "translation of IWSLT14, German to English",
    f"{PAPER}, Table 3 and App. A.3",
    full=partial(
        Run,
        task="translation",
        attention=with_bias(ENCODER),
        decoder_attention=with_bias(DECODER),
        task_options={
            "source": "de",
            "target": "en",
            "vocab_size": 10_000,
            "kind": "bpe",
            "beams": 5,
            "length_penalty": 1.2,
        },
        model=network(6, 4, 512, 1024, dropout=0.3, norm_first=False, hidden_act="relu", **SHARED),
        steps=50_000,
        batch_size=256,
        learning_rate=5e-4,
        warmup_steps=4000,
        schedule="inverse_sqrt",
        label_smoothing=0.1,
        beta1=0.9,
        beta2=0.98,
        weight_decay=1e-4,
        max_grad_norm=None,
        eval_every=1000,
        save_every=1000,
    ),
    compared=(
        "softmax",
        f"softmax > {prf(DECODER)}",
        f"{prf(ENCODER)} > {prf(DECODER)}",
        f"{with_bias(ENCODER)} > {with_bias(DECODER)}",
    ),
    cpu=_short(
        500,
        4e-3,
        100,
        task_options={"length": 40, "vocab_size": 2000, "bleu_samples": 150},
        model=network(2, 4, 128, 256, norm_first=True, **OWN),
        batch_size=32,
    ),
    small=CAUSAL,
    note=(
        DRAWN,
        "full: batches of 256 sentences, about the paper's 8,192 tokens.",
        "The other directions: --set task.source=en --set task.target=de.",
        "Attention to the source by nprf is by favor+, without a bias: the paper does not say what it is.",
        "Fig. 3b's maps, all with relative=1d: nprf with draw=orthogonal or spherical, trigonometric with "
        "normalize_qk=True.",
        "BLEU is of plain text, the paper's of tokens.",
        "full: the feed-forward part of 1024 and the decay of 0.0001 are fairseq's for IWSLT; they are not said.",
        "cpu: 2 + 2 layers of width 128, 2,000 tokens, sentences of up to 40; 150 are translated; norms "
        "first; " + CLIPPED,
    ),
)

KERNELIZED_RPE: dict[str, Recipe] = {
    "rpe-pretrain": PRETRAIN,
    **{f"rpe-glue-{x}": _fine_tuning(x) for x in ("cola", "rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli")},
    "rpe-wikitext": WIKITEXT,
    "rpe-translation": TRANSLATION,
}


IMAGES_IN_AN_EPOCH = 1_281_167
DEIT = (
    "Of DeiT's augmentation and regularization there are crops and flips, at cpu flips alone; the classifier has a "
    "hidden layer, the paper's none."
)
ON_CIFAR: dict[str, Any] = {
    "task_options": {"size": 32, "classes": 10, "augment": "flip", "resize": False, "validation_samples": 1000},
    "model": network(3, 4, 96, 192, patch_size=4, **OWN),
    "batch_size": 32,
}
IMAGENET = pair(
    "ImageNet-1K with DeiT-base",
    f"{PAPER}, Table 4 and App. A.4",
    full=partial(
        Run,
        task="images",
        attention=with_bias(32, "2d"),
        task_options={"size": 224, "classes": 1000, "augment": "crop", "resize": True},
        model=network(12, 12, 768, 3072, patch_size=16, pooling="mean", **SHARED),
        steps=steps_of(450, IMAGES_IN_AN_EPOCH, 1024),
        batch_size=1024,
        learning_rate=1e-5,
        warmup_steps=steps_of(20, IMAGES_IN_AN_EPOCH, 1024),
        schedule="cosine",
        label_smoothing=0.1,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.05,
        max_grad_norm=None,
        eval_every=1251,
        save_every=1251,
    ),
    compared=("softmax", "nprf:num_features=32:draw=iid", with_bias(32, "2d")),
    cpu=_short(400, 2e-3, 100, **ON_CIFAR),
    small=IMAGES,
    note=(
        DRAWN,
        f"full: 450 epochs of {IMAGES_IN_AN_EPOCH:,} images, 20 of warm-up.",
        DEIT,
        "cpu: CIFAR-10, 64 patches, 3 layers of width 96; " + CUT,
    ),
)

FINE_TUNING = pair(
    "a trained softmax DeiT-base goes on with positive features, on ImageNet-1K",
    f"{PAPER}, Table 4 (PRF, fine-tuned) and App. A.4",
    full=partial(
        IMAGENET.sizes[FULL],
        attention=prf(32),
        steps=steps_of(100, IMAGES_IN_AN_EPOCH, 1024),
        warmup_steps=steps_of(6, IMAGES_IN_AN_EPOCH, 1024),
    ),
    compared=(prf(32),),
    cpu=_short(100, 1e-3, 25, warmup_steps=6, **ON_CIFAR),
    small=IMAGES,
    note=(
        "First `train rpe-imagenet --attention softmax` at the same size, then --set start=FOLDER of that run; without "
        "it all weights are new.",
        DRAWN,
        f"full: 100 epochs of {IMAGES_IN_AN_EPOCH:,} images, 6 of warm-up.",
        DEIT,
        "cpu: CIFAR-10, 64 patches, 3 layers of width 96, 100 steps; " + CUT,
    ),
)

IMAGENET32 = pair(
    "next value of 32 x 32 images in colour, 3072 tokens",
    f"{PAPER}, Table 6 and App. A.5",
    full=partial(
        Run,
        task="pixels",
        attention=with_bias(32),
        task_options={"size": 32},
        model=network(6, 8, 512, 2048, dropout=0.1, **SHARED),
        learning_rate=5e-4,
        **SECTION_4_2,
    ),
    compared=(prf(32), with_bias(32)),
    cpu=_short(300, 3e-3, 50, task_options=base.SMALL_IMAGES, model=network(3, 4, 96, 384, **OWN), batch_size=4),
    small=CAUSAL,
    note=(
        DRAWN,
        "full: steps, schedule and the feed-forward part's width are not said: those of Sec. 4.2.",
        "cpu: images made 16 x 16, 768 tokens; 3 layers of width 96; " + CLIPPED,
    ),
)

RPE_ON_IMAGES: dict[str, Recipe] = {
    "rpe-imagenet": IMAGENET,
    "rpe-imagenet-finetune": FINE_TUNING,
    "rpe-imagenet32": IMAGENET32,
}
