"""Models in ``.gguf`` files, the format of llama.cpp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kernelformer.files import check_inside
from kernelformer.hf.pretrained import attempt, first_names, lacking_weights


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
    """Load the model of a ``.gguf`` file in float32, in evaluation mode, and remarks for the user.

    Raises:
        ValueError: the package gguf is missing, or weights are.
    """
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
