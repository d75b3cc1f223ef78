"""ListOps expressions, as Long Range Arena makes them: drawn, evaluated, told apart and kept in the cache."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray
from torch import Tensor

from kernelformer.errors import choice, integer, positive_int
from kernelformer_lab.data.arrays import cached_arrays
from kernelformer_lab.data.batching import Sample, padded
from kernelformer_lab.data.byte_texts import LabelledTokens
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.tasks.base import Classification, MadeCache, MadeSamples

TOKENS = ("<pad>", "[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
CLASSES = 10
MIN, MAX, MED, SM = range(4)
FORMAT = 1  # of the cache; to be raised when the same options come to mean other samples
_OPERATOR, _END, _DIGIT = np.array([1, 5, 6], np.uint8)  # the first token of each kind
_PATIENCE = 1 << 20  # trees in a row that bring nothing new

Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """Rules by which trees are drawn; names and defaults are Long Range Arena's."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self) -> None:
        integer("min_length", self.min_length, at_least=0)
        integer("max_depth", self.max_depth, at_least=1)
        integer("max_args", self.max_args, at_least=2)
        if integer("max_length", self.max_length) < self.min_length + 2:
            raise ValueError(
                f"lengths are above min_length and below max_length: none is, "
                f"with min_length={self.min_length} and max_length={self.max_length}."
            )
        longest = depth = 1
        while longest <= self.min_length and depth < self.max_depth:
            longest, depth = 2 + self.max_args * longest, depth + 1
        if longest <= self.min_length:
            raise ValueError(
                f"with max_depth={self.max_depth} and max_args={self.max_args} the longest expression has {longest} "
                f"tokens, not more than min_length={self.min_length}; change one of them."
            )

    @property
    def attempts(self) -> int:
        """Trees grown at once: few enough for the memory, however long they are."""
        return min(max((1 << 24) // self.max_length, 64), 8192)


class Expressions(NamedTuple):
    """Samples one after the other.

    Args:
        tokens: (T) uint8, of all samples.
        offsets: (N + 1) int64; sample i is tokens[offsets[i] : offsets[i + 1]].
        labels: (N) uint8, the values.
    """

    tokens: Uint8
    offsets: Int64
    labels: Uint8


class _Level(NamedTuple):
    """All nodes of one depth, from left to right and tree after tree."""

    token: Uint8
    size: Int64  # tokens of the node with all below it
    operators: NDArray[np.intp]  # which nodes these are
    args: Int64  # of each operator; its arguments follow one another in the level below


def _shapes(rng: Generator, rules: Rules) -> tuple[list[NDArray[np.int32]], Int64]:
    """Grow trees level by level, and keep those of a wanted length.

    A tree is given up as soon as it is sure to become too long; it would not have been kept.

    Returns:
        Of the kept trees: for each level the number of arguments of every node, 0 for a digit; and their lengths.
    """
    trees, nodes = np.arange(rules.attempts), np.ones(rules.attempts, np.int64)
    length = np.zeros(rules.attempts, np.int64)
    levels = []
    for depth in range(1, rules.max_depth + 1):
        args = np.zeros(int(nodes.sum()), np.int32)
        if depth < rules.max_depth:
            operators = np.flatnonzero(rng.integers(0, 4, len(args), dtype=np.uint8) == 0)
            args[operators] = rng.integers(2, rules.max_args + 1, len(operators), dtype=np.int32)
        levels.append((trees, nodes, args))
        starts = np.cumsum(nodes) - nodes
        children = np.add.reduceat(args, starts, dtype=np.int64)
        length[trees] += nodes + np.add.reduceat(args > 0, starts, dtype=np.int64)
        too_long = length[trees] + children >= rules.max_length
        length[trees[too_long]] = 0
        grows = (children > 0) & ~too_long
        trees, nodes = trees[grows], children[grows]
        if not len(trees):
            break
    kept = length > rules.min_length
    return [args[np.repeat(kept[trees], nodes)] for trees, nodes, args in levels], length[kept]


def _apply(kind: Uint8, first: Int64, args: Int64, below: Uint8) -> Uint8:
    """Values of operators: (N) kinds, where their arguments begin in ``below``, and how many they are."""
    low, high = np.minimum.reduceat(below, first), np.maximum.reduceat(below, first)
    total = (np.add.reduceat(below, first, dtype=np.int64) % 10).astype(np.uint8)
    out: Uint8 = np.choose(kind, (low, high, low, total))
    median = np.flatnonzero(kind == MED)
    if len(median):
        count = args[median, None]
        position = np.arange(count.max())
        rows = np.full((len(median), len(position)), 10, np.uint8)  # above every value: what is not there sorts last
        real = position < count
        rows[real] = below[(first[median, None] + position)[real]]
        rows.sort(axis=1)
        middle = np.take_along_axis(rows, np.concatenate([(count - 1) // 2, count // 2], 1), 1)
        out[median] = middle.sum(1) // 2
    return out


def _evaluate(rng: Generator, shapes: list[NDArray[np.int32]]) -> tuple[list[_Level], Uint8]:
    """Draw operators and digits, from the deepest level up; the levels from the top, and the values of the trees."""
    size, value = np.empty(0, np.int64), np.empty(0, np.uint8)
    levels = []
    for shape in reversed(shapes):
        size_below, below = size, value
        value = rng.integers(0, 10, len(shape), dtype=np.uint8)
        token, size = value + _DIGIT, np.ones(len(shape), np.int64)
        operators = np.flatnonzero(shape)
        args = shape[operators].astype(np.int64)
        if len(operators):
            kind = rng.integers(0, 4, len(operators), dtype=np.uint8)
            first = np.cumsum(args) - args
            token[operators] = kind + _OPERATOR
            size[operators] = 2 + np.add.reduceat(size_below, first)
            value[operators] = _apply(kind, first, args, below)
        levels.append(_Level(token, size, operators, args))
    return levels[::-1], value


def _kept_trees(rng: Generator, rules: Rules) -> Expressions:
    """Expressions of the trees that are kept of one round, written from left to right."""
    shapes, lengths = _shapes(rng, rules)
    levels, values = _evaluate(rng, shapes)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.empty(offsets[-1], np.uint8)
    start = offsets[:-1]
    for level, below in itertools.zip_longest(levels, levels[1:]):
        operators = start[level.operators]
        tokens[start] = level.token
        tokens[operators + level.size[level.operators] - 1] = _END
        if below is not None:
            before = np.cumsum(below.size) - below.size
            first = np.cumsum(level.args) - level.args
            start = np.repeat(operators + 1 - before[first], level.args) + before
    return Expressions(tokens, offsets, values)


def _unseen(expressions: Expressions, seen: set[bytes], limit: int) -> Expressions:
    """The first ``limit`` expressions that were not seen before, which are added to those seen."""
    text, ends = expressions.tokens.tobytes(), expressions.offsets.tolist()
    new: list[int] = []
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        digest = hashlib.blake2b(text[a:b], digest_size=16).digest()
        if len(new) < limit and digest not in seen:
            seen.add(digest)
            new.append(i)
    if len(new) == len(ends) - 1:
        return expressions
    kept = np.zeros(len(ends) - 1, bool)
    kept[new] = True
    lengths = np.diff(expressions.offsets)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])])
    return Expressions(expressions.tokens[np.repeat(kept, lengths)], offsets, expressions.labels[kept])


def generate(count: int, *, rules: Rules | None = None, seed: int = 0) -> Expressions:
    """Make so many different expressions.

    Args:
        count: N; fewer are the first ones of more.
        rules: which expressions; default Long Range Arena's.
        seed: same seed (and rules), same expressions.

    Cost: O(T) for T tokens, vectorized over trees; a dozen trees are grown for one that is kept.
    """
    rules = rules or Rules()
    seen: set[bytes] = set()
    parts: list[Expressions] = []
    vain = 0
    for number in itertools.count():
        rng = default_rng(SeedSequence(seed, spawn_key=(number,)))
        part = _unseen(_kept_trees(rng, rules), seen, count - len(seen))
        parts.append(part)
        if len(seen) == count:
            break
        vain = 0 if len(part.labels) else vain + rules.attempts
        if vain >= _PATIENCE:
            raise ValueError(
                f"found only {len(seen)} of {count} different expressions, and no more in {vain} trees, with {rules}; "
                f"ask for fewer samples, or allow other lengths, more depth or more arguments."
            )
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Expressions(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        np.concatenate([part.labels for part in parts]),
    )


def _checked(expressions: Expressions, count: int) -> Expressions:
    """Expressions of a cache file, if they can be so many samples."""
    tokens, offsets, labels = expressions
    if [x.dtype for x in expressions] != [np.uint8, np.int64, np.uint8] or offsets.shape != (count + 1,):
        raise ValueError(f"its arrays are not those of {count} samples")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any() or labels.shape != (count,):
        raise ValueError("its arrays do not fit together")
    if tokens.max() >= len(TOKENS) or labels.max() >= CLASSES:
        raise ValueError("it has unknown tokens or labels")
    return expressions


_ROUND = 16  # batches have a multiple of this length, so that there are few different shapes


@dataclass(kw_only=True, eq=False)
class ListOps(MadeCache, MadeSamples, Classification):
    """Compute the value of an expression such as ``[MAX 4 [SM 7 8 ] 0 [MED 1 9 2 ] ]``, here 5, a digit.

    Operators: MIN, MAX, MED (median, of an even number the mean of the middle two, rounded down), SM (sum modulo 10).
    A node above max_depth is an operator with probability 1/4, else a digit; an operator has 2 to max_args arguments;
    kinds, numbers of arguments and digits are all equally likely. Whole trees are drawn until one has more than
    min_length and less than max_length tokens, and none occurs twice, in whichever split. So says the code of Long
    Range Arena, whose constant for the probability of a value is that of an operator.

    Departures: Long Range Arena writes every list as nested pairs, in parentheses that its tokenizer drops; here they
    are not written. The first release of its tokenizer dropped "]" too; here it is a token, as in the later one.
    Batches are padded to their longest sample, not to max_length, unless pad_to says so.

    Tokens: `TOKENS`, 0 is padding. Other sizes of the training set leave the test as it is, and a smaller
    one is the beginning of a larger one.

    Args:
        min_length: samples are longer.
        max_length: samples are shorter.
        max_depth: of the deepest node, the root's being 1.
        max_args: of an operator.
        pad_to: length of every batch; None: the longest sample's, rounded up to a multiple of 16, at most max_length.

    Other options: see `tasks.base`.
    """

    train_samples: int = 96_000
    validation_samples: int = 2000
    test_samples: int = 2000
    min_length: int = Rules.min_length
    max_length: int = Rules.max_length
    max_depth: int = Rules.max_depth
    max_args: int = Rules.max_args
    pad_to: int | None = None

    name = "listops"
    about = "value of nested MIN, MAX, MED and SM of digits, as Long Range Arena makes them"
    model = "classifier"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = Rules(self.min_length, self.max_length, self.max_depth, self.max_args)
        self.format = FORMAT
        longest = self.max_length - 1
        if self.pad_to is not None and positive_int("pad_to", self.pad_to) < longest:
            raise ValueError(f"pad_to must hold samples of up to max_length - 1 = {longest}, got {self.pad_to}.")
        self._expressions: Expressions | None = None

    def settings(self) -> dict[str, Any]:
        """Ten classes, and room for the longest batch."""
        return {
            "vocab_size": len(TOKENS),
            "max_position_embeddings": max(self.max_length, self.pad_to or 0),
            "num_labels": CLASSES,
            "pad_token_id": 0,
        }

    def fingerprint(self) -> str:
        """The format: samples are made from the options, and only another way to make them would change them."""
        return f"format {FORMAT}"

    def split(self, name: str) -> LabelledTokens:
        """Samples from the cache, or made now for all splits: five seconds for 100,000."""
        choice("split", name, SPLITS)
        if self._expressions is None:
            count = sum(self.counts.values())
            self._expressions = cached_arrays(
                self.path,
                self.record,
                make=lambda: generate(count, rules=self.rules, seed=self.seed)._asdict(),
                read=lambda arrays: _checked(Expressions(**arrays), count),
            )
        first = sum(self.counts[x] for x in itertools.takewhile(lambda x: x != name, self.counts))
        tokens, offsets, labels = self._expressions
        last = first + self.counts[name]
        return LabelledTokens(tokens, offsets[first : last + 1], labels[first:last])

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """input_ids (B, L), attention_mask (B, L) with 1 for real tokens, labels (B)."""
        rows = [sample["input_ids"] for sample in samples]
        ids, mask = padded(rows, multiple=_ROUND, longest=self.max_length, width=self.pad_to)
        labels = torch.tensor([sample["labels"] for sample in samples])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
