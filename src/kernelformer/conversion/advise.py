"""Advice on a conversion: search candidates by error, time and the output of the model, within a time budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernelformer.conversion.advice_report import Advice, Check, Kept, Trial, page, record
from kernelformer.conversion.convert import propose
from kernelformer.conversion.keep import scores_on, whole_rows
from kernelformer.conversion.losses import RATIO, TOLERANCE, Figure
from kernelformer.conversion.measure import attention_profile
from kernelformer.conversion.settings import AdviseSettings
from kernelformer.conversion.texts import check_length, check_readable, read_texts, rows_for, some_texts
from kernelformer.conversion.trials import (
    LEARNED,
    Candidate,
    LossFit,
    Shape,
    Trials,
    coarse_grid,
    neighbours,
    time_attentions,
    time_curve,
    timed_core,
    windows_for,
)
from kernelformer.environment import environment
from kernelformer.errors import number
from kernelformer.files import write_json, write_text
from kernelformer.hf.find import Attention, AttentionCall, find_attentions
from kernelformer.hf.load import Source, load_source
from kernelformer.hf.pretrained import first_names

Log = Callable[[str], None]
T = TypeVar("T", int, tuple[int, int])
Item = TypeVar("Item", Candidate, str)
# Shares of the time of the search by which each part has to end; what is left over goes to the parts after it.
ERRORS, FITS, TIMES, RUNS, KEPT = 0.25, 0.42, 0.55, 0.85, 0.93
BEST = 3  # methods whose neighbours are tried
RUN = 12  # models at most
FITTED = 64  # features of maps that are fitted
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FAR_ABOVE = 2.0  # times the median error: such an attention, or head, may be worth keeping exact


@dataclass
class Clock:
    """Time of an advice.

    Args:
        longest: seconds that one step of a kind has taken so far.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)
    longest: dict[str, float] = field(default_factory=dict)
    before: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start

    def left(self, share: float) -> float:
        """Seconds until a share of the time is over."""
        return self.before + share * (self.seconds - self.before) - self.spent

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Measure one step of a kind."""
        before = self.spent
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), self.spent - before)

    def steps(self, kind: str, share: float, items: Sequence[Item], left_out: list[str]) -> Iterator[Item]:
        """Yield items while another one fits in; name the others."""
        for place, item in enumerate(items):
            if self.left(share) < self.longest.get(kind, 0.0):
                missed = f"{kind} of {first_names(list(map(str, items[place:])))}"
                left_out += [] if missed in left_out else [missed]
                return
            with self.step(kind):
                yield item


@dataclass
class Search:
    """Search for the cheapest attention that leaves a model as it is."""

    trials: Trials
    advice: Advice
    clock: Clock
    shape: Shape
    steps: int
    log: Log
    grid: list[Candidate] = field(default_factory=list)  # that is to be measured

    def start(self) -> None:
        """Measure and run the candidate that is the most promising by the kind of model, see `propose`."""
        advice = self.advice
        first = propose(self.trials.model, distilled=advice.causal)
        self.grid = coarse_grid(causal=advice.causal, length=advice.length, first=first)
        if self.clock.left(1.0) <= 0:
            raise ValueError(
                f"a budget of {self.clock.seconds / 60:g} minutes was over before one candidate was measured, after "
                f"{self.clock.spent:.0f} seconds; give more --minutes, a smaller --length or fewer --samples."
            )
        while self.grid and not advice.trials:
            candidate = self.grid.pop(0)
            with self.clock.step("fits" if candidate.learned else "errors"):  # maps are started as for a fit
                self._measure(candidate)
        if not advice.trials:
            name, reason = next(iter(advice.refused.items()))
            raise ValueError(f"the model can have none of the candidates; {name}: {reason}")
        self._run(advice.trials[0])
        self.clock.before = self.clock.spent

    def measure_errors(self) -> None:
        """Measure a coarse grid, and the neighbours of the best."""
        length = self.advice.length
        for candidate in self.clock.steps("errors", ERRORS, self.grid, self.advice.left_out):
            self._measure(candidate)
        for _ in range(2):
            known = [x.candidate for x in self.advice.trials]
            new = neighbours(self._best_of_methods(), known, length=length)
            for candidate in self.clock.steps("errors", ERRORS, new, self.advice.left_out):
                self._measure(candidate)

    def _best_of_methods(self) -> list[Candidate]:
        """The candidate of smallest error of each of the best methods that have a size."""
        ranked = sorted((x for x in self.advice.trials if x.candidate.size), key=lambda x: x.errors.mean)
        best: dict[str, Candidate] = {}
        for x in ranked:
            best.setdefault(x.candidate.method, x.candidate)
        return list(best.values())[:BEST]

    def _measure(self, candidate: Candidate, steps: int = 0) -> None:
        self.log(f"error of {candidate}")
        try:
            errors = self.trials.errors(candidate)
        except ValueError as reason:
            self.advice.refused[str(candidate)] = str(reason)
            return
        self.advice.trials.append(Trial(candidate, errors, steps=steps))

    def fit(self) -> None:
        """Fit maps with each window, and without, on other texts than those that are measured."""
        windows = windows_for(self.advice.length)
        order = sorted(windows, key=lambda w: abs(w - 64))
        sinks = 4 if self.advice.causal else 1
        items = [Candidate(LEARNED, FITTED, w, sinks if w else 0, fitted=True) for w in (*order, 0)]
        for candidate in self.clock.steps("fits", FITS, items, self.advice.left_out):
            self.log(f"fitting {candidate}")
            try:
                done = self.trials.fit(candidate, steps=self.steps, seconds=max(1.0, self.clock.left(FITS)))
            except ValueError as reason:
                self.advice.refused[str(candidate)] = str(reason)
                continue
            self._measure(candidate, done)

    def time(self) -> None:
        """Time all candidates at the length of use, a method at a time, each beside exact attention."""
        groups: dict[str, list[Trial]] = {}
        for x in sorted(self.advice.trials, key=lambda x: (x.candidate.size is not None, x.errors.mean)):
            if x.timing is None:
                groups.setdefault(x.candidate.method, []).append(x)
        for method in self.clock.steps("times", TIMES, list(groups), self.advice.left_out):
            self.log(f"timing {method}")
            self._time(groups[method])

    def _time(self, trials: Sequence[Trial]) -> None:
        mine, shape = {x.label: x for x in trials}, self.shape.smaller()
        cores = {label: timed_core(x.candidate.name, x.candidate.options, shape) for label, x in mine.items()}
        for label, timing in time_attentions(cores, shape, self.advice.use_length).items():
            mine[label].timing = timing

    def run(self) -> None:
        """Run the model with those that may be the cheapest within the tolerance, and with others to learn from."""
        for _ in range(RUN - 1):
            trial = self._next()
            if trial is None:
                break
            if self.clock.left(RUNS) < self.clock.longest["runs"]:
                names = [x.label for x in self.advice.trials if x.figure is None]
                self.advice.left_out.append(f"runs of the model with {first_names(names)}")
                break
            self._run(trial)

    def _run(self, trial: Trial) -> None:
        """Run the model with a trial, timed first if it was not."""
        self.log(f"running the model with {trial.label}")
        with self.clock.step("runs"):
            if trial.timing is None:
                self._time([trial])
            trial.figure = self.trials.figure(trial.candidate)
        self._expect()

    def _next(self) -> Trial | None:
        """Choose the trial to run next; None if no other is of interest.

        First the best of each group, of fitted maps before the others; then the cheapest that may be within the
        tolerance, while it is cheaper than what was run and is; then the best of each method.
        """
        left = sorted((x for x in self.advice.trials if x.figure is None), key=_error)
        done = [x for x in self.advice.trials if x.figure is not None]
        groups, methods = ({getattr(x.candidate, name) for x in done} for name in ("group", "method"))
        missing = [x for x in left if x.candidate.group not in groups]
        if missing:
            return next((x for x in missing if x.fitted), missing[0])
        limit = min((_cost(x) for x in done if self.advice.within(x) and not x.fitted), default=math.inf)
        hopeful = [x for x in left if not x.fitted and _cost(x) < limit and self._may_be_within(x)]
        if hopeful:
            return min(hopeful, key=_cost)
        return next((x for x in left if x.candidate.method not in methods), None)

    def _may_be_within(self, trial: Trial) -> bool:
        """Return True if the expected figure is within the tolerance, or not far from it.

        Without an expected figure: if its error is below all of its group that were run and are not.
        """
        if trial.expected is not None:
            likely = math.sqrt(trial.expected.low * trial.expected.loss)  # one standard deviation below
            return likely <= Figure(self.advice.kind, self.advice.tolerance).loss
        same = [x for x in self.advice.trials if x.figure is not None and x.candidate.group == trial.candidate.group]
        return _error(trial) < min((_error(x) for x in same if not self.advice.within(x)), default=math.inf)

    def _expect(self) -> None:
        """Predict figures of trials that were not run from those that were."""
        run = [x for x in self.advice.trials if x.figure is not None]
        fit = LossFit.of([(x.candidate.group, _error(x), _loss(x)) for x in run])
        for x in self.advice.trials:
            known = fit is not None and x.figure is None
            x.expected = fit.expected(x.candidate.group, _error(x)) if fit is not None and known else None

    def choose(self) -> None:
        """Choose the cheapest untrained trial within the tolerance, else the nearest; and the nearest fitted one."""
        run = [x for x in self.advice.trials if x.figure is not None]
        untrained = [x for x in run if not x.fitted] or run
        good = [x for x in untrained if self.advice.within(x)]
        self.advice.chosen = (min(good, key=_cost) if good else min(untrained, key=_loss)).label
        fitted = [x for x in run if x.fitted]
        if fitted:
            self.advice.distilled = min(fitted, key=_loss).label

    def curve(self) -> None:
        """Time the chosen one at rising lengths."""
        candidate = self.advice.trial(self.advice.chosen).candidate
        core = timed_core(candidate.name, candidate.options, self.shape)
        self.log(f"timing {self.advice.chosen} from {LENGTHS[0]} to {LENGTHS[-1]} tokens")
        rows, missed = time_curve(core, self.shape, LENGTHS, self.clock.left(1.0))
        self.advice.curve = rows
        if missed:
            self.advice.left_out.append(f"times at {', '.join(map(str, missed))} tokens")

    def keep(self) -> None:
        """Run the model with those attentions, or heads, exact whose errors are the largest.

        Where the chosen trial is near enough: those far above the others, to say what they would gain. Where it is not:
        a quarter and a half of the attentions, a quarter of the heads; the first that is near enough is advised.
        """
        advice, trial = self.advice, self.advice.trial(self.advice.chosen)
        for layers, heads in self._choices(trial):
            if self.clock.left(KEPT) < self.clock.longest["runs"]:
                advice.left_out.append("runs with some attentions or heads kept exact")
                break
            self.log(f"running the model with {sum(map(len, heads.values())) or len(layers)} kept exact")
            rest = [i for i in advice.convertible if i not in layers]
            figure = self.trials.figure(trial.candidate, layers=rest, exact_heads=heads or None)
            advice.kept.append(Kept(layers, heads, figure, trial.label))
            if not advice.within(trial) and advice.exact is None and figure.within(advice.tolerance):
                advice.exact = advice.kept[-1]

    def _choices(self, trial: Trial) -> list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]:
        """Numbers of attentions, or of heads by their attention, that may be kept exact."""
        numbers = {name: i for i, name in enumerate(self.advice.attentions)}
        layers: dict[int, float] = {}
        heads: dict[tuple[int, int], float] = {}
        for (name, _), whole, each in zip(trial.errors.calls, trial.errors.layers, trial.errors.heads, strict=True):
            i = numbers[name]
            layers[i] = max(whole, layers.get(i, 0.0))
            heads |= {(i, h): max(x, heads.get((i, h), 0.0)) for h, x in enumerate(each)}
        near_enough = self.advice.within(trial)
        some_layers = [_far_above(layers)] if near_enough else [_worst(layers, 4), _worst(layers, 2)]
        some_heads = _far_above(heads) if near_enough else _worst(heads, 4)
        by_layer: dict[int, tuple[int, ...]] = {}
        for i, h in sorted(some_heads):
            by_layer[i] = (*by_layer.get(i, ()), h)
        different = dict.fromkeys(tuple(sorted(x)) for x in some_layers if x)
        return [*((x, {}) for x in different), *([((), by_layer)] if by_layer else [])]


def _worst(errors: Mapping[T, float], part: int) -> list[T]:
    """The items of largest error, one of ``part``; none of a single one."""
    return sorted(errors, key=lambda x: errors[x], reverse=True)[: len(errors) // part]


def _far_above(errors: Mapping[T, float]) -> list[T]:
    """Items whose error is far above the median, at most a quarter of them."""
    middle = statistics.median(errors.values())
    return [x for x in _worst(errors, 4) if errors[x] > FAR_ABOVE * middle]


def _error(trial: Trial) -> float:
    return trial.errors.mean


def _loss(trial: Trial) -> float:
    assert trial.figure is not None
    return trial.figure.loss


def _cost(trial: Trial) -> float:
    """Time relative to exact attention; infinite if not timed."""
    return math.inf if trial.timing is None else trial.timing.ratio


Batch = Mapping[str, Tensor]
RUN_SHARE = 0.02  # of the time left that one run of the original over the measured texts may take
FIT_SHARE = 0.05  # of the time left that recording the attention on the other texts may take
SIFTED = 1000  # texts among which those that fill the length are looked for
LOOKED = 2  # of the measured batches have their attentions looked at one by one
FAR = 0.5  # of the longest text, below which one is left out
CHECKED = 6  # trials of each way
RECALL_GAP = 64  # tokens between a passage and its copy, at least
RECALLS = 0.25  # of a head's weight, from which on it does
MOST_OTHERS = 8  # batches to fit on: their queries, keys and values stay in memory


def advise(
    model: Any,
    batches: Sequence[Batch],
    *,
    tolerance: float | None = None,
    use_length: int = 4096,
    minutes: float = 10.0,
    steps: int = 60,
    log: Log = lambda _: None,
    since: float | None = None,
) -> Advice:
    """Look at a pretrained model on some inputs and say what its attention can be converted to.

        advice = advise(model, [tokenizer(text, return_tensors="pt") for text in texts])
        print("\\n".join(verdict(advice)))

    The first half of the batches is measured on; maps are fitted and calibrated on the others. The candidate that is
    the most promising for this kind of model comes first, see `propose`. Candidates are measured in each attention at
    the original's queries, keys and values, timed, and the most promising ones really put into a copy of the model;
    figures of the others are expected by a fit, see `LossFit`. The model is left as it is.

    Args:
        model: of transformers, an encoder or a decoder, not converted.
        batches: inputs, at least two; one text each is best.
        tolerance: a figure that is near enough, see `Figure`; None: a perplexity ratio of 1.25, or a cosine of 0.98.
        use_length: tokens at which times are compared.
        minutes: in all; a step that has begun is finished.
        steps: of the quick fit of `loglinear`.
        log: called with what happens.
        since: when the minutes began, by `time.monotonic`; None: now.

    Raises:
        ValueError: a model of two sequences, too few or too short inputs, token ids beyond its vocabulary, a tolerance
            that is none, or a budget that is over before one candidate was measured.
    """
    clock = Clock(60 * number("minutes", minutes, above=0), time.monotonic() if since is None else since)
    attentions = _attentions(model)
    length = _check_batches(model, batches)
    first = next(x for x in attentions if not x.reason)
    causal = first.causal
    predicts = causal and model.can_generate() and "input_ids" in batches[0]
    log("running the original")
    measured, others, remarks = _divide(model, batches, clock)
    trials = Trials(model, measured, others, predicts, LOOKED)
    kind = trials.reference.kind
    calls = trials.calls[0]
    if any(x.reason for x in attentions):
        kept = {x.reason for x in attentions if x.reason}
        count = sum(bool(x.reason) for x in attentions)
        remarks = [*remarks, f"{count} of {len(attentions)} attentions stay as they are: {'; '.join(sorted(kept))}"]
    log("looking at its attention")
    advice = Advice(
        model=type(model).__name__,
        attentions=[x.name for x in attentions],
        fixed=[i for i, x in enumerate(attentions) if x.reason],
        causal=causal,
        kind=kind,
        tolerance=_tolerance(kind, tolerance),
        length=length,
        use_length=use_length,
        rows=sum(len(next(iter(x.values()))) for x in measured),
        calls=[(x.name, x.call) for x in calls],
        profiles=[_profile(x) for x in calls],
        remarks=remarks,
        environment=environment(torch.get_num_threads()),
    )
    search = Search(trials, advice, clock, _shape(first, advice), steps, log)
    search.start()
    if predicts:
        for _ in clock.steps("measurement", ERRORS, ["heads that find again what is far"], advice.left_out):
            advice.recall = _recalling(model, attentions, measured)
    search.measure_errors()
    search.fit()
    search.time()
    search.run()
    search.choose()
    search.keep()
    search.curve()
    advice.minutes = clock.spent / 60
    return advice


def check(
    advice: Advice, model: Any, batches: Sequence[Batch], others: Sequence[Batch], log: Log = lambda _: None
) -> None:
    """Verify an advice by conversions measured on other texts; record expected and measured figures.

    Checked are the trials that were run in the model, and those whose figure was predicted.

    Args:
        batches: inputs to measure on, others than those of the advice.
        others: inputs to calibrate on, those of the advice.
    """
    trials = Trials(model, batches, others, advice.kind == RATIO, looked=0)
    run = [x for x in advice.trials if x.figure is not None and not x.fitted]
    predicted = [x for x in advice.trials if x.expected is not None and not x.fitted]
    predicted.sort(key=lambda x: x.expected.loss)  # type: ignore[union-attr]
    some = predicted[:: max(1, -(-len(predicted) // CHECKED))]
    for trial in [*run[:CHECKED], *some]:
        log(f"checking {trial.label}")
        expected = advice.expected_value(trial) if trial.figure is None else trial.figure.value
        assert expected is not None
        got = trials.figure(trial.candidate)
        way = "predicted" if trial.figure is None else "measured"
        candidate = trial.candidate
        advice.checks.append(Check(trial.label, candidate.spec, candidate.size, expected, way, got))


def run(source: str | Path, settings: AdviseSettings, out: Path | None = None, log: Log = lambda _: None) -> Advice:
    """Advise on a pretrained model and write what was found.

    Args:
        source: see `load_source`.
        settings: how.
        out: folder for advice.json and advice.html; None: nothing is written.
        log: called with what happens.

    Raises:
        ValueError: no texts, or texts that the model cannot read; and see `advise`.
    """
    begin = time.monotonic()
    if settings.text is None:
        raise ValueError(
            "there are no texts to look at; give some of the kind that the model is for by --text: what attention does "
            "on random tokens says nothing."
        )
    texts = read_texts(settings.text)
    log(f"reading {source}")
    origin = load_source(source, task=settings.task, allow_pickle=settings.allow_pickle)
    length = check_length(origin, settings.length)
    rows = _rows(origin, texts, length, settings)
    half = len(rows) // (3 if settings.check else 2)
    asked, checked = rows[: 2 * half], rows[2 * half :]
    advice = advise(
        origin.model,
        asked,
        tolerance=settings.tolerance,
        use_length=settings.use_length,
        minutes=settings.budget,
        steps=settings.steps,
        log=log,
        since=begin,
    )
    advice.source = str(source)
    advice.command = {"--text": str(settings.text), "--length": str(length)}
    advice.command |= {"--task": settings.task} if settings.task != "auto" else {}
    advice.command |= {"--allow-pickle": ""} if settings.allow_pickle else {}
    advice.remarks = [*origin.remarks, *advice.remarks]
    if settings.check:
        check(advice, origin.model, checked[: advice.rows], asked[half:][:MOST_OTHERS], log)
    if out is not None:
        write(advice, out)
    return advice


def write(advice: Advice, folder: Path) -> None:
    """Write advice.json and advice.html."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "advice.json", record(advice))
    write_text(folder / "advice.html", page(advice))


def _rows(origin: Source, texts: Sequence[str], length: int, settings: AdviseSettings) -> list[dict[str, Tensor]]:
    """Rows of inputs, one a batch; of texts that fill the length where there are enough of them."""
    check_readable(origin, texts)
    parts = 3 if settings.check else 2  # to measure on, to fit on, to check on
    count, seed = parts * settings.samples, settings.seed
    if origin.task != "causal":
        lengths = [len(x) for x in origin.tokenizer(texts[:SIFTED], truncation=True, max_length=length)["input_ids"]]
        full = [text for text, n in zip(texts, lengths, strict=False) if n >= length]
        by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        # Short ones would say nothing of what is far; they count where there are no others.
        longer = [i for i in by_length if lengths[i] >= FAR * lengths[by_length[0]]]
        places = longer if len(longer) >= parts else by_length
        texts = full if len(full) >= count else [texts[i] for i in places[:count]]
    chosen, rows = some_texts(texts, origin.tokenizer, length, count, seed, origin.task)
    if rows < parts:
        raise ValueError(
            f"the texts make {rows} rows of {length} tokens, and it takes {parts}: to measure on, to fit on"
            f"{', to check on' if settings.check else ''}; give more or longer texts, or a smaller --length."
        )
    made = rows_for(origin, chosen, length)
    return list(islice(made.batches(1, seed), rows))


def _attentions(model: Any) -> list[Attention]:
    """Attentions of a model, all alike."""
    attentions = find_attentions(model)
    cross = next((x.name for x in attentions if x.cross), None)
    if cross is not None or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} reads two sequences ({cross or 'an encoder and a decoder'}); advice is for "
            f"encoders and decoders of one. Convert it with --attention and look at the report."
        )
    return attentions


def _check_batches(model: Any, batches: Sequence[Batch]) -> int:
    """Check inputs and return the number of real tokens of the shortest of their longest rows."""
    if len(batches) < 2:
        raise ValueError(
            f"advice takes at least two batches, one to measure on and another one to fit on, got {len(batches)}; give "
            f"more texts, each in a batch of its own."
        )
    lengths = []
    for batch in batches:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is None:
            raise ValueError(f"advice reads texts, as input_ids, got inputs {', '.join(batch)}.")
        size = model.get_input_embeddings().weight.shape[0]
        if int(ids.max()) >= size:
            raise ValueError(
                f"the texts have token ids up to {int(ids.max())}, and {type(model).__name__} has a vocabulary of "
                f"{size}: they were made by the tokenizer of another model; use the model's own."
            )
        lengths.append(int(mask.sum(1).max()) if mask is not None else ids.shape[1])
    windows_for(min(lengths))
    return min(lengths)


def _divide(model: Any, batches: Sequence[Batch], clock: Clock) -> tuple[list[Batch], list[Batch], list[str]]:
    """Halves of the batches, to measure on and to fit on; fewer where a pass takes long."""
    half = len(batches) // 2
    with torch.no_grad(), clock.step("measurement"):
        model(**batches[0])
    passes = clock.left(1.0) / clock.longest["measurement"]
    count = max(1, min(half, max(2, int(RUN_SHARE * passes))))
    others = max(2, min(MOST_OTHERS, int(FIT_SHARE * passes)))
    remark = f"measured on {count} of {half} texts: a pass of the model takes long for the budget"
    return list(batches[:count]), list(batches[half : half + others]), [remark] if count < half else []


def _tolerance(kind: str, given: float | None) -> float:
    if given is None:
        return TOLERANCE[kind]
    if (given < 1) if kind == RATIO else (not 0 < given < 1):
        raise ValueError(
            f"the model is judged by its {kind}, of which {given:g} is no tolerance; give "
            f"{'one above 1' if kind == RATIO else 'one between 0 and 1'}, such as {TOLERANCE[kind]}."
        )
    return given


def _profile(call: AttentionCall) -> Any:
    mask, causal = call.visible()
    bias = call.options.get("position_bias")
    return attention_profile(call.query, call.key, scale=call.scale, causal=causal, key_mask=mask, position_bias=bias)


def _recalling(model: Any, attentions: Sequence[Attention], batches: Sequence[Batch]) -> list[tuple[int, int, float]]:
    """Heads that find again what stands beyond `RECALL_GAP` tokens; none where the texts are too short to see it."""
    places = {x.name: i for i, x in enumerate(attentions) if not x.reason}
    scores = scores_on(model, whole_rows(batches), RECALL_GAP, list(places))
    best = sorted(((x, places[name], head) for (name, head), x in scores.items() if x >= RECALLS), reverse=True)
    return [(i, head, x) for x, i, head in best]


def _shape(attention: Attention, advice: Advice) -> Shape:
    norms = [x for profile in advice.profiles for x in (*profile.query, *profile.key)]
    heads = attention.num_heads
    return Shape(heads, attention.num_key_heads or heads, attention.head_dim, attention.causal, sum(norms) / len(norms))
