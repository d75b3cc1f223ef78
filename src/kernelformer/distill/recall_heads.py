"""The heads of a decoder that find again what stands far back."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernelformer.analysis.attention_profile import attention_weights
from kernelformer.hf.capture import attention_calls
from kernelformer.hf.plan import check_kept

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


def best_heads(scores: Scores, count: int) -> dict[str, list[int]]:
    """Choose the ``count`` heads with the largest scores, by the attention's name."""
    check_kept("heads", len(scores), count)
    chosen: dict[str, list[int]] = {}
    for name, head in sorted(scores, key=lambda x: -scores[x])[:count]:
        chosen.setdefault(name, []).append(head)
    return {name: sorted(heads) for name, heads in chosen.items()}
