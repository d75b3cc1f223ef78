"""Settings of an export, which are also the options of ``kernelformer export``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from kernelformer.errors import choice
from kernelformer.settings import Settings, option

LOGITS = ("last", "all")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """How to export.

    Args:
        logits: of a causal model's prompt: those of its last token, which a generation needs, or of all of them.
        prompt_only: whether a causal model gets no graph for one token after a state.
        growing: whether that graph may have states that keep every key, as exact attention does.
        steps: tokens that are generated to compare the graph with torch.
    """

    logits: str = option("last", "of a prompt's last token, or of all of them: last or all")
    prompt_only: bool = option(False, "no decode.onnx for a causal model", switch=True)
    growing: bool = option(False, "allow states that keep every key, and grow with the text", switch=True)
    steps: int = option(100, "tokens that are generated to compare with torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("logits", self.logits, LOGITS)
