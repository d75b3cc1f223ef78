"""Buffers of a stream's last keys: written in place, and yet every state stays what it was."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from kernelformer.attention.near_keys import Place, push

B, G, D, E = 2, 3, 4, 5


def tokens(count, seed=0):
    gen = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(B, G, count, width, generator=gen) for width in (D, E))
    return key, value, torch.rand(B, count, generator=gen) < 0.7


def piece(x, first, last):
    return x[0][:, :, first:last], x[1][:, :, first:last], x[2][:, first:last]


def same(got, want):
    return all(map(torch.equal, got, want))


def stream(all_tokens, window, mode=torch.no_grad):
    """Every state of a stream, as (first, last, kept, place); what leaves the window is checked on the way."""
    states, kept, place = [], piece(all_tokens, 0, 0), None
    for t in range(all_tokens[2].shape[1]):
        with mode():
            kept, gone, place = push(kept, *piece(all_tokens, t, t + 1), place, window=window)
        assert same(gone, piece(all_tokens, max(0, t - window), max(0, t + 1 - window)))
        states.append((max(0, t + 1 - window), t + 1, kept, place))
    return states


@pytest.mark.parametrize("window", [1, 3, 70])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_state_sees_the_last_tokens_for_good(window, mode):
    x = tokens(200)
    for first, last, kept, place in stream(x, window, mode=mode):  # looked at after the whole stream
        assert same(kept, piece(x, first, last))
        assert (place is None) == (mode is torch.enable_grad)


def test_a_token_is_written_in_place_and_the_buffers_stay_of_one_size():
    states = stream(tokens(300), 8)
    storages = [[x.untyped_storage() for x in kept] for _, _, kept, _ in states]
    assert len({x[0].data_ptr() for x in storages}) <= 1 + 300 // 64
    assert len({tuple(y.nbytes() for y in x) for x in storages}) == 1


def test_two_continuations_of_one_state_agree():
    x, other = tokens(30), tokens(30, seed=1)
    for start in (5, 11, 29):
        _, _, kept, place = stream(piece(x, 0, start), 4)[-1]
        with torch.no_grad():
            first = push(kept, *piece(x, start, start + 1), place, window=4)
            second = push(kept, *piece(other, 0, 1), place, window=4)
            third = push(kept, *piece(x, start, start + 1), place, window=4)
        assert first.place.buffers is place.buffers
        assert second.place.buffers is not place.buffers
        assert same(first.tokens, piece(x, start - 3, start + 1))
        assert same(third.tokens, first.tokens)
        assert same(third.gone, first.gone)
        assert same(piece(second.tokens, 3, 4), piece(other, 0, 1))


def test_threads_that_continue_one_state_do_not_meet():
    x = tokens(6)
    _, _, kept, place = stream(x, 4)[-1]

    def go_on(seed):
        own = tokens(40, seed)
        with torch.no_grad():
            states = stream(own, 4)
            pushed = push(kept, *piece(own, 0, 1), place, window=4)
        return same(piece(pushed.tokens, 3, 4), piece(own, 0, 1)) and same(states[-1][2], piece(own, 36, 40))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(go_on, range(1, 33)))


def test_only_the_tokens_of_a_place_are_continued_in_place():
    x, new = tokens(6), tokens(1, seed=1)
    _, _, kept, place = stream(x, 4)[-1]
    others = {
        "views": tuple(y.view_as(y) for y in kept),
        "copied": copy.deepcopy(kept),
        "other samples": tuple(y.index_select(0, torch.tensor([1, 0])) for y in kept),
        "another value": (kept[0], kept[1].clone(), kept[2]),
        "fewer": piece(kept, 1, 4),
        "older": piece(kept, 0, 3),
    }
    with torch.no_grad():
        for name, given in others.items():
            after, gone, where = push(given, *new, place, window=4)
            assert where.buffers is not place.buffers, name
            count, left = given[2].shape[1], gone[2].shape[1]
            assert same(gone, piece(given, 0, left)), name
            assert same(piece(after, 0, count - left), piece(given, left, count)), name
        assert push(kept, *new, place, window=4).place.buffers is place.buffers


def test_a_mask_is_left_out_where_every_token_is_visible():
    x = tokens(100)[:2]
    kept, place = (x[0][:, :, :0], x[1][:, :, :0], torch.ones(B, 0, dtype=torch.bool)), None
    with torch.no_grad():
        for t in range(100):
            kept, gone, place = push(kept, *(y[:, :, t : t + 1] for y in x), None, place, window=3)
            assert place.visible
            assert gone[2] is None
        assert kept[2].all()
        hidden = torch.zeros(B, 1, dtype=torch.bool)
        kept, _, place = push(kept, *(y[:, :, :1] for y in x), hidden, place, window=3)
        for _ in range(3):
            assert not place.visible
            kept, gone, place = push(kept, *(y[:, :, :1] for y in x), None, place, window=3)
        assert not gone[2].any()  # the hidden one has left


def test_what_a_map_makes_of_keys_is_kept_beside_them():
    x, calls = tokens(90), []

    def double(keys, mask):
        calls.append(keys.shape[2])
        return (2 * keys, mask[:, None, :, None].expand(-1, G, -1, 1).to(keys.dtype))

    kept, place = piece(x, 0, 5), None
    with torch.no_grad():
        for t in range(5, 90):
            kept, _, place = push(kept, *piece(x, t, t + 1), place, window=5, mapping=double)
            keys, marks = place.mapped()
            assert torch.equal(keys, 2 * kept[0])
            assert torch.equal(marks[:, 0, :, 0].bool(), kept[2])
    assert calls == [5, *[1] * 64, 5, *[1] * 21]


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_a_buffer_of_inference_mode_is_not_written_elsewhere(mode):
    x = tokens(6)
    _, _, kept, place = stream(piece(x, 0, 5), 4, mode=torch.inference_mode)[-1]
    with mode():
        pushed = push(kept, *piece(x, 5, 6), place, window=4)
    assert pushed.place is None or pushed.place.buffers is not place.buffers
    assert same(pushed.tokens, piece(x, 2, 6))


def test_a_later_token_does_not_spoil_a_graph_that_holds_a_state():
    x = tokens(9)
    _, _, kept, place = stream(piece(x, 0, 8), 4)[-1]
    weight = torch.ones(D, requires_grad=True)
    loss = (kept[0] * weight).sum()
    with torch.no_grad():
        assert push(kept, *piece(x, 8, 9), place, window=4).place.buffers is place.buffers
    loss.backward()
    torch.testing.assert_close(weight.grad, kept[0].sum((0, 1, 2)))


def test_tokens_under_vmap_and_several_at_once_get_tensors_of_their_own():
    x = tokens(9)
    _, _, kept, place = stream(piece(x, 0, 5), 4)[-1]
    with torch.no_grad():
        pushed = push(kept, *piece(x, 5, 8), place, window=4)
        keys = torch.func.vmap(lambda key: push(kept, key, *piece(x, 5, 6)[1:], place, window=4).tokens[0])(
            torch.stack([x[0][:, :, 5:6]] * 2)
        )
    assert pushed.place is None
    assert same(pushed.tokens, piece(x, 4, 8))
    assert same(pushed.gone, piece(x, 1, 4))
    assert torch.equal(keys[1], x[0][:, :, 2:6])
    assert isinstance(place, Place)
