"""The tree shows the way of the data: a layer imports only what stands right of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kernelformer
import kernelformer_lab

LIBRARY = Path(kernelformer.__file__).parent
LABORATORY = Path(kernelformer_lab.__file__).parent
ORDER = [
    {"cli"},
    {"export"},
    {"conversion"},
    {"generation", "page"},
    {"models"},
    {"hf"},
    {"cache", "diagnosis", "parallel", "quiet", "weight_headers"},
    {"modules"},
    {"feature_maps", "attention"},
    {"contract", "kernels", "environment", "formatting", "files", "lazy", "commands", "settings", "errors"},
]
LAB_ORDER = [
    {"cli"},
    {"evidence"},
    {"studies"},
    {"comparison"},
    {"preparation", "translation"},
    {"recipes", "reports", "bench"},
    {"training"},
    {"tasks"},
    {"data"},
    {"analysis"},
    {"figures", "jobs", "memory", "records"},
]
# Within a level, who may use whom: the wording of errors, and how files are read and written.
WITHIN = {
    ("contract", "errors"),
    ("kernels", "errors"),
    ("files", "errors"),
    ("settings", "errors"),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            found.add(node.module or "")
    return found


def wrong_imports(root: Path, order: list[set[str]]) -> list[str]:
    level = {name: index for index, names in enumerate(order) for name in names}
    wrong = []
    for path in root.rglob("*.py"):
        layer = path.relative_to(root).parts[0].removesuffix(".py")
        if layer in ("__init__", "__main__"):
            continue
        for name in imports(path):
            if name.split(".")[0] != root.name:
                continue
            if "." not in name:  # its public names, or its version
                continue
            target = name.split(".")[1]
            if target != layer and level[target] <= level[layer] and (layer, target) not in WITHIN:
                wrong.append(f"{path.relative_to(root)} imports {name}")
    return wrong


def test_every_import_goes_to_the_right():
    assert wrong_imports(LIBRARY, ORDER) == []
    assert wrong_imports(LABORATORY, LAB_ORDER) == []


def test_the_library_never_imports_the_laboratory():
    for path in LIBRARY.rglob("*.py"):
        assert not any(name.split(".")[0] == "kernelformer_lab" for name in imports(path)), path


def test_the_core_imports_torch_alone():
    level = {name: index for index, names in enumerate(ORDER) for name in names}
    allowed = set(sys.stdlib_module_names) | {"torch", "kernelformer"}
    for path in LIBRARY.rglob("*.py"):
        layer = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        if layer != "__main__" and (layer == "__init__" or level[layer] >= level["modules"]):
            assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_importing_the_package_needs_torch_only():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'typer', 'matplotlib', 'transformers']));"
        "import kernelformer as kf; kf.build_attention('favor+', head_dim=4, num_heads=1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
