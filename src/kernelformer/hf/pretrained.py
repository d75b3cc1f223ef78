"""Checks of pretrained folders, and the class of a folder's model: no weight is random, no code of others runs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernelformer.files import check_counts, check_inside, read_json
from kernelformer.hf.save import KIND
from kernelformer.quiet import silent_libraries
from kernelformer.weight_headers import check_contained, check_local, saved_shapes

TASKS = ("auto", "masked", "causal", "seq2seq", "encoder")
SAFE, PICKLED = "*.safetensors", ("pytorch_model*.bin", "*.pt", "*.pth")
POOLER = "pooler."
_Load = Callable[..., tuple[Any, dict[str, Any]]]


def attempt(path: object, make: Callable[[], Any], what: str = "model") -> Any:
    """Call ``make`` quietly and turn whatever transformers raises for a folder into a ValueError of one line."""
    try:
        with silent_libraries():
            return make()
    except Exception as problem:
        first = (str(problem).strip().splitlines() or [""])[0]
        raise ValueError(
            f"no {what} could be read from {path}: {first.rstrip('.') or type(problem).__name__}."
        ) from None


def hub_problem() -> str | None:
    """Explain why the hub is unreachable, or None; tries once, where the libraries would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as problem:
        return f"{constants.ENDPOINT}: {str(problem) or type(problem).__name__}"
    return None


def hub_options(name: str) -> dict[str, Any]:
    """Options for reading a model by its name on the hub: from the cache alone where the hub cannot be asked."""
    from huggingface_hub import try_to_load_from_cache

    problem = hub_problem()
    if problem is None:
        return {}
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ValueError(
            f"there is no folder {name}, the cache of the hub has no model of this name, and the hub cannot be asked "
            f"({problem}); give the folder of a model, or go online."
        )
    return {"local_files_only": True}


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model of transformers which was not converted yet."""
    check_contained(folder)
    path = folder / "config.json"
    if not path.is_file():
        names = ", ".join(sorted(x.name for x in folder.iterdir())[:6]) or "nothing"
        raise ValueError(
            f"{folder} is not the folder of a model: it has neither config.json nor a .gguf file, found {names}."
        )
    try:
        record = read_json(path)
    except ValueError as reason:
        raise ValueError(f"{path} is not JSON: {reason}.") from None
    if not isinstance(record, dict) or "model_type" not in record:
        raise ValueError(f"{path} has no model_type, so that nobody knows what model it is of.")
    if record["model_type"] == KIND:
        raise ValueError(
            f"{folder} was converted already; kernelformer.hf.load loads it. To convert anew give the original."
        )
    check_counts(path, record)
    check_local(path, record)


def has_safe_weights(folder: Path, allow_pickle: bool) -> bool:
    """Tell whether the weights are safetensors; pickled ones are an error unless they are allowed."""
    safe = sorted(folder.glob(SAFE))
    if safe:
        attempt(folder, lambda: saved_shapes(safe))
        return True
    pickled = sorted(x for pattern in PICKLED for x in folder.glob(pattern))
    if not pickled:
        raise ValueError(f"{folder} has a config.json but no weights; there should be a model.safetensors.")
    if not allow_pickle:
        raise ValueError(
            f"the weights in {folder} are pickled ({pickled[0].name}), and a pickle can run code. If you trust its "
            f"source give --allow-pickle (allow_pickle=True): torch then reads tensors and nothing else."
        )
    return False


def model_classes(config: Any, task: str) -> list[Any]:
    """List the classes that a folder's model may be of, the best guess first."""
    maps = {
        "masked": transformers.MODEL_FOR_MASKED_LM_MAPPING,
        "causal": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "seq2seq": transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "encoder": transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
        if config.is_encoder_decoder
        else transformers.MODEL_MAPPING,
    }
    known = {name: x[type(config)] for name, x in maps.items() if type(config) in x}
    if task != "auto":
        if task not in known:
            raise ValueError(
                f"a model of type {config.model_type!r} is not for the task {task!r}; it can be {', '.join(known)}."
            )
        return [known[task]]
    declared = [getattr(transformers, x, None) for x in config.architectures or ()]
    order = ("seq2seq", "encoder") if config.is_encoder_decoder else ("masked", "causal", "encoder")
    # BERT's causal class has the same weights as its masked one; which it is the configuration says.
    if getattr(config, "is_decoder", False):
        order = ("causal", "encoder")
    return list(dict.fromkeys([*filter(None, declared), *(known[x] for x in order if x in known)]))


def first_complete(path: object, kinds: Sequence[Any], load: _Load) -> tuple[Any, list[str]]:
    """Load the first class for which no weight is left random; ``load`` also gives transformers' ``loading_info``."""
    misses = []
    for kind in kinds:
        model, info = load(kind)
        lacking = lacking_weights(info)
        if lacking and all(x.startswith(POOLER) for x in lacking):
            # Models like BERT that were trained on masked tokens come without one, and embeddings do not need it.
            model, info = load(kind, add_pooling_layer=False)
            lacking = lacking_weights(info)
        if not lacking:
            unused = sorted(info["unexpected_keys"])
            remarks = [f"{kind.__name__} does not use these weights: {first_names(unused)}"] if unused else []
            if kind is not kinds[0]:
                remarks.insert(0, f"its weights are those of {kind.__name__}, not of {kinds[0].__name__}")
            return model, remarks
        misses.append(f"{kind.__name__} lacks {first_names(lacking)}")
    raise ValueError(
        f"{path} has not all weights of a model, so that some would be random: {'; '.join(misses) or 'no class fits'}. "
        f"Give another --task (of {', '.join(TASKS)}), or repair the folder."
    )


def lacking_weights(info: dict[str, Any]) -> list[str]:
    """List weights that did not come from the files, and those that came in another shape."""
    odd = [x[0] if isinstance(x, tuple) else x for x in info.get("mismatched_keys") or ()]
    return sorted({*info["missing_keys"], *odd})


def first_names(names: Sequence[str]) -> str:
    """Join the first three names for a message, and say how many there are beside them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def task_of(model: Any) -> str:
    """Tell how inputs for a model are made: one of `TASKS`, but not ``auto``."""
    if model.config.is_encoder_decoder:
        return "seq2seq"
    if not model.can_generate():
        return "masked" if "MaskedLM" in type(model).__name__ else "encoder"
    return "causal"


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
PIECE = "##"  # how WordPiece marks a continuation of a word


def load_tokenizer(path: str | Path, **options: Any) -> Any:
    """Load the tokenizer of a folder or of a name on the hub; None where there is none.

    Where a folder has ``vocab.txt`` alone, it is made by `tokenizer_of_vocabulary`.
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
        from transformers import BertTokenizer

        settings: dict[str, Any] = {**special, "do_lower_case": all(x == x.lower() for x in words if "[" not in x)}
        return BertTokenizer(vocab=vocabulary, **settings)
    return _longest_first(vocabulary, special, words)


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


def gguf_file(path: Path) -> Path | None:
    """Find the ``.gguf`` file that a path means: itself, or the only one of a folder without a config.json, or None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    packed = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    if len(packed) > 1:
        raise ValueError(
            f"{path} has {len(packed)} .gguf files ({packed[0].name}, {packed[1].name}, ...); give the path of one."
        )
    check_inside(path, packed)
    return packed[0] if packed else None


def load_gguf(file: Path, task: str) -> tuple[Any, list[str]]:
    """Load the model of a ``.gguf`` file in float32, in evaluation mode, and remarks for the user."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{file} needs the package gguf, which is not installed: pip install 'kernelformer[gguf]'")
    if task not in ("auto", "causal"):
        raise ValueError(f"{file.name} is of a causal language model, got task={task!r}; leave it out.")
    model, info = attempt(
        file,
        lambda: AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        ),
    )
    lacking = lacking_weights(info)
    if lacking:
        raise ValueError(f"{file} lacks weights of {type(model).__name__}: {first_names(lacking)}.")
    return model.eval(), [f"weights of {file.name} were unpacked to float32"]
