"""What all attention cores share: one interface, its checks, and the way around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.attention import State
from kernelformer.attention.recurrent import MadeBy
from kernelformer.contract import autocasts, compute_dtype
from kernelformer.errors import flag, positive_int, shape
from kernelformer.modules.bad_tokens import BadTokens
from kernelformer.modules.bias import Bias, check_bias
from kernelformer.modules.checks import check_floats, check_gate, check_inputs, check_mask, check_scale, other_maker


@dataclass(frozen=True)
class Call:
    """Checked inputs of one call."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, G, S, D)
    value: Tensor  # (B, G, S, E)
    is_causal: bool
    key_mask: Tensor | None  # (B, S)
    scale: float
    state: State | None
    gate: Tensor | None = None  # (B, H, S)
    query_mask: Tensor | None = None  # (B, L), None = all of them are real
    bias: Bias | None = None
    streams: bool = False  # whether the state after the keys is wanted
    past: int = 0  # keys before the first query, beside its own
    dropout: float = 0.0  # of the weights


class AttentionCore(nn.Module):
    """Attention over given queries, keys and values: everything between the projections.

    Args:
        method: the method's name, for messages.
        head_dim: D.
        num_heads: H, of the queries.
        scale: of the product q . k, where a call gives none; None means 1 / sqrt(D), or 1 with ``normalize_qk``.
        normalize_qk: divide queries and keys by their L2 norm first (kernelized-rpe Sec. 3.2).
    """

    takes_gate = False
    takes_bias = False
    takes_dropout = False  # whether it forms weights that can be dropped
    attention_dropout = 0.0  # the share that training drops
    mixes_queries = False  # whether one query's output depends on the others
    delegates = False  # whether other cores attend, which look at the tokens themselves
    units_inside = False  # whether a method with a bias normalizes queries and keys itself, without copies

    def __init__(
        self, method: str, *, head_dim: int, num_heads: int, scale: float | None = None, normalize_qk: bool = False
    ) -> None:
        super().__init__()
        self.method = method
        self.head_dim = positive_int("head_dim", head_dim)
        self.num_heads = positive_int("num_heads", num_heads)
        self.normalize_qk = flag("normalize_qk", normalize_qk)
        self.scale = check_scale(scale if scale is not None else 1.0 if normalize_qk else head_dim**-0.5)

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
        max_distance: int | None = ...,
        slope: Tensor | None = ...,
        num_prefix: int = ...,
        gate: Tensor | None = ...,
        query_mask: Tensor | None = ...,
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
        max_distance: int | None = ...,
        slope: Tensor | None = ...,
        num_prefix: int = ...,
        gate: Tensor | None = ...,
        query_mask: Tensor | None = ...,
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
        max_distance: int | None = None,
        slope: Tensor | None = None,
        num_prefix: int = 0,
        gate: Tensor | None = None,
        query_mask: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Attend.

        A token with NaN or an infinity in its query, key, value or gate: a causal row that sees it is NaN, and so is
        the row of a bad query; all other rows, their gradients and the other samples and heads are those of a call
        without it, whatever the algorithm. What is kept in a state is NaN from then on, and so are the gradients of its
        sample and head that come back through that state. Compiled graphs do not look at numbers, nor do calls on an
        accelerator, which would have to wait for it: there a bad token may reach earlier rows of its own chunk (64
        tokens; with a bias or for ``gaussian`` a tile of up to 512), and for ``softmax`` and ``algorithm="fft"`` all
        rows of its sequence. Keys that ``key_mask`` hides never reach anything, anywhere.

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
            algorithm: with a bias and a feature map: ``direct``, ``fft``, ``windowed``, or None for the best one.
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
            state: resume after what it has seen; causal only. With a bias gradients stop at a state: detach it.
            return_state: also return the state after the last key; causal only.

        Returns:
            (B, H, L, E), zero where no key is visible; with ``return_state`` also the state.
        """
        query, key, value = self._accept(query, key, value, key_mask)
        query_mask = self._real_queries(query, key, query_mask, key_mask)
        scale = self.scale if scale is None else check_scale(scale)
        if state is not None or return_state:
            self._check_streaming(query, key, value, is_causal, scale, state, bias is not None)
        checked = None
        if bias is not None:
            if not self.takes_bias:
                raise self._no_bias(f"bias of shape {shape(bias)}")
            checked = check_bias(
                bias,
                query,
                key,
                past=0 if state is None else state.length,
                is_causal=is_causal,
                algorithm=algorithm,
                max_distance=max_distance,
                slope=slope,
                num_prefix=num_prefix,
            )
        elif algorithm is not None or max_distance is not None or slope is not None or num_prefix:
            given = {"algorithm": algorithm, "max_distance": max_distance, "slope": slope, "num_prefix": num_prefix}
            names = ", ".join(
                name for name, x in given.items() if x is not None and not (name == "num_prefix" and x == 0)
            )
            raise ValueError(f"{names} only mean something with a bias, and none was given.")
        self._check_gate(gate, key)
        problem = self.refusal(is_causal)
        if problem is not None:
            raise problem
        dtype = query.dtype
        bad = None
        if is_causal and not self.delegates:
            bad = BadTokens.of(query, key, value, gate, key_mask)
        if bad is not None:  # before the norms, whose gradient at a bad token would be NaN whatever the loss
            query, key, value, gate = bad.remove(query, key, value, gate)
        if checked is None or not self.units_inside:
            query, key = self._units(query, key, key_mask)
            value = value.to(query.dtype)
        out, after = self._attend(
            Call(query, key, value, is_causal, key_mask, scale, state, gate, query_mask, checked, return_state)
        )
        if bad is not None:
            out, after = bad.mark(out, checked), bad.mark_state(after)
        out = out.to(dtype)
        return (out, after) if return_state and after is not None else out

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
    ) -> tuple[Tensor, State]:
        """One token: (B, H, 1, D), (B, G, 1, D), (B, G, 1, E) -> (B, H, 1, E) and the state after it; None starts."""
        raise self._cannot_stream("step")

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """What `recall` needs of a whole context, (B, G, S, D) and (B, G, S, E); here all of it."""
        query = key.new_zeros(key.shape[0], self.num_heads, 1, key.shape[3]) if key.dim() == 4 else key
        _, key, value = self._accept(query, key, value, key_mask)
        made_by = (*self._maker(), ("remembers", key.shape[2]))
        return State((key, value, *(() if key_mask is None else (key_mask,))), key.shape[2], made_by)

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context, without a bias: (B, H, L, D) -> (B, H, L, E)."""
        self._check_memory(memory)
        key, value, *mask = memory.tensors
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        return self.forward(query, key, value, key_mask=mask[0] if mask else None, query_mask=real)

    def _maker(self) -> MadeBy:
        """What makes a memory fit this core."""
        return (("method", self.method),)

    def _check_memory(self, memory: State) -> None:
        made = dict(memory.made_by) if isinstance(memory, State) else {}
        if "remembers" not in made:
            found = f"a state of {made['method']!r}" if made else type(memory).__name__
            raise ValueError(f"recall needs what remember of this {self.method!r} core returned, got {found}.")
        del made["remembers"]
        problem = other_maker(made, dict(self._maker()))
        if problem:
            raise ValueError(f"{problem}; remember the context again.")

    def refusal(self, causal: bool) -> ValueError | None:
        """Why it cannot attend with this causality, before any input is there; None where it can."""
        return None

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
        query_mask: Tensor | None = None,
        **positions: Any,
    ) -> Tensor:
        """The weights (B, H, L, S), by attending to unit vectors (performer C.4); for looking, at small L and S.

        ``positions`` are the bias and what goes with it, as in `forward`.
        """
        if key.dim() != 4:
            raise ValueError(f"key must be (batch, heads, length, head_dim), got shape {shape(key)}.")
        eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        common: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "scale": scale}
        weights: Tensor = self.forward(query, key, eye, query_mask=query_mask, **common, **positions)
        return weights

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        unit = ", normalize_qk=True" if self.normalize_qk else ""
        return f"{self.method!r}, head_dim={self.head_dim}, num_heads={self.num_heads}, scale={self.scale:g}{unit}"

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        """The method itself, and the state after the keys where there is one."""
        raise TypeError(f"{type(self).__name__} does not say how it attends.")

    def _accept(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Checked inputs; under autocast in its dtype, as torch's own attention does."""
        check_floats(query, key, value)
        kind = query.device.type
        if autocasts(kind):
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        check_inputs(query, key, value, head_dim=self.head_dim, num_heads=self.num_heads)
        if key_mask is not None:
            check_mask(key_mask, key)
        return query, key, value

    @staticmethod
    def _real_queries(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        """The queries that landmarks may come from, (B, L); None means all. The one place that knows the default."""
        if query_mask is not None:
            check_mask(query_mask, query, "query")
            return query_mask
        return key_mask if query.shape[2] == key.shape[2] else None

    def _units(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys by their direction, where that is asked for, in the precision of the arithmetic."""
        if not self.normalize_qk:
            return query, key
        if key_mask is not None:  # the gradient of a norm must not see what the mask hides
            key = key.masked_fill(~key_mask[:, None, :, None], 0)
        unit_q, unit_k = (F.normalize(x.to(compute_dtype(x.dtype)), dim=-1) for x in (query, key))
        return unit_q, unit_k

    def _check_streaming(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        scale: float,
        state: State | None,
        biased: bool = False,
    ) -> None:
        raise self._cannot_stream("a state")

    def _check_gate(self, gate: Tensor | None, key: Tensor) -> None:
        if gate is None:
            return
        if not self.takes_gate:
            given = f"one of shape {shape(gate)}" if isinstance(gate, Tensor) else repr(gate)
            raise ValueError(f"{self.method!r} takes no gate, got {given}; use 'rfa-gate'.")
        check_gate(gate, key, self.num_heads)

    def _cannot_stream(self, what: str) -> ValueError:
        return ValueError(
            f"{self.method!r} cannot stream, but {what} was asked for: its state would grow with the context. Use a "
            f"method with a feature map, such as 'favor+', or keep keys and values and call the core with all of them."
        )

    def _no_bias(self, what: str) -> ValueError:
        return ValueError(
            f"{self.method!r} takes no relative position bias, got {what}; use 'softmax', or a normalized method with "
            f"a feature map such as 'nprf', or put positions into the inputs."
        )
