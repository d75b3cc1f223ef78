"""Classify long byte sequences: which package of Python's standard library is a piece of source from?

python examples/long_classification.py --length 1024 --steps 150         ends in a table of accuracies by attention
"""

import argparse
import random
import sysconfig
import time
from pathlib import Path

import torch

from kernelformer.models import KernelformerConfig, KernelformerForSequenceClassification

PACKAGES = ("asyncio", "email", "encodings", "unittest")
ATTENTIONS = ("softmax", "favor+:num_features=64", "skyformer:num_landmarks=64")


def pieces(length: int) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    """Pieces of source with the number of their package, of files to train on and of other files to test on."""
    library, train, test = Path(sysconfig.get_paths()["stdlib"]), [], []
    for label, package in enumerate(PACKAGES):
        for place, file in enumerate(sorted((library / package).glob("*.py"))[:32]):
            source = file.read_bytes()
            cut = [source[i : i + length] for i in range(0, max(len(source) - length // 2, 1), length)][:6]
            (test if place % 4 == 0 else train).extend((x, label) for x in cut)
    return train, test


def batch(samples: list[tuple[bytes, int]]) -> dict[str, torch.Tensor]:
    """Padded bytes, the mask of real ones, and labels."""
    longest = max(len(x) for x, _ in samples)
    ids = torch.tensor([list(x.ljust(longest, b"\0")) for x, _ in samples])
    mask = torch.tensor([[1] * len(x) + [0] * (longest - len(x)) for x, _ in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([y for _, y in samples])}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--steps", type=int, default=150)
settings = parser.parse_args()
train, test = pieces(settings.length)
print(f"{len(train)} pieces to train on, {len(test)} to test on, of {settings.length} bytes")
print(f"{'attention':48} {'accuracy':>8} {'seconds':>8}")
for attention in ATTENTIONS:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": len(PACKAGES)}
    model = KernelformerForSequenceClassification(KernelformerConfig(vocab_size=256, attention=attention, **sizes))
    optimizer, order, start = torch.optim.AdamW(model.parameters(), lr=1e-3), random.Random(0), time.perf_counter()
    for _ in range(settings.steps):
        model(**batch(order.sample(train, 8))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    exam = batch(test)
    with torch.no_grad():
        right = model.eval()(**exam).logits.argmax(-1) == exam["labels"]
    print(f"{attention:48} {right.float().mean():8.3f} {seconds:8.1f}", flush=True)
