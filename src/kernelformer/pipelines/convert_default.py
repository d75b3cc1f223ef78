"""The attention of a conversion that names none: by the kind of model, measured where that does not settle it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kernelformer.data.texts import check_length
from kernelformer.hf.load import Source
from kernelformer.pipelines.convert_settings import ConvertSettings
from kernelformer.pipelines.convert_texts import Texts, choice_inputs, evaluation_inputs
from kernelformer.pipelines.steps import Log, Steps

S = TypeVar("S", bound=ConvertSettings)
ROWS = 2  # that attentions of a decoder are compared on
MAPPED = 6  # passes of the original that take as long as one of a model with features, and starting its maps
STARTS = 4  # others that maps start by, as in the conversion itself


def with_default(setting: S, origin: Source, texts: Texts, log: Log = lambda _: None) -> tuple[S, str]:
    """Settings with the attention that is proposed for a model, and why; see `proposal`.

    Args:
        setting: without an attention.
        origin: the model.
        texts: of the conversion; the comparison uses others than are measured on, where there are others.
        log: called with what happens.
    """
    from kernelformer.hf.propose import DECODERS, Proposal, proposal

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
        found = Proposal(DECODERS[1], f"{DECODERS[1]}: a decoder without training, for which --features are asked")
    features = found.features if setting.features is None else setting.features
    same = "" if by_others else "; by what is measured on, for want of other texts"
    reason = f"no --attention was given: {found.reason}{same}"
    return replace(setting, attention=found.attention, features=features), reason


def _losses(
    setting: ConvertSettings, origin: Source, texts: Texts, attentions: Sequence[str], log: Log
) -> tuple[dict[str, float], bool]:
    """Rise of the loss of the next token with each attention, as it would be converted; and whether by other texts."""
    from kernelformer.distill.figures import Reference
    from kernelformer.distill.start import start_student
    from kernelformer.hf import convert, undo
    from kernelformer.modules import METHODS, parse_method

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
