"""The interface that all attention cores share, with its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.attention import State
from kernelformer.attention.dispatch import check_algorithm
from kernelformer.attention.state import MadeBy
from kernelformer.contract import compute_dtype, no_autocast, within_transforms
from kernelformer.errors import flag, positive_int, shape
from kernelformer.feature_maps.statistics import CalibratedMap
from kernelformer.modules.bias import check_bias, check_step_bias
from kernelformer.modules.calibration import calibrated_map, real_moments
from kernelformer.modules.checks import Call, check_mask, check_scale, config_mismatch
from kernelformer.modules.context import ACTIVE, needs_whole
from kernelformer.modules.packed import attend_packed, check_packed, enter_segment, last_id
from kernelformer.modules.split import attend_split

# Arguments of `AttentionCore.forward` that say something of a bias, where they say nothing.
NOTHING_KNOWN: dict[str, Any] = {"algorithm": None, "max_distance": None, "slope": None, "num_prefix": 0}


def check_floats(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that queries, keys and values are floating point tensors."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; convert it with torch.as_tensor().")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}; convert it with .float().")


def check_inputs(call: Call, *, head_dim: int, num_heads: int) -> Call:
    """Check that types, shapes, dtypes and devices fit each other and the core; under autocast convert to its dtype."""
    check_floats(call.query, call.key, call.value)
    kind = call.query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
    query, key, value = call.query, call.key, call.value
    q, k, v = query.shape, key.shape, value.shape
    for name, size in (("query", q), ("key", k), ("value", v)):
        if len(size) != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim), got shape {tuple(size)}.")
    if not (query.dtype == key.dtype == value.dtype):
        raise ValueError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; "
            f"convert with .to()."
        )
    if not (query.device == key.device == value.device):
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
        )
    if q[3] != k[3]:
        raise ValueError(
            f"query and key must have the same head dimension, got {q[3]} and {k[3]} "
            f"(shapes {tuple(q)} and {tuple(k)})."
        )
    for name, built, got in (("head_dim", head_dim, q[3]), ("num_heads", num_heads, q[1])):
        if built != got:
            raise ValueError(
                f"this core was built with {name}={built}, got queries of shape {tuple(q)}; build it with {name}={got}."
            )
    if k[:3] != v[:3]:
        raise ValueError(
            f"key and value must have the same batch, heads and length, got shapes {tuple(k)} and {tuple(v)}."
        )
    if q[0] != k[0]:
        raise ValueError(
            f"query and key must have the same batch size, got {q[0]} and {k[0]} (shapes {tuple(q)} and {tuple(k)})."
        )
    if k[1] == 0 or q[1] % k[1]:
        raise ValueError(
            f"the number of key heads must divide that of query heads, got {k[1]} and {q[1]} "
            f"(shapes {tuple(k)} and {tuple(q)})."
        )
    return call


class AttentionCore(nn.Module):
    """Attention over given queries, keys and values: everything between the projections.

    `forward` and `step` check their arguments and make a `Call` of them. A method implements `_attend` and, where it
    streams, `_step`, `_stream_refusal`, `_misfit` and `_forget`; none of them sees more than the call.

    Args:
        method: the method's name, for messages.
        head_dim: D.
        num_heads: H, of the queries.
        scale: of the product q . k, where a call gives none; None means 1 / sqrt(D), or 1 with ``normalize_qk``.
        normalize_qk: divide queries and keys by their L2 norm first (NPRF with RPE, Sec. 3.2).
    """

    streams_all = False  # whether it streams whatever its settings
    splits = False  # whether it attends over ranks
    takes_gate = False
    takes_bias = False
    takes_segments = True
    has_near = False  # whether near tokens and the first ones are attended to exactly, others not
    takes_dropout = False  # whether it forms weights that can be dropped
    attention_dropout = 0.0  # the share that training drops
    map_heads = 0  # key heads with feature maps of their own; 0: any number fits
    mixes_queries = False  # whether one query's output depends on the others
    export_refusal: str = ""  # why no graph of any length can be made of it
    takes_loops = False  # whether it knows the algorithms "chunked" and "plain"

    def __init__(
        self, method: str, *, head_dim: int, num_heads: int, scale: float | None = None, normalize_qk: bool = False
    ) -> None:
        super().__init__()
        self.method = method
        self.head_dim = positive_int("head_dim", head_dim)
        self.num_heads = positive_int("num_heads", num_heads)
        self.normalize_qk = flag("normalize_qk", normalize_qk)
        self.scale = check_scale(scale if scale is not None else 1.0 if normalize_qk else head_dim**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        algorithm: str | None = None,
        max_distance: int | None = None,
        slope: Tensor | None = None,
        num_prefix: int = 0,
        gate: Tensor | None = None,
        query_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Attend.

        Args:
            query: (B, H, L, D).
            key: (B, G, S, D), G divides H.
            value: (B, G, S, E).
            is_causal: key j is visible to query i iff j <= i; with a state of P tokens, iff j <= P + i.
            key_mask: (B, S) bool, True = attend. Keys and values that it hides may hold anything, NaN too.
            bias: relative position bias, added to the logarithm of the weights: (H, L + S - 1) over distances j - i
                from -(L - 1) to S - 1, with a state of P tokens (H, P + 2 L - 1) from -(P + L - 1) to L - 1; or
                (H, 2 R - 1, 2 C - 1) for tokens on an R x C grid, row by row. -inf = hidden.
            scale: of the product q . k; default ``self.scale``.
            algorithm: with a feature map ``chunked``, a loop over chunks, or ``plain``, all chunks at once, which is
                chosen by itself on CUDA, MPS and XPU devices; with a bias also ``direct``, ``fft`` and ``windowed``;
                None for the best one.
            max_distance: says that the bias is constant beyond this distance, which makes the cost linear; the gradient
                of what lies beyond goes to the entries at that distance. That it is so is checked, under
                `torch.compile` by the device (CPU or CUDA) with a RuntimeError, as are NaN and +inf in a bias and the
                range of a gate.
            slope: (H), the bias goes on beyond ``max_distance`` by -slope per token instead, as ALiBi's does.
            num_prefix: tokens before the grid, with bias 0 to and from everything.
            gate: (B, H, S) in (0, 1), how much of the past each token keeps; for gated methods.
            query_mask: (B, L) bool, which queries are real: methods that take landmarks from the queries pass over the
                others, which still get outputs. Default: ``key_mask`` where queries and keys are equally many, as in
                self-attention, else all of them; cross-attention over padded keys of the same length has to say.
            segment_ids: (B, L) integers that do not decrease along a row: tokens see those with their own id only, as
                if each segment were a row of its own. Self-attention only. The first one goes on from a state of its
                id; other states are forgotten. Compiled graphs break here.
            state: resume after what it has seen; causal only. With a bias gradients stop at a state: detach it.
            return_state: also return the state after the last key; causal only.

        Returns:
            (B, H, L, E), zero where no key is visible; with ``return_state`` also the state.
        """
        loop = None if algorithm is None else check_algorithm(algorithm, self.method, self.takes_loops)
        asked = None if loop else algorithm
        known = {"algorithm": asked, "max_distance": max_distance, "slope": slope, "num_prefix": num_prefix}
        call = Call(
            query=query,
            key=key,
            value=value,
            scale=self.scale,
            is_causal=is_causal,
            key_mask=key_mask,
            query_mask=query_mask,
            gate=gate,
            segment_ids=segment_ids,
            state=state,
            streams=return_state,
            dropout=self.attention_dropout if self.training else 0.0,
            algorithm=loop,
        )
        if ACTIVE:
            out, after = attend_split(self, partial(self._checked, call, scale, bias, known, whole=False), ACTIVE[-1])
        else:
            call = self._checked(call, scale, bias, known)
            if segment_ids is None:
                out, after = self._attend_alone(call)
            else:  # boundaries have to be read, which a graph cannot
                packed = torch.compiler.disable(attend_packed) if torch.compiler.is_compiling() else attend_packed
                out, after = packed(self, call)
        return (out, after) if return_state and after is not None else out

    def _checked(
        self, call: Call, scale: float | None, bias: Tensor | None, known: dict[str, Any], *, whole: bool = True
    ) -> Call:
        """Check that the arguments fit one another and the core, and add the scale and the bias of the call."""
        if scale is not None:
            call = replace(call, scale=self._resolve_scale(scale))
        call = self._accept(call)
        streams = call.streams or call.state is not None
        if streams:
            self._check_can_stream(call, "a state")
        if bias is not None:
            self._check_takes_bias(bias)
        if bias is not None or known != NOTHING_KNOWN:
            call = replace(call, bias=check_bias(bias, call, **known, whole=whole))
        if streams:
            self._check_stream(call)
        if call.gate is not None:
            self._check_gate(call.gate, call.key)
        if call.segment_ids is not None or call.state is not None:
            check_packed(self, call)
        problem = self.refusal(call.is_causal)
        if problem is not None:
            raise problem
        return call

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        bias: Tensor | None = None,
        slope: Tensor | None = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        gate: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Attend with one token, and take it into the state.

        Args:
            query: (B, H, 1, D).
            key: (B, G, 1, D).
            value: (B, G, 1, E).
            state: after the tokens before it; None starts. That of a feature map has a constant size; with a bias it
                also holds the last W keys and values, or all of them if it was made without a window. That of an exact
                method keeps every key and value: it grows with the context.
            bias: (H, W + 1) over distances 0 to W, beyond which it is constant, or falls by ``slope`` per token.
            slope: (H).
            scale: of the product q . k; default ``self.scale``.
            key_mask: (B, 1) bool, True = attend.
            gate: (B, H, 1) in (0, 1); for gated methods.
            segment_ids: (B, 1), as in `forward`: a sample with another id than its state's starts anew.

        Returns:
            (B, H, 1, E) and the state after the token.
        """
        if ACTIVE:
            needs_whole("step", "let one process generate, from the state of the last rank")
        if bias is not None:
            self._check_takes_bias(bias)
        elif slope is not None:
            raise ValueError("slope goes with a bias, and none was given.")
        scale = self.scale if scale is None else self._resolve_scale(scale)
        fits = self._fits(query, key, value, scale) if key_mask is None else ()
        if fits and bias is not None:
            fits = (*fits, bias.shape, bias.dtype, bias.device, slope is None) if isinstance(bias, Tensor) else ()
        call = Call(
            query=query,
            key=key,
            value=value,
            scale=scale,
            is_causal=True,
            key_mask=key_mask,
            gate=gate,
            segment_ids=segment_ids,
            state=state,
            streams=True,
            dropout=self.attention_dropout if self.training else 0.0,
            fits=fits,
        )
        if not call.fits or not isinstance(state, State) or state.fits != call.fits:
            self._check_can_stream(call, "step")
            call = self._accept(call)
            if call.query.shape[2] != 1 or call.key.shape[2] != 1:
                raise ValueError(
                    f"step takes one token, got {call.query.shape[2]} queries and {call.key.shape[2]} keys (shapes "
                    f"{shape(call.query)} and {shape(call.key)}); for more, call the core with is_causal=True, "
                    f"state=... and return_state=True."
                )
            if bias is not None:
                call = replace(call, bias=check_step_bias(bias, slope, self.num_heads))
            self._check_stream(call)
        elif bias is not None:  # its numbers may be others than those of the step before
            call = replace(call, bias=check_step_bias(bias, slope, self.num_heads))
        if call.gate is not None:
            self._check_gate(call.gate, call.key)
        if segment_ids is not None or (state is not None and state.last_id is not None):
            check_packed(self, call)
        if segment_ids is None:
            out, after = self._attend_alone(call, self._step)
        else:
            out, after = self._attend_alone(enter_segment(self, call), self._step)
            after = None if after is None else replace(after, last_id=last_id(call))
        assert after is not None
        return out, after

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """Summarize a whole context, (B, G, S, D) and (B, G, S, E), for `recall`; here all of it is kept."""
        needs_whole("remember", "attend to the context over ranks, in one call")
        query = key.new_zeros(key.shape[0], self.num_heads, 1, key.shape[3]) if key.dim() == 4 else key
        call = self._accept(Call(query=query, key=key, value=value, scale=self.scale, key_mask=key_mask))
        length = call.key.shape[2]
        made_by = (*self._maker(), ("remembers", length))
        return State((call.key, call.value, *(() if key_mask is None else (key_mask,))), length, made_by)

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context, without a bias: (B, H, L, D) -> (B, H, L, E)."""
        self._check_memory(memory)
        key, value, *mask = memory.tensors
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        out = self.forward(query, key, value, key_mask=mask[0] if mask else None, query_mask=real)
        assert isinstance(out, Tensor)
        return out

    def _maker(self) -> MadeBy:
        """Settings that a memory must have been made with."""
        return (("method", self.method),)

    def _check_memory(self, memory: State) -> None:
        """Check that a memory comes from `remember` of a core with these settings."""
        made = dict(memory.made_by) if isinstance(memory, State) else {}
        if "remembers" not in made:
            given = f"a state of {made['method']!r}" if made else type(memory).__name__
            raise ValueError(f"recall needs what remember of this {self.method!r} core returned, got {given}.")
        del made["remembers"]
        problem = config_mismatch(made, dict(self._maker()))
        if problem:
            raise ValueError(f"{problem}; remember the context again.")

    def refusal(self, causal: bool) -> ValueError | None:
        """Return the error for this causality, before any input is there, or None."""
        return None

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw of the feature map, or to number ``draw``; nothing to do for exact methods."""

    @property
    def feature_dim(self) -> int | None:
        """M, the width of phi; None for exact methods."""
        return None

    @property
    def calibrates(self) -> bool:
        """True if its map depends on statistics of queries and keys, so that `calibrate` has something to do."""
        phi = getattr(self, "feature_map", None)
        return isinstance(phi, CalibratedMap) and phi.statistics is not None

    def calibrate(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None = None, *, query_mask: Tensor | None = None
    ) -> None:
        """Add queries and keys to the statistics of the map, beside those of earlier calls.

        They are like those of `forward`, before the scale. All pairs of a query and a key count alike, whichever
        sample they are from; hidden tokens leave no trace. States from before do not fit afterwards.

        Args:
            query: (B, H, L, D).
            key: (B, G, S, D), G divides H.
            key_mask: (B, S) bool, which keys are real.
            query_mask: (B, L) bool, which queries are real; default as in `forward`.

        Raises:
            ValueError: the method has nothing to calibrate; other heads or another head_dim than the core's; NaN or an
                infinity in a real token; no real token. Nothing is counted then.
        """
        phi = calibrated_map(self)
        phi.check_calibration(self.scale)
        phi.calibrate(real_moments(self, query, key, key_mask, query_mask), self.scale)

    def reset_calibration(self) -> None:
        """Clear all statistics: the map is as it was before the first calibration."""
        calibrated_map(self).reset_calibration()

    def attention_matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        query_mask: Tensor | None = None,
        **positions: Any,
    ) -> Tensor:
        """The weights (B, H, L, S), by attending to unit vectors (Performer, App. C.4); for looking, at small L and S.

        ``positions`` are the bias and what goes with it, as in `forward`.
        """
        if key.dim() != 4:
            raise ValueError(f"key must be (batch, heads, length, head_dim), got shape {shape(key)}.")
        eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        common: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "scale": scale}
        weights = self.forward(query, key, eye, query_mask=query_mask, **common, **positions)
        assert isinstance(weights, Tensor)
        return weights

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        unit = ", normalize_qk=True" if self.normalize_qk else ""
        return f"{self.method!r}, head_dim={self.head_dim}, num_heads={self.num_heads}, scale={self.scale:g}{unit}"

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        """The method itself, and the state after the keys where one is wanted."""
        raise TypeError(f"{type(self).__name__} does not say how it attends.")

    def _attend_alone(
        self, call: Call, attend: Callable[[Call], tuple[Tensor, State | None]] | None = None
    ) -> tuple[Tensor, State | None]:
        """Attend with one sequence a row, by `_attend` or by `_step`, in the precision of the arithmetic."""
        if torch.compiler.is_exporting():
            self._check_export(call)
        dtype, attend = call.query.dtype, attend or self._attend
        if self.normalize_qk and not self._normalizes_itself(call):
            call = self._normalized(call)
        with no_autocast(call.query.device.type):
            if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
                out, after = attend(call)
            else:
                out, after = within_transforms(self.method, attend, call)
        return out if out.dtype == dtype else out.to(dtype), after

    def _check_export(self, call: Call) -> None:
        """Raise a ValueError where `torch.export` traces a call of any length, or a step, that it cannot."""
        if call.state is None and not isinstance(call.query.shape[2], torch.SymInt):
            return
        reason = self.export_refusal
        if not reason and call.bias is not None:
            reason = "attends with a relative position bias, whose table is as long as the sequence"
        if reason:
            raise ValueError(
                f"{self.method!r} {reason}: it cannot be exported with a dynamic length. Use a method such as 'favor+' "
                f"or 'loglinear' without a bias, or export the graph for one length."
            )

    def _forget(self, state: State, samples: Tensor) -> State:
        """The state as if some samples, (B) bool, had seen nothing yet; its length, and what distances are, stay."""
        raise TypeError(f"{type(self).__name__} does not say how a state forgets.")

    def _step(self, call: Call) -> tuple[Tensor, State]:
        """Attend with one token of a stream; by default as in any other call."""
        out, after = self._attend(call)
        assert after is not None
        return out, after

    def _stream_refusal(self, what: str) -> ValueError | None:
        """Return the error for a stream, where ``what`` asks for one, or None."""
        if self.streams_all:
            return None
        return ValueError(
            f"{self.method!r} cannot stream, but {what} was asked for: its state would grow with the context. Use a "
            f"method with a feature map, such as 'favor+', or keep keys and values and call the core with all of them."
        )

    def _made_by(self, scale: float) -> MadeBy:
        """Settings that a state depends on."""
        return (("method", self.method), ("normalize_qk", self.normalize_qk), ("scale", scale))

    def _made_for(self, call: Call) -> MadeBy:
        """Settings that a state of this call depends on."""
        return self._made_by(call.scale)

    def _state(self, tensors: Sequence[Tensor], call: Call, near: object | None = None) -> State:
        """Make the state after a call, with the buffers that its near keys lie in."""
        before = call.state
        length, made_by = (0, self._made_for(call)) if before is None else (before.length, before.made_by)
        return State(tuple(tensors), length + call.key.shape[2], made_by, call.fits, near)

    def _misfit(self, call: Call, state: State) -> str | None:
        """Describe how a state does not fit a call, or return None."""
        raise TypeError(f"{type(self).__name__} does not say which states it goes on from.")

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[object, ...]:
        """Facts that the checks of a step look at, so that a stream is checked once; () to check every time."""
        return ()

    def _resolve_scale(self, scale: float) -> float:
        """Return the scale of a call that was given one."""
        return check_scale(scale)

    def _accept(self, call: Call) -> Call:
        """Check queries, keys, values and masks; under autocast they take its dtype, as torch's own attention does."""
        call = check_inputs(call, head_dim=self.head_dim, num_heads=self.num_heads)
        if self.map_heads % call.key.shape[1]:
            raise ValueError(
                f"this {self.method!r} core was built with num_key_heads={self.map_heads}, got keys of "
                f"{call.key.shape[1]} heads (shape {shape(call.key)}); build it with "
                f"num_key_heads={call.key.shape[1]}, or without for any number."
            )
        if call.key_mask is not None:
            check_mask(call.key_mask, call.key)
        if call.query_mask is not None:
            check_mask(call.query_mask, call.query, "query")
        return call

    def _normalizes_itself(self, call: Call) -> bool:
        """True if `_attend` divides the queries and keys of this call by their norm, without copies of them."""
        return False

    def _normalized(self, call: Call) -> Call:
        """Return the call with queries and keys of length 1, where that is asked for."""
        query, key = self._normalize_qk(call.query, call.key, call.key_mask)
        return replace(call, query=query, key=key, value=call.value.to(query.dtype))

    def _normalize_qk(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys over their L2 norm, where that is asked for, in the precision of the arithmetic."""
        if not self.normalize_qk:
            return query, key
        if key_mask is not None:  # the gradient of a norm must not see what the mask hides
            key = key.masked_fill(~key_mask[:, None, :, None], 0)
        unit_q, unit_k = (F.normalize(x.to(compute_dtype(x.dtype)), dim=-1) for x in (query, key))
        return unit_q, unit_k

    def _check_can_stream(self, call: Call, what: str) -> None:
        """Raise a ValueError where the method has no state, or something else was given for one."""
        problem = self._stream_refusal(what)
        if problem is not None:
            raise problem
        if call.state is not None and not isinstance(call.state, State):
            given = type(call.state).__name__
            raise ValueError(f"state must be a kernelformer State, got {given}; start anew with state=None.")

    def _check_stream(self, call: Call) -> None:
        """Raise a ValueError where a call cannot be part of a stream, or not of that which its state comes from."""
        if not call.is_causal:
            raise ValueError("a state needs is_causal=True, got is_causal=False: without causality nothing is past.")
        if call.query.shape[2] != call.key.shape[2]:
            raise ValueError(
                f"with a state queries and keys are the same tokens, got {call.query.shape[2]} queries and "
                f"{call.key.shape[2]} keys."
            )
        problem = None if call.state is None else self._misfit(call, call.state)
        if problem is not None:
            raise ValueError(f"{problem}; start anew with state=None.")

    def _check_gate(self, gate: Tensor, key: Tensor) -> None:
        """Check that a gate is a floating point tensor (B, H, S), for keys (B, G, S, D)."""
        if not self.takes_gate:
            given = f"one of shape {shape(gate)}" if isinstance(gate, Tensor) else repr(gate)
            raise ValueError(f"{self.method!r} takes no gate, got {given}; use 'rfa-gate'.")
        if not isinstance(gate, Tensor):
            raise ValueError(f"gate must be a tensor, got {type(gate).__name__}; convert it with torch.as_tensor().")
        if not gate.is_floating_point():
            raise ValueError(
                f"gate must be a floating point tensor in (0, 1), got {gate.dtype}; convert it with .float()."
            )
        size = (key.shape[0], self.num_heads, key.shape[2])
        if gate.shape != size:
            raise ValueError(
                f"gate must be (batch, heads, length) = {size}, got {shape(gate)}; one gate per query head and token."
            )
        if gate.device != key.device:
            raise ValueError(f"gate must be on the device of the keys, got {gate.device} and {key.device}.")

    def _check_takes_bias(self, bias: Tensor) -> None:
        if not self.takes_bias:
            raise ValueError(
                f"{self.method!r} takes no relative position bias, got bias of shape {shape(bias)}; use 'softmax', or "
                f"a normalized method with a feature map such as 'nprf', or put positions into the inputs."
            )
