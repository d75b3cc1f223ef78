"""Tokenizers of pretrained folders, also from a bare list of tokens, as old models and those of proteins have it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kernelformer.hf.pretrained import attempt

# What transformers builds its tokenizers from; a folder that has only vocab.txt gets one of ours.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "merges.txt",
    "source.spm",
    "vocab.json",
)
SPECIAL = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>"),
    "sep_token": ("[SEP]", "<eos>"),
    "mask_token": ("[MASK]", "<mask>"),
}
PIECE = "##"  # how WordPiece marks what goes on a word


def load_tokenizer(path: str | Path, **options: Any) -> Any:
    """Load the tokenizer of a folder or of a name on the hub; None where there is none.

    Where a folder has ``vocab.txt`` alone, it is made by `tokenizer_of_vocabulary`.

    Args:
        path: of the folder, or the name.
        options: of transformers' `AutoTokenizer`.
    """
    folder = Path(path)
    vocabulary = folder / "vocab.txt"
    whole = options or not folder.is_dir() or any((folder / x).is_file() for x in TOKENIZER_FILES)
    if not whole:
        # transformers would make one all the same: of special tokens alone, or one that knows no capitals.
        return tokenizer_of_vocabulary(vocabulary) if vocabulary.is_file() else None
    return attempt(path, lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options), "tokenizer")


def tokenizer_of_vocabulary(path: Path) -> Any:
    """Make a tokenizer from ``vocab.txt``, one token a line.

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
        present = [x for x in known if x in vocabulary]
        if present:
            special[name] = present[0]
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
