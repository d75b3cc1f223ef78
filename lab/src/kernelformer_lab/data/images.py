"""Images with labels by split, as batches of uint8: npz files, folders of image files, Hugging Face data sets."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernelformer.conversion.readers import unreadable
from kernelformer.errors import choice, flag, integer, positive_int
from kernelformer.files import check_inside, check_limit, check_regular, replacing
from kernelformer_lab.data.arrays import cache_folder, reading, writing
from kernelformer_lab.data.batching import Sample, Samples, check_limits, spread_evenly
from kernelformer_lab.data.files import walk
from kernelformer_lab.data.image_cache import Encoded, Files, Form, Frames, Int64, Rows, Uint8, decode, grey, mapped
from kernelformer_lab.data.sources import (
    ALIASES,
    SPLITS,
    BadRows,
    check_one_per_split,
    check_shares,
    divide,
    find_location,
    hub,
    missing_data,
    wrong_columns,
)

MEMORY = 1 << 30  # bytes of an array that are held in memory


class Head(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # damaged, encrypted and dishonest archives raise all kinds
        raise ValueError(f"{path} cannot be read as npz ({problem}); write it again by numpy.savez.") from None


def array_heads(path: Path) -> dict[str, Head]:
    """Shapes and types of all arrays of a file by name, without their values."""
    arrays: dict[str, Head] = {}
    try:
        check_regular(path)
    except OSError as problem:
        unreadable(path, problem)
    with _reading(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                with archive.open(info) as stream:
                    old = np.lib.format.read_magic(stream)[0] == 1
                    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(stream)
                    size = stream.tell() + math.prod(shape) * dtype.itemsize
                name = info.filename.removesuffix(".npy")
                arrays[name] = Head(shape, dtype)
                # Before memory is asked for; objects, which are never read, have no size of their own.
                if size != info.file_size and not dtype.hasobject:
                    raise ValueError(f"{name} says {arrays[name]}, {size:,} bytes, but has {info.file_size:,}")
    for name, head in arrays.items():
        size = math.prod(head.shape) * head.dtype.itemsize
        check_limit("max_unpacked_bytes", size, f"{name} of {path} unpacks to {size:,} bytes")
    return arrays


def array(path: Path, name: str) -> NDArray[Any]:
    """Read one array into memory."""
    with _reading(path), np.load(path, allow_pickle=False) as file:
        values: NDArray[Any] = file[name]
    return values


def _blocks(path: Path, name: str) -> Iterator[bytes]:
    """An array as it would be in a file of its own."""
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        while block := stream.read(1 << 20):
            yield block


def _free(folder: Path) -> int:
    """Bytes that a folder, which may not be there yet, has room for."""
    there = next(x for x in (folder, *folder.absolute().parents) if x.is_dir())
    return shutil.disk_usage(there).free


def pixels(path: Path, name: str, head: Head, cache: Path) -> Uint8:
    """An array of uint8: in memory up to `MEMORY` bytes, beyond that unpacked into the cache, once, and mapped."""
    if np.prod(head.shape, dtype=np.float64) <= MEMORY:
        return array(path, name)
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {name}"
    unpacked = cache / f"images-{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:24]}.npy"
    if not unpacked.exists():
        size, free = math.prod(head.shape), _free(cache)
        if size > free:
            raise ValueError(
                f"{name} of {path} unpacks to {size:,} bytes, and {cache} has room for {free:,}; make room, or give "
                f"another folder as cache, or set XDG_CACHE_HOME."
            )
        with writing(unpacked), replacing(unpacked) as part, part.open("wb") as out:
            for block in _blocks(path, name):
                out.write(block)
    with reading(unpacked):
        return mapped(unpacked, head.shape)


HASHED = 1 << 30  # bytes of a folder of images that a fingerprint reads
ENDINGS = (".png", ".jpg", ".jpeg")
_IMAGE, _LABEL = ("image", "img"), ("label", "labels")  # columns of the hub, the first that is there


def image_size(size: int | Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the option ``size``, an integer or two."""
    if isinstance(size, list | tuple):
        if len(size) != 2:
            raise ValueError(f"size must be an integer or [rows, columns], got {size!r}.")
        return positive_int("size", size[0]), positive_int("size", size[1])
    return positive_int("size", size), positive_int("size", size)


class Album(Samples):
    """Images of a split by index; a sample is pixels (rows, columns, channels) uint8, and labels where there are some.

    Args:
        pixels: what gives images by numbers, (B, rows, columns, channels) uint8.
        numbers: (N) int64, of the images of the split.
        labels: (N) int64, or None.
        channels: wanted; colour is made grey where it is 1.
    """

    def __init__(self, pixels: Any, numbers: Int64, labels: Int64 | None, channels: int) -> None:
        self.pixels, self.numbers, self.labels, self.channels = pixels, numbers, labels, channels

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, chosen: Int64) -> list[Sample]:
        """Images with their labels."""
        return self.samples(self.images(chosen), chosen)

    def images(self, indices: Int64) -> Uint8:
        """(B, rows, columns, channels), by one gather."""
        images: Uint8 = self.pixels[self.numbers[indices]]
        return grey(images) if images.shape[-1] > self.channels else images

    def samples(self, images: Uint8, indices: Int64) -> list[Sample]:
        """Images, changed or not, with their labels."""
        rows = torch.from_numpy(images).unbind()
        if self.labels is None:
            return [{"pixels": row} for row in rows]
        labels = self.labels[indices].tolist()
        return [{"pixels": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def most_frequent_accuracy(train: Album, other: Album) -> float:
    """Accuracy on another split of the class that training has most often."""
    assert train.labels is not None
    assert other.labels is not None
    return float((other.labels == np.bincount(train.labels).argmax()).mean())


class Read(NamedTuple):
    """Images of a file, a folder or a split of the hub.

    Args:
        pixels: of all images, an array or what gives images by numbers.
        labels: (N) of all images, or None.
        good: numbers of those that can be used.
    """

    pixels: Any
    labels: Int64 | None
    good: Int64


class Pictures:
    """Images by split, from one of these locations.

    - A folder with ``train.npz``, ``validation.npz`` and ``test.npz``, each ``images`` uint8 (N, rows, columns,
      channels) or (N, rows, columns), and ``labels`` (N) integers; or one such file, which is divided by the shares.
    - A folder with ``train/CLASS/*.png`` (or jpg, jpeg; deeper is fine too), ``validation/`` and ``test/``; labels are
      the positions of the class in the sorted names of the training classes. Without labels the images of a split are
      all that are anywhere in its folder, and a folder without splits is divided by the shares.
    - ``hub:NAME`` or ``hub:NAME:CONFIGURATION``: a Hugging Face data set with ``image`` (or ``img``) and ``label``.

    Splits may have the other names of `sources.ALIASES`. Where there is no validation split, a share of the training
    images is one, by a hash of (seed, number).

    Bad images (another size or mode, damaged, a label out of range) raise, or are left out and counted. Arrays of
    an npz are held in memory up to `MEMORY` bytes, and beyond that unpacked once into the cache and mapped.
    Images that have to be decoded are decoded once into the cache and mapped, up to `image_cache.CACHED` bytes of
    pixels; beyond that (ImageNet) at each use, after one reading of the heads of all files, which finds the bad ones,
    except those whose damage only shows when they are decoded.

    Args:
        data: the location; None is refused when it is read, not before.
        size: of the images, rows and columns.
        channels: 3, or 1 for grey; colour is made grey, 0.299 R + 0.587 G + 0.114 B rounded.
        classes: how many labels there are; None: labels are not wanted.
        resize: make images of another size or mode fit, as `Form` says, with a remark.
        limits: by split, at most so many images, spread evenly; None: all.
        skip_bad: leave bad images out, and say how many.
        test_share: of what is divided as a whole.
        cache: folder for decoded images; None: kernelformer in XDG_CACHE_HOME, or else in ~/.cache.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | None,
        *,
        size: int | Sequence[int],
        channels: int,
        classes: int | None,
        resize: bool,
        limits: Mapping[str, int | None],
        skip_bad: bool,
        validation_share: float,
        test_share: float,
        seed: int,
        cache: str | os.PathLike[str] | None,
    ) -> None:
        if integer("channels", channels) not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (red, green, blue), got {channels}.")
        self.form = Form(*image_size(size), channels, flag("resize", resize))
        self.classes = None if classes is None else integer("classes", classes, at_least=2)
        self.limits = check_limits(limits)
        self.skip_bad = flag("skip_bad", skip_bad)
        self.shares = check_shares(validation_share, test_share)
        self.seed = integer("seed", seed, at_least=0)
        self.cache = cache_folder(cache)
        named = "images" if classes is None else "images and labels"
        below = "" if classes is None else "CLASS/"
        self.layout = f"{named} in train.npz, or in train/{below}*.png, and the same for the other splits"
        self.location = find_location(data, self.layout)
        self.remarks: list[str] = []  # about what was read so far
        self._read: dict[str, Read] = {}
        self._walked: dict[Path, tuple[list[str], list[str]]] = {}
        self._albums: dict[str, Album] = {}

    def split(self, name: str) -> Album:
        """The images of a split; read once."""
        if choice("split", name, SPLITS) not in self._albums:
            self._albums[name] = self._split(name)
        return self._albums[name]

    def fingerprint(self) -> str:
        """A hash of names and all bytes (of a folder with more than `HASHED` bytes: of names and sizes)."""
        if isinstance(self.location, str):
            sets = sorted(hub(self.location).items())
            return f"{self.location}: " + ", ".join(f"{name} {len(x)} {x._fingerprint}" for name, x in sets)
        paths: dict[str, Path] = {}
        for path in self._sets().values():
            inside = [path / x for x in self._names(path)[0]] if path.is_dir() else [path]
            paths |= {os.path.relpath(x, self._path): x for x in inside}
        folders = any(x.suffix != ".npz" for x in paths.values())
        return _hash(paths, HASHED if folders else sys.maxsize)

    @property
    def _path(self) -> Path:
        if self.location is None:
            raise missing_data(self.layout)
        assert isinstance(self.location, Path)
        return self.location

    def _sets(self) -> dict[str, Any]:
        """Locations to read by the name of their split; "" is a whole that is to be divided."""
        if isinstance(self.location, str):
            return dict(hub(self.location))
        folder = self._path
        if not folder.is_dir():
            if folder.suffix != ".npz":
                raise ValueError(f"{folder} must be a folder or end in .npz, got {folder.suffix or 'nothing'!r}.")
            return {"": folder}
        stems = {x for names in ALIASES.values() for x in names}
        there = sorted(folder.iterdir())
        fits = [x for x in there if (x.is_dir() and x.name in stems) or (x.suffix == ".npz" and x.stem in stems)]
        check_one_per_split(folder, fits)
        check_inside(folder, fits)
        sets = {x.stem: x for x in fits}
        if not sets and self.classes is None and self._names(folder)[0]:
            return {"": folder}
        if not sets:
            names = ", ".join(x.name for x in there[:10]) or "nothing"
            raise ValueError(f"the folder {folder} has no train split, found {names}; it must hold {self.layout}.")
        return sets

    def _split(self, split: str) -> Album:
        sets = self._sets()
        own = {s: next((x for x in names if x in sets), None) for s, names in ALIASES.items()}
        name, shares = own[split], None
        if "" in sets:
            name, shares = "", self.shares
        elif split != "test" and own["validation"] is None and own["train"] is not None:
            name, shares = own["train"], {"validation": self.shares["validation"], "test": 0.0}
        if name is None:
            raise ValueError(
                f"{self.location} has no {split} split, found {', '.join(sorted(sets))}; add one, or evaluate another."
            )
        if name not in self._read:
            self._read[name] = self._all(sets[name])
        pixels, labels, good = self._read[name]
        numbers = good if shares is None else good[divide(len(good), shares, self.seed)[split]]
        if not len(numbers):
            share = "" if split == "train" else f", or give a larger {split}_share than {self.shares[split]}"
            raise ValueError(
                f"the {split} split of {self.location} is empty: {len(good)} good images; add some{share}."
            )
        numbers = numbers[spread_evenly(len(numbers), self.limits.get(split))]
        return Album(pixels, numbers, None if labels is None else labels[numbers], self.form.channels)

    def _all(self, origin: Any) -> Read:
        if isinstance(self.location, str):
            return self._of_hub(origin)
        return self._of_folder(origin) if origin.is_dir() else self._of_npz(origin)

    def _checked(self, where: object, labels: Int64 | None, *, pixels: Uint8 | None, encoded: Encoded) -> Read:
        """Images, decoded if there are no pixels yet, without the bad ones."""
        bad_rows, count = BadRows(where, self.skip_bad), len(encoded)
        good, images = np.ones(count, np.bool_), pixels
        if images is None and count:
            decoded = decode(encoded, self.form, self.cache, bad_rows)
            images, good[decoded.bad] = decoded.pixels, False
            if decoded.fitted:
                size = f"{self.form.rows} x {self.form.columns} and {self.form.channels} channels"
                self._remark(f"made {decoded.fitted:,} of {count:,} images of {where} fit: {size}")
        if labels is not None and self.classes is not None:
            for number in np.flatnonzero(good & ((labels < 0) | (labels >= self.classes))).tolist():
                good[number] = False
                reason = f"label must be an integer from 0 to {self.classes - 1}, got {labels[number]}"
                bad_rows.add(encoded.position(number), reason)
        for remark in bad_rows.remarks(int(good.sum())):
            self._remark(remark)
        return Read(images, labels, np.flatnonzero(good))

    def _remark(self, remark: str) -> None:
        if remark not in self.remarks:
            self.remarks.append(remark)

    def _of_npz(self, path: Path) -> Read:
        heads = array_heads(path)
        for name in ["images"] if self.classes is None else ["images", "labels"]:
            if name not in heads:
                raise ValueError(f"{path} has no array {name}, found {', '.join(heads) or 'none'}; add it.")
        head = heads["images"]
        shape = head.shape if len(head.shape) == 4 else (*head.shape, 1)
        rows, columns, channels = self.form.shape
        images = head.dtype == np.uint8 and len(shape) == 4 and shape[3] in (1, 3)
        fits = images and shape[1:3] == (rows, columns) and shape[3] in (channels, 3)
        if not (fits or (images and self.form.resize)):
            way = ", or give size and channels as they are, or resize=True" if images else ""
            raise ValueError(
                f"images of {path} must be uint8 (N, rows, columns, channels) = (N, {rows}, {columns}, {channels}), "
                f"got {head}; change the array{way}."
            )
        labels = None
        if self.classes is not None:
            if heads["labels"].dtype.kind not in "iu" or heads["labels"].shape != shape[:1]:
                raise ValueError(
                    f"labels of {path} must be integers, one for each of {shape[0]} images, got {heads['labels']}."
                )
            labels = array(path, "labels").astype(np.int64)
        frames = Frames(path, pixels(path, "images", head, self.cache).reshape(shape))
        return self._checked(path, labels, pixels=frames.array if fits else None, encoded=frames)

    def _of_folder(self, folder: Path) -> Read:
        names, others = self._names(folder)
        if others:
            ends = ", ".join(ENDINGS)
            what = f"no images ({ends})" if self.classes is None else f"no images ({ends}) in a folder of a class"
            self._remark(f"left out {len(others):,} files of {folder} that are {what}; the first: {others[0]}")
        labels = None
        if self.classes is not None:
            known = {name: i for i, name in enumerate(self._class_names())}
            classes = [x.split("/", 1)[0] for x in names]
            for name in dict.fromkeys(classes):
                if name not in known:
                    raise ValueError(f"{folder} has the class {name}, which training has not: {', '.join(known)}.")
            labels = np.array([known[x] for x in classes], np.int64)
        return self._checked(folder, labels, pixels=None, encoded=Files(folder, names))

    def _class_names(self) -> list[str]:
        """Sorted names of the folders of the training split."""
        train = next((self._path / x for x in ALIASES["train"] if (self._path / x).is_dir()), None)
        if train is None:
            raise ValueError(f"{self._path} has no folder train, whose folders name the classes; add it.")
        names = list(dict.fromkeys(x.split("/", 1)[0] for x in self._names(train)[0]))
        if self.classes is not None and len(names) > self.classes:
            raise ValueError(
                f"{train} has {len(names)} classes, got classes={self.classes}; give classes={len(names)}."
            )
        if len(names) != self.classes:
            self._remark(f"{train} has {len(names)} classes, the model {self.classes}")
        return names

    def _names(self, folder: Path) -> tuple[list[str], list[str]]:
        """Images of a folder, sorted by class and name, and what else there is; hidden files are not seen."""
        if folder in self._walked:
            return self._walked[folder]
        images: list[tuple[str, ...]] = []
        others: list[str] = []
        for where, files in walk(folder, self._path):
            parts = where.relative_to(folder).parts
            for file in files:
                if file.lower().endswith(ENDINGS) and (parts or self.classes is None):
                    images.append((*parts, file))
                else:
                    others.append("/".join((*parts, file)))
        check_inside(self._path, (folder.joinpath(*x) for x in images))
        self._walked[folder] = ["/".join(x) for x in sorted(images)], sorted(others)
        return self._walked[folder]

    def _of_hub(self, dataset: Any) -> Read:
        from datasets import Image

        image = next((x for x in _IMAGE if x in dataset.column_names), None)
        label = next((x for x in _LABEL if x in dataset.column_names), None)
        wanted = {"image": image} if self.classes is None else {"image": image, "label": label}
        lacking = [x for x, column in wanted.items() if column is None]
        if lacking or image is None:
            raise wrong_columns(self.location, lacking, dataset.column_names, " and ".join(wanted))
        if not isinstance(dataset.features[image], Image):
            raise ValueError(f"column {image} of {self.location} must hold images, got {dataset.features[image]}.")
        labels = None
        if self.classes is not None:
            values = list(dataset[label])
            if not all(isinstance(x, int) for x in values):
                odd = next(x for x in values if not isinstance(x, int))
                raise ValueError(f"column {label} of {self.location} must hold integers, got {odd!r}.")
            labels = np.array(values, np.int64)
        rows = Rows(f"{self.location}, {dataset.split}", dataset.cast_column(image, Image(decode=False)), image)
        return self._checked(rows.where, labels, pixels=None, encoded=rows)


def _hash(paths: Mapping[str, Path], limit: int) -> str:
    """Of names, sizes and bytes, or without the bytes where they are more than the limit."""
    sizes = {name: path.stat().st_size if path.exists() else -1 for name, path in paths.items()}
    size, digest = sum(sizes.values()), hashlib.blake2b(digest_size=16)
    for name, path in paths.items():
        digest.update(f"{name}\0{sizes[name]}\0".encode(errors="surrogateescape"))
        if size <= limit and sizes[name] >= 0:  # a link to nowhere is a bad image, not a bad folder
            _add(digest, path)
    names = ", ".join(list(paths)[:3]) + (", ..." if len(paths) > 3 else "")
    return f"{names}: {len(paths)} files, {size} bytes, blake2b {digest.hexdigest()}"


def _add(digest: hashlib.blake2b, path: Path) -> None:
    """All bytes of a file, not all at once."""
    try:
        with check_regular(path).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}; give a readable file.") from None
