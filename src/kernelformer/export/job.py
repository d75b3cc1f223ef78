"""A model as ONNX graphs that run without torch, compared with torch before anything is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template
from torch import nn
from transformers.utils import CONFIG_NAME

from kernelformer import __version__
from kernelformer.conversion.checkpoint import appearing
from kernelformer.conversion.settings import ExportSettings
from kernelformer.export.graphs import Prompt, Step, Whole, causal_cores, trace_step, trace_whole
from kernelformer.export.onnx_files import OPSET, Differences, compare, save_onnx, traced
from kernelformer.files import read_json, write_json, write_text
from kernelformer.formatting import human_bytes
from kernelformer.hf import load
from kernelformer.hf.attend import KeptAttention
from kernelformer.hf.save import KIND
from kernelformer.lazy import require_extra
from kernelformer.models import (
    KernelformerForCausalLM,
    KernelformerForMaskedLM,
    KernelformerForSequenceClassification,
    KernelformerModel,
)
from kernelformer.models.blocks import Block
from kernelformer.models.saved import load_saved, model_folder
from kernelformer.modules import KernelAttention
from kernelformer.modules.exact import GrowingCore


def write_script(folder: Path, vocabulary: int, longest: int | None, *, generates: bool) -> None:
    """Write a script that runs the graphs of a folder without torch; it continues a text, or reads one."""
    name = "generate.py" if generates else "run.py"
    tokens = "tokenizer" if (folder / "tokenizer.json").is_file() else "bytes" if vocabulary == 256 else "numbers"
    source = Path(__file__).with_name("script.py.jinja").read_text("utf-8")
    template = Template(source, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    write_text(folder / name, template.render(name=name, tokens=tokens, longest=longest, generates=generates))


ENCODERS = (KernelformerModel, KernelformerForSequenceClassification, KernelformerForMaskedLM)
OWN = (*ENCODERS, KernelformerForCausalLM)


def check_model(model: Any) -> None:
    """Raise a ValueError for a model that cannot be exported: what it is, and what can be."""
    name, config = type(model).__name__, model.config
    attentions = [x.attention for x in model.modules() if isinstance(x, Block)]
    inner = [x for x in attentions if not isinstance(x, KernelAttention)]
    if inner:
        raise ValueError(f"{type(inner[0]).__name__} of {name} cannot be exported; use a method of list_methods().")
    if hasattr(model, "conversion"):
        reads_tokens = getattr(model, "main_input_name", "") == "input_ids"
        crosses = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
        fits = reads_tokens and not crosses
    else:
        fits = isinstance(model, OWN)
    if not fits:
        raise ValueError(
            f"{name} cannot be exported: encoders of tokens and causal language models can, not models of images, "
            f"series or pairs, nor those with an encoder and a decoder."
        )
    kept = [x for x, module in model.named_modules() if isinstance(module, KeptAttention)]
    if kept:
        raise ValueError(
            f"{kept[0]} of {name} was kept as the original has it ({model.get_submodule(kept[0]).reason}), and cannot "
            f"be exported; export the original, or convert one without such attentions."
        )


def is_causal(model: Any) -> bool:
    """Return True for a causal language model."""
    return bool(model.can_generate()) and not isinstance(model, ENCODERS)


def growing_layers(model: Any) -> dict[int, str]:
    """The layers of a causal model whose state keeps every key, some heads' keys included, and their methods."""
    cores = enumerate(causal_cores(model))
    return {i: core.method for i, core in cores if any(isinstance(x, GrowingCore) for x in core.modules())}


def longest_of(model: Any) -> int | None:
    """Tokens that a model has positions for; None where there is no end."""
    if isinstance(model, OWN):
        if isinstance(model, KernelformerForCausalLM):
            return model.longest
        inner = model if isinstance(model, KernelformerModel) else model.model
        return inner.embeddings.longest
    named = [(name.rpartition(".")[2], x) for name, x in model.named_modules() if isinstance(x, nn.Embedding)]
    tables = [x for name, x in named if "position" in name or name == "wpe"]
    # Some count from behind their padding token on.
    rooms = [x.num_embeddings - (0 if x.padding_idx is None else x.padding_idx + 1) for x in tables]
    rooms += [x for x in [getattr(model.config, "max_position_embeddings", None)] if x is not None and tables]
    return min(rooms, default=None)


WHOLE_FILE, STEP_FILE, RECORD = "model.onnx", "decode.onnx", "export.json"
# What belongs to a model beside its weights, and goes along.
COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt")


@dataclass(frozen=True)
class Exported:
    """Record of an export."""

    folder: Path
    files: dict[str, int]
    kind: str
    longest: int | None  # tokens that it has positions for; None where there is no end
    grows: list[int]  # numbers of the layers whose state keeps every key
    differences: Differences
    opset: int = OPSET


def export_folder(
    folder: str | Path,
    out: str | Path,
    settings: ExportSettings | None = None,
    *,
    log: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Export a saved model: ours, that of a run, or a converted one, to a folder that does not exist yet.

    It is there when all is done and compared, or not at all.

    Raises:
        ValueError: no model, one that cannot be exported, which is said by name, or a graph that differs from torch.
    """
    require_extra("export to ONNX", "onnx", "onnxruntime", "onnxscript", extra="export")
    setting, target = settings or ExportSettings(), Path(out)
    if target.exists():
        raise ValueError(f"{target} is there already; give the name of a folder that is not, or remove it.")
    home, model = load_exportable(Path(folder))
    with appearing(target) as part:
        result = _write(model, part, setting, log)
        _finish(home, part, model, result, generates=(part / STEP_FILE).is_file())
    sizes = {x.name: x.stat().st_size for x in sorted(target.iterdir())}
    return Exported(target, sizes, *result)


def _write(
    model: nn.Module, part: Path, setting: ExportSettings, log: Callable[[str], None]
) -> tuple[str, int | None, list[int], Differences]:
    """Write the graphs and compare them with the model."""
    longest, steps = longest_of(model), is_causal(model) and not setting.prompt_only
    grows = growing_layers(model) if steps else {}
    if grows and not setting.growing:
        raise ValueError(_keeps_keys(type(model).__name__, grows))
    whole = Prompt(model, setting.logits == "all") if is_causal(model) else Whole(model)
    modules: dict[str, Whole | Prompt | Step] = {WHOLE_FILE: whole}
    log("tracing the prompt" if isinstance(whole, Prompt) else "tracing the whole sequence")
    with traced(type(model).__name__):
        program = trace_whole(whole, longest)
    save_onnx(program, whole, part / WHOLE_FILE)
    if isinstance(whole, Prompt) and steps:
        log("tracing one token after a state")
        step = Step(model, whole.layouts)
        with traced(type(model).__name__), torch.no_grad():
            after = program.module()(*whole.example(8))
            program = trace_step(step, after)
        save_onnx(program, step, part / STEP_FILE)
        modules[STEP_FILE] = step
    log("comparing with torch")
    differences = compare(modules, part, longest, setting.steps)
    differences.check()
    return type(model).__name__, longest, list(grows), differences


def _keeps_keys(name: str, grows: dict[int, str]) -> str:
    layers = ", ".join(f"{number} ({method})" for number, method in list(grows.items())[:3])
    layers += ", ..." if len(grows) > 3 else ""
    return (
        f"{name} keeps every key in {len(grows)} of its layers: {layers}. The state of its decode step grows with the "
        f"text. Export it so with growing=True (--growing), its prompt alone with prompt_only=True (--prompt-only), or "
        f"convert it to a method whose state has one size, such as 'favor+' or 'loglinear'."
    )


def _finish(home: Path, part: Path, model: Any, result: tuple[Any, ...], generates: bool) -> None:
    """Put the tokenizer, the configuration, the script and the record beside the graphs."""
    for path in {x for pattern in COPIED for x in home.glob(pattern) if x.is_file()}:
        shutil.copyfile(path, part / path.name)
    kind, longest, grows, differences = result
    write_script(part, model.config.vocab_size, longest, generates=generates)
    sizes = {x.name: human_bytes(x.stat().st_size) for x in part.glob("*.onnx*")}
    record = {"model": kind, "opset": OPSET, "longest": longest, "growing_layers": grows, "files": sizes}
    versions = {"kernelformer": __version__, "torch": torch.__version__}
    versions |= {package: version(package) for package in ("onnx", "onnxruntime")}
    write_json(part / RECORD, {**record, "largest_difference": asdict(differences), "versions": versions})


def load_exportable(folder: Path) -> tuple[Path, Any]:
    """The folder of a model and the model itself, in evaluation mode and float32."""
    home = model_folder(folder)
    record = read_json(home / CONFIG_NAME)
    kind = record.get("model_type") if isinstance(record, dict) else None
    if kind == KIND:
        model = load(home, dtype=torch.float32)
    elif kind == "kernelformer":
        model = load_saved(home)
    else:
        raise ValueError(
            f"{home} holds a model of type {kind!r}, neither one of ours nor a converted one; convert it first: "
            f"kernelformer convert {home} NEW_FOLDER."
        )
    model = model.eval().float()
    check_model(model)
    return home, model
