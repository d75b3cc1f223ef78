"""Convert a pretrained model from folder to folder: convert, calibrate, measure, distill, judge and report."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kernelformer.commands import program
from kernelformer.conversion import distill
from kernelformer.conversion.checkpoint import Checkpoint, appearing, check_target
from kernelformer.conversion.holdout import (
    Batches,
    Job,
    Texts,
    choice_inputs,
    divide_texts,
    evaluation_inputs,
    hold_back,
    hold_out_windows,
)
from kernelformer.conversion.judge import Log, Steps, check_judging, judge
from kernelformer.conversion.keep import check_recall_heads, keep_exact
from kernelformer.conversion.losses import Reference
from kernelformer.conversion.measure import measure
from kernelformer.conversion.readers import hash_files
from kernelformer.conversion.report import ConversionResult, licence_of, model_card, picture
from kernelformer.conversion.settings import JUDGED, ConvertSettings
from kernelformer.conversion.texts import check_length
from kernelformer.conversion.tune import CENTRES, quick_dtype, start_student
from kernelformer.environment import environment
from kernelformer.errors import StoppedError
from kernelformer.feature_maps.untied import LogLinearMap
from kernelformer.files import read_json, write_json, write_text
from kernelformer.hf.adapters import family_of
from kernelformer.hf.convert import conversion, convert, undo
from kernelformer.hf.find import find_attentions
from kernelformer.hf.load import Source, load, load_source
from kernelformer.modules import METHODS, AttentionCore, calibrate, parse_method

S = TypeVar("S", bound=ConvertSettings)
ROWS = 2  # that attentions of a decoder are compared on
MAPPED = 6  # passes of the original that take as long as one of a model with features, and starting its maps
STARTS = 4  # others that maps start by, as in the conversion itself


LEARNED = "loglinear"  # after distillation nearest to the original, and causal
UNTRAINED = "wildcat"
NEAR = ":window=32:sinks=1"
ENCODER_NEAR, DECODER_NEAR = ":window=64:sinks=1", ":window=64:sinks=4"
WINDOW = 64  # of both
FEATURES = 64  # of maps that are learned beside a window
# Of a decoder without training: random features carry little of what is far, and sometimes cost more than they carry;
# maps that start at the original's keys carry more, where there are texts to take them from.
DECODERS = ("local:window=64:sinks=4", "favor+:window=64:sinks=4", "loglinear:window=64:sinks=4")
Compare = Callable[[Sequence[str]], Mapping[str, float]]


class Proposal(NamedTuple):
    """Default attention for a pretrained model, why it is that, and its features unless they are as ever."""

    attention: str
    why: str
    features: int | None = None


def propose(model: nn.Module, *, distilled: bool) -> str:
    """Default attention for `convert`, without a measurement; see `proposal`."""
    return proposal(model, distilled=distilled).attention


def proposal(
    model: nn.Module, *, distilled: bool, length: int | None = None, compare: Compare | None = None
) -> Proposal:
    """Choose the default attention for `convert`, with the reason.

        encoder, not distilled    wildcat with a window          a model of two sequences, not distilled    loglinear
        decoder, not distilled    local, favor+ or loglinear with a window, whichever is nearest to the original
        distilled                 loglinear with a window

    A relative bias that reaches beyond the window leaves no room for one.

    Args:
        distilled: whether it will learn from its original.
        length: tokens of the texts that it learns from; with less than two windows there is nothing far to learn.
        compare: gives the losses of a model with each of some attentions, less is nearer; None: nothing to measure on.
    """
    attentions = find_attentions(model, None)
    modules = {x.name: model.get_submodule(x.name) for x in attentions}
    biased = any(family_of(module).has_bias(module, name, False) for name, module in modules.items())
    causal, pair = any(x.causal for x in attentions), any(x.cross for x in attentions)
    short = length is not None and length < 2 * WINDOW
    if distilled and (biased or short):
        why = f"texts of {length} tokens leave little to learn beyond a window of {WINDOW}"
        return Proposal(
            LEARNED, f"it is distilled, and {'its relative bias leaves no room for a window' if biased else why}"
        )
    if distilled:
        more = "" if causal else f"; without training {UNTRAINED}{NEAR} may be nearer still"
        why = f"it is distilled, and a learned map beside a window is nearest then{more}"
        return Proposal(LEARNED + (DECODER_NEAR if causal else ENCODER_NEAR), why, FEATURES)
    if pair or (causal and biased):
        return Proposal(LEARNED, "the model is causal or reads two sequences; it needs --distill to be of use")
    if not causal:
        near = "; its relative bias leaves no room for a window" if biased else " and a window"
        why = f"an encoder without training is nearest with landmarks{near}"
        return Proposal(UNTRAINED if biased else UNTRAINED + NEAR, why)
    if length is not None and length <= WINDOW:
        return Proposal(DECODERS[0], f"texts of {length} tokens are within its window, nothing is far in them")
    if compare is None:
        return Proposal(DECODERS[0], "a decoder without training, and no texts to measure anything else on")
    losses = compare(DECODERS)
    said = ", ".join(f"{x} {loss:.3g}" for x, loss in losses.items())
    why = f"the nearest for a decoder without training, by the rise of the loss ({said})"
    return Proposal(min(losses, key=lambda x: losses[x]), why)


def with_default(setting: S, origin: Source, texts: Texts, log: Log = lambda _: None) -> tuple[S, str]:
    """Fill in the default attention of a model, with the reason; see `proposal`."""
    by_others = True

    def compare(attentions: Sequence[str]) -> dict[str, float]:
        nonlocal by_others
        losses, by_others = _losses(setting, origin, texts, attentions, log)
        return losses

    found = proposal(
        origin.model,
        distilled=setting.distill is not None,
        length=check_length(origin, setting.length),
        compare=compare if texts.evaluation and origin.task == "causal" else None,
    )
    if setting.features is not None and found.attention == DECODERS[0]:  # a window alone has no features
        found = Proposal(DECODERS[1], "a decoder without training, for which --features are asked")
    features = found.features if setting.features is None else setting.features
    same = "" if by_others else "; by what is measured on, for want of other texts"
    reason = f"no --attention was given: {found.attention}: {found.why}{same}"
    return replace(setting, attention=found.attention, features=features), reason


def _losses(
    setting: ConvertSettings, origin: Source, texts: Texts, attentions: Sequence[str], log: Log
) -> tuple[dict[str, float], bool]:
    """Rise of the next-token loss with each attention; and True if texts are others than those measured on."""
    length = check_length(origin, setting.length)
    evaluation = evaluation_inputs(origin, texts, length, setting.samples, 1, setting.seed)
    rows, used = choice_inputs(origin, texts, evaluation, length, ROWS + STARTS, 1, setting.seed)
    work = {x: 1 if METHODS[parse_method(x)[0]].size is None else MAPPED for x in attentions}
    if setting.features is not None:  # features were asked for: an attention without them is no choice
        work = {x: cost for x, cost in work.items() if cost == MAPPED}
    steps = Steps("choosing the attention", 1 + sum(work.values()), log)
    with steps.step("the original", 1):
        reference = Reference(origin.model, rows[:ROWS], predicts=True)
    student = copy.deepcopy(origin.model)
    losses = {}
    for attention, cost in work.items():
        method, options = replace(setting, attention=attention).method()
        convert(student, method, setting.chosen(), **options)
        with steps.step(attention, cost):
            start_student(student, origin.model, rows[ROWS:] or rows)
            losses[attention] = reference.figure(student).loss
        undo(student)
    return losses, used is not None


MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
PICKLED = (".bin", ".pt", ".pth", ".pkl")


def copy_sentence_files(source: str | Path, target: Path, *, allow_pickle: bool = False) -> list[str]:
    """Copy ``modules.json``, the other settings of sentence-transformers and the folders of its modules.

    Nothing is copied of a source without ``modules.json``, no file through a link that leads out of it, and no pickled
    weights unless they are allowed.
    """
    if Path(source).is_file():
        return []
    try:
        folder = _local(source, [MODULES])
        if not (folder / MODULES).is_file():
            return []
        names = _module_folders(folder / MODULES)
        folder = _local(source, [*FILES, *(f"{x}/*" for x in names)])
    except Exception as reason:  # the hub, links and JSON have many ways to fail, and the model is there without them
        return [f"files of sentence-transformers were not copied: {str(reason).splitlines()[0].rstrip('.')}"]
    files = sorted(x for pattern in FILES for x in folder.glob(pattern))
    files += sorted(x for name in names for x in (folder / name).glob("*"))
    # Of a name on the hub the files are links into the cache of its repository.
    inside = folder.resolve() if Path(source).is_dir() else folder.resolve().parents[1]
    copied, remarks = [], []
    for file in files:
        name = file.relative_to(folder).as_posix()
        if not file.resolve().is_relative_to(inside):
            remarks.append(f"{name} is a link out of {source} and was not copied")
        elif not file.is_file():
            remarks.append(f"{name} is no file and was not copied")
        elif file.suffix in PICKLED and not allow_pickle:
            remarks.append(f"{name} is pickled and was not copied; --allow-pickle does")
        else:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)
            copied.append(name)
    return [f"files of sentence-transformers were copied: {', '.join(copied)}", *remarks]


def _local(source: str | Path, patterns: Sequence[str]) -> Path:
    """The folder itself, or one that has these files of a name on the hub."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=list(patterns)))


def _module_folders(file: Path) -> list[str]:
    """Folders that ``modules.json`` names; the model itself has none."""
    record: Any = read_json(file)
    if not isinstance(record, list) or not all(isinstance(x, dict) for x in record):
        raise ValueError(f"{file.name} is not a list of modules")
    names = [x.get("path", "") for x in record]
    for name in names:
        if not isinstance(name, str) or (name and not re.fullmatch(r"\w[\w.-]*", name)):
            raise ValueError(f"{file.name} names {name!r:.60}, which is not the name of a folder")
    return [x for x in names if x]


STARTED = "start at centres of the original's keys"


def run(
    source: str | Path, target: Path, setting: ConvertSettings, *, force: bool = False, log: Log = lambda _: None
) -> ConversionResult:
    """Convert a model and write it: all of it or nothing; then judge it. The original is never changed.

    What is judged goes into the report and the model card of the folder, which say until then that it was not. A
    distillation that is stopped leaves its state in ``target`` + ".partial", and the same call resumes it.

    Args:
        source: see `load_source`.
        target: folder for the model, its tokenizer, report.json, report.png and README.md.
        setting: how.
        force: replace a converted model that is there.
        log: called with what happens.
    """
    check_target(source, target, force)
    if setting.attention:
        setting.method()  # what is wrong with it is said before anything is read
    chosen = setting.chosen()
    texts = divide_texts(setting.distill, setting.text, setting.samples, setting.seed)
    log(f"reading {source}")
    origin = load_source(source, task=setting.task, allow_pickle=setting.allow_pickle)
    check_judging(origin, texts, setting)
    if setting.recall_heads:
        check_recall_heads(setting, origin, texts)
    if setting.distill is not None:
        distill.check_repeats(setting, origin)
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
    if texts.training:
        texts = hold_back(origin, texts, result.length, distill.held_out_rows(result.length), setting.seed)
    evaluation = evaluation_inputs(origin, texts, result.length, setting.samples, setting.batch, setting.seed)
    if evaluation.used is None:
        result.remarks.append("no texts were given: the figures are for random tokens, and real texts give others")
    else:
        result.texts["measured on"] = evaluation.used
        rows = evaluation.used.texts if evaluation.used.windows is None else evaluation.used.windows
        if rows < setting.samples:
            result.remarks.append(f"{setting.samples} samples were asked for, and the texts to measure on make {rows}")
    log(f"converting to {setting.attention}")
    student = convert(copy.deepcopy(origin.model), method, chosen, **options)
    job = Job(origin, student, texts, evaluation, result, log)
    statistics = _calibration_inputs(job)
    _calibrate(job, statistics)
    stages = distill.plan_stages(student, setting) if texts.training else {}
    if stages and setting.lora:
        distill.lora_targets(student, setting.lora_layers)  # what is wrong with it is said before anything is learned
    keeps = bool(setting.keep or setting.keep_heads or setting.recall_heads)
    _measure(job, "all converted" if keeps else "converted")
    if keeps:
        keep_exact(job)
        _calibrate(job, statistics)
        _measure(job, "converted")
    checkpoint = Checkpoint.of(target, _identity(source, setting, result, student), force)
    if stages:
        distill.Distillation(job, checkpoint).run(stages)
        _measure(job, "distilled")
    result.conversion = conversion(student).as_json()
    result.licence = licence_of(source)
    log(f"writing {target}")
    _write(job, target)
    checkpoint.remove()
    if not setting.no_judge:
        try:
            result.judged = judge(origin, student, texts, evaluation, result.length, setting, log)
        except KeyboardInterrupt:
            words = ["judge", target, "--original", source, *(["--text", setting.text] if setting.text else [])]
            later = " ".join([program(), *(shlex.quote(str(x)) for x in words)])
            raise StoppedError(f"stopped while judging; {target} is complete, and `{later}` judges it.") from None
        _describe(result, target, target.name)
    return result


def _calibration_inputs(job: Job) -> Batches:
    """Inputs to calibrate and to start on; none where the method has no use for them."""
    parts = list(job.student.modules())
    calibrated = any(isinstance(x, AttentionCore) and x.calibrates for x in parts)
    started = any(isinstance(x, LogLinearMap) for x in parts) and job.evaluation.used is not None
    if not calibrated and not started:
        return []
    remark = "calibrated on what is measured on; give more texts, or others to learn from"
    return job.choice_inputs(job.setting.samples, job.setting.batch, "calibrated on", remark)


def _calibrate(job: Job, rows: Batches) -> None:
    """Calibrate by queries and keys of exact attention, and initialize learned maps at centres of the keys."""
    if not rows:
        return
    job.log("calibrating")
    if any(isinstance(x, AttentionCore) and x.calibrates for x in job.student.modules()):
        calibrate(job.student, rows, reset=True, exact=True)
    if job.evaluation.used is None:
        return  # random tokens have no keys worth starting at
    model, result = job.origin.model, job.result
    chosen = start_student(job.student, model, rows, autocast=quick_dtype(model.device))
    result.remarks = [x for x in result.remarks if STARTED not in x]
    if chosen:
        count = sum(x == CENTRES for x in chosen.values())
        result.remarks.append(f"maps of {count} of {len(chosen)} attentions {STARTED}")


def _measure(job: Job, label: str) -> None:
    job.log(f"measuring: {label}")
    job.result.reports[label] = measure(job.origin.model, job.student, job.evaluation.batches)


def _identity(source: str | Path, setting: ConvertSettings, result: ConversionResult, student: Any) -> dict[str, str]:
    """Identity of a conversion, which has to be the same to resume it; with what was chosen to stay exact."""
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


def _write(job: Job, target: Path) -> None:
    result, origin = job.result, job.origin
    with appearing(target) as part:
        job.student.save_pretrained(part)
        if origin.tokenizer is not None:
            origin.tokenizer.save_pretrained(part)
        result.remarks += copy_sentence_files(origin.path, part, allow_pickle=job.setting.allow_pickle)
        _describe(result, part, target.name)
        picture(result, part / "report.png")
        _check(job.student, part, job.evaluation.batches[0])


def _describe(result: ConversionResult, folder: Path, name: str) -> None:
    """Write the report and the model card, each all or nothing."""
    write_text(folder / "README.md", model_card(result, name))
    write_json(folder / "report.json", result.as_json())


@torch.no_grad()
def _check(student: Any, folder: Path, inputs: dict[str, Tensor]) -> None:
    """Check that the model as written gives the same numbers as the one in memory."""
    student.eval()
    written, own = load(folder)(**inputs)[0], student(**inputs)[0]
    if not torch.allclose(written, own, rtol=1e-3, atol=1e-4 * float(own.abs().max())):
        off = float((written - own).abs().max())
        raise ValueError(f"the model as written differs by {off:.3g} from the one in memory; nothing was kept.")
