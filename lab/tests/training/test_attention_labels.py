"""Attentions of all blocks, and of an encoder and a decoder, as one text that is read as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelformer.modules import METHODS, AttentionSpec
from kernelformer_lab.training.config import join_blocks, join_sides, parse_blocks, parse_sides

plain = st.builds(AttentionSpec.make, st.sampled_from(sorted(METHODS)), num_features=st.integers(1, 99))
grids = st.builds(AttentionSpec.make, st.just("nprf"), grid=st.tuples(st.integers(1, 9), st.integers(1, 9)))


@given(st.lists(plain | grids, min_size=1, max_size=6), st.lists(plain | grids, max_size=6))
def test_blocks_and_sides_are_read_as_they_were_written(encoder, decoder):
    text = join_sides(join_blocks([*map(str, encoder)]), join_blocks([*map(str, decoder)]) if decoder else None)
    first, second = parse_sides(text)
    for side, wanted in ((first, encoder), (second, decoder)):
        blocks = [] if side is None else parse_blocks(side)
        assert [str(x).split(" x ")[1] for x in blocks for _ in range(x.count)] == [*map(str, wanted)]
        assert ", ".join(map(str, blocks)) == (side or "")


def test_one_attention_for_all_blocks_has_no_count():
    assert join_blocks("elu") == "elu"
    assert parse_blocks("elu:scale=2") == [AttentionSpec("elu", ("scale=2",))]
    assert parse_blocks("2 x elu, 1 x nprf:grid=(8, 8)") == [
        AttentionSpec("elu", (), 2),
        AttentionSpec("nprf", ("grid=(8, 8)",), 1),
    ]
    assert str(AttentionSpec("elu", ("scale=2",), 3).plain) == "3 x elu"


def test_a_side_may_not_be_missing():
    assert parse_sides("elu") == ("elu", None)
    assert parse_sides("elu>softmax") == parse_sides(" elu > softmax ") == ("elu", "softmax")
    for text in ("elu >", "> elu", "a > b > c"):
        with pytest.raises(ValueError, match="stands between the encoder's attention and the decoder's"):
            parse_sides(text)
