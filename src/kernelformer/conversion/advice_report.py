"""Report of an advice: words, tables, a page and a record."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelformer.conversion.losses import RATIO, Figure, value_of_loss
from kernelformer.conversion.measure import AttentionProfile
from kernelformer.conversion.trials import Candidate, Errors, Expected, Timing, crossover
from kernelformer.files import finite
from kernelformer.formatting import human_ratio, visible
from kernelformer.page import COLOURS, Drawing, figure, legend_key, render, style, text_table


@dataclass
class Trial:
    """Measurements and estimates of one candidate.

    Args:
        figure: of the model with it, really run; None: not run.
        expected: where it was not run, by the others that were; None: not known.
    """

    candidate: Candidate
    errors: Errors
    timing: Timing | None = None
    figure: Figure | None = None
    expected: Expected | None = None
    steps: int = 0

    @property
    def fitted(self) -> bool:
        """True where its maps were fitted."""
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
    """Attentions or heads that stay exact, and the figure of the model with them."""

    layers: tuple[int, ...]
    heads: dict[int, tuple[int, ...]]
    figure: Figure
    label: str


@dataclass(frozen=True)
class Check:
    """A figure that was expected, and the one that a conversion on other texts then had.

    Args:
        way: ``measured`` on the texts of the advice, or ``predicted`` by the other ones.
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
    """Result of `advise` for a model.

    Args:
        fixed: numbers of those that stay as they are whatever is asked, such as sliding windows.
        chosen: label of the cheapest untrained trial within the tolerance, or of the nearest one.
        distilled: label of the nearest trial with fitted maps.
        recall: heads of a decoder that find again what stands far back, as (attention, head, score), see
            `recall_scores`; the largest score first.
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
        """True where a trial was run and is within the tolerance."""
        return trial.figure is not None and trial.figure.within(self.tolerance)

    def expected_value(self, trial: Trial) -> float | None:
        """Value of the figure that is expected of a trial that was not run."""
        return None if trial.expected is None else value_of_loss(self.kind, trial.expected.loss)

    def convert_line(self, label: str, *, distill: bool = False) -> str:
        """The command that converts as a trial does, to paste.

        Args:
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


CANNOT_TELL = "cannot tell"
NAMED = 8  # heads at most
WORTHLESS = 1.0  # a predicted error above it says that the estimate is worthless
LAYER_COLUMNS = ("attention", "|q|", "|k|", "dim.", "near 32", "64", "128", "first 1", "4", "far")


def verdict(advice: Advice) -> list[str]:
    """Three lines: the conversion without training, its speed and exact parts, and the gain of distillation."""
    return [_first_line(advice), _second_line(advice) + _recall_words(advice), _third_line(advice)]


def _recall_words(advice: Advice) -> str:
    if not advice.recall:
        return ""
    count = len(advice.recall)
    heads = ", ".join(f"{i}.{head}" for i, head, _ in advice.recall[:NAMED])
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return (
        f" What is far is found again by {count} head{'s' * (count > 1)} ({heads}{more}; attention.head): "
        f"--recall-heads {count} keeps {'them' if count > 1 else 'it'} exact, where details matter more than a cache "
        f"of constant size."
    )


def _first_line(advice: Advice) -> str:
    trial = advice.trial(advice.chosen)
    near = f"{trial.figure} at {advice.length} tokens, and {advice.tolerance:g} is asked for"
    if advice.within(trial):
        alone = "; it sees nothing beyond its window" if trial.candidate.name == "local" else ""
        fitted = [x.fitted for x in advice.trials if x.figure is not None]
        also = f" and {sum(fitted)} fitted" if any(fitted) else ""
        return (
            f"Without training: {trial.label} is the cheapest that is near enough, of {fitted.count(False)} run "
            f"untrained{also}: {near}{alone}."
        )
    if advice.exact is not None:
        return (
            f"Without training: {trial.label} is not near enough by itself ({near}), but with "
            f"{kept_words(advice.exact)} exact it is: {advice.exact.figure}."
        )
    more = "; more --minutes may find one" if advice.left_out else ""
    return f"Without training: nothing that was run is near enough; the nearest is {trial.label}: {near}{more}."


def _second_line(advice: Advice) -> str:
    trial = advice.trial(advice.chosen)
    ratio = (
        "" if trial.timing is None else f" ({human_ratio(trial.timing.ratio)} its time at {advice.use_length} tokens)"
    )
    line = f"It is {_when_faster(advice)}{ratio}; "
    gains = [x for x in advice.kept if x is not advice.exact]
    if advice.exact is not None:
        return f"{line}keep {kept_words(advice.exact)} exact."
    if advice.within(trial):
        better = [x for x in gains if trial.figure is not None and x.figure.loss < trial.figure.loss]
        best = min(better, key=lambda x: x.figure.loss, default=None)
        more = "" if best is None else f", though {kept_words(best)} exact would give {best.figure}"
        return f"{line}nothing has to be kept exact{more}."
    if not gains:
        return f"{line}whether keeping some exact suffices was not tried, for want of time."
    tried = ", ".join(f"{kept_words(x)} exact: {x.figure}" for x in gains)
    return f"{line}keeping the worst exact does not suffice ({tried})."


def _when_faster(advice: Advice) -> str:
    pays, lengths = advice.pays_from, [x.length for x in advice.curve]
    if not lengths:
        return f"faster than exact attention: {CANNOT_TELL}"
    if pays is None:
        return f"not faster than exact attention up to {lengths[-1]} tokens"
    return f"faster than exact attention from {f'about {pays:,.0f}' if pays else lengths[0]} tokens on"


def _third_line(advice: Advice) -> str:
    if advice.distilled is None:
        return f"After distillation: {CANNOT_TELL}, no map was fitted and run."
    trial = advice.trial(advice.distilled)
    enough = "near enough" if advice.within(trial) else "not yet near enough"
    return (
        f"After distillation: {trial.candidate} had {trial.figure} after {trial.steps} steps of a quick fit, "
        f"{enough}; a longer one should do better than that, on texts to learn from ({TEXTS}), others than those here."
    )


def kept_words(kept: Kept) -> str:
    """Name the attentions or heads that are kept exact."""
    if kept.layers:
        return f"attention{'s' * (len(kept.layers) > 1)} {number_ranges(kept.layers)}"
    count = sum(map(len, kept.heads.values()))
    return f"{count} head{'s' * (count > 1)} of largest error"


def paste_lines(advice: Advice) -> list[str]:
    """Commands to paste: without training where that is near enough; distilled where that is, or nothing is."""
    good = advice.within(advice.trial(advice.chosen)) or advice.exact is not None
    lines = [advice.convert_line(advice.chosen)] if good else []
    if advice.distilled is not None and (not good or advice.within(advice.trial(advice.distilled))):
        lines.append(advice.convert_line(advice.distilled, distill=True))
    return lines


def layer_table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the profile of each attention, and the errors of the chosen trial and of a window alone."""
    chosen = advice.trial(advice.chosen)
    local = next((x for x in advice.trials if x.candidate.name == "local" and x.candidate.window == 64), None)
    closed = next((x.errors.predicted for x in advice.trials if x.errors.predicted is not None), None)
    rows = []
    for i, ((name, call), profile) in enumerate(zip(advice.calls, advice.profiles, strict=True)):
        place, heads = str(advice.attentions.index(name)), chosen.errors.heads[i]
        numbers = [statistics.fmean(x) for x in (profile.query, profile.key, profile.dimension)]
        shares = [statistics.fmean(x) for x in (*profile.near.values(), *profile.first.values(), profile.far)]
        worst = max(range(len(heads)), key=heads.__getitem__)
        rows.append(
            [
                f"{place}, call {call}" if call else place,
                *(f"{x:.3g}" for x in numbers),
                *(f"{x:.0%}" for x in shares),
                "" if closed is None else closed_words(closed[i]),
                "" if local is None else f"{local.errors.layers[i]:.3f}",
                f"{chosen.errors.layers[i]:.3f}",
                f"{worst}: {heads[worst]:.3f}",
            ]
        )
    return [*LAYER_COLUMNS, "favor+ predicted", "window 64 alone", advice.chosen, "worst head"], rows


def closed_words(error: float) -> str:
    """A predicted error in words."""
    return "worthless" if error > WORTHLESS else f"{error:.3f}"


def trial_table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the trials, the smallest error first."""
    digits, rows = 3 if advice.kind == RATIO else 4, []
    for x in sorted(advice.trials, key=lambda x: x.errors.mean):
        value = advice.expected_value(x) if x.figure is None else x.figure.value
        rows.append(
            [
                visible(x.label),
                f"{x.errors.mean:.3f}",
                "" if x.errors.predicted is None else closed_words(statistics.median(x.errors.predicted)),
                "" if x.timing is None else human_ratio(x.timing.ratio),
                CANNOT_TELL if value is None else f"{value:.{digits}f}",
                "measured" if x.figure is not None else "predicted" if x.expected is not None else "",
            ]
        )
    return ["attention", "error", "predicted", f"time at {advice.use_length}", advice.kind, ""], rows


def check_table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the checks: the expected figures and the measured ones."""
    rows = [[visible(x.label), f"{x.expected:.4f}", x.way, f"{x.got.value:.4f}"] for x in advice.checks]
    return ["attention", "expected", "by", "got on other texts"], rows


def tables(advice: Advice) -> list[Table]:
    """Tables for the terminal: of the attentions, of the candidates, and of the checks."""
    looks = f"What the attentions look at, means over heads (0 is {visible(advice.attentions[0])})"
    shown = [
        text_table(looks, *layer_table(advice)),
        text_table("Candidates (time: of exact attention's)", *trial_table(advice)),
        text_table(f"Checked by conversions: {advice.kind}", *check_table(advice)),
    ]
    return shown if advice.checks else shown[:2]


def record(advice: Advice) -> dict[str, Any]:
    """Plain values that JSON can carry; of files the names alone."""
    command = {option: _name(x) for option, x in advice.command.items()}
    advice = replace(advice, source=_name(advice.source), command=command)
    values = {**asdict(replace(advice, trials=[])), "trials": [x.as_json() for x in advice.trials]}
    values.update(pays_from=advice.pays_from, verdict=verdict(advice))
    values["commands"] = [{"command": x} for x in paste_lines(advice)]
    plain: dict[str, Any] = json.loads(json.dumps(finite(values)))
    return plain


def _name(text: str) -> str:
    return Path(text).name if Path(text).exists() else text


def page(advice: Advice) -> str:
    """The page of an advice, without scripts and network."""
    about = (
        f"{advice.model}, {len(advice.attentions)} attentions, {'causal' if advice.causal else 'bidirectional'}; "
        f"{advice.rows} texts of up to {advice.length} tokens; {advice.minutes:.1f} minutes"
    )
    return render(
        Path(__file__).with_name("advice.html"),
        "What this model can be converted to",
        about,
        verdict=verdict(advice),
        commands=paste_lines(advice),
        pictures=_pictures(advice),
        layers=layer_table(advice),
        trials=trial_table(advice),
        checks=check_table(advice),
        notes=[
            *advice.remarks,
            *(f"left out for time: {x}" for x in advice.left_out),
            *(f"cannot be: {label} ({reason})" for label, reason in advice.refused.items()),
        ],
    )


Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # by label, x and y


def _pictures(advice: Advice) -> list[Drawing]:
    best: dict[str, Trial] = {}  # of each method
    for trial in sorted(advice.trials, key=lambda x: x.errors.mean):
        best.setdefault(trial.candidate.method, trial)
    shares = {
        "near (64 tokens)": [statistics.fmean(x.near[64]) for x in advice.profiles],
        "first 4": [statistics.fmean(x.first[4]) for x in advice.profiles],
        "far": [statistics.fmean(x.far) for x in advice.profiles],
    }
    numbers, calls = range(len(advice.calls)), {"xlabel": "attention, in the order of the calls"}
    errors: Lines = {x.label: (numbers, x.errors.layers) for x in best.values()}
    mass: Lines = {label: (numbers, values) for label, values in shares.items()}
    drawn = [
        _lines("errors", "Error of each attention", errors, **calls, ylabel="relative error", yscale="log"),
        _lines("mass", "Where the weight of a query is", mass, **calls, ylabel="share", ylim=(0, 1.02)),
    ]
    title = f"{advice.kind} against the mean error"
    told = [f"{x.label} {x.figure.value:.4g} at {x.errors.mean:.3g}" for x in advice.trials if x.figure is not None]
    drawn.append(figure("runs", title, ", ".join(told), lambda axis: _draw_runs(axis, advice)))
    if advice.curve:
        scales = {"xlabel": "tokens", "ylabel": "seconds", "xscale": "log", "yscale": "log"}
        lengths = [x.length for x in advice.curve]
        times: Lines = {advice.chosen: (lengths, [x.seconds for x in advice.curve])}
        times["exact"] = lengths, [x.exact for x in advice.curve]
        drawn.append(_lines("times", "Time by length", times, **scales))
    return drawn


def _lines(name: str, title: str, lines: Lines, **axes: Any) -> Drawing:
    """A figure of lines with its legend below it, and their ends in words."""

    def draw(axis: Any) -> None:
        for index, (x, y) in enumerate(lines.values()):
            axis.plot(x, y, **style(index))
        axis.set(**axes)

    keys = [(legend_key(f"{name}{i}", i), label) for i, label in enumerate(lines)]
    told = ", ".join(f"{label} from {y[0]:.3g} to {y[-1]:.3g}" for label, (_, y) in lines.items() if y)
    return figure(name, title, told, draw, legend=keys)


def _draw_runs(axis: Any, advice: Advice) -> None:
    """Figures that were measured, and those that are expected."""
    run = [(x.errors.mean, x.figure.value) for x in advice.trials if x.figure is not None]
    values = [(x.errors.mean, advice.expected_value(x)) for x in advice.trials if x.expected is not None]
    for points, label, marker in ((run, "measured", "o"), (values, "predicted", "x")):
        if points:
            axis.plot(*zip(*points, strict=True), marker, label=label, color=COLOURS[marker == "x"])
    axis.axhline(advice.tolerance, linestyle=":", color="grey", label="asked for")
    axis.set(xlabel="mean relative error of the attentions", ylabel=advice.kind, xscale="log")
    if advice.kind == RATIO:
        axis.set_yscale("log")
    axis.legend(fontsize=10, frameon=False)
