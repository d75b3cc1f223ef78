"""Print constraints that hold every dependency of the core and of ``[train]`` at its lower bound."""

import re
from pathlib import Path

text = (Path(__file__).parents[1] / "pyproject.toml").read_text()  # by a pattern: Python 3.10 has no tomllib
arrays = re.findall(r"^(?:dependencies|train) = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
assert len(arrays) == 2, "pyproject.toml has no longer one array `dependencies` and one `train`"
for name, bound in re.findall(r'"([\w.-]+)>=([\d.]+)"', "".join(arrays)):
    print(f"{name}=={bound}")
