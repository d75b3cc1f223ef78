"""Texts of a conversion: those to learn from and those to measure on, which are never the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.conversion.report import ConversionResult
from kernelformer.conversion.settings import ConvertSettings
from kernelformer.conversion.texts import (
    TextsUsed,
    check_readable,
    first_token,
    made_up_inputs,
    order,
    read_texts,
    rows_for,
    some_texts,
    tokens_of,
)
from kernelformer.hf.load import Source

Batches = list[dict[str, Tensor]]
FEW = 40  # texts to learn from, below which none is held back
SPREAD = 8  # times as many windows as are chosen on are there to draw them from, so that few are of the same text


@dataclass(frozen=True)
class Texts:
    """Texts of a conversion.

    Args:
        evaluation: to choose those to measure on from; empty: random tokens are measured on.
        held_out: whether the texts to measure on are some of those to learn from.
        validation: texts that are neither learned from nor measured on, to look at while learning.
    """

    training: list[str]
    evaluation: list[str]
    training_file: str = ""
    evaluation_file: str = ""
    available: int = 0
    held_out: bool = False
    validation: tuple[str, ...] = ()


def hold_back(source: Source, texts: Texts, length: int, rows: int, seed: int) -> Texts:
    """Hold some of the texts to learn from back, to look at while learning; none where there are few."""
    different = list(dict.fromkeys(texts.training))
    if len(different) < FEW:
        return texts
    chosen, _ = some_texts(different, source.tokenizer, length, rows, seed, source.task)
    left_out = set(chosen[: len(different) // 10])
    training = [x for x in texts.training if x not in left_out]
    return replace(texts, training=training, validation=tuple(x for x in chosen if x in left_out))


def divide_texts(distill: Path | None, text: Path | None, samples: int, seed: int) -> Texts:
    """Read the texts of a conversion.

    Args:
        text: file to measure on; None: ``samples`` texts of ``distill`` are left out for that, see `hold_out_windows`.
    """
    training = [] if distill is None else read_texts(distill)
    evaluation = [] if text is None else read_texts(text)
    available = len(evaluation or training)
    if training and not evaluation:
        if len(training) <= samples:
            raise ValueError(
                f"{distill} has {len(training)} texts, of which {samples} are left out to measure on; "
                f"give more, fewer --samples, or others by --text."
            )
        places = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
        evaluation = [training[i] for i in places[:samples]]
        training = [training[i] for i in sorted(places[samples:])]
    measured = set(evaluation)
    others = [x for x in training if x not in measured]  # the same words may stand in a file twice, or in both
    if training and not others:
        raise ValueError(f"all texts of {distill} are among those to measure on; give others to learn from.")
    file = text or distill
    names = distill.name if distill else "", file.name if file else ""
    return Texts(others, evaluation, *names, available, held_out=text is None and distill is not None)


def hold_out_windows(source: Source, texts: Texts, length: int, samples: int, seed: int) -> Texts:
    """More of the texts to learn from are left out where those to measure on make too few windows of a causal model.

    As many texts as windows were left out, and short texts are less than a window each. At most half of the texts to
    learn from are taken.
    """
    if source.task != "causal" or not texts.held_out:
        return texts
    check_readable(source, texts.evaluation)
    lacking = samples * length - sum(map(len, tokens_of(texts.evaluation, source.tokenizer)))
    different = list(dict.fromkeys(texts.training))
    pool = [different[i] for i in order(0, len(different) // 2, len(different), seed)] if lacking > 0 else []
    more: list[str] = []
    for text, ids in zip(pool, tokens_of(pool, source.tokenizer), strict=True):
        if lacking <= 0:
            break
        more.append(text)
        lacking -= len(ids)
    left_out = set(more)
    training = [x for x in texts.training if x not in left_out]
    return replace(texts, training=training, evaluation=[*texts.evaluation, *more])


@dataclass(frozen=True)
class Evaluation:
    """Inputs that every measurement of a conversion uses.

    Args:
        used: what of the texts that is; None for random tokens.
        unused: texts of the same file that are not measured on.
    """

    batches: Batches
    used: TextsUsed | None
    unused: list[str]


def evaluation_inputs(source: Source, texts: Texts, length: int, samples: int, batch: int, seed: int) -> Evaluation:
    """Choose the rows to measure on: texts, or windows of joined texts for causal models."""
    if not texts.evaluation:
        return Evaluation(_first_rows(made_up_inputs(source, length, batch, seed), samples, batch), None, [])
    check_readable(source, texts.evaluation)
    chosen, rows = some_texts(texts.evaluation, source.tokenizer, length, samples, seed, source.task)
    made = rows_for(source, chosen, length)
    endless = made.batches(batch, seed, start=first_token(source))
    used = made.used(texts.evaluation_file, texts.available, [(rows, seed)])
    measured = set(chosen)
    return Evaluation(_first_rows(endless, rows, batch), used, [x for x in texts.evaluation if x not in measured])


def choice_inputs(
    source: Source, texts: Texts, evaluation: Evaluation, length: int, samples: int, batch: int, seed: int
) -> tuple[Batches, TextsUsed | None]:
    """Inputs to choose on what stays exact, and what of the texts that is; None where there are no other texts.

    They are texts to learn from, or where there are none others of the file that is measured on: a choice by the texts
    that are measured would flatter the figures.
    """
    pool, file = texts.training or evaluation.unused, texts.training_file or texts.evaluation_file
    if not pool:
        return evaluation.batches, None
    chosen, rows = some_texts(pool, source.tokenizer, length, SPREAD * samples, seed, source.task)
    made, rows = rows_for(source, chosen, length), min(rows, samples)
    inputs = _first_rows(made.batches(batch, seed, start=first_token(source)), rows, batch)
    return inputs, made.used(file, len(pool), [(rows, seed)])


@dataclass(frozen=True)
class Job:
    """One conversion: its models, texts and inputs, and the result to fill."""

    origin: Source
    student: Any
    texts: Texts
    evaluation: Evaluation
    result: ConversionResult
    log: Callable[[str], None]

    @property
    def setting(self) -> ConvertSettings:
        """Settings of the conversion."""
        setting: ConvertSettings = self.result.setting
        return setting

    def choice_inputs(self, samples: int, batch: int, what: str, remark: str) -> Batches:
        """Inputs to choose on, noted in the result under ``what``; a remark where there are no other texts."""
        result = self.result
        rows, used = choice_inputs(
            self.origin, self.texts, self.evaluation, result.length, samples, batch, self.setting.seed
        )
        if used is not None:
            result.texts[what] = used
        elif remark not in result.remarks:
            result.remarks.append(remark)
        return rows


def _first_rows(endless: Iterator[dict[str, Tensor]], rows: int, batch: int) -> Batches:
    batches = list(islice(endless, -(-rows // batch)))
    rest = rows - (len(batches) - 1) * batch
    batches[-1] = {name: x[:rest] for name, x in batches[-1].items()}
    return batches
