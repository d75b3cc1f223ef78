"""Attention with a relative bias through a feature map, all at once or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.attention import State
from kernelformer.attention.dispatch import attend_biased, attend_plain_biased
from kernelformer.attention.near_keys import Place, push
from kernelformer.attention.plain.layout import readable_without_sync
from kernelformer.attention.plain.pairs import BiasPairs, segments
from kernelformer.attention.positive import EMPTY, LOST
from kernelformer.attention.relative.call import Layout, RelativeCall, constant_beyond
from kernelformer.attention.relative.operator import relative_attention
from kernelformer.attention.state import MadeBy
from kernelformer.attention.step import NearTokens, map_positive, step_positive
from kernelformer.contract import PositiveSpec, compute_dtype, no_tangents, wide_dtype
from kernelformer.errors import integer, shape
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.checks import Bias, Call, assert_values, can_read

MASK = 1 << 24  # numbers of an explicit mask that are made at once, where a view will not do


def check_bias(
    table: Tensor | None,
    call: Call,
    *,
    algorithm: str | None,
    max_distance: int | None,
    slope: Tensor | None,
    num_prefix: int,
    whole: bool = True,
) -> Bias | None:
    """Check the bias of a call, and what was said about it; None where there is none.

    Where the call has only part of the sequence, not ``whole``, the bias's length is left to `split_cores`.
    """
    if table is None:
        given = {"algorithm": algorithm, "max_distance": max_distance, "slope": slope, "num_prefix": num_prefix or None}
        names = ", ".join(name for name, x in given.items() if x is not None)
        if names:
            raise ValueError(f"{names} only mean something with a bias, and none was given.")
        return None
    query, key, past = call.query, call.key, 0 if call.state is None else call.state.length
    check_table(table)
    (heads, L), S = query.shape[1:3], key.shape[2]
    prefix = integer("num_prefix", num_prefix, at_least=0)
    if table.device != query.device:
        raise ValueError(f"bias must be on the device of the queries, got {table.device} and {query.device}.")
    if table.dim() == 3:
        layout = _grid(table, heads, L, S, prefix, past)
    else:
        if prefix:
            raise ValueError(f"num_prefix={prefix} is for tokens before a grid, got a bias of shape {shape(table)}.")
        expected = (heads, past + L + S - 1) if past or L + S else (heads, 0)
        fits = tuple(table.shape) == expected if whole else table.dim() == 2 and table.shape[0] == heads
        if not fits:
            before = f" with {past} tokens before them" if past else ""
            raise ValueError(
                f"bias must be (heads, queries + keys - 1) = {expected} for {L} queries and {S} keys{before}, over "
                f"distances j - i from {-(past + L - 1)} to {S - 1}, got {shape(table)}; or (heads, 2 rows - 1, "
                f"2 columns - 1) for tokens on a grid."
            )
        layout = Layout(L, S, past)
    window = None if max_distance is None else integer("max_distance", max_distance, at_least=0)
    if layout.rows and (window is not None or algorithm == "windowed"):
        raise ValueError("a bias on a grid has no window; use algorithm='direct' or 'fft', and no max_distance.")
    if slope is not None and window is None:
        raise ValueError("slope says how the bias goes on beyond max_distance, which was not given.")
    check_slope(slope, table, heads)
    check_values(table)
    if window is not None and whole:
        middle = layout.L - 1 + layout.offset
        check_tail(table, middle, window, slope, call.is_causal)
        table = share_tail(table, middle, window, call.is_causal)
    return Bias(table, layout, algorithm, window, slope)


def check_table(table: Tensor) -> None:
    """Check that a bias is a floating point tensor."""
    if not isinstance(table, Tensor) or not table.is_floating_point():
        given = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"bias must be a floating point tensor, got {given}.")


def check_step_bias(table: Tensor, slope: Tensor | None, heads: int) -> Bias:
    """Check the bias of a step, (H, W + 1) over distances 0 to W, and the slope (H) of what lies beyond."""
    check_table(table)
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] == 0:
        raise ValueError(
            f"in step bias must be (heads, W + 1) = ({heads}, W + 1) over distances 0 to W, beyond which it is "
            f"constant, got {shape(table)}."
        )
    check_values(table)
    check_slope(slope, table, heads)
    window = table.shape[1] - 1
    return Bias(table.flip(1), Layout(1, window + 1, window), window=window, slope=slope)


def check_slope(slope: Tensor | None, table: Tensor, heads: int) -> None:
    """Check that slopes are finite and at least 0, one per head, and that the bias has no gradients."""
    if slope is None:
        return
    if not isinstance(slope, Tensor) or not slope.is_floating_point() or tuple(slope.shape) != (heads,):
        given = f"{slope.dtype} of shape {shape(slope)}" if isinstance(slope, Tensor) else type(slope).__name__
        raise ValueError(f"slope must be a floating point tensor (heads) = ({heads},), got {given}.")
    if table.requires_grad or slope.requires_grad:
        raise ValueError(
            "a bias with a slope beyond max_distance takes no gradient; detach it, or leave the slope out."
        )
    no_tangents(bias=table, slope=slope)
    if not _checks(slope):
        return
    fades = ((slope >= 0) & slope.isfinite()).all()
    wrong = "slopes must be finite and at least 0, what lies far away fades"
    assert_values(fades, f"{wrong}.")
    if readable_without_sync(slope) and not bool(fades):
        raise ValueError(f"{wrong}; got {slope.tolist()}.")


def check_tail(table: Tensor, middle: int, window: int, slope: Tensor | None, is_causal: bool) -> None:
    """Check that the bias beyond the window is the straight line that the caller says it is."""
    table = table.detach()
    if not _checks(table):
        return
    if slope is None:
        said = f"max_distance={window} says that the bias is constant beyond that distance"
        reach = _reach_beyond(table, middle, window, is_causal, f"{said}, and it is not; clip the table.")
        if reach is not None:
            raise ValueError(f"{said}, and it is beyond {reach} only; give max_distance={reach}, or clip the table.")
        return
    for tail in _tails(table, middle, window, is_causal):
        line = tail[:, :1].double() - slope.double().unsqueeze(1) * torch.arange(tail.shape[1], device=tail.device)
        falls = torch.isclose(tail.double(), line, rtol=1e-4, atol=1e-4).all()
        wrong = (
            f"slope says that the bias falls by it per token beyond max_distance={window}, and it does not; give the "
            f"bias -slope * distance there."
        )
        assert_values(falls, wrong)
        if readable_without_sync(table) and not bool(falls):
            raise ValueError(wrong)


def share_tail(table: Tensor, middle: int, window: int, is_causal: bool) -> Tensor:
    """A table that is constant beyond the window, whose tails have the gradients of the entries at that distance.

    An algorithm may take the entries of some far pairs and not of others: here they are all the same ones.
    """
    first, last = max(0, middle - window), table.shape[1] if is_causal else min(table.shape[1], middle + window + 1)
    if not table.requires_grad or not first < last:  # else no pair is near, as without queries or keys
        return table
    ends = table[:, first : first + 1], table[:, last - 1 : last]
    tails = ends[0].expand(-1, first), ends[1].expand(-1, table.shape[1] - last)
    return torch.cat([tails[0], table[:, first:last], tails[1]], 1)


def _checks(x: Tensor) -> bool:
    """True if the numbers of a bias are checked: here if that is free, by the device in a compiled graph."""
    return x.numel() > 0 and (readable_without_sync(x) or torch.compiler.is_compiling())


def _reach_beyond(table: Tensor, middle: int, window: int, is_causal: bool, message: str) -> int | None:
    """Return the distance beyond which a table is constant if that is above the window; None if not, or not known.

    A compiled graph checks the table itself, with the message, see `assert_values`.
    """
    for tail in _tails(table.detach(), middle, window, is_causal) if torch.compiler.is_compiling() else ():
        assert_values((tail == tail[:, :1]).all(), message)
    reach = constant_beyond(table, middle, is_causal) if readable_without_sync(table) else 0
    return reach if reach > window else None


def _tails(table: Tensor, middle: int, window: int, is_causal: bool) -> list[Tensor]:
    """The entries (H, n) at the window and beyond, on each side of entry ``middle``, or on its left; n may be 0."""
    sides = [table[:, : middle + 1].flip(1)] + ([] if is_causal else [table[:, middle:]])
    return [side[:, window:] for side in sides]


def _grid(table: Tensor, heads: int, L: int, S: int, prefix: int, past: int) -> Layout:
    rows, cols = (n // 2 + 1 for n in table.shape[1:])
    if table.shape[0] != heads or any(n % 2 == 0 for n in table.shape[1:]):
        raise ValueError(f"bias on a grid must be ({heads}, 2 rows - 1, 2 columns - 1), got {shape(table)}.")
    if past:
        raise ValueError("a bias on a grid does not stream; give the whole grid in one call, without a state.")
    if L != S or rows * cols + prefix != L:
        raise ValueError(
            f"a grid of {rows} x {cols} after num_prefix={prefix} tokens has {rows * cols + prefix} tokens, got {L} "
            f"queries and {S} keys."
        )
    return Layout(L, S, 0, rows, cols, prefix)


def check_values(table: Tensor) -> None:
    """Check that a bias has no NaN and no +inf in it."""
    if not _checks(table):
        return
    if not readable_without_sync(table):
        assert_values((table.detach() < torch.inf).all(), "bias must not have NaN or +inf in it; -inf means hidden.")
        return
    top = float(table.detach().amax())
    if top != top or top == torch.inf:
        raise ValueError(f"bias must not have {'NaN' if top != top else '+inf'} in it; -inf means hidden.")


def biased_sdpa(call: Call) -> Tensor:
    """Softmax attention with a bias; keys and values have as many heads as the queries, (B, H, S, .).

        out_i = sum_j exp(scale q_i . k_j + b_{j-i}) v_j / sum_j exp(scale q_i . k_j + b_{j-i})

    A mask of L x S is made only where a view cannot say it (on a grid, or with a key mask), some queries at a time.
    Torch adds masks in the dtype of the queries: where a bias in another one would be rounded to half precision, all
    is done in float32.

    Returns:
        (B, H, L, E), zero where no key is visible.
    """
    bias, key_mask = call.bias, call.key_mask
    assert bias is not None
    layout, dtype = bias.layout, call.query.dtype
    dtype = dtype if bias.table.dtype == dtype else compute_dtype(dtype)
    query, key, value, table = (x.to(dtype) for x in (call.query, call.key, call.value, bias.table))
    if layout.S == 0 or query.numel() == 0 or value.numel() == 0:
        return empty_attention(query, key, value, table)
    whole = not can_read(table) or bool(table.isneginf().any())
    if not layout.rows and key_mask is None and not whole:
        hidden = layout.hide_future(table) if call.is_causal else table
        size = (hidden.shape[0], layout.L, layout.S)
        view = hidden.contiguous().as_strided(size, (hidden.shape[1], 1, 1))
        out = F.scaled_dot_product_attention(
            query.flip(2), key, value, attn_mask=view.unsqueeze(0), dropout_p=call.dropout, scale=call.scale
        )
        return out.flip(2)
    if key_mask is not None:
        gone = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
    pairs = BiasPairs(call.is_causal, layout, table)
    step = max(1, MASK // max(1, query.shape[0] * query.shape[1] * layout.S))
    parts = []
    for first, last in segments(layout, step):
        mask = pairs.log((first, last), (0, layout.S)).unsqueeze(0)
        if key_mask is not None:
            mask = mask.masked_fill(~key_mask[:, None, None, :], -torch.inf)
        seen = (mask > -torch.inf).any(-1, keepdim=True)
        mask = torch.where(seen, mask, torch.zeros_like(mask))
        q = query[:, :, first:last]
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, dropout_p=call.dropout, scale=call.scale)
        parts.append(out.masked_fill(~seen, 0))
    return torch.cat(parts, 2)


def empty_attention(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
    """Attention where there is no key or no query: zeros (B, H, L, E), with gradients of 0 to everything."""
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for x in (query, key, value, *others):
        out = out + x.flatten()[:0].sum()
    return out


NEAR, FADES = "near keys", "fades"  # what the maker of a state with a bias says of it, beside its settings


class BiasedAttention:
    """The part of a `KernelCore` that deals with a relative bias.

        out_i = sum_j exp(b_{j-i}) phi(q_i) . phi(k_j) v_j / sum_j exp(b_{j-i}) phi(q_i) . phi(k_j)

    It takes a call and the map's tensors for every query head, and returns the outputs and what a stream keeps: the
    sums of all keys beyond the window (shift, kv, ks and ns; nothing while there are none), then the near keys
    (B, H, n, D), values (B, H, n, E) and their mask (B, n) as they are: window of them, or all where there is none.
    Of the map only its settings are used, since replicas of a model have maps of their own. With ``normalize_qk`` calls
    that are not streamed divide queries and keys by their L2 norm here.
    """

    def __init__(self, feature_map: FeatureMap, *, normalize_qk: bool) -> None:
        self.feature_map = feature_map
        self.normalize_qk = normalize_qk

    def attend(
        self, call: Call, tensors: Sequence[Tensor], *, plain: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Attend to all keys (B, G, S, D) of a call, and in a stream (of normalized ones) to those before them."""
        bias = call.bias
        assert bias is not None
        if not call.in_stream:
            key, value = (self.per_head(x) for x in (call.key, call.value))
            how = {"key_mask": call.key_mask, "window": bias.window, "normalize_qk": self.normalize_qk}
            relative = self._relative(call, key, value, tensors, bias=bias.table, layout=bias.layout, **how)
            algorithm = "plain" if plain else bias.algorithm
            return attend_biased(relative, features=self.feature_map.feature_dim, algorithm=algorithm), None
        if bias.layout.rows:
            raise ValueError("a bias on a grid does not stream; give the whole grid in one call, without a state.")
        if bias.algorithm == "fft":
            raise ValueError("algorithm='fft' does not stream; leave it out, or take 'windowed'.")
        window, past, near = bias.window, 0, 0
        if call.state is not None:
            window, past, near = self._window(call.state, bias), call.state.length, _near_keys(call.state)
            if window is not None and bias.window is not None and bias.window != window:
                raise ValueError(f"the state keeps {window} keys one by one, got max_distance={bias.window}.")
            if window is not None and bias.slope is None:
                bias = _constant_beyond(bias, window)
        return self._stream(call, bias.table[:, past - near :], window, tensors, plain=plain)

    def _relative(self, call: Call, key: Tensor, value: Tensor, tensors: Sequence[Tensor], **how: Any) -> RelativeCall:
        """The call of the algorithms, over keys of every query head."""
        assert call.bias is not None
        how |= {"scale": call.scale, "is_causal": call.is_causal, "slope": call.bias.slope}
        spec = self.feature_map.spread_spec_id
        return RelativeCall(query=call.query, key=key, value=value, spec=spec, tensors=tensors, **how)

    def step(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...], Place | None]:
        """Attend with one token, whose bias is over distances 0 to W.

        Arguments and results are those of `attend`, and the place of the near keys in buffers.
        """
        bias = call.bias
        assert bias is not None
        assert bias.window is not None
        reach = bias.window
        window: int | None = reach
        near = 0
        if call.state is not None:
            window, near = self._window(call.state, bias), _near_keys(call.state)
            if window is not None and window != reach:
                raise ValueError(
                    f"the state keeps {window} keys one by one, so bias must be (heads, {window + 1}), got "
                    f"{shape(bias.table)}."
                )
        table = bias.table[:, reach - min(near, reach) :]  # distances near .. 0
        if near > reach:  # all keys are kept: farther ones have the last entry
            table = torch.nn.functional.pad(table, (near - reach, 0), mode="replicate")
        if window and call.state is not None and isinstance(self.feature_map.spec, PositiveSpec):
            done = self._step(call, call.state, table, window, tensors)
            if done is not None:
                return done
        return *self._stream(call, table, window, tensors), None

    def _step(
        self, call: Call, state: State, table: Tensor, window: int, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...], Place] | None:
        """Attend with one token of a stream under a positive map, where its near keys can lie in buffers.

        Of each near key the features ``phi = exp(l(k) - c)`` are kept, and their largest logarithm c, so that the
        logits of the near keys are one product:

            log sum_m exp(l_m(q) + l_m(k)) = log sum_m exp(l_m(q) - a) phi_m + a + c          a = max_m l_m(q)

        The bias is a table (H, n + 1) for n near keys, of which ``window`` are kept.
        """
        spec, (key, value, mask) = cast(PositiveSpec, self.feature_map.spread_spec), self._new_tokens(call)

        def features(keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
            logs = spec.log_shares(keys, tensors, call.scale, "key").masked_fill(~visible[:, None, :, None], EMPTY)
            top = logs.amax(3, keepdim=True).clamp_min_(EMPTY)
            return (logs - top).exp_(), top

        *sums, near_key, near_value, near_mask = state.tensors
        place, kept = cast("Place | None", state.near), (near_key, near_value, near_mask)
        settled = place is not None and place.tokens[0] is near_key
        pushed = push(kept, key, value, mask, place, window=window, mapping=features)
        tokens, (gone, gone_value, shown), place = pushed
        leaves, bias = gone.shape[2] > 0, table.to(key.dtype).clamp_min(EMPTY).unsqueeze(1)  # (H, 1, n + 1)
        if place is None or (sums and not leaves):
            return None
        new, logits = map_positive(spec, tensors, call.query, gone, call.scale, shares=True)
        phi, tops = place.mapped()
        top = logits.amax(3, keepdim=True)
        weights = (logits - top).exp_() @ phi.mT
        if bool((weights < LOST).any()):
            logs = spec.log_shares(tokens[0], tensors, call.scale, "key")
            scores = (logits + logs).logsumexp(3).unsqueeze(2)
            scores = scores.masked_fill_(~tokens[2][:, None, None, :], EMPTY)
        else:
            scores = weights.log_().add_(top).add_(tops.mT)
        near = NearTokens(
            [scores + bias[:, :, 1 if leaves else 0 :]], [tokens[1]], factor=bias[:, :, :1], may_hide=True
        )
        if not leaves:
            return near.attend(), tokens, place
        if not settled or not sums:
            sums = _as_means(sums, gone_value, self.feature_map.feature_dim)
        hidden = None if shown is None else ~shown[:, None, :, None]
        out, (total, mean) = step_positive(
            new, logits, gone_value, (sums[0].transpose(2, 3), sums[1]), hidden=hidden, near=near
        )
        if call.bias is not None and call.bias.slope is not None:
            total = total - call.bias.slope.to(total.dtype).view(1, -1, 1, 1)
        return out, (total.transpose(2, 3), mean, *sums[2:], *tokens), place

    def made_by(self, call: Call) -> MadeBy:
        """Number of keys that a stream starting with this call keeps one by one, and whether its bias falls beyond."""
        assert call.bias is not None
        window = call.bias.window
        return ((NEAR, "all" if window is None else window), (FADES, call.bias.slope is not None))

    @staticmethod
    def _window(state: State, bias: Bias) -> int | None:
        """Number of keys that a state keeps one by one; None means all of them."""
        made = dict(state.made_by)
        if made[FADES] != (bias.slope is not None):
            with_, here = ("with", "none") if made[FADES] else ("without", "one")
            raise ValueError(f"the state was made {with_} a slope, this call has {here}; start anew with state=None.")
        return None if made[NEAR] == "all" else int(str(made[NEAR]))

    def per_head(self, x: Tensor) -> Tensor:
        """Keys of every query head: each has its own bias."""
        repeats = self.feature_map.num_heads // x.shape[1]
        return x if repeats == 1 else x.repeat_interleave(repeats, 1)

    def _stream(
        self, call: Call, table: Tensor, window: int | None, tensors: Sequence[Tensor], *, plain: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Causal attention with a bias (H, n + 2 L - 1) for n near keys, and what is kept of the keys."""
        assert call.bias is not None
        count = call.key.shape[2]
        sums: Sequence[Tensor] = ()
        key, value, mask = self._new_tokens(call)
        if mask is None:
            mask = torch.ones(key.shape[0], count, dtype=torch.bool, device=key.device)
        if call.state is not None:
            *sums, near_key, near_value, near_mask = call.state.tensors
            sums = [x.to(key.dtype) for x in sums]
            kept = (near_key, near_value, near_mask)
            key, value, mask = (
                torch.cat(pair, axis) for *pair, axis in zip(kept, (key, value, mask), (2, 2, 1), strict=True)
            )
        layout = Layout(count, key.shape[2], key.shape[2] - count)
        seen = None if call.key_mask is None and call.state is None else mask
        how = {"key_mask": seen, "window": window, "state": sums}
        relative = self._relative(call, key, value, tensors, bias=table, layout=layout, **how)
        out, after = (attend_plain_biased if plain else relative_attention)(relative, keep=window)
        first = 0 if window is None else max(0, key.shape[2] - window)
        tokens = [key[:, :, first:], value[:, :, first:], mask[:, first:]]
        if count > 1 and window is not None:  # views would keep all of a prompt
            tokens = [x.clone() for x in tokens]
        return out, (*after, *tokens)

    def _new_tokens(self, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of a call for every query head, in the dtype of the arithmetic, and their mask."""
        dtype, mask = compute_dtype(call.query.dtype), call.key_mask
        key, value = self.per_head(call.key).to(dtype), self.per_head(call.value).to(dtype)
        if mask is not None:
            gone = ~mask[:, None, :, None]
            key, value = key.masked_fill(gone, 0), value.masked_fill(gone, 0)
        return key, value, mask


def _as_means(sums: Sequence[Tensor], value: Tensor, features: int) -> list[Tensor]:
    """Rescale the sums of a state, shift, kv, ks and ns (see `RelativeCall`), to ks = 1: log masses and means.

    Those of no keys where no key has left the window yet.
    """
    if not sums:
        (batch, heads, _, width), ones = value.shape, value.new_ones(*value.shape[:2], features, 1)
        none = ones.new_full((batch, heads, 1, features), EMPTY, dtype=wide_dtype(value))
        return [none, value.new_zeros(batch, heads, features, width), ones, value.new_zeros(batch, heads, 1, 1)]
    shift, kv, ks, ns = sums
    some = ks > 0
    mass = torch.where(some, ks, 1.0)
    log = torch.where(some, mass.to(wide_dtype(ks)).log() + shift.transpose(2, 3), EMPTY)
    return [log.transpose(2, 3), kv / mass, torch.ones_like(ks), ns]


def _near_keys(state: State) -> int:
    """The number of keys that a state holds one by one."""
    return state.tensors[-1].shape[1]


def _constant_beyond(bias: Bias, window: int) -> Bias:
    """The bias, checked to be constant where the state has sums only; see `share_tail`."""
    said = f"the state keeps {window} keys one by one, so the bias must be constant beyond that distance, and it is"
    middle = bias.layout.L - 1 + bias.layout.offset
    reach = _reach_beyond(bias.table, middle, window, True, f"{said} not; start anew with a larger max_distance.")
    if reach is not None:
        raise ValueError(f"{said} beyond {reach} only; start anew with max_distance={reach}.")
    return replace(bias, table=share_tail(bias.table, middle, window, True))
