"""Models that do not attend through transformers' `AttentionInterface`, and biases that would be quadratic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Interface = Callable[..., tuple[Tensor, Tensor | None]]
_INTERFACE = "interface"  # attribute of an adapted module


class AdaptedMPNet(nn.Module):
    """MPNet's self-attention, with its attention left to an interface."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, ...]:
        """As MPNet's own."""
        size: Any = self.attention_head_size
        projections: Any = (self.q, self.k, self.v)
        query, key, value = (x(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2) for x in projections)
        dropout: Any = self.dropout
        interface: Interface = getattr(self, _INTERFACE)
        out, weights = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout.p if self.training else 0.0,
            scaling=size**-0.5,
            is_causal=False,
            position_bias=position_bias,
            output_attentions=output_attentions,
            **keywords,
        )
        last: Any = self.o
        mixed: Tensor = last(out.flatten(2))
        return (mixed, weights) if output_attentions and weights is not None else (mixed,)


@dataclass(frozen=True)
class Adapter:
    """How to send a class of attentions through an interface.

    Args:
        forward: a class whose forward does it, to stand before the original.
        sizes: number of heads and head dimension of a module.
    """

    forward: type[nn.Module]
    sizes: Callable[[Any], tuple[int, int]]

    def apply(self, module: nn.Module, interface: Interface) -> Interface | None:
        """From now on the module attends through ``interface``; returns the one before."""
        before: Interface | None = vars(module).get(_INTERFACE)
        derive(module, self.forward)
        setattr(module, _INTERFACE, interface)
        return before

    def undo(self, module: nn.Module, before: Interface | None = None) -> None:
        """The module as it was."""
        if before is not None:
            setattr(module, _INTERFACE, before)
            return
        delattr(module, _INTERFACE)
        underive(module)


ADAPTERS = {"MPNetSelfAttention": Adapter(AdaptedMPNet, lambda x: (x.num_attention_heads, x.attention_head_size))}


class TableT5(nn.Module):
    """T5's attention with its bias as a table over distances instead of L x S numbers."""

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
    ) -> Tensor | None:
        """(1, H, n) over j - i; None in a layer without a bias of its own.

        Distances are those of all pairs; for one token after others that a `StateCache` has seen, where the key is the
        token's own, those from -max_distance to 0.
        """
        table = self._modules.get("relative_attention_bias")
        if table is None:
            return None
        past, reach = int(past_seen_tokens), int(self.relative_attention_max_distance)  # type: ignore[arg-type]
        low, high = -(past + query_length - 1), key_length - 1 if past == 0 else query_length - 1
        if past and key_length == query_length == 1:
            low = -reach
        weight: Any = table.weight
        buckets: Any = self._relative_position_bucket
        settings = {
            "bidirectional": not self.is_decoder,
            "num_buckets": self.relative_attention_num_buckets,
            "max_distance": reach,
        }
        if "bidirectional" not in inspect.signature(buckets).parameters:  # UMT5's looks them up itself
            settings = {}
        places = buckets(torch.arange(low, high + 1, device=weight.device), **settings)
        return table(places).T.unsqueeze(0)  # type: ignore[no-any-return]


class TableMPNet(nn.Module):
    """MPNet's encoder with its bias as a table over distances."""

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
        """(1, H, 2 L - 1) over j - i."""
        if position_ids is not None:
            raise ValueError("positions of a converted MPNet are those of the tokens; leave position_ids out.")
        L = x.shape[1]
        buckets: Any = self.relative_position_bucket
        table: Any = self.relative_attention_bias
        places = buckets(torch.arange(1 - L, L, device=x.device), num_buckets=num_buckets)
        return table(places).T.unsqueeze(0)  # type: ignore[no-any-return]


MPNET_DISTANCE = 128  # where MPNet's buckets end


def tabulate_bias(model: nn.Module) -> None:
    """Relative biases of T5's and MPNet's kind as tables, which take memory of the length and not of its square."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "MPNetEncoder":
            derive(module, TableMPNet)
        elif isinstance(module, AdaptedMPNet):
            module.relative_attention_max_distance = MPNET_DISTANCE  # type: ignore[assignment]
        elif hasattr(kind, "compute_bias") and hasattr(kind, "_relative_position_bucket"):
            own = list(inspect.signature(kind.compute_bias).parameters)
            if own == ["self", "query_length", "key_length", "device", "past_seen_tokens"]:
                derive(module, TableT5)
                module.has_relative_attention_bias = True  # type: ignore[assignment]  # else it makes L x S zeros


def untabulate_bias(model: nn.Module) -> None:
    """The model's own biases again."""
    for module in model.modules():
        if isinstance(module, TableT5):
            module.has_relative_attention_bias = "relative_attention_bias" in module._modules  # type: ignore[assignment]
            underive(module)
        elif isinstance(module, TableMPNet):
            underive(module)
        elif isinstance(module, AdaptedMPNet):
            del module.relative_attention_max_distance


def derive(module: nn.Module, first: type) -> None:
    """A module of a class of the same name that looks into ``first`` before its own."""
    kind: Any = type(module)
    if not issubclass(kind, first):
        module.__class__ = _derived(first, kind)


def underive(module: nn.Module) -> None:
    """The class before `derive` again."""
    module.__class__ = type(module).__bases__[1]


@cache
def _derived(first: type, kind: type) -> type:
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__, "__reduce_ex__": _reduce})


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For pickle and copy: a derived class has the name of its original, so that nobody finds it by name."""
    found: Any = object.__reduce_ex__(module, max(2, protocol))
    kind: type = type(module)
    firsts: list[type] = []
    while vars(kind).get("__reduce_ex__") is _reduce:
        first, kind = kind.__bases__
        firsts.insert(0, first)
    return _blank, (kind, *firsts), *found[2:]


def _blank(kind: Any, *firsts: type) -> Any:
    """A module of a class that is derived again, without its state."""
    for first in firsts:
        kind = _derived(first, kind)
    return kind.__new__(kind)
