"""Which kernels learn to ignore: the synthetic sparsity task at a size for a CPU (learned-kernels App. E, Fig. 6).

The model is the paper's: 3 layers of width 64, 4 heads of 16, learned positions, the answer read off position 0.
Sequences are shorter, samples fewer and the learning rate larger, so that a run takes a minute instead of hours.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from kernelformer.files import read_json, write_text
from kernelformer.formatting import short_names
from kernelformer.modules import KernelAttention, method_options, parameter_groups, parse_method, redraw
from kernelformer.modules.redraw import random_maps
from kernelformer.studies.settings import SparsitySetting as Setting
from kernelformer.tasks.sparsity import CLASSES, SparseSums, sparse_sums

METHODS = (
    "softmax",
    "gmm-rks",
    "gmm-prf",
    "generative-prf",
    "fastfood-prf:learn=none",
    "fastfood-prf:learn=S",
    "fastfood-prf:learn=SGB",
)
RELEVANCES = (0.1, 0.5, 0.9)


@dataclass
class Curve:
    """How one method learned."""

    method: str
    relevance: float
    seed: int
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # on the validation samples
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """For progress."""
        return f"{self.method}, relevance {self.relevance:g}, seed {self.seed}, step {self.steps[-1]}"

    def reached(self, accuracy: float) -> int | None:
        """The first step at which it was seen, or None."""
        return next((s for s, a in zip(self.steps, self.accuracy, strict=True) if a >= accuracy), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Block(nn.Module):
    """Pre-norm attention and feedforward."""

    def __init__(self, width: int, heads: int, method: str, **options: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = KernelAttention(width, heads, method, **options)
        self.feed = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, E) -> (B, L, E)."""
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class Classifier(nn.Module):
    """(B, L, 3) many-hot -> (B, 9) logits, read off position 0."""

    def __init__(self, setting: Setting, method: str, seed: int = 0) -> None:
        super().__init__()
        name, options = parse_method(method)
        if "num_features" in method_options(name):
            options = {"num_features": setting.num_features, **options}
        self.embed = nn.Linear(3, setting.width)
        self.positions = nn.Parameter(0.02 * torch.randn(setting.length, setting.width))
        seeds = [{"seed": 1000 * seed + i} if "seed" in method_options(name) else {} for i in range(setting.layers)]
        self.blocks = nn.Sequential(*(Block(setting.width, setting.heads, name, **options, **s) for s in seeds))
        self.norm = nn.LayerNorm(setting.width)
        self.head = nn.Sequential(nn.Linear(setting.width, setting.width), nn.GELU(), nn.Linear(setting.width, CLASSES))

    def forward(self, pairs: Tensor) -> Tensor:
        """(B, L, 3) bool -> (B, 9)."""
        x = self.blocks(self.embed(pairs.to(self.positions.dtype)) + self.positions)
        out: Tensor = self.head(self.norm(x[:, 0]))
        return out


@torch.no_grad()
def accuracy(model: nn.Module, samples: SparseSums, batch: int = 500) -> float:
    """Share of right answers; the model is left in training mode."""
    model.eval()
    parts = zip(samples.inputs.split(batch), samples.labels.split(batch), strict=True)
    right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in parts)
    model.train()
    return right / len(samples)


def train(
    method: str,
    relevance: float,
    setting: Setting,
    *,
    seed: int = 0,
    tell: Callable[[Curve], None] = lambda _: None,
) -> Curve:
    """Train one model; same seed, same first weights, samples and order for every method."""
    samples = sparse_sums(setting.train + setting.validation, relevance=relevance, length=setting.length, seed=seed)
    training, validation = samples.split(setting.train)
    torch.manual_seed(seed)
    model = Classifier(setting, method, seed)
    if random_maps(model):
        redraw(model, every=setting.redraw_every)
    groups = parameter_groups(model)
    for group in groups:  # decay pulls a scale to zero, where a kernel sees nothing
        if group["name"] == "kernel":
            group |= {"lr": setting.kernel_lr, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        groups, lr=setting.lr, betas=(0.9, setting.beta2), eps=setting.eps, weight_decay=setting.weight_decay
    )
    warm = max(1, setting.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / setting.steps)),
    )
    order = torch.Generator().manual_seed(seed)
    curve = Curve(method, relevance, seed)
    start = time.perf_counter()
    for step in range(1, setting.steps + 1):
        index = torch.randint(len(training), (setting.batch,), generator=order)
        loss = F.cross_entropy(model(training.inputs[index]), training.labels[index])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % setting.check_every == 0 or step == setting.steps:
            curve.steps.append(step)
            curve.accuracy.append(accuracy(model, validation))
            curve.seconds = time.perf_counter() - start
            tell(curve)
    return curve


def study(
    methods: Sequence[str],
    relevances: Sequence[float],
    setting: Setting,
    path: Path,
    *,
    seeds: Sequence[int] = (0,),
    tell: Callable[[str], None] = lambda _: None,
    done: Callable[[], None] = lambda: None,
) -> list[Curve]:
    """Train every method at every relevance; ``path`` keeps what is finished, and a second call goes on from there."""
    for method in methods:
        Classifier(setting, method)  # says what is wrong with it before the first hour has passed
    kept = _read(path, setting)
    curves = []
    for p in relevances:
        for method in methods:
            for seed in seeds:
                key = (method, p, seed)
                if key not in kept:
                    kept[key] = train(
                        method, p, setting, seed=seed, tell=lambda c: tell(f"{c.title}: {100 * c.accuracy[-1]:.1f}%")
                    )
                    record = {"setting": asdict(setting), "curves": [c.as_json() for c in kept.values()]}
                    write_text(path, json.dumps(record) + "\n")
                curves.append(kept[key])
                done()
    return curves


def _read(path: Path, setting: Setting) -> dict[tuple[str, float, int], Curve]:
    if not path.exists():
        return {}
    record = read_json(path)
    if record["setting"] != asdict(setting):
        other = {k: v for k, v in record["setting"].items() if asdict(setting).get(k) != v}
        raise ValueError(f"{path} holds results of another setting ({other}); move it away, or choose another folder.")
    return {(c["method"], c["relevance"], c["seed"]): Curve(**c) for c in record["curves"]}


def table(curves: Sequence[Curve]) -> Table:
    """Final accuracy and the step at which 80% were reached, by method and relevance."""
    relevances = sorted({c.relevance for c in curves})
    out = Table(title="Sparse sums: accuracy at the end, and the step that reached 80%")
    out.add_column("method", no_wrap=True)
    for p in relevances:
        out.add_column(f"relevance {p:g}", justify="right")
    out.add_column("s/run", justify="right")
    for method, short in short_names(c.method for c in curves).items():
        mine = [c for c in curves if c.method == method]
        cells = []
        for p in relevances:
            some = [c for c in mine if c.relevance == p]
            steps = [c.reached(0.8) for c in some]
            known = [s for s in steps if s is not None]
            when = f"{sum(known) / len(known):.0f}" if known and len(known) == len(steps) else "-"
            cells.append(f"{100 * sum(c.accuracy[-1] for c in some) / len(some):.1f}% ({when})" if some else "")
        out.add_row(short, *cells, f"{sum(c.seconds for c in mine) / len(mine):.0f}")
    return out


def picture(curves: Sequence[Curve], path: Path) -> None:
    """Learning curves, one panel per relevance."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    relevances = sorted({c.relevance for c in curves})
    figure, axes = plt.subplots(
        1, len(relevances), figsize=(4.4 * len(relevances) + 2, 4), squeeze=False, sharey=True, constrained_layout=True
    )
    for axis, p in zip(axes[0], relevances, strict=True):
        for index, method in enumerate(dict.fromkeys(c.method for c in curves)):
            mine = [c for c in curves if c.method == method and c.relevance == p]
            for c in mine:
                axis.plot(c.steps, [100 * x for x in c.accuracy], color=f"C{index}", alpha=0.25 if len(mine) > 1 else 1)
            if len(mine) > 1:
                mean = torch.tensor([c.accuracy for c in mine]).mean(0) * 100
                axis.plot(mine[0].steps, mean.tolist(), color=f"C{index}")
            axis.plot([], [], color=f"C{index}", label=method)
        axis.axhline(100 / CLASSES, color="grey", linestyle=":", linewidth=1)
        axis.set_title(f"relevance {p:g}")
        axis.set_xlabel("step")
        axis.grid(True, alpha=0.2)
    axes[0, 0].set_ylabel("validation accuracy, %")
    axes[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
