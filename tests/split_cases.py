"""One attention call by one process and by several ranks, compared in float64, gradients included."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import kernelformer as kf
from kernelformer.parallel import context_parallel

LENGTHS = {1: [[23]], 2: [[13, 7], [2, 17]], 3: [[9, 14, 6], [12, 0, 5]], 4: [[6, 3, 11, 8], [2, 1, 2, 14]]}
HEADS, WIDTH, VALUES = 4, 4, 3


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Args:
        method: of the core, with its options.
        causal: or bidirectional.
        masked: with a random key mask, which hides all of the first rank's keys in one sample.
        packed: with segment ids.
        key_heads: G.
        bias: None, "table" or "slope".
        cross: keys are other tokens, of other lengths.
    """

    method: str
    options: dict = field(default_factory=dict)
    causal: bool = False
    masked: bool = False
    packed: bool = False
    key_heads: int = HEADS
    bias: str | None = None
    cross: bool = False
    frozen: bool = False  # keys and values need no gradients

    def core(self) -> torch.nn.Module:
        """The core, with learned numbers that are not those of the start."""
        core = kf.build_attention(self.method, head_dim=WIDTH, num_heads=HEADS, seed=1, **self.options).double()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in core.parameters():
                weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        return core


def inputs(case: Case, lengths, others):
    """Tensors over the whole sequence by name, and which of their axes is split by which lengths."""
    generator = torch.Generator().manual_seed(0)
    total, keys = sum(lengths), sum(others)

    def numbers(*shape):
        return 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = {
        "query": (numbers(2, HEADS, total, WIDTH), 2, lengths),
        "key": (numbers(2, case.key_heads, keys, WIDTH), 2, others),
        "value": (numbers(2, case.key_heads, keys, VALUES), 2, others),
        "grad": (numbers(2, HEADS, total, VALUES), 2, lengths),
    }
    if case.masked:
        mask = torch.rand(2, keys, generator=generator) > 0.4
        mask[1, : others[0]] = False
        found["key_mask"] = (mask, 1, others)
    if case.packed:
        found["segment_ids"] = ((torch.rand(2, total, generator=generator) > 0.85).long().cumsum(1), 1, lengths)
    return found


def bias_of(case: Case, total, keys):
    """Arguments of a bias over the whole sequence."""
    if case.bias is None:
        return {}
    distance = torch.arange(-(total - 1), keys)
    if case.bias == "slope":
        slope = torch.tensor([0.3, 0.1, 0.05, 0.2], dtype=torch.float64)
        return {"bias": -slope[:, None] * distance.abs(), "max_distance": 2, "slope": slope}
    table = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {"bias": table[:, distance.clamp(-3, 3) + 3].requires_grad_(), "max_distance": 3}


def _folded(grad):
    """Gradients of a table (H, n) up to its window, with all that lies beyond at the window."""
    place = torch.arange(grad.shape[1]) - grad.shape[1] // 2
    return torch.zeros(HEADS, 7, dtype=grad.dtype).index_add(1, place.clamp(-3, 3) + 3, grad)


def run(core, case: Case, given, bias):
    """Output and gradients: of what is split, and of what all ranks have."""
    given = dict(given)
    grad = given.pop("grad")
    core.zero_grad()
    leaves = [
        given[name].clone().requires_grad_(name == "query" or not case.frozen) for name in ("query", "key", "value")
    ]
    rest = {name: given[name] for name in ("key_mask", "segment_ids") if name in given}
    bias = {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in bias.items()}
    if case.bias == "table":
        bias["bias"].requires_grad_()
    out = core(*leaves, is_causal=case.causal, **rest, **bias)
    (out * grad).sum().backward()
    shared = [x.grad for x in core.parameters()] + ([_folded(bias["bias"].grad)] if case.bias == "table" else [])
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)], [x.clone() for x in shared if x is not None]


def compare(case: Case, lengths, group) -> float:
    """The largest difference on this rank between its part and that of one process."""
    rank, others = dist.get_rank(group), list(reversed(lengths)) if case.cross else lengths
    core, whole = case.core(), inputs(case, lengths, others)
    bias = bias_of(case, sum(lengths), sum(others))
    expected = run(core, case, {name: x for name, (x, _, _) in whole.items()}, bias)
    part = {name: x.split(sizes, axis)[rank] for name, (x, axis, sizes) in whole.items()}
    with context_parallel(group):
        found = run(core, case, part, bias)
    differences = [0.0]
    assert len(found[0]) == len(expected[0]) == (2 if case.frozen else 4)
    for mine, all_of_it, sizes in zip(found[0], expected[0], (lengths, lengths, others, others), strict=False):
        expected_part = all_of_it.split(sizes, 2)[rank]
        assert mine.shape == expected_part.shape
        differences.append(float((mine - expected_part).abs().max()) if mine.numel() else 0.0)
    assert len(found[1]) == len(expected[1])
    for mine, all_of_it in zip(found[1], expected[1], strict=True):
        dist.all_reduce(mine, group=group)
        differences.append(float((mine - all_of_it).abs().max()))
    return max(differences)


def compare_all(cases, every: bool) -> dict:
    """Differences on this rank by case and lengths, over groups of 1, 2, 3 and 4 ranks; one length each, or every."""
    found = {}
    for count, splits in LENGTHS.items():
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            for lengths in splits if every else splits[-1:]:
                for name, case in cases.items():
                    found[name, tuple(lengths)] = compare(case, lengths, group)
        dist.barrier()
    return found
