"""Buffers of a stream's last keys: written in place, and yet every state stays what it was."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from kernelformer.attention.near import NearKeys, join

B, G, D, E = 2, 3, 4, 5


def tokens(count, seed=0):
    gen = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(B, G, count, width, generator=gen) for width in (D, E))
    return key, value, torch.rand(B, count, generator=gen) < 0.7


def piece(x, first, last):
    return x[0][:, :, first:last], x[1][:, :, first:last], x[2][:, first:last]


def same(got, want):
    return all(map(torch.equal, got, want))


def stream(all_tokens, window, kept=None, near=None, mode=torch.no_grad):
    """Every state of a stream, as (first, last, kept, near)."""
    states, start = [], 0 if kept is None else kept[2].shape[1]
    kept = piece(all_tokens, 0, 0) if kept is None else kept
    for t in range(start, all_tokens[2].shape[1]):
        with mode():
            joined, near = join(kept, piece(all_tokens, t, t + 1), near, window=window)
        kept = piece(joined, max(0, joined[2].shape[1] - window), joined[2].shape[1])
        states.append((max(0, t + 1 - window), t + 1, kept, near))
    return states


@pytest.mark.parametrize("window", [1, 3, 70])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_state_sees_the_last_tokens_for_good(window, mode):
    x = tokens(200)
    for first, last, kept, near in stream(x, window, mode=mode):  # looked at after the whole stream
        assert same(kept, piece(x, first, last))
        assert (near is None) == (mode is torch.enable_grad)


def test_a_token_is_written_in_place_and_the_buffers_stay_of_one_size():
    states = stream(tokens(300), 8)
    storages = [[x.untyped_storage() for x in kept] for _, _, kept, _ in states]
    assert len({x[0].data_ptr() for x in storages}) <= 1 + 300 // 64
    assert len({tuple(y.nbytes() for y in x) for x in storages}) == 1


def test_two_continuations_of_one_state_agree():
    x, other = tokens(30), tokens(30, seed=1)
    for start in (5, 11, 29):
        _, _, kept, near = stream(piece(x, 0, start), 4)[-1]
        with torch.no_grad():
            first = join(kept, piece(x, start, start + 1), near, window=4)
            second = join(kept, piece(other, 0, 1), near, window=4)
            third = join(kept, piece(x, start, start + 1), near, window=4)
        assert first[1] is near
        assert second[1] is not near
        assert same(first[0], piece(x, start - 4, start + 1))
        assert same(third[0], first[0])
        assert same([y.narrow(axis, 4, 1) for y, axis in zip(second[0], (2, 2, 1), strict=True)], piece(other, 0, 1))


def test_threads_that_continue_one_state_do_not_meet():
    x = tokens(6)
    _, _, kept, near = stream(x, 4)[-1]

    def go_on(seed):
        own = tokens(40, seed)
        with torch.no_grad():
            states = stream(own, 4, kept=None, near=None)
            joined, _ = join(kept, piece(own, 0, 1), near, window=4)
        return same(joined[0][:, :, 4:], own[0][:, :, :1]) and same(states[-1][2], piece(own, 36, 40))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(go_on, range(1, 33)))


def test_only_views_of_the_buffers_are_continued_in_place():
    x, new = tokens(6), tokens(1, seed=1)
    _, _, kept, near = stream(x, 4)[-1]
    others = {
        "copies": tuple(y.clone() for y in kept),
        "copied": copy.deepcopy(kept),
        "other samples": tuple(y.index_select(0, torch.tensor([1, 0])) for y in kept),
        "another value": (kept[0], kept[1].clone(), kept[2]),
        "fewer": piece(kept, 1, 4),
        "older": piece(kept, 0, 3),
    }
    with torch.no_grad():
        for name, given in others.items():
            joined, after = join(given, new, near, window=4)
            assert (after is near) == (name == "fewer"), name
            assert same(piece(joined, 0, given[2].shape[1]), given), name
            near = stream(x, 4)[-1][3] if after is near else near


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_a_buffer_of_inference_mode_is_not_written_elsewhere(mode):
    x = tokens(6)
    _, _, kept, near = stream(piece(x, 0, 5), 4, mode=torch.inference_mode)[-1]
    with mode():
        joined, after = join(kept, piece(x, 5, 6), near, window=4)
    assert after is not near
    assert same(joined, piece(x, 1, 6))


def test_a_later_token_does_not_spoil_a_graph_that_holds_a_state():
    x = tokens(9)
    _, _, kept, near = stream(piece(x, 0, 8), 4)[-1]
    weight = torch.ones(D, requires_grad=True)
    loss = (kept[0] * weight).sum()
    with torch.no_grad():
        assert join(kept, piece(x, 8, 9), near, window=4)[1] is near
    loss.backward()
    torch.testing.assert_close(weight.grad, kept[0].sum((0, 1, 2)))


def test_tokens_under_vmap_and_several_at_once_get_tensors_of_their_own():
    x = tokens(9)
    _, _, kept, near = stream(piece(x, 0, 5), 4)[-1]
    with torch.no_grad():
        joined, after = join(kept, piece(x, 5, 8), near, window=4)
        keys = torch.func.vmap(lambda key: join(kept, (key, *piece(x, 5, 6)[1:]), near, window=4)[0][0])(
            torch.stack([x[0][:, :, 5:6]] * 2)
        )
    assert after is None
    assert same(joined, piece(x, 1, 8))
    assert torch.equal(keys[1], x[0][:, :, 1:6])
    assert isinstance(near, NearKeys)
