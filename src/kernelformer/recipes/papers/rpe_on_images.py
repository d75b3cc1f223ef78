"""Kernelized attention with relative positional encoding, on images: Table 4, App. A.4, A.5, Table 6."""

from __future__ import annotations

from functools import partial
from typing import Any

from kernelformer.recipes.papers.base import CAUSAL, FULL, IMAGES, Recipe, network, pair, steps_of
from kernelformer.recipes.papers.kernelized_rpe import CLIPPED, CUT, DRAWN, OWN, PAPER, SHARED, SHORT, prf, with_bias
from kernelformer.training.config import Run

IMAGES_IN_AN_EPOCH = 1_281_167
DEIT = (
    "Of DeiT's augmentation and regularization there are crops and flips, at cpu flips alone; the classifier has a "
    "hidden layer, the paper's none."
)
ON_CIFAR: dict[str, Any] = {
    **SHORT,
    "task_options": {"size": 32, "classes": 10, "augment": "flip", "resize": False, "validation_samples": 1000},
    "model": network(3, 4, 96, 192, patch_size=4, **OWN),
    "steps": 400,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "bias_lr": 2e-2,
    "warmup_steps": 40,
    "eval_every": 100,
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
    cpu=ON_CIFAR,
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
    cpu={**ON_CIFAR, "steps": 100, "learning_rate": 1e-3, "bias_lr": 1e-2, "warmup_steps": 6, "eval_every": 25},
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
        steps=150_000,
        batch_size=64,
        learning_rate=5e-4,
        warmup_steps=6000,
        schedule="inverse_sqrt",
        beta1=0.9,
        beta2=0.98,
        eps=1e-6,
        weight_decay=0.01,
        max_grad_norm=None,
        eval_every=1000,
        save_every=1000,
    ),
    compared=(prf(32), with_bias(32)),
    cpu={
        **SHORT,
        "task_options": {"size": 16, "resize": True, "validation_samples": 64},
        "model": network(3, 4, 96, 384, **OWN),
        "steps": 300,
        "batch_size": 4,
        "learning_rate": 3e-3,
        "bias_lr": 3e-2,
        "warmup_steps": 30,
        "eval_every": 50,
    },
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
