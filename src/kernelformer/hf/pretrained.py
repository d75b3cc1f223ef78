"""Models and tokenizers of folders, read so that no weight is random and no code of others runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelformer.files import read_json
from kernelformer.hf.vocabulary import tokenizer_of_vocabulary
from kernelformer.limits import check_layers

TASKS = ("auto", "masked", "causal", "seq2seq", "encoder")
SAFE, PICKLED = "*.safetensors", ("pytorch_model*.bin", "*.pt", "*.pth")
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
POOLER = "pooler."
_Load = Callable[..., tuple[Any, dict[str, Any]]]


def auto(name: str) -> Any:
    """From transformers, which takes seconds to import."""
    import transformers

    return getattr(transformers, name)


def attempt(path: object, make: Callable[[], Any], what: str = "model") -> Any:
    """What transformers says of a folder it cannot read, in one line: it raises errors of all kinds."""
    from kernelformer.quiet import silent_libraries

    try:
        with silent_libraries():
            return make()
    except Exception as problem:
        first = (str(problem).strip().splitlines() or [""])[0]
        raise ValueError(
            f"no {what} could be read from {path}: {first.rstrip('.') or type(problem).__name__}."
        ) from None


def hub_problem() -> str | None:
    """Why the hub cannot be asked, or None: one try, where the libraries would go on trying for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as problem:
        return f"{constants.ENDPOINT}: {str(problem) or type(problem).__name__}"
    return None


def hub_options(name: str) -> dict[str, Any]:
    """How a model is read by its name on the hub: from the cache alone where the hub cannot be asked.

    Raises:
        ValueError: the hub cannot be asked, and the cache has no such model.
    """
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
    """That a folder holds a model of transformers which was not converted yet."""
    from kernelformer.hf.save import KIND
    from kernelformer.weight_headers import check_local

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
    check_layers(path, record)
    check_local(path, record)


def has_safe_weights(folder: Path, allow_pickle: bool) -> bool:
    """Whether the weights are safetensors; pickled ones are an error unless they are allowed."""
    from kernelformer.weight_headers import saved_shapes

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


def gguf_file(path: Path) -> Path | None:
    """The ``.gguf`` file that a path means: itself, or the only one of a folder without a config.json; else None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    packed = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    if len(packed) > 1:
        raise ValueError(
            f"{path} has {len(packed)} .gguf files ({packed[0].name}, {packed[1].name}, ...); give the path of one."
        )
    return packed[0] if packed else None


def load_gguf(file: Path, task: str) -> tuple[Any, list[str]]:
    """The model of a ``.gguf`` file, and remarks."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{file} needs the package gguf, which is not installed: pip install 'kernelformer[gguf]'")
    if task not in ("auto", "causal"):
        raise ValueError(f"{file.name} is of a causal language model, got task={task!r}; leave it out.")
    model, info = attempt(
        file,
        lambda: auto("AutoModelForCausalLM").from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        ),
    )
    lacking = _lacking(model, info)
    if lacking:
        raise ValueError(f"{file} lacks weights of {type(model).__name__}: {_some(lacking)}.")
    return model.eval(), [f"weights of {file.name} were unpacked to float32"]


def classes(config: Any, task: str) -> list[Any]:
    """Classes that the folder may be of, the best guess first."""
    import transformers

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


def fitting(path: object, kinds: Sequence[Any], load: _Load) -> tuple[Any, list[str]]:
    """The first class for which no weight is left random, and what of the weights it does not use."""
    misses = []
    for kind in kinds:
        model, info = load(kind)
        lacking = _lacking(model, info)
        if lacking and all(x.startswith(POOLER) for x in lacking):
            # Models of BERT's kin that were trained on masked tokens come without one, and embeddings do not need it.
            model, info = load(kind, add_pooling_layer=False)
            lacking = _lacking(model, info)
        if not lacking:
            unused = sorted(info["unexpected_keys"])
            remarks = [f"{kind.__name__} does not use these weights: {_some(unused)}"] if unused else []
            if kind is not kinds[0]:
                remarks.insert(0, f"its weights are those of {kind.__name__}, not of {kinds[0].__name__}")
            return model, remarks
        misses.append(f"{kind.__name__} lacks {_some(lacking)}")
    raise ValueError(
        f"{path} has not all weights of a model, so that some would be random: {'; '.join(misses) or 'no class fits'}. "
        f"Give another --task (of {', '.join(TASKS)}), or mend the folder."
    )


def _lacking(model: Any, info: dict[str, Any]) -> list[str]:
    """Weights that did not come from the files, and those that came in another shape."""
    odd = [x[0] if isinstance(x, tuple) else x for x in info.get("mismatched_keys") or ()]
    return sorted({*info["missing_keys"], *odd})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def kind_of(model: Any) -> str:
    """How inputs for a model are made."""
    if model.config.is_encoder_decoder:
        return "seq2seq"
    if not model.can_generate():
        return "masked" if "MaskedLM" in type(model).__name__ else "encoder"
    return "causal"


def load_tokenizer(path: str | Path, **options: Any) -> Any:
    """None where there is none; one of ours where there is only a vocabulary."""
    folder = Path(path)
    vocabulary = folder / "vocab.txt"
    whole = options or not folder.is_dir() or any((folder / x).is_file() for x in TOKENIZER_FILES)
    if not whole:
        # transformers would make one all the same: of special tokens alone, or one that knows no capitals.
        return tokenizer_of_vocabulary(vocabulary) if vocabulary.is_file() else None
    return attempt(
        path, lambda: auto("AutoTokenizer").from_pretrained(path, trust_remote_code=False, **options), "tokenizer"
    )
