"""The result of `advise`, as its tables and its page take it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kernelformer.analysis.attention_profile import AttentionProfile
from kernelformer.analysis.crossover import Timing, crossover
from kernelformer.distill.candidates import Candidate
from kernelformer.distill.expected import Expected
from kernelformer.distill.figures import Figure, value_of_loss
from kernelformer.distill.trials import Errors


@dataclass
class Trial:
    """A candidate and what is known of it.

    Args:
        candidate: what was tried.
        errors: of its attention.
        timing: at the length of use; None: not timed.
        figure: of the model with it, really run; None: not run.
        expected: where it was not run, by the others that were; None: nobody can tell.
        steps: of a quick fit, where the candidate is fitted.
    """

    candidate: Candidate
    errors: Errors
    timing: Timing | None = None
    figure: Figure | None = None
    expected: Expected | None = None
    steps: int = 0

    @property
    def fitted(self) -> bool:
        """Whether its maps were fitted."""
        return self.candidate.fitted

    @property
    def label(self) -> str:
        """The candidate, and whether it was fitted."""
        return f"{self.candidate}, fitted" if self.fitted else str(self.candidate)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "attention": self.candidate.spec,
            "features": self.candidate.size,
            "fitted": self.steps,
            "error": self.errors.mean,
            "layers": self.errors.layers,
            "heads": None if self.figure is None else self.errors.heads,  # of all trials they would be most of a record
            "predicted_error": self.errors.predicted,
            "timing": None if self.timing is None else asdict(self.timing),
            "figure": None if self.figure is None else asdict(self.figure),
            "expected_loss": None if self.expected is None else asdict(self.expected),
        }


@dataclass(frozen=True)
class Kept:
    """Attentions or heads that stay exact, and the figure of the model with them.

    Args:
        layers: numbers of attentions.
        heads: numbers of heads by the number of their attention.
        figure: of the model.
        label: of the trial that it goes with.
    """

    layers: tuple[int, ...]
    heads: dict[int, tuple[int, ...]]
    figure: Figure
    label: str


@dataclass(frozen=True)
class Check:
    """A figure that was expected, and the one that a conversion on other texts then had.

    Args:
        label: of the trial.
        attention: as ``convert`` takes it.
        features: its number.
        expected: value of the figure.
        way: ``measured`` on the texts of the advice, or ``predicted`` by the other ones.
        got: figure on other texts.
    """

    label: str
    attention: str
    features: int | None
    expected: float
    way: str
    got: Figure


TEXTS = "TEXTS"  # to learn from, in the line that distills
MINUTES, RANK = "30", "8"  # of the distillation that is advised; all weights of a decoder take long to tune


@dataclass
class Advice:
    """What `advise` says of a model.

    Args:
        model: class of the model.
        attentions: names of its attentions, in the order of the modules.
        fixed: numbers of those that stay as they are whatever is asked, such as sliding windows.
        causal: whether they are.
        kind: of the figures, see `Figure`.
        tolerance: a figure that is near enough.
        length: tokens of the longest text.
        use_length: tokens at which times are compared.
        rows: texts that candidates were measured on.
        calls: name and number of each call of an attention in a pass.
        profiles: of each call.
        trials: in the order in which they were tried.
        refused: candidates that cannot be, and why.
        chosen: label of the cheapest untrained trial within the tolerance, or of the nearest one.
        distilled: label of the nearest trial with fitted maps.
        curve: times of the chosen one by length.
        kept: what was tried to keep exact.
        exact: which of it is advised; None: nothing.
        recall: heads of a decoder that find again what stands far back, as (attention, head, score), see
            `recall_scores`; the largest score first.
        left_out: what there was no time for.
        remarks: what a user should know.
        checks: of `check`.
        minutes: that it took.
        environment: versions and machine.
        source: what was given to the command, for the line to paste.
        command: its other options, for the line to paste.
    """

    model: str
    attentions: list[str]
    causal: bool
    kind: str
    tolerance: float
    length: int
    use_length: int
    rows: int
    calls: list[tuple[str, int]]
    profiles: list[AttentionProfile]
    trials: list[Trial] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    chosen: str = ""
    distilled: str | None = None
    curve: list[Timing] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    exact: Kept | None = None
    recall: list[tuple[int, int, float]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    minutes: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    source: str = "SRC"
    command: dict[str, str] = field(default_factory=dict)
    fixed: list[int] = field(default_factory=list)

    @property
    def convertible(self) -> list[int]:
        """Numbers of the attentions that can be converted."""
        return [i for i in range(len(self.attentions)) if i not in self.fixed]

    def trial(self, label: str) -> Trial:
        """The trial of a label."""
        return next(x for x in self.trials if x.label == label)

    @property
    def pays_from(self) -> float | None:
        """Tokens from which the chosen one is faster than exact attention; None: not seen, 0: at all lengths timed."""
        return crossover(self.curve)

    def within(self, trial: Trial) -> bool:
        """Whether a trial was run and is near enough."""
        return trial.figure is not None and trial.figure.within(self.tolerance)

    def expected_value(self, trial: Trial) -> float | None:
        """Value of the figure that is expected of a trial that was not run."""
        return None if trial.expected is None else value_of_loss(self.kind, trial.expected.loss)

    def convert_line(self, label: str, *, distill: bool = False) -> str:
        """The command that converts as a trial does, to paste.

        Args:
            label: of the trial.
            distill: learn too, from texts that are to be given: those of the advice are to measure on.
        """
        candidate = self.trial(label).candidate
        options = {"--attention": candidate.spec}
        if candidate.size is not None:
            options["--features"] = str(candidate.size)
        exact = self.exact if self.exact is not None and self.exact.label == label else None
        if exact is not None and exact.layers:
            options["--layers"] = number_ranges([i for i in self.convertible if i not in exact.layers])
        if exact is not None and exact.heads:
            options["--keep-heads"] = str(sum(map(len, exact.heads.values())))
        if distill:
            options |= {"--distill": TEXTS, "--minutes": MINUTES} | ({"--lora": RANK} if self.causal else {})
        words = [x for name, y in {**options, **self.command}.items() for x in ((name, y) if y else (name,))]
        return shlex.join(["kernelformer", "convert", self.source, "DST", *words])


def number_ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ``0-3,5``."""
    parts: list[list[int]] = []
    for x in numbers:
        if parts and parts[-1][1] == x - 1:
            parts[-1][1] = x
        else:
            parts.append([x, x])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
