"""Train a small language model on several processes: data-parallel, or with sharded weights by ``--shard``.

accelerate launch --config_file examples/accelerate-cpu.yaml examples/train_processes.py --shard
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import kernelformer as kf
from kernelformer.models import KernelformerConfig, KernelformerForCausalLM
from kernelformer.parallel import shard


def make_model() -> KernelformerForCausalLM:
    """The model with its first weights, the same on every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
    return KernelformerForCausalLM(KernelformerConfig(**sizes, attention="favor+:num_features=32"))


def make_samples() -> list[torch.Tensor]:
    """Sequences that count upwards from anywhere."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(64, (1,), generator=generator) + torch.arange(24)) % 64 for _ in range(80)]


def train(sharded: bool, batch_size: int = 8) -> list[float]:
    """Losses of one pass over the samples, in batches that the processes share."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    loader = DataLoader(make_samples(), batch_size=batch_size // accelerator.num_processes)
    if sharded:  # on CPUs accelerate has no FSDP of its own: the model is not given to `prepare`
        model = shard(model)
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kf.redraw(model, every=5)
    losses = []
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train("--shard" in sys.argv), 1):
        print(f"step {step}: loss {loss:.4f}")
