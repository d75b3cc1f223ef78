"""Learned kernels with the redraw schedule: the same on every rank, and after a resume."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kernelformer as kf

METHODS = ("gmm-rks", "gmm-prf", "fastfood-prf", "fastfood-rks", "generative-prf", "loglinear")


def make(seed=0):
    torch.manual_seed(seed)
    layers = [kf.KernelAttention(16, 2, m, num_features=16, seed=i) for i, m in enumerate(METHODS)]
    return nn.Sequential(*layers)


def batches(count):
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(4, 7, 16, generator=gen) for _ in range(count)]


def train(model, optimizer, data):
    losses = []
    for x in data:
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def started():
    model = make()
    kf.redraw(model, every=2)
    return model, torch.optim.AdamW(kf.parameter_groups(model, lr=0.01), lr=1e-3)


def test_a_resumed_run_continues_to_the_last_bit(tmp_path):
    data = batches(9)
    model, optimizer = started()
    whole = train(model, optimizer, data)

    first, optimizer = started()
    head = train(first, optimizer, data[:5])  # in the middle of a draw's life
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed, optimizer = started()
    with torch.no_grad():
        for x in resumed.parameters():
            x.normal_()
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert head + train(resumed, optimizer, data[5:]) == whole
    for (name, a), (_, b) in zip(model.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def _rank(rank, port, path):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    torch.rand(10 * rank)  # draws must not depend on the global generator
    model = DistributedDataParallel(make())
    kf.redraw(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, [x[2 * rank : 2 * rank + 2] for x in batches(5)])
    torch.save(model.module.state_dict(), path.format(rank))
    dist.destroy_process_group()


def test_ranks_agree_with_each_other_and_with_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(tmp_path / "rank{}.pt")
    mp.spawn(_rank, args=(port, path), nprocs=2)
    one, two = (torch.load(path.format(rank), weights_only=True) for rank in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert int(one["1.core.feature_map.draw"]) == 2
    model, _ = started()
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), batches(5))  # Adam would make a sign of rounding
    for name, x in model.state_dict().items():
        if x.is_floating_point():
            torch.testing.assert_close(one[name], x, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(one[name], x), name


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_activations_see_the_same_kernel(method):
    from torch.utils.checkpoint import checkpoint

    layer = kf.KernelAttention(16, 2, method, num_features=16, causal=True)
    x = torch.randn(2, 9, 16, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.core.parameters()])
    out = checkpoint(layer, x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), [x, *layer.core.parameters()]), want, strict=True):
        assert torch.equal(a, b)
