"""A map from its formula alone does what every other map does; the conformance suite has it too."""

from __future__ import annotations

import pickle
import re
from unittest import mock

import pytest
import torch

from definition import PAGE, SignedFormula, attend, build, close, inputs, padding
from kernelformer.contract import lookup
from kernelformer.feature_maps import FormulaMap
from kernelformer.modules import METHODS, KernelCore
from reference import reference_attention

formulas = pytest.mark.parametrize("variant", ["documented", "signed formula"])


def matrix(bias, L, S):
    """(H, L + S - 1) over j - i as (H, L, S)."""
    return bias[:, torch.arange(S) - torch.arange(L)[:, None] + L - 1]


def test_the_page_runs_and_its_map_is_short():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks[0].splitlines()) <= 25
    names = {"__name__": __name__}
    with mock.patch.dict(METHODS):
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    assert names["out"].shape == (2, 4, 100, 16)
    (names["y"].sum() + names["out"].sum()).backward()
    for core in (names["core"], names["layer"].core):
        assert core.feature_map.b.grad.abs().sum() > 0


@formulas
@pytest.mark.parametrize("algorithm", ["direct", "fft", "windowed"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_bias_equals_the_definition_with_gradients(variant, algorithm, causal, small_blocks):
    core = build(variant)
    gen = torch.Generator().manual_seed(1)
    bias = torch.randn(4, 37, generator=gen, dtype=torch.float64)
    bias[:, :12], bias[:, 25:] = bias[:, 12:13], bias[:, 24:25]  # constant beyond a distance of 6
    leaves = [*inputs(19, G=2, grad=True), *core.parameters()]
    mask = padding(2, 19)
    out = core(*leaves[:3], is_causal=causal, key_mask=mask, bias=bias, algorithm=algorithm)
    want = attend(variant, core, *leaves[:3], is_causal=causal, key_mask=mask, bias=matrix(bias, 19, 19))
    close(out, want)
    grads, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
    for a, b in zip(grads, expected, strict=True):
        close(a, b)


@formulas
def test_steps_with_a_bias_equal_all_at_once(variant):
    core = build(variant)
    q, k, v = inputs(15)
    table = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    past = table.flip(1)
    whole = torch.cat([past[:, :1].expand(4, 10), past, torch.zeros(4, 14)], 1)
    want = core(q, k, v, is_causal=True, bias=whole)
    state, parts = None, []
    for t in range(15):
        out, state = core.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state, bias=table)
        parts.append(out)
    close(torch.cat(parts, 2), want)


@formulas
def test_it_compiles_to_one_graph(variant):
    torch._dynamo.reset()  # earlier compilations of the same code count towards a limit
    core = build(variant, torch.float32)
    leaves = inputs(20, dtype=torch.float32, grad=True)
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    for causal in (False, True):
        out, want = (f(*leaves, is_causal=causal) for f in (compiled, core))
        close(out, want)
        for a, b in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
            close(a, b)


def test_parameters_of_zero_learn_nothing_from_hidden_tokens(small_blocks):
    """A hidden token is mapped as zeros, whose features are 0 here, like those of a row that is hidden."""
    core = KernelCore("tanh", SignedFormula(head_dim=8, num_heads=4, num_features=24, settings={"shift": 0.0}))
    core = core.double()
    q, k, v = inputs(14)
    mask = padding(2, 14)
    for how in ({}, {"is_causal": True}, {"bias": torch.zeros(4, 27, dtype=torch.float64)}):
        (got,) = torch.autograd.grad(core(q, k, v, key_mask=mask, **how).square().sum(), list(core.parameters()))
        want = reference_attention(core, q, k, v, key_mask=mask, is_causal=how.get("is_causal", False))
        close(got, torch.autograd.grad(want.square().sum(), list(core.parameters()))[0])


def test_a_pickled_map_and_a_map_after_to_empty_give_the_same():
    core = KernelCore("tanh", SignedFormula(head_dim=8, num_heads=4, num_features=24, settings={"shift": 0.5}))
    q, k, v = inputs(9, dtype=torch.float32)
    want = core(q, k, v)
    assert torch.equal(pickle.loads(pickle.dumps(core))(q, k, v), want)
    core.to_empty(device="cpu")
    core.feature_map.reset_parameters()
    assert torch.equal(core(q, k, v), want)


def test_a_class_defined_twice_keeps_two_formulas():
    def define(size):
        class Constant(FormulaMap):
            @staticmethod
            def phi(x, tensors, role):
                return x[..., :size] * 0 + 1

        return Constant(head_dim=4, num_heads=1)

    two, three = define(2), define(3)
    assert two.spec_id != three.spec_id
    assert [lookup(m.spec_id).feature_dim([], 4) for m in (two, three, two)] == [2, 3, 2]
    assert define(2).feature_dim == 2


def test_a_map_says_which_formula_it_lacks():
    class Nothing(FormulaMap):
        pass

    with pytest.raises(
        TypeError, match="Nothing must define log_phi, for positive features, or else phi, and not both"
    ):
        Nothing(head_dim=4, num_heads=1)
