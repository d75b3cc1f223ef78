"""Advice on a pretrained model before it is converted: what works, from which length it pays, what to keep exact."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelformer.analysis.attention_profile import attention_profile
from kernelformer.data.texts import check_length, check_readable, read_texts, rows_for, some_texts
from kernelformer.distill.candidates import windows_for
from kernelformer.distill.figures import RATIO, TOLERANCE
from kernelformer.distill.trials import Trials
from kernelformer.environment import environment
from kernelformer.errors import number
from kernelformer.files import write_text
from kernelformer.hf.capture import AttentionCall
from kernelformer.hf.find import Attention, find_attentions
from kernelformer.hf.load import Source, load_source
from kernelformer.measure.attention_times import Shape
from kernelformer.pipelines.advise_search import ERRORS, Clock, Log, Search
from kernelformer.pipelines.advise_settings import AdviseSettings
from kernelformer.pipelines.convert_keep import scores_on, whole_rows
from kernelformer.reports.advice import record
from kernelformer.reports.advice_page import page
from kernelformer.reports.advice_result import Advice, Check, Trial
from kernelformer.reports.portable import as_text, rounded

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
    """Convert really, on other texts than those of an advice, and record what was expected and what came.

    Checked are the trials that were run in the model, and those whose figure was predicted.

    Args:
        advice: of the same model; its ``checks`` are filled.
        model: the original, which is left as it is.
        batches: inputs to measure on, others than those of the advice.
        others: inputs to calibrate on, those of the advice.
        log: called with what happens.
    """
    trials = Trials(model, batches, others, advice.kind == RATIO, looked=0)
    run = [x for x in advice.trials if x.figure is not None and not x.fitted]
    predicted = sorted((x for x in advice.trials if x.expected is not None and not x.fitted), key=_expected_loss)
    some = predicted[:: max(1, -(-len(predicted) // CHECKED))]
    for trial in [*run[:CHECKED], *some]:
        log(f"checking {trial.label}")
        expected = advice.expected_value(trial) if trial.figure is None else trial.figure.value
        assert expected is not None
        got = trials.figure(trial.candidate)
        way = "predicted" if trial.figure is None else "measured"
        candidate = trial.candidate
        advice.checks.append(Check(trial.label, candidate.spec, candidate.size, expected, way, got))


def _expected_loss(trial: Trial) -> float:
    assert trial.expected is not None
    return trial.expected.loss


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
    write_text(folder / "advice.json", as_text(rounded(record(advice))) + "\n")
    write_text(folder / "advice.html", page(advice))


def _rows(origin: Source, texts: Sequence[str], length: int, settings: AdviseSettings) -> list[dict[str, Tensor]]:
    """Rows of inputs, one a batch; of texts that fill the length where there are enough of them.

    Raises:
        ValueError: texts that make too few rows.
    """
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
    """Attentions of a model, all alike.

    Raises:
        ValueError: it attends to another sequence, or not through transformers.
    """
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
