"""Print the size of this repository's source and how much of it common calls execute, as a Markdown table.

python tools/size_report.py            # this tree
python tools/size_report.py --root DIR # another one, whose packages are installed in the running Python
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from pathlib import Path

# Modules of this project that a program has executed, and the files and calls of a layer's forward pass before the
# first matrix product of its attention.
MODULES = "import sys\n{code}\nprint(len([x for x in sys.modules if x.partition('.')[0].startswith('kernelformer')]))"
IMPORT = "import kernelformer; kernelformer.KernelAttention"
CONVERT = """
from pathlib import Path
from transformers import BertConfig, BertForMaskedLM
from kernelformer.conversion.convert import run
from kernelformer.conversion.settings import ConvertSettings
import kernelformer.cli.app
folder = Path({folder!r})
(folder / "a.txt").write_text("a line of text\\n" * 40)
(folder / "bert").mkdir()
(folder / "bert" / "vocab.txt").write_text("\\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] a line of text".split()))
from transformers import BertTokenizerFast
BertTokenizerFast(str(folder / "bert" / "vocab.txt")).save_pretrained(folder / "bert")
BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                           max_position_embeddings=64)).save_pretrained(folder / "bert")
run(str(folder / "bert"), folder / "out", ConvertSettings(attention="favor+:num_features=8"))
"""
FORWARD = """
import sys, torch, kernelformer as kf
files, calls, done = set(), 0, False
layer, x = kf.KernelAttention(512, 8, **{options!r}), torch.randn(1, 150, 512)
layer(x)
def watch(frame, event, _):
    global calls, done
    name = frame.f_code.co_filename
    if event == "call" and "kernelformer" in name:
        files.add(name)
        if not done:
            calls += 1
    return None
def first(function):
    def product(*arguments, **options):
        global done
        done = done or any("kernelformer" in f.f_code.co_filename and "attention" in f.f_code.co_filename
                           for f in [sys._getframe(1)])
        return function(*arguments, **options)
    return product
for name in ("matmul", "bmm", "baddbmm"):
    setattr(torch, name, first(getattr(torch, name)))
sys.setprofile(watch)
with torch.no_grad():
    layer(x)
sys.setprofile(None)
print(len(files), calls)
"""


def modules(root: Path) -> dict[str, Path]:
    """Modules of all distributions of a tree, by name."""
    found = {}
    for source in (root / "src", root / "lab" / "src"):
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def code_lines(path: Path) -> int:
    """Lines with code: neither blank, nor comment, nor docstring."""
    text = path.read_text("utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len([x for x in lines if text.split("\n")[x - 1].strip()])


def single_importers(found: dict[str, Path]) -> dict[str, str]:
    """Modules that exactly one other module imports, packages aside."""
    users = defaultdict(set)
    for name, path in found.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{x.name}" for x in node.names]
                targets = [x if x in found else node.module for x in full]
            elif isinstance(node, ast.Import):
                targets = [x.name for x in node.names]
            for target in targets:
                if target in found and target != name:
                    users[target].add(name)
    return {x: next(iter(y)) for x, y in users.items() if len(y) == 1 and found[x].name != "__init__.py"}


def execute(code: str) -> str:
    """Last output of a program in a process of its own, or a dash where it fails."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else "-"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--single", action="store_true", help="list the modules with one importer")
    given = parser.parse_args()
    found = modules(given.root)
    single = single_importers(found)
    print("| | library | laboratory |\n| --- | ---: | ---: |")
    sides = [{x: y for x, y in found.items() if (x.partition(".")[0] == "kernelformer_lab") == lab} for lab in (0, 1)]
    for name, count in (
        ("files", len),
        ("lines", lambda side: sum(len(x.read_text("utf-8").splitlines()) for x in side.values())),
        ("lines of code", lambda side: sum(map(code_lines, side.values()))),
        ("modules with one importer", lambda side: len(single.keys() & side.keys())),
    ):
        print(f"| {name} | {' | '.join(f'{count(side):,}' for side in sides)} |")
    if given.single:
        print("\n".join(f"{x} <- {y}" for x, y in sorted(single.items())))
    with tempfile.TemporaryDirectory() as folder:
        print(f"\nmodules executed by a layer: {execute(MODULES.format(code=IMPORT))}")
        print(f"modules executed by a conversion: {execute(MODULES.format(code=CONVERT.format(folder=folder)))}")
    for options in ({"method": "favor+"}, {"method": "favor+", "causal": True, "window": 64, "sinks": 4}):
        print(f"files and calls of a forward, {options}: {execute(FORWARD.format(options=options))}")


if __name__ == "__main__":
    main()
