"""Settings of an advice, which are also the options of ``kernelformer advise``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelformer.settings import KIND, PICKLE, SEED, TEXTS, Settings, option


@dataclass(frozen=True, kw_only=True)
class AdviseSettings(Settings):
    """How to look at a model before it is converted.

    Args:
        text: texts of the kind that the model is for.
        length: tokens of a text; None: 256, or what the model has.
        use_length: tokens of a text in use, at which times are compared.
        tolerance: a figure that is near enough; None: a perplexity ratio of 1.25, or a cosine of 0.98.
        budget: minutes in all, with reading the model; what there was no time for is named.
        samples: texts to measure on, and as many others to fit and calibrate on; fewer where a pass takes long.
        steps: of the quick fit of `loglinear`.
        check: convert really afterwards and measure on other texts; takes longer than the budget.
        task: see `load_source`.
        allow_pickle: see `load_source`.
        seed: of the choice of texts.
    """

    text: Path | None = option(None, f"texts to measure on, of the kind that the model is for: {TEXTS}")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    use_length: int = option(4096, "tokens of a text in use, at which times are compared", least=2)
    tolerance: float | None = option(None, "near enough; default: perplexity ratio 1.25, or cosine 0.98", least=0)
    budget: float = option(10.0, "minutes in all", least=0, name="minutes", former="budget")
    samples: int = option(8, "texts to measure on, and as many others to fit on", least=1)
    steps: int = option(60, "of the quick fit of loglinear", least=1)
    check: bool = option(False, "convert afterwards and measure on other texts", switch=True)
    task: str = option("auto", KIND)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, f"{SEED} of the choice of texts", least=0)
