"""Choose what stays exact in a conversion: the attentions that the output needs most, and single heads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.holdout import Job, Texts
from kernelformer.conversion.losses import output_divergence
from kernelformer.conversion.measure import attention_weights, best_heads
from kernelformer.conversion.settings import ConvertSettings
from kernelformer.conversion.texts import SHORTEST, recall_row
from kernelformer.hf.attend import CORE, CROSS
from kernelformer.hf.convert import EXACT, check_kept, conversion, convert, cores, undo
from kernelformer.hf.find import attention_calls
from kernelformer.hf.load import Source
from kernelformer.modules import MixedCore
from kernelformer.modules.calibration import evaluating
from kernelformer.modules.spec import move_to_inputs

Batch = Mapping[str, Any]
Progress = Callable[[int, int], None]


@torch.no_grad()
def choose_exact(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    batches: Sequence[Batch],
    count: int,
    log: Progress = lambda chosen, total: None,
) -> list[str]:
    """Choose the attentions of a converted model that should stay exact, by what each does to the model's output.

    How wrong an attention is by itself says little of that: later layers undo some errors and blow up others. So the
    output decides, by its divergence from the original's (see `output_divergence`), and attentions are changed one
    at a time, each time the one after which it is smallest: where fewer are kept than not, exact ones are put back
    into the linear model; else linear ones are put into the exact model.

    Args:
        teacher: the original.
        student: the same model, converted; it is left as it was.
        batches: of inputs; each trial is a pass over all of them.
        count: how many.
        log: called after each change with their number so far and in the end.

    Returns:
        Their names, in the order of the modules.

    Raises:
        ValueError: there are not more attentions than that.

    Cost: N passes for the first change, and for each other one as many as it takes until the best of what was seen
    before is still the best (see `greedy`); N attentions.
    """
    names = conversion(student).replaced
    check_kept("attentions", len(names), count)
    restores = 2 * count <= len(names)
    with evaluating(teacher, student), _switchable(student) as make_linear:
        wanted = [teacher(**x) for x in batches]

        def divergence(changed: Iterable[str]) -> float:
            make_linear(set(names) - set(changed) if restores else set(changed))
            pairs = zip(batches, wanted, strict=True)
            total = sum(output_divergence(x, want, student(**x)) for x, want in pairs)
            return math.inf if math.isnan(total) else total

        changed = greedy(divergence, names, count if restores else len(names) - count, log)
    return [x for x in names if (x in changed) == restores]


def greedy(
    cost: Callable[[Iterable[str]], float], names: Sequence[str], count: int, log: Progress = lambda chosen, total: None
) -> list[str]:
    """Choose names one at a time, each time one that adds least to a cost of the names chosen.

    What a name adds is measured again only while it could be the least: others keep what they added when fewer were
    chosen, as long as that is more. That is exact where a name never adds less than it did before.
    """
    chosen: list[str] = []
    added = dict.fromkeys(names, -math.inf)
    base = cost(chosen) if count else 0.0
    for _ in range(count):
        fresh: dict[str, float] = {}
        while True:
            best = min(added, key=added.__getitem__)
            if best in fresh:
                break
            fresh[best] = cost([*chosen, best])
            # Where even the base is infinite any finite cost is a gain.
            added[best] = fresh[best] - base if math.isfinite(base) else fresh[best]
        chosen.append(best)
        base = fresh[best]
        del added[best]
        log(len(chosen), count)
    return chosen


@contextmanager
def _switchable(student: PreTrainedModel) -> Iterator[Callable[[set[str]], None]]:
    """Give a function that makes some converted attentions linear and all others exact; afterwards all are linear."""
    layers = {x.name: x for x in conversion(student).layers if x.replaced}
    linear = {name: core for name, core in cores(student).items() if name in layers}
    exact: dict[str, nn.Module] = {}  # the cores that layers would attend with had they been kept
    for name, layer in layers.items():
        core = replace(layer, method=EXACT, options={}, exact_heads=()).build(0)
        setattr(core, CROSS, layer.cross)
        exact[name] = move_to_inputs(core, next(student.get_submodule(name).parameters())).eval()

    def switch(names: set[str]) -> None:
        for name in layers:
            student.get_submodule(name).add_module(CORE, linear[name] if name in names else exact[name])

    try:
        yield switch
    finally:
        switch(set(layers))


Scores = dict[tuple[str, int], float]


@torch.no_grad()
def recall_scores(
    model: PreTrainedModel, rows: Iterable[tuple[Tensor, Tensor, Tensor]], only: Collection[str] | None = None
) -> Scores:
    """Measure how much weight each head gives to the keys that some queries should find.

        score = mean over pairs (i, j) of  A_ij        A: exact attention

    With pairs of repeated passages (see `data.repeats.recall_row`) few heads of a model have a large score, and without
    these nothing far is found, whatever the others do.

    Args:
        model: a decoder, not converted.
        rows: token ids (L), and of each pair the query i (N) and the key j (N).
        only: names of the attentions; None: all.

    Returns:
        The score of each head, by the attention's name and the head's number, of several calls the largest; empty
        where there is not one pair.
    """
    sums: dict[tuple[str, int], Tensor] = {}
    count = 0
    for ids, queries, wanted in rows:
        if not len(queries):
            continue
        for call in attention_calls(model, {"input_ids": ids[None].to(model.device)}, outputs=False, only=only):
            query, key, _, key_mask, causal, scale, bias = call.inputs
            at, to = queries.to(query.device), wanted.to(query.device)
            weights = attention_weights(
                query, key, scale=scale, causal=causal, key_mask=key_mask, position_bias=bias, rows=at
            )
            found = weights[0].gather(2, to.expand(query.shape[1], -1)[..., None]).sum((1, 2)).double().cpu()
            sums[call.name, call.call] = found + sums.get((call.name, call.call), torch.zeros(()))
        count += len(queries)
    scores: Scores = {}
    for (name, _), values in sums.items():
        for head, x in enumerate(values):
            scores[name, head] = max(float(x) / count, scores.get((name, head), 0.0))
    return scores


ROWS = 4  # in which passages are repeated, to see which heads find them again
SAME_TEXTS = "what stays exact was chosen by what is measured on; give more texts, or others to learn"
Heads = dict[str, list[int]]


def window_of(student: Any) -> int:
    """The largest window of the converted attentions; 0: they have none."""
    linear = [x.linear if isinstance(x, MixedCore) else x for x in cores(student).values()]
    return max((getattr(x, "window", None) or 0 for x in linear), default=0)


def check_recall_heads(setting: ConvertSettings, origin: Source, texts: Texts) -> None:
    """Check that heads which recall can be looked for, before anything takes time."""
    if setting.recall_heads and (origin.task != "causal" or not texts.evaluation):
        lacks, way = ("texts", "give --text") if origin.task == "causal" else ("a decoder", "leave it out")
        raise ValueError(
            f"recall_heads={setting.recall_heads} needs {lacks}: heads that find again what stands far back are seen "
            f"by repeating passages of texts in a causal model; {way}."
        )


def keep_exact(job: Job) -> None:
    """Convert again, without the attentions that the output needs most and the heads that recall or went wrong most."""
    student, result, setting, plan = job.student, job.result, job.setting, conversion(job.student)
    kept = []
    if setting.keep:
        rows = job.choice_inputs(setting.samples, setting.batch, "chosen on", SAME_TEXTS)

        def told(changed: int, total: int) -> None:
            job.log(f"choosing what stays exact: change {changed} of {total}")

        kept = choose_exact(job.origin.model, student, rows, setting.keep, told)
    rest = [x for x in plan.replaced if x not in kept]
    count = sum(x.num_heads for x in plan.layers if x.name in rest)
    chosen: dict[str, Heads] = {}
    if setting.recall_heads:
        check_kept("heads", count, setting.recall_heads)
        job.log("looking for heads that find again what is far")
        why = f"they find again what is far, --recall-heads {setting.recall_heads}"
        chosen[why] = _recall_heads(job, rest)
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
    convert(student, method, [re.sub(r"([*?[])", r"[\1]", x) for x in rest], exact_heads=heads or None, **options)
    result.exact_heads = chosen


def _recall_heads(job: Job, names: list[str]) -> Heads:
    """Choose heads of some attentions that find again what stands far back."""
    count, result = job.setting.recall_heads, job.result
    batches = job.choice_inputs(ROWS, 1, "heads that recall chosen on", SAME_TEXTS)
    window = window_of(job.student)
    rows = whole_rows(batches)
    scores = scores_on(job.origin.model, rows, window, names)
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
