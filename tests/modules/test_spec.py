"""Attention strings are read and written in one place, and come back as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernelformer as kf
from kernelformer.modules import METHODS, AttentionSpec, parse_attention, parse_method
from kernelformer.modules.spec import without_positions

words = st.text(st.characters(codec="utf-8", exclude_characters=":,>"), max_size=8)
names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = scalars | st.tuples(scalars, scalars) | st.lists(st.integers(), max_size=3)


@given(st.text(max_size=40))
def test_any_text_is_written_as_it_was_read(text):
    assert str(AttentionSpec.parse(text)) == text


@given(st.sampled_from(sorted(METHODS)), st.dictionaries(names, values, max_size=4))
def test_values_are_read_as_they_were_written(method, options):
    spec = AttentionSpec.parse(str(AttentionSpec.make(method, **options)))
    assert (spec.method, spec.values) == (method, options)
    assert [type(x) for x in spec.values.values()] == [type(x) for x in options.values()]


@pytest.mark.parametrize("value", ["a:b", {"a": 1}, float("nan"), float("inf"), object()])
def test_what_cannot_be_read_again_is_not_written(value):
    with pytest.raises(ValueError, match=r"draw=.* cannot be written into an attention string"):
        AttentionSpec.make("favor+", draw=value)


def test_an_option_has_a_name_and_a_value():
    with pytest.raises(ValueError, match=r"options of a method are name=value, got 'iid' in 'favor\+:iid'"):
        parse_method("favor+:iid")
    with pytest.raises(ValueError, match="an attention is a string"):
        parse_method(3)


def test_options_can_be_left_out():
    spec = AttentionSpec.parse("nprf:algorithm=fft:num_features=8")
    assert spec.values["algorithm"] == "fft"
    assert str(spec.without(["algorithm"])) == "nprf:num_features=8"
    assert without_positions("nprf:relative=2d:grid=(2, 3):seed=1") == "nprf:seed=1"
    assert without_positions("linformer:max_length=9") == "linformer:max_length=9"


def test_a_string_has_one_name_for_the_size_of_every_method():
    assert parse_method("skyformer:num_features=8") == ("skyformer", {"num_landmarks": 8})
    assert parse_method("softmax:num_features=8:seed=1") == ("softmax", {})
    assert parse_attention("elu:num_features=8:relative=1d:max_length=9") == (
        "elu",
        {"relative": "1d", "max_length": 9},
    )
    with pytest.raises(ValueError, match="two names for the size of 'linformer'"):
        parse_attention("linformer:rank=4:num_features=8")


@pytest.mark.parametrize("method", kf.list_methods())
def test_every_option_of_a_method_can_be_written_and_read(method):
    options = dict.fromkeys(kf.method_options(method), 1)
    options |= {"kernel": "softmax"} if method == "skyformer" else {}  # the one that can go with a window
    assert parse_method(str(AttentionSpec.make(method, **options))) == (method, options)
