"""The result of a conversion, as its report and its model card take it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelformer.data.texts import TextsUsed
from kernelformer.files import finite


@dataclass
class ConversionResult:
    """What a conversion did and measured: everything that its report, its model card and its record show.

    Args:
        setting: how to convert, a dataclass of plain values and paths: `pipelines.convert_settings.ConvertSettings`.
        source: name of the folder, or on the hub.
        model: class of the original.
        length: tokens of a text.
        conversion: see `Conversion.as_json`.
        exact_heads: heads that stay exact, by the reason and the name of their attention.
        reports: what was measured: ``all converted`` where some were kept afterwards, ``converted``, ``distilled``.
        losses: by stage of the distillation, step by step.
        curves: by stage, looks at held-out texts: step, seconds, tokens, loss.
        spent: by stage, seconds, tokens and the rate at its peak; before the last stage a figure of the model, see
            `Figure`.
        texts: what was used of which file, by what it was for.
        remarks: what a user should know.
        environment: versions and machine.
        licence: of the source, as it states it; empty: it does not.
        judged: what was measured beside the original: `reports.judgement.Judgement`; None: nothing.
        tokens: that were learned from, counted each time; None: not counted.
        seconds: that the distillation took; None: not known.
    """

    setting: Any
    source: str
    model: str
    length: int
    conversion: list[dict[str, Any]] = field(default_factory=list)
    exact_heads: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    texts: dict[str, TextsUsed] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    licence: str = ""
    judged: Any = None
    tokens: int | None = None
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; of files the names alone."""
        setting = {name: x.name if isinstance(x, Path) else x for name, x in vars(self.setting).items()}
        reports = {name: x.as_json() for name, x in self.reports.items()}
        texts = {name: asdict(x) for name, x in self.texts.items()}
        judged = None if self.judged is None else self.judged.as_json()
        own = {"setting": setting, "reports": reports, "texts": texts, "judged": judged}
        plain: dict[str, Any] = finite({**vars(self), **own})
        return plain
