"""The tree shows the way of the data: a layer imports only what stands right of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kernelformer

ROOT = Path(kernelformer.__file__).parent
ORDER = [
    {"cli"},
    {"evidence"},
    {"studies"},
    {"comparison"},
    {"comparison_worker", "preparation", "translation"},
    {"recipes", "reports", "bench", "export"},
    {"training"},
    {"tasks"},
    {"data"},
    {"conversion"},
    {"generation", "page"},
    {"analysis", "models"},
    {"hf"},
    {"cache", "diagnosis", "parallel", "quiet", "terminal", "weight_headers"},
    {"modules"},
    {"feature_maps", "attention"},
    {
        "contract",
        "kernels",
        "errors",
        "environment",
        "formatting",
        "files",
        "records",
        "lazy",
        "subprocesses",
        "commands",
        "settings",
        "timing",
    },
]
LEVEL = {name: index for index, names in enumerate(ORDER) for name in names}
# Within a level, who may use whom: the wording of errors, and how files are read and written.
WITHIN = {
    ("commands", "files"),
    ("contract", "errors"),
    ("kernels", "errors"),
    ("records", "errors"),
    ("files", "errors"),
    ("records", "files"),
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


def test_every_import_goes_to_the_right():
    wrong = []
    for path in ROOT.rglob("*.py"):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if layer in ("__init__", "__main__"):
            continue
        for name in imports(path):
            if name.split(".")[0] != "kernelformer":
                continue
            target = name.split(".")[1] if "." in name else "modules"
            if target != layer and LEVEL[target] <= LEVEL[layer] and (layer, target) not in WITHIN:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_the_core_imports_torch_alone():
    allowed = set(sys.stdlib_module_names) | {"torch", "kernelformer"}
    for path in ROOT.rglob("*.py"):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if layer != "__main__" and (layer == "__init__" or LEVEL[layer] >= LEVEL["modules"]):
            assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_importing_the_package_needs_torch_only():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'typer', 'matplotlib', 'transformers']));"
        "import kernelformer as kf; kf.build_attention('favor+', head_dim=4, num_heads=1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
