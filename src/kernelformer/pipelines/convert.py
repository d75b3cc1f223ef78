"""A pretrained model made linear, from a folder to a folder: converted, measured, distilled, and described."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.commands import program
from kernelformer.data.readers import hash_files
from kernelformer.data.texts import check_length
from kernelformer.distill.checkpoint import Checkpoint, appearing, check_target
from kernelformer.distill.lora import lora_targets
from kernelformer.distill.start import CENTRES, start_student
from kernelformer.distill.train import quick_dtype
from kernelformer.environment import environment
from kernelformer.errors import StoppedError
from kernelformer.feature_maps.loglinear import LogLinearMap
from kernelformer.files import write_json, write_text
from kernelformer.hf.licence import licence_of
from kernelformer.hf.load import Source, load_source
from kernelformer.hf.sentence_files import copy_sentence_files
from kernelformer.modules import AttentionCore, calibrate
from kernelformer.pipelines.convert_default import with_default
from kernelformer.pipelines.convert_distill import Distillation, check_repeats, held_out_rows, plan_stages
from kernelformer.pipelines.convert_keep import check_recall_heads, keep_exact
from kernelformer.pipelines.convert_settings import ConvertSettings
from kernelformer.pipelines.convert_texts import (
    Batches,
    Evaluation,
    Texts,
    choice_inputs,
    divide_texts,
    evaluation_inputs,
    hold_back,
    hold_out_windows,
)
from kernelformer.pipelines.judge import check_judging, judge
from kernelformer.pipelines.judge_settings import JUDGED, JudgeSettings
from kernelformer.pipelines.steps import Log
from kernelformer.reports.conversion_result import ConversionResult

STARTED = "start at centres of the original's keys"


def run(
    source: str | Path, target: Path, setting: ConvertSettings, *, force: bool = False, log: Log = lambda _: None
) -> ConversionResult:
    """Convert a model and write it: all of it or nothing; then judge it. The original is never changed.

    What is judged goes into the report and the model card of the folder, which say until then that it was not. A
    distillation that is stopped leaves its state in ``target`` + ".partial", and the same call goes on with it.

    Args:
        source: see `load_source`.
        target: folder for the model, its tokenizer, report.json, report.png and README.md.
        setting: how.
        force: replace a converted model that is there.
        log: called with what happens.
    """
    from kernelformer.hf import conversion, convert

    check_target(source, target, force)
    if setting.attention:
        setting.method()  # what is wrong with it is said before anything is read
    chosen = setting.chosen()
    texts = divide_texts(setting.distill, setting.text, setting.samples, setting.seed)
    log(f"reading {source}")
    origin = load_source(source, task=setting.task, allow_pickle=setting.allow_pickle)
    check_judging(origin, texts, JudgeSettings.of(setting))
    check_recall_heads(setting, origin, texts)
    check_repeats(setting, origin)
    remarks = list(origin.remarks)
    if not setting.attention:
        setting, reason = with_default(setting, origin, texts, log)
        remarks.append(reason)
    method, options = setting.method()
    name = Path(source).resolve().name if Path(source).exists() else str(source)
    result = ConversionResult(setting, name, type(origin.model).__name__, check_length(origin, setting.length))
    result.remarks = remarks
    result.environment = environment(torch.get_num_threads())
    texts = hold_out_windows(origin, texts, result.length, setting.samples, setting.seed)
    texts = hold_back(origin, texts, result.length, held_out_rows(result.length), setting.seed)
    evaluation = evaluation_inputs(origin, texts, result.length, setting.samples, setting.batch, setting.seed)
    inputs = evaluation.batches
    if evaluation.used is None:
        result.remarks.append("no texts were given: the figures are for random tokens, and real texts give others")
    else:
        result.texts["measured on"] = evaluation.used
        rows = evaluation.used.texts if evaluation.used.windows is None else evaluation.used.windows
        if rows < setting.samples:
            result.remarks.append(f"{setting.samples} samples were asked for, and the texts to measure on make {rows}")
    log(f"converting to {setting.attention}")
    student = convert(copy.deepcopy(origin.model), method, chosen, **options)
    statistics = _calibration_inputs(student, origin, result, texts, evaluation)
    _calibrate(student, origin, statistics, result, log)
    stages = plan_stages(student, setting) if texts.training else {}
    if stages and setting.lora:
        lora_targets(student, setting.lora_layers)  # what is wrong with it is said before anything is learned
    keeps = bool(setting.keep or setting.keep_heads or setting.recall_heads)
    _measure(result, "all converted" if keeps else "converted", origin, student, inputs, log)
    if keeps:
        keep_exact(student, origin, result, texts, evaluation, log)
        _calibrate(student, origin, statistics, result, log)
        _measure(result, "converted", origin, student, inputs, log)
    checkpoint = Checkpoint.of(target, _identity(source, setting, result, student), force)
    if stages:
        Distillation(student, origin, texts, result, checkpoint, log, inputs).run(stages)
        _measure(result, "distilled", origin, student, inputs, log)
    result.conversion = conversion(student).as_json()
    result.licence = licence_of(source)
    log(f"writing {target}")
    _write(student, origin, target, result, inputs)
    checkpoint.remove()
    if not setting.no_judge:
        try:
            result.judged = judge(origin, student, texts, evaluation, result.length, JudgeSettings.of(setting), log)
        except KeyboardInterrupt:
            words = ["judge", target, "--original", source, *(["--text", setting.text] if setting.text else [])]
            later = " ".join([program(), *(shlex.quote(str(x)) for x in words)])
            raise StoppedError(f"stopped while judging; {target} is complete, and `{later}` judges it.") from None
        _describe(result, target, target.name)
    return result


def _calibration_inputs(
    student: Any, origin: Source, result: ConversionResult, texts: Texts, evaluation: Evaluation
) -> Batches:
    """Inputs to calibrate and to start on; none where the method has no use for them."""
    parts = list(student.modules())
    calibrated = any(isinstance(x, AttentionCore) and x.calibrates for x in parts)
    started = any(isinstance(x, LogLinearMap) for x in parts) and evaluation.used is not None
    if not calibrated and not started:
        return []
    setting = result.setting
    samples, batch = setting.samples, setting.batch
    rows, used = choice_inputs(origin, texts, evaluation, result.length, samples, batch, setting.seed)
    if used is None:
        result.remarks.append("calibrated on what is measured on; give more texts, or others to learn from")
    else:
        result.texts["calibrated on"] = used
    return rows


def _calibrate(student: Any, origin: Source, rows: Batches, result: ConversionResult, log: Log) -> None:
    """Take statistics of the queries and keys that exact attention has, and start free maps at the keys themselves."""
    if not rows:
        return
    log("calibrating")
    if any(isinstance(x, AttentionCore) and x.calibrates for x in student.modules()):
        calibrate(student, rows, reset=True, exact=True)
    if result.texts.get("measured on") is None:
        return  # random tokens have no keys worth starting at
    chosen = start_student(student, origin.model, rows, autocast=quick_dtype(origin.model.device))
    result.remarks = [x for x in result.remarks if STARTED not in x]
    if chosen:
        count = sum(x == CENTRES for x in chosen.values())
        result.remarks.append(f"maps of {count} of {len(chosen)} attentions {STARTED}")


def _measure(result: ConversionResult, label: str, origin: Source, student: Any, inputs: Batches, log: Log) -> None:
    from kernelformer.distill.measure import measure

    log(f"measuring: {label}")
    result.reports[label] = measure(origin.model, student, inputs)


def _identity(source: str | Path, setting: ConvertSettings, result: ConversionResult, student: Any) -> dict[str, str]:
    """What has to be the same for a distillation to go on; also what was chosen to stay exact."""
    from kernelformer.hf import conversion

    path = Path(source)
    files = sorted(x for x in path.iterdir() if x.is_file()) if path.is_dir() else [path] if path.is_file() else []
    others = ("distill", "text", "allow_pickle", *JUDGED)
    parts = {name: str(x) for name, x in vars(setting).items() if name not in others}
    parts["source"] = ", ".join(f"{x.name} {x.stat().st_size} {x.stat().st_mtime_ns}" for x in files) or str(source)
    for name in ("distill", "text"):
        texts = getattr(setting, name)
        parts[name] = hash_files([texts]) if texts else ""
    plan = "; ".join(f"{x.name} {x.method} {list(x.exact_heads)}" for x in conversion(student).layers)
    return {**parts, "model": result.model, "length": str(result.length), "what stays exact": plan}


def _write(student: Any, origin: Source, target: Path, result: ConversionResult, inputs: Batches) -> None:
    from kernelformer.reports.conversion import picture

    with appearing(target) as part:
        student.save_pretrained(part)
        if origin.tokenizer is not None:
            origin.tokenizer.save_pretrained(part)
        result.remarks += copy_sentence_files(origin.path, part, allow_pickle=result.setting.allow_pickle)
        _describe(result, part, target.name)
        picture(result, part / "report.png")
        _check(student, part, inputs[0])


def _describe(result: ConversionResult, folder: Path, name: str) -> None:
    """Write the report and the model card, each all or nothing."""
    from kernelformer.reports.conversion import model_card

    write_text(folder / "README.md", model_card(result, name))
    write_json(folder / "report.json", result.as_json())


@torch.no_grad()
def _check(student: Any, folder: Path, inputs: dict[str, Tensor]) -> None:
    """Check that the model as written gives the same numbers as the one in memory."""
    from kernelformer.hf import load

    student.eval()
    written, own = load(folder)(**inputs)[0], student(**inputs)[0]
    if not torch.allclose(written, own, rtol=1e-3, atol=1e-4 * float(own.abs().max())):
        off = float((written - own).abs().max())
        raise ValueError(f"the model as written differs by {off:.3g} from the one in memory; nothing was kept.")
