"""The choice of the algorithm: the one place that decides which implementation a call runs through.

| a call | runs through |
| --- | --- |
| on an accelerator, in an export, or by name | `plain`: operations of torch, or pair by pair under a bias |
| short, normalized, of a positive map | `short`: the matrix of weights |
| bidirectional, causal | `linear`, `causal` |
| near tokens exactly | `near_far` |
| a relative bias | `near_far` within a distance; else `relative`: by tiles, `fft` where that is faster and safe |

A choice depends on sizes, on the device and on what was asked for; values are looked at only where a bias may be
constant beyond a distance, or too rough for transforms, and only where looking is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention import linear
from kernelformer.attention.blocks import CAUSAL_CHUNK, Shapes
from kernelformer.attention.causal import causal_attention
from kernelformer.attention.near_far import near_far_attention
from kernelformer.attention.near_far_call import NAMES, NearFarCall
from kernelformer.attention.plain.attend import plain_causal_attention, plain_linear_attention
from kernelformer.attention.plain.biased import covers, plain_biased_attention
from kernelformer.attention.plain.layout import ACCELERATORS, readable_without_sync
from kernelformer.attention.plain.near_far import plain_near_far_attention
from kernelformer.attention.plain.operator import run_plain
from kernelformer.attention.plain.pairs import pairs_attention
from kernelformer.attention.relative.call import Layout, RelativeCall, constant_beyond
from kernelformer.attention.relative.fft import fft_attention, is_safe
from kernelformer.attention.relative.operator import relative_attention
from kernelformer.attention.short import direct_attention
from kernelformer.contract import PositiveSpec, lookup, transforms_active
from kernelformer.errors import choice

LOOPS = ("chunked", "plain")  # for every call of a feature map; "chunked" needs the least memory, and is best on a CPU
BIASED = ("direct", "fft", "windowed")  # for calls with a bias
ALIASES = {"parallel": "plain"}  # the name of earlier versions
# Time of a transformed number over that of a multiplication in a tile, measured; see `faster_by_fft`.
TRANSFORM = 250.0
LONGEST = 256  # tokens up to which the features of whole sequences are small
# How many more operations the matrix may take, bidirectional and causal: no states are made, which are more to write
# than to compute, and nothing runs chunk by chunk. Measured on a CPU at 16 to 256 features.
RATES = (1.25, 1.75)


def check_algorithm(algorithm: str | None, method: str, takes_loops: bool) -> str | None:
    """Check the name of an algorithm, and return it where it is for calls with and without a bias alike: `LOOPS`."""
    if algorithm is None:
        return None
    algorithm = ALIASES.get(algorithm, algorithm)
    choice("algorithm", algorithm, (*LOOPS, *BIASED))
    if algorithm in LOOPS and not takes_loops:
        raise ValueError(
            f"algorithms are for methods with a feature map, got algorithm={algorithm!r} for {method!r}; leave it out."
        )
    return algorithm if algorithm in LOOPS else None


def takes_plain(asked: str | None, inputs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Use `plain`: where it is asked for by name, and on an accelerator where no other algorithm is.

    Never in an export, which has no other way, nor where there is nothing to compute: the loop over no chunks does
    that.
    """
    by_device = asked is None and inputs[0].device.type in ACCELERATORS
    return (asked == "plain" or by_device) and not torch.compiler.is_exporting() and all(x.numel() > 0 for x in inputs)


def prefers_direct(s: Shapes, *, is_causal: bool) -> bool:
    """True if the matrix of weights costs less than sums over keys, by sizes alone."""
    if min(s.B, s.L, s.S) == 0 or max(s.L, s.S) > LONGEST:
        return False
    queries = s.H // s.G * s.L
    sums = (s.S + queries) * s.M * s.E
    if is_causal:  # inside of its chunks `causal` has a matrix too
        sums += queries * min(CAUSAL_CHUNK, s.S) * (s.M + s.E)
    return queries * s.S * (s.M + s.E) <= RATES[is_causal] * sums


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spec: str,
    tensors: Sequence[Tensor],
    scale: float,
    key_mask: Tensor | None = None,
    normalize: bool = True,
    is_causal: bool = False,
    state: Sequence[Tensor] | None = None,
    streams: bool = False,
    decay: Tensor | None = None,
    algorithm: str | None = None,
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Attend through a feature map, without a bias and near tokens; other arguments as `linear.linear_attention`.

    Args:
        is_causal: key j is visible to query i iff j <= i.
        state: tensors of the state before a causal call.
        streams: whether the state after it is wanted.
        decay: (B, G, S), what each key adds to the logarithms of all earlier weights, for signed maps.
        algorithm: ``chunked``, ``plain`` or None.

    Returns:
        (B, H, L, E), and of a causal call the tensors of the state after it.
    """
    common: dict[str, Any] = {"spec": spec, "tensors": tensors, "scale": scale, "key_mask": key_mask}
    if torch.compiler.is_exporting() or takes_plain(algorithm, (query, key, value)):
        if not is_causal:
            return plain_linear_attention(query, key, value, **common, normalize=normalize), None
        more: dict[str, Any] = {"normalize": normalize, "state": state, "streams": streams, "decay": decay}
        return plain_causal_attention(query, key, value, **common, **more)
    known, inputs = lookup(spec), {"query": query, "key": key, "value": value}
    if not isinstance(known, PositiveSpec) or transforms_active():
        if not is_causal:
            return run_plain("linear", **inputs, **common, normalize=normalize)[0], None
        given = {"state": state, "streams": True, "decay": decay}
        out, *after = run_plain("causal", **inputs, **common, normalize=normalize, **given)
        return out, after
    if algorithm is None and normalize and state is None and not streams:
        shapes = Shapes.of(query, key, value, known.feature_dim(tensors, query.shape[3]))
        if prefers_direct(shapes, is_causal=is_causal):
            return direct_attention(query, key, value, **common, is_causal=is_causal), None
    if not is_causal:
        return linear.linear_attention(query, key, value, **common, normalize=normalize), None
    return causal_attention(query, key, value, **common, normalize=normalize, state=state)


def attend_near_far(
    call: NearFarCall, *, plain: bool = False, leading: int = 0, streams: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Attend to near tokens exactly and to far ones through a feature map; see `near_far.near_far_attention`.

    Where `takes_plain` has chosen ``plain``, ``leading`` sinks are known to be the first keys of the call and visible.
    """
    # Graphs of one length, which a bias has, may have operators of ours.
    exports = torch.compiler.is_exporting() and not call.bias
    if exports or (plain and not call.dropout):
        return plain_near_far_attention(call, leading=leading, streams=streams)
    if has_operators(call) and not (plain or transforms_active()):
        return near_far_attention(call)
    given = {name: getattr(call, name) for name in NAMES}
    out = run_plain("near_far", leading=leading, streams=streams and bool(call.spec), **given)
    return out[0], out[1:]


def has_operators(call: NearFarCall) -> bool:
    """True if the operators for near and far keys serve a call: a positive map, or none, without a slope."""
    positive = not call.spec or isinstance(lookup(call.spec), PositiveSpec)
    return positive and len(call.bias) < 3


def key_sums(key: Tensor, value: Tensor, **how: Any) -> list[Tensor]:
    """The state of some keys; arguments as those of `plain_key_sums`."""
    if isinstance(lookup(how["spec"]), PositiveSpec) and how.get("slope") is None and not transforms_active():
        return linear.key_sums(key, value, **{name: x for name, x in how.items() if name not in ("slope", "mirror")})
    return run_plain("key_sums", key=key, value=value, **how)


def read_sums(query: Tensor, state: Sequence[Tensor], **how: Any) -> Tensor:
    """Attend to the keys of a state; see `linear.read_sums`."""
    if isinstance(lookup(how["spec"]), PositiveSpec) and not transforms_active():
        return linear.read_sums(query, state, **how)
    return run_plain("read_sums", query=query, state=state, **how)[0]


def faster_by_fft(features: int, width: int, layout: Layout, is_causal: bool) -> bool:
    """True if transforms take less time than tiles: M (E + 1) n against L S (M + E), each with its constant."""
    n = layout.L + layout.S
    tiles = layout.L * layout.S * (features + width) * (0.5 if is_causal else 1.0)
    return TRANSFORM * features * (width + 1) * n * (4 if layout.rows else 1) < tiles


def find_window(bias: Tensor, layout: Layout, is_causal: bool = False) -> int | None:
    """The distance beyond which a bias that nobody trains is constant, where that saves work."""
    if layout.rows or bias.requires_grad or not readable_without_sync(bias):
        return None
    reach = constant_beyond(bias, layout.L - 1 + layout.offset, is_causal)
    return reach if 2 * reach < max(layout.L, layout.S) else None


def attend_plain_biased(call: RelativeCall, *, keep: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Attend with a relative bias by plain operations; arguments and results as those of `relative_attention`."""
    if covers(call):
        return plain_biased_attention(call, streams=keep is not None)
    by_pairs = relative_attention if torch.compiler.is_compiling() else pairs_attention  # as an operator in a graph
    return by_pairs(call, keep=keep)


def attend_biased(call: RelativeCall, *, features: int, algorithm: str | None = None) -> Tensor:
    """Attend with a relative bias by the algorithm of that name, or by the best one: (B, H, L, E).

    None is `windowed` where the bias is known to be a straight line beyond a distance, or a constant by its values;
    else `fft` where it is faster and its rounding does not show; else `direct`.
    """
    layout, window, chosen = call.layout, call.window, algorithm
    if (call.state or call.right_state) and (window is None or algorithm in ("direct", "fft")):
        raise ValueError(
            f"a call with sums of keys needs a window and algorithm='windowed' or None, got {window=} and {algorithm=}."
        )
    if algorithm not in ("direct", "fft") and window is None:
        window = find_window(call.bias, layout, call.is_causal)
    if algorithm == "plain":
        return attend_plain_biased(replace(call, window=window))[0]
    if algorithm is None and window is None:
        can_read = not torch.compiler.is_compiling() and not call.query.is_meta
        if can_read and faster_by_fft(features, call.value.shape[3], layout, call.is_causal):
            chosen = "fft" if is_safe(call) else "direct"
    if chosen == "fft" and layout.L and layout.S and call.query.shape[0]:
        return fft_attention(call)
    if chosen == "windowed" and window is None:
        window = max(layout.L, layout.S)
    if chosen in ("direct", "fft"):
        return relative_attention(replace(call, window=None, slope=None))[0]
    return relative_attention(replace(call, window=window))[0]
