"""The result of `studies.estimators` as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from kernelformer.analysis.kernel_estimates import Estimate
from kernelformer.studies.estimators_result import (
    KernelError,
    OutputError,
    Regularized,
    Result,
    Tail,
    Uniform,
    log_ratio,
)


def tables(result: Result) -> list[Table]:
    """One table for each part that was measured."""
    return [
        _outputs(result.output),
        _draws(result.output),
        _kernels(result.kernel),
        _regularized(result.regularized),
        _tails(result.tails),
        _uniform(result.uniform),
    ]


def _table(title: str, left: Sequence[str], right: Sequence[str], caption: str = "") -> Table:
    out = Table(title=title, caption=caption or None)
    for name in left:
        out.add_column(name, no_wrap=True)
    for name in right:
        out.add_column(name, justify="right", no_wrap=True)
    return out


def _with_error(x: Estimate) -> str:
    return f"{x.mean:.3g} ± {x.standard_error:.1g}"


def _outputs(rows: Sequence[OutputError]) -> Table:
    features = list(dict.fromkeys(x.num_features for x in rows))
    title = f"Fig. 4: mean squared error of the output, mean ± standard deviation of {len(rows[0].values)} samples"
    caption = "uniform: the mean of all values in place of attention; below 0: queries without a positive denominator"
    heads = [f"m = {m}" for m in features]
    out = _table(title, ("norm", "estimator", "draw"), (*heads, "uniform", "below 0"), caption)
    for key in dict.fromkeys((x.norm, x.estimator, x.draw) for x in rows):
        mine = [x for x in rows if (x.norm, x.estimator, x.draw) == key]
        cells = [f"{x.mean:.2g} ± {x.deviation:.1g}" for x in mine]
        below = f"{100 * mine[0].below_zero:.1f}% - {100 * mine[-1].below_zero:.1f}%"
        out.add_row(f"{key[0]:g}", key[1], key[2], *cells, f"{mine[0].uniform:.2g}", below)
    return out


def _draws(rows: Sequence[OutputError]) -> Table:
    """Ratios of errors on the same samples: what orthogonality and positivity change."""
    features = list(dict.fromkeys(x.num_features for x in rows))
    by_key = {(x.norm, x.estimator, x.draw, x.num_features): x for x in rows}
    title = "Fig. 4: ratio of errors, geometric mean over samples, and its logarithm in standard errors"
    out = _table(title, ("norm", "ratio"), [f"m = {m}" for m in features])
    positive, trigonometric, clamped = "positive", "trigonometric", "trigonometric, clamped"
    for norm in dict.fromkeys(x.norm for x in rows):
        pairs = {f"{x}: orthogonal / iid": ((x, "orthogonal"), (x, "iid")) for x in (positive, trigonometric, clamped)}
        for other in (trigonometric, clamped):
            pairs[f"orthogonal: positive / {other}"] = ((positive, "orthogonal"), (other, "orthogonal"))
        for label, (one, other_one) in pairs.items():
            logs = [log_ratio(*(by_key[(norm, *x, m)] for x in (one, other_one))) for m in features]
            cells = [f"{math.exp(x.mean):.2g} ({x.mean / max(x.standard_error, 1e-300):+.1f})" for x in logs]
            out.add_row(f"{norm:g}", label, *cells)
    return out


def _kernels(rows: Sequence[KernelError]) -> Table:
    title = "Fig. 2, Lemma 2, Theorem 2: mean squared error of SM(x, y), m = d"
    right = ("SM", "trig., closed", "simulated", "positive, closed", "simulated", "r", "orthogonal", "bound", "printed")
    caption = (
        "r: trigonometric over positive; bound: on orthogonal features, without the misprint of Theorem 2. Where r is "
        "small rare draws make the error of positive features, and simulations fall short of it"
    )
    out = _table(title, ("|x| = |y|", "angle / pi"), right, caption)
    for x in rows:
        trig, positive = x.closed["trigonometric"], x.closed["positive"]
        out.add_row(
            f"{x.length:g}",
            f"{x.angle / math.pi:.2f}",
            f"{x.kernel:.3g}",
            f"{trig:.3g}",
            _with_error(x.simulated["trigonometric"]),
            f"{positive:.3g}",
            _with_error(x.simulated["positive"]),
            f"{trig / positive:.3g}" if positive > 1e-12 * trig else "infinite",
            _with_error(x.simulated["orthogonal"]),
            f"{x.mended_bound:.3g}",
            f"{x.printed_bound:.3g}",
        )
    return out


def _regularized(rows: Sequence[Regularized]) -> Table:
    title = "Theorem 1: regularized over softmax kernel, w = |x + y|^2 / 2"
    out = _table(title, ("d", "w"), ("ratio", "simulated", "printed bound"))
    for x in rows:
        out.add_row(
            str(x.dim), f"{x.half_square:g}", f"{x.ratio:.4f}", _with_error(x.simulated), f"{x.printed_bound:.3f}"
        )
    return out


def _tails(rows: Sequence[Tail]) -> Table:
    title = f"Theorem 3: probability of an estimate of SMREG above its mean, m = d, |x + y| = {rows[0].length:g}"
    caption = "moments: E exp(theta sum X), orthogonal over iid; the proof takes it to be at most d / (d + 2)"
    right = ("iid", "bound", "orthogonal", "bound", "moments", "d / (d + 2)")
    out = _table(title, ("d", "deviations above"), right, caption)
    for x in rows:
        cells = (_with_error(x.iid), f"{x.iid_bound:.3g}", _with_error(x.orthogonal), f"{x.orthogonal_bound:.3g}")
        out.add_row(str(x.dim), f"{x.deviations:g}", *cells, _with_error(x.moments), f"{x.dim / (x.dim + 2):.3f}")
    return out


def _uniform(rows: Sequence[Uniform]) -> Table:
    tokens = list(dict.fromkeys(x.tokens for x in rows))
    title = "Theorem 4: largest error of an entry over h*^2, orthogonal frequencies, by number of tokens"
    right = (*(f"L = {n}" for n in tokens), "delta, constant 1")
    out = _table(title, ("estimator", "d", "m"), right)
    for key in dict.fromkeys((x.estimator, x.dim, x.num_features) for x in rows):
        mine = [x for x in rows if (x.estimator, x.dim, x.num_features) == key]
        cells = [_with_error(x.delta) for x in mine]
        out.add_row(key[0], str(key[1]), str(key[2]), *cells, f"{mine[0].predicted:.3g}")
    return out
