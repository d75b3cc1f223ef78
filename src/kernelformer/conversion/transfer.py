"""Where maps begin to be fitted: at what they are, or at the original's own keys, whichever is nearer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.conversion.losses import attention_loss
from kernelformer.conversion.tune import Batch, Watched, learned
from kernelformer.feature_maps.untied import LogLinearMap
from kernelformer.hf.capture import AttentionCall
from kernelformer.hf.convert import cores
from kernelformer.modules import AttentionCore, KernelCore, MixedCore
from kernelformer.modules.calibration import evaluating

KEYS = 4096  # of each head that centres are made of, at most
ROUNDS = 8  # of k-means
SAME, CENTRES = "as it was", "keys"


def start_student(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, str]:
    """Start the maps of a converted model where `start_maps` finds best, by what its original sees on some batches.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: of inputs; the last is held out to compare by.
        autocast: the precision of the original's pass, such as ``torch.bfloat16``.

    Returns:
        Which start each map that could choose has taken; empty where no map learns.
    """
    own = {name: core for name, core in cores(student).items() if name in learned(student)}
    if not own:
        return {}
    with evaluating(teacher, student):
        watched = Watched(teacher, own, autocast)
        return start_maps(own, [watched(x) for x in batches])


@torch.no_grad()
def start_maps(cores: Mapping[str, AttentionCore], batches: Sequence[Sequence[AttentionCall]]) -> dict[str, str]:
    """Start the loglinear maps of some cores at centres of the original's keys, where that is nearer to its attention.

    With centres c_1 ... c_M of the keys (k-means in the metric of the kernel), and x already times sqrt(scale),

        phi_i(q) = exp(q . c_i)        phi_i(k) = softmax_i(k . c_i - |c_i|^2 / 2)

    so that ``phi(q) . phi(k)`` is exp(q . c) for a key at a centre: softmax attention to clusters. The other start is
    what the map is now: drawn, calibrated, or learned.

    Args:
        cores: of a converted model, by name.
        batches: what the original's attentions saw; the last is held out to compare by, where there are several.

    Returns:
        Which start each map that could choose has taken.
    """
    fitted, held = batches[:-1] or batches, batches[-1]
    chosen = {}
    for name, core in cores.items():
        linear = core.linear if isinstance(core, MixedCore) else core
        if not isinstance(linear, KernelCore) or not isinstance(linear.feature_map, LogLinearMap):
            continue
        phi = linear.feature_map
        calls = [x for some in fitted for x in some if x.name == name]
        tests = [x for x in held if x.name == name]
        if not phi.options.get("unit_keys", True) or not calls:
            continue
        before = [x.clone() for x in phi.parameters()]
        first = _loss(core, tests)
        _set_centres(core, linear, phi, calls)
        if not _loss(core, tests) < first:
            for x, old in zip(phi.parameters(), before, strict=True):
                x.copy_(old)
            chosen[name] = SAME
        else:
            chosen[name] = CENTRES
    return chosen


def _loss(core: AttentionCore, calls: Sequence[AttentionCall]) -> float:
    return sum(float(attention_loss(core, *x.inputs)) for x in calls) / max(1, len(calls))


def _set_centres(core: nn.Module, linear: KernelCore, phi: LogLinearMap, calls: Sequence[AttentionCall]) -> None:
    """Set w and b of a map to centres of the keys of some calls."""
    scale = linear.scale
    keys = []
    for call in calls:
        query, key, value, key_mask = call.inputs[:4]
        if isinstance(core, MixedCore):
            query, key, value = (core._split(x, 1) for x in (query, key, value))
        key = linear._normalize_qk(query, key, key_mask)[1] * scale**0.5
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        keys.append(key.transpose(1, 2)[real.to(key.device)])  # (N, G, D)
    every = torch.cat(keys).transpose(0, 1)
    maps = phi.w_k.shape[0]  # key heads, fewer or more than the keys have, or 1 where all share a map
    if maps == 1:
        every = every.flatten(0, 1)[None]
    elif maps != every.shape[0]:
        every = every.repeat_interleave(maps // every.shape[0], 0)
    gen = torch.Generator().manual_seed(phi.seed_number)
    centres = torch.stack([key_centres(x, phi.w_k.shape[1], gen) for x in every]).to(phi.w_k)
    groups = phi.w_q.shape[0] // maps
    phi.w_k.copy_(centres)
    phi.b_k.copy_(-0.5 * centres.square().sum(-1))
    phi.w_q.copy_(centres.repeat_interleave(groups, 0))
    phi.b_q.zero_()


def key_centres(keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centres of keys (N, D) by k-means, (count, D); where keys are fewer some centres are the same.

    First centres are keys, each drawn with a probability as the squared distance to those before it (k-means++).

    Args:
        keys: of one head.
        count: M.
        generator: of the choice of first centres.
    """
    order = torch.randperm(len(keys), generator=generator).to(keys.device)
    keys = keys[order[:KEYS]].float()
    chosen, distance = [0], (keys - keys[0]).square().sum(-1)
    for _ in range(count - 1):
        odds = distance.cpu() if float(distance.max()) > 0 else torch.ones(len(keys))
        chosen.append(int(torch.multinomial(odds, 1, generator=generator)))
        distance = torch.minimum(distance, (keys - keys[chosen[-1]]).square().sum(-1))
    centres = keys[chosen].clone()
    for _ in range(ROUNDS):
        nearest = (keys @ centres.T - 0.5 * centres.square().sum(-1)).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, keys)
        counts = torch.bincount(nearest, minlength=count).unsqueeze(-1)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres
