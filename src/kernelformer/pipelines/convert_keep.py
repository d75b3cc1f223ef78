"""What of a conversion stays exact: the attentions that the output needs most, and single heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.data.repeats import SHORTEST, recall_row
from kernelformer.distill.recall_heads import Scores, best_heads, recall_scores
from kernelformer.hf.load import Source
from kernelformer.hf.plan import check_kept
from kernelformer.modules import MixedCore
from kernelformer.pipelines.convert_settings import ConvertSettings
from kernelformer.pipelines.convert_texts import Batches, Evaluation, Texts, choice_inputs
from kernelformer.reports.conversion_result import ConversionResult

ROWS = 4  # in which passages are repeated, to see which heads find them again
Heads = dict[str, list[int]]
Log = Callable[[str], None]


def window_of(student: Any) -> int:
    """The largest window of the converted attentions; 0: they have none."""
    from kernelformer.hf.convert import cores

    linear = [x.linear if isinstance(x, MixedCore) else x for x in cores(student).values()]
    return max((getattr(x, "window", None) or 0 for x in linear), default=0)


def check_recall_heads(setting: ConvertSettings, origin: Source, texts: Texts) -> None:
    """Check that heads which recall can be looked for, before anything takes time.

    Raises:
        ValueError: the model is not causal, or there are no texts.
    """
    if setting.recall_heads and (origin.task != "causal" or not texts.evaluation):
        lacks, way = ("texts", "give --text") if origin.task == "causal" else ("a decoder", "leave it out")
        raise ValueError(
            f"recall_heads={setting.recall_heads} needs {lacks}: heads that find again what stands far back are seen "
            f"by repeating passages of texts in a causal model; {way}."
        )


def keep_exact(
    student: Any, origin: Source, result: ConversionResult, texts: Texts, evaluation: Evaluation, log: Log
) -> None:
    """Convert again, without the attentions that the output needs most and the heads that recall or went wrong most."""
    from kernelformer.hf import conversion, convert, undo

    setting, plan = result.setting, conversion(student)
    kept = _attentions(student, origin, result, texts, evaluation, log) if setting.keep else []
    rest = [x for x in plan.replaced if x not in kept]
    count = sum(x.num_heads for x in plan.layers if x.name in rest)
    chosen: dict[str, Heads] = {}
    if setting.recall_heads:
        check_kept("heads", count, setting.recall_heads)
        log("looking for heads that find again what is far")
        why = f"they find again what is far, --recall-heads {setting.recall_heads}"
        chosen[why] = _recall_heads(student, origin, result, texts, evaluation, rest)
    if setting.keep_heads:
        why = f"the largest errors, --keep-heads {setting.keep_heads}"
        chosen[why] = result.reports["all converted"].worst_heads(setting.keep_heads, rest)
    heads: dict[str | int, list[int]] = {}
    for some in chosen.values():
        for name, numbers in some.items():
            heads[name] = sorted({*heads.get(name, ()), *numbers})
    check_kept("heads", count, sum(map(len, heads.values())))
    undo(student)
    method, options = setting.method()
    convert(student, method, [_literal(x) for x in rest], exact_heads=heads or None, **options)
    result.exact_heads = chosen


def _attentions(
    student: Any, origin: Source, result: ConversionResult, texts: Texts, evaluation: Evaluation, log: Log
) -> list[str]:
    """The attentions that stay exact."""
    from kernelformer.distill.keep import choose_exact

    setting = result.setting
    rows = _rows(origin, result, texts, evaluation, setting.samples, setting.batch, "chosen on")

    def told(changed: int, total: int) -> None:
        log(f"choosing what stays exact: change {changed} of {total}")

    return choose_exact(origin.model, student, rows, setting.keep, told)


def _rows(
    origin: Source,
    result: ConversionResult,
    texts: Texts,
    evaluation: Evaluation,
    samples: int,
    batch: int,
    what: str,
) -> Batches:
    """Inputs to choose on, noted in the result under ``what``."""
    rows, used = choice_inputs(origin, texts, evaluation, result.length, samples, batch, result.setting.seed)
    if used is not None:
        result.texts[what] = used
        return rows
    said = "what stays exact was chosen by what is measured on; give more texts, or others to learn"
    result.remarks = [*(x for x in result.remarks if x != said), said]
    return rows


def _recall_heads(
    student: Any, origin: Source, result: ConversionResult, texts: Texts, evaluation: Evaluation, names: list[str]
) -> Heads:
    """The heads of some attentions that find again what stands far back."""
    count = result.setting.recall_heads
    batches = _rows(origin, result, texts, evaluation, ROWS, 1, "heads that recall chosen on")
    window = window_of(student)
    rows = whole_rows(batches)
    scores = scores_on(origin.model, rows, window, names)
    if not scores:
        raise ValueError(
            f"the texts make rows of at most {len(rows[0])} tokens, and it takes {max(1, window) + 2 * SHORTEST} to "
            f"repeat a passage beyond a window of {window} and see which heads find it again; give more or longer "
            f"texts, a larger --length (it is {result.length}), or a smaller window."
        )
    heads = best_heads(scores, count)
    least = min(scores[name, head] for name, some in heads.items() for head in some)
    others = max(x for (name, head), x in scores.items() if head not in heads.get(name, ()))
    result.remarks.append(
        f"{count} head{'s' * (count > 1)} that find{'s' * (count == 1)} again what is far stay{'s' * (count == 1)} "
        f"exact: at least {least:.2f} of the weight goes to what came next in a passage that was repeated, of other "
        f"heads at most {others:.2f}"
    )
    return heads


def whole_rows(batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Every row of token ids without its padding, the longest first."""
    rows = []
    for batch in batches:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        rows += list(ids) if mask is None else [x[real] for x, real in zip(ids, mask.to(torch.bool), strict=True)]
    return sorted(rows, key=lambda x: -len(x))


def scores_on(model: Any, rows: Sequence[Tensor], window: int, names: Sequence[str]) -> Scores:
    """`recall_scores` on passages that are repeated beyond a window in the first `ROWS` of some rows."""
    repeated = [recall_row(x, max(1, window), number) for number, x in enumerate(rows[:ROWS])]
    return recall_scores(model, repeated, names)


def _literal(name: str) -> str:
    """A name as a pattern that fits it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)
