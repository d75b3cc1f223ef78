"""Judge a converted model beside its original: parts, passkey retrieval, samples, and a linear probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.holdout import Evaluation, Texts, divide_texts, evaluation_inputs
from kernelformer.conversion.losses import (
    CONVERTED,
    KERNEL,
    NEAR,
    ORIGINAL,
    Batch,
    Figures,
    HiddenStateErrors,
)
from kernelformer.conversion.passkey import (
    DIGITS,
    answer_log_probs,
    check_labels,
    compare_probes,
    embeddings,
    number_tokens,
    passkeys,
    start_tokens,
)
from kernelformer.conversion.report import Judgement, Recall, Sample, card_section
from kernelformer.conversion.settings import JudgeSettings
from kernelformer.conversion.texts import check_length, check_readable, longest, read_labelled, some_texts, tokens_of
from kernelformer.files import finite, read_json, write_json, write_text
from kernelformer.hf.convert import cores
from kernelformer.hf.load import Source, load, load_source
from kernelformer.hf.pretrained import task_of
from kernelformer.modules import KernelCore, MixedCore
from kernelformer.modules.calibration import evaluating
from kernelformer.page import plain, put_section

Log = Callable[[str], None]


@dataclass
class Steps:
    """Time of a phase, by the work that is done and what it took."""

    phase: str
    work: float
    log: Log
    seconds: float = math.inf
    done: float = 0.0
    start: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start

    def fits(self, work: float) -> bool:
        """Return True if so much more work is expected to end in time, or nothing was done yet."""
        return not self.done or self.spent * (1 + work / self.done) <= self.seconds

    @contextmanager
    def step(self, what: str, work: float) -> Iterator[None]:
        """Say a step with the minutes so far and those expected in all, and count its work."""
        total = min(self.seconds, self.spent * self.work / self.done) if self.done else 0.0
        self.log(f"{self.phase}: {f'{self.spent / 60:.1f} of {total / 60:.1f} min, ' if total else ''}{what}")
        yield
        self.done += work


def hybrids(student: nn.Module) -> list[KernelCore]:
    """Find the cores of a converted model that attend exactly to near tokens or sinks and by a kernel to the others."""
    inside = (core.linear if isinstance(core, MixedCore) else core for core in cores(student).values())
    return [x for x in inside if isinstance(x, KernelCore) and x.has_near]


@contextmanager
def near_alone(student: nn.Module) -> Iterator[None]:
    """Have hybrids attend to near tokens and sinks alone, as ``local`` of the same window and sinks does.

    Other attentions stay as they are; afterwards all are as before.
    """
    own = hybrids(student)
    for core in own:
        core.near_alone = True
    try:
        yield
    finally:
        for core in own:
            core.near_alone = False


@contextmanager
def kernel_alone(student: nn.Module) -> Iterator[None]:
    """Have hybrids attend by their kernel alone, near tokens included, as the same map does without window and sinks.

    Other attentions stay as they are; afterwards all are as before.
    """
    before = [(core, core.near) for core in hybrids(student)]
    try:
        for core, _ in before:
            core.near = None
        yield
    finally:
        for core, near in before:
            core.near = near


@torch.no_grad()
def part_figures(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    batches: Iterable[Batch],
    answers: Sequence[Tensor] | None = None,
) -> dict[str, Figures]:
    """Measure a converted model as it is and, of a hybrid, each of its parts by itself, on the same inputs.

    Args:
        teacher: the original.
        student: the same model, converted; it is left as it was.
        batches: of inputs.
        answers: of each batch the tokens (B, L) before some were hidden, for masked models; None: not known.

    Returns:
        Figures of `ORIGINAL` and `CONVERTED`; of hybrids also of `NEAR` and `KERNEL`.

    Cost: a pass of the original and one of the student, of hybrids three.
    """
    ways: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {CONVERTED: lambda _: nullcontext()}
    if hybrids(student):
        ways |= {NEAR: near_alone, KERNEL: kernel_alone}
    sums = {name: HiddenStateErrors.of(student) for name in ways}
    with evaluating(teacher, student):
        for number, batch in enumerate(batches):
            want = teacher(**batch, output_hidden_states=True)
            for name, way in ways.items():
                with way(student):
                    got = student(**batch, output_hidden_states=True)
                sums[name].add(batch, want, got, None if answers is None else answers[number])
    original = Figures(perplexity=sums[CONVERTED].perplexity(ORIGINAL), accuracy=sums[CONVERTED].accuracy(ORIGINAL))
    return {ORIGINAL: original, **{name: x.figures() for name, x in sums.items()}}


LENGTHS = (512, 1024)  # default tokens of texts with a hidden number
TOKENS, PROMPT, PROMPTS = 64, 32, 2  # tokens of a sample and of the beginning before it; beginnings
WRITTEN = 8  # tokens of a pass that take as long as one that is written


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
        setting: what to measure; see `check_judging`. The first batch is always measured; what is expected to end after
            ``judge_minutes`` is left out and named.
    """
    writes = origin.task == "causal" and evaluation.used is not None
    limit = longest(origin)
    lengths = setting.passkey_lengths if writes and setting.passkeys else ()
    if writes and setting.passkeys and not lengths and number_tokens(origin):
        lengths = tuple(x for x in LENGTHS if limit is None or x <= limit)
    tokens = setting.sample_tokens if writes else 0
    if tokens is None:
        tokens = TOKENS if limit is None else min(TOKENS, limit // 2)
    rows, passes = evaluation.batches, 4 if hybrids(student) else 2
    models = max(2, passes - 1)
    work = passes * sum(map(_tokens, rows)) + models * setting.passkeys * sum(lengths)
    work += PROMPTS * 2 * WRITTEN * tokens + 2 * length * setting.probe
    seconds = math.inf if setting.judge_minutes is None else 60 * setting.judge_minutes
    job = _Judging(origin, student, setting, length, Steps("judging", work, log, seconds))
    with evaluating(origin.model, student):
        job.add_figures(texts, evaluation, passes)
        if writes:
            if setting.passkeys and not lengths:
                job.result.remarks.append(
                    "no numbers were hidden: the model has too few positions, or tokens for no digits"
                )
            count, reach = max(PROMPTS, setting.passkeys), max(lengths, default=PROMPT)
            chosen, _ = some_texts(texts.evaluation, origin.tokenizer, reach, count, setting.seed, origin.task)
            for asked in lengths:
                if job.fits(models * setting.passkeys * asked, f"numbers hidden in {asked} tokens"):
                    job.add_recall(chosen, asked)
            job.result.remarks += _lost(job.result.recall)
            if tokens:
                job.add_samples(chosen, tokens)
        if setting.probe and job.fits(2 * length * setting.probe, "probe"):
            job.add_probe()
    job.result.seconds = job.steps.spent
    return job.result


def _tokens(batch: dict[str, Tensor]) -> int:
    return next(iter(batch.values())).numel()


def check_judging(origin: Source, texts: Texts, setting: JudgeSettings) -> None:
    """Check that what is asked for can be measured, before anything takes time."""
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
        if not number_tokens(origin):
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


def _lost(recall: Sequence[Recall]) -> list[str]:
    """Advice where the converted model finds less than half of what the original finds."""
    found = {name: sum(sum(x.right) for x in recall if x.model == name) for name in (ORIGINAL, CONVERTED)}
    if 2 * found[CONVERTED] >= found[ORIGINAL]:
        return []
    total = sum(len(x.right) for x in recall if x.model == ORIGINAL)
    return [
        f"{found[CONVERTED]} of {total} hidden numbers were found, by the original {found[ORIGINAL]}: where such "
        f"details matter, keep the heads that recall exact, by convert --recall-heads"
    ]


@dataclass
class _Judging:
    """One judgement: what is measured of both models, as far as there is time, goes into the result."""

    origin: Source
    student: Any
    setting: JudgeSettings
    length: int
    steps: Steps
    result: Judgement = field(default_factory=lambda: Judgement({}))

    def fits(self, work: float, what: str) -> bool:
        """Return True if there is time for so much work, or name what is left out."""
        fits = self.steps.fits(work)
        self.result.remarks += [] if fits else [f"left out for time: {what}"]
        return fits

    def add_figures(self, texts: Texts, evaluation: Evaluation, passes: int) -> None:
        """Measure the parts of the student on batches, the first one in any case."""
        setting, rows, used, answers = self.setting, evaluation.batches, 0, None
        if self.origin.task == "masked" and texts.evaluation:
            bare = replace(self.origin, task="encoder")  # the same rows in the same order, with nothing hidden
            same = evaluation_inputs(bare, texts, self.length, setting.samples, setting.batch, setting.seed)
            answers = [x["input_ids"] for x in same.batches]

        def in_time() -> Iterator[dict[str, Tensor]]:
            nonlocal used
            for batch in rows:
                if not self.steps.fits(passes * _tokens(batch)):
                    return
                used += 1
                with self.steps.step("the model and its parts", passes * _tokens(batch)):
                    yield batch

        self.result.figures = part_figures(self.origin.model, self.student, in_time(), answers)
        self.result.measured_on = str(evaluation.used or f"{setting.samples} rows of random tokens")
        if used < len(rows):
            self.result.remarks.append(
                f"left out for time: figures of {len(rows) - used} of {len(rows)} batches of them"
            )

    def add_recall(self, texts: Sequence[str], length: int) -> None:
        """Ask each model for the same numbers hidden in texts of one length."""
        models: dict[str, tuple[Any, AbstractContextManager[None]]]
        models = {ORIGINAL: (self.origin.model, nullcontext()), CONVERTED: (self.student, nullcontext())}
        if hybrids(self.student):
            models[NEAR] = (self.student, near_alone(self.student))
        rows = passkeys(texts, self.origin.tokenizer, length, self.setting.passkeys, self.setting.seed)
        distances = tuple(x.distance for x in rows)
        for name, (model, way) in models.items():
            with self.steps.step(f"numbers hidden in {length} tokens, {name}", len(rows) * length), way:
                answers = [answer_log_probs(model, x.ids, x.answer) for x in rows]
            scores = tuple(float(x.sum()) / DIGITS for x, _ in answers)
            self.result.recall.append(Recall(length, name, distances, tuple(x for _, x in answers), scores))

    def add_samples(self, texts: Sequence[str], tokens: int) -> None:
        """Have both models continue the beginnings of some texts."""
        from kernelformer.generation import continuation  # decoders only

        limit, tokenizer = longest(self.origin), self.origin.tokenizer
        room = PROMPT if limit is None else min(PROMPT, limit - tokens)
        first = start_tokens(tokenizer)
        begins = (x for ids in tokens_of(texts, tokenizer) if (x := [*first, *ids][:room]))
        for number, ids in enumerate(islice(begins, PROMPTS)):  # of texts that have a token
            if not self.fits(2 * WRITTEN * tokens, f"samples from number {number + 1} on"):
                return
            begin, written = torch.tensor([ids]), {}
            for name, model in ((ORIGINAL, self.origin.model), (CONVERTED, self.student)):
                with self.steps.step(f"sample {number + 1}, {name}", WRITTEN * tokens):
                    made, _ = continuation(model, begin, tokens=tokens, seed=self.setting.seed + number)
                    written[name] = tokenizer.decode(made, skip_special_tokens=True)
            self.result.samples.append(Sample(tokenizer.decode(begin[0], skip_special_tokens=True), written))

    def add_probe(self) -> None:
        """Compare linear probes of both models."""
        setting = self.setting
        assert setting.text is not None
        texts, labels = read_labelled(setting.text, setting.probe, setting.seed)
        with self.steps.step("probe", 2 * self.length * setting.probe):
            original, converted = (
                embeddings(x, self.origin.tokenizer, texts, self.length, 4 * setting.batch)
                for x in (self.origin.model, self.student)
            )
            self.result.probe = compare_probes(original, converted, torch.tensor(labels))


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
    log(f"reading {folder}")
    student = load(folder)
    log(f"reading {original}")
    origin = load_source(original, task=_task(student), allow_pickle=setting.allow_pickle)
    _check_same(folder, student, origin)
    texts = divide_texts(None, setting.text, setting.samples, setting.seed)
    check_judging(origin, texts, setting)
    file, card = folder / "report.json", folder / "README.md"
    report = read_json(file) if file.is_file() else {}
    if not isinstance(report, dict):
        raise ValueError(f"{file} is not the report of a conversion, but {type(report).__name__}; remove it.")
    page = card.read_text("utf-8") if card.is_file() else f"# {plain(folder.resolve().name)}\n"
    length = check_length(origin, report.get("length") if setting.length is None else setting.length)
    evaluation = evaluation_inputs(origin, texts, length, setting.samples, setting.batch, setting.seed)
    result = judge(origin, student, texts, evaluation, length, setting, log)
    learned_from: Any = report
    for name in ("texts", "learned from", "file"):
        learned_from = learned_from.get(name) if isinstance(learned_from, dict) else None
    if setting.text is not None and learned_from == setting.text.name:
        result.remarks.append(f"the model has learned from a file of the same name, {setting.text.name}")
    write_json(file, {**report, "judged": finite(result.as_json())})
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
