"""Train a small Llama with exact attention on Python's own source, then convert it, and measure what is lost and saved:
python examples/convert_decoder.py --steps 200                           ends in a table of perplexities and caches
"""

import argparse
import sysconfig
from copy import deepcopy
from itertools import count
from pathlib import Path

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from kernelformer.conversion.tune import start_student, transfer
from kernelformer.hf import StateCache, convert, new_cache

WAYS = {
    "favor+ alone": ("favor+", {"num_features": 64}),
    "window and sinks alone": ("local", {"window": 32, "sinks": 4}),
    "loglinear, window, sinks": ("loglinear", {"num_features": 32, "window": 32, "sinks": 4}),
}
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(x.read_bytes() for x in files)), dtype=torch.uint8)


def windows(number: int, seed: int, length: int = 256) -> torch.Tensor:
    """Pieces of the text (number, length); those of negative seeds are from its last tenth, the others from before."""
    size = len(text) // 10 if seed < 0 else len(text) * 9 // 10
    starts = torch.randint(size - length, (number, 1), generator=torch.Generator().manual_seed(abs(seed)))
    return text[starts + torch.arange(length) + (len(text) - size if seed < 0 else 0)].long()


@torch.no_grad()
def show(name: str, model: LlamaForCausalLM, cache: Cache) -> None:
    """Print perplexity on held-out text, and the size of a cache after 2048 tokens."""
    ids = windows(16, -1)
    model(input_ids=windows(1, -2, 2048), past_key_values=cache, logits_to_keep=1)
    print(f"{name:28} {model(input_ids=ids, labels=ids).loss.exp():10.2f} {cache.nbytes / 1024:12.0f}", flush=True)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
torch.manual_seed(0)
sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for ids in (windows(8, step) for step in range(steps)):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{'attention':28} {'perplexity':>10} {'cache in KiB':>12}")
show("softmax, the original", model.eval(), StateCache(layers=DynamicCache(config=model.config).layers))
for name, (method, options) in WAYS.items():
    student = convert(deepcopy(model), method, **options)
    show(name, student, new_cache(student))
start_student(student, model, [{"input_ids": windows(2, -3)}])  # the last one, fitted to the original's attention
transfer(student, model, ({"input_ids": windows(2, step)} for step in count(steps)), steps=steps // 4)
show("the same, fitted", student, new_cache(student))
