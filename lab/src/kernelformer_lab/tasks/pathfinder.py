"""Drawings of dashed paths with two marked ends, many at a time: the images of Pathfinder."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.errors import choice, integer, number, positive_int
from kernelformer_lab.data.arrays import Arrays, cached_arrays
from kernelformer_lab.data.batching import Sample
from kernelformer_lab.data.images import Album, Pictures, image_size, most_frequent_accuracy
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.tasks.base import Classification, DataOption, FixedSamples, MadeCache, SkipOption
from kernelformer_lab.tasks.kinds import labels_of, pixel_tokens

LEVELS = 15  # grey values are multiples of 255 / 15, so that two of them fit into a byte
GREY = np.uint8(255 // LEVELS)
_THICK = 0.5  # half the width of a dash
_FAINT = 0.15  # what covers less of a pixel is not drawn
_SMALLEST = 1.25  # radius of a disc with a pixel that it covers all of, wherever it is
_LINK = 1.5  # ink of consecutive dashes is never further apart than the gap and this: end to pixel, pixel to end
_OWN = 4 / 3  # dashes of a path which do not follow each other are at least so many pitches apart
_PROPOSALS = 600  # dashes tried for one path
_TAIL = 32  # the last share of the drawings is given up: steps of a few cost nearly as much as steps of all
_VAIN, _BACK = 6, 3  # after so many in vain so many dashes are taken back
_PAIRS = np.array([(0, 1), (2, 3), (0, 2), (0, 3), (1, 2), (1, 3)])  # of the four ends; the first two are of one path
_ONE, _TWO = np.repeat([0, 1], 4), np.tile([2, 3, 4, 5], 2)  # a pair of one path and a pair of two
# They look alike if these differ by no more: distance, as a share of the length of a path; distance of the middle from
# the image's, as a share of its size; sum of the cosines of the directions in which the paths leave.
_FAR, _OFF, _TOWARDS = 0.075, 0.15, 1.2

Bool = NDArray[np.bool_]
Uint8 = NDArray[np.uint8]
Ints = NDArray[np.intp]
Points = NDArray[np.complex128]  # column + 1j row; directions have the absolute value 1


@dataclass(frozen=True)
class Rules:
    """Rules of the drawing; the defaults are those of Long Range Arena's 32 x 32 images. Lengths are in pixels."""

    rows: int = 32
    columns: int = 32
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    dash_length: float = 2.0
    gap: float = 1.0
    bend: float = 1.0
    marker_radius: float = 1.5
    contrast: float = 0.75

    def __post_init__(self) -> None:
        integer("dashes", self.dashes, at_least=2)
        integer("distractors", self.distractors, at_least=0)
        integer("distractor_dashes", self.distractor_dashes, at_least=1)
        number("dash_length", self.dash_length, at_least=2 * _THICK)
        number("gap", self.gap, at_least=0)
        number("marker_radius", self.marker_radius, at_least=_SMALLEST)
        if not 0 < number("bend", self.bend) <= math.pi / 2:
            raise ValueError(f"bend must be above 0 and at most pi/2 = 1.57, in radians, got {self.bend}.")
        if not 0 < number("contrast", self.contrast) <= 0.9:
            raise ValueError(f"contrast must be above 0 and at most 0.9, to tell markers by, got {self.contrast}.")
        if self.dashes * self.pitch - self.gap <= self.apart + 1:
            raise ValueError(
                f"a path must be longer than its markers: above {self.apart + 1:g} pixels, got "
                f"{self.dashes * self.pitch - self.gap:g}, with dashes={self.dashes}, dash_length={self.dash_length}, "
                f"gap={self.gap} and marker_radius={self.marker_radius}."
            )
        least = 2 * math.ceil(self.apart)
        if min(self.rows, self.columns) < least:
            raise ValueError(
                f"size must be at least {least} x {least} for two paths with marker_radius={self.marker_radius}, "
                f"got {self.rows} x {self.columns}."
            )

    @cached_property
    def half(self) -> float:
        """Half the length of a dash without its round ends."""
        return self.dash_length / 2 - _THICK

    @cached_property
    def pitch(self) -> float:
        """Distance from dash to dash."""
        return self.dash_length + self.gap

    @cached_property
    def reach(self) -> float:
        """Ink of a path is joined by steps of at most this; ink of different paths is further apart."""
        return self.gap + _LINK

    @cached_property
    def apart(self) -> float:
        """Middles of markers are at least so far from each other: there is something between them."""
        return 2 * self.marker_radius + 2.5

    @cached_property
    def border(self) -> int:
        """Cells around the image, where nothing may be: no stroke that is tried, and no reach, goes beyond them."""
        widest = max(self.half + _THICK, self.marker_radius) + 0.5
        return max(math.ceil(self.half) + math.ceil(widest), math.ceil(self.reach))

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, borders included."""
        return self.rows + 2 * self.border, self.columns + 2 * self.border

    @cached_property
    def width(self) -> int:
        """Number of cells of a row."""
        return self.shape[1]

    @cached_property
    def cells(self) -> int:
        """Number of cells of an image, borders included."""
        return math.prod(self.shape)

    @cached_property
    def attempts(self) -> int:
        """Drawings begun at once, at most: few enough for the memory, however large they are."""
        return min(max((1 << 25) // self.cells, 64), 16384)


class Drawings(NamedTuple):
    """Images with their labels.

    Args:
        images: (N, rows, columns) uint8.
        labels: (N) uint8; 1: both markers are on one path.
    """

    images: Uint8
    labels: Uint8


def _strokes(rules: Rules, at: Points, way: Points, half: float, radius: float) -> tuple[Ints, NDArray[np.float64]]:
    """Cells around strokes, (N, P), and their squared distances from the middle line; a disc has half = 0."""
    span = math.ceil(half + radius + 0.5)
    near = np.arange(1 - span, span + 1)
    left, top = np.floor(at.real), np.floor(at.imag)
    x, y = (near - (at.real - left)[:, None])[:, None, :], (near - (at.imag - top)[:, None])[:, :, None]
    if half:
        c, s = way.real[:, None, None], way.imag[:, None, None]
        x, y = np.maximum(np.abs(x * c + y * s) - half, 0), y * c - x * s
    first = (top * rules.width + left).astype(np.intp)
    cells = first[:, None] + (near[:, None] * rules.width + near).reshape(-1)
    return cells, (x * x + y * y).reshape(len(at), len(near) ** 2)


def _free(rules: Rules, blocked: Bool, rows: Ints, at: Points, way: Points, half: float, radius: float) -> Bool:
    """True for strokes that would put no ink on a blocked cell of these drawings."""
    cells, distance = _strokes(rules, at, way, half, radius)
    cells += rows[:, None] * rules.cells
    hit = blocked.reshape(-1)[cells] & (distance <= (radius + 0.5 - _FAINT) ** 2)
    return np.logical_not(hit.any(axis=1))


def _draw(rules: Rules, ink: Uint8, at: Points, way: Points, half: float, radius: float, grey: float) -> None:
    """Draw one stroke in each of the drawings (N, cells); grey falls to 0 over the pixel at its edge."""
    cells, distance = _strokes(rules, at, way, half, radius)
    cover = np.clip(radius + 0.5 - np.sqrt(distance), 0, 1)
    cover[distance > (radius + 0.5 - _FAINT) ** 2] = 0
    cells += np.arange(len(ink))[:, None] * rules.cells
    flat, level = ink.reshape(-1), np.ceil(cover * (grey * LEVELS)).astype(np.uint8)
    flat[cells] = np.maximum(flat[cells], level)


class DashedPath(NamedTuple):
    """A path in each of N drawings: middles of its dashes and directions, (N, T)."""

    spots: Points
    ways: Points

    def taken(self, rows: Ints) -> DashedPath:
        """The paths of some of the drawings."""
        return DashedPath(self.spots[rows], self.ways[rows])

    def ends(self, rules: Rules) -> tuple[Points, Points]:
        """Both ends and the directions inward, (N, 2)."""
        inward = self.ways[:, [0, -1]] * np.array([1, -1])
        return self.spots[:, [0, -1]] - rules.half * inward, inward


class _Walk(NamedTuple):
    """Paths that grow: middles of dashes (N, T), how many there are (N), and whether the ends need room for markers."""

    spots: Points
    have: Ints
    marked: bool


def _propose(rng: Generator, rules: Rules, last: Points, before: Points, start: Bool) -> tuple[Points, Points]:
    """Middles and directions of next dashes, after last ones; or of first ones, anywhere."""
    u = rng.random((3, len(last)))
    angle = np.where(start, 2 * np.pi * u[0], (2 * u[0] - 1) * rules.bend)
    way = (np.cos(angle) + 1j * np.sin(angle)) * np.where(start, 1, before)
    anywhere = rules.border * (1 + 1j) + (rules.columns - 1) * u[1] + 1j * (rules.rows - 1) * u[2]
    # A path bends in the middle of a gap.
    return np.where(start, anywhere, last + rules.pitch / 2 * (before + way)), way


def _good(rules: Rules, blocked: Bool, walk: _Walk, todo: Ints, at: Points, way: Points) -> Ints:
    """Mask of proposals within the image, away from all that is blocked and from their own path."""
    t, x, y = walk.have[todo], at.real - rules.border, at.imag - rules.border
    k: Ints = np.flatnonzero((x >= 0) & (x <= rules.columns - 1) & (y >= 0) & (y <= rules.rows - 1))
    # The cheapest test first: most that fail do so here.
    middle = np.rint(at[k].imag).astype(np.intp) * rules.width + np.rint(at[k].real).astype(np.intp)
    k = k[~blocked.reshape(-1)[todo[k] * rules.cells + middle]]
    own = walk.spots[todo[k]] - at[k, None]
    apart = own.real**2 + own.imag**2 >= (_OWN * rules.pitch) ** 2
    k = k[(apart | (np.arange(own.shape[1]) >= t[k, None] - 1)).all(1)]
    k = k[_free(rules, blocked, todo[k], at[k], way[k], rules.half, _THICK)]
    if walk.marked:
        first, last = t[k] == 0, t[k] == own.shape[1] - 1
        end, room = first | last, np.ones(len(k), np.bool_)
        tip = at[k] + np.where(first, -rules.half, rules.half) * way[k]
        room[end] = _free(rules, blocked, todo[k][end], tip[end], way[k][end], 0, rules.marker_radius)
        k = k[room]
    return k


def _grow(rng: Generator, rules: Rules, blocked: Bool, dashes: int, marked: bool) -> tuple[Ints, DashedPath]:
    """Grow a path in each of N drawings, dash by dash; dashes are taken back at a dead end.

    Args:
        rng: of all proposals.
        rules: of the images.
        blocked: (N, cells), where no ink may be.
        dashes: T.
        marked: keep room for a marker at both ends.

    Returns:
        The K drawings where it succeeded, and their paths.
    """
    count = len(blocked)
    spots, ways = np.zeros((2, count, dashes), np.complex128)
    have, vain = np.zeros((2, count), np.intp)
    walk, todo = _Walk(spots, have, marked), np.arange(count)
    for _ in range(_PROPOSALS):
        if len(todo) <= count // _TAIL:
            break
        t = have[todo]
        at, way = _propose(rng, rules, spots[todo, t - 1], ways[todo, t - 1], t == 0)
        k = _good(rules, blocked, walk, todo, at, way)
        good = todo[k]
        spots[good, t[k]], ways[good, t[k]] = at[k], way[k]
        vain[todo] += 1
        vain[good], have[good] = 0, have[good] + 1
        stuck = todo[vain[todo] == _VAIN]
        vain[stuck], have[stuck] = 0, np.maximum(have[stuck] - _BACK, 0)
        todo = todo[have[todo] < dashes]
    done = np.flatnonzero(have == dashes)
    return done, DashedPath(spots[done], ways[done])


def _around(rules: Rules, ink: Bool) -> Bool:
    """All cells within reach of ink, (N, cells); what leaves a row comes to its border or the next one's."""
    far, wide = int(rules.reach), np.empty_like(ink)
    near = [
        (i, j) for i, j in itertools.product(range(far + 1), range(-far, far + 1)) if i * i + j * j <= rules.reach**2
    ]
    shifts = [i * rules.width + j for i, j in near if (i, j) > (0, 0)]
    for few in range(0, len(ink), 128):  # as many as a cache holds
        here, out = ink[few : few + 128], wide[few : few + 128]
        out[:] = here
        for shift in shifts:
            out[:, shift:] |= here[:, :-shift]
            out[:, :-shift] |= here[:, shift:]
    return wide


def _inner(rules: Rules, sheets: NDArray[Any]) -> NDArray[Any]:
    """Images (N, rows, columns) of sheets (N, cells): a view without the borders."""
    edge = rules.border
    return sheets.reshape(len(sheets), *rules.shape)[:, edge:-edge, edge:-edge]


class _Sheets:
    """N drawings on which paths are put, one after the other; those without room for one are given up.

    Args:
        rng: of all that is drawn.
        rules: of the images.
        count: N.
    """

    def __init__(self, rng: Generator, rules: Rules, count: int) -> None:
        self.rng, self.rules = rng, rules
        self.ink = np.zeros((count, rules.cells), np.uint8)
        self.blocked = np.ones((count, rules.cells), np.bool_)
        _inner(rules, self.blocked)[:] = False

    def keep(self, kept: Ints) -> None:
        """Keep some of the drawings, and give up the others."""
        self.ink, self.blocked = self.ink[kept], self.blocked[kept]

    def grow(self, dashes: int, marked: bool) -> tuple[Ints, DashedPath]:
        """Grow a path for each drawing, not drawn yet; drawings without one are given up."""
        kept, path = _grow(self.rng, self.rules, self.blocked, dashes, marked)
        self.keep(kept)
        return kept, path

    def draw(self, path: DashedPath, marked: bool) -> None:
        """Put paths on the drawings, and keep others away from them."""
        rules, ink = self.rules, np.zeros_like(self.ink)
        for t in range(path.spots.shape[1]):
            _draw(rules, ink, path.spots[:, t], path.ways[:, t], rules.half, _THICK, rules.contrast)
        np.maximum(self.ink, ink, out=self.ink)
        if marked:  # room for a marker is kept at all four ends, so that room says nothing about the label
            self.discs(ink, path.ends(rules)[0])
        self.blocked |= _around(rules, ink > 0)

    def discs(self, ink: Uint8, middles: Points) -> None:
        """Draw two markers, (N, 2), in each of the drawings."""
        for end in (0, 1):
            _draw(self.rules, ink, middles[:, end], middles[:, end], 0, self.rules.marker_radius, 1)


def _choose(rng: Generator, rules: Rules, ends: Points, inward: Points) -> tuple[Ints, Points, Uint8]:
    """Choose labels, and which ends to mark.

    A drawing is kept if it has two ends of one path and two ends of different paths that look alike: about as far from
    each other and from the middle of the image, on paths that leave in similar directions and to the same or to
    opposite sides. A coin says which pair gets the markers. So neither what else is drawn, nor where the markers are,
    nor what is seen close to them tells much about the label.

    Args:
        rng: of the coin.
        rules: of the images.
        ends: (N, 4), two of the first path, two of the second.
        inward: (N, 4), directions of the paths there.

    Returns:
        The K drawings that are kept, (K, 2) middles of the markers, (K) labels.
    """
    first, second = ends[:, _PAIRS[:, 0]], ends[:, _PAIRS[:, 1]]
    line = second - first
    far = np.abs(line)
    one, two = inward[:, _PAIRS[:, 0]] * line.conj() / far, -inward[:, _PAIRS[:, 1]] * line.conj() / far
    centre = rules.border * (1 + 1j) + (rules.columns - 1 + 1j * (rules.rows - 1)) / 2
    far[far < rules.apart] = np.nan  # like nothing else
    limits = _FAR * rules.dashes * rules.pitch, _OFF * min(rules.rows, rules.columns), _TOWARDS, 0
    measures = far, np.abs((first + second) / 2 - centre), one.real + two.real, np.sign(one.imag * two.imag)
    fits = np.ones((len(ends), len(_ONE)), np.bool_)
    for measure, limit in zip(measures, limits, strict=True):
        fits &= np.abs(measure[:, _ONE] - measure[:, _TWO]) <= limit
    kept = np.flatnonzero(fits.any(1))
    chosen = np.where(fits[kept], rng.random((len(kept), len(_ONE))), -1).argmax(1)
    labels = rng.integers(0, 2, len(kept), dtype=np.uint8)
    pair = _PAIRS[np.where(labels == 1, _ONE[chosen], _TWO[chosen])]
    return kept, ends[kept[:, None], pair], labels


def draw(rng: Generator, rules: Rules, count: int) -> Drawings:
    """Begin so many drawings, of two paths, markers on two of their ends, and distractors; those that succeed."""
    sheets = _Sheets(rng, rules, count)
    _, first = sheets.grow(rules.dashes, marked=True)
    sheets.draw(first, marked=True)
    kept, second = sheets.grow(rules.dashes, marked=True)
    pairs = zip(first.taken(kept).ends(rules), second.ends(rules), strict=True)
    kept, markers, labels = _choose(rng, rules, *(np.concatenate(x, 1) for x in pairs))
    sheets.keep(kept)
    sheets.draw(second.taken(kept), marked=True)
    for _ in range(rules.distractors):
        kept, path = sheets.grow(rules.distractor_dashes, marked=False)
        sheets.draw(path, marked=False)
        markers, labels = markers[kept], labels[kept]
    sheets.discs(sheets.ink, markers)
    return Drawings(_inner(rules, sheets.ink) * GREY, labels)


CLASSES = 2
FORMAT = 1  # of the cache; to be raised when the same options come to mean other images
_PATIENCE = 1 << 15  # drawings in a row that bring nothing new
_FIRST = 512  # drawings begun in the first round; each has twice as many as the one before, up to a limit


def _unseen(drawings: Drawings, seen: set[bytes], limit: int) -> Drawings:
    """The first ``limit`` drawings that were not seen before, which are added to those seen."""
    new: list[int] = []
    for i, image in enumerate(drawings.images):
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        if len(new) < limit and digest not in seen:
            seen.add(digest)
            new.append(i)
    return Drawings(drawings.images[new], drawings.labels[new])


def generate(count: int, *, rules: Rules | None = None, seed: int = 0) -> Drawings:
    """Make so many different images.

    Args:
        count: N; fewer are the first ones of more.
        rules: which images; default Long Range Arena's.
        seed: same seed (and rules), same images.

    Cost: vectorized over drawings; with the defaults four are begun for one that is kept.
    """
    rules = rules or Rules()
    seen: set[bytes] = set()
    parts: list[Drawings] = []
    vain = 0
    for turn in itertools.count():
        rng = default_rng(SeedSequence(seed, spawn_key=(turn,)))
        begun = min(_FIRST << min(turn, 16), rules.attempts)
        part = _unseen(draw(rng, rules, begun), seen, count - len(seen))
        parts.append(part)
        if len(seen) == count:
            break
        vain = 0 if len(part.labels) else vain + begun
        if vain >= _PATIENCE:
            raise ValueError(
                f"found only {len(seen)} of {count} different images, and no more in {vain} drawings, with {rules}; "
                f"give a larger size, or fewer or shorter paths."
            )
    return Drawings(np.concatenate([x.images for x in parts]), np.concatenate([x.labels for x in parts]))


def _pack(drawings: Drawings) -> Arrays:
    """Arrays for the cache, two pixels to a byte."""
    levels = np.append(drawings.images.reshape(-1) // GREY, np.zeros(drawings.images.size % 2, np.uint8))
    return {"levels": levels[::2] << 4 | levels[1::2], "labels": drawings.labels}


def _unpack(arrays: Arrays, shape: tuple[int, int, int]) -> Drawings:
    """Drawings of a cache file, if they can be so many images."""
    levels, labels = arrays["levels"], arrays["labels"]
    size = math.prod(shape)
    if levels.dtype != np.uint8 or levels.shape != (-(-size // 2),):
        raise ValueError(f"its levels are not those of {shape[0]} images of {shape[1]} x {shape[2]}")
    if labels.dtype != np.uint8 or labels.shape != shape[:1] or labels.max() >= CLASSES:
        raise ValueError(f"its labels are not those of {shape[0]} images")
    both = np.stack([levels >> 4, levels & 15], 1).reshape(-1)[:size]
    return Drawings(both.reshape(shape) * GREY, labels)


SAMPLES = {"test": 20_000, "validation": 20_000, "train": 160_000}  # made by default


@dataclass(kw_only=True, eq=False)
class Pathfinder(MadeCache, DataOption, SkipOption, FixedSamples, Classification):
    """Say whether two discs mark the ends of one path; the image comes as grey values, a token each, row by row.

    An image has two long dashed paths, shorter ones that distract, and two markers. Label 1: the markers are on both
    ends of one long path, the other has none. Label 0: each long path has one. A path is a walk of dashes which turns
    by up to ``bend`` radians in each gap. Long paths are drawn first, then each distractor where there is room, and a
    drawing without room is given up. Both classes are made of the same drawings, and
    markers that look alike in distance, place and directions.

    The label can be seen: pixels of one path are joined by steps of at most gap + 1.5 pixels, pixels of different
    paths are further apart. Markers alone have the value 255.

    Departures: Long Range Arena uses the program of Linsley et al. (2018), of which these are the settings (14 dashes
    of 2 pixels, 5 distractors of 4, 200,000 images in parts of 8, 1 and 1 tenths), but not the drawings: there paths
    may come nearer, and markers of one path may have other distances than markers of two. Its images can be given as
    data.

    No image occurs twice, in whichever split. The first ones are the test's, then come validation and training.

    Data: instead of made images, a folder with ``train.npz``, ``validation.npz`` and ``test.npz``, each ``images``
    uint8 (N, rows, columns) and ``labels`` (N) of 0 and 1; `data.images.Pictures` has other ways. The options of the
    drawing, dashes to contrast, are then refused.

    Args:
        data: where the images are; None: they are made.
        train_samples: how many, None: 160,000, and 20,000 of the others; of data at most so many, spread evenly, None:
            all.
        size: of the images, an integer or [rows, columns].
        dashes: of a long path; in Long Range Arena 6, 9 or 14.
        distractors: how many; None: 20 // distractor_dashes.
        distractor_dashes: of each; None: dashes // 3, at least 1.
        dash_length: in pixels, as the following.
        gap: between dashes.
        bend: radians, the most that a path turns from dash to dash.
        marker_radius: of the discs.
        contrast: grey of dashes, as a share of that of the markers.

    Other options: see `tasks.base`.
    """

    size: int | Sequence[int] = 32
    dashes: int = Rules.dashes
    distractors: int | None = None
    distractor_dashes: int | None = None
    dash_length: float = Rules.dash_length
    gap: float = Rules.gap
    bend: float = Rules.bend
    marker_radius: float = Rules.marker_radius
    contrast: float = Rules.contrast

    name = "pathfinder"
    about = "are two marked ends those of one dashed path? grey pixels, after Long Range Arena"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {split: self.limits[split] for split in SAMPLES}
        self.counts = {split: SAMPLES[split] if x is None else x for split, x in limits.items()}
        self.rules = self._rules()
        self.format = FORMAT
        if self.data is not None:
            self._refuse_drawing()
        self.pictures = Pictures(
            self.data,
            size=self.size,
            channels=1,
            classes=CLASSES,
            resize=False,
            limits=self.limits,
            skip_bad=self.skip_bad,
            validation_share=0.1,
            test_share=0.1,
            seed=self.seed,
            cache=self.cache,
        )
        self._drawings: Drawings | None = None

    def settings(self) -> dict[str, Any]:
        """A grey value is a token, and no token is padding."""
        return {
            "vocab_size": 256,
            "max_position_embeddings": self.rules.rows * self.rules.columns,
            "num_labels": CLASSES,
            "pad_token_id": None,
        }

    def fingerprint(self) -> str:
        """A hash of data; made images only change with the way to make them."""
        return f"format {FORMAT}" if self.data is None else self.pictures.fingerprint()

    def remarks(self) -> list[str]:
        """With data: that nothing was drawn, and what was left out."""
        if self.data is None:
            return []
        return [f"the images are those of {self.pictures.location}", *self.pictures.remarks]

    def split(self, name: str) -> Album:
        """Images of data; or from the cache; or made now for all splits: about two minutes for 200,000."""
        choice("split", name, SPLITS)
        if self.data is not None:
            return self.pictures.split(name)
        if self._drawings is None:
            count, rules = sum(self.counts.values()), self.rules
            self._drawings = cached_arrays(
                self.path,
                self.record,
                make=lambda: _pack(generate(count, rules=rules, seed=self.seed)),
                read=lambda arrays: _unpack(arrays, (count, rules.rows, rules.columns)),
            )
        first = sum(self.counts[x] for x in itertools.takewhile(lambda x: x != name, self.counts))
        images, labels = (x[first : first + self.counts[name]] for x in self._drawings)
        return Album(images[..., None], np.arange(len(labels)), labels.astype(np.int64), 1)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L) and labels (B)."""
        return {"input_ids": pixel_tokens(samples), "labels": labels_of(samples)}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """Always the class that training has most often."""
        accuracy = most_frequent_accuracy(self.split("train"), self.split(split))
        return {"most frequent class": {self.metric: accuracy}}

    def _rules(self) -> Rules:
        """Rules of the drawing, checked."""
        short = self.distractor_dashes
        if short is None:
            short = max(positive_int("dashes", self.dashes) // 3, 1)
        many = 20 // positive_int("distractor_dashes", short) if self.distractors is None else self.distractors
        names = ("dash_length", "gap", "bend", "marker_radius", "contrast")
        sizes: dict[str, Any] = {
            name: number(name, getattr(self, name)) for name in names
        }  # as float: 2 and 2.0 are the same
        return Rules(*image_size(self.size), self.dashes, many, short, **sizes)

    def _refuse_drawing(self) -> None:
        """Refuse options of the drawing, which have no effect on given images."""
        defaults = asdict(Rules()) | {"distractors": None, "distractor_dashes": None}
        options = [x for x in defaults if x not in ("rows", "columns")]
        given = [f"{x}={getattr(self, x)!r}" for x in options if getattr(self, x) != defaults[x]]
        if given:
            raise ValueError(
                f"with data={str(self.data)!r} nothing is drawn, got {', '.join(given)}; leave out the options of the "
                f"drawing, or data."
            )
