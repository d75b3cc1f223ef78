"""The picture of the README: time and memory over the length, and what converted models keep of their quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelformer_lab.reports.pictures.drawing import EXACT, INK, LINEAR, THIRD, figure
from kernelformer_lab.reports.tables import conversion, speed
from kernelformer_lab.reports.tables.records import Records

RECALL, PLAIN = "smollm2-recall-heads", "smollm2-window"


@dataclass(frozen=True)
class Overview:
    """What the picture shows, from the records; what is not on record is left out.

    Args:
        seconds: of forward and backward by contender and length.
        cache: bytes kept while generating, by contender and length.
        quality: shares of the original's quality by what was measured.
    """

    seconds: dict[str, dict[int, float]]
    cache: dict[str, dict[int, float]]
    quality: dict[str, float]

    def words(self) -> str:
        """All numbers of the picture as text."""

        def lines(rows: dict[str, dict[int, float]], unit: float, sign: str) -> str:
            said = (
                f"{name}: " + ", ".join(f"{n}: {value / unit:.3g} {sign}" for n, value in row.items())
                for name, row in rows.items()
            )
            return "; ".join(said)

        quality = "; ".join(f"{name}: {value:.3f}" for name, value in self.quality.items())
        return (
            f"Time of forward and backward by tokens. {lines(self.seconds, 1, 's')}. "
            f"Memory kept while generating, by tokens. {lines(self.cache, 2**20, 'MiB')}. "
            f"Converted models, 1 = the original. {quality}."
        )


def _seconds(records: Records) -> dict[str, dict[int, float]]:
    bench = records.bench(speed.ATTENTION)
    rows = {}
    for shown, name in {"softmax": "sdpa", "favor+": "favor+"}.items():
        times = {n: bench.seconds(name, "bidirectional", n, backward=True) for n in speed.LENGTHS}
        rows[shown] = {n: x for n, x in times.items() if x is not None}
    return rows


def _cache(records: Records) -> dict[str, dict[int, float]]:
    rows: dict[str, dict[int, float]] = {"softmax": {}, "converted": {}}
    for row in records.get(speed.SERVING).get("rows", []):
        if row["kind"] == "one token" and row["peak"] is not None:
            rows["softmax" if row["attention"] == "sdpa" else "converted"][row["length"]] = row["peak"]
    return rows


def _share(records: Records, name: str) -> float | None:
    """Hidden numbers that a converted decoder found, over those that its original found."""
    right = [
        sum(sum(x["right"]) for x in conversion.passkeys(records, name, model).values())
        for model in ("converted", "original")
    ]
    return right[0] / right[1] if right[1] else None


def _quality(records: Records) -> dict[str, float]:
    shares: dict[str, float | None] = {}
    shares["MiniLM: cosine, untrained"] = conversion.untrained_cosine(records)
    window = records.get("conversion/minilm-window.json")
    shares["MiniLM: cosine, distilled"] = window["reports"]["distilled"]["cosine"] if window else None
    kept = conversion.perplexities(records, RECALL)
    for stage, shown in {"as converted": "untrained", "after LoRA": "distilled"}.items():
        shares[f"SmolLM2: perplexity, {shown}"] = kept["original"] / kept[stage] if kept else None
    shares["SmolLM2: recall, six heads exact"] = _share(records, RECALL)
    shares["SmolLM2: recall, all linear"] = _share(records, PLAIN)
    return {name: value for name, value in shares.items() if value is not None}


def overview(records: Records) -> Overview:
    """What the picture shows.

    Perplexity is the original's over the converted model's; recall is hidden numbers found over those that the original
    finds.
    """
    return Overview(_seconds(records), _cache(records), _quality(records))


def _curves(axis: Any, rows: dict[str, dict[int, float]], unit: float) -> None:
    """Two lines with their names beside their last points: exact attention above, a kernel below."""
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


def _bars(axis: Any, shares: dict[str, float]) -> None:
    """A bar for each share, the first on top, with its number at the right."""
    names = list(shares)[::-1]
    colours = [THIRD if "MiniLM" in x else LINEAR for x in names]
    axis.barh(names, [shares[x] for x in names], color=colours, height=0.6)
    for place, name in enumerate(names):
        axis.text(1.06, place, f"{shares[name]:.3f}", va="center")
    axis.axvline(1, color=INK, linestyle="--", linewidth=1)
    axis.set(xlim=(0, 1.3), xticks=[0, 0.5, 1])


def picture(records: Records, path: Path) -> None:
    """Draw it."""
    shown = overview(records)
    # Narrow, so that its letters can be read where a page shows it on a phone, at the width of the screen.
    with figure(path, shown.words(), (5.4, 5.6)) as drawn:
        above, below = drawn.subfigures(2, 1)
        (time, memory), quality = above.subplots(1, 2), below.subplots()
        _curves(time, shown.seconds, 1)
        time.set_title("time of a training step\nof attention, seconds")
        _curves(memory, shown.cache, 2**20)
        memory.set_title("memory kept\nwhile generating, MiB")
        _bars(quality, shown.quality)
        quality.set_title("converted models\n1 = the original")
