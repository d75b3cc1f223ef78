"""What the table of methods says is true, and what is made from it is up to date."""

from __future__ import annotations

import re

import pytest
import torch

import kernelformer as kf
from definition import VARIANTS
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules import METHODS, KernelCore
from kernelformer.modules.spec import applicable_options, maps_by_head

FACTS = ("causal", "streaming", "bias", "window", "cross")


def build(method, **options):
    more = {"max_length": 12} if method == "linformer" else {}
    return kf.build_attention(method, head_dim=8, num_heads=2, num_features=8, seed=1, **more, **options)


def qkv(L=6, S=6):
    gen = torch.Generator().manual_seed(0)
    return (torch.randn(1, 2, x, 8, generator=gen) for x in (L, S, S))


def attend(fact, core, is_causal):
    """Use a core in the way that a fact is about; is_causal for where both ways would do."""
    if fact == "causal":
        return core(*qkv(), is_causal=True)
    if fact == "streaming":
        return core.step(*qkv(1, 1))[0]
    if fact == "bias":
        more = {"max_distance": 2} if core.has_near else {}
        return core(*qkv(), bias=torch.zeros(2, 11), is_causal=is_causal, **more)
    return core(*qkv(4, 6)) if fact == "cross" else core(*qkv(), is_causal=is_causal)


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_facts_are_true(method, fact):
    entry = METHODS[method]
    claim = getattr(entry, "causal" if fact == "streaming" else fact)
    always = isinstance(claim, bool)
    for options in ({}, *([] if always else [claim])):
        near = {"window": 2, "sinks": 1} if fact == "window" else {}
        if entry.holds(claim, options):
            assert attend(fact, build(method, **options, **near), not entry.cross).isfinite().all()
        else:
            with pytest.raises(ValueError, match=re.escape(repr(method))):
                attend(fact, build(method, **options, **near), not entry.cross)
    assert always or entry.holds(claim, claim)


@pytest.mark.parametrize("method", METHODS)
def test_quadratic_methods_are_the_exact_ones_of_all_tokens_and_have_no_feature_map(method):
    entry = METHODS[method]
    assert entry.quadratic == (entry.family == "exact" and method != "local")
    assert entry.has_map == isinstance(build(method), KernelCore) == issubclass(entry.make, FeatureMap)


@pytest.mark.parametrize("method", METHODS)
def test_the_family_is_what_the_features_are(method):
    entry, core = METHODS[method], build(method)
    if not isinstance(core, KernelCore) or entry.family == "landmarks":
        assert entry.family in ("exact", "landmarks", "other")
        return
    phi = core.feature_map(torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0)))
    assert entry.family == ("positive" if bool((phi >= 0).all()) else "signed")


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_of_its_own_is_not_that_of_the_head_dimension(method):
    assert METHODS[method].own_scale == (build(method).scale != 8**-0.5)


@pytest.mark.parametrize("method", METHODS)
def test_one_name_is_the_size_of_every_method(method):
    size = METHODS[method].size
    core = build(method)
    more = {"max_length": 12} if method == "linformer" else {}
    own = {} if size is None else {size: 8}
    seed = {"seed": 1} if "seed" in kf.method_options(method) else {}
    same = kf.build_attention(method, head_dim=8, num_heads=2, **more, **own, **seed)
    assert core.state_dict().keys() == same.state_dict().keys()
    assert all(torch.equal(x, same.state_dict()[name]) for name, x in core.state_dict().items())
    assert size is None or size in kf.method_options(method)
    if size not in (None, "num_features"):
        assert getattr(core.feature_map if METHODS[method].has_map else core, size, 8) == 8
        with pytest.raises(ValueError, match=f"num_features=8 and {size}=8 are two names for the size of '{method}'"):
            build(method, **{size: 8})


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_takes_the_two_common_options_of_every_method(method):
    more = {"max_length": 12} if method == "linformer" else {}
    layer = kf.KernelAttention(16, 2, method, num_features=8, seed=3, causal=not METHODS[method].cross, **more)
    assert layer(torch.randn(1, 5, 16)).shape == (1, 5, 16)
    with pytest.raises(ValueError, match=f"unknown option for method {method!r},".replace("+", r"\+")):
        kf.KernelAttention(16, 2, method, num_feature=8, **more)


def test_the_common_options_are_checked_also_where_they_mean_nothing():
    for options, said in (
        ({"num_features": 0}, "num_features must be an integer of at least 1, got 0"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
    ):
        for method, more in (("softmax", {}), ("elu", {}), ("relu", {"projection": False})):
            with pytest.raises(ValueError, match=said):
                kf.build_attention(method, head_dim=8, num_heads=2, **options, **more)


def test_of_the_options_of_several_methods_each_takes_its_own():
    options = {"num_features": 8, "num_landmarks": 4, "rounds": 3, "seed": 1}
    assert applicable_options("favor+", options) == {"num_features": 8, "seed": 1}
    assert applicable_options("nystromformer", options) == {"num_landmarks": 4, "rounds": 3, "seed": 1}
    assert applicable_options("linformer", options) == {"rank": 8, "seed": 1}
    assert applicable_options("softmax", options) == {}


def test_maps_by_head_depend_on_the_options():
    assert maps_by_head("gmm-rks", {})
    assert not maps_by_head("gmm-rks", {"per_head": False})
    assert not maps_by_head("favor+", {})
    assert maps_by_head("relu", {"per_head": True})
    assert not maps_by_head("relu", {"per_head": True, "projection": False})
    assert maps_by_head("skyformer", {"landmarks": "learned"})
    assert not any(maps_by_head(x, {}) for x in ("skyformer", "softmax", "elu", "rfa-gate", "linformer"))


def test_every_method_is_in_the_conformance_suite():
    # Those that have no name are maps by their formula alone.
    named = {method for method, _ in VARIANTS.values() if isinstance(method, str)}
    assert named == METHODS.keys()
