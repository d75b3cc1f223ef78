"""Watch a stream of bytes: a small model reads it in constant memory and says how surprising it is.

python examples/stream_bytes.py --steps 300 --stream my.log              ends in a figure, out/stream.png

It learns the source of Python's standard library. By default the stream is other source with random bytes and a German
text between; the figure shows both as hills.
"""

import argparse
import math
import random
import sysconfig
from pathlib import Path

import torch
from matplotlib.figure import Figure

from kernelformer.cache import StateCache
from kernelformer.models import KernelformerConfig, KernelformerForCausalLM

GERMAN = "Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind; er hat den Knaben in dem Arm. "
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--stream", type=Path, help="a file to read; default: see above")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--length", type=int, default=16384, help="bytes to read")
parser.add_argument("--out", type=Path, default=Path("out/stream.png"))
settings = parser.parse_args()
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
train = torch.frombuffer(bytearray(b"".join(x.read_bytes() for x in files[::2])), dtype=torch.uint8)
other, part = b"".join(x.read_bytes() for x in files[1::2]), settings.length // 5
parts = [other, random.Random(0).randbytes(part), other[part:], (GERMAN * 1000).encode(), other[2 * part :]]
stream = settings.stream.read_bytes()[: settings.length] if settings.stream else b"".join(x[:part] for x in parts)

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
model = KernelformerForCausalLM(
    KernelformerConfig(attention="favor+:num_features=32:window=32:sinks=2:rotary=True", **sizes)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(settings.steps):
    ids = train[torch.randint(len(train) - 256, (8, 1)) + torch.arange(256)].long()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

cache, last, bits, kept = StateCache(2), torch.zeros(1, 1, dtype=torch.long), [], []
with torch.no_grad():
    for piece in torch.tensor(list(stream)).split(128):  # each is read once, and only the state is kept
        ids = torch.cat([last, piece[None, :-1]], 1)
        logits = model.eval()(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
        bits.append(torch.nn.functional.cross_entropy(logits, piece).item() / math.log(2))
        kept.append(cache.nbytes / 1024)
        last = piece[None, -1:]
figure = Figure(figsize=(8, 4), layout="constrained")
for axis, values, label in zip(figure.subplots(2), (bits, kept), ("bits per byte", "state, KiB"), strict=True):
    axis.plot([128 * (i + 1) for i in range(len(values))], values)
    axis.set(xlabel="bytes read", ylabel=label, ylim=(0, 1.1 * max(values)))
settings.out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(settings.out)
print(f"surprise from {min(bits):.1f} to {max(bits):.1f} bits per byte, state of {kept[-1]:.0f} KiB: {settings.out}")
