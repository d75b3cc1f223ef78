"""A sequence over 1, 2, 3 and 4 ranks: outputs and all gradients are those of one process, for every method."""

from __future__ import annotations

import itertools

import pytest

from rank_processes import on_ranks
from split_cases import Case, compare_all

SMALL = {"num_features": 8}
NEAR = {**SMALL, "window": 4, "sinks": 2}
PLAIN = ("favor+", "favor+hyperbolic", "trigonometric", "relu", "elu", "gmm-prf", "fastfood-rks", "generative-prf")
PLAIN += ("loglinear", "hedgehog", "rfa", "nprf", "favor++", "favor#")


def _every(method, options, **others):
    """By name: bidirectional and causal, with and without mask, packed or not."""
    kinds = itertools.product((False, True), repeat=3)
    return {
        f"{method} {options} {others} {causal=} {masked=} {packed=}": Case(
            method, options, causal=causal, masked=masked, packed=packed, **others
        )
        for causal, masked, packed in kinds
    }


def _plain():
    cases = {}
    for method in PLAIN[:3]:
        cases |= _every(method, {} if method in ("elu", "hedgehog") else SMALL, key_heads=2)
    for method in PLAIN[3:]:
        for causal in (False, True):
            options = {} if method in ("elu", "hedgehog") else SMALL
            cases[f"{method} {causal=}"] = Case(method, options, causal=causal, masked=causal)
    for method in ("favor+", "trigonometric"):
        cases[f"cross {method}"] = Case(method, SMALL, cross=True, masked=True, key_heads=1)
    cases["frozen keys"] = Case("favor+", SMALL, causal=True, frozen=True)
    cases["unnormalized"] = Case("favor+", {**SMALL, "normalize": False}, causal=True)
    cases["learned landmarks"] = Case("skyformer", {"num_landmarks": 4, "landmarks": "learned"}, causal=True)
    return cases


def _near():
    cases = _every("favor+", NEAR, key_heads=2) | _every("local", {"window": 3, "sinks": 1})
    cases |= _every("relu", {**SMALL, "window": 4}) | _every("favor+", {**SMALL, "sinks": 2})
    for causal, packed, kind in itertools.product((False, True), (False, True), ("table", "slope")):
        common = {"causal": causal, "packed": packed, "bias": kind}
        cases[f"near {kind} {common}"] = Case("favor+", {**SMALL, "window": 5, "sinks": 1}, **common)
        cases[f"near signed {kind} {common}"] = Case("trigonometric", {**SMALL, "window": 5}, **common)
    for causal in (False, True):
        cases[f"frozen keys {causal=}"] = Case("favor+", NEAR, causal=causal, frozen=True)
    cases["sinks alone with a slope"] = Case("favor+", {**SMALL, "sinks": 2, "window": 2}, bias="slope")
    return cases


def _biased():
    cases = _every("nprf", SMALL, bias="table") | _every("favor+", SMALL, bias="slope", key_heads=2)
    return cases | _every("trigonometric", SMALL, bias="table") | _every("relu", SMALL, bias="slope")


def _some():
    """Of each kind a few."""
    near, plain, biased = (list(x().items()) for x in (_near, _plain, _biased))
    return dict(near[3:8:4] + near[8::9] + plain[1:24:6] + plain[24::4] + plain[-4:-2] + near[-3:] + biased[1::5])


@pytest.mark.parametrize(
    ("cases", "every"),
    [
        (_some, False),
        pytest.param(_plain, True, marks=pytest.mark.slow),
        pytest.param(_near, True, marks=pytest.mark.slow),
        pytest.param(_biased, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_together_are_one_process(cases, every):
    cases = cases()
    results = on_ranks(4, compare_all, cases, every)
    for rank, found in enumerate(results):
        assert isinstance(found, dict), found
        assert len(found) == len(cases) * ([7, 6, 4, 2] if every else [4, 3, 2, 1])[rank]
        wrong = {name: x for name, x in found.items() if not x < 1e-9}
        assert not wrong, (rank, wrong)
