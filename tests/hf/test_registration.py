"""Effects of importing and registering on transformers; exported names are functions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernelformer.hf import convert
from tiny_models import tiny

# Everything that transformers lets others register, as plain values.
REGISTRIES = """
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.models.auto import modeling_auto, tokenization_auto

def registries():
    autos = [getattr(modeling_auto, x) for x in modeling_auto.__all__ if x.startswith("AutoModel")]
    return (
        sorted(CONFIG_MAPPING._extra_content),
        [sorted(x.__name__ for x in auto._model_mapping._extra_content) for auto in autos],
        sorted(x.__name__ for x in tokenization_auto.TOKENIZER_MAPPING._extra_content),
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )
"""


def python(code: str, *arguments: object) -> str:
    """Output of a fresh process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_registers_nothing_but_converted_folders_with_kernelformer_hf_for_auto_classes(tmp_path):
    convert(tiny("BertModel"), "elu").save_pretrained(tmp_path / "linear")
    code = f"""{REGISTRIES}
before = after = registries()
import importlib, pkgutil, sys
from transformers import AutoModel
try:
    AutoModel.from_pretrained(sys.argv[1])
except ValueError as problem:
    assert "kernelformer-converted" in str(problem), problem
else:
    raise AssertionError("nothing was registered")
import kernelformer
for module in pkgutil.walk_packages(kernelformer.__path__, "kernelformer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        if after == before and "kernelformer.hf" in sys.modules:
            after = registries()
            assert after[0] == ["kernelformer-converted"], after[0]
            assert all(x == ["ConvertedConfig"] for x in after[1]) and after[2:] == before[2:], after
        assert registries() == after, module.name
assert after != before
print(AutoModel.from_pretrained(sys.argv[1]).conversion)
"""
    assert "attention.self: elu (called 1x)" in python(code, tmp_path / "linear")


@pytest.mark.slow
def test_registering_again_changes_nothing():
    code = f"""{REGISTRIES}
from kernelformer.hf import register
before = registries()
names = register()
after = registries()
assert after[:3] == before[:3]
assert set(after[3]) >= {{*before[3], *names}} and set(after[4]) >= {{*before[4], *names}}
register()
assert registries() == after
"""
    python(code)


@pytest.mark.slow
def test_the_models_of_the_library_are_known_once_they_are_registered(tmp_path):
    code = f"""{REGISTRIES}
import sys
from transformers import AutoModel
from kernelformer.models import KernelformerConfig, KernelformerModel, register
model = KernelformerModel(KernelformerConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
model.save_pretrained(sys.argv[1])
assert registries()[0] == []
register()
print(type(AutoModel.from_pretrained(sys.argv[1])).__name__, registries()[0])
"""
    assert python(code, tmp_path) == "KernelformerModel ['kernelformer']\n"


FIRST = [
    "import kernelformer.hf.save, kernelformer.hf.load, kernelformer.hf.register, kernelformer.hf.convert",
    "import kernelformer.conversion.convert, kernelformer.conversion.texts",
]
NAMES = """
from kernelformer.hf import convert, load, register, save
import kernelformer.hf.convert, kernelformer.hf.load, kernelformer.hf.register, kernelformer.hf.save
import kernelformer
for x in (convert, load, register, save):
    assert type(x).__name__ == "function", x
    assert getattr(kernelformer.hf, x.__name__) is x, x
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, so that torch is imported once")
def test_exported_names_are_functions_whatever_was_imported_before():
    code = f"""
import os, sys
import torch, transformers
assert not any(x.startswith("kernelformer") for x in sys.modules)
for first in {FIRST!r}:
    child = os.fork()
    if not child:
        exec(first + {NAMES!r})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, first
print("done")
"""
    assert python(code) == "done\n"
