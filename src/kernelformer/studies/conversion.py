"""Which method converts a pretrained model best: quality as converted, and after minutes of distillation."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.data.sources import hash_files
from kernelformer.data.texts import batches, inputs_for, mask_tokens, packed_rows, read_texts
from kernelformer.errors import positive_int
from kernelformer.files import read_json, write_json
from kernelformer.hf.load import Source, load_source
from kernelformer.modules.spec import parse_method

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
)
TRANSFER = 0.6  # share of the time for attention transfer, where a map learns
EVERY = 20  # steps between two words on progress
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What is the same for all methods.

    Args:
        length: tokens of a text.
        batch: texts of a step.
        seconds: of distillation; 0: none.
        samples: held-out texts that quality is measured on.
        probe: labelled texts that a linear probe learns from, and as many held-out ones; 0: none.
        layers: which attentions to convert, see `convert`; None: all.
        seed: of the order of texts.
    """

    length: int = 256
    batch: int = 4
    seconds: float = 300.0
    samples: int = 128
    probe: int = 0
    layers: tuple[int | str, ...] | None = None
    seed: int = 0


@dataclass
class Row:
    """One method: scores by name, of the original, as converted and distilled."""

    method: str
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # stage -> name -> value
    steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0  # of the maps
    problem: str = ""  # why it cannot


def method_specs(features: int, methods: Sequence[str] = METHODS) -> list[str]:
    """Methods with their number of features filled in."""
    positive_int("features", features)
    return [x.format(m=features, half=max(1, features // 2)) for x in methods]


def run(
    path: str,
    text: Path,
    held_out: Path,
    methods: Sequence[str],
    setting: Setting,
    file: Path,
    *,
    allow_pickle: bool = False,
    task: str = "auto",
    save: Path | None = None,
    tell: Tell = lambda _: None,
) -> list[Row]:
    """Convert and distill by each method; rows that ``file`` has already, of the same setting, are not made again.

    Args:
        path: of the model.
        text: to distill on.
        held_out: to measure on; ``.jsonl`` with ``label`` for a probe.
        methods: see `parse_method`.
        setting: the rest.
        file: for the figures, written after each method.
        allow_pickle: see `load_source`.
        task: see `load_source`.
        save: folder that distilled models go to, one each.
        tell: progress.
    """
    for method in methods:
        parse_method(method)
    source = load_source(path, task=task, allow_pickle=allow_pickle)
    texts = read_texts(text)
    head = {
        "model": Path(path).name,
        "config": hashlib.sha256(source.model.config.to_json_string().encode()).hexdigest()[:16],
        "task": source.task,
        "text": [text.name, hash_files([text])],
        "held_out": [held_out.name, hash_files([held_out])],
        "setting": _plain(asdict(setting)),
        "threads": torch.get_num_threads(),  # time is what they share
    }
    rows = _read(file, head)
    judge = Judge(source, held_out, text, setting)
    if not any(x.method == "original" for x in rows):
        tell("original")
        rows.append(Row("original", {"original": judge(source.model)}))
        _write(file, head, rows)
    for method in methods:
        if not any(x.method == method for x in rows):
            rows.append(_one(source, texts, judge, method, setting, save, tell))
            _write(file, head, rows)
    return rows


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain


def _read(file: Path, head: dict[str, Any]) -> list[Row]:
    if not file.is_file():
        return []
    record = read_json(file)
    other = [x for x in head if record.get(x) != head[x]]
    if other:
        raise ValueError(
            f"{file} has figures of another {other[0]}: {record.get(other[0])!r:.80} and not "
            f"{head[other[0]]!r:.80}; give another --out."
        )
    return [Row(**x) for x in record["rows"]]


def _write(file: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    write_json(file, {**head, "rows": [asdict(x) for x in rows]})


def _one(
    source: Source, texts: Sequence[str], judge: Judge, method: str, setting: Setting, save: Path | None, tell: Tell
) -> Row:
    from kernelformer.distill.train import learned
    from kernelformer.hf import convert

    name, options = parse_method(method)
    row = Row(method)
    try:
        student = convert(copy.deepcopy(source.model), name, layers=setting.layers, **options)
    except ValueError as problem:
        row.problem = str(problem)
        return row
    row.parameters = sum(x.numel() for some in learned(student).values() for x in some)
    tell(f"{method}: as converted")
    row.scores["converted"] = judge(student)
    if setting.seconds:
        start = time.monotonic()
        row.steps = distill(source, student, texts, setting, lambda x: tell(f"{method}: {x}"))
        row.seconds = time.monotonic() - start
        row.scores["distilled"] = judge(student)
        if save is not None:
            folder = save / method.replace(":", "-").replace("=", "")
            student.save_pretrained(folder)
            if source.tokenizer is not None:
                source.tokenizer.save_pretrained(folder)
    return row


def distill(source: Source, student: Any, texts: Sequence[str], setting: Setting, tell: Tell) -> dict[str, int]:
    """Attention transfer where a map learns, then fine-tuning, within the seconds of the setting."""
    from kernelformer.distill.train import learns, quick_dtype, transfer, tune

    torch.manual_seed(setting.seed)
    share = TRANSFER if learns(student) else 0.0
    steps = {}
    many, precision = 10**9, quick_dtype(source.model.device)

    def say(stage: str) -> Callable[[int, float], None]:
        return lambda step, loss: tell(f"{stage} {step}: {loss:.4f}") if step % EVERY == 0 else None

    if share:
        inputs = inputs_for(source, texts, setting.length, setting.batch, setting.seed + 1)
        seconds = share * setting.seconds
        losses = transfer(
            student, source.model, inputs, steps=many, seconds=seconds, autocast=precision, log=say("transfer")
        )
        steps["transfer"] = len(losses)
    inputs = inputs_for(source, texts, setting.length, setting.batch, setting.seed + 2)
    seconds = (1 - share) * setting.seconds
    losses = tune(student, source.model, inputs, steps=many, seconds=seconds, autocast=precision, log=say("tune"))
    steps["tune"] = len(losses)
    return steps


class Judge:
    """Quality on held-out texts, by what the model is for.

    encoder: mean cosine of the mean-pooled outputs to the original's; accuracy of a linear probe on them.
    masked: share of masked tokens that are the model's likeliest, and their perplexity.
    causal: perplexity of the next token at ``length`` tokens.
    """

    def __init__(self, source: Source, held_out: Path, text: Path, setting: Setting) -> None:
        self.source, self.setting = source, setting
        self.batches = list(self._batches(read_texts(held_out), setting.samples))
        with torch.no_grad():
            self.reference = self._embed(source.model, self.batches) if source.task == "encoder" else None
        self.labelled = None
        if setting.probe:
            if source.task != "encoder":
                raise ValueError(f"a probe is for encoders, {source.path} is one for {source.task!r}; leave it out.")
            self.labelled = [_labelled(x, setting.probe, setting.seed) for x in (text, held_out)]

    def _batches(self, texts: Sequence[str], count: int) -> Iterator[dict[str, Tensor]]:
        """Each text once; of masked models again with other tokens hidden, where there are fewer than asked for."""
        task, size = self.source.task, self.setting
        inputs_for(self.source, texts, size.length, size.batch, size.seed)  # checks the tokenizer
        if task == "causal":
            rows = packed_rows(texts, self.source.tokenizer, size.length)
            if len(rows[0]) < size.length:
                raise ValueError(f"the held-out text has {len(rows[0])} tokens, length is {size.length}; give more.")
            count = min(count, len(rows))
        elif task == "encoder":
            count = min(count, len(texts))
        plain = "encoder" if task == "masked" else task
        found = batches(texts, self.source.tokenizer, size.length, size.batch, size.seed, task=plain)
        for first in range(0, count, size.batch):
            yield {name: x[: count - first] for name, x in next(found).items()}

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        """Scores by name."""
        kind = {"encoder": self._encoder, "masked": self._masked, "causal": self._causal}.get(self.source.task)
        if kind is None:
            raise ValueError(f"{self.source.path} is for {self.source.task!r}, which this study does not measure.")
        return kind(model)

    def _embed(self, model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        from kernelformer.distill.losses import pooled

        found = (pooled(model(**x)[0], x["attention_mask"]) for x in batches)
        return torch.cat([F.normalize(x, dim=-1) for x in found])

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
        both = []
        for texts, labels in self.labelled:
            size = self.setting.batch * 4
            token = self.source.tokenizer
            parts = [texts[i : i + size] for i in range(0, len(texts), size)]
            encoded = (
                token(x, truncation=True, max_length=self.setting.length, padding=True, return_tensors="pt")
                for x in parts
            )
            vectors = [self._embed(model, [dict(x)]) for x in encoded]
            both.append((torch.cat(vectors), torch.tensor(labels)))
        return probe_accuracy(both[0], both[1])

    def _masked(self, model: Any) -> dict[str, float]:
        right = count = 0
        loss = 0.0
        for number, batch in enumerate(self.batches):
            ids = batch["input_ids"]
            hidden, chosen = mask_tokens(ids, self.source.tokenizer, self.setting.seed + number)
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


def _labelled(path: Path, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Some texts of a ``.jsonl`` with their labels."""
    if path.suffix != ".jsonl":
        raise ValueError(f"a probe needs 'text' and 'label' in each line of a .jsonl, got {path}.")
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row.get("text"), str) or not isinstance(row.get("label"), int):
                    raise ValueError(f"{path}, line {number}: a probe needs 'text' and an integer 'label'.")
                rows.append((row["text"], row["label"]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return [rows[i][0] for i in order], [rows[i][1] for i in order]


def probe_accuracy(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], steps: int = 50) -> float:
    """Accuracy of multinomial logistic regression on features (N, d) with labels (N), fitted by L-BFGS."""
    with torch.enable_grad():
        x, y = train[0].double(), train[1]
        mean, size = x.mean(0), x.std(0).clamp_min(1e-6)
        classes = int(max(y.max(), test[1].max())) + 1
        weight = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=steps, line_search_fn="strong_wolfe")

        def logits(vectors: Tensor) -> Tensor:
            scaled: Tensor = (vectors.double() - mean) / size
            return scaled @ weight[:-1] + weight[-1]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits(x), y) + 1e-2 * weight[:-1].square().sum() / 2
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        return float((logits(test[0]).argmax(-1) == test[1]).double().mean())
