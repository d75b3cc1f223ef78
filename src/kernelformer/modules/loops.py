"""The two algorithms that every feature map has: a loop over chunks, and all chunks at once for accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelformer.attention import causal_attention, direct_attention, linear_attention
from kernelformer.attention.blocks import Shapes
from kernelformer.attention.plain.attend import ALIASES, LOOPS, plain_causal_attention, plain_linear_attention
from kernelformer.attention.relative.dispatch import ALGORITHMS
from kernelformer.attention.short import prefers_direct
from kernelformer.contract import PositiveSpec
from kernelformer.errors import choice
from kernelformer.modules.bias import bias_not_plain
from kernelformer.modules.checks import Call

if TYPE_CHECKING:
    from kernelformer.modules.kernel import KernelCore


def check_algorithm(algorithm: str | None, method: str, takes_loops: bool) -> str | None:
    """Check the name of an algorithm, and return it where it is for calls with and without a bias alike.

    Args:
        algorithm: as the caller gave it.
        method: for messages.
        takes_loops: whether its core knows `LOOPS`.
    """
    if algorithm is None:
        return None
    algorithm = ALIASES.get(algorithm, algorithm)
    choice("algorithm", algorithm, (*LOOPS, *ALGORITHMS))
    if algorithm in LOOPS and not takes_loops:
        raise ValueError(
            f"algorithms are for methods with a feature map, got algorithm={algorithm!r} for {method!r}; leave it out."
        )
    return algorithm if algorithm in LOOPS else None


def not_plain(core: KernelCore, call: Call) -> str | None:
    """What of a call the algorithm for accelerators does not cover; None where it covers all."""
    near = core.near
    if near is None:
        return None if call.bias is None else bias_not_plain(core.feature_map.spec, call)
    slope = None if call.bias is None else call.bias.slope
    if slope is not None and not isinstance(core.feature_map.spec, PositiveSpec):
        return f"a slope beside the signed map of {core.method!r}"
    return near.not_plain()


def attend_plain(
    core: KernelCore, call: Call, inputs: tuple[Tensor, Tensor, Tensor], tensors: Sequence[Tensor], *, plain: bool
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Attend without a bias and near keys: (B, H, L, E), and of a causal call the tensors of the state after it.

    Args:
        core: the core.
        call: the call.
        inputs: its queries, and keys and values for each head of the map.
        tensors: of the map.
        plain: by the algorithm for accelerators.
    """
    common: dict[str, Any] = {
        "spec": core.feature_map.spec_id,
        "tensors": tensors,
        "scale": call.scale,
        "key_mask": call.key_mask,
        "normalize": core.normalize,
    }
    if not plain and _takes_direct(core, call, inputs):
        del common["normalize"]
        return direct_attention(*inputs, **common, is_causal=call.is_causal), None
    if not call.is_causal:
        return (plain_linear_attention if plain else linear_attention)(*inputs, **common), None
    common["state"] = None if call.state is None else call.state.tensors
    if plain:
        return plain_causal_attention(*inputs, **common, streams=call.streams)
    return causal_attention(*inputs, **common)


def _takes_direct(core: KernelCore, call: Call, inputs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether a call goes by the matrix of weights: no loop was asked for, no state is in it, and sequences are short.

    An exported graph is for all lengths, so that it is not chosen there.
    """
    if call.algorithm is not None or call.in_stream or not core.normalize or torch.compiler.is_exporting():
        return False
    if not isinstance(core.feature_map.spec, PositiveSpec):
        return False
    return prefers_direct(Shapes.of(*inputs, core.feature_dim), is_causal=call.is_causal)
