"""Sub-word vocabularies: trained and kept, a user's own, or plain bytes; texts as one array of tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernelformer.errors import choice, flag, integer
from kernelformer.files import write_json, write_text
from kernelformer_lab.data.arrays import reading, writing
from kernelformer_lab.records import MODEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<sep>", "<unk>")  # tokens 0 to 5
PAD, BOS, EOS, MASK, SEP, UNK = range(len(SPECIAL))
KINDS = {
    "bpe": "byte-level byte pair encoding: nothing is unknown, and decoding gives the text back",
    "wordpiece": "words and their parts, longest first; rare characters are unknown",
    "bytes": "a token a byte, nothing to train",
}
BYTE_TOKENS = len(SPECIAL) + 256  # what every vocabulary here has room for
DEFAULT_SIZE = 8000
TOKENIZER = "tokenizer.json"
# What these tokens are called in well-known vocabularies; the first that is there counts.
_USUAL = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<bos>", "[CLS]", "<s>", "[BOS]", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("<eos>", "[SEP]", "</s>", "[EOS]", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "sep": ("<sep>", "[SEP]", "</s>"),
}
_FORMAT = 1  # of the cache; to be raised when the same texts come to mean another vocabulary
_ROUND = 1 << 22  # characters encoded at once: what the library gives for a token is a hundred times as large
_FIRST = "\u2581"  # in front of a word while word pieces are trained

Item = TypeVar("Item")
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Special(NamedTuple):
    """The tokens with a meaning of their own."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    mask: int | None = MASK  # a user's vocabulary may have none
    sep: int = SEP


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, which turns texts into tokens and back.

    Args:
        tokenizer: of the library `tokenizers`; None: bytes.
        size: tokens are from 0 to size - 1.
        pad, bos, eos, mask, sep: special tokens, which no text gives.
    """

    tokenizer: Tokenizer | None
    size: int
    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    mask: int | None = MASK
    sep: int = SEP

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int32, Int64]:
        """Tokens of many texts, without special ones.

        Returns:
            (T) int32 tokens of all texts one after the other, and (N + 1) int64 offsets: text i has the tokens from
            offsets[i] to offsets[i + 1] - 1.
        """
        if self.tokenizer is None:
            raw = [text.encode() for text in texts]
            flat = np.frombuffer(b"".join(raw), np.uint8).astype(np.int32) + np.int32(len(SPECIAL))
            return flat, _offsets([len(x) for x in raw])
        parts: list[Int32] = [np.empty(0, np.int32)]
        for some in rounds(texts, len, _ROUND):
            encodings = self.tokenizer.encode_batch_fast(some, add_special_tokens=False)
            parts += [np.array(x.ids, np.int32) for x in encodings]
        return np.concatenate(parts), _offsets([len(x) for x in parts[1:]])

    def encode(self, text: str) -> Int32:
        """Tokens of one text, without special ones."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones have none. Bytes that are not UTF-8 become U+FFFD."""
        tokens = [int(x) for x in ids]
        if self.tokenizer is None:
            plain = bytes(x - len(SPECIAL) for x in tokens if len(SPECIAL) <= x < BYTE_TOKENS)
            return plain.decode(errors="replace")
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def ordinary(self) -> Int32:
        """All tokens that are not special."""
        if self.tokenizer is None:
            return np.arange(len(SPECIAL), BYTE_TOKENS, dtype=np.int32)
        added = self.tokenizer.get_added_tokens_decoder()
        names = self.tokenizer.get_vocab(with_added_tokens=True)
        apart = {self.pad, self.bos, self.eos, self.mask, self.sep} | {x for x, token in added.items() if token.special}
        return np.array(sorted(set(names.values()) - apart), np.int32)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, which other libraries read too; bytes need none."""
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER, self.tokenizer.to_str(pretty=True))

    @property
    def special(self) -> Special:
        """The tokens with a meaning of their own."""
        return Special(self.pad, self.bos, self.eos, self.mask, self.sep)

    def fingerprint(self) -> str:
        """Hash of all that tokens depend on, wherever the vocabulary came from."""
        text = "bytes" if self.tokenizer is None else self.tokenizer.to_str()
        return hashlib.sha256(text.encode()).hexdigest()


def vocabulary(
    texts: Iterable[str],
    *,
    tokenizer: str | None = None,
    kind: str = "bpe",
    vocab_size: int | None = None,
    lowercase: bool = False,
    cache: Path,
    record: str,
) -> Vocabulary:
    """The vocabulary that options ask for; see `vocabulary_size` and `special` for what is known of it before.

    Args:
        texts: to train on; not touched where there is nothing to train.
        tokenizer: a ``tokenizer.json`` of the user's, or a folder with one, such as that of a run; then the others do
            not matter, not even ``lowercase``: the file knows what it does to letters.
        kind: of `KINDS`.
        vocab_size: at most so many tokens; little text gives fewer.
        lowercase: whether capital letters become small.
        record: all that the texts depend on; the same record, the same vocabulary.
    """
    limit = vocabulary_size(tokenizer=tokenizer, kind=kind, vocab_size=vocab_size, lowercase=lowercase)
    if tokenizer is not None:
        return load_vocabulary(tokenizer)
    if kind == "bytes":
        return Vocabulary(None, BYTE_TOKENS)
    made = make_tokenizer(texts, kind=kind, vocab_size=limit, lowercase=lowercase, cache=cache, record=record)
    return Vocabulary(made, made.get_vocab_size())


def vocabulary_size(
    *, tokenizer: str | None = None, kind: str = "bpe", vocab_size: int | None = None, lowercase: bool = False
) -> int:
    """Number of tokens that a model must know, from the options alone, which are checked.

    ``vocab_size`` None means `DEFAULT_SIZE`, or what a user's vocabulary or that of bytes has.
    """
    choice("kind of vocabulary", kind, KINDS)
    flag("lowercase", lowercase)
    if vocab_size is not None:
        integer("vocab_size", vocab_size, at_least=BYTE_TOKENS)
    fixed = tokenizer is not None or kind == "bytes"
    if tokenizer is None and kind == "bytes" and lowercase:
        raise ValueError(f"lowercase is for a vocabulary of sub-words, got kind={kind!r}; leave it out.")
    if not fixed:
        return vocab_size or DEFAULT_SIZE
    size = BYTE_TOKENS if tokenizer is None else load_vocabulary(tokenizer).size
    if vocab_size is not None and vocab_size < size:
        raise ValueError(f"{tokenizer} has {size} tokens, more than vocab_size={vocab_size}; leave vocab_size out.")
    if tokenizer is None and vocab_size not in (None, size):
        raise ValueError(f"vocab_size is {size} for kind='bytes', got {vocab_size}; leave it out.")
    return vocab_size or size


def saved_options(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options of `vocabulary` which give that of a saved model; bytes have no file and stay as they are."""
    if not (folder / TOKENIZER).is_file():
        if options["kind"] == "bytes" and options["tokenizer"] is None:
            return dict(options)
        raise ValueError(f"{folder} has no {TOKENIZER}, without which its model cannot be used; train it anew.")
    return {**options, "tokenizer": str(folder)}


def special(tokenizer: str | None = None) -> Special:
    """The special tokens, which need no data: those of `SPECIAL`, or a user's."""
    if tokenizer is None:
        return Special()
    return load_vocabulary(tokenizer).special


def make_tokenizer(
    texts: Iterable[str], *, kind: str = "bpe", vocab_size: int, lowercase: bool = False, cache: Path, record: str
) -> Tokenizer:
    """Train a vocabulary, or take it from the cache; arguments as in `vocabulary`, `SPECIAL` are the first tokens.

    Cost: about ten seconds for 30 million characters, on two cores.
    """
    from tokenizers import Tokenizer

    options = {"format": _FORMAT, "kind": kind, "vocab_size": vocab_size, "lowercase": lowercase, "of": record}
    whole = json.dumps(options, sort_keys=True)
    path = cache / f"vocabulary-{hashlib.sha256(whole.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        train = _byte_pairs if kind == "bpe" else _word_pieces
        text = train(texts, integer("vocab_size", vocab_size, at_least=BYTE_TOKENS), lowercase).to_str()
        with writing(path):
            write_json(path, {"record": whole, "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text})
    else:
        with reading(path):
            saved = json.loads(path.read_bytes())
            text = saved["tokenizer"]
            if saved["record"] != whole:
                raise ValueError("it was made of other data or options")
            if saved["sha256"] != hashlib.sha256(text.encode()).hexdigest():
                raise ValueError("it was changed")
    return _plain(Tokenizer.from_str(text))


def load_vocabulary(location: str) -> Vocabulary:
    """A user's ``tokenizer.json``, or that of a folder; read again only when it has changed.

    Special tokens are found by their usual names: "[PAD]", "<pad>", "[CLS]", "<s>", "</s>" and so on. Where there is no
    token for the beginning, padding stands for it, as in T5; where none separates, the end does.
    """
    path = tokenizer_file(location)
    state = path.stat()
    return _load(path, state.st_mtime_ns, state.st_size)


def tokenizer_file(location: str) -> Path:
    """The file that is meant, for `readers.hash_files` too: it, or that of a folder or of a run's final model."""
    path = Path(str(location)).expanduser()
    file = _file_at(path)
    if file is None:
        path = path / TOKENIZER if path.is_dir() else path
        raise ValueError(f"there is no file {path}; tokenizer must be a tokenizer.json, or a folder with one.")
    return file


def _file_at(path: Path) -> Path | None:
    """The tokenizer's file at a path: it, or that of a folder or of a run's final model; None where there is none."""
    return next((x for x in (path, path / TOKENIZER, path / MODEL / TOKENIZER) if x.is_file()), None)


def _of_file(path: Path) -> Tokenizer:
    """The tokenizer of a file, which encodes texts as they are."""
    from tokenizers import Tokenizer

    try:
        return _plain(Tokenizer.from_file(str(path)))
    except Exception as problem:  # the library raises plain Exceptions
        raise ValueError(f"{path} is not a tokenizer.json ({problem}); save it by Tokenizer.save.") from None


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that neither cuts nor pads, and for which ``<eos>`` in a text is text."""
    tokenizer.no_truncation()  # tasks cut, and say so
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@lru_cache(maxsize=2)
def _load(path: Path, changed: int, size: int) -> Vocabulary:
    tokenizer = _of_file(path)
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    roles = {role: usual_token(role, tokens) for role in _USUAL}
    pad, eos, bos, sep = roles["pad"], roles["eos"], roles["bos"], roles["sep"]
    if pad is None or eos is None:
        role = "pad" if pad is None else "eos"
        raise ValueError(f"{path} has no token for {role!r}; add one of {', '.join(_USUAL[role])} to it.")
    return Vocabulary(
        tokenizer,
        max(tokens.values()) + 1,
        pad=pad,
        bos=pad if bos is None else bos,
        eos=eos,
        mask=roles["mask"],
        sep=eos if sep is None else sep,
    )


def usual_token(role: str, tokens: Mapping[str, int]) -> int | None:
    """The token that has a role by its usual name: "pad", "bos", "eos", "mask" or "sep"; None where none has."""
    return next((tokens[x] for x in _USUAL[role] if x in tokens), None)


def _byte_pairs(texts: Iterable[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _word_pieces(texts: Iterable[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """Word pieces from byte pair encoding of words with a mark in front.

    The library's own training numbers the pieces inside of words in an order that differs from process to process, and
    with them what wins a tie. A pair with the mark begins a word, one without is inside.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    texts = list(texts)
    clean = normalizers.BertNormalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(clean.normalize_str(text))
    usual = sorted((x for x in counts if not x.isspace() and x != _FIRST), key=lambda x: (-counts[x], x))
    alphabet = sorted(usual[: (vocab_size - len(SPECIAL)) // 4])  # each may begin a word or be inside, and half is left
    pairs = Tokenizer(models.BPE())
    pairs.normalizer = clean
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace(_FIRST, prepend_scheme="always", split=False)]
    )
    left = vocab_size - len(SPECIAL) - 2 * len(alphabet)
    trainer = trainers.BpeTrainer(
        vocab_size=left + len(alphabet) + 1,
        initial_alphabet=[_FIRST, *alphabet],
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    merged = sorted(pairs.get_vocab().items(), key=lambda x: x[1])
    words = [x.removeprefix(_FIRST) if x.startswith(_FIRST) else f"##{x}" for x, _ in merged if x != _FIRST]
    pieces = dict.fromkeys([*SPECIAL, *alphabet, *(f"##{x}" for x in alphabet), *words])
    tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(pieces)}, unk_token=SPECIAL[UNK]))
    tokenizer.normalizer = clean
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def rounds(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Items in order, in lists that end once their sizes add up to ``most``."""
    some: list[Item] = []
    held = 0
    for item in items:
        some.append(item)
        held += size(item)
        if held >= most:
            yield some
            some, held = [], 0
    if some:
        yield some


def _offsets(lengths: list[int]) -> Int64:
    offsets: Int64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])
    return offsets


BYTES = "bytes"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ShardTokenizer:
    """A tokenizer that turns texts into the tokens of shards.

    Args:
        name: as it was given, of a path its last part.
        tokenizer: of the library `tokenizers`; None: a token is a byte, from 0 to 255, whatever the bytes are.
        size: tokens are from 0 to size - 1.
        end: token that stands after a document; None: there is none.
    """

    name: str
    tokenizer: Tokenizer | None
    size: int
    end: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Tokens of each text, without special ones; texts are UTF-8, of bytes anything."""
        if self.tokenizer is None:
            return [np.frombuffer(x, np.uint8) for x in texts]
        encodings = self.tokenizer.encode_batch_fast([x.decode() for x in texts], add_special_tokens=False)
        return [np.array(x.ids, np.uint32) for x in encodings]

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, which other libraries read too; bytes need none."""
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER, self._text())

    def record(self) -> dict[str, Any]:
        """Its entry in the index."""
        return {
            "name": self.name,
            "file": None if self.tokenizer is None else TOKENIZER,
            "sha256": hashlib.sha256(self._text().encode()).hexdigest(),
            "end": self.end,
        }

    def _text(self) -> str:
        return BYTES if self.tokenizer is None else self.tokenizer.to_str(pretty=True)


def shard_tokenizer(name: str) -> ShardTokenizer:
    """Load a tokenizer; no code of others is run.

    Args:
        name: "bytes", the path of a ``tokenizer.json``, of a folder with one or of a run, or a name on the hub.

    Raises:
        ValueError: there is none, or it is not one of the library `tokenizers`.
    """
    if name == BYTES:
        return ShardTokenizer(BYTES, None, 256)
    path = Path(name).expanduser()
    if (file := _file_at(path)) is not None:
        return _checked(path.name, _of_file(file))
    if not path.is_dir() and (not _HUB_NAME.fullmatch(name) or path.suffix == ".json"):
        raise ValueError(
            f"there is no tokenizer {name}; give bytes, a tokenizer.json, a folder with one, or a name on the hub."
        )
    return _of_transformers(name, path)


def _of_transformers(name: str, path: Path) -> ShardTokenizer:
    from kernelformer.hf.pretrained import (
        hub_options,
        load_tokenizer,  # with transformers, which takes seconds
    )

    loaded = load_tokenizer(path) if path.is_dir() else load_tokenizer(name, **hub_options(name))
    inner = getattr(loaded, "backend_tokenizer", None)
    if inner is None:
        found = "no tokenizer" if loaded is None else "one that is not of the library tokenizers"
        raise ValueError(f"{name} has {found}; give bytes, a tokenizer.json, a folder with one, or a name on the hub.")
    return _checked(path.name, inner, loaded.eos_token_id)


def _checked(name: str, tokenizer: Tokenizer, end: int | None = None) -> ShardTokenizer:
    """Check that a tokenizer has tokens; where it does not say what ends a text, the usual names do."""
    tokens = _plain(tokenizer).get_vocab(with_added_tokens=True)
    size = max(tokens.values(), default=-1) + 1
    if not size:
        raise ValueError(f"the tokenizer {name} has not one token; give another.")
    return ShardTokenizer(name, tokenizer, size, usual_token("eos", tokens) if end is None else end)
