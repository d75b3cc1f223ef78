"""Print constraints that hold every dependency of the core, of ``[hf]`` and of the laboratory at its lower bound."""

import re
from pathlib import Path

root = Path(__file__).parents[1]
text = "".join((root / x).read_text() for x in ("pyproject.toml", "lab/pyproject.toml"))  # Python 3.10 has no tomllib
arrays = re.findall(r"^(?:dependencies|hf) = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
assert len(arrays) == 3, (
    "expected the arrays `dependencies` and `hf` of the library and `dependencies` of the laboratory"
)
for name, bound in re.findall(r'"([\w.-]+)>=([\d.]+)"', "".join(arrays)):
    print(f"{name}=={bound}")
