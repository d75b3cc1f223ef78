"""Our models beside plain PyTorch ones of the same size: what first weights, pooling and the head cost.

    python tools/studies/twins.py --images cifar10 --image-size 16 --patch 4 --seeds 3

All are trained with exact softmax attention by the same short loop (AdamW, linear warm-up and decay) on the same
batches; a seed is that of the first weights and of the order of the samples. An image model reads patches of small grey
images, an encoder classifies ListOps, a decoder models the bytes of Python's standard library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.utils.generic import ModelOutput

from kernelformer.errors import choice
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.settings import Settings, option
from kernelformer_lab.analysis.statistics import mean_and_error
from kernelformer_lab.cli.studies import main
from kernelformer_lab.data.batching import Sample, spread_evenly
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import plain
from kernelformer_lab.studies.base import SCRIPT, Log, Progress, Record, Row, Study, unique, where
from kernelformer_lab.tasks import Task, make_task


class PlainTwin(nn.Module):
    """`torch.nn.TransformerEncoder` between an embedding and one linear layer, with PyTorch's own first weights.

    Positions are learned, from a standard deviation of 0.02, as vision transformers and GPT-2 have them. A classifier
    takes the mean of the real tokens; a language model is causal, and its last layer is tied to the tokens.

    Args:
        config: of our model, for the sizes.
        kind: of our model: "image", "classifier" or "causal-lm".
    """

    def __init__(self, config: KernelformerConfig, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, config.hidden_size
        if kind == "image":
            rows, columns = config.image_size or (0, 0)
            size = config.patch_size
            self.embed: nn.Module = nn.Conv2d(config.num_channels, width, size, stride=size)
            length = (rows // size) * (columns // size)
        else:
            self.embed = nn.Embedding(config.vocab_size, width)
            length = config.max_position_embeddings
        self.places = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, config.num_attention_heads, config.feed_forward, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(
            layer, config.num_hidden_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, config.vocab_size if kind == "causal-lm" else int(config.num_labels or 0))
        if kind == "causal-lm":
            nn.init.normal_(self.embed.weight, std=width**-0.5)  # a tied table has to serve as the last layer too
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """Predict, and give the mean cross-entropy; the arguments are those of our models."""
        x = self.embed(pixel_values).flatten(2).transpose(1, 2) if input_ids is None else self.embed(input_ids)
        x = x + self.places[:, : x.shape[1]]
        hidden = None if attention_mask is None else attention_mask == 0
        options: dict[str, Any] = {}
        if self.kind == "causal-lm":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
            options = {"mask": mask, "is_causal": True}
        x = self.stack(x, src_key_padding_mask=hidden, **options)
        if self.kind != "causal-lm":
            real = x.new_ones(x.shape[:2]) if hidden is None else (~hidden).to(x.dtype)
            x = (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
        logits = self.head(x)
        if labels is None:
            return ModelOutput(logits=logits)
        wanted, given = (labels[:, 1:], logits[:, :-1]) if self.kind == "causal-lm" else (labels, logits)
        return ModelOutput(loss=nn.functional.cross_entropy(given.flatten(0, -2), wanted.flatten()), logits=logits)


@torch.no_grad()
def torch_weights(model: nn.Module) -> None:
    """Give linear layers and convolutions the first weights that PyTorch has: uniform, of variance 1 / (3 inputs)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module is not getattr(
            model, "lm_head", None
        ):  # tied to tokens
            module.reset_parameters()


PLAIN = "plain PyTorch"
OURS = "ours"
WEIGHTS = ("PyTorch's first weights", "first weights 0.02")
SMALL, UNSCALED = "positions from 0.02", "tokens not scaled"
SINUSOIDS = "sinusoidal positions"  # what texts have by default
EMBEDDINGS = (SMALL, UNSCALED, f"{SMALL}, {UNSCALED}")  # ours are sqrt(d) (token + position), of equal size
# What of our model is made as the plain one has it, or as others have it.
VARIANTS = {
    "image": (PLAIN, OURS, *WEIGHTS, "one-layer head", "first token", SMALL, f"{WEIGHTS[0]}, {SMALL}"),
    "classifier": (PLAIN, OURS, *WEIGHTS, "one-layer head", "first token", *EMBEDDINGS, SINUSOIDS),
    "causal-lm": (PLAIN, OURS, *WEIGHTS, *EMBEDDINGS, SINUSOIDS),
}
WARMUP = 0.05  # of the steps
EVALUATED = 2000  # samples of the validation split, at most


@dataclass(frozen=True, kw_only=True)
class TwinsSettings(Settings):
    """Settings of this study."""

    images: Path | None = option(
        None, "folder with train.npz and test.npz, as the task images reads; default: no images"
    )
    tasks: tuple[str, ...] = option(("images", "listops", "bytes"), "what the models are trained on")
    image_size: int = option(8, "rows and columns that images are made", least=2)
    patch: int = option(2, "rows and columns of a patch", least=1)
    width: int = option(64, "of the models", least=1)
    layers: int = option(2, "of the models", least=1)
    heads: int = option(4, "of an attention", least=1)
    steps: int = option(400, "of each training", least=1)
    batch: int = option(64, "samples of a step", least=1)
    learning_rate: float = option(1e-3, "the largest")
    seeds: int = option(1, "runs of each, with as many seeds", least=1)


def score(row: Row) -> float:
    """Bits per byte, or the accuracy in percent."""
    found: float = row["loss"] / math.log(2) if row["task"] == "bytes" else 100 * row["accuracy"]
    return found


def tasks(settings: TwinsSettings) -> list[Task]:
    """The tasks of the study; images only where there are some."""
    options: dict[str, dict[str, Any]] = {
        "images": {"data": str(settings.images), "channels": 1, "size": settings.image_size, "resize": True},
        "listops": {"min_length": 8, "max_length": 64, "max_depth": 4, "max_args": 4, "train_samples": 20_000},
        "bytes": {"length": 128},
    }
    names = [choice("task of the study", name, options) for name in settings.tasks]
    if names == ["images"] and settings.images is None:
        raise ValueError(
            "the task images needs a folder of images, got tasks=('images',) and images=None; give images."
        )
    return [make_task(name, **options[name]) for name in names if name != "images" or settings.images is not None]


def build(task: Task, variant: str, settings: TwinsSettings) -> nn.Module:
    """A model of a task."""
    changes: dict[str, Any] = {}
    if variant == "first weights 0.02":
        changes["initializer_range"] = 0.02
    if variant == "first token":
        changes["pooling"] = "cls"
    if SMALL in variant:
        changes["position_range"] = 0.02
    if UNSCALED in variant:
        changes["embedding_scale"] = 1.0
    config = KernelformerConfig(
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        attention="softmax",
        positions="sinusoidal" if variant == SINUSOIDS else "learned",
        patch_size=settings.patch,
        **{**{"num_labels": 10}, **task.settings(), **changes},
    )
    if variant == PLAIN:
        return PlainTwin(config, task.model)
    model = MODELS[task.model](config)
    if WEIGHTS[0] in variant:
        torch_weights(model)
    if variant == "one-layer head":
        model.head = nn.Linear(config.hidden_size, int(config.num_labels or 0))
    return model


def fit(model: nn.Module, task: Task, data: Dataset[Sample], settings: TwinsSettings, seed: int) -> None:
    """Train a model; the order of the samples depends on the seed alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, round(WARMUP * settings.steps))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (settings.steps - step) / max(1, settings.steps - warm))
    )
    order, size = torch.Generator().manual_seed(seed), len(data)  # type: ignore[arg-type]
    model.train()
    for _ in range(settings.steps):
        chosen = torch.randint(size, (settings.batch,), generator=order).tolist()
        loss = model(**task.collate([data[i] for i in chosen])).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, data: Dataset[Sample], settings: TwinsSettings) -> tuple[float, float]:
    """Loss and accuracy on a part of the validation split that is spread over all of it."""
    chosen = spread_evenly(len(data), EVALUATED if task.model != "causal-lm" else EVALUATED // 16)  # type: ignore[arg-type]
    model.eval()
    loss = right = labels = 0.0
    for first in range(0, len(chosen), settings.batch):
        batch = task.collate([data[i] for i in chosen[first : first + settings.batch]])
        wanted: Tensor = batch["labels"]
        out = model(**batch)
        given = out.logits
        if task.model == "causal-lm":
            wanted, given = wanted[:, 1:], given[:, :-1]
        loss += float(out.loss) * wanted.numel()
        right += float((given.argmax(-1) == wanted).sum())
        labels += wanted.numel()
    return loss / labels, right / labels


def measure(
    task: Task, splits: tuple[Dataset[Sample], Dataset[Sample]], variant: str, seed: int, settings: TwinsSettings
) -> Row:
    """Train one model on the first of two splits, and score it on the second."""
    torch.manual_seed(seed)
    model = build(task, variant, settings)
    fit(model, task, splits[0], settings, seed)
    loss, accuracy = evaluate(model, task, splits[1], settings)
    key = {"task": task.name, "variant": variant, "seed": seed}
    return {**key, "parameters": sum(x.numel() for x in model.parameters()), "loss": loss, "accuracy": accuracy}


def steps(settings: TwinsSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return settings.seeds * sum(len(VARIANTS[task.model]) for task in tasks(settings))


def run(record: Record, log: Log, progress: Progress) -> None:
    """Train all that the record does not have yet, of the same settings."""
    settings, old = record.settings, record.earlier()
    before = {**plain(TwinsSettings()), **old.get("settings", {})}  # older than an option: its default
    rows: list[Row] = old.get("trained", []) if before == plain(settings) else []
    for task in tasks(settings):
        splits = None  # read once for all models, and only where there is one to train
        for seed in range(settings.seeds):
            for variant in VARIANTS[task.model]:
                if not where(rows, task=task.name, variant=variant, seed=seed):
                    log(f"{task.name}: {variant}, seed {seed}")
                    splits = splits or (task.split("train"), task.split("validation"))
                    rows.append(measure(task, splits, variant, seed, settings))
                    record.figures = {"trained": rows, "summary": summary(rows)}
                    record.save()
                progress()
    record.figures = {"trained": rows, "summary": summary(rows)}


def summary(rows: list[Row]) -> list[Row]:
    """Mean and standard error over seeds of each variant's score: accuracy in percent, or bits per byte."""
    found = []
    for task, variant in unique(rows, "task", "variant"):
        of = where(rows, task=task, variant=variant)
        scores = [score(x) for x in of]
        mean, error = mean_and_error(scores)
        metric = "bits per byte" if task == "bytes" else "accuracy %"
        row = {"task": task, "variant": variant, "metric": metric, "mean": mean, "error": error}
        found.append({**row, "seeds": len(of), "parameters": of[0]["parameters"]})
    return found


def tables(record: Record) -> list[Table]:
    """A row for each task and variant."""
    cells = [
        (x["task"], x["variant"], x["metric"], f"{x['mean']:.2f}", f"{x['error']:.2f}", f"{x['parameters']:,}")
        for x in record.figures["summary"]
    ]
    columns = ("task", "model", "metric", "mean", "± error", "parameters")
    return [table("Our models and plain PyTorch ones", columns, cells, left=3)]


def picture(record: Record, path: Path) -> None:
    """Draw a panel for each task: a point for each seed, a bar at the mean."""
    rows = record.figures["summary"]
    names = unique(rows, "task")
    with drawing(path, (4.6 * len(names), 3.2), columns=len(names)) as (_, (axes,)):
        for axis, task in zip(axes, names, strict=True):
            mine = where(rows, task=task)
            for place, row in enumerate(mine):
                scores = [score(x) for x in where(record.figures["trained"], task=task, variant=row["variant"])]
                axis.scatter(scores, [place] * len(scores), s=18)
                axis.plot([row["mean"]] * 2, [place - 0.3, place + 0.3], color="gray")
            axis.set_yticks(range(len(mine)), [x["variant"] for x in mine])
            axis.invert_yaxis()
            axis.set(title=task, xlabel=mine[0]["metric"])
            axis.grid(True, axis="x", alpha=0.2)


STUDY = Study("twins", "", TwinsSettings, steps, run, tables, picture, resumes=True, program=SCRIPT)

if __name__ == "__main__":
    main(STUDY, "Train our models beside plain PyTorch ones of the same size.")
