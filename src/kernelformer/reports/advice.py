"""An advice in words and tables, and as a record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kernelformer.analysis.attention_profile import AttentionProfile
from kernelformer.distill.figures import RATIO
from kernelformer.formatting import human_ratio, visible
from kernelformer.reports.advice_result import TEXTS, Advice, Kept, Trial, number_ranges
from kernelformer.reports.portable import portable

CANNOT_TELL = "cannot tell"
NAMED = 8  # heads at most
WORTHLESS = 1.0  # a predicted error above it says that the estimate is worthless
LAYER_COLUMNS = ("attention", "|q|", "|k|", "dim.", "near 32", "64", "128", "first 1", "4", "far")


def verdict(advice: Advice) -> list[str]:
    """Three lines: what it can be converted to, when that pays and what stays exact, what distillation may add."""
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
    """What is kept exact, in words."""
    if kept.layers:
        return f"attention{'s' * (len(kept.layers) > 1)} {number_ranges(kept.layers)}"
    count = sum(map(len, kept.heads.values()))
    return f"{count} head{'s' * (count > 1)} of largest error"


def paste_lines(advice: Advice) -> list[str]:
    """Commands to paste: without training where that is near enough, distilled where that is, or where nothing is."""
    good = advice.within(advice.trial(advice.chosen)) or advice.exact is not None
    lines = [advice.convert_line(advice.chosen)] if good else []
    if advice.distilled is not None and (not good or advice.within(advice.trial(advice.distilled))):
        lines.append(advice.convert_line(advice.distilled, distill=True))
    return lines


def layer_rows(advice: Advice) -> list[list[str]]:
    """A row for each attention: its profile, and the error of the chosen trial and of a window alone."""
    chosen = advice.trial(advice.chosen)
    local = next((x for x in advice.trials if x.candidate.name == "local" and x.candidate.window == 64), None)
    closed = next((x.errors.predicted for x in advice.trials if x.errors.predicted is not None), None)
    rows = []
    for i, ((name, call), profile) in enumerate(zip(advice.calls, advice.profiles, strict=True)):
        place = str(advice.attentions.index(name))
        label = f"{place}, call {call}" if call else place
        worst = max(range(len(chosen.errors.heads[i])), key=chosen.errors.heads[i].__getitem__)
        rows.append(
            [
                label,
                *_profile_cells(profile),
                "" if closed is None else closed_words(closed[i]),
                "" if local is None else f"{local.errors.layers[i]:.3f}",
                f"{chosen.errors.layers[i]:.3f}",
                f"{worst}: {chosen.errors.heads[i][worst]:.3f}",
            ]
        )
    return rows


def layer_head(advice: Advice) -> list[str]:
    """Names of the columns of `layer_rows`."""
    return [*LAYER_COLUMNS, "favor+ predicted", "window 64 alone", advice.chosen, "worst head"]


def closed_words(error: float) -> str:
    """A predicted error in words."""
    return "worthless" if error > WORTHLESS else f"{error:.3f}"


def _profile_cells(profile: AttentionProfile) -> list[str]:
    shares = [*profile.near.values(), *profile.first.values(), profile.far]
    numbers = [statistics.fmean(x) for x in (profile.query, profile.key, profile.dimension)]
    return [*(f"{x:.3g}" for x in numbers), *(f"{statistics.fmean(x):.0%}" for x in shares)]


def trial_rows(advice: Advice) -> list[list[str]]:
    """A row for each trial, the smallest error first."""
    return [
        [visible(x.label), f"{x.errors.mean:.3f}", _predicted(x), _ratio(x), _figure(advice, x), _way(x)]
        for x in sorted(advice.trials, key=lambda x: x.errors.mean)
    ]


def trial_head(advice: Advice) -> list[str]:
    """Names of the columns of `trial_rows`."""
    return ["attention", "error", "predicted", f"time at {advice.use_length}", advice.kind, ""]


def _predicted(trial: Trial) -> str:
    known = trial.errors.predicted
    return "" if known is None else closed_words(statistics.median(known))


def _ratio(trial: Trial) -> str:
    return "" if trial.timing is None else human_ratio(trial.timing.ratio)


def _figure(advice: Advice, trial: Trial) -> str:
    digits = 3 if advice.kind == RATIO else 4
    value = advice.expected_value(trial) if trial.figure is None else trial.figure.value
    return CANNOT_TELL if value is None else f"{value:.{digits}f}"


def _way(trial: Trial) -> str:
    return "measured" if trial.figure is not None else "predicted" if trial.expected is not None else ""


def check_rows(advice: Advice) -> list[list[str]]:
    """A row for each check: what was expected and what came."""
    return [[visible(x.label), f"{x.expected:.4f}", x.way, f"{x.got.value:.4f}"] for x in advice.checks]


def tables(advice: Advice) -> list[Table]:
    """Tables for the terminal: of the attentions, of the candidates, and of the checks."""
    shown = [
        _table(
            f"What the attentions look at, means over heads (0 is {visible(advice.attentions[0])})",
            layer_head(advice),
            layer_rows(advice),
        ),
        _table("Candidates (time: of exact attention's)", trial_head(advice), trial_rows(advice)),
    ]
    if advice.checks:
        head = ["attention", "expected", "by", "got on other texts"]
        shown.append(_table(f"Checked by conversions: {advice.kind}", head, check_rows(advice)))
    return shown


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def record(advice: Advice) -> dict[str, Any]:
    """Plain values that JSON can carry, without paths of this machine."""
    values = dict(vars(advice))
    values["profiles"] = [asdict(x) for x in advice.profiles]
    values["trials"] = [x.as_json() for x in advice.trials]
    for name in ("curve", "kept", "checks"):
        values[name] = [asdict(x) for x in getattr(advice, name)]
    values["exact"] = None if advice.exact is None else asdict(advice.exact)
    values.update(pays_from=advice.pays_from, verdict=verdict(advice))
    values["commands"] = [{"command": x} for x in paste_lines(advice)]
    plain: dict[str, Any] = portable(values)
    return plain
