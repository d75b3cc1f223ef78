"""The fair peer of inference on a CPU: an encoder and its converted copies, in torch and in onnxruntime.

The original runs in onnxruntime as the exporter writes it, and with that runtime's own attention, in tiles. Tokens are
random, nothing is padded, and tables of positions are stretched where they end: only speed is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.export import Dim

from kernelformer.errors import WorkerError
from kernelformer.export.graphs import Whole, trace_whole
from kernelformer.export.onnx_files import difference, quiet_exporter, run_graph, save_onnx, session
from kernelformer.formatting import human_time
from kernelformer.modules.spec import parse_method
from kernelformer.quiet import silent_libraries
from kernelformer.timing import Figures, Step, time_rounds
from kernelformer_lab.bench.harness import run_in_process, too_large
from kernelformer_lab.studies.base import Log, Progress, read_record, write_record
from kernelformer_lab.studies.lengths import Subject, contender, describe
from kernelformer_lab.studies.settings import ExportedSettings

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
    return run_graph(graph, given[: len(graph.get_inputs())])[0]


@torch.no_grad()
def _read(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens).last_hidden_state
    return hidden


NAME = "exported"
BASE = way(ORIGINAL, TORCH)  # what the others are compared with


@dataclass
class Row:
    """One way to read so many tokens: seconds of a pass, or why there are none.

    Args:
        length: tokens.
        way: attention and runtime.
        seconds: median of the rounds.
        rounds: number of timed passes.
        difference: in onnxruntime, of its outputs from torch, over the largest output; of the first 1024 tokens.
        note: why there are no figures.
    """

    length: int
    way: str
    seconds: float | None = None
    rounds: int = 0
    difference: float | None = None
    note: str = ""


@dataclass
class Result:
    """Rows of all lengths, and what they depend on."""

    about: dict[str, Any]
    stretched: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def faster(self, row: Row) -> float | None:
        """How many times faster than the original in torch at the same length."""
        base = next((x.seconds for x in self.rows if x.length == row.length and x.way == BASE), None)
        return None if base is None or row.seconds is None else base / row.seconds


def names(settings: ExportedSettings) -> list[str]:
    """The attentions, the original's first."""
    return list(dict.fromkeys((ORIGINAL, OWN, *settings.attention)))


def ways(settings: ExportedSettings) -> list[str]:
    """All ways to read the tokens: each attention in each runtime that has it."""
    pairs = [(name, runtime) for name in names(settings) for runtime in (TORCH, ONNX)]
    return [way(*x) for x in pairs if x != (OWN, TORCH)]


def steps(settings: ExportedSettings) -> int:
    """Return how many processes there are: one that exports, and one for each length."""
    for spec in settings.attention:
        parse_method(spec)
    for what in ("lengths", "attention"):
        if not getattr(settings, what):
            raise ValueError(f"{what} must name at least one, got {getattr(settings, what)!r}.")
    return 1 + len(set(settings.lengths))


def run(
    settings: ExportedSettings, folder: Path, log: Log = lambda _: None, progress: Progress = lambda: None
) -> Result:
    """Export, then time all ways at each length that ``folder`` does not hold yet; see `studies.base`."""
    steps(settings)
    subject = Encoder(settings.model, "encoder", not settings.model, settings.allow_pickle, settings.batch)
    longest = max(settings.lengths)
    with silent_libraries():
        model, stretched = subject.build(longest)
    name = Path(settings.model).resolve().name if settings.model else "a BERT of MiniLM-L6's sizes"
    about = {**describe(model, subject, name, "encoder"), ONNX: version(ONNX), "ways": ways(settings)}
    result = Result(about, stretched)
    result.rows = read_rows(folder, result.about)
    todo = [x for x in sorted(set(settings.lengths)) if x not in {row.length for row in result.rows}]
    common: dict[str, Any] = {"subject": asdict(subject), "longest": longest, "names": names(settings)}
    with TemporaryDirectory(prefix="kernelformer-export-") as graphs:
        log("exporting")
        problems = _job(prepare, **common, folder=graphs) if todo else {}
        for _ in range(steps(settings) - len(todo)):
            progress()
        for length in todo:
            log(f"{length} tokens: timing")
            given = {"length": length, "rounds": settings.rounds, "budget": settings.budget, "folder": graphs}
            result.rows += _rows(length, ways(settings), problems | _measured(common | given))
            write_record(folder, NAME, settings, record(result))
            progress()
    return result


def read_rows(folder: Path, about: dict[str, Any]) -> list[Row]:
    """The rows that an earlier call has written, of the same model, ways and machine.

    Raises:
        ValueError: a record of something else is there.
    """
    path, fields = folder / f"{NAME}.json", Row.__dataclass_fields__
    try:
        kept = read_record(folder, NAME)
        if kept is None:
            return []
        rows = [Row(**{key: x[key] for key in fields}) for x in kept["rows"]]
        other = {key: x for key, x in kept["about"].items() if about.get(key) != x}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not of this study ({problem!r}); move it away, or choose another --out.") from None
    if other:
        raise ValueError(f"{path} holds figures of another model or machine ({other}); choose another --out.")
    return rows


def _measured(given: dict[str, Any]) -> Figures:
    try:
        return _job(measure, **given)
    except WorkerError as problem:
        return {"": {"problem": str(problem)}}


def _rows(length: int, names: Sequence[str], figures: Figures) -> list[Row]:
    rows = []
    for name in names:
        mine = figures.get(name) or figures.get("") or {"problem": "was not measured"}
        row = Row(length, name, mine.get("seconds"), mine.get("rounds", 0), mine.get("difference"))
        row.note = mine.get("problem", "")
        rows.append(row)
    return rows


def _job(work: Any, **given: Any) -> Figures:
    return run_in_process(work, threads=torch.get_num_threads(), **given)


def record(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON."""
    rows = [{**asdict(row), "times faster": result.faster(row)} for row in result.rows]
    return {"about": result.about, "stretched": result.stretched, "rows": rows}


def tables(result: Result) -> list[Table]:
    """Return one table: a line for each way, a column for each length."""
    lengths = sorted({row.length for row in result.rows})
    out = Table(title=f"a pass of {result.about['model']}, times faster than {BASE}", title_justify="left")
    out.add_column("attention", no_wrap=True)
    for length in lengths:
        out.add_column(f"{length} tokens", justify="right", no_wrap=True)
    for name in dict.fromkeys(row.way for row in result.rows):
        mine = {row.length: row for row in result.rows if row.way == name}
        out.add_row(name, *(_cell(result, mine[length]) for length in lengths))
    notes = [f"{row.length} tokens, {row.way}: {row.note}" for row in result.rows if row.note]
    out.caption, out.caption_justify = "\n".join(notes) or None, "left"
    return [out]


def _cell(result: Result, row: Row) -> str:
    if row.seconds is None:
        return "not run"
    faster = result.faster(row)
    return human_time(row.seconds) + (f" ({faster:.2f}x)" if faster is not None and row.way != BASE else "")


def picture(result: Result, path: Path) -> None:
    """Draw the seconds of a pass over the length."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), constrained_layout=True)
    for name in dict.fromkeys(row.way for row in result.rows):
        points = [(row.length, row.seconds) for row in result.rows if row.way == name and row.seconds is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if ONNX in name else "-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a pass")
    lengths = sorted({row.length for row in result.rows})
    axes.set_xticks(lengths, [str(x) for x in lengths])
    axes.minorticks_off()
    axes.grid(True, alpha=0.2)
    figure.legend(loc="outside upper center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
