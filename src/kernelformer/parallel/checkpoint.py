"""Checkpoints of sharded models: saved by any number of processes, loaded by any other, to the last bit.

Written and read by `torch.distributed.checkpoint` with its safetensors storage, one file per process. Tensors are all
that these files hold; everything else is JSON, so that nothing in a folder is unpickled. (Torch's default storage
pickles its ``.metadata`` and every value that is not a tensor.) The plan that processes exchange is pickled by torch.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from kernelformer.files import (
    HASHES,
    PART,
    check_hashes,
    check_inside,
    json_text,
    read_hashes,
    read_json,
    sync,
    write_hashes,
    write_json,
)
from kernelformer.parallel.sharding import difference, first_problem

PREFIX = "optimizer."  # before the names of its tensors
_PARAMS = "params"


def read_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer as plain values, their parameters by name."""
    names = {id(x): name for name, x in model.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        params = [names.get(id(x)) for x in group[_PARAMS]]
        if None in params:
            raise ValueError(
                f"group {number} of {type(optimizer).__name__} has a parameter that {type(model).__name__} has not; "
                f"build the optimizer after `shard`, of the parameters that the model has then."
            )
        settings = {name: _plain(name, x) for name, x in group.items() if name != _PARAMS}
        groups.append({**settings, _PARAMS: params})
    return groups


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, x) for x in value]
    raise ValueError(f"a group's {name} must be a number, a text or several to be saved, got {value!r:.80}.")


def read_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of an optimizer, and its other values, by ``optimizer.PARAMETER.NAME``; none before the first step."""
    if not optimizer.state:  # torch would take a step to make some
        return {}, {}
    return _flat(get_optimizer_state_dict(model, optimizer))


def blank_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Tensors like those that the optimizer will have, for loading into; gradients of one without a step are dropped.

    Torch makes them by a step of rate 0 with gradients of 0.
    """
    if not optimizer.state:
        optimizer.zero_grad(set_to_none=True)
    return _flat(get_optimizer_state_dict(model, optimizer))[0]


def _flat(saved: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    flat = {f"{PREFIX}{name}.{key}": x for name, state in saved["state"].items() for key, x in state.items()}
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: _plain(name, x) for name, x in flat.items() if name not in tensors}


def write_state(
    model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], values: Mapping[str, Any]
) -> None:
    """Give an optimizer the groups of `read_groups`, and the tensors and values of `read_state` in one mapping."""
    state: dict[str, dict[str, Any]] = {}
    for name, x in values.items():
        parameter, _, key = name.removeprefix(PREFIX).rpartition(".")
        state.setdefault(parameter, {})[key] = x

    def like(value: Any, now: Any) -> Any:
        """A plain value as the optimizer has it: betas are a tuple, and a rate may be a tensor."""
        if isinstance(now, Tensor):
            return now.new_tensor(value).reshape(now.shape)
        return tuple(value) if isinstance(now, tuple) else value

    restored = [
        {name: like(x, now.get(name)) if name != _PARAMS else x for name, x in saved.items()}
        for saved, now in zip(groups, optimizer.param_groups, strict=True)
    ]
    whole = {"state": state, "param_groups": restored}
    # A parameter that never had a gradient has no state, and torch's strict loading wants one.
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(strict=False))  # type: ignore[arg-type]


RECORD = "sharded.json"
FORMAT = 1
MODEL = "model."  # before the names of its tensors
_FILES = "*.safetensors"
_FAILURES = (OSError, ValueError, TypeError, KeyError, SafetensorError, CheckpointException)


def save_sharded(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint of a model, sharded or not; every process calls it, and all see the same disk.

    The folder is whole or not there: it grows under another name. `load_sharded` reads it.

    Args:
        folder: that does not exist yet.
        model: of `shard`, or a plain one.
        optimizer: its state too.
        extra: plain values that come back from `load_sharded`: the step, the state of a schedule.

    Raises:
        ValueError: the folder exists or cannot be written, what is not sharded differs between processes, or a value
            is none that JSON could carry. On every process; nothing is left on the disk.
    """
    folder = Path(folder)
    part = folder.with_name(_of_first(f".{folder.name}.{uuid.uuid4().hex}{PART}"))
    tensors: dict[str, Tensor] = {}
    record: dict[str, Any] = {}

    def collect() -> None:
        tensors.update(_tensors(model))
        processes = 1 if _alone() else dist.get_world_size()
        record.update({"format": FORMAT, "processes": processes, "extra": dict(extra or {})})
        if optimizer is not None:
            record["groups"] = read_groups(model, optimizer)
            states, record["values"] = read_state(model, optimizer)
            tensors.update(states)
        record["tensors"] = {name: _size(x) for name, x in tensors.items()}

    try:
        _all_do(collect)
        _refuse_differences(tensors)
        _all_do(lambda: _prepare(folder, part, record), first=True)
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        _all_do(lambda: save(_rows(tensors), storage_writer=writer, no_dist=_alone()), f"{folder} cannot be written: ")
        _all_do(lambda: _publish(part, folder, record), f"{folder} cannot be written: ", first=True)
    finally:
        if _is_first():
            shutil.rmtree(part, ignore_errors=True)


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load a checkpoint of `save_sharded`, whatever number of processes wrote it; every process calls it.

    Files are compared with their hashes, and names and shapes with the model's, before anything of the model changes.
    An ordinary folder that ``from_pretrained`` loads is made of a checkpoint by a model that is not sharded:

        model = KernelformerForCausalLM(config)      # one process
        load_sharded("out/step-1000", model)
        model.save_pretrained("out/model")

    Args:
        folder: of the checkpoint.
        model: of `shard`, over as many processes as there are now, or a plain one.
        optimizer: of the same groups of parameters as the one that was saved; None leaves its state in the folder.

    Returns:
        What was given as ``extra``.

    Raises:
        ValueError: not such a folder, files that are missing or not those that were saved, another model, or another
            optimizer. On every process.
    """
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    record: dict[str, Any] = {}
    state = get_model_state_dict(model)

    def check() -> None:
        record.update(_read_record(folder))
        tensors.update(_tensors(model, state))
        _check_tensors(folder, model, record, tensors)
        if optimizer is not None:
            tensors.update(_optimizer_tensors(folder, model, optimizer, record))

    _all_do(check)
    _all_do(lambda: check_hashes(folder), first=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        reader = HuggingFaceStorageReader(str(folder))
        _all_do(lambda: load(_rows(tensors), storage_reader=reader), f"{folder} cannot be read: ")
    set_model_state_dict(model, state)
    if optimizer is not None:
        states = {name: x for name, x in tensors.items() if name.startswith(PREFIX)}
        write_state(model, optimizer, record["groups"], {**states, **record["values"]})
    extra: dict[str, Any] = record["extra"]
    return extra


def _tensors(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Parameters and saved buffers by ``model.NAME``; what has several names has its first."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    seen: dict[int, str] = {}
    repeated = {name for name, x in named if seen.setdefault(id(x), name) != name}
    given: Mapping[str, Any] = get_model_state_dict(model) if state is None else state
    other = [name for name, x in given.items() if not isinstance(x, Tensor)]
    if other:
        raise ValueError(f"{type(model).__name__} keeps {other[0]}, which is no tensor, and cannot be saved so.")
    return {f"{MODEL}{name}": x for name, x in given.items() if name not in repeated}


def _rows(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same tensors, single numbers as rows of one: torch reads files by slices, and a number has none."""
    return {name: x.view(1) if x.dim() == 0 else x for name, x in tensors.items()}


def _size(x: Tensor) -> list[Any]:
    return [str(x.dtype).removeprefix("torch."), *x.shape]


def _refuse_differences(tensors: Mapping[str, Tensor]) -> None:
    """Raise if something that every process has whole is not the same on all: one of them would be saved."""
    whole = {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}
    problem = "" if _alone() else difference(whole)
    if problem:
        raise ValueError(
            f"what is not sharded must be the same on all processes: {problem.replace(MODEL, '', 1)}; seed alike, and "
            f"calibrate with the same batches everywhere."
        )


def _prepare(folder: Path, part: Path, record: Mapping[str, Any]) -> None:
    if folder.exists():
        raise ValueError(f"{folder} exists already, and a checkpoint replaces nothing; give another folder.")
    try:
        json_text(record)
    except TypeError as problem:
        raise ValueError(f"extra must hold plain values (numbers, texts, lists), got {problem}.") from None
    part.mkdir(parents=True)


def _publish(part: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Give the folder its name once all of it is on the disk."""
    write_json(part / RECORD, record)
    write_hashes(part)
    for path in part.iterdir():
        sync(path)
    sync(part)
    part.rename(folder)
    sync(folder.parent)


def _read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a checkpoint whose files are those that were saved."""
    if not (folder / RECORD).is_file():
        raise ValueError(f"{folder} is not a checkpoint of save_sharded: it has no {RECORD}.")
    try:
        record = read_json(folder / RECORD)
    except ValueError as problem:
        raise ValueError(f"{folder / RECORD} is damaged: {problem}; take another checkpoint.") from None
    kinds = {"format": int, "extra": dict, "tensors": dict}
    if not isinstance(record, dict) or not all(isinstance(record.get(x), kind) for x, kind in kinds.items()):
        raise ValueError(f"{folder / RECORD} is damaged: it needs {', '.join(kinds)}; take another checkpoint.")
    if record["format"] != FORMAT:
        raise ValueError(f"{folder} has format {record['format']}, this version reads {FORMAT}.")
    check_inside(folder, folder.iterdir())
    hashes = read_hashes(folder)
    saved, here = (
        {x for x in names if Path(x).match(_FILES)} for names in (hashes, (y.name for y in folder.iterdir()))
    )
    missing = [HASHES] if RECORD not in hashes else sorted(saved - here)
    if missing or saved != here:
        what = f"{folder / missing[0]} is missing" if missing else f"{folder / min(here - saved)} was not saved with it"
        raise ValueError(f"{what}; bring the folder back as it was, or take another checkpoint.")
    return record


def _check_tensors(folder: Path, model: nn.Module, record: Mapping[str, Any], mine: Mapping[str, Tensor]) -> None:
    """Raise if the checkpoint is of another model."""
    saved = {name: x for name, x in record["tensors"].items() if name.startswith(MODEL)}
    sizes = {name: _size(x) for name, x in mine.items()}
    for name in (*saved, *sizes):
        if saved.get(name) != sizes.get(name):
            raise ValueError(
                f"{folder} is of another model than this {type(model).__name__}: {name.removeprefix(MODEL)} is "
                f"{_said(saved.get(name))} there and {_said(sizes.get(name))} here."
            )


def _optimizer_tensors(
    folder: Path, model: nn.Module, optimizer: Optimizer, record: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors of the optimizer to load into, if the checkpoint is of one like it; else it is left as it was."""
    if not isinstance(record.get("groups"), list) or not isinstance(record.get("values"), dict):
        raise ValueError(f"{folder} was saved without an optimizer; load it without one.")
    saved, mine = ([x.get("params") for x in groups] for groups in (record["groups"], read_groups(model, optimizer)))
    if saved != mine:
        counts = [", ".join(str(len(x or ())) for x in groups) for groups in (saved, mine)]
        raise ValueError(
            f"{folder} has an optimizer with other groups of parameters: of {counts[0]} there and {counts[1]} here, or "
            f"of others; build it in the same way."
        )
    fresh = not optimizer.state
    blank = blank_state(model, optimizer)
    for name, size in record["tensors"].items():
        if name.startswith(PREFIX) and (name not in blank or _size(blank[name]) != size):
            if fresh:
                optimizer.state.clear()
            here = _said(_size(blank[name]) if name in blank else None)
            raise ValueError(
                f"{folder} is of another optimizer than this {type(optimizer).__name__}: "
                f"{name.removeprefix(PREFIX)} is {_said(size)} there and {here} here."
            )
    return {name: x for name, x in blank.items() if name in record["tensors"]}


def _said(size: list[Any] | None) -> str:
    return "missing" if size is None else f"{tuple(size[1:])} in {size[0]}"


def _alone() -> bool:
    return not dist.is_initialized()


def _is_first() -> bool:
    return _alone() or dist.get_rank() == 0


def _of_first(text: str) -> str:
    """Broadcast the text of the first process."""
    texts: list[Any] = [text]
    if not _alone():
        dist.broadcast_object_list(texts, 0)
    return str(texts[0])


def _all_do(action: Callable[[], object], what: str = "", first: bool = False) -> None:
    """Run on all processes, or the first alone; an error on one is raised on all."""
    problem = ""
    try:
        if not first or _is_first():
            action()
    except _FAILURES as found:
        problem = what + _reason(found)
    problem = first_problem(problem)
    if problem:
        raise ValueError(problem)


def _reason(problem: BaseException) -> str:
    """One line on an error; torch wraps those of other processes."""
    while isinstance(problem, CheckpointException) and problem.failures:
        problem = next(iter(problem.failures.values()))[0]
    text = " ".join(str(problem).split())
    return text[:400] or type(problem).__name__
