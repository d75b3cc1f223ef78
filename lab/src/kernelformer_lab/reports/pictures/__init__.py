"""Pictures of README.md and docs/: measured ones from the records, explaining ones computed by the library itself."""

from __future__ import annotations

from pathlib import Path

from kernelformer_lab.reports.pictures import algorithms, kernels, overview, windows
from kernelformer_lab.reports.pictures.drawing import Picture
from kernelformer_lab.reports.tables.records import Records

PICTURES: dict[str, Picture] = {
    "overview": overview.picture,
    "kernel": kernels.matrices,
    "feature-map": kernels.estimates,
    "algorithm": algorithms.products,
    "state": algorithms.stream,
    "near-far": windows.near_and_far,
}


def write_pictures(folder: Path) -> list[Path]:
    """Draw all pictures into ``docs/images`` beside the folder of the records, and return their paths.

    Args:
        folder: of the records.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one with the records.")
    records = Records(folder)
    place = folder.resolve().parent / "docs" / "images"
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in PICTURES.items():
        paths.append(place / f"{name}.svg")
        picture(records, paths[-1])
    return paths
