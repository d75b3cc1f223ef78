"""A model as ONNX graphs that run without torch, compared with torch before anything is kept."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import CONFIG_NAME

from kernelformer import __version__
from kernelformer.export.check import Differences, compare
from kernelformer.export.graphs import Prompt, Step, Whole, trace_step, trace_whole
from kernelformer.export.onnx_files import OPSET, save_onnx, traced
from kernelformer.export.script import script, token_kind
from kernelformer.export.subject import check_model, growing_layers, is_causal, longest_of
from kernelformer.files import PART, read_json, write_json, write_text
from kernelformer.formatting import human_bytes
from kernelformer.hf import load
from kernelformer.hf.save import KIND
from kernelformer.lazy import require_extra
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.pipelines.export_settings import ExportSettings
from kernelformer.records import MODEL
from kernelformer.training.evaluation import load_model

WHOLE_FILE, STEP_FILE, RECORD = "model.onnx", "decode.onnx", "export.json"
# What belongs to a model beside its weights, and goes along.
COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt")


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Args:
        folder: of the files.
        files: and their sizes in bytes.
        kind: class of the model.
        longest: tokens that it has positions for; None where there is no end.
        grows: numbers of the layers whose state keeps every key.
        differences: from torch, as shares of the largest output.
        opset: of ONNX.
    """

    folder: Path
    files: dict[str, int]
    kind: str
    longest: int | None
    grows: list[int]
    differences: Differences
    opset: int = OPSET


def export_folder(
    folder: str | Path,
    out: str | Path,
    settings: ExportSettings | None = None,
    *,
    log: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Export a saved model: ours, that of a run, or a converted one.

    Args:
        folder: of the model, or of the run.
        out: folder that does not exist yet; it is there when all is done and compared, or not at all.
        settings: default ones if None.
        log: called with what is done.

    Raises:
        ValueError: no model, one that cannot be exported, which is said by name, or a graph that differs from torch.
    """
    require_extra("export to ONNX", "onnx", "onnxruntime", "onnxscript", extra="export")
    setting, target = settings or ExportSettings(), Path(out)
    if target.exists():
        raise ValueError(f"{target} is there already; give the name of a folder that is not, or remove it.")
    home, model = load_exportable(Path(folder))
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PART}")
    part.mkdir(parents=True)
    try:
        result = _write(model, part, setting, log)
        _finish(home, part, model, result, generates=(part / STEP_FILE).is_file())
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
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
    name, text = script(generates, token_kind(part, model.config.vocab_size), longest)
    write_text(part / name, text)
    sizes = {x.name: human_bytes(x.stat().st_size) for x in part.glob("*.onnx*")}
    record = {"model": kind, "opset": OPSET, "longest": longest, "growing_layers": grows, "files": sizes}
    versions = {"kernelformer": __version__, "torch": torch.__version__, **_versions("onnx", "onnxruntime")}
    write_json(part / RECORD, {**record, "largest_difference": asdict(differences), "versions": versions})


def _versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def load_exportable(folder: Path) -> tuple[Path, Any]:
    """The folder of a model and the model itself, in evaluation mode and float32.

    Raises:
        ValueError: no model, or one of a class that cannot be exported.
    """
    home = folder / MODEL if (folder / MODEL / CONFIG_NAME).is_file() else folder
    if not (home / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds no model: there is no {CONFIG_NAME} in it, and no {MODEL}/ of a run.")
    record = read_json(home / CONFIG_NAME)
    kind = record.get("model_type") if isinstance(record, dict) else None
    if kind == KIND:
        model = load(home, dtype=torch.float32)
    elif kind == "kernelformer":
        names = {x.__name__: name for name, x in MODELS.items()}
        made = next(iter(KernelformerConfig.from_dict(record).architectures or ()), "")
        if made not in names:
            raise ValueError(f"{home / CONFIG_NAME} names no class of ours in its architectures, got {made!r}.")
        model = load_model(names[made], home)
    else:
        raise ValueError(
            f"{home} holds a model of type {kind!r}, neither one of ours nor a converted one; convert it first: "
            f"kernelformer convert {home} NEW_FOLDER."
        )
    model = model.eval().float()
    check_model(model)
    return home, model
