"""Train a byte language model on source of Python's standard library, or on a file of yours, and let it write.

python examples/byte_language_model.py --data my.txt --steps 300         ends in a table of bits per byte, and a sample
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch

import kernelformer as kf
from kernelformer.models import KernelformerConfig, KernelformerForCausalLM

ATTENTIONS = ("softmax", "favor+:num_features=64", "nprf:num_features=64:relative=1d:max_distance=64")


def source() -> bytes:
    """All modules of the standard library's top folder."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))


def windows(text: torch.Tensor, length: int, count: int, seed: int) -> torch.Tensor:
    """Pieces of the text (count, length), from random places."""
    starts = torch.randint(len(text) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(length)].long()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, help="a file; default: the standard library's source")
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--steps", type=int, default=300)
settings = parser.parse_args()
text = torch.frombuffer(bytearray(settings.data.read_bytes() if settings.data else source()), dtype=torch.uint8)
train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
exam = windows(held_out, settings.length, 32, seed=-1)
table = []
for attention in ATTENTIONS:
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = KernelformerForCausalLM(KernelformerConfig(vocab_size=256, attention=attention, **sizes))
    if attention != "softmax":
        kf.redraw(model, every=50)  # new random features now and then, so that it does not learn one draw
    groups = kf.parameter_groups(model, lr=5e-3, weight_decay=0.0)  # what kernels learn has a rate of its own
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    for step in range(settings.steps):
        ids = windows(train, settings.length, 8, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        table.append((attention, model.eval()(input_ids=exam, labels=exam).loss.item() / math.log(2)))
prompt = torch.tensor([list(b"def ")])
written = model.generate(prompt, max_new_tokens=200, do_sample=True, temperature=0.7)  # by the last one
print(bytes(written[0].tolist()).decode(errors="replace"), "\n")
print(f"{'attention':52} bits per byte after {settings.steps} steps of 8 x {settings.length} bytes")
print("\n".join(f"{name:52} {bits:.3f}" for name, bits in table))
