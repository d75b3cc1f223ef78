"""Settings of a conversion, which are also the options of ``kernelformer convert``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelformer.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(Settings):
    """How to convert.

    Args:
        attention: ``method:option=value:...``; ``softmax`` changes nothing, which is a check of all the rest. Empty:
            ``wildcat`` with a window for encoders that are not distilled, else ``loglinear`` (`hf.propose`).
        features: number of features, landmarks or the rank, whichever the method has; None: 128.
        layers: which attentions, ``0-3,5`` or patterns of names; empty: all.
        keep: so many attentions stay exact: those that the model's output needs most, see `choose_exact`.
        keep_heads: so many heads with the largest errors, of all other attentions, stay exact.
        distill: texts to learn from.
        steps: of attention transfer; None: 300 if there are texts and the method learns.
        tune: steps with all weights after that.
        text: texts to measure on; None: some of ``distill`` that are left out there, or random tokens.
        length: tokens of a text; None: 256, or what the model has.
        samples: texts to measure on; windows of ``length`` tokens of joined texts for causal models.
        batch: texts, or windows, of a step.
        task: see `load_source`.
        allow_pickle: see `load_source`.
        seed: of draws and of the order of texts.
    """

    attention: str = option("", "method, or method:option=value; default: wildcat for encoders, loglinear to distil")
    features: int | None = option(None, "features, landmarks or rank; default: 128", least=1)
    layers: str = option("", "0-3,5 or patterns of names; default: all")
    keep: int = option(0, "attentions that stay exact: those that the output needs most", least=0)
    keep_heads: int = option(0, "heads with the largest errors that stay exact", least=0)
    distill: Path | None = option(None, "texts to learn from: .jsonl with 'text', or one a line")
    steps: int | None = option(None, "of attention transfer; default: 300 with --distill", least=0)
    tune: int = option(0, "steps with all weights after that", least=0)
    text: Path | None = option(None, "texts to measure on; default: some of --distill")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    samples: int = option(8, "texts to measure on; causal: windows", least=1)
    batch: int = option(4, "texts, or windows, at once", least=1)
    task: str = option("auto", "auto, masked, causal, seq2seq or encoder")
    allow_pickle: bool = option(False, "read pickled weights of a trusted source", switch=True)
    seed: int = option(0, "of draws and of the order of texts", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill is None and (self.steps or self.tune):
            raise ValueError(
                f"steps={self.steps or 0} and tune={self.tune} need texts to learn from; give them by --distill."
            )
