"""Distillation of a conversion: stages, budgets, LoRA, resumed from a checkpoint."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kernelformer.conversion.checkpoint import Checkpoint
from kernelformer.conversion.holdout import Batches, Job
from kernelformer.conversion.keep import window_of
from kernelformer.conversion.losses import Reference
from kernelformer.conversion.passkey import number_tokens
from kernelformer.conversion.settings import ConvertSettings
from kernelformer.conversion.texts import Repeats, TextRows, first_token, rows_for
from kernelformer.conversion.tune import (
    Batch,
    BreakdownError,
    Progress,
    ReusePolicy,
    best_rate,
    learned,
    learns,
    quick_dtype,
    transfer,
    tune,
)
from kernelformer.errors import positive_int
from kernelformer.feature_maps.base import FeatureMap
from kernelformer.hf.convert import conversion
from kernelformer.hf.load import Source

STEPS = 300  # default, of attention transfer
TRANSFER = 1 / 3  # share of the minutes for attention transfer, where a map learns
ENDLESS = 10**9  # steps, where the clock says when to end
MEMORY = 2 << 30  # bytes of queries, keys and values that are kept at a time
TIMES = 4  # that what was seen of a batch serves
HELD_OUT = 4096  # tokens, of at least 4 rows: a few texts alone would say now this and now that
TRIALS = 0.1  # of a stage's time may go into finding a rate
TRIAL_STEPS = 6
REPEATS = 0.5  # of a decoder's rows have repeated passages by default
LOOKED_AT = 16  # batches, for a text that is longer than the window
# A few steps like larger rates than a whole stage does, so that none is tried above the usual one.
RATES = {"transfer": (1e-2, 5e-3, 2e-3), "tune": (1.5e-4, 5e-5, 2e-5), "LoRA": (1e-3, 5e-4, 2e-4)}
MAPS = 10.0  # times the rate of the backbone, for maps in tuning


# How models name the projection of the values and that of the output, within an attention and beside it.
VALUES = ("v_proj", "value", "v_lin", "v", "Wv")
OUTPUTS = ("o_proj", "out_proj", "out_lin", "o", "Wo", "dense", "c_proj", "proj")
BESIDE = ("output.dense",)
ALPHA = 2.0  # times the rank: what peft multiplies the product by, over the rank


def lora_targets(student: nn.Module, patterns: str = "") -> list[str]:
    """Name the linear layers that LoRA is put on.

    Args:
        patterns: of their names, such as ``*.v_proj,*.o_proj``; empty: projections of the values and outputs of every
            converted attention.
    """
    layers = {name: x for name, x in student.named_modules() if isinstance(x, nn.Linear | Conv1D)}
    owners = Counter(id(x.weight) for x in student.modules() if isinstance(getattr(x, "weight", None), nn.Parameter))
    # What is merged into a weight that is tied, such as a head's, would change word embeddings too.
    linear = [name for name, x in layers.items() if owners[id(x.weight)] == 1]
    if patterns:
        wanted = [x.strip() for x in patterns.split(",") if x.strip()]
        for pattern in wanted:
            if not any(fnmatchcase(x, pattern) for x in linear):
                tied = ", whose weight is another layer's too" if any(fnmatchcase(x, pattern) for x in layers) else ""
                raise ValueError(
                    f"no linear layer of {type(student).__name__} fits {pattern!r}{tied}; it has {_kinds(linear)}."
                )
        return [x for x in linear if any(fnmatchcase(x, y) for y in wanted)]
    found = []
    for attention in conversion(student).replaced:
        parent = attention.rpartition(".")[0]
        inside = [f"{attention}.{x}" for x in (*VALUES, *OUTPUTS)]
        found += [x for x in (*inside, *(f"{parent}.{y}" for y in BESIDE)) if x in linear]
    if not found:
        raise ValueError(
            f"the projections of the values and outputs of {type(student).__name__} are not known by name; say which "
            f"layers by lora_layers, of {_kinds(linear)}."
        )
    return found


def _kinds(names: Sequence[str]) -> str:
    """Names with their numbers left out, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "*", x) for x in names)) or "none"


class Lora:
    """LoRA in a converted model: only low-rank products beside some linear layers are trained.

    W x  ->  W x + 2 B A x        A (r, in) drawn, B (out, r) zero
    """

    def __init__(self, student: nn.Module, targets: Sequence[str], rank: int, seed: int = 0) -> None:
        from peft import LoraConfig, LoraModel  # takes seconds to import

        self.before = {name: x.requires_grad for name, x in student.named_parameters()}
        rank = positive_int("rank", rank)
        config = LoraConfig(r=rank, lora_alpha=int(ALPHA * rank), target_modules=list(targets), lora_dropout=0.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tuner: Any = LoraModel(student, config, "default")
        self.student = student
        for some in learned(student).values():
            for x in some:
                x.requires_grad_(True)

    def merge(self) -> None:
        """Merge the products into the weights and restore the model's structure."""
        self.tuner.merge_and_unload()
        vars(self.student).pop("peft_config", None)
        for name, x in self.student.named_parameters():
            x.requires_grad_(self.before[name])


@dataclass(frozen=True)
class Budget:
    """Budget of a stage: a number of steps, or seconds."""

    steps: int
    seconds: float | None = None


def held_out_rows(length: int) -> int:
    """Number of held-out rows for a row length."""
    return max(4, HELD_OUT // length)


def plan_stages(student: Any, setting: ConvertSettings) -> dict[str, Budget]:
    """Plan the stages of a distillation by its settings."""
    fits, steps, tuned = learns(student), setting.steps, setting.tune
    if steps and not fits:
        raise ValueError(f"{setting.attention!r} has nothing to learn by attention transfer; give --tune, not --steps.")
    if setting.minutes is not None:
        # Of landmarks one number a head learns, which is not worth a third of the time.
        maps = any(any(True for _ in x.parameters()) for x in student.modules() if isinstance(x, FeatureMap))
        shares = {"transfer": TRANSFER if maps and steps != 0 else 0.0}
        shares["tune"] = 0.0 if tuned == 0 else 1 - shares["transfer"]
        whole = sum(shares.values())
        if not whole:
            raise ValueError(f"--minutes {setting.minutes:g} with --steps 0 and --tune 0 leaves nothing to do.")
        return {x: Budget(ENDLESS, 60 * setting.minutes * y / whole) for x, y in shares.items() if y}
    if steps is None:
        steps = STEPS if fits else 0
    if not steps and not tuned:
        raise ValueError(f"{setting.attention!r} learns nothing without --tune; give it, or leave --distill out.")
    return {x: Budget(y) for x, y in (("transfer", steps), ("tune", tuned or 0)) if y}


def check_far(student: Any, batches: Sequence[dict[str, Tensor]]) -> None:
    """Check that texts are longer than the window: else nothing is far, and maps have nothing to learn."""
    window = window_of(student)
    longest = max((x["input_ids"].shape[1] for x in batches if "input_ids" in x), default=0)
    if window and longest and longest <= window:
        raise ValueError(
            f"the texts to learn from have at most {longest} tokens and the window is {window}, so that nothing is far "
            f"and there is nothing to learn; give longer texts, a larger --length, or a smaller window."
        )


def check_repeats(setting: ConvertSettings, origin: Source) -> None:
    """Check that repeated passages are asked for of a decoder."""
    if setting.repeats and origin.task != "causal":
        raise ValueError(
            f"repeats={setting.repeats:g} are for decoders, {origin.path} is a model for {origin.task!r}; leave it out."
        )


class Distillation:
    """Stages of one conversion: the student is trained in place, and a checkpoint keeps what was learned."""

    def __init__(self, job: Job, checkpoint: Checkpoint) -> None:
        self.student, self.origin, self.texts, self.result = job.student, job.origin, job.texts, job.result
        self.setting, self.checkpoint, self.log, self.inputs = job.setting, checkpoint, job.log, job.evaluation.batches
        self.rows: TextRows = rows_for(job.origin, job.texts.training, job.result.length)
        share = REPEATS if self.setting.repeats is None else self.setting.repeats
        self.repeats: Repeats | None = None  # passages beyond the window of a converted decoder
        if job.origin.task == "causal" and share:
            numbers = number_tokens(job.origin, self.setting.seed)
            self.repeats = Repeats(share, max(1, window_of(job.student)), numbers)
        if self.repeats is not None:
            share, gap, length = self.repeats.share, self.repeats.gap, self.result.length
            said = f"rows of {length} tokens have no room for passages that come again after {gap} tokens"
            if self.repeats.fits(max(map(len, self.rows.rows))):
                rows = "the rows to learn from and of those held out"
                said = f"in {share:.0%} of {rows}, passages come again after {gap} tokens or more"
            self.result.remarks.append(said)
        self.held_out = self._held_out()
        self.lora: Lora | None = None
        self.draws: list[tuple[int, int]] = []  # rows and seed of each stage

    def _held_out(self) -> Batches:
        if not self.texts.validation:
            return []
        made = rows_for(self.origin, self.texts.validation, self.result.length)
        count = min(held_out_rows(self.result.length), len(made.rows))
        size = min(count, self.setting.batch)
        endless = made.batches(size, self.setting.seed, start=first_token(self.origin), repeats=self.repeats)
        return list(islice(endless, count // size))

    def _batches(self, order: int, skip: int = 0) -> Iterator[dict[str, Tensor]]:
        return self.rows.batches(
            self.setting.batch, order, start=first_token(self.origin), skip=skip, repeats=self.repeats
        )

    def run(self, stages: dict[str, Budget]) -> None:
        """Run the stages, from where the checkpoint stopped."""
        check_far(self.student, list(islice(self._batches(self.setting.seed + 1), LOOKED_AT)))
        done = self.checkpoint.stages()
        if "tune" in done:
            self._add_lora()  # the checkpoint has its weights
        self.result.losses, saved, noted = self.checkpoint.load(self.student)
        self.result.curves, self.result.spent = noted.get("curves", {}), noted.get("spent", {})
        for number, (stage, budget) in enumerate(stages.items()):
            going_on = bool(done) and stage == done[-1]
            if budget.steps and stage not in self.result.spent:
                if stage == "tune" and self.lora is None:
                    self._add_lora()
                self._stage(stage, number, budget, saved if going_on else None, last=stage == list(stages)[-1])
            self._count(stage, number)
        if self.lora is not None:
            self.lora.merge()
        self.result.tokens = int(sum(x["tokens"] for x in self.result.spent.values()))
        self.result.seconds = sum(x["seconds"] for x in self.result.spent.values())
        self.result.texts["learned from"] = self.rows.used(
            self.texts.training_file, len(self.texts.training), self.draws
        )

    def _add_lora(self) -> None:
        if self.setting.lora:
            targets = lora_targets(self.student, self.setting.lora_layers)
            self.lora = Lora(self.student, targets, self.setting.lora, self.setting.seed)

    def _count(self, stage: str, number: int) -> None:
        """Count the texts that a finished stage has used."""
        losses = self.result.losses.setdefault(stage, [])
        batches = len(losses)
        if stage == "transfer" and losses:
            batches = self._reuse().batches_of(len(losses))
        self.draws.append((batches * self.setting.batch, self.setting.seed + 1 + number))

    def _reuse(self) -> ReusePolicy:
        """As many batches in a block as fit into `MEMORY`, by the sizes of the attentions."""
        names = set(learned(self.student))
        width = sum(3 * x.num_heads * x.head_dim for x in conversion(self.student).layers if x.name in names)
        size = 4 * self.setting.batch * self.result.length * width
        return ReusePolicy(max(1, min(64, MEMORY // max(1, size))), TIMES)

    def _stage(self, stage: str, number: int, budget: Budget, saved: Any, *, last: bool) -> None:
        losses = self.result.losses.setdefault(stage, [])
        if losses:
            self.result.remarks.append(f"{stage} was resumed after step {len(losses)}")
        order = self.setting.seed + 1 + number
        reuse = self._reuse() if stage == "transfer" else ReusePolicy()
        skip = reuse.first_batch(len(losses))
        start, kind = time.monotonic(), "LoRA" if stage == "tune" and self.lora is not None else stage
        learn = partial(self._learn, stage, reuse)
        rate = RATES[kind][0]
        if budget.seconds is not None and saved is None and self.held_out:
            rate = self._search(kind, learn, order, budget.seconds)
        seconds = None if budget.seconds is None else max(0.0, budget.seconds - (time.monotonic() - start))
        progress = Progress(losses, saved if losses else None)
        try:
            told = self._told(stage, budget, progress)
            limits = {"steps": budget.steps, "seconds": seconds}
            learn(rate, self._batches(order, skip), **limits, progress=progress, log=told)
        except KeyboardInterrupt:
            if progress.whole:
                self._save(progress, now=True)
            raise
        if not losses:
            raise ValueError(
                f"--minutes {self.setting.minutes:g} leaves {budget.seconds or 0:.0f} s for {stage}, which is too "
                f"short for one step here: what comes before it took {time.monotonic() - start:.0f} s; give more."
            )
        self.result.curves[stage] = [list(x) for x in progress.curve]
        self.result.spent[stage] = {"seconds": progress.seconds, "tokens": progress.tokens, "rate": progress.rates[-1]}
        if not last and not self.origin.model.config.is_encoder_decoder:
            self.log(f"measuring: after {stage}")
            predicts = self.origin.task == "causal" and self.origin.model.can_generate()
            figure = Reference(self.origin.model, self.inputs, predicts=predicts).figure(self.student)
            self.result.spent[stage][figure.kind] = figure.value
        self._save(progress, now=True)
        if progress.ended:
            self.result.remarks.append(f"{stage} ended after step {len(losses)}: held-out texts no longer gained")

    def _save(self, progress: Progress, *, now: bool = False) -> None:
        noted = {"curves": self.result.curves, "spent": self.result.spent}
        self.checkpoint.save(self.student, self.result.losses, progress.state, noted, now=now)

    def _learn(self, stage: str, reuse: ReusePolicy, rate: float, batches: Iterator[Batch], **options: Any) -> None:
        teacher = self.origin.model
        options |= {"autocast": quick_dtype(teacher.device), "held_out": self.held_out}
        if stage == "transfer":
            options |= {"reuse": reuse, "window_dropout": self.setting.window_dropout}
            transfer(self.student, teacher, batches, lr=rate, **options)
        else:
            tune(self.student, teacher, batches, lr=rate, map_lr=min(1e-3, MAPS * rate), **options)

    def _search(self, kind: str, learn: Callable[..., None], order: int, seconds: float) -> float:
        """Find a rate by a few steps with each, as far as they take no more than a share of the time.

        Where that is too short for a look and a step, it is the usual rate.
        """
        tensors = [x for x in self.student.parameters() if x.requires_grad]
        start, each = time.monotonic(), TRIALS * seconds / len(RATES[kind])
        too_short = False

        def trial(rate: float) -> float:
            nonlocal too_short
            if too_short or time.monotonic() - start > TRIALS * seconds:
                return float("inf")
            progress = Progress()
            try:
                learn(rate, self._batches(order), steps=TRIAL_STEPS, seconds=each, progress=progress)
            except BreakdownError:
                return float("inf")
            if not progress.losses:
                too_short = True
                self.log(f"there is no time to look for a rate for {kind}: it is {RATES[kind][0]:g}")
                return float("inf")
            best: float = progress.curve[-1][-1]
            self.log(f"a rate for {kind}: {rate:g} gives {best:.4g} on held-out texts")
            return best

        return best_rate(tensors, RATES[kind], trial)[0]

    def _told(self, stage: str, budget: Budget, progress: Progress) -> Callable[[int, float], None]:
        last = [0]

        def told(step: int, loss: float) -> None:
            part = step / budget.steps if budget.seconds is None else progress.seconds / budget.seconds
            if int(20 * part) > last[0] or budget.steps <= 20:
                last[0] = int(20 * part)
                of = f" of {budget.steps}" if budget.seconds is None else ""
                end = "" if budget.seconds is None else f" of {budget.seconds / 60:.1f}"
                held = f", held out {progress.curve[-1][-1]:.4g}" if progress.curve else ""
                self.log(
                    f"{stage}: step {step}{of}, {progress.tokens:,} tokens, {progress.seconds / 60:.1f}{end} min, "
                    f"loss {loss:.4g}{held}"
                )
            self._save(progress)

        return told
