"""Graphs of `torch.export` as files of ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.export import ExportedProgram

from kernelformer.quiet import silent_libraries

OPSET = 20  # of ONNX
ONE_FILE = 1 << 30  # bytes of weights beyond which they stand beside their graph: a file of ONNX ends at 2 GiB


class Named(Protocol):
    """What a graph was made from: the names of its inputs and outputs."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the inputs."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the outputs."""


def save_onnx(program: ExportedProgram, module: Named, path: Path) -> None:
    """Write a graph as ONNX.

    Args:
        program: the graph.
        module: that it was made from.
        path: of the file.
    """
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
    """Say in one line what `torch.export` could not trace; our own refusals come through as they are."""
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
