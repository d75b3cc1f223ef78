"""Defaults of the studies that the command line shows: plain values, so that its help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

POSITION_LENGTHS = (1024, 2048, 4096, 8192, 16384)  # tokens; the paper goes to 40960
ENCODER_BOUNDS = ("opt", "opt+qk")  # attention that returns V, and that with the gradients of Q and K
ENCODER_ATTENTIONS = ("softmax", "favor+:num_features=256", *ENCODER_BOUNDS)


@dataclass(frozen=True)
class SparsitySetting:
    """One size of the study of sparsity; the defaults are for a CPU, comments give the paper's."""

    length: int = 48  # 200
    train: int = 16000  # 160,000
    validation: int = 2000  # 40,000
    batch: int = 32  # 400
    steps: int = 800
    lr: float = 1e-3  # 5e-6
    kernel_lr: float = 1e-3
    weight_decay: float = 0.1
    beta2: float = 0.98
    eps: float = 1e-9
    num_features: int = 64
    redraw_every: int = 100
    check_every: int = 50
    layers: int = 3
    width: int = 64
    heads: int = 4
