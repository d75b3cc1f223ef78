"""An encoder and its converted copies, in torch and in onnxruntime with that runtime's own attention.

    python tools/studies/exported.py --model MODEL --lengths 1024,4096

The original runs in onnxruntime as the exporter writes it, and with that runtime's own attention, in tiles. Tokens are
random, nothing is padded, and tables of positions are stretched where they end: only speed is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.export import Dim

from kernelformer.export.graphs import Whole, trace_whole
from kernelformer.export.onnx_files import difference, quiet_exporter, run_graph, save_onnx, session
from kernelformer.formatting import human_time
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.settings import PICKLE, Settings, option
from kernelformer_lab.bench.harness import too_large
from kernelformer_lab.bench.timing import Figures, Step, time_rounds
from kernelformer_lab.cli.studies import main
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.studies.base import SCRIPT, Log, Progress, Record, Row, Study, unique
from kernelformer_lab.studies.lengths import Subject, contender, describe

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


@dataclass(frozen=True, kw_only=True)
class ExportedSettings(Settings):
    """Settings of this study."""

    model: str = option("", "folder of an encoder; default: random weights, MiniLM-L6's sizes", path=True)
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=64", "favor+:num_features=64:window=64:sinks=4"),
        "what it is converted to, separated by commas",
    )
    lengths: tuple[int, ...] = option((1024, 4096, 16384), "tokens", least=2)
    batch: int = option(1, "sequences at once", least=1)
    rounds: int = option(2, "timed passes of each, at least", least=1)
    budget: float = option(20.0, "seconds for all passes of a length", least=0.01)
    allow_pickle: bool = option(False, PICKLE, switch=True)


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


def prepare(subject: Encoder, longest: int, names: Sequence[str], folder: str) -> dict[str, Figures]:
    """Export the original and its converted copies into a folder; return the problem of those that cannot be."""
    model, _ = subject.build(longest)
    problems: dict[str, Figures] = {}
    for number, name in enumerate(names):
        try:
            with quiet_exporter(), torch.no_grad():
                module: Any
                if name in (ORIGINAL, OWN):
                    module = Unmasked(without_mask(contender(model, ORIGINAL), name))
                    axes = {0: Dim("batch"), 1: Dim("length", max=longest)}
                    tokens = replace(subject, batch=2).tokens(model, min(EXAMPLE, longest - 1))
                    program = torch.export.export(module, (tokens,), dynamic_shapes=(axes,))
                else:
                    module = Whole(contender(model, name))
                    program = trace_whole(module, longest)
            save_onnx(program, module, file_of(folder, number))
        except ValueError as problem:
            problems[way(name, ONNX)] = {"problem": str(problem).splitlines()[0]}
    return problems


def measure(
    subject: Encoder, longest: int, length: int, names: Sequence[str], folder: str, rounds: int, budget: float
) -> dict[str, Figures]:
    """Time all ways to read ``length`` tokens: {"attention in torch": figures}; ``folder`` has `prepare`'s graphs."""
    model, _ = subject.build(longest)
    tokens, steps, others = subject.tokens(model, length), dict[str, Step](), dict[str, Figures]()
    for number, name in enumerate(names):
        if name != OWN:
            reads = contender(model, name)
            steps[way(name, TORCH)] = Step(partial(_read, reads, tokens))
        if not file_of(folder, number).is_file():
            continue
        # Scores and their softmax, all of them at once.
        weights = 2 * 4 * subject.batch * model.config.num_attention_heads * length**2
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
    return run_graph(graph, given[: len(graph.get_inputs())])[0]


@torch.no_grad()
def _read(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens).last_hidden_state
    return hidden


BASE = way(ORIGINAL, TORCH)  # what the others are compared with


def names(settings: ExportedSettings) -> list[str]:
    """The attentions, the original's first."""
    return list(dict.fromkeys((ORIGINAL, OWN, *settings.attention)))


def ways(settings: ExportedSettings) -> list[str]:
    """All ways to read the tokens: each attention in each runtime that has it."""
    pairs = [(name, runtime) for name in names(settings) for runtime in (TORCH, ONNX)]
    return [way(*x) for x in pairs if x != (OWN, TORCH)]


def steps(settings: ExportedSettings) -> int:
    """A step for the export, and one for each length."""
    for spec in settings.attention:
        parse_method(spec)
    for what in ("lengths", "attention"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")
    return 1 + len(set(settings.lengths))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Export, then time all ways at each length that the record does not have yet."""
    settings = record.settings
    steps(settings)
    subject = Encoder(settings.model, "encoder", not settings.model, settings.allow_pickle, settings.batch)
    longest = max(settings.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    name = Path(settings.model).resolve().name if settings.model else "a BERT of MiniLM-L6's sizes"
    about = {**describe(model, subject, name, "encoder"), ONNX: version(ONNX), "ways": ways(settings)}
    record.resume({"about": about})
    record.figures["stretched"] = stretched
    todo = [x for x in sorted(set(settings.lengths)) if not record.where(length=x)]
    with TemporaryDirectory(prefix="kernelformer-export-") as graphs:
        log("exporting")
        problems = prepare(subject, longest, names(settings), graphs) if todo else {}
        for _ in range(steps(settings) - len(todo)):
            progress()
        for length in todo:
            log(f"{length} tokens: timing")
            found = measure(subject, longest, length, names(settings), graphs, settings.rounds, settings.budget)
            record.rows.extend(_rows(length, ways(settings), problems | found))
            record.save()
            progress()


def _rows(length: int, names: Sequence[str], figures: Figures) -> list[Row]:
    """Of each way the median ``seconds`` of so many ``rounds``, or a ``note`` why there are none.

    ``difference`` is that of the outputs in onnxruntime from torch, over the largest output, of the first 1024 tokens.
    """
    base, rows = figures.get(BASE, {}).get("seconds"), []
    for name in names:
        mine = figures.get(name) or {"problem": "was not measured"}
        row = {"length": length, "way": name, "seconds": mine.get("seconds"), "rounds": mine.get("rounds", 0)}
        faster = base / row["seconds"] if base and row["seconds"] else None
        more = {"difference": mine.get("difference"), "note": mine.get("problem", ""), "times faster": faster}
        rows.append({**row, **more})
    return rows


def tables(record: Record) -> list[Table]:
    """A line for each way, a column for each length."""
    lengths = sorted(unique(record.rows, "length"))
    cells = [
        (name, *(_cell(x) for length in lengths for x in record.where(way=name, length=length)))
        for name in unique(record.rows, "way")
    ]
    notes = [f"{x['length']} tokens, {x['way']}: {x['note']}" for x in record.rows if x["note"]]
    title = f"a pass of {record.figures['about']['model']}, times faster than {BASE}"
    columns = ("attention", *(f"{x} tokens" for x in lengths))
    return [table(title, columns, cells, caption="\n".join(notes) or None)]


def _cell(row: Row) -> str:
    if row["seconds"] is None:
        return "not run"
    faster = row["times faster"]
    return human_time(row["seconds"]) + (f" ({faster:.2f}x)" if faster is not None and row["way"] != BASE else "")


def picture(record: Record, path: Path) -> None:
    """Draw the seconds of a pass over the length."""
    with drawing(path, (7, 5), dpi=150) as (figure, ((axis,),)):
        for name in unique(record.rows, "way"):
            points = [(x["length"], x["seconds"]) for x in record.where(way=name) if x["seconds"] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", linestyle="--" if ONNX in name else "-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a pass")
        lengths = sorted(unique(record.rows, "length"))
        axis.set_xticks(lengths, [str(x) for x in lengths])
        axis.minorticks_off()
        axis.grid(True, alpha=0.2)
        figure.legend(loc="outside upper center", ncols=2, fontsize=7)


STUDY = Study("exported", "", ExportedSettings, steps, run, tables, picture, resumes=True, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Time an encoder and its converted copies in torch and in onnxruntime with its own attention.")
