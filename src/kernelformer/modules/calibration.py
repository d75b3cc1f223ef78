"""Calibration of maps that depend on statistics of queries and keys: of one core, and of a whole model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kernelformer.feature_maps.statistics import CalibratedMap, moments_of
from kernelformer.modules.checks import Call

if TYPE_CHECKING:
    from kernelformer.modules.core import AttentionCore


def calibrate(model: nn.Module, batches: Iterable[Any], *, reset: bool = False, exact: bool = False) -> dict[str, int]:
    """Calibrate every attention of a model that has something to calibrate, by running it.

        kf.calibrate(model, [{"input_ids": ids, "attention_mask": mask} for ids, mask in texts])

    The model runs without gradients and in evaluation mode, as it is: what an attention is given in `forward` is what
    its map will see, after projections, positions and normalization. Statistics change when all batches are through,
    and not at all if something fails.

    Args:
        model: any module with attention cores inside; that which is called.
        batches: arguments of calls of the model: a tensor, a tuple of arguments, or a mapping of arguments by name.
        reset: forget earlier statistics; else they go on.
        exact: the attentions to calibrate attend by softmax meanwhile, in quadratic time, so that later ones are given
            what they would be given by the model that theirs stands for: for a pretrained model, whose attention random
            features without calibration may be far from.

    Returns:
        The number of queries that the first map of each core has counted, by the name of the core's module.

    Raises:
        ValueError: the model has nothing to calibrate, there are no batches, or none reached an attention.
    """
    cores = {name: x for name, x in model.named_modules() if getattr(x, "calibrates", False)}
    if not cores:
        raise ValueError(
            f"{type(model).__name__} has no attention with statistics to calibrate; use 'favor++', 'favor#', or "
            f"'loglinear' with start='favor#'."
        )
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be several of them, each a tensor, a tuple or a mapping, got {type(batches).__name__}; put "
            f"a single one into a list."
        )
    for core in cores.values() if not reset else ():
        calibrated_map(core).check_calibration(core.scale)
    seen: dict[str, Tensor] = {}
    with evaluating(model), torch.no_grad(), _watching(cores, seen), _attending_exactly(cores if exact else {}):
        count = 0
        for batch in batches:
            _call(model, batch)
            count += 1
    if not seen:
        raise ValueError(
            f"{count} batches reached none of the {len(cores)} attentions to calibrate in {type(model).__name__}; give "
            f"batches that run through it, and to a decoder use_cache=False."
        )
    for name, moments in seen.items():
        phi = calibrated_map(cores[name])
        if reset:
            phi.reset_calibration()
        phi.calibrate(moments, cores[name].scale)
    idle = [name for name in cores if name not in seen]
    if idle:
        warnings.warn(
            f"{len(idle)} of {len(cores)} attentions saw no tokens and stay as they were: {', '.join(idle)}.",
            stacklevel=2,
        )
    return {name: int(seen[name][0, 0, -1, -1]) if name in seen else 0 for name in cores}


def calibrated_map(core: AttentionCore) -> CalibratedMap:
    """Return the calibrated map of a core."""
    if not core.calibrates:
        raise ValueError(
            f"{core.method!r} has no statistics to calibrate; use 'favor++', 'favor#', or 'loglinear' with "
            f"start='favor++' or start='favor#'."
        )
    return cast(CalibratedMap, core.feature_map)


def real_moments(
    core: AttentionCore, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """Compute `moments_of` the real tokens, as the map of a core sees them."""
    phi = calibrated_map(core)
    call = Call(query=query, key=key, value=key, scale=core.scale, key_mask=key_mask, query_mask=query_mask)
    call = core._accept(call)
    with torch.no_grad():
        tokens = core._normalize_qk(call.query, call.key, call.key_mask)
        masks = {"queries": call.real_queries, "keys": call.key_mask}
        rows = [_rows(x, mask, phi.heads) for x, mask in zip(tokens, masks.values(), strict=True)]
        for name, x in zip(masks, rows, strict=True):
            bad = int((~x.isfinite()).any(2).sum())
            if bad or not x.shape[1]:
                what = f"{bad} of {x.shape[0] * x.shape[1]} with NaN or an infinity" if bad else "none that is real"
                raise ValueError(
                    f"calibration takes finite {name}, got {what}; hide tokens by key_mask and query_mask, or leave "
                    f"the batch out. Nothing was counted."
                )
        return moments_of(rows[0], rows[1])


def _rows(x: Tensor, mask: Tensor | None, heads: int) -> Tensor:
    """Select the real tokens for each map: (B, H or G, L, D) -> (heads, N, D)."""
    if x.shape[1] < heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    tokens = x.unflatten(1, (heads, -1)).movedim(3, 1)  # (B, L, heads, R, D)
    kept = tokens.flatten(0, 1) if mask is None else tokens[mask]
    rows: Tensor = kept.transpose(0, 1).flatten(1, 2)
    return rows


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


@contextmanager
def _watching(cores: Mapping[str, AttentionCore], seen: dict[str, Tensor]) -> Iterator[None]:
    """Sum up the moments of the inputs of cores, by name."""

    def count(name: str, core: AttentionCore, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = {**dict(zip(("query", "key"), args, strict=False)), **keywords}
        new = real_moments(core, *(given.get(x) for x in ("query", "key", "key_mask", "query_mask")))  # type: ignore[arg-type]
        seen[name] = seen[name] + new if name in seen else new

    with ExitStack() as hooks:
        for name, x in cores.items():
            hooks.enter_context(x.register_forward_pre_hook(partial(count, name), with_kwargs=True))
        yield


@contextmanager
def _attending_exactly(cores: Mapping[str, AttentionCore]) -> Iterator[None]:
    """Replace the forward of cores by softmax attention for a block."""
    from kernelformer.modules.exact import SoftmaxCore  # which is itself a core

    for core in cores.values():
        sizes: dict[str, Any] = {"head_dim": core.head_dim, "num_heads": core.num_heads, "scale": core.scale}
        vars(core)["forward"] = SoftmaxCore("softmax", normalize_qk=core.normalize_qk, **sizes).forward
    try:
        yield
    finally:
        for core in cores.values():
            del vars(core)["forward"]


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode for a block, and restore the mode of each part afterwards."""
    modes = [(x, x.training) for model in models for x in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
