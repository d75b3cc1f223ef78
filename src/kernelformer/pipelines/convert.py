"""A pretrained model made linear, from a folder to a folder: converted, measured, distilled, and described."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.pretrained_texts import Source, check_length, first_token, load_source, rows_for
from kernelformer.data.readers import hash_files
from kernelformer.data.text_rows import TextsUsed
from kernelformer.distill.checkpoint import Checkpoint, appearing, check_target
from kernelformer.environment import environment
from kernelformer.errors import positive_int
from kernelformer.files import write_json, write_text
from kernelformer.hf.sentence_files import copy_sentence_files
from kernelformer.modules.build import method_options, parse_method
from kernelformer.pipelines.convert_settings import ConvertSettings
from kernelformer.pipelines.convert_texts import (
    Batches,
    Evaluation,
    Texts,
    choice_inputs,
    divide_texts,
    evaluation_inputs,
    hold_out_windows,
)
from kernelformer.reports.labels import SIZES
from kernelformer.settings import parse_layers

FEATURES = 128
STEPS = 300  # of attention transfer, where texts are given and nobody says
Tell = Callable[[str], None]


class Setting(ConvertSettings):
    """How to convert, with the method and the layers that the settings name."""

    def method(self) -> tuple[str, dict[str, Any]]:
        """The method and all its options."""
        method, options = parse_method(self.attention)
        known = method_options(method)
        sizes = [x for x in SIZES if x in known]
        given = [x for x in sizes if x in options]
        if self.features is not None and not sizes:
            raise ValueError(f"{method!r} has no number of features, got {self.features}; leave --features out.")
        if self.features is not None and given:
            raise ValueError(
                f"--features {self.features} and {given[0]}={options[given[0]]} of {self.attention!r} say the same "
                f"thing; leave one out."
            )
        if sizes and not given:
            options[sizes[0]] = FEATURES if self.features is None else positive_int("features", self.features)
        if self.seed and "seed" in known:
            options.setdefault("seed", self.seed)
        return method, options

    def chosen(self) -> list[int | str] | None:
        """What ``layers`` says; None: all."""
        return parse_layers(self.layers) if self.layers else None


@dataclass
class Found:
    """What a run did.

    Args:
        setting: as asked for.
        source: name of the folder, or on the hub.
        model: class of the original.
        length: tokens of a text.
        conversion: see `Conversion.as_json`.
        reports: what was measured: ``all converted`` where some were kept afterwards, ``converted``, ``distilled``.
        losses: by stage of the distillation, step by step.
        texts: what was used of which file, by what it was for.
        remarks: what a user should know.
        environment: versions and machine.
    """

    setting: Setting
    source: str
    model: str
    length: int
    conversion: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, TextsUsed] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; of files the names alone."""
        setting = {name: x.name if isinstance(x, Path) else x for name, x in vars(self.setting).items()}
        reports = {name: x.as_json() for name, x in self.reports.items()}
        texts = {name: asdict(x) for name, x in self.texts.items()}
        found: dict[str, Any] = _finite({**vars(self), "setting": setting, "reports": reports, "texts": texts})
        return found


def _finite(value: Any) -> Any:
    """None for what is no number: JSON has no word for it."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(
    source: str | Path, target: Path, setting: Setting, *, force: bool = False, tell: Tell = lambda _: None
) -> Found:
    """Convert a model and write it: all of it or nothing; the original is never changed.

    A distillation that is stopped leaves its state in ``target`` + ".partial", and the same call goes on with it.

    Args:
        source: see `load_source`.
        target: folder for the model, its tokenizer, report.json, report.png and README.md.
        setting: how.
        force: replace a converted model that is there.
        tell: called with what happens.
    """
    from kernelformer.hf import conversion, convert

    check_target(source, target, force)
    method, options = setting.method()
    chosen = setting.chosen()
    texts = divide_texts(setting.distill, setting.text, setting.samples, setting.seed)
    tell(f"reading {source}")
    origin = load_source(source, task=setting.task, allow_pickle=setting.allow_pickle)
    name = Path(source).resolve().name if Path(source).exists() else str(source)
    found = Found(setting, name, type(origin.model).__name__, check_length(origin, setting.length))
    found.remarks = list(origin.remarks)
    found.environment = environment(torch.get_num_threads())
    texts = hold_out_windows(origin, texts, found.length, setting.samples, setting.seed)
    evaluation = evaluation_inputs(origin, texts, found.length, setting.samples, setting.batch, setting.seed)
    inputs = evaluation.batches
    if evaluation.used is None:
        found.remarks.append("no texts were given: the figures are for random tokens, and real texts give others")
    else:
        found.texts["measured on"] = evaluation.used
        rows = evaluation.used.texts if evaluation.used.windows is None else evaluation.used.windows
        if rows < setting.samples:
            found.remarks.append(f"{setting.samples} samples were asked for, and the texts to measure on make {rows}")
    tell(f"converting to {method}")
    student = convert(copy.deepcopy(origin.model), method, chosen, **options)
    stages = _stages(student, setting) if texts.training else {}
    keeps = bool(setting.keep or setting.keep_heads)
    _measure(found, "all converted" if keeps else "converted", origin, student, inputs, tell)
    if keeps:
        _keep(student, origin, found, texts, evaluation, tell)
        _measure(found, "converted", origin, student, inputs, tell)
    checkpoint = Checkpoint.of(target, _identity(source, setting, found), force)
    if stages:
        _distill(student, origin, texts, stages, found, checkpoint, tell)
        _measure(found, "distilled", origin, student, inputs, tell)
    found.conversion = conversion(student).as_json()
    tell(f"writing {target}")
    _write(student, origin, target, found, inputs)
    checkpoint.remove()
    return found


def _measure(found: Found, label: str, origin: Source, student: Any, inputs: Batches, tell: Tell) -> None:
    from kernelformer.distill.measure import measure

    tell(f"measuring: {label}")
    found.reports[label] = measure(origin.model, student, inputs)


def _keep(student: Any, origin: Source, found: Found, texts: Texts, evaluation: Evaluation, tell: Tell) -> None:
    """Convert again, without the attentions that the output needs most and the heads that went wrong most."""
    from kernelformer.hf import conversion, convert, undo

    setting, replaced = found.setting, conversion(student).replaced
    kept = _chosen(student, origin, found, texts, evaluation, tell) if setting.keep else []
    rest = [x for x in replaced if x not in kept]
    heads = found.reports["all converted"].worst_heads(setting.keep_heads, rest) if setting.keep_heads else {}
    undo(student)
    numbers = {x: list(y) for x, y in heads.items()}
    method, options = setting.method()
    convert(student, method, [_literal(x) for x in rest], exact_heads=numbers or None, **options)


def _chosen(student: Any, origin: Source, found: Found, texts: Texts, evaluation: Evaluation, tell: Tell) -> list[str]:
    """The attentions that stay exact."""
    from kernelformer.distill.keep import choose_exact

    setting = found.setting
    samples, batch = setting.samples, setting.batch
    rows, used = choice_inputs(origin, texts, evaluation, found.length, samples, batch, setting.seed)
    if used is None:
        found.remarks.append("what stays exact was chosen by what is measured on; give more texts, or others to learn")
    else:
        found.texts["chosen on"] = used

    def told(changed: int, total: int) -> None:
        tell(f"choosing what stays exact: change {changed} of {total}")

    return choose_exact(origin.model, student, rows, setting.keep, told)


def _literal(name: str) -> str:
    """A name as a pattern that fits it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _identity(source: str | Path, setting: Setting, found: Found) -> dict[str, str]:
    """What has to be the same for a distillation to go on."""
    path = Path(source)
    files = sorted(x for x in path.iterdir() if x.is_file()) if path.is_dir() else [path] if path.is_file() else []
    parts = {name: str(x) for name, x in vars(setting).items() if name not in ("distill", "text", "allow_pickle")}
    parts["source"] = ", ".join(f"{x.name} {x.stat().st_size} {x.stat().st_mtime_ns}" for x in files) or str(source)
    for name in ("distill", "text"):
        texts = getattr(setting, name)
        parts[name] = hash_files([texts]) if texts else ""
    return {**parts, "model": found.model, "length": str(found.length)}


def _stages(student: Any, setting: Setting) -> dict[str, int]:
    """Steps of each stage of the distillation."""
    from kernelformer.distill.train import learns

    steps = setting.steps
    if steps is None:
        steps = STEPS if learns(student) else 0
    elif steps and not learns(student):
        raise ValueError(f"{setting.attention!r} has nothing to learn by attention transfer; give --tune, not --steps.")
    if not steps and not setting.tune:
        raise ValueError(f"{setting.attention!r} learns nothing without --tune; give it, or leave --distill out.")
    return {"transfer": steps, "tune": setting.tune}


def _distill(
    student: Any,
    origin: Source,
    texts: Texts,
    stages: dict[str, int],
    found: Found,
    checkpoint: Checkpoint,
    tell: Tell,
) -> None:
    """Stage by stage, from where a checkpoint has left off."""
    from kernelformer.distill.train import Progress, quick_dtype, transfer, tune

    setting = found.setting
    found.losses, saved = checkpoint.load(student)
    learners: dict[str, Any] = {"transfer": transfer, "tune": tune}
    precision = quick_dtype(origin.model.device)
    rows = rows_for(origin, texts.training, found.length)
    draws = []
    for number, (stage, total) in enumerate(stages.items()):
        losses = found.losses.setdefault(stage, [])
        order = setting.seed + 1 + number
        draws.append((total * setting.batch, order))
        if len(losses) >= total:
            continue
        if losses:
            found.remarks.append(f"{stage} went on after step {len(losses)}, where it was stopped")
        inputs = rows.batches(setting.batch, order, start=first_token(origin), skip=len(losses))
        progress = Progress(losses, saved if losses else None)

        def told(step: int, loss: float, stage: str = stage, own: Progress = progress, total: int = total) -> None:
            if not math.isfinite(loss):
                raise ValueError(f"{stage} broke down: the loss of step {step} is {loss}; use another method.")
            if step % max(1, total // 20) == 0:
                tell(f"{stage}: step {step} of {total}, loss {loss:.4g}")
            checkpoint.save(student, found.losses, own.state)

        try:
            learners[stage](
                student, origin.model, inputs, steps=total, autocast=precision, progress=progress, tell=told
            )
        except KeyboardInterrupt:
            checkpoint.save(student, found.losses, progress.state, now=True)
            raise
        checkpoint.save(student, found.losses, now=True)
    found.texts["learned from"] = rows.used(texts.training_file, len(texts.training), draws)


def _write(student: Any, origin: Source, target: Path, found: Found, inputs: Batches) -> None:
    from kernelformer.reports.conversion import model_card, picture

    with appearing(target) as part:
        student.save_pretrained(part)
        if origin.tokenizer is not None:
            origin.tokenizer.save_pretrained(part)
        found.remarks += copy_sentence_files(origin.path, part, allow_pickle=found.setting.allow_pickle)
        write_json(part / "report.json", found.as_json())
        write_text(part / "README.md", model_card(found, target.name))
        picture(found, part / "report.png")
        _check(student, part, inputs[0])


@torch.no_grad()
def _check(student: Any, folder: Path, inputs: dict[str, Tensor]) -> None:
    """What was written gives the same numbers."""
    from kernelformer.hf import load

    student.eval()
    written, own = load(folder)(**inputs)[0], student(**inputs)[0]
    if not torch.allclose(written, own, rtol=1e-3, atol=1e-4 * float(own.abs().max())):
        off = float((written - own).abs().max())
        raise ValueError(f"the model as written differs by {off:.3g} from the one in memory; nothing was kept.")
