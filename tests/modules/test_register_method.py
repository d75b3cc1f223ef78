"""Feature maps of one's own by a name: everywhere that a method's name is taken."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import kernelformer as kf
from definition import close
from kernelformer.feature_maps import FeatureMap, FormulaMap, PositiveMap
from kernelformer.modules import METHODS, KernelCore, parse_attention, parse_method
from kernelformer.modules.spec import describe_options, maps_by_head

SIZES = {"head_dim": 8, "num_heads": 4}


class CubeMap(FormulaMap):
    """phi_i(x) = |w_i . x|^power + b_i^2, a map for tests.

    Args:
        power: of the product.
    """

    def __init__(self, *, num_features=32, power=3.0, **common):
        super().__init__(num_features=num_features, settings={"power": power}, **common)

    def first_values(self):
        return {"b": torch.ones(self.heads, self.num_features)}

    @staticmethod
    def log_phi(x, tensors, role, power):
        omega, b = tensors
        return torch.log((x @ omega.mT).abs() ** power + b.square().unsqueeze(-2))


class Squares(FormulaMap):
    """phi(x) = x^2 + 1, without frequencies."""

    @staticmethod
    def phi(x, tensors, role):
        return x.square() + 1


class Drawn(FormulaMap):
    """Formula that takes frequencies, by a class that says nothing of their number."""

    @staticmethod
    def log_phi(x, tensors, role):
        (omega,) = tensors
        return x @ omega.mT


class Whole(FeatureMap):
    """Map whose constructor needs something."""

    def __init__(self, *, needed, **common):
        super().__init__(needed, num_features=0, **common)


@pytest.fixture(autouse=True)
def table():
    """A table of methods for each test."""
    with mock.patch.dict(METHODS):
        yield


@pytest.fixture
def cube():
    kf.register_method("cube", CubeMap)
    return "cube"


def test_a_core_by_name_is_the_core_of_the_map(cube):
    q, k, v = torch.randn(3, 2, 4, 30, 8)
    core = kf.build_attention(cube, **SIZES, num_features=16, power=2.0, seed=3, per_head=True)
    plain = KernelCore("cube", CubeMap(**SIZES, num_features=16, power=2.0, seed=3, per_head=True))
    for causal in (False, True):
        assert torch.equal(core(q, k, v, is_causal=causal), plain(q, k, v, is_causal=causal))
    near = kf.build_attention(cube, **SIZES, window=4, sinks=1)
    assert near(q, k, v, is_causal=True).isfinite().all()


def test_a_layer_a_function_and_a_string_take_the_name(cube):
    layer = kf.KernelAttention(32, 4, method=cube, num_features=64, causal=True)
    assert layer(torch.randn(2, 10, 32)).shape == (2, 10, 32)
    assert layer.core.feature_map.num_features == 64
    assert parse_method("cube:num_features=64:power=2.5") == (cube, {"num_features": 64, "power": 2.5})
    assert parse_attention("cube:relative=1d:max_distance=4:window=8")[0] == cube
    kf.register_method("squares", Squares)
    q = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    got = kf.kernel_attention(q, q, q, method="squares", is_causal=True)
    weights = torch.tril((q * 8**-0.25).square().add(1) @ (q * 8**-0.25).square().add(1).mT)
    close(got, weights / weights.sum(-1, keepdim=True) @ q)


def test_its_options_are_those_of_its_constructor(cube):
    assert {"power", "num_features", "seed", "draw", "per_head", "window"} <= set(kf.method_options(cube))
    assert "settings" not in kf.method_options(cube)
    power = next(x for x in describe_options(cube) if x.name == "power")
    assert (power.default, power.about) == (3.0, "of the product.")
    assert maps_by_head(cube, {"per_head": True})
    assert not maps_by_head(cube, {})
    assert METHODS[cube].family == "positive"
    with pytest.raises(ValueError, match=r"unknown option for method 'cube', 'powr'; did you mean 'power'\?"):
        kf.build_attention(cube, **SIZES, powr=2)
    with pytest.raises(ValueError, match="unknown option for method 'cube', 'powr'"):
        parse_method("cube:powr=2")


def test_it_is_listed_by_the_first_line_of_its_documentation(cube):
    assert kf.list_methods()[cube] == "phi_i(x) = |w_i . x|^power + b_i^2, a map for tests"
    kf.register_method("drawn", Drawn, about="exponentials", num_features=8)
    assert kf.list_methods()["drawn"] == "exponentials"
    assert kf.build_attention("drawn", **SIZES).feature_dim == 8


def test_a_map_without_frequencies_has_no_size_and_one_with_them_has_256():
    kf.register_method("squares", Squares)
    assert METHODS["squares"].size is None
    assert METHODS["squares"].family == "signed"
    assert not {"num_features", "draw", "norms"} & set(kf.method_options("squares"))
    assert kf.build_attention("squares", **SIZES, num_features=64, seed=1).feature_dim == 8  # as for elu
    kf.register_method("drawn", Drawn)
    assert kf.build_attention("drawn", **SIZES).feature_dim == 256


def test_attention_of_a_plain_model_is_replaced(cube):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 16, dropout=0.0, batch_first=True), 2).eval()
    kf.replace_attention(model, cube, num_features=16)
    assert [x.feature_map.num_features for x in model.modules() if isinstance(x, KernelCore)] == [16, 16]
    assert model(torch.randn(2, 9, 32)).shape == (2, 9, 32)


@pytest.mark.parametrize("name", ["favor+", "softmax", "bigbird", "taken"])
def test_a_name_that_is_taken_is_refused(name):
    kf.register_method("taken", Squares)
    with pytest.raises(
        ValueError, match=f"the name {name!r} is taken by .*; choose another for CubeMap".replace("+", r"\+")
    ):
        kf.register_method(name, CubeMap)
    kf.register_method("taken", Squares)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first():
    def define(n):
        class Shifted(FormulaMap):
            """phi(x) = |x| + n."""

            @staticmethod
            def phi(x, tensors, role):
                return x.abs() + n

        return Shifted

    q = torch.randn(1, 2, 5, 8)
    outs = []
    for n in (1, 2):
        kf.register_method("shifted", define(n))
        outs.append(kf.kernel_attention(q, q, q, method="shifted"))
    assert not torch.allclose(*outs)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a:b", CubeMap, "the name of a method is letters, digits"),
        ("", CubeMap, "the name of a method is letters, digits"),
        (3, CubeMap, "the name of a method is letters, digits"),
        ("core", KernelCore, "a method is registered by the class of a feature map"),
        ("map", CubeMap(**SIZES), "a method is registered by the class of a feature map"),
        ("whole", Whole, "Whole cannot be built by its defaults: .*'needed'.*; give its options defaults"),
    ],
)
def test_what_cannot_be_registered_says_why(name, make, message):
    with pytest.raises(ValueError, match=message):
        kf.register_method(name, make)
    assert name not in METHODS


def test_an_option_of_a_core_cannot_be_one_of_a_map():
    class Windowed(PositiveMap):
        def __init__(self, *, window=3, **common):
            super().__init__(**common)

    with pytest.raises(ValueError, match="Windowed has options of the names of a core's: window; rename them"):
        kf.register_method("windowed", Windowed)


def test_a_model_is_converted_saved_and_loaded(cube, tmp_path):
    pytest.importorskip("transformers")
    from kernelformer.hf import convert, load
    from kernelformer.hf.save import save
    from tiny_models import inputs, outputs, tiny

    model = convert(tiny("BertModel", torch.float32), "cube", num_features=16, power=2.0)
    given = inputs(model)
    save(model, tmp_path)
    again = load(tmp_path)
    assert torch.equal(outputs(again, **given), outputs(model, **given))
    del METHODS[cube]
    with pytest.raises(ValueError, match=r"unknown method 'cube'.*call kernelformer.register_method first"):
        load(tmp_path)


def test_a_model_of_the_library_is_saved_and_loaded(cube, tmp_path):
    pytest.importorskip("transformers")
    from kernelformer.models import KernelformerConfig, KernelformerForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = KernelformerForCausalLM(KernelformerConfig(**sizes, attention="cube:num_features=8:window=4")).eval()
    tokens = torch.randint(11, (1, 20))
    model.save_pretrained(tmp_path)
    again = KernelformerForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    del METHODS[cube]
    with pytest.raises(ValueError, match=r"unknown method 'cube'.*call kernelformer.register_method first"):
        KernelformerForCausalLM.from_pretrained(tmp_path)


def test_the_command_imports_the_module_that_registers(tmp_path, monkeypatch):
    typer_testing = pytest.importorskip("typer.testing")
    from kernelformer.cli.app import app

    (tmp_path / "own_maps_of_a_test.py").write_text(
        "import kernelformer as kf\nfrom kernelformer.feature_maps import FormulaMap\n\n\n"
        "class Squares(FormulaMap):\n    '''Squares.'''\n\n    @staticmethod\n    def phi(x, tensors, role):\n"
        "        return x.square()\n\n\nkf.register_method('squares', Squares)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = typer_testing.CliRunner().invoke(app, ["--import", "own_maps_of_a_test", "list", "squares"])
    assert result.exit_code == 0, result.output
    assert "Squares" in result.output
    result = typer_testing.CliRunner().invoke(app, ["--import", "no_module_of_this_name", "list"])
    assert result.exit_code != 0
    assert "--import no_module_of_this_name" in result.output + result.stderr
