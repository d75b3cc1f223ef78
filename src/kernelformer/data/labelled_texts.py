"""Texts with labels, for probes."""

from __future__ import annotations

from pathlib import Path

import torch

from kernelformer.files import check_regular, parse_json


def read_labelled(path: Path, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Read some texts of a ``.jsonl`` with their labels, in the order of a seed.

    Args:
        path: each line that is not blank has ``text`` and an integer ``label`` of at least 0.
        count: how many; fewer where there are fewer.
        seed: of the order.

    Raises:
        ValueError: another kind of file, or a line without a text and a label.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"a probe needs 'text' and 'label' in each line of a .jsonl, got {path}.")
    rows = []
    with check_regular(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_row(line, f"{path}, line {number}"))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return [rows[i][0] for i in order], [rows[i][1] for i in order]


def _row(line: bytes, place: str) -> tuple[str, int]:
    try:
        row = parse_json(line)
    except ValueError as problem:
        raise ValueError(f"{place}: not JSON: {problem}.") from None
    text, label = (row.get("text"), row.get("label")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63:
        raise ValueError(f"{place}: a probe needs 'text' and an integer 'label' from 0 to 2^63 - 1.")
    return text, label
