"""An encoder in torch and in onnxruntime, as it is and converted: several ways to read the same tokens.

The original goes to onnxruntime twice: as the exporter writes it, which is two products and a softmax, with all weights
at once; and with that runtime's own attention, which works in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from kernelformer.export.check import difference, run, session
from kernelformer.export.graphs import Whole, trace_whole
from kernelformer.export.onnx_files import quiet_exporter, save_onnx
from kernelformer.measure.harness import too_large
from kernelformer.measure.lengths import Subject, contender
from kernelformer.timing import Figures, Step, time_rounds

ORIGINAL = "sdpa"  # the original's attention in torch, and what the exporter makes of it
OWN = "MultiHeadAttention"  # the original with onnxruntime's own attention
TORCH, ONNX = "torch", "onnxruntime"
EXAMPLE = 70  # tokens that the original is traced with
COMPARED = 1024  # tokens, of which the outputs in both runtimes are compared
# The sizes of MiniLM-L6.
SIZES: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}


class Encoder(Subject):
    """The encoder that is measured; with an empty folder a BERT of `SIZES` with random weights."""

    def build(self, length: int, head: bool = False) -> tuple[Any, list[str]]:
        """Build the model without a head; see `Subject.build`."""
        model, stretched = super().build(length, head)
        if getattr(model.config, "is_decoder", False) or hasattr(model.config, "rope_parameters"):
            raise ValueError(
                f"{self.folder} is a {type(model).__name__}; exported encoders are measured here, decoders by "
                f"`kernelformer study serving`."
            )
        return model, stretched

    def _drawn(self, head: bool) -> Any:
        if self.folder:
            return super()._drawn(head)
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        return BertModel(BertConfig(**SIZES), add_pooling_layer=False)


class Unmasked(nn.Module):
    """The original on sequences without padding, (B, L) -> (B, L, d): no mask, as its fastest attention wants it."""

    inputs, outputs = ("input_ids",), ("last_hidden_state",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Read whole sequences."""
        hidden: Tensor = self.model(input_ids=input_ids).last_hidden_state
        return hidden


def own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend by onnxruntime's own operator, `MultiHeadAttention`, as transformers calls an attention; for tracing only.

    It works in tiles where there is no mask. The exporter's translation of SDPA is two products and a softmax, which
    would take 13 GB a layer at 16384 tokens.
    """
    batch, heads, length, width = query.shape
    flat = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    scale = options.get("scaling") or width**-0.5
    out = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        flat,
        {"num_heads": heads, "scale": float(scale)},
        dtype=query.dtype,
        shape=(batch, length, heads * width),
        version=1,
    )
    return out.unflatten(2, (heads, width)), None


def without_mask(model: Any, name: str) -> Any:
    """The original with the attention of `ORIGINAL` or `OWN`, and without masks, for tracing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    label = f"kernelformer_unmasked_{name.lower()}"
    AttentionInterface.register(label, own_attention if name == OWN else ALL_ATTENTION_FUNCTIONS[ORIGINAL])
    AttentionMaskInterface.register(label, lambda *_, **__: None)
    model.set_attn_implementation(label)
    return model


def file_of(folder: str, number: int) -> Path:
    """The graph of the contender with this number."""
    return Path(folder) / f"{number}.onnx"


def prepare(subject: Mapping[str, Any], longest: int, names: Sequence[str], folder: str) -> dict[str, Figures]:
    """Export the original and its converted copies into a folder; the problem of those that cannot be.

    Args:
        subject: fields of `Encoder`.
        longest: tokens.
        names: of attentions, `ORIGINAL` and `OWN` among them.
        folder: for the graphs.
    """
    model, _ = Encoder(**subject).build(longest)
    problems: dict[str, Figures] = {}
    for number, name in enumerate(names):
        try:
            with quiet_exporter(), torch.no_grad():
                module: Any
                if name in (ORIGINAL, OWN):
                    module = Unmasked(without_mask(contender(model, ORIGINAL), name))
                    axes = {0: Dim("batch"), 1: Dim("length", max=longest)}
                    tokens = Encoder(**{**subject, "batch": 2}).tokens(model, min(EXAMPLE, longest - 1))
                    program = torch.export.export(module, (tokens,), dynamic_shapes=(axes,))
                else:
                    module = Whole(contender(model, name))
                    program = trace_whole(module, longest)
            save_onnx(program, module, file_of(folder, number))
        except ValueError as problem:
            problems[way(name, ONNX)] = {"problem": str(problem).splitlines()[0]}
    return problems


def measure(
    subject: Mapping[str, Any], longest: int, length: int, names: Sequence[str], folder: str, rounds: int, budget: float
) -> dict[str, Figures]:
    """Time all ways to read ``length`` tokens in this process: {"attention in torch": figures}.

    Args:
        subject: fields of `Encoder`.
        longest: tokens that the graphs were made for.
        length: tokens.
        names: of attentions, `ORIGINAL` first.
        folder: of the graphs that `prepare` has written.
        rounds: at least so many runs of each are timed.
        budget: seconds for timing all of them.
    """
    this = Encoder(**subject)
    model, _ = this.build(longest)
    tokens, steps, others = this.tokens(model, length), dict[str, Step](), dict[str, Figures]()
    for number, name in enumerate(names):
        if name != OWN:
            reads = contender(model, name)
            steps[way(name, TORCH)] = Step(partial(_read, reads, tokens))
        if not file_of(folder, number).is_file():
            continue
        # Scores and their softmax, all of them at once.
        weights = 2 * 4 * this.batch * model.config.num_attention_heads * length**2
        problem = too_large(weights) if name == ORIGINAL else None
        if problem:
            others[way(name, ONNX)] = {"problem": problem}
            continue
        graph = session(file_of(folder, number), torch.get_num_threads())
        original = contender(model, ORIGINAL) if name == OWN else reads
        first = tokens[:, :COMPARED]
        others[way(name, ONNX)] = {"difference": difference(_run(graph, first), _read(original, first))}
        steps[way(name, ONNX)] = Step(partial(_run, graph, tokens))
    figures = time_rounds(steps, rounds, budget)
    return {name: {**others.get(name, {}), **figures.get(name, {})} for name in (*figures, *others)}


def way(name: str, runtime: str) -> str:
    """The name of an attention in a runtime."""
    return f"{name} in {runtime}"


def _run(graph: Any, tokens: Tensor) -> Any:
    """The vectors of tokens without padding by a graph, whose inputs are the tokens, and it may be mask and types."""
    given = [tokens.numpy(), torch.ones_like(tokens).numpy(), torch.zeros_like(tokens).numpy()]
    return run(graph, given[: len(graph.get_inputs())])[0]


@torch.no_grad()
def _read(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens).last_hidden_state
    return hidden
