"""The result of a conversion, as its report and its model card take it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelformer.data.texts import TextsUsed


@dataclass
class ConversionResult:
    """What a conversion did and measured: everything that its report, its model card and its record show.

    Args:
        setting: how to convert, a dataclass of plain values and paths: `pipelines.convert.Setting`.
        source: name of the folder, or on the hub.
        model: class of the original.
        length: tokens of a text.
        conversion: see `Conversion.as_json`.
        reports: what was measured: ``all converted`` where some were kept afterwards, ``converted``, ``distilled``.
        losses: by stage of the distillation, step by step.
        texts: what was used of which file, by what it was for.
        remarks: what a user should know.
        environment: versions and machine.
    """

    setting: Any
    source: str
    model: str
    length: int
    conversion: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, TextsUsed] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; of files the names alone."""
        setting = {name: x.name if isinstance(x, Path) else x for name, x in vars(self.setting).items()}
        reports = {name: x.as_json() for name, x in self.reports.items()}
        texts = {name: asdict(x) for name, x in self.texts.items()}
        plain: dict[str, Any] = _finite({**vars(self), "setting": setting, "reports": reports, "texts": texts})
        return plain


def _finite(value: Any) -> Any:
    """None for what is no number: JSON has no word for it."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
