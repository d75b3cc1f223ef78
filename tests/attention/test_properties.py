"""Random shapes, masks, chunk sizes and dtypes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definition import FORGETS, STREAMING, TOLERANCE, VARIANTS, WHOLE, attend, build, close, inputs, signed
from kernelformer.attention import blocks, dispatch

sizes = st.integers(1, 40)


def chunks(size, buffer, rate=0.0):
    """Set the chunk sizes, and from which cost on there are matrices; returns what puts them back."""
    before = blocks.CAUSAL_CHUNK, blocks.BUFFER, dispatch.RATES
    blocks.CAUSAL_CHUNK, blocks.BUFFER, dispatch.RATES = size, buffer, (rate, rate)

    def restore():
        blocks.CAUSAL_CHUNK, blocks.BUFFER, dispatch.RATES = before

    return restore


@settings(max_examples=150, deadline=None)
@given(
    variant=st.sampled_from(list(VARIANTS)),
    B=st.integers(1, 4),
    G=st.sampled_from([1, 2, 4]),
    L=sizes,
    S=sizes,
    E=st.integers(1, 9),
    is_causal=st.booleans(),
    hide=st.floats(0, 1),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 50),
    buffer=st.sampled_from([500, 3000, 100000]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    rate=st.sampled_from([0.0, 1e9]),
)
def test_fast_paths_equal_the_definition(variant, B, G, L, S, E, is_causal, hide, seed, chunk, buffer, dtype, rate):
    is_causal = variant in FORGETS or (is_causal and variant not in WHOLE)
    core = build(variant, dtype)
    q, k, v = inputs(L, S, B=B, G=G, E=E, seed=seed)
    key_mask = torch.rand(B, S, generator=torch.Generator().manual_seed(seed)) >= hide
    restore = chunks(chunk, buffer, rate)
    try:
        got = core(*(x.to(dtype) for x in (q, k, v)), is_causal=is_causal, key_mask=key_mask)
    finally:
        restore()
    want = attend(variant, core, *(x.to(dtype).double() for x in (q, k, v)), is_causal=is_causal, key_mask=key_mask)
    assert got.dtype == dtype
    # A signed denominator near its guard multiplies rounding by up to 1 / GUARD.
    close(got, want, 100 * TOLERANCE[dtype] if signed(variant) else None)


@settings(max_examples=60, deadline=None)
@given(
    variant=st.sampled_from(STREAMING),
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    G=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_way_to_cut_a_sequence_gives_the_same(variant, cuts, G, chunk, seed):
    core = build(variant)
    q, k, v = inputs(30, G=G, seed=seed)
    key_mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(seed)) > 0.3
    restore = chunks(chunk, 3000)
    try:
        whole = core(q, k, v, is_causal=True, key_mask=key_mask)
        places = sorted({0, 30, *cuts})
        state, parts = None, []
        for a, b in itertools.pairwise(places):
            piece = [x[:, :, a:b] for x in (q, k, v)]
            out, state = core(*piece, is_causal=True, key_mask=key_mask[:, a:b], state=state, return_state=True)
            parts.append(out)
    finally:
        restore()
    close(torch.cat(parts, 2), whole)
