"""Multi-head attention with its projections."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.attention import State
from kernelformer.attention.dispatch import check_algorithm
from kernelformer.contract import compute_dtype, no_autocast
from kernelformer.errors import choice, flag, fraction, positive_int, shape
from kernelformer.modules.context import tokens_before
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.packed import segment_positions
from kernelformer.modules.positions import RelativePositions, RotaryPositions
from kernelformer.modules.spec import POSITION_OPTIONS, ROTARY_OPTIONS, build_attention, method_options, near_settings


def check_near_positions(positions: RelativePositions, core: AttentionCore) -> None:
    """Check that far tokens have one bias: a window takes a bias that is constant or a line beyond it."""
    if not core.has_near or positions.scheme == "alibi":
        return
    window, reach = getattr(core, "window", None) or 0, positions.max_distance
    if positions.grid is None and reach is not None and reach <= window:
        return
    given = f"grid={positions.grid}" if positions.grid is not None else f"max_distance={reach}"
    raise ValueError(
        f"{core.method!r} with {near_settings(core)} needs relative positions that are constant beyond its window, got "
        f"{given}; give relative='1d' with max_distance={window} or less, or scheme='alibi', or leave the window out."
    )


def layer_positions(
    relative: str | RelativePositions | None, num_heads: int, causal: bool, options: dict[str, Any], method: str
) -> RelativePositions | None:
    """Build the relative positions of a layer; removes their options from the core's."""
    if isinstance(relative, RelativePositions):
        if relative.num_heads != num_heads:
            raise ValueError(f"these positions have {relative.num_heads} heads, and the layer {num_heads}.")
        if relative.causal and not causal:
            raise ValueError("these positions were built with causal=True, and the layer with causal=False.")
        return relative
    if relative is None:
        stray = [x for x in options if x in POSITION_OPTIONS and x not in method_options(method)]
        if stray:
            raise ValueError(
                f"{stray[0]}={options[stray[0]]!r} is of relative positions, got relative=None; give relative='1d' or "
                f"'2d', or leave it out."
            )
        return None
    names = {"1d": ("scheme", "max_length", "max_distance", "num_buckets"), "2d": ("grid", "num_prefix")}
    mine = {x: options.pop(x) for x in names[choice("relative", relative, names)] if x in options}
    if relative == "2d" and "grid" not in mine:
        raise ValueError("relative='2d' needs grid=(rows, columns).")
    return RelativePositions(num_heads, causal=causal and relative == "1d", **mine)


def layer_rotary(rotary: bool, head_dim: int, options: dict[str, Any]) -> RotaryPositions | None:
    """Build the rotary positions of a layer; removes their options from the core's."""
    mine = {x: options.pop(x) for x in ROTARY_OPTIONS if x in options}
    if flag("rotary", rotary):
        return RotaryPositions(head_dim, **mine)
    for name, value in mine.items():
        raise ValueError(
            f"{name}={value!r} is of rotary positions, got rotary=False; give rotary=True, or leave it out."
        )
    return None


class KernelAttention(nn.Module):
    """Multi-head attention by any method: a drop-in for self- or cross-attention.

        y = W_o concat_h core(W_q x, W_k c, W_v c)_h          c = x, or the context

    Args:
        embed_dim: width of x and y.
        num_heads: H; divides embed_dim, unless head_dim is given.
        method: a name from `list_methods`.
        num_features: the size of the method, whatever it calls it; None: its default.
        causal: key j is visible to query i iff j <= i.
        relative: relative positions: ``"1d"`` with ``max_length`` and/or ``max_distance``, ``scheme`` ("table", "t5",
            "alibi") and ``num_buckets``; ``"2d"`` with ``grid`` and ``num_prefix``; or a `RelativePositions`, which
            several layers may share.
        rotary: whether queries and keys turn with their position, see `RotaryPositions`, whose options
            ``rotary_base``, ``rotary_dim`` and ``rotary_scaling`` go with it; for self-attention, by every method.
        num_kv_heads: G, for grouped queries; default H.
        head_dim: D; default embed_dim / num_heads.
        context_dim: width of the context; default embed_dim.
        bias: whether the projections have a bias.
        dropout: the share of the output y that training sets to 0, as `torch.nn.Dropout` after the layer would.
        attention_dropout: the same of the attention weights, as `torch.nn.MultiheadAttention`'s ``dropout``; for exact
            methods and near tokens that are attended to exactly, since otherwise no weights are formed.
        algorithm: of the core's calls, "chunked" or "plain", with ``relative`` also others; None for the best one.
        device: of the projections.
        dtype: of the projections.
        options: of the core, see `build_attention`. Layers of one model do well with different seeds. With ``window``
            or ``sinks`` it is a layer of self-attention, which takes no context.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        method: str = "favor+",
        *,
        num_features: int | None = None,
        causal: bool = False,
        relative: str | RelativePositions | None = None,
        rotary: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        algorithm: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_int("embed_dim", embed_dim)
        positive_int("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}; or give head_dim.")
        kv_heads = positive_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {kv_heads} and {num_heads}.")
        maps = options.get("num_key_heads")
        if isinstance(maps, int) and maps % kv_heads:
            raise ValueError(
                f"num_key_heads={maps} maps of keys do not fit the key heads of this layer, num_kv_heads={kv_heads}; "
                f"give both the same number."
            )
        self.positions = layer_positions(relative, num_heads, causal, options, method)
        if num_features is not None:
            options["num_features"] = num_features
        if attention_dropout:
            options["attention_dropout"] = attention_dropout
        self.dropout = fraction("dropout", dropout)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else positive_int("head_dim", head_dim)
        self.causal = causal
        self.rotary = layer_rotary(rotary, self.head_dim, options)
        self.context_dim = embed_dim if context_dim is None else positive_int("context_dim", context_dim)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        dim, kv_dim = num_heads * self.head_dim, kv_heads * self.head_dim
        self.query = nn.Linear(embed_dim, dim, bias=bias, **where)
        self.key = nn.Linear(self.context_dim, kv_dim, bias=bias, **where)
        self.value = nn.Linear(self.context_dim, kv_dim, bias=bias, **where)
        self.out = nn.Linear(dim, embed_dim, bias=bias, **where)
        if "own_gate" in method_options(method):  # the layer has the gate, computed from its input
            options.setdefault("own_gate", False)
        self.core = build_attention(method, head_dim=self.head_dim, num_heads=num_heads, **options).to(device)
        problem = self.core.refusal(causal)
        if problem is not None:
            raise ValueError(str(problem).replace("is_causal=", "causal="))  # as this layer calls it
        loop = check_algorithm(algorithm, method, self.core.takes_loops)
        self.algorithm = loop or algorithm
        if loop is None and algorithm is not None and self.positions is None:
            raise ValueError(f"algorithm={algorithm!r} is for a relative bias, got relative=None.")
        if self.positions is not None:
            self.positions.to(device)
            if not self.core.takes_bias:
                raise ValueError(
                    f"method {method!r} takes no relative positions, got relative={relative!r}; use 'softmax' or a "
                    f"normalized method with a feature map such as 'nprf', or add positions to x."
                )
            check_near_positions(self.positions, self.core)
        self.gate: nn.Linear | None = None
        if self.core.takes_gate and not options["own_gate"]:
            self.gate = nn.Linear(self.context_dim, num_heads, **where)
            nn.init.constant_(self.gate.bias, 2.0)

    def _project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check("x", x, "embed_dim")
        if context is not x:
            self._check("context", context, "context_dim")
        elif self.context_dim != self.embed_dim:
            raise ValueError(
                f"this layer needs a context, got none: it was built with context_dim={self.context_dim} and "
                f"embed_dim={self.embed_dim}."
            )
        if context.shape[0] != x.shape[0]:
            raise ValueError(
                f"x and context must have the same batch size, got {x.shape[0]} and {context.shape[0]} "
                f"(shapes {shape(x)} and {shape(context)})."
            )
        q, k, v = self._heads(self.query(x), self.key(context), self.value(context))
        return q, k, v

    def _check(self, name: str, x: Tensor, width: Literal["embed_dim", "context_dim"]) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; convert it with torch.as_tensor().")
        built = getattr(self, width)
        if x.dim() != 3 or x.shape[-1] != built or not x.is_floating_point():
            way = f"; build the layer with {width}={x.shape[-1]}" if x.dim() == 3 and x.shape[-1] != built else ""
            raise ValueError(
                f"{name} must be (batch, length, {width}={built}) in floating point, got {shape(x)} in {x.dtype}{way}."
            )

    @staticmethod
    def _check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
        if isinstance(mask, Tensor) and mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"key_mask must be (batch, length) of {name}, {tuple(tokens.shape[:2])}, got {shape(mask)}; causality "
                f"is causal=True of the layer, not a mask."
            )

    def _check_stream(self, x: Tensor, context: Tensor) -> None:
        if not self.causal:
            raise ValueError(
                "a state needs a causal layer, this one was built with causal=False: without causality nothing is past."
            )
        if x.shape[1] != context.shape[1]:
            raise ValueError(
                f"with a state x and context are the same tokens, got lengths {x.shape[1]} and {context.shape[1]}; "
                f"to attend to a context once and again use remember and recall."
            )

    def _check_takes_context(self) -> None:
        if self.rotary is not None:
            raise ValueError(
                "rotary positions are those of tokens that attend to themselves, got a context for a layer with "
                "rotary=True; build the layer of a cross-attention with rotary=False."
            )
        if self.core.has_near:
            raise ValueError(
                f"a window and sinks are near tokens of one sequence, got a context for a layer of "
                f"{self.core.method!r} with {near_settings(self.core)}; build the layer of a cross-attention without "
                f"them, and not by 'local'."
            )

    def _heads(self, *rows: Tensor) -> list[Tensor]:
        dim = self.head_dim
        return [x.view(*x.shape[:2], x.shape[2] // dim, dim).transpose(1, 2) for x in rows]

    def _gates(self, gate: nn.Linear, context: Tensor) -> Tensor:
        """Compute ``g_t = sigmoid(w . x_t + b)`` for each head, (B, H, S)."""
        weight, bias = gate.weight, gate.bias
        dtype = compute_dtype(weight.dtype)
        with no_autocast(context.device.type):  # in 8 bits 1 - g is lost, and with it the newest token
            return torch.sigmoid(F.linear(context.to(dtype), weight.to(dtype), bias.to(dtype))).transpose(1, 2)

    def _rotate(
        self, q: Tensor, k: Tensor, state: State | None, position_ids: Tensor | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply rotary positions to queries and keys; they restart with every segment."""
        if self.rotary is None:
            raise ValueError("position_ids are for rotary positions, this layer was built with rotary=False.")
        # Ids of another shape are the core's to refuse.
        fits = isinstance(segment_ids, Tensor) and segment_ids.shape == (q.shape[0], q.shape[2])
        if fits and segment_ids is not None and position_ids is None:
            if state is not None:
                raise ValueError(
                    "a stream of segments does not know where in its segment a token stands; give position_ids, "
                    "counted from the start of each segment."
                )
            position_ids = segment_positions(segment_ids)
        past = 0 if state is None else state.length
        if state is None and position_ids is None:
            past = tokens_before(q.shape[2])
        turned: tuple[Tensor, Tensor] = self.rotary(q, k, past, position_ids)
        return turned

    def _merge(self, heads: Tensor) -> Tensor:
        y: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
        position_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Attend: (B, L, E) -> (B, L, E).

        Args:
            x: (B, L, E).
            context: (B, S, context_dim), whose tokens are attended to; default x itself.
            key_mask: (B, S) bool, True = attend; with a context it says nothing about x, all of whose tokens are real.
            segment_ids: (B, L) integers that do not decrease along a row: packed sequences, each of which is alone.
            state: resume after what it has seen; causal only.
            return_state: also return the state after the last token; causal only.
            position_ids: (B or 1, L), of rotary positions; default: counted from the tokens of the state on, padding
                included.
        """
        crosses = context is not None
        if context is not None:
            self._check_takes_context()
            if segment_ids is not None:
                raise ValueError(
                    f"segment_ids are for self-attention, got a context of shape {shape(context)} too; give each "
                    f"sequence a row of its own, with key_mask."
                )
        context = x if context is None else context
        q, k, v = self._project(x, context)
        if key_mask is not None:
            self._check_mask("context" if crosses else "x", key_mask, context)
        if state is not None or return_state:
            self._check_stream(x, context)
        if self.rotary is not None or position_ids is not None:
            q, k = self._rotate(q, k, state, position_ids, segment_ids)
        common: dict[str, Any] = {"is_causal": self.causal, "key_mask": key_mask, "state": state}
        common |= {"segment_ids": segment_ids, "algorithm": self.algorithm}
        if crosses and key_mask is not None:  # it says nothing about x, even if that is as long
            common["query_mask"] = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if self.gate is not None:
            common["gate"] = self._gates(self.gate, context)
        if self.positions is not None:
            common |= self.positions(x.shape[1], context.shape[1], 0 if state is None else state.length)
        if not return_state:
            return self._merge(self.core(q, k, v, **common))
        heads, after = self.core(q, k, v, **common, return_state=True)
        return self._merge(heads), after

    def step(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Attend with one token, (B, 1, E) -> (B, 1, E) and the state after it. Arguments as for the layer's call."""
        if not self.causal:
            raise ValueError(
                "step needs a causal layer, this one was built with causal=False; build it with causal=True."
            )
        q, k, v = self._project(x, x)
        if x.shape[1] != 1:
            raise ValueError(
                f"step takes one token, got x of shape {shape(x)}; for more, call the layer with state=... and "
                f"return_state=True."
            )
        if key_mask is not None:
            self._check_mask("x", key_mask, x)
        if self.rotary is not None or position_ids is not None:
            q, k = self._rotate(q, k, state, position_ids, segment_ids)
        extra: dict[str, Any] = {} if self.gate is None else {"gate": self._gates(self.gate, x)}
        if self.positions is not None:
            extra |= self.positions.step(0 if state is None else state.length)
        heads, after = self.core.step(q, k, v, state, key_mask=key_mask, segment_ids=segment_ids, **extra)
        return self._merge(heads), after

    def remember(self, context: Tensor, key_mask: Tensor | None = None) -> State:
        """Summarize a context (B, S, context_dim) for `recall`: of constant size for methods with a feature map."""
        self._check_takes_context()
        self._check("context", context, "context_dim")
        self._check_mask("context", key_mask, context)
        key, value = self._heads(self.key(context), self.value(context))
        return self.core.remember(key, value, key_mask=key_mask)

    def recall(self, x: Tensor, memory: State) -> Tensor:
        """Attend to a context from `remember` without reading it again: (B, L, E) -> (B, L, E)."""
        self._check_takes_context()
        if self.causal or self.positions is not None:
            raise ValueError(
                "recall is for cross-attention: build the layer with causal=False and relative=None, this one has "
                f"causal={self.causal} and {'relative' if self.positions is not None else 'no'} positions."
            )
        self._check("x", x, "embed_dim")
        (query,) = self._heads(self.query(x))
        return self._merge(self.core.recall(query, memory))

    def extra_repr(self) -> str:
        """Settings, for printing a model."""
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}{dropout}"
