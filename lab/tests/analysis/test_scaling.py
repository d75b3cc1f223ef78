"""Costs of ranks (exchange, memory, time): the formulas by hand, and where they balance."""

from __future__ import annotations

import pytest

from kernelformer_lab.analysis.scaling import Exchange, LinearCost, Link, RingAttention, Traffic, ring_least_tokens

PLAIN = Exchange(heads=8, head_dim=64, value_dim=64, features=64, facts=17)
NEAR = Exchange(heads=8, head_dim=64, value_dim=64, features=64, facts=17, window=64, sinks=4)
RING = RingAttention(heads=8, key_heads=2, head_dim=64)


def other(exchange, **changes):
    return Exchange(**{**exchange.__dict__, **changes})


def test_sums_alone_are_sent_once_each_way_whatever_the_direction():
    state = 8 * 64 * 65
    assert PLAIN.numbers == other(PLAIN, causal=True).numbers == state
    assert PLAIN.traffic(2) == Traffic(4 * state + 17 * 8, 4 * state, 3)
    assert PLAIN.traffic(5).total == 4 * PLAIN.traffic(2).total
    assert PLAIN.traffic(1).total == 0


def test_near_tokens_bring_sums_without_them_and_themselves_for_each_side():
    state, tokens, sinks, marks = 8 * 64 * 65, 8 * 64 * 128, 8 * 4 * 128, 2 * 64
    assert other(NEAR, causal=True).numbers == 2 * state + tokens + sinks + marks
    assert NEAR.numbers == 3 * state + 2 * tokens + sinks + 2 * marks
    assert NEAR.integers == 17 + 4 + 2 * 4
    assert other(NEAR, packed=True).numbers == 2 * other(NEAR, causal=True).numbers
    assert other(NEAR, slope=True).numbers == NEAR.numbers + state
    assert other(NEAR, slope=True, causal=True).numbers == other(NEAR, causal=True).numbers
    assert other(NEAR, sinks=0).numbers == 3 * state + 2 * tokens
    assert other(NEAR, sinks=0, masked=True, batch=3).numbers == 3 * (3 * state + 2 * tokens + 2 * marks)


def test_a_map_with_signs_has_two_numbers_more_and_no_map_none():
    assert other(PLAIN, signed=True).state == PLAIN.state + 2
    assert other(NEAR, features=0, sinks=0, causal=True).numbers == 8 * 64 * 128
    assert other(PLAIN, features=0).traffic(2) == Traffic(17 * 8, 0, 1)


def test_a_ring_sends_all_tokens_and_works_on_all_pairs():
    assert RING.traffic(100, 4) == Traffic(3 * 2 * 100 * 2 * 64 * 4, 2 * 3 * 2 * 100 * 2 * 64 * 4, 2)
    # Two products of 2 operations a number forward, five backward.
    assert RING.flops(100, 4) == (4 + 10) * 100 * 400 * 64 * 8
    causal = RingAttention(heads=8, key_heads=2, head_dim=64, causal=True)
    assert causal.flops(100, 4) == RING.flops(100, 4) / 2
    assert causal.traffic(100, 4) == RING.traffic(100, 4)


def test_the_time_of_a_link_is_that_of_its_messages_and_bytes():
    assert Link(8e9, 1e-3).seconds(Traffic(3, 7, 2), 5) == pytest.approx(2 * 4 * 1e-3 + 10 / 1e9)
    assert Link(8e9).seconds(Traffic(10**9, 0, 9), 5) == pytest.approx(1.0)


def test_a_ring_hides_what_is_shorter_than_its_work():
    traffic, link = RING.traffic(1000, 4), Link(1e9)
    work, around = RING.flops(1000, 4) / 1e9, 8 * traffic.total / 1e9
    assert work > around
    assert RING.seconds(1000, 4, 1e9, link) == pytest.approx(work)
    assert RING.seconds(1000, 4, 1e15, link) == pytest.approx(around)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("speed", [1.0, 50.0])
def test_from_the_least_tokens_on_the_exchange_is_the_share_of_the_work(causal, speed):
    cost, link = LinearCost(other(NEAR, causal=causal), token=1e-5, merge=1e-4), Link(1e10, 1e-5)
    tokens = cost.least_tokens(64, link, share=0.1, speed=speed)
    work = tokens * cost.token / speed
    merged = 64 * cost.merge / speed
    assert merged + link.seconds(cost.exchange.traffic(64), 64) == pytest.approx(0.1 * work)
    assert cost.seconds(tokens, 64, link, speed) == pytest.approx(1.1 * work)


def test_from_the_least_tokens_on_the_work_of_a_ring_hides_its_exchange():
    link, rate = Link(1e10), 1e12
    tokens = ring_least_tokens(RING, link, rate)
    assert tokens > 1
    for ranks in (2, 64):
        step = RING.flops(tokens, ranks) / ranks / rate
        assert link.seconds(RING.traffic(tokens, ranks), ranks) / (ranks - 1) == pytest.approx(step)


def test_sizes_that_cannot_be_are_refused_by_name():
    for wrong, words in (({"heads": 0}, "heads must be"), ({"window": -1}, "window must be"), ({"item": 2.5}, "item")):
        with pytest.raises(ValueError, match=words):
            other(PLAIN, **wrong)
    with pytest.raises(ValueError, match="ranks must be an integer of at least 1, got 0"):
        PLAIN.traffic(0)
    with pytest.raises(ValueError, match="bits must be a finite number above 0"):
        Link(0)
