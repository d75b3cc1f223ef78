"""Misuse by ranks is an error on each of them, in words, and never a hang."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kernelformer as kf
from kernelformer.parallel import context_parallel
from rank_processes import on_ranks

D, H = 4, 2


def _core(method="favor+", **options):
    sized = {} if method in ("softmax", "gaussian", "local") else {"num_features": 8}
    return kf.build_attention(method, head_dim=D, num_heads=H, **{**sized, "seed": 0, **options})


def _qkv(length=5, batch=2, **kind):
    return (torch.ones(batch, H, length, D, **kind) for _ in range(3))


def _calls(rank):
    """By name: a call that cannot be made by all ranks together."""
    other = rank == 1
    table = torch.zeros(H, 19)
    ids = torch.full((2, 5), 3 - rank)
    return {
        "batch": lambda: _core()(*_qkv(batch=2 + other)),
        "seed": lambda: _core(seed=int(other))(*_qkv()),
        "draw": lambda: _drawn(other)(*_qkv()),
        "method": lambda: _core("relu" if other else "favor+")(*_qkv()),
        "features": lambda: _core(num_features=12 if other else 8)(*_qkv()),
        "window": lambda: _core(window=3 if other else 4)(*_qkv()),
        "dtype": lambda: _core()(*_qkv(dtype=torch.float64 if other else torch.float32)),
        "causality": lambda: _core()(*_qkv(), is_causal=other),
        "gradients": lambda: _core()(*(x.requires_grad_(other) for x in _qkv())),
        "shape on one rank": lambda: _core()(*(torch.ones(2, H, 5, D + other) for _ in range(3))),
        "softmax": lambda: _core("softmax")(*_qkv()),
        "gaussian": lambda: _core("gaussian")(*_qkv()),
        "skyformer": lambda: kf.build_attention("skyformer", head_dim=D, num_heads=H, num_landmarks=4)(*_qkv()),
        "rfa-gate": lambda: _core("rfa-gate")(*_qkv(), is_causal=True),
        "linformer": lambda: kf.build_attention("linformer", head_dim=D, num_heads=H, max_length=9, rank=2)(*_qkv()),
        "bias without a distance": lambda: _core()(*_qkv(), bias=table),
        "bias of a part": lambda: _core(window=4)(*_qkv(), bias=torch.zeros(H, 9), max_distance=2),
        "a state": lambda: _core()(*_qkv(), is_causal=True, state=_state()),
        "segments that decrease": lambda: _core()(*_qkv(), segment_ids=ids),
        "causal and unequal": lambda: _core()(torch.ones(2, H, 5, D), *list(_qkv(6))[:2], is_causal=True),
        "cross": lambda: _core(window=2)(torch.ones(2, H, 5, D), *list(_qkv(6 - other))[:2]),
        "weights": lambda: _learned(rank)(*_qkv()),
        "near_scale": lambda: _core(window=2, near_scale=1.0 + rank)(*_qkv()),
        "slope": lambda: _core()(*_qkv(), bias=torch.zeros(H, 5), max_distance=2, slope=torch.full((H,), 0.1 + rank)),
        "a tail that is not": lambda: _core()(*_qkv(), bias=torch.arange(38.0).view(H, 19), max_distance=2),
        "step": lambda: _core().step(*_qkv(1)),
        "remember": lambda: _core().remember(*list(_qkv())[:2]),
    }


def _drawn(other):
    core = _core()
    core.resample(3 + other)
    return core


def _learned(rank):
    core = _core("loglinear")
    with torch.no_grad():
        next(core.parameters()).add_(rank)
    return core


def _state():
    return (
        _core()(*_qkv(), is_causal=True, return_state=True)[1]
        if dist.get_rank() < 0
        else kf.attention.State((torch.zeros(2, H, 8, 1), torch.zeros(2, H, 8, D)), 3, _core()._made_by(D**-0.5))
    )


def _try_all():
    said = {}
    for name, call in _calls(dist.get_rank()).items():
        with context_parallel():
            try:
                call()
                said[name] = None
            except ValueError as error:
                said[name] = str(error)
    # Ranks are in step again after every error: a call that all of them can make still works.
    with context_parallel() as ranks:
        said["in the end"] = tuple(_core()(*_qkv()).shape)
        said["sizes"] = (ranks.rank, ranks.size)
        # Gradients by torch.autograd.grad, which leaves out what does not lead to what it is asked for.
        leaves = [x.requires_grad_() for x in _qkv()]
        out = _core()(*leaves, is_causal=True)
        said["gradients in the end"] = [tuple(x.shape) for x in torch.autograd.grad(out.sum(), leaves[1:])]
    try:
        with context_parallel("group"):
            pass
    except ValueError as error:
        said["no group"] = str(error)
    return said


def test_every_rank_says_what_does_not_fit():
    first, second = on_ranks(2, _try_all)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    assert first.pop("in the end") == second.pop("in the end") == (2, H, 5, D)
    shapes = [(2, H, 5, D)] * 2
    assert first.pop("gradients in the end") == second.pop("gradients in the end") == shapes
    assert (first.pop("sizes"), second.pop("sizes")) == ((0, 2), (1, 2))
    silent = {name for said in (first, second) for name, text in said.items() if text is None}
    assert not silent
    assert "2 and 3" in first["batch"]
    assert "2 and 3" in second["batch"]
    assert "seed of their features: 0 and 1" in first["seed"]
    assert "number of their draw: 3 and 4" in second["draw"]
    for name in ("method", "features", "window"):
        assert "the method or its settings" in second[name]
    assert "is_causal: 0 and 1" in first["causality"]
    assert "rank 1 of 2 cannot make this call" in first["shape on one rank"]
    assert "head_dim" in second["shape on one rank"]
    for name in ("softmax", "gaussian", "skyformer", "rfa-gate", "linformer"):
        assert name in first[name]
        assert "favor+" in first[name]
    assert "max_distance" in first["bias without a distance"]
    assert "(heads, 19)" in first["bias of a part"]
    assert "at the end of rank 0" in first["segments that decrease"]
    assert "5 queries and 6 keys" in first["causal and unequal"]
    assert "queries begin at [0, 5]" in first["cross"]
    assert "weights of their kernels" in first["weights"]
    assert "the method or its settings" in second["near_scale"]
    assert "its slope" in first["slope"]
    assert "constant beyond that distance" in second["a tail that is not"]
    assert "torch.distributed process group" in first["no group"]


def test_without_processes_there_is_nothing_to_split_over():
    with pytest.raises(ValueError, match="torchrun"), context_parallel():
        pass
