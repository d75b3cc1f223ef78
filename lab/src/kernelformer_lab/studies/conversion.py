"""Quality of models converted by each method, as they are and after minutes of distillation.

After Performer (2009.14794), Fig. 5, which transfers the weights of a Transformer into a Performer and fine-tunes it.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernelformer.conversion.passkey import embeddings, probe_right
from kernelformer.conversion.readers import hash_files
from kernelformer.conversion.texts import (
    TextRows,
    check_readable,
    first_token,
    mask_tokens,
    read_labelled,
    read_texts,
    rows_for,
)
from kernelformer.conversion.tune import ReusePolicy
from kernelformer.errors import positive_int
from kernelformer.formatting import short_names
from kernelformer.hf.load import Source, load_source
from kernelformer.modules.spec import parse_method
from kernelformer.settings import KIND, MODEL, PICKLE, SEED, TEXTS, Settings, option, parse_layers
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import plain
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study


@dataclass(frozen=True, kw_only=True)
class ConversionSettings(Settings):
    """Settings of this study."""

    model: str = option(help=MODEL, argument=True, path=True, shown="MODEL")
    text: Path = option(help=f"texts to learn from: {TEXTS}", name="distill")
    held_out: Path = option(help=f"texts to measure on: {TEXTS}", name="text")
    attention: tuple[str, ...] = option((), SPECS)
    features: int = option(128, "of each method, where --attention does not say", least=2)
    seconds: float = option(300.0, "of distillation for each method", least=0)
    length: int = option(256, "tokens of a text", least=2)
    batch: int = option(4, "texts of a step", least=1)
    samples: int = option(128, "texts to measure on", least=1)
    probe: int = option(0, "labelled texts for a linear probe; 0: none", least=0)
    layers: tuple[int | str, ...] | None = option(
        None, "0-3,5 or patterns of names; default: all", parse=lambda _, text: tuple(parse_layers(text))
    )
    task: str = option("auto", KIND, choices=("auto", "encoder", "masked", "causal", "seq2seq"))
    allow_pickle: bool = option(False, PICKLE, switch=True)
    save: Path | None = option(None, "folder that distilled models go to")
    seed: int = option(0, SEED, least=0)


def inputs_for(source: Source, texts: Sequence[str], length: int, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of a model without end; see `TextRows`."""
    return rows_for(source, texts, length).batches(batch, seed, start=first_token(source))


class Quality:
    """Scores of a model on held-out texts.

    encoder: mean cosine of the mean-pooled outputs to the original's; accuracy of a linear probe on them.
    masked: share of masked tokens that are the model's likeliest, and their perplexity.
    causal: perplexity of the next token at ``length`` tokens.
    """

    def __init__(self, source: Source, settings: ConversionSettings) -> None:
        self.source, self.settings = source, settings
        self.batches = list(self._batches(read_texts(settings.held_out), settings.samples))
        with torch.no_grad():
            self.reference = self._embed(source.model, self.batches) if source.task == "encoder" else None
        self.labelled = None
        if settings.probe:
            if source.task != "encoder":
                raise ValueError(f"a probe is for encoders, {source.path} is one for {source.task!r}; leave it out.")
            self.labelled = [
                read_labelled(x, settings.probe, settings.seed) for x in (settings.text, settings.held_out)
            ]

    def _batches(self, texts: Sequence[str], count: int) -> Iterator[dict[str, Tensor]]:
        """Batches with each text once; of masked models again with other tokens hidden, if they are too few."""
        task, size = self.source.task, self.settings
        check_readable(self.source, texts)
        if task == "causal":
            rows = TextRows(texts, self.source.tokenizer, size.length, "causal").rows
            if len(rows[0]) < size.length:
                raise ValueError(f"the held-out text has {len(rows[0])} tokens, length is {size.length}; give more.")
            count = min(count, len(rows))
        elif task == "encoder":
            count = min(count, len(texts))
        plain = "encoder" if task == "masked" else task
        rows_of_texts = TextRows(texts, self.source.tokenizer, size.length, plain).batches(size.batch, size.seed)
        for first in range(0, count, size.batch):
            yield {name: x[: count - first] for name, x in next(rows_of_texts).items()}

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        """Scores of a model by name."""
        kind = {"encoder": self._encoder, "masked": self._masked, "causal": self._causal}.get(self.source.task)
        if kind is None:
            raise ValueError(f"{self.source.path} is for {self.source.task!r}, which this study does not measure.")
        return kind(model)

    def _embed(self, model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        from kernelformer.conversion.losses import pooled

        vectors = (pooled(model(**x)[0], x["attention_mask"]) for x in batches)
        return torch.cat([F.normalize(x, dim=-1) for x in vectors])

    def _encoder(self, model: Any) -> dict[str, float]:
        assert self.reference is not None
        cosines = (self._embed(model, self.batches) * self.reference).sum(-1)
        scores = {"cosine": float(cosines.mean()), "least cosine": float(cosines.min())}
        if self.labelled is not None:
            scores["probe"] = self._probe(model)
        return scores

    def _probe(self, model: Any) -> float:
        """Accuracy on held-out texts of a linear classifier of the embeddings."""
        assert self.labelled is not None
        size = self.settings
        both = [
            (embeddings(model, self.source.tokenizer, texts, size.length, size.batch * 4), torch.tensor(labels))
            for texts, labels in self.labelled
        ]
        return float(probe_right(both[0], both[1]).double().mean())

    def _masked(self, model: Any) -> dict[str, float]:
        right = count = 0
        loss = 0.0
        for number, batch in enumerate(self.batches):
            ids = batch["input_ids"]
            hidden, chosen = mask_tokens(ids, self.source.tokenizer, self.settings.seed + number)
            logits = model(input_ids=hidden, attention_mask=batch["attention_mask"]).logits
            picked, wanted = logits[chosen], ids[chosen]
            right += int((picked.argmax(-1) == wanted).sum())
            loss += float(F.cross_entropy(picked, wanted, reduction="sum"))
            count += len(wanted)
        return {"accuracy": right / max(1, count), "perplexity": float(torch.tensor(loss / max(1, count)).exp())}

    def _causal(self, model: Any) -> dict[str, float]:
        total = count = 0.0
        for batch in self.batches:
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
            wanted = batch["input_ids"][:, 1:].flatten()
            total += float(F.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
        return {"perplexity": float(torch.tensor(total / count).exp())}


# At equal features: of hyperbolic maps a frequency makes two, and elu has as many as a head has dimensions.
METHODS = (
    "favor+:num_features={m}",
    "favor+hyperbolic:num_features={half}",
    "gmm-prf:num_features={m}",
    "fastfood-prf:num_features={m}",
    "loglinear:num_features={m}",
    "skyformer:num_landmarks={m}:kernel=softmax",
    "nprf:num_features={m}",
    "elu",
    "hedgehog:num_features={m}",
    "wildcat:num_landmarks={m}",
    "local:window=32:sinks=1",
    "favor+:num_features={m}:window=32:sinks=1",
    "loglinear:num_features={m}:window=32:sinks=1",
    "wildcat:num_landmarks={m}:window=32:sinks=1",
)
# Settings that all figures of a record share; the others may differ where a study is resumed.
SHARED = ("length", "batch", "seconds", "samples", "probe", "layers", "seed")
TRANSFER = 0.6  # share of the time for attention transfer, where a map learns
LOG_EVERY = 20  # steps of distillation
RATE = 1e-2  # of transfer
STARTS = 4  # batches that maps start by
REUSE = ReusePolicy(16, 4)


def method_specs(features: int, methods: Sequence[str] = METHODS) -> list[str]:
    """Specs of methods with their number of features filled in."""
    positive_int("features", features)
    return [x.format(m=features, half=max(1, features // 2)) for x in methods]


def methods_of(settings: ConversionSettings) -> Sequence[str]:
    """The specs that are asked for, or `METHODS` with as many features."""
    return settings.attention or method_specs(settings.features)


def steps(settings: ConversionSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return 1 + len(methods_of(settings))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Convert and distill by each method; rows that the record has, of the same settings, are not made again."""
    settings = record.settings
    methods = methods_of(settings)
    for method in methods:
        parse_method(method)
    source = load_source(settings.model, task=settings.task, allow_pickle=settings.allow_pickle)
    texts = read_texts(settings.text)
    about = {
        "model": Path(settings.model).name,
        "config": hashlib.sha256(source.model.config.to_json_string().encode()).hexdigest()[:16],
        "task": source.task,
        "text": [settings.text.name, hash_files([settings.text])],
        "held_out": [settings.held_out.name, hash_files([settings.held_out])],
        "setting": {name: x for name, x in plain(settings).items() if name in SHARED},
        "threads": torch.get_num_threads(),  # time is what they share
    }
    record.resume(about)
    quality = Quality(source, settings)

    def keep(row: Row) -> None:
        record.rows.append(row)
        record.save()

    if not record.where(method="original"):
        log("original")
        keep({**new_row("original"), "scores": {"original": quality(source.model)}})
    progress()
    for method in methods:
        if not record.where(method=method):
            keep(_measure(source, texts, quality, method, settings, log))
        progress()


def new_row(method: str) -> Row:
    """A row of a method: ``scores`` by stage and name, ``parameters`` of its maps; ``problem``: why it cannot."""
    return {"method": method, "scores": {}, "steps": {}, "seconds": 0.0, "parameters": 0, "problem": ""}


def _measure(
    source: Source, texts: Sequence[str], quality: Quality, method: str, settings: ConversionSettings, log: Log
) -> Row:
    """One method: convert a copy of the model, distill it and score both; the reason where it cannot be converted."""
    from kernelformer.conversion.tune import learned
    from kernelformer.hf import convert

    name, options = parse_method(method)
    row = new_row(method)
    try:
        student = convert(copy.deepcopy(source.model), name, layers=settings.layers, **options)
    except ValueError as problem:
        row["problem"] = str(problem)
        return row
    row["parameters"] = sum(x.numel() for some in learned(student).values() for x in some)
    log(f"{method}: as converted")
    start = time.monotonic()
    _start(source, student, texts, settings)
    started = time.monotonic() - start  # time that is taken from the distillation, since maps learn in it
    row["scores"]["converted"] = quality(student)
    if settings.seconds:
        settings = replace(settings, seconds=max(0.0, settings.seconds - started))
        start = time.monotonic() - started
        row["steps"] = distill(source, student, texts, settings, lambda x: log(f"{method}: {x}"))
        row["seconds"] = time.monotonic() - start
        row["scores"]["distilled"] = quality(student)
        if settings.save is not None:
            folder = settings.save / method.replace(":", "-").replace("=", "")
            student.save_pretrained(folder)
            if source.tokenizer is not None:
                source.tokenizer.save_pretrained(folder)
    return row


def _start(source: Source, student: Any, texts: Sequence[str], settings: ConversionSettings) -> None:
    """Start free maps at the original's keys, see `start_maps`; others stay as they are."""
    from kernelformer.conversion.tune import start_student

    inputs = inputs_for(source, texts, settings.length, settings.batch, settings.seed + 3)
    start_student(student, source.model, [next(inputs) for _ in range(STARTS)])


def distill(
    source: Source, student: Any, texts: Sequence[str], settings: ConversionSettings, log: Log
) -> dict[str, int]:
    """Attention transfer where a map learns, then fine-tuning, within the seconds of the settings."""
    from kernelformer.conversion.tune import learns, quick_dtype, transfer, tune

    torch.manual_seed(settings.seed)
    share = TRANSFER if learns(student) else 0.0
    steps = {}
    many, precision = 10**9, quick_dtype(source.model.device)

    def log_loss(stage: str) -> Callable[[int, float], None]:
        return lambda step, loss: log(f"{stage} {step}: {loss:.4f}") if step % LOG_EVERY == 0 else None

    if share:
        inputs = inputs_for(source, texts, settings.length, settings.batch, settings.seed + 1)
        seconds = share * settings.seconds
        losses = transfer(
            student,
            source.model,
            inputs,
            steps=many,
            lr=RATE,
            seconds=seconds,
            autocast=precision,
            log=log_loss("transfer"),
            reuse=REUSE,
        )
        steps["transfer"] = len(losses)
    inputs = inputs_for(source, texts, settings.length, settings.batch, settings.seed + 2)
    seconds = (1 - share) * settings.seconds
    losses = tune(student, source.model, inputs, steps=many, seconds=seconds, autocast=precision, log=log_loss("tune"))
    steps["tune"] = len(losses)
    return steps


def tables(record: Record) -> list[Table]:
    """The scores of each method, as converted and distilled."""
    first = record.where(method="original")[0]["scores"]["original"]
    pairs = [(name, stage) for name in first for stage in ("converted", "distilled")]
    cells = [("original", *(f"{first[name]:.4f}" for name, _ in pairs))]
    short = short_names(row["method"] for row in record.rows)
    for row in record.rows:
        if row["problem"]:
            cells.append((short[row["method"]], row["problem"][:60]))
        elif row["method"] != "original":
            scores = [row["scores"].get(stage, {}).get(name) for name, stage in pairs]
            values = ["" if x is None else f"{x:.4f}" for x in scores]
            cells.append((short[row["method"]], *values, " + ".join(map(str, row["steps"].values()))))
    columns = ("method", *(f"{name}, {stage}" for name, stage in pairs), "steps")
    return [table("Quality of converted models, held-out text: as converted, and distilled", columns, cells)]


def picture(record: Record, path: Path) -> None:
    """Draw the first score of each method, as converted and distilled, against the original's."""
    name, best = next(iter(record.where(method="original")[0]["scores"]["original"].items()))
    shown = [x for x in record.rows if x["method"] != "original" and not x["problem"]]
    with drawing(path, (7, 0.45 * len(shown) + 1.6)) as (figure, ((axis,),)):
        for height, row in enumerate(shown):
            values = [row["scores"][x][name] for x in ("converted", "distilled") if x in row["scores"]]
            axis.plot(values, [height] * len(values), color="0.7", zorder=1)
            for value, colour in zip(values, ("C1", "C0"), strict=False):
                axis.scatter([value], [height], color=colour, zorder=2)
        axis.axvline(best, color="0.4", linestyle=":")
        for label, colour in (("as converted", "C1"), ("distilled", "C0")):
            axis.scatter([], [], color=colour, label=label)
        axis.plot([], [], color="0.4", linestyle=":", label="original")
        axis.set_yticks(range(len(shown)), [x["method"] for x in shown])
        axis.invert_yaxis()
        if name == "perplexity":
            axis.set_xscale("log")
        axis.set_xlabel(name)
        axis.grid(True, axis="x", alpha=0.2)
        figure.legend(loc="outside upper center", ncols=3, fontsize="small")


STUDY = Study(
    "conversion",
    "Performer (2009.14794), Fig. 5, for all methods of this library",
    ConversionSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("MODEL --distill train.jsonl --text test.jsonl", "all methods, before and after"),),
)
