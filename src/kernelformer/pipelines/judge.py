"""Judging a converted model beside its original: its parts, what it recalls, what it writes, and a probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kernelformer.data.labelled_texts import read_labelled
from kernelformer.data.passkey import DIGITS, knows_numbers, passkeys, start_tokens
from kernelformer.data.texts import check_length, check_readable, longest, some_texts, tokens_of
from kernelformer.files import finite, read_json, write_json, write_text
from kernelformer.hf.load import Source, load_source
from kernelformer.hf.pretrained import task_of
from kernelformer.modules.evaluating import evaluating
from kernelformer.pipelines.continue_text import continuation
from kernelformer.pipelines.convert_texts import Evaluation, Texts, divide_texts, evaluation_inputs
from kernelformer.pipelines.judge_settings import JudgeSettings
from kernelformer.reports.judgement import Judgement, Recall, Sample, card_section
from kernelformer.reports.markdown import plain, put_section

LENGTHS = (512, 1024)  # tokens of texts with a hidden number, where nobody says
TOKENS, PROMPT, PROMPTS = 64, 32, 2  # tokens of a sample and of the beginning before it; beginnings
Log = Callable[[str], None]


def judge(
    origin: Source,
    student: Any,
    texts: Texts,
    evaluation: Evaluation,
    length: int,
    setting: JudgeSettings,
    log: Log = lambda _: None,
) -> Judgement:
    """Measure a converted model beside its original; both are left as they were.

    - The figures of a hybrid as it is, of its window and sinks alone, and of its kernel alone (see `part_figures`).
    - Of causal models: whether a number hidden in a long text is found again (see `passkeys`), by the original, the
      converted model and its window and sinks alone; and what original and converted model write, side by side.
    - Of encoders, where it is asked for: the accuracy of a linear probe of each.

    Args:
        origin: the original.
        student: the same model, converted.
        texts: of the conversion; those to measure on are used.
        evaluation: inputs to measure on.
        length: tokens of a text.
        setting: what to measure; see `check_judging`.
        log: called with what happens.
    """
    start = time.monotonic()
    with evaluating(origin.model, student):
        log("judging: the model and its parts")
        result = Judgement(_figures(origin, student, texts, evaluation, length, setting))
        result.measured_on = str(evaluation.used or f"{setting.samples} rows of random tokens")
        if origin.task == "causal" and evaluation.used is not None:
            lengths = _lengths(origin, setting)
            if setting.passkeys and not lengths:
                result.remarks.append(
                    "no numbers were hidden: the model has too few positions, or tokens for no digits"
                )
            rows = max(PROMPTS, setting.passkeys)
            reach = max(lengths, default=PROMPT)
            chosen, _ = some_texts(texts.evaluation, origin.tokenizer, reach, rows, setting.seed, origin.task)
            result.recall = _recall(origin, student, chosen, lengths, setting, log)
            result.remarks += _lost(result.recall)
            result.samples = _samples(origin, student, chosen, setting, log)
        if setting.probe:
            log("judging: probe")
            result.probe = _probe(origin, student, length, setting)
    result.seconds = time.monotonic() - start
    return result


def check_judging(origin: Source, texts: Texts, setting: JudgeSettings) -> None:
    """Check that what is asked for can be measured, before anything takes time.

    Args:
        origin: the original.
        texts: to measure on.
        setting: what is asked for.

    Raises:
        ValueError: a probe of a model that is no encoder or without labelled texts; hidden numbers or samples of a
            model that does not write, of lengths that it has no positions for, or without texts.
    """
    from kernelformer.distill.probe import check_labels

    for name in ("passkey_lengths", "sample_tokens"):
        value = getattr(setting, name)
        if value and origin.task != "causal":
            raise ValueError(f"{name} is for decoders, {origin.path} is a model for {origin.task!r}; leave it out.")
        if value and not texts.evaluation:
            raise ValueError(f"{name}={value} needs texts to measure on; give them by --text.")
    _check_positions(origin, setting)
    if setting.passkey_lengths:
        if not setting.passkeys:
            raise ValueError(f"passkey_lengths={setting.passkey_lengths} and passkeys=0 contradict each other.")
        check_readable(origin, texts.evaluation)
        passkeys(texts.evaluation[:1], origin.tokenizer, min(setting.passkey_lengths), 1)
        if not knows_numbers(origin):
            raise ValueError(
                f"passkey_lengths={setting.passkey_lengths}: the tokenizer of {origin.path} has tokens of digits that "
                f"the model's vocabulary has not; give passkeys=0, or put the model's own tokenizer there."
            )
    if setting.probe:
        if origin.task != "encoder":
            raise ValueError(f"a probe is for encoders, {origin.path} is one for {origin.task!r}; leave it out.")
        if setting.text is None:
            raise ValueError(f"probe={setting.probe} needs texts with labels; give them by --text.")
        labelled, labels = read_labelled(setting.text, setting.probe, setting.seed)
        check_readable(origin, labelled)
        check_labels(labels)


def _check_positions(origin: Source, setting: JudgeSettings) -> None:
    limit = longest(origin)
    needed = max(*setting.passkey_lengths, (setting.sample_tokens or 0) + 1, 1)
    if limit is not None and needed > limit:
        raise ValueError(
            f"passkey_lengths={setting.passkey_lengths} and sample_tokens={setting.sample_tokens} need up to {needed} "
            f"positions, {origin.path} has {limit}; give smaller ones."
        )


def _figures(
    origin: Source, student: Any, texts: Texts, evaluation: Evaluation, length: int, setting: JudgeSettings
) -> Any:
    from kernelformer.distill.parts import part_figures

    answers = None
    if origin.task == "masked" and evaluation.used is not None:
        bare = replace(origin, task="encoder")  # the same rows in the same order, with nothing hidden
        same = evaluation_inputs(bare, texts, length, setting.samples, setting.batch, setting.seed)
        answers = [x["input_ids"] for x in same.batches]
    return part_figures(origin.model, student, evaluation.batches, answers)


def _lengths(origin: Source, setting: JudgeSettings) -> tuple[int, ...]:
    if not setting.passkeys:
        return ()
    if not setting.passkey_lengths and not knows_numbers(origin):
        return ()
    limit = longest(origin)
    return setting.passkey_lengths or tuple(x for x in LENGTHS if limit is None or x <= limit)


def _recall(
    origin: Source, student: Any, texts: Sequence[str], lengths: Sequence[int], setting: JudgeSettings, log: Log
) -> list[Recall]:
    """Ask each model for the same hidden numbers."""
    from kernelformer.distill.parts import CONVERTED, NEAR, ORIGINAL, hybrids, near_alone
    from kernelformer.distill.passkey import answer_log_probs

    models: dict[str, tuple[Any, AbstractContextManager[None]]]
    result = []
    for length in lengths:
        models = {ORIGINAL: (origin.model, nullcontext()), CONVERTED: (student, nullcontext())}
        if hybrids(student):
            models[NEAR] = (student, near_alone(student))
        rows = passkeys(texts, origin.tokenizer, length, setting.passkeys, setting.seed)
        for name, (model, way) in models.items():
            log(f"judging: numbers hidden in {length} tokens, {name}")
            with way:
                answers = [answer_log_probs(model, x.ids, x.answer) for x in rows]
            scores = tuple(float(x.sum()) / DIGITS for x, _ in answers)
            result.append(Recall(length, name, tuple(x.distance for x in rows), tuple(x for _, x in answers), scores))
    return result


def _lost(recall: Sequence[Recall]) -> list[str]:
    """What to do where the converted model finds less than half of what the original finds."""
    from kernelformer.distill.parts import CONVERTED, ORIGINAL

    found = {name: sum(sum(x.right) for x in recall if x.model == name) for name in (ORIGINAL, CONVERTED)}
    if 2 * found[CONVERTED] >= found[ORIGINAL]:
        return []
    total = sum(len(x.right) for x in recall if x.model == ORIGINAL)
    return [
        f"{found[CONVERTED]} of {total} hidden numbers were found, by the original {found[ORIGINAL]}: where such "
        f"details matter, keep the heads that recall exact, by convert --recall-heads"
    ]


def _samples(origin: Source, student: Any, texts: Sequence[str], setting: JudgeSettings, log: Log) -> list[Sample]:
    """Let both models go on with the beginnings of some texts."""
    from kernelformer.distill.parts import CONVERTED, ORIGINAL

    limit, tokens = longest(origin), setting.sample_tokens
    if tokens is None:
        tokens = TOKENS if limit is None else min(TOKENS, limit // 2)
    if tokens == 0:
        return []
    room = PROMPT if limit is None else min(PROMPT, limit - tokens)
    samples = []
    first = start_tokens(origin.tokenizer)
    begins = (x for ids in tokens_of(texts, origin.tokenizer) if (x := [*first, *ids][:room]))
    for number, ids in enumerate(islice(begins, PROMPTS)):  # of texts that have a token
        log(f"judging: sample {number + 1}")
        begin = torch.tensor([ids])
        written = {
            name: continuation(model, origin.tokenizer, begin, tokens=tokens, seed=setting.seed + number)
            for name, model in ((ORIGINAL, origin.model), (CONVERTED, student))
        }
        samples.append(Sample(origin.tokenizer.decode(begin[0], skip_special_tokens=True), written))
    return samples


def _probe(origin: Source, student: Any, length: int, setting: JudgeSettings) -> Any:
    from kernelformer.distill.probe import compare_probes, embeddings

    assert setting.text is not None
    texts, labels = read_labelled(setting.text, setting.probe, setting.seed)
    original, converted = (
        embeddings(x, origin.tokenizer, texts, length, 4 * setting.batch) for x in (origin.model, student)
    )
    return compare_probes(original, converted, torch.tensor(labels))


def judge_folder(folder: Path, original: str | Path, setting: JudgeSettings, *, log: Log = lambda _: None) -> Judgement:
    """Judge a converted model of a folder; what was measured goes into its report.json and README.md.

    Weights, configuration and all else in the folder stay as they are.

    Args:
        folder: of the converted model.
        original: of it, see `load_source`.
        setting: what to measure; ``length`` is by default that of the conversion.
        log: called with what happens.

    Raises:
        ValueError: the original is of another model; see also `check_judging`.
    """
    from kernelformer.hf import load

    log(f"reading {folder}")
    student = load(folder)
    log(f"reading {original}")
    origin = load_source(original, task=_task(student), allow_pickle=setting.allow_pickle)
    _check_same(folder, student, origin)
    texts = divide_texts(None, setting.text, setting.samples, setting.seed)
    check_judging(origin, texts, setting)
    report, card = _report(folder), folder / "README.md"
    page = card.read_text("utf-8") if card.is_file() else f"# {plain(folder.resolve().name)}\n"
    length = check_length(origin, report.get("length") if setting.length is None else setting.length)
    evaluation = evaluation_inputs(origin, texts, length, setting.samples, setting.batch, setting.seed)
    result = judge(origin, student, texts, evaluation, length, setting, log)
    if setting.text is not None and _learned_from(report) == setting.text.name:
        result.remarks.append(f"the model has learned from a file of the same name, {setting.text.name}")
    write_json(folder / "report.json", {**report, "judged": finite(result.as_json())})
    write_text(card, put_section(page, card_section(result), before="## What it is not good for"))
    return result


def _task(student: Any) -> str:
    """The task that a converted model was read for; ``auto`` where its class says it, as one of a classifier."""
    task = task_of(student)
    return "auto" if task == "encoder" and getattr(student, "base_model", student) is not student else task


def _check_same(folder: Path, student: Any, origin: Source) -> None:
    """Check that two models are the same but for what was converted."""
    ours = {name: x.shape for name, x in student.named_parameters()}
    for name, x in origin.model.named_parameters():
        if ours.get(name) != x.shape:
            raise ValueError(
                f"{origin.path} is not the original of {folder}: its {name} has shape {tuple(x.shape)}, the converted "
                f"model's {tuple(ours[name]) if name in ours else 'is missing'}; give the model that was converted."
            )


def _report(folder: Path) -> dict[str, Any]:
    path = folder / "report.json"
    if not path.is_file():
        return {}
    report = read_json(path)
    if not isinstance(report, dict):
        raise ValueError(f"{path} is not the report of a conversion, but {type(report).__name__}; remove it.")
    return report


def _learned_from(report: dict[str, Any]) -> str | None:
    """The name of the file that a conversion has learned from, as its report has it."""
    part: Any = report
    for name in ("texts", "learned from", "file"):
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, str) else None
