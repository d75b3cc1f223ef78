"""Tokenizers from a bare list of tokens, as old models and those of molecules and proteins come with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SPECIAL = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>"),
    "sep_token": ("[SEP]", "<eos>"),
    "mask_token": ("[MASK]", "<mask>"),
}
PIECE = "##"  # how WordPiece marks what goes on a word


def tokenizer_of_vocabulary(path: Path) -> Any:
    """A tokenizer from ``vocab.txt``, one token a line.

    - With pieces such as ``##ing`` it is BERT's WordPiece; texts are made small if the vocabulary has no capitals.
    - Without them texts are cut into tokens from left to right, the longest that fits first, and what fits none becomes
      unknown, character by character: ``MKV`` is M, K, V where tokens are residues, and ``ClC`` is Cl, C for molecules.
      Blanks are left out.

    Raises:
        ValueError: not UTF-8, a token twice, or without tokens for the unknown, the start, the end and padding.
    """
    try:
        tokens = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as problem:
        line = path.read_bytes()[: problem.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8: {problem.reason}.") from None
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(x for i, x in enumerate(tokens) if vocabulary[x] != i)
        raise ValueError(f"{path} has {twice!r} in two lines; a token has one number.")
    special = {}
    for name, known in SPECIAL.items():
        found = [x for x in known if x in vocabulary]
        if found:
            special[name] = found[0]
        elif name != "mask_token":
            raise ValueError(f"{path} has no {name} ({' or '.join(known)}), so that no tokenizer can be made of it.")
    words = [x for x in tokens if x not in special.values()]
    if any(x.startswith(PIECE) for x in words):
        return _word_pieces(vocabulary, special, small=not any(x != x.lower() for x in words if "[" not in x))
    return _longest_first(vocabulary, special, words)


def _word_pieces(vocabulary: dict[str, int], special: dict[str, str], small: bool) -> Any:
    from transformers import BertTokenizer

    settings: dict[str, Any] = {**special, "do_lower_case": small}
    return BertTokenizer(vocab=vocabulary, **settings)


def _longest_first(vocabulary: dict[str, int], special: dict[str, str], words: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    choices = "|".join(re.escape(x) for x in sorted(filter(str.strip, words), key=len, reverse=True))
    inner.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex(f"{choices}|."), "isolated")])
    first, last = special["cls_token"], special["sep_token"]
    inner.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(x, vocabulary[x]) for x in (first, last)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)
