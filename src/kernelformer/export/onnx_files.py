"""Exported graphs beside the model in torch: the same inputs, and the largest difference of what comes out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from kernelformer.export.graphs import LayerPrompt, LayerStep, Prompt, Step, Whole, empty_cache
from kernelformer.quiet import silent_libraries

OPSET = 20  # of ONNX
ONE_FILE = 1 << 30  # bytes of weights beyond which they stand beside their graph: a file of ONNX ends at 2 GiB


def save_onnx(program: ExportedProgram, module: Whole | Prompt | Step | LayerPrompt | LayerStep, path: Path) -> None:
    """Write a graph as ONNX."""
    weights = sum(x.numel() * x.element_size() for x in program.state_dict.values())
    with quiet_exporter():
        made = torch.onnx.export(
            program,
            opset_version=OPSET,
            input_names=list(module.inputs),
            output_names=list(module.outputs),
            verbose=False,
        )
        assert made is not None
        for node in made.model.graph.all_nodes():
            node.metadata_props.clear()  # the lines of code that made it, with paths of this machine
        made.save(str(path), external_data=weights > ONE_FILE)


@contextmanager
def traced(name: str) -> Iterator[None]:
    """Turn errors of `torch.export` into one line; our own errors pass through."""
    try:
        with quiet_exporter():
            yield
    except ValueError:
        raise
    except Exception as problem:
        lines = [x.strip() for x in str(problem).splitlines() if x.strip()]
        raise ValueError(
            f"{name} could not be traced by torch.export: {lines[0] if lines else type(problem).__name__}"
        ) from problem


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's remarks on packages that are not there and on names of axes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), silent_libraries():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


SIZES = ((2, 1), (1, 5), (2, 64), (3, 65), (2, 150))  # samples and tokens of sequences: around a chunk's size, and 1
MOST = 1024  # tokens; a model with more positions is not compared at its longest
TOLERANCE = 1e-3  # of the largest output; rounding through all layers of a model stays far below it


@dataclass(frozen=True)
class Differences:
    """The largest differences of an exported model from torch, over the largest output."""

    sequences: float
    padded: float
    steps: float | None = None

    def check(self) -> None:
        """Raise a ValueError where one of them is more than rounding."""
        for what, value in asdict(self).items():
            if value is not None and not value <= TOLERANCE:
                raise ValueError(
                    f"the exported graph differs from the model in torch by {value:.2g} of its largest output "
                    f"({what}), more than {TOLERANCE:g}: nothing was written. Please report this model's config.json."
                )


def session(path: Path, threads: int = 0) -> Any:
    """The graph of a file, to be run on the CPU; so many threads, or all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_graph(graph: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a graph, for arrays in the order of its inputs."""
    names = [x.name for x in graph.get_inputs()]
    result: list[Any] = graph.run(None, dict(zip(names, inputs, strict=True)))
    return result


def difference(graph: Any, torch_output: Tensor) -> float:
    """The largest difference of an array from a tensor, over the largest number of the tensor; NaN where it has any."""
    exact = torch_output.numpy()
    return float(np.abs(graph - exact).max() / max(np.abs(exact).max(), 1e-30))


def lengths(longest: int | None) -> list[tuple[int, int]]:
    """Samples and tokens to compare with, as far as a model has positions, and as many as it has."""
    sizes = [(batch, length) for batch, length in SIZES if longest is None or length < longest]
    return sizes if longest is None or longest > MOST else [*sizes, (2, longest)]


@torch.no_grad()
def compare(modules: Mapping[str, Whole | Prompt | Step], folder: Path, longest: int | None, steps: int) -> Differences:
    """Run the graphs in a folder and the model in torch on the same tokens."""
    (first, whole), *rest = modules.items()
    assert not isinstance(whole, Step)
    graph, plain, padded = _here(folder / first), list[float](), list[float]()
    for batch, length in lengths(longest):
        inputs = list(whole.example(length, batch))
        for found in (padded, plain):
            output = run_graph(graph, [x.numpy() for x in inputs])[0]
            found.append(difference(output, reference(whole, inputs)))
            inputs[1] = torch.ones_like(inputs[1])  # the second time nothing is padded
    after = None
    for name, _ in rest:
        assert isinstance(whole, Prompt)
        count = steps if longest is None else min(steps, longest - longest // 2)
        length = 20 if longest is None else min(20, longest // 2)
        after = max(_steps(whole, graph, _here(folder / name), length, count))
    return Differences(max(plain), max(padded), after)


def _here(path: Path) -> Any:
    """The graph of a file, with as many threads as torch has."""
    return session(path, torch.get_num_threads())


def reference(module: Whole | Prompt, inputs: Sequence[Tensor]) -> Tensor:
    """Output of the model in torch, by its own algorithms."""
    if isinstance(module, Whole):
        output: Tensor = module(*inputs)
        return output
    model: Any = module.model
    ids, mask = inputs
    logits: Tensor = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    return logits if module.every else logits[:, -1:]


def _steps(prompt: Prompt, graph: Any, decode: Any, length: int, steps: int) -> Iterator[float]:
    """Differences of the logits after each token of a generation, of two samples, one of them padded."""
    model: Any = prompt.model
    ids, mask = prompt.example(length)
    cache, positions = empty_cache(model), (mask.cumsum(1) - 1).clamp_min(0)
    outputs = run_graph(graph, [ids.numpy(), mask.numpy()])
    logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True).logits
    for _ in range(steps):
        token = logits[:, -1].argmax(1, keepdim=True)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        logits = model(token, **given).logits
        outputs = run_graph(decode, [token.numpy(), *outputs[1:]])
        yield difference(outputs[0], logits)
