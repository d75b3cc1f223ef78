"""Convert a pretrained encoder in several ways, and compare its sentence embeddings with the original's.

python examples/convert_encoder.py --model FOLDER --text texts.txt       ends in a table of cosines

Without --model it is a small BERT with random weights, so large that its attention is as sharp as a trained one's: it
shows what is easy and what is hard, not how good a real model would be.
"""

import argparse
import sysconfig
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from kernelformer.hf import convert

WAYS = {
    "favor+": {"num_features": 128},
    "loglinear": {"num_features": 128},
    "wildcat": {"num_landmarks": 64},
    "wildcat and a window": {"num_landmarks": 64, "window": 32, "sinks": 1},
    "window alone (local)": {"window": 32, "sinks": 1},
}


def small_bert() -> BertModel:
    """A model of two layers that needs no download."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, initializer_range=0.25))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder, or a name on the hub")
parser.add_argument("--text", type=Path, help="a text a line; default: docstrings of the standard library")
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--texts", type=int, default=8)
settings = parser.parse_args()
file = settings.text or Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
texts = [x for x in file.read_text().split("\n" if settings.text else "\n\n") if len(x) >= settings.length]
model = (AutoModel.from_pretrained(settings.model) if settings.model else small_bert()).eval()
inputs = [torch.tensor([list(x.encode()[: settings.length])]) for x in texts[: settings.texts]]
if settings.model:
    cut = {"truncation": True, "max_length": settings.length, "return_tensors": "pt"}
    inputs = [AutoTokenizer.from_pretrained(settings.model)(x, **cut).input_ids for x in texts[: settings.texts]]
with torch.no_grad():
    own = torch.cat([model(input_ids=x).last_hidden_state.mean(1) for x in inputs])
    print(f"{'attention':24} cosine to the original's embeddings, mean and least of {len(inputs)} texts")
    for name, options in WAYS.items():
        linear = convert(deepcopy(model), "local" if "alone" in name else name.split()[0], **options)
        cosines = torch.cosine_similarity(
            own, torch.cat([linear(input_ids=x).last_hidden_state.mean(1) for x in inputs])
        )
        print(f"{name:24} {cosines.mean():.3f} {cosines.min():.3f}")
