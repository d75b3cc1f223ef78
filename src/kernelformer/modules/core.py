"""Attention cores: everything between the projections, with one interface for all methods."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.attention import State, causal_attention, gaussian_attention, linear_attention, step
from kernelformer.attention.linear import engine_class
from kernelformer.contract import compute_dtype
from kernelformer.errors import positive_int, shape
from kernelformer.feature_maps import FeatureMap


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


class AttentionCore(nn.Module):
    """Attention over given queries, keys and values; what all methods share.

    Args:
        method: the method's name, for messages.
        head_dim: D.
        num_heads: H, of the queries.
        scale: default of the calls; None means 1 / sqrt(D), or 1 with ``normalize_qk``.
        normalize_qk: divide queries and keys by their L2 norm first (kernelized-rpe Sec. 3.2).
    """

    def __init__(
        self, method: str, *, head_dim: int, num_heads: int, scale: float | None = None, normalize_qk: bool = False
    ) -> None:
        super().__init__()
        self.method = method
        self.head_dim = positive_int("head_dim", head_dim)
        self.num_heads = positive_int("num_heads", num_heads)
        self.normalize_qk = normalize_qk
        self.scale = self._scale(scale if scale is not None else 1.0 if normalize_qk else head_dim**-0.5)

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = ...,
        key_mask: Tensor | None = ...,
        bias: Tensor | None = ...,
        scale: float | None = ...,
        algorithm: str | None = ...,
        state: State | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = ...,
        key_mask: Tensor | None = ...,
        bias: Tensor | None = ...,
        scale: float | None = ...,
        algorithm: str | None = ...,
        state: State | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, State]: ...

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
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Attend.

        Args:
            query: (B, H, L, D).
            key: (B, G, S, D), G divides H.
            value: (B, G, S, E).
            is_causal: key j is visible to query i iff j <= i; with a state of P tokens, iff j <= P + i.
            key_mask: (B, S) bool, True = attend. What it hides may hold anything.
            bias: relative position bias; no method of this version takes one.
            scale: of the product q . k; default ``self.scale``.
            algorithm: which algorithm to use with a bias.
            state: resume after what it has seen; causal only.
            return_state: also return the state after the last key; causal only.

        Returns:
            (B, H, L, E), zero where no key is visible; with ``return_state`` also the state.
        """
        query, key, value = self._cast(query, key, value)
        self._check(query, key, value, key_mask)
        if bias is not None or algorithm is not None:
            raise ValueError(
                f"{self.method!r} takes no relative position bias, got "
                f"{'bias' if bias is not None else f'algorithm={algorithm!r}'}; leave it out, or put positions into the inputs."
            )
        if state is not None or return_state:
            self._check_streaming(query, key, value, is_causal, state)
        query, key = self._unit(query), self._unit(key)
        scale = self.scale if scale is None else self._scale(scale)
        out, after = self._attend(query, key, value, is_causal, key_mask, scale, state)
        return (out, after) if return_state and after is not None else out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        key_mask: Tensor | None,
        scale: float,
        state: State | None,
    ) -> tuple[Tensor, State | None]:
        raise TypeError(f"{type(self).__name__} does not say how it attends.")

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One token: (B, H, 1, D), (B, G, 1, D), (B, G, 1, E) -> (B, H, 1, E) and the state after it; None starts."""
        raise self._cannot_stream("step")

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw of the feature map, or to number ``draw``; nothing to do for exact methods."""

    @property
    def feature_dim(self) -> int | None:
        """M, the width of phi; None for exact methods."""
        return None

    def attention_matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The weights (B, H, L, S), by attending to unit vectors (performer C.4); for looking, at small L and S."""
        if key.dim() != 4:
            raise ValueError(f"key must be (batch, heads, length, head_dim), got shape {shape(key)}.")
        eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        return self.forward(query, key, eye, is_causal=is_causal, key_mask=key_mask, scale=scale)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        unit = ", normalize_qk=True" if self.normalize_qk else ""
        return f"{self.method!r}, head_dim={self.head_dim}, num_heads={self.num_heads}, scale={self.scale:g}{unit}"

    @staticmethod
    def _scale(scale: float) -> float:
        if not (0 < scale < float("inf")):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        return float(scale)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x.to(compute_dtype(x.dtype)), dim=-1).to(x.dtype) if self.normalize_qk else x

    def _cast(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Under autocast to its dtype, as torch's own attention does."""
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be a floating point tensor, got {kind}; convert it with .float().")
        dtype = _autocast_dtype(inputs[0].device)
        if dtype is None:
            return inputs
        return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4:
                raise ValueError(f"{name} must be (batch, heads, length, head_dim), got shape {shape(x)}.")
        if not (query.dtype == key.dtype == value.dtype):
            raise ValueError(
                f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; convert with .to()."
            )
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"query and key must have the same head dimension, got {query.shape[-1]} and {key.shape[-1]} "
                f"(shapes {shape(query)} and {shape(key)})."
            )
        if query.shape[-1] != self.head_dim:
            raise ValueError(
                f"this core was built with head_dim={self.head_dim}, got queries of {query.shape[-1]} (shape {shape(query)}); "
                f"build it with head_dim={query.shape[-1]}."
            )
        if query.shape[1] != self.num_heads:
            raise ValueError(
                f"this core was built with num_heads={self.num_heads}, got queries with {query.shape[1]} (shape {shape(query)}); "
                f"build it with num_heads={query.shape[1]}."
            )
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key and value must have the same batch, heads and length, got shapes {shape(key)} and {shape(value)}."
            )
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"query and key must have the same batch size, got {query.shape[0]} and {key.shape[0]} "
                f"(shapes {shape(query)} and {shape(key)})."
            )
        heads, key_heads = query.shape[1], key.shape[1]
        if key_heads == 0 or heads % key_heads:
            raise ValueError(
                f"the number of key heads must divide that of query heads, got {key_heads} and {heads} "
                f"(shapes {shape(key)} and {shape(query)})."
            )
        if key_mask is not None:
            self._check_mask(key_mask, key)

    @staticmethod
    def _check_mask(key_mask: Tensor, key: Tensor) -> None:
        if key_mask.dtype != torch.bool:
            raise ValueError(
                f"key_mask must be bool with True = attend, got {key_mask.dtype}; an additive mask becomes one by "
                f"`mask == 0`, a 0/1 mask by `mask.bool()`."
            )
        if tuple(key_mask.shape) != (key.shape[0], key.shape[2]):
            raise ValueError(
                f"key_mask must be (batch, key length) = {(key.shape[0], key.shape[2])}, got {shape(key_mask)}; "
                f"causality is is_causal=True, not a mask."
            )

    def _check_streaming(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, state: State | None
    ) -> None:
        raise self._cannot_stream("a state")

    def _cannot_stream(self, what: str) -> ValueError:
        return ValueError(
            f"{self.method!r} cannot stream, but {what} was asked for: its state would grow with the context. Use a method "
            f"with a feature map, such as 'favor+', or keep the keys and values and call the core with all of them."
        )


class KernelCore(AttentionCore):
    """Linear-time attention through a feature map.

    Args:
        feature_map: phi.
        normalize: divide by the sum of the weights.

    The others are those of `AttentionCore`.
    """

    def __init__(self, method: str, feature_map: FeatureMap, *, normalize: bool = True, **options: Any) -> None:
        super().__init__(method, head_dim=feature_map.head_dim, num_heads=feature_map.num_heads, **options)
        self.feature_map = feature_map
        self.normalize = normalize

    @property
    def feature_dim(self) -> int:
        """M, the width of phi."""
        return self.feature_map.feature_dim

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw of the feature map, or to number ``draw``."""
        self.feature_map.resample(draw)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        key_mask: Tensor | None,
        scale: float,
        state: State | None,
    ) -> tuple[Tensor, State | None]:
        tensors = self.feature_map.prepare(query, key, key_mask)
        key, value = self._per_map_head(key, tensors), self._per_map_head(value, tensors)
        with torch.autocast(query.device.type, enabled=False):
            if not is_causal:
                out = linear_attention(
                    query, key, value, spec=self.feature_map.key, tensors=tensors, scale=scale, key_mask=key_mask,
                    normalize=self.normalize,
                )  # fmt: skip
                return out, None
            past = None if state is None else state.tensors
            out, after = causal_attention(
                query, key, value, spec=self.feature_map.key, tensors=tensors, scale=scale, key_mask=key_mask,
                normalize=self.normalize, state=past,
            )  # fmt: skip
        return out, self._state(after, key.shape[2] + (state.length if state else 0))

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None = None,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One token: (B, H, 1, D), (B, G, 1, D), (B, G, 1, E) -> (B, H, 1, E) and the state after it; None starts."""
        query, key, value = self._cast(query, key, value)
        self._check(query, key, value, key_mask)
        if bias is not None:
            raise ValueError(f"{self.method!r} takes no relative position bias, got bias; leave it out.")
        if query.shape[2] != 1 or key.shape[2] != 1:
            raise ValueError(
                f"step takes one token, got {query.shape[2]} queries and {key.shape[2]} keys (shapes {shape(query)} and "
                f"{shape(key)}); for more, call the core with is_causal=True, state=... and return_state=True."
            )
        dtype = query.dtype
        tensors = self.feature_map.prepare(query, key, key_mask)
        key, value = self._per_map_head(key, tensors), self._per_map_head(value, tensors)
        self._check_streaming(query, key, value, True, state)
        query, key = self._unit(query), self._unit(key)
        if compute_dtype(dtype) != dtype:
            query, key, value = (x.to(compute_dtype(dtype)) for x in (query, key, value))
        past = self._empty(key, value) if state is None else state.tensors
        with torch.autocast(query.device.type, enabled=False):
            out, after = step(
                self.feature_map.spec, tensors, query, key, value, past,
                scale=self.scale if scale is None else self._scale(scale), key_mask=key_mask, normalize=self.normalize,
            )  # fmt: skip
        return out.to(dtype), self._state(after, 1 + (state.length if state else 0))

    def _per_map_head(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        """Grouped keys as many as the map has heads: a map per query head sees each key of its group anew."""
        heads = max((t.shape[1] for t in tensors), default=1)
        return x if heads in (1, x.shape[1]) else x.repeat_interleave(self.num_heads // x.shape[1], 1)

    def _empty(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        like = value.new_empty(0, dtype=compute_dtype(value.dtype))
        lead = (key.shape[0], key.shape[1])
        return tuple(engine_class(self.feature_map.spec).empty(lead, self.feature_dim, value.shape[-1], like))

    def _state(self, tensors: list[Tensor] | tuple[Tensor, ...], length: int) -> State:
        draw = 0 if torch.compiler.is_compiling() else self.feature_map.draw_number
        return State(tuple(tensors), length, self.method, draw)

    def _check_streaming(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, state: State | None
    ) -> None:
        if not is_causal:
            raise ValueError("a state needs is_causal=True, got is_causal=False: without causality there is no past to keep.")
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"with a state queries and keys are the same tokens, got {query.shape[2]} queries and {key.shape[2]} keys."
            )
        if state is None:
            return
        if not isinstance(state, State):
            raise ValueError(f"state must be a kernelformer State, got {type(state).__name__}.")
        if state.method != self.method:
            raise ValueError(
                f"the state was made by method {state.method!r}, this core is {self.method!r}; start anew with state=None."
            )
        if not torch.compiler.is_compiling() and state.draw != self.feature_map.draw_number:
            raise ValueError(
                f"the state was made with draw {state.draw}, this core is at draw {self.feature_map.draw_number}; start anew "
                f"with state=None, or go back with core.resample({state.draw})."
            )
        heads = max((x.shape[1] for x in self.feature_map.tensors()), default=1)
        lead = (key.shape[0], key.shape[1] if heads == 1 else heads)
        shapes = engine_class(self.feature_map.spec).state_shapes(self.feature_dim, value.shape[-1])
        expected = [(*lead, *x) for x in shapes]
        got = [tuple(x.shape) for x in state.tensors]
        if got != expected:
            raise ValueError(f"the state has shapes {got}, these inputs need {expected}.")
        dtype = compute_dtype(query.dtype)
        if state.tensors[0].dtype != dtype or state.tensors[0].device != query.device:
            raise ValueError(
                f"the state is {state.tensors[0].dtype} on {state.tensors[0].device}, inputs of {query.dtype} on "
                f"{query.device} need {dtype} there; move it with state.to(...), or use one precision throughout."
            )


class SoftmaxCore(AttentionCore):
    """Exact softmax attention, by torch's `scaled_dot_product_attention`; quadratic.

    out_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j)
    """

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        key_mask: Tensor | None,
        scale: float,
        state: State | None,
    ) -> tuple[Tensor, State | None]:
        return _sdpa(query, key, value, is_causal, key_mask, scale), None


class GaussianCore(AttentionCore):
    """Exact Gaussian attention; quadratic.

        out_i = sum_j exp(-scale |q_i - k_j|^2 / 2) v_j          (skyformer Eq. 4), divided by the weights' sum if normalized

    Args:
        normalize: divide by the sum of the weights; the paper does not.

    The others are those of `AttentionCore`.
    """

    def __init__(self, method: str, *, normalize: bool = False, **options: Any) -> None:
        super().__init__(method, **options)
        self.normalize = normalize

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        key_mask: Tensor | None,
        scale: float,
        state: State | None,
    ) -> tuple[Tensor, State | None]:
        if not self.normalize:
            out = gaussian_attention(query, key, value, scale=scale, key_mask=key_mask, is_causal=is_causal)
            return out, None
        # -|q - k|^2 / 2 = q.k - |k|^2 / 2 up to what is the same for all keys: softmax attention with one more coordinate.
        if key_mask is not None:
            key = key.masked_fill(~key_mask[:, None, :, None], 0)
        extra = key.to(compute_dtype(key.dtype)).square().sum(-1, keepdim=True).mul(-0.5).to(key.dtype)
        key = torch.cat([key, extra], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        return _sdpa(query, key, value, is_causal, key_mask, scale), None


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, key_mask: Tensor | None, scale: float
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if query.shape[2] == 0 or key.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[-1]) + 0 * value.sum()
    if key_mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    hidden = ~key_mask[:, None, :, None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    mask = key_mask[:, None, None, :]
    if is_causal:
        mask = mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    # A row that sees nothing attends to everything and is zeroed after: no kernel of torch promises zeros there.
    seen = mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask | ~seen, scale=scale, enable_gqa=grouped)
    return out.masked_fill(~seen, 0)
