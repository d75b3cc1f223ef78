"""Pictures of README.md and docs: measured ones from the records, explaining ones computed by the library itself.

They have no background, and inks that can be read on light pages and on dark ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from kernelformer.feature_maps import FeatureMap, PositiveMap
from kernelformer.kernels import softmax_kernel
from kernelformer.modules import build_attention
from pages import conversion, speed
from pages.records import Records

INK = "#7d8590"  # contrast above 3.5 on white and on the darkest pages in use
EXACT, LINEAR, THIRD = "#d55e00", "#1a7fc3", "#009e73"
Numbers = dict[str, dict[int, float]]  # by name and length


def write_pictures(folder: Path) -> list[Path]:
    """Draw all pictures into ``docs/images`` beside the folder of the records, and return their paths."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the records.")
    place = folder.resolve().parent / "docs" / "images"
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{name}.svg" for name in PICTURES]
    for path in paths:
        PICTURES[path.stem](Records(folder), path)
    return paths


@contextmanager
def figure(path: Path, about: str, size: tuple[float, float]) -> Iterator[Any]:
    """Make a figure that is saved as SVG when the block ends; the same input gives the same file.

    Args:
        path: of the file.
        about: what it shows, in words, with its numbers; it is kept in the file.
        size: in inches.
    """
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    rc: dict[Any, Any] = {
        **dict.fromkeys((*inked, "grid.color", "legend.labelcolor"), INK),
        **{"axes.facecolor": "none", "font.size": 12.5, "axes.titlesize": 13.5, "grid.alpha": 0.25},
        **{"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.2, "lines.markersize": 6},
        **{"legend.frameon": False, "svg.hashsalt": path.stem, "svg.fonttype": "path"},
    }
    with mpl.rc_context(rc):
        drawn = Figure(figsize=size, layout="constrained", facecolor="none")
        yield drawn
        about_it = {"Date": None, "Creator": "kernelformer", "Description": about}
        drawn.savefig(path, format="svg", dpi=150, metadata=about_it)


def box(axis: Any, corner: tuple[float, float], size: tuple[float, float], text: str, colour: str) -> None:
    """Draw a rectangle with a text in it, for a matrix or a state.

    Args:
        axis: to draw on.
        corner: the lower left one.
        size: width and height.
        text: in its middle.
        colour: of the edge, and faintly of the inside.
    """
    axis.add_patch(Rectangle(corner, *size, facecolor=f"{colour}30", edgecolor=colour, linewidth=1.6))
    middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
    axis.text(*middle, text, ha="center", va="center", fontsize=12)


def bare(axis: Any, width: float, height: float, title: str) -> None:
    """Turn an axis into one without scales, for a drawing."""
    axis.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[], title=title)
    axis.spines[:].set_visible(False)
    axis.set_aspect("equal")


def overview_numbers(records: Records) -> tuple[Numbers, Numbers, dict[str, float]]:
    """Numbers of the overview, without what is not on record.

    Returns:
        Seconds of forward and backward by contender and length; bytes kept while generating; shares of the original's
        quality by what was measured: perplexity is the original's over the converted model's, recall is hidden numbers
        found over those that the original finds.
    """
    bench, seconds, cache = records.bench(speed.ATTENTION), Numbers(), Numbers(softmax={}, converted={})
    for shown, name in {"softmax": "sdpa", "favor+": "favor+"}.items():
        times = {n: bench.seconds(name, "bidirectional", n, backward=True) for n in speed.LENGTHS}
        seconds[shown] = {n: x for n, x in times.items() if x is not None}
    for row in records.rows(speed.SERVING):
        if row["kind"] == "one token" and row["peak"] is not None:
            cache["softmax" if row["attention"] == "sdpa" else "converted"][row["length"]] = row["peak"]
    shares = {"MiniLM: cosine, untrained": conversion.untrained_cosine(records)}
    window = records.get("conversion/minilm-window.json")
    shares["MiniLM: cosine, distilled"] = window["reports"]["distilled"]["cosine"] if window else None
    recall, plain = "smollm2-recall-heads", "smollm2-window"
    kept = conversion.perplexities(records, recall)
    for stage, shown in {"as converted": "untrained", "after LoRA": "distilled"}.items():
        shares[f"SmolLM2: perplexity, {shown}"] = kept["original"] / kept[stage] if kept else None
    for name, shown in {recall: "six heads exact", plain: "all linear"}.items():
        converted, original = (
            sum(sum(x["right"]) for x in conversion.hidden_numbers(records, name, model).values())
            for model in ("converted", "original")
        )
        shares[f"SmolLM2: recall, {shown}"] = converted / original if original else None
    return seconds, cache, {name: x for name, x in shares.items() if x is not None}


def overview_words(seconds: Numbers, cache: Numbers, quality: dict[str, float]) -> str:
    """All numbers of the overview as text."""

    def lines(rows: Numbers, unit: float, sign: str) -> str:
        return "; ".join(
            f"{name}: " + ", ".join(f"{n}: {value / unit:.3g} {sign}" for n, value in row.items())
            for name, row in rows.items()
        )

    return (
        f"Time of forward and backward by tokens. {lines(seconds, 1, 's')}. "
        f"Memory kept while generating, by tokens. {lines(cache, 2**20, 'MiB')}. "
        f"Converted models, 1 = the original. {'; '.join(f'{name}: {x:.3f}' for name, x in quality.items())}."
    )


def overview(records: Records, path: Path) -> None:
    """Time and memory over the length, and what converted models keep of their quality."""
    numbers = overview_numbers(records)
    seconds, cache, shares = numbers
    # Narrow, so that its letters can be read where a page shows it on a phone, at the width of the screen.
    with figure(path, overview_words(*numbers), (5.4, 5.6)) as drawn:
        above, below = drawn.subfigures(2, 1)
        (time, memory), quality = above.subplots(1, 2), below.subplots()
        _curves(time, seconds, 1)
        time.set_title("time of a training step\nof attention, seconds")
        _curves(memory, cache, 2**20)
        memory.set_title("memory kept\nwhile generating, MiB")
        names = list(shares)[::-1]
        colours = [THIRD if "MiniLM" in x else LINEAR for x in names]
        quality.barh(names, [shares[x] for x in names], color=colours, height=0.6)
        for place, name in enumerate(names):
            quality.text(1.06, place, f"{shares[name]:.3f}", va="center")
        quality.axvline(1, color=INK, linestyle="--", linewidth=1)
        quality.set(xlim=(0, 1.3), xticks=[0, 0.5, 1], title="converted models\n1 = the original")


def _curves(axis: Any, rows: Numbers, unit: float) -> None:
    """Draw two lines with their names beside their last points: exact attention above, a kernel below."""
    lengths = sorted({n for row in rows.values() for n in row})
    shifts = ((-10, -1), (-2, 8))
    for (name, row), colour, shift in zip(rows.items(), (EXACT, LINEAR), shifts, strict=True):
        if row:
            axis.plot(row.keys(), [x / unit for x in row.values()], marker="o", color=colour)
            end = (max(row), row[max(row)] / unit)
            axis.annotate(name, end, xytext=shift, textcoords="offset points", ha="right", color=colour)
    axis.set(xscale="log", yscale="log", xlabel="tokens")
    axis.set_xticks(lengths, [f"{x // 1024}k" for x in lengths])
    axis.minorticks_off()
    axis.margins(y=0.12)
    axis.grid()


TOKENS, DIM, NORM = 48, 16, 1.7


def smooth_tokens() -> tuple[Tensor, Tensor]:
    """Make queries and keys (1, 1, L, D) that turn slowly along the sequence, so that their weights have a shape.

    After scaling they have the norm `NORM`.
    """
    gen = torch.Generator().manual_seed(0)
    time = torch.arange(TOKENS).unsqueeze(-1) / TOKENS
    rates = torch.arange(1, DIM // 2 + 1) * math.pi
    turned = torch.cat([torch.cos(time * rates), torch.sin(time * rates)], -1) / torch.arange(1, DIM // 2 + 1).repeat(2)
    noise = 0.12 * torch.randn(2, TOKENS, DIM, generator=gen)
    q, k = (NORM * DIM**0.25 * x / x.norm(dim=-1, keepdim=True) for x in turned + noise)
    return q[None, None], k[None, None]


@torch.no_grad()
def kernel(records: Records, path: Path) -> None:
    """Weights of exact attention, and of `favor+` with more and more features."""
    q, k = smooth_tokens()
    exact = build_attention("softmax", head_dim=DIM, num_heads=1).attention_matrix(q, k)
    shown = {"softmax": exact}
    for count in (16, 64, 1024):
        core = build_attention("favor+", head_dim=DIM, num_heads=1, num_features=count)
        shown[f"favor+, m = {count}"] = core.attention_matrix(q, k)
    about = f"Attention weights of {TOKENS} queries (rows) for {TOKENS} keys (columns): {', '.join(shown)}."
    with figure(path, about, (11, 3.5)) as drawn:
        for axis, (name, weights) in zip(drawn.subplots(1, len(shown)), shown.items(), strict=True):
            axis.imshow(weights[0, 0].numpy(), cmap="viridis", vmin=0, vmax=exact.max().item())
            error = ((weights - exact).norm() / exact.norm()).item()
            axis.set_title(name if name == "softmax" else f"{name}\nerror {error:.2f}")
            axis.set(xticks=[], yticks=[], xlabel="keys")
        drawn.axes[0].set_ylabel("queries")


@torch.no_grad()
def feature_map(records: Records, path: Path) -> None:
    """The kernel of a query and keys on a circle round the origin, by formula and by features; the range over draws."""
    angles = torch.linspace(-math.pi, math.pi, 121, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    about = "exp(q . k) over the angle between q and k, exactly and by 8 and 64 positive features, at norms 1 and 2."
    with figure(path, about, (11, 3.4)) as drawn:
        for axis, norm in zip(drawn.subplots(1, 2), (1.0, 2.0), strict=True):
            keys = norm * torch.nn.functional.pad(circle, (0, DIM - 2))
            query = keys[60:61]  # at the angle 0
            for count, colour, alpha in ((8, THIRD, 0.25), (64, LINEAR, 0.4)):
                phi = PositiveMap(head_dim=DIM, num_heads=1, num_features=count)
                draws = torch.stack([_estimate(phi, query, keys, draw) for draw in range(40)])
                low, high = draws.quantile(0.1, 0), draws.quantile(0.9, 0)
                axis.fill_between(angles, low, high, color=colour, alpha=alpha, label=f"m = {count}, 80% of draws")
            exact = softmax_kernel(query, keys).flatten()
            axis.plot(angles, exact, color=EXACT, label="exp(q · k)")
            axis.set(title=f"norm of q and k: {norm:g}", xlabel="angle between q and k", xticks=[-math.pi, 0, math.pi])
            axis.set_xticklabels(["-π", "0", "π"])
            axis.set_ylim(0, 2 * exact.max().item())
            axis.axhline(0, color=INK, linewidth=0.8)
        drawn.axes[1].legend(loc="upper right")


def _estimate(phi: FeatureMap, query: Tensor, keys: Tensor, draw: int) -> Tensor:
    """The kernel of a query (1, D) and keys (S, D) by one draw of a map."""
    phi.resample(draw)
    phi_q, phi_k = phi(query[None, None], role="query"), phi(keys[None, None], role="key")
    product: Tensor = (phi_q @ phi_k.mT).flatten()
    return product


def algorithm(records: Records, path: Path) -> None:
    """The same product in two orders: through a matrix of L x L, or through one of m x d."""
    about = "(phi(Q) phi(K)^T) V needs an L x L matrix; phi(Q) (phi(K)^T V) needs one of m x d, whatever the length."
    with figure(path, about, (11, 3.2)) as drawn:
        left, right = drawn.subplots(1, 2)
        bare(left, 10.5, 5.6, "weights first: L x L numbers")
        box(left, (0, 0.5), (4.6, 4.6), "φ(Q) φ(K)ᵀ\n\nL x L", EXACT)
        left.text(5.1, 2.8, "·", fontsize=20, ha="center", va="center")
        box(left, (5.6, 0.5), (1.1, 4.6), "V\n\nL x d", THIRD)
        left.text(7.2, 2.8, "=", fontsize=16, ha="center", va="center")
        box(left, (7.7, 0.5), (1.1, 4.6), "out\n\nL x d", INK)
        bare(right, 10.5, 5.6, "keys and values first: m x d numbers")
        box(right, (0, 0.5), (1.5, 4.6), "φ(Q)\n\nL x m", LINEAR)
        right.text(2.0, 2.8, "·", fontsize=20, ha="center", va="center")
        box(right, (2.5, 2.0), (1.5, 1.5), "m x d", THIRD)
        right.text(4.5, 2.8, "=", fontsize=16, ha="center", va="center")
        box(right, (5.0, 0.5), (1.1, 4.6), "out\n\nL x d", INK)
        right.text(6.9, 2.8, "with", ha="center", va="center")
        box(right, (7.6, 2.0), (1.2, 1.5), "φ(K)ᵀ V", THIRD)
        right.text(8.2, 1.2, "one pass over\nkeys and values", ha="center", va="center", fontsize=9)


# Where a call goes: an implementation, the calls that it serves, and its colour.
IMPLEMENTATIONS = (
    ("operators", "positive maps on a CPU: all keys, causal,\nnear and far, bias within a distance", LINEAR),
    (
        "plain",
        "operations of torch: accelerators, export, signed\nmaps, gates, slopes, grids, torch.func",
        THIRD,
    ),
    ("short", "few tokens: the matrix of weights", EXACT),
    ("fft", "a bias over many distances: Fourier transforms", EXACT),
    ("step", "one token from a state: every method", THIRD),
)


def implementations(records: Records, path: Path) -> None:
    """Draw who calls whom, from a layer to the implementations of attention."""
    about = (
        "Layer and core check a call, ranks and packed rows split it, dispatch chooses, a step is called by itself: "
        + "; ".join(f"{name}: {serves}".replace("\n", " ") for name, serves, _ in IMPLEMENTATIONS)
    )
    with figure(path, about, (11, 4.6)) as drawn:
        axis = drawn.subplots()
        bare(axis, 25.2, 10.4, "")
        box(axis, (0.1, 6.9), (5.0, 2.2), "layer\nprojections", INK)
        box(axis, (0.1, 3.9), (5.0, 2.2), "core\nchecks, map", INK)
        box(axis, (0.1, 0.9), (5.0, 2.2), "ranks, packed rows\nsplit and join calls", INK)
        box(axis, (7.2, 3.9), (4.6, 2.2), "dispatch\nchooses", INK)
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
        for start, end in (((2.5, 6.9), (2.5, 6.1)), ((5.0, 5.0), (7.2, 5.0))):
            axis.annotate("", end, start, arrowprops=arrow)
        axis.annotate("", (2.5, 3.1), (2.5, 3.9), arrowprops=arrow | {"arrowstyle": "<|-|>"})
        for number, (name, serves, colour) in enumerate(IMPLEMENTATIONS):
            low = 8.5 - 2.05 * number
            caller = (5.0, 4.2) if name == "step" else (11.8, 5.0)
            axis.annotate("", (13.6, low + 0.8), caller, arrowprops=arrow)
            box(axis, (13.6, low), (3.0, 1.6), name, colour)
            axis.text(16.9, low + 0.8, serves, va="center", fontsize=10)


LENGTHS = (256, 1024, 4096, 16384)


@torch.no_grad()
def kept_bytes() -> dict[str, list[int]]:
    """Measure the bytes that a stream keeps after so many tokens, by the states of the library itself."""
    sizes, one = {}, torch.zeros(1, 8, 1, 64)
    for method in ("softmax", "favor+"):
        _, state = build_attention(method, head_dim=64, num_heads=8, num_features=256).step(one, one, one, None)
        # The state of exact attention is its keys and values, each token as large as the first.
        sizes[method] = [state.nbytes * (n if method == "softmax" else 1) for n in LENGTHS]
    return sizes


def state(records: Records, path: Path) -> None:
    """The state that is passed from chunk to chunk, and what a stream keeps by its length."""
    sizes = kept_bytes()
    said = "; ".join(f"{name}: {', '.join(map(str, row))}" for name, row in sizes.items())
    about = f"Bytes kept after {', '.join(map(str, LENGTHS))} tokens, 8 heads of 64, 256 features. {said}."
    with figure(path, about, (11, 3.4)) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=(1.3, 1))
        bare(left, 10, 5.2, "a long text in chunks")
        arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.6}
        for place in range(3):
            x = 0.2 + 3.3 * place
            box(left, (x, 2.7), (2.2, 1.1), f"tokens\nchunk {place + 1}", LINEAR)
            box(left, (x + 0.5, 0.6), (1.2, 1.1), "state", THIRD)
            left.annotate("", (x + 1.1, 1.7), (x + 1.1, 2.7), arrowprops=arrow)
            if place < 2:
                left.annotate("", (x + 3.8, 1.15), (x + 1.7, 1.15), arrowprops=arrow)
                left.annotate("", (x + 3.5, 2.7), (x + 1.7, 1.6), arrowprops=arrow)
        for (name, row), colour in zip(sizes.items(), (EXACT, LINEAR), strict=True):
            right.plot(LENGTHS, [x / 2**20 for x in row], marker="o", color=colour, label=name)
        right.set(xscale="log", yscale="log", xlabel="tokens so far", title="kept for the next token, MiB")
        right.set_xticks(LENGTHS, [str(x) for x in LENGTHS])
        right.minorticks_off()
        right.grid()
        right.legend()


LENGTH, WINDOW, SINKS = 24, 5, 2


@torch.no_grad()
def near_parts(causal: bool) -> Tensor:
    """For each query and key (L, S): 0 not seen, 1 by the kernel, 2 exactly; read off the library's own weights."""
    q = k = torch.zeros(1, 1, LENGTH, 8)  # all logits are 0: a weight is positive where a key is seen
    options = {"head_dim": 8, "num_heads": 1, "window": WINDOW, "sinks": SINKS}
    near = build_attention("local", **options).attention_matrix(q, k, is_causal=causal) > 0
    seen = build_attention("favor+", num_features=16, **options).attention_matrix(q, k, is_causal=causal) > 0
    return (seen.int() + near.int())[0, 0]


def near_far(records: Records, path: Path) -> None:
    """Keys of a window and sinks, and all others, causal and bidirectional."""
    about = (
        f"Keys that a query sees exactly (window {WINDOW}, {SINKS} sinks) and by the kernel, causal and bidirectional."
    )
    with figure(path, about, (9, 4.4)) as drawn:
        colours = ListedColormap(["#00000000", f"{LINEAR}70", EXACT])
        for axis, causal in zip(drawn.subplots(1, 2), (True, False), strict=True):
            cells = axis.pcolormesh(near_parts(causal).numpy(), cmap=colours, vmin=0, vmax=2, edgecolors="#7d859030")
            cells.set_rasterized(True)
            axis.invert_yaxis()
            axis.set_aspect("equal")
            title = "causal" if causal else "bidirectional"
            axis.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries", title=title)
        shown = {"exactly, by softmax": EXACT, "by the kernel": f"{LINEAR}70"}
        patches = [Patch(facecolor=colour, label=name) for name, colour in shown.items()]
        drawn.legend(handles=patches, loc="outside lower center", ncols=2)


PICTURES: dict[str, Callable[[Records, Path], None]] = {
    "overview": overview,
    "kernel": kernel,
    "feature-map": feature_map,
    "algorithm": algorithm,
    "implementations": implementations,
    "state": state,
    "near-far": near_far,
}
