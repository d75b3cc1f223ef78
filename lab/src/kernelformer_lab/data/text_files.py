"""Text of a file or of the files of a folder, by split: as bytes, or in decoded pieces."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernelformer.conversion.readers import unreadable
from kernelformer.errors import flag, integer
from kernelformer.files import check_inside, check_regular
from kernelformer_lab.data.files import EXTENSIONS, column_bytes, existing, read_file_rows, short_names
from kernelformer_lab.data.sources import (
    ALIASES,
    SPLITS,
    BadRows,
    check_one_per_split,
    check_shares,
    optional_text,
    split_of,
    wrong_columns,
)

Text = NDArray[np.uint8]
DecodedPiece = tuple[str, bool]  # a piece of a text, and whether a document ends with it

# What is installed beside the standard library, what tests it, and what programs have written: tables that are almost
# copies of one another, in training and validation, and one file with more text than all others of its split.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_PIECE = 1 << 14  # bytes that are tokenized together, so that threads share a long text


class Part(NamedTuple):
    """The part of a file that belongs to a split."""

    file: Path
    text: Text
    start: int
    stop: int


class TextFiles:
    """Text of a file or of the files of a folder, by split.

    A file is taken as it is, whatever its bytes are, also the syntax of a table; ``column`` takes the texts of its rows
    instead, a line end after each. It is split by position: training, validation, test.

    Files of a folder are in the splits that their names say, where some do: ``train/*``, ``validation/*``, ``test/*``
    or ``train.txt``, ``validation.txt``, ``test.txt``, also by the other names of `sources.ALIASES`. Others are left
    out then, and where nothing is named for validation, it is a share of the training files, or the end of a single
    one. Any other folder is split by a hash of names relative to it, so that no file is in two splits and none moves
    when others come. In a split files follow one another by name, without a mark between them. Hidden files are not
    part of a folder.

    Args:
        data: path of a file or folder; None: the standard library of the running Python (without tests and generated
            tables), which every machine has, and which differs from one version of Python to the next.
        column: of ``.jsonl``, ``.csv`` and ``.tsv`` files, whose texts are taken; None: the bytes as they are.
        pattern: which files of a folder, as a glob; default "**/*.py" for the standard library, else "**/*".
        validation_share: of the bytes of a file, or of the files of a folder.
        test_share: the same for the test; training has the rest.
        skip_bad: leave files of a folder that are not text out of `pieces`, instead of raising at the first.

    Cost: a file is mapped, not read; the files of a folder's split are read once. `fingerprint` reads everything.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | None = None,
        *,
        column: str | None = None,
        pattern: str | None = None,
        validation_share: float,
        test_share: float,
        skip_bad: bool = False,
    ) -> None:
        self.shares = check_shares(validation_share, test_share)
        self.library = data is None
        self.path = Path(str(sysconfig.get_paths()["stdlib"] if data is None else data)).expanduser()
        existing(self.path, "the path of one")
        if pattern is not None and not self.path.is_dir():
            raise ValueError(
                f"pattern chooses files of a folder, got pattern={pattern!r} and the file {self.path}; leave it out."
            )
        if column is not None and self.path.is_file() and self.path.suffix not in EXTENSIONS:
            raise ValueError(
                f"column={column!r} is of the rows of a table ({', '.join(EXTENSIONS)}), got the file {self.path}; "
                f"leave it out."
            )
        self.skip_bad = flag("skip_bad", skip_bad)
        if skip_bad and not self.path.is_dir():
            raise ValueError(
                f"skip_bad leaves out rows, or files of a folder, and {self.path} is one text; mend it, or leave "
                f"skip_bad out."
            )
        self.column = column
        self.pattern = str(pattern) if pattern is not None else "**/*.py" if self.library else "**/*"
        self._left_out = ""  # remark on files that are in no split
        self._table = ""  # a table that was read with its syntax
        self._bad: dict[str, str] = {}  # remarks on bad files, by split

    def fingerprint(self) -> str:
        """Size and hash of all bytes, also of names in a folder; 0.2 seconds for 100 million."""
        digest = hashlib.blake2b(digest_size=16)
        if not self.path.is_dir():
            text = self._whole_file()
            digest.update(text.data)
            return f"{self.path.name} with {len(text)} bytes, blake2b {digest.hexdigest()}"
        (names, _), size = self._files_of_splits(), 0
        for name in names:
            content = self._content(name)
            size += len(content)
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
        return f"{self.path.name} with {len(names)} files, {size} bytes, blake2b {digest.hexdigest()}"

    def remarks(self) -> list[str]:
        """Files left out, and tables that are taken with their syntax."""
        syntax = f"{self._table} is modelled as it stands, with its syntax; task.column=NAME takes texts of its rows"
        return [x for x in (self._left_out, syntax if self._table else "", *self._bad.values()) if x]

    def text(self, split: str) -> Text:
        """All bytes of a split, (N)."""
        texts = [text[start:stop] for _, text, start, stop in self.parts(split)]
        return texts[0] if len(texts) == 1 else np.concatenate(texts)

    def parts(self, split: str) -> Iterator[Part]:
        """The parts of a split, file by file."""
        if not self.path.is_dir():
            text = self._whole_file()
            yield Part(self.path, text, *cut_by_shares(len(text), self.shares)[split])
            return
        files, shares = self._files_of_split(split)
        for file in files:
            yield self._part(file, shares, split)

    def pieces(self, split: str) -> Iterator[DecodedPiece]:
        """The text of a split in decoded pieces; files of a folder are documents, a file alone is none."""
        if not self.path.is_dir():
            yield from ((text, False) for part in self.parts(split) for text in _characters(part))
            return
        files, shares = self._files_of_split(split)
        bad: list[str] = []
        for file in files:
            try:
                part = self._part(file, shares, split)
                texts = list(_characters(part))
            except ValueError as problem:
                if not self.skip_bad:
                    raise
                bad.append(str(problem).rstrip("."))
                continue
            whole = part.stop == len(part.text)
            yield from ((text, whole and i == len(texts)) for i, text in enumerate(texts, 1))
        if bad:
            of = f"{len(bad):,} of {len(files):,} files of the {split} split of {self.path}"
            self._bad[split] = f"left out {of} as bad; the first: {bad[0]}"

    def files(self) -> list[str]:
        """Names of the folder's files, relative to it, sorted."""
        wrong = f"pattern must be a glob relative to the folder, such as '**/*.txt', got {self.pattern!r}"
        if not self.pattern or Path(self.pattern).is_absolute():
            raise ValueError(f"{wrong}.")
        try:
            paths = [path for path in self.path.glob(self.pattern) if not path.is_dir()]
        except ValueError as problem:
            raise ValueError(f"{wrong}: {problem}.") from None
        parts = [path.relative_to(self.path).parts for path in paths]
        skipped = _NOT_LIBRARY if self.library else set()
        names = ["/".join(p) for p in parts if not any(x.startswith(".") for x in p) and skipped.isdisjoint(p)]
        if not names:
            raise ValueError(
                f"the folder {self.path} has no files that match pattern={self.pattern!r}; "
                f"give another pattern, or the path of a file as data."
            )
        if not self.library:  # systems link parts of their Python to other places
            check_inside(self.path, (self.path / name for name in names))
        return sorted(names)

    def split_of(self, file: str) -> str:
        """The split of a file by a hash of its name."""
        hashed = int.from_bytes(hashlib.sha256(file.encode(errors="surrogateescape")).digest()[:6], "big") / 2**48
        validation = self.shares["validation"]
        return "validation" if hashed < validation else "test" if hashed < validation + self.shares["test"] else "train"

    def _part(self, file: str, shares: Mapping[str, float] | None, split: str) -> Part:
        """The part of a file of the folder that belongs to a split."""
        text = self._text_of(file)
        bounds = (0, len(text)) if shares is None else cut_by_shares(len(text), shares)[split]
        return Part(self.path / file, text, *bounds)

    def _files_of_split(self, split: str) -> tuple[list[str], dict[str, float] | None]:
        """Files of a split of the folder, and the shares by which they are cut themselves, if they are."""
        files, named = self._files_of_splits()
        split_of = {file: self.split_of(file) for file in files}
        if named:
            if split in named and (split != "train" or "validation" in named):
                return named[split], None
            if split == "test" or "train" not in named:
                raise ValueError(
                    f"{self.path} has no {split} split, found {_top_names(files)}; add one, evaluate another, or "
                    f"choose files with other names by pattern."
                )
            files = named["train"]
            if len(files) == 1:
                return files, {**self.shares, "test": 0.0}
            split_of = {file: "validation" if split_of[file] == "validation" else "train" for file in files}
        chosen = [file for file in files if split_of[file] == split]
        if not chosen:
            raise ValueError(
                f"none of the {len(files)} files of {self.path} falls into the {split} split, to which a file goes by "
                f"a hash of its name; give more files, another {split if split != 'train' else 'validation'}_share, "
                f"or a single file, which is split by position."
            )
        return chosen, None

    def _files_of_splits(self) -> tuple[list[str], dict[str, list[str]]]:
        """Files that are in some split, and those of each where names say it."""
        files = self.files()
        named = named_splits(self.path, files)
        if not named:
            return files, named
        used = sorted(chain(*named.values()))
        others = len(files) - len(used)
        if others:
            splits = _top_names(used)
            self._left_out = f"left out {others:,} of {len(files):,} files of {self.path}: splits are {splits}"
        return used, named

    def _whole_file(self) -> Text:
        """All of a file, or the texts of its rows."""
        if self.column is not None:
            return np.frombuffer(column_bytes(self.path, self.column), np.uint8)
        self._note_table(self.path)
        try:
            size = check_regular(self.path).stat().st_size
            return np.asarray(np.memmap(self.path, np.uint8, "r")) if size else np.empty(0, np.uint8)
        except OSError as problem:
            raise ValueError(f"{self.path} cannot be read: {problem.strerror}; data must be a readable file.") from None

    def _note_table(self, path: Path) -> None:
        self._table = self._table or (path.name if path.suffix in EXTENSIONS else "")

    def _content(self, file: str) -> bytes:
        path = self.path / file
        if self.column is not None:
            return column_bytes(path, self.column)
        self._note_table(path)
        try:
            return check_regular(path).read_bytes()
        except OSError as problem:
            raise ValueError(
                f"{path} cannot be read: {problem.strerror}; leave it out by pattern, which is {self.pattern!r}."
            ) from None

    def _text_of(self, file: str) -> Text:
        content = self._content(file)
        if b"\0" in content:
            raise ValueError(
                f"{self.path / file} is not text: it has a zero byte; "
                f"leave it out by pattern, which is {self.pattern!r}, for example '**/*.txt'."
            )
        return np.frombuffer(content, np.uint8)


def _top_names(files: Sequence[str]) -> str:
    """Names in the folder itself, for messages."""
    return ", ".join(sorted({x.partition("/")[0] for x in files}))


def cut_by_shares(size: int, shares: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Start and end of each split in a text that is split by position."""
    test = size - round(size * shares["test"])
    validation = test - round(size * shares["validation"])
    return {"train": (0, validation), "validation": (validation, test), "test": (test, size)}


def named_splits(folder: Path, files: Sequence[str]) -> dict[str, list[str]]:
    """Files of the splits that their names say; nothing where none does.

    Args:
        files: relative to it, such as ``train/a.txt`` or ``train.txt``.
    """
    tops: dict[str, list[str]] = {}
    for file in files:
        tops.setdefault(file.partition("/")[0], []).append(file)
    splits: dict[str, list[str]] = {}
    for split, names in ALIASES.items():
        known = {name + end for name in names for end in ("", ".txt", *EXTENSIONS)}
        same = [top for top in tops if top in known]
        if len(same) > 1:
            raise ValueError(f"the folder {folder} has {' and '.join(same)}; keep one for each split.")
        if same:
            splits[split] = tops[same[0]]
    return splits


def decode_pieces(content: bytes, where: object, start: int = 0) -> Iterator[str]:
    """Decode a long text in pieces that end with a line or at least with a character.

    Args:
        content: UTF-8.
        start: position of the content in it.
    """
    at = 0
    while at < len(content):
        stop = at + _PIECE
        line = content.find(b"\n", stop, stop + _PIECE) + 1
        while not line and stop < len(content) and content[stop] & 0xC0 == 0x80:  # within a character
            stop += 1
        stop = line or stop
        try:
            yield content[at:stop].decode()
        except UnicodeDecodeError as problem:
            raise ValueError(
                f"{where} is not UTF-8: {problem.reason} at byte {start + at + problem.start}; save it as UTF-8, or "
                f"leave it out."
            ) from None
        at = stop


def _characters(part: Part) -> Iterator[str]:
    """Decoded pieces of a part of a file; a character on the border of two parts is in the first."""
    start, stop = (_next_character(x, part.text[x : x + 3]) if x else 0 for x in (part.start, part.stop))
    return decode_pieces(part.text[start:stop].tobytes(), part.file, start)


def _next_character(position: int, there: Iterable[int]) -> int:
    """Start of the next character, by the three bytes at a position; none has more than 4 bytes."""
    return position + [*(x & 0xC0 == 0x80 for x in there), False].index(False)


_BLOCK = 1 << 20  # bytes read at once

RULE = (
    "names of files or folders (train, validation, test) where they say it; else rows by a hash of (seed, number), "
    "files of a folder by a hash of their names, a text file by position: training first, the test last"
)


class Piece(NamedTuple):
    """A piece of text.

    Args:
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
        column: of the texts, where there are rows.
        pattern: which files of a folder, as a glob; None: "**/*.txt".
        validation_share: of what has no splits of its own.
        test_share: the same for the test; training has the rest.
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
                        start, stop = (_next_character(x, _read_at(file, x, 3)) if x else 0 for x in (start, stop))
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


def _read_at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


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
    """Start of the last character, which may continue in the next block; the end if none begins here."""
    tail = [i for i in range(max(1, len(block) - 4), len(block)) if block[i] & 0xC0 != 0x80]
    return tail[-1] if tail else len(block)
