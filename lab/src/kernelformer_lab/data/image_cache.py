"""Images that have to be decoded: once into a cache that is mapped, or on demand where that would take too much."""

from __future__ import annotations

import hashlib
import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from kernelformer.files import check_regular, read_json, replacing, write_json
from kernelformer_lab.data.arrays import writing
from kernelformer_lab.data.sources import BadRows

if TYPE_CHECKING:
    from PIL.Image import Image

CACHED = 4 << 30  # bytes of decoded pixels of a split that are kept in the cache
_FORMAT = 1  # of the cache; to be raised when the same images come to be decoded otherwise
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # PIL knows more: for EPS it would run another program
_GREY = ("1", "L")  # PIL's modes that are grey, and those that are colour, without loss
_COLOUR = ("P", "RGB")
_WITH_LOSS = ("LA", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # converted where images are made to fit

Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]


def grey(images: Uint8) -> Uint8:
    """Make colours grey, 0.299 R + 0.587 G + 0.114 B rounded: (*, 3) -> (*, 1)."""
    red, green, blue = np.moveaxis(images, -1, 0).astype(np.uint32)
    intensity: Uint8 = ((299 * red + 587 * green + 114 * blue + 500) // 1000).astype(np.uint8)
    return intensity[..., None]


@dataclass(frozen=True)
class Form:
    """Required shape of an image, and whether others are converted to it.

    Args:
        channels: 3, or 1 for grey, which colour is turned into by `grey`.
        resize: scale images of another size until they cover this one, crop them in the middle, and convert those of
            another mode; else they are bad.
    """

    rows: int
    columns: int
    channels: int
    resize: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image as an array."""
        return self.rows, self.columns, self.channels

    def faults(self, image: Image) -> list[str]:
        """In what an image differs, by its head alone."""
        faults = []
        if image.size != (self.columns, self.rows):
            faults.append(f"it has {image.height} x {image.width} pixels, not {self.rows} x {self.columns}")
        if image.mode not in _COLOUR + (_GREY if self.channels == 1 else ()):
            wanted = "L or RGB" if self.channels == 1 else "RGB, as channels=3 says"
            faults.append(f"its mode is {image.mode}, not {wanted}")
        return faults

    def fatal(self, image: Image, faults: list[str]) -> str:
        """The reason why an image cannot be used; empty if it can."""
        if self.resize and image.mode in (*_GREY, *_COLOUR, *_WITH_LOSS):
            return ""
        return " and ".join(faults)

    def read(self, image: Image) -> Uint8:
        """(rows, columns, channels) of an image that can be used."""
        from PIL import ImageOps
        from PIL.Image import Resampling

        size = (self.columns, self.rows)
        if image.size != size:
            # JPEG decodes to a half, quarter or eighth at a fraction of the cost; twice the size is left to the filter.
            image.draft(None, (2 * self.columns, 2 * self.rows))
        image = image.convert("L" if self.channels == 1 and image.mode in (*_GREY, "LA") else "RGB")
        if image.size != size:
            image = ImageOps.fit(image, size, Resampling.BICUBIC)
        pixels = np.asarray(image).reshape(self.rows, self.columns, -1)
        return grey(pixels) if pixels.shape[-1] > self.channels else pixels


class Encoded(Protocol):
    """Images by number, each to be opened by PIL."""

    @property
    def where(self) -> object:
        """The folder, file or data set, for messages."""

    @property
    def key(self) -> str:
        """A text that differs for other images."""
        ...

    def __len__(self) -> int: ...

    def position(self, number: int) -> str:
        """The file or number of an image, for messages."""
        ...

    def open(self, number: int) -> Image:
        """An image whose head was read."""
        ...


def _opened(file: Path | str | BinaryIO) -> Image:
    """Open an image of one of `FORMATS`, independent of its name."""
    from PIL.Image import open as open_image

    return open_image(file, formats=FORMATS)


class Files:
    """Images of a folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.where, self.names = folder, names

    @property
    def key(self) -> str:
        """A hash of names, sizes and times."""
        digest = hashlib.blake2b(str(self.where.resolve()).encode(errors="surrogateescape"))
        for name in self.names:
            try:
                stat = os.stat(self.where / name)
                state = f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0"
            except OSError:  # a link to nowhere: a bad image
                state = f"{name}\0missing\0"
            digest.update(state.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def position(self, number: int) -> str:
        """The name of its file."""
        return self.names[number]

    def open(self, number: int) -> Image:
        """Open an image by PIL."""
        return _opened(check_regular(self.where / self.names[number]))


class Rows:
    """Images of a split of a Hugging Face data set.

    Args:
        dataset: the split, its images not decoded.
    """

    def __init__(self, where: object, dataset: Any, column: str) -> None:
        self.where, self.dataset, self.column = where, dataset, column
        self.key = f"{where} {dataset._fingerprint}"

    def __len__(self) -> int:
        return len(self.dataset)

    def position(self, number: int) -> str:
        """The number of its row."""
        return f"row {number}"

    def open(self, number: int) -> Image:
        """Open an image by PIL."""
        value = self.dataset[int(number)][self.column]
        if value is None:
            raise ValueError("the row has none")
        return _opened(io.BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"])


class Frames:
    """Images of an array, which are to be made to fit.

    Args:
        path: of the file that they come from.
        array: (N, rows, columns, channels) uint8.
    """

    def __init__(self, path: Path, array: Uint8) -> None:
        self.where, self.array = path, array
        stat = path.stat()
        self.key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    def __len__(self) -> int:
        return len(self.array)

    def position(self, number: int) -> str:
        """The number of the image."""
        return f"image {number}"

    def open(self, number: int) -> Image:
        """Make a PIL image of one or three channels."""
        from PIL.Image import fromarray

        frame = self.array[number]
        return fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


class OnDemand:
    """Images that are decoded whenever they are asked for: `images[numbers]` is (B, rows, columns, channels)."""

    def __init__(self, encoded: Encoded, form: Form) -> None:
        self.encoded, self.form = encoded, form

    def __getitem__(self, numbers: Int64) -> Uint8:
        out = np.empty((len(numbers), *self.form.shape), np.uint8)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes without Python's lock
            faults = list(pool.map(self._fill, numbers.tolist(), out))
        for number, fault in zip(numbers.tolist(), faults, strict=True):
            if fault:
                raise ValueError(f"{self.encoded.where}, {self.encoded.position(number)}: {fault}; mend or remove it.")
        return out

    def _fill(self, number: int, out: Uint8) -> str:
        return inspect_image(self.encoded, number, self.form, out)[0]


def inspect_image(encoded: Encoded, number: int, form: Form, out: Uint8 | None) -> tuple[str, int]:
    """Decode an image, or read its head only.

    Args:
        out: (rows, columns, channels), is filled; None: only the head is read.

    Returns:
        Why it cannot be used, or an empty text; and in how many respects it was made to fit.
    """
    try:
        with encoded.open(number) as image:
            faults = form.faults(image)
            fatal = form.fatal(image, faults) if faults else ""
            if out is not None and not fatal:
                out[:] = form.read(image)
            return fatal, len(faults)
    except Exception as problem:  # a damaged image raises all kinds
        return f"it is no whole image ({str(problem) or type(problem).__name__})", 0


@dataclass(frozen=True)
class Decoded:
    """Images of a split as they are used.

    Args:
        pixels: an array (N, rows, columns, channels) or `OnDemand`; of bad ones there is nothing to see.
        bad: numbers of those that cannot be used.
        fitted: how many were made to fit.
    """

    pixels: Any
    bad: Int64
    fitted: int


def decode(encoded: Encoded, form: Form, cache: Path, bad_rows: BadRows) -> Decoded:
    """Decode all images once, if that gives no more than `CACHED` bytes; else read all heads, and decode on demand.

    Pixels and the numbers of bad images are kept in the cache, by the names, sizes and times of the files: the next
    time is immediate.

    Args:
        bad_rows: is told of the bad ones; where it raises, nothing is kept.
    """
    name = hashlib.sha256(f"{_FORMAT} {form} {encoded.key}".encode(errors="surrogateescape")).hexdigest()[:24]
    facts, pixels = cache / f"images-{name}.json", cache / f"images-{name}.npy"
    shape = (len(encoded), *form.shape)
    whole = math.prod(shape) <= CACHED
    if not facts.exists() or (whole and not pixels.exists()):
        with writing(pixels):
            if whole:
                with replacing(pixels) as part, part.open("wb") as out:
                    head = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(out, head)
                    record = _inspect_all(encoded, form, bad_rows, out)
            else:
                record = _inspect_all(encoded, form, bad_rows, None)
            write_json(facts, record)  # last: it says that the pixels are whole
    try:
        record = read_json(facts)
        bad, fitted = [(int(number), str(why)) for number, why in record["bad"]], int(record["fitted"])
        images = mapped(pixels, shape) if whole else OnDemand(encoded, form)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"the cache file {facts}, or the .npy file beside it, cannot be used ({problem}); delete both, and they "
            f"will be made again."
        ) from None
    for number, why in bad:
        bad_rows.add(encoded.position(number), why)
    return Decoded(images, np.array([number for number, _ in bad], np.int64), fitted)


def _inspect_all(encoded: Encoded, form: Form, bad_rows: BadRows, out: BinaryIO | None) -> dict[str, Any]:
    """Inspect all images, and write their pixels if there is where to; of a bad one anything."""
    bad, fitted = [], 0
    pixels = None if out is None else np.zeros(form.shape, np.uint8)
    for number in range(len(encoded)):
        fault, changes = inspect_image(encoded, number, form, pixels)
        if fault:
            bad.append((number, fault))
            if not bad_rows.skip:
                bad_rows.add(encoded.position(number), fault)
        elif changes:
            fitted += 1
        if out is not None and pixels is not None:
            out.write(pixels.data)  # not through a map: a full disk would end the process without a word
    return {"bad": bad, "fitted": fitted}


def mapped(path: Path, shape: tuple[int, ...]) -> Uint8:
    """An array of the cache, without reading it."""
    array = np.lib.format.open_memmap(path, mode="r")  # of objects it takes none
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(f"it holds {array.dtype} {array.shape}, not uint8 {shape}")
    return np.asarray(array)
