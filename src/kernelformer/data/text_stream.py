"""Texts of files and folders as a stream of pieces, each with its split: no file is ever in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kernelformer.data.bad_rows import BadRows
from kernelformer.data.local_files import check_regular, existing
from kernelformer.data.readers import EXTENSIONS, read_file_rows, short_names, unreadable
from kernelformer.data.sources import wrong_columns
from kernelformer.data.splits import ALIASES, SPLITS, check_one_per_split, check_shares, split_of
from kernelformer.data.text_files import TextFiles, cut_by_shares, decode_pieces, named_splits
from kernelformer.data.values import optional_text
from kernelformer.errors import flag, integer

_BLOCK = 1 << 20  # bytes read at once

RULE = (
    "names of files or folders (train, validation, test) where they say it; else rows by a hash of (seed, number), "
    "files of a folder by a hash of their names, a text file by position: training first, the test last"
)


class Piece(NamedTuple):
    """A piece of text.

    Args:
        split: that it belongs to.
        content: UTF-8; bytes as they are where nothing has to be decoded.
        ends: whether what follows in this split is another document.
        complete: whether the document is at its end, and not only its part in this split.
    """

    split: str
    content: bytes
    ends: bool
    complete: bool


class Item(NamedTuple):
    """A file and its splits: the name of one, or shares by which it is divided."""

    path: Path
    splits: str | Mapping[str, float]


class TextStream:
    """Texts, piece by piece, with the splits that the tasks "bytes" and "words" give them.

    - ``.jsonl``, ``.csv``, ``.tsv``: the texts of a column, each a document; rows of blanks are passed over.
    - Any other file is a plain text, a document.
    - A folder: ``train``, ``validation`` and ``test`` of these rows, or the files that match ``pattern``.

    `RULE` says how splits are found.

    Args:
        texts: paths of files and folders.
        column: of the texts, where there are rows.
        pattern: which files of a folder, as a glob; None: "**/*.txt".
        validation_share: of what has no splits of its own.
        test_share: the same for the test; training has the rest.
        seed: of the division of rows.
        skip_bad: leave bad rows out, and say how many, instead of raising at the first.
        raw: plain texts are any bytes; else they must be UTF-8 without a zero byte.
    """

    def __init__(
        self,
        texts: Sequence[str | os.PathLike[str]],
        *,
        column: str = "text",
        pattern: str | None = None,
        validation_share: float = 0.05,
        test_share: float = 0.05,
        seed: int = 0,
        skip_bad: bool = False,
        raw: bool = False,
    ) -> None:
        self.shares = check_shares(validation_share, test_share)
        self.column, self.pattern, self.raw = column, pattern, raw
        self.seed, self.skip_bad = integer("seed", seed, at_least=0), flag("skip_bad", skip_bad)
        self.layout = f"a text file, rows with a column {column!r}, or a folder of them"
        if not texts:
            raise ValueError(f"there are no texts, got none; give the path of {self.layout}.")
        self.paths = [existing(Path(x).expanduser(), self.layout, option="a text") for x in texts]
        for number, path in enumerate(self.paths):
            if path in self.paths[:number]:
                raise ValueError(f"{path} is given twice; give each text once.")
        if pattern is not None and not any(x.is_dir() for x in self.paths):
            raise ValueError(f"pattern chooses files of a folder, got pattern={pattern!r} and files; leave it out.")
        self.items = [item for path in self.paths for item in self._items(path)]
        self.sizes = [item.path.stat().st_size for item in self.items]
        self.remarks: list[str] = []  # about what was read so far
        self.done = 0  # bytes of the files that were read

    def sources(self) -> list[dict[str, object]]:
        """Names and sizes in bytes of what was given, for a record."""
        counts = dict.fromkeys(self.paths, 0)
        for item, size in zip(self.items, self.sizes, strict=True):
            counts[next(x for x in self.paths if item.path == x or x in item.path.parents)] += size
        return [{"name": path.name, "bytes": counts[path]} for path in self.paths]

    def pieces(self) -> Iterator[Piece]:
        """All pieces, in the order of the paths, of names in a folder, and of the text."""
        before = 0
        for item, size in zip(self.items, self.sizes, strict=True):
            for piece in self._rows(item) if item.path.suffix in EXTENSIONS else self._plain(item, size):
                yield piece
                self.done = min(self.done + len(piece.content), before + size)
            before += size
            self.done = before

    def _items(self, path: Path) -> list[Item]:
        """The files of a path that was given."""
        if not path.is_dir():
            return [Item(path, self.shares)]
        rows = [path / f"{stem}{end}" for stem in chain(*ALIASES.values()) for end in EXTENSIONS]
        there = [x for x in rows if x.is_file()]
        if self.pattern is None and there:
            check_one_per_split(path, there)
            return self._named(path, {s: [x.name for x in there if x.stem in names] for s, names in ALIASES.items()})
        shares = {f"{name}_share": x for name, x in self.shares.items()}
        source = TextFiles(path, pattern=self.pattern or "**/*.txt", **shares)  # type: ignore[arg-type]
        files = source.files()
        named = named_splits(path, files)
        return self._named(path, named, source) if named else [Item(path / x, source.split_of(x)) for x in files]

    def _named(self, folder: Path, named: Mapping[str, list[str]], source: TextFiles | None = None) -> list[Item]:
        """Files whose names say their splits; where nothing is named for validation it is a share of training."""
        if not named.get("train"):
            there = short_names(x for files in named.values() for x in files)
            raise ValueError(f"{folder} has no train split, found {there}; add one, or choose files by pattern.")
        items = [Item(folder / x, split) for split in SPLITS for x in named.get(split, [])]
        if named.get("validation"):
            return items
        train = [x for x in items if x.splits == "train"]
        if source is None or len(train) == 1:
            divided = {**self.shares, "test": 0.0}
            return [Item(x.path, divided) if x in train else x for x in items]
        held_out = {x for x in named["train"] if source.split_of(x) == "validation"}
        return [x._replace(splits="validation") if str(x.path.relative_to(folder)) in held_out else x for x in items]

    def _rows(self, item: Item) -> Iterator[Piece]:
        """The texts of a table's rows."""
        bad, number = BadRows(item.path, self.skip_bad), 0
        for index, (position, row) in enumerate(read_file_rows(item.path)):
            if isinstance(row, str):
                bad.add(position, row)
                continue
            if self.column not in row:
                if not index:  # the first row: not a bad row, but another kind of file
                    raise wrong_columns(item.path, [self.column], row, repr(self.column))
                bad.add(position, f"it has no {self.column}, found {short_names(row)}")
                continue
            try:
                text = optional_text(row[self.column])
            except ValueError as problem:
                bad.add(position, f"{self.column} {problem}")
                continue
            split = item.splits if isinstance(item.splits, str) else split_of(number, item.splits, self.seed)
            number += 1
            if text:
                yield Piece(split, text.encode(), ends=True, complete=True)
        self.remarks += bad.remarks(number)

    def _plain(self, item: Item, size: int) -> Iterator[Piece]:
        """A plain text, in the splits that it has parts of."""
        cut = not isinstance(item.splits, str)
        bounds = {item.splits: (0, size)} if isinstance(item.splits, str) else cut_by_shares(size, item.splits)
        try:
            with check_regular(item.path).open("rb") as file:
                for split, (start, stop) in bounds.items():
                    if not self.raw:
                        start, stop = (_next_character(file, x) for x in (start, stop))
                    last = b""
                    for piece in self._part(file, item.path, start, stop):
                        if last:
                            yield Piece(split, last, ends=False, complete=False)
                        last = piece
                    if last:
                        yield Piece(split, last, ends=True, complete=not cut)
        except OSError as problem:
            unreadable(item.path, problem)

    def _part(self, file: BinaryIO, path: Path, start: int, stop: int) -> Iterator[bytes]:
        """Pieces of a part of a file, which end with a line, or at least with a character."""
        for position, block in _blocks(file, path, start, stop):
            if self.raw:
                yield block
                continue
            if b"\0" in block:
                where = position + block.index(b"\0")
                raise ValueError(f"{path} is not text: it has a zero byte at {where}; leave it out, or tokenize bytes.")
            yield from (text.encode() for text in decode_pieces(block, path, position))


def _blocks(file: BinaryIO, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """A part of a file in blocks that end with a line or a character, each with its position."""
    file.seek(start)
    position, left, rest = start, stop - start, b""
    while left:
        new = file.read(min(_BLOCK, left))
        if not new:
            raise ValueError(f"{path} became shorter while it was read: {left} bytes are missing; start again.")
        left -= len(new)
        block, rest = rest + new, b""
        if left:
            at = block.rfind(b"\n") + 1 or _last_character(block)
            block, rest = block[:at], block[at:]
        yield position, block
        position += len(block)


def _last_character(block: bytes) -> int:
    """Where the last character begins, which may go on in the next block; where none begins, the end."""
    tail = [i for i in range(max(1, len(block) - 4), len(block)) if block[i] & 0xC0 != 0x80]
    return tail[-1] if tail else len(block)


def _next_character(file: BinaryIO, position: int) -> int:
    """Where the next character begins; none has more than 4 bytes."""
    if not position:
        return 0
    file.seek(position)
    inside = [x & 0xC0 == 0x80 for x in file.read(3)]
    return position + next((i for i, x in enumerate(inside) if not x), len(inside))
