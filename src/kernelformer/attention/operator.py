"""Custom operators of torch with their gradients, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from kernelformer.attention.blocks import empty_rows


class Operator:
    """An operator ``kernelformer::NAME`` and its gradient ``kernelformer::NAME_backward``.

    The second takes the gradients of outputs, zeros where there are none, outputs, inputs, and, if ``tensors`` of a map
    are among these, ``learn``: whether they have gradients. It returns the gradients of the inputs ``learned``; a list
    may have those of the first tensors only.

    Args:
        name: of the operator.
        inputs: their part of a schema, ``Tensor query, ..., float scale``.
        outputs: theirs, with names.
        forward: from inputs to outputs.
        fake: the same without values.
        backward: see above.
        learned: names of the inputs that have gradients, ``query, key``.
        given: names of the outputs whose gradients count; default: the first.
        kept: names of the outputs that the backward pass takes; default: all.
        fake_backward: `backward` without values; default: like the inputs, (B, H, L, X) as `empty_rows`.
        plain: from inputs by name to the outputs ``given``, by differentiable operations, for gradients that need a
            graph themselves (``create_graph=True``); returns None for a call that it cannot do.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: str,
        outputs: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        backward: Callable[..., Any],
        learned: str,
        given: str = "",
        kept: str | None = None,
        fake_backward: Callable[..., Any] | None = None,
        plain: Callable[..., Any] | None = None,
    ) -> None:
        self._plain = plain
        self._inputs, self._outputs = _types(inputs), _types(outputs)
        self._learned, self._given = learned.split(", "), (given or outputs.split(", ")[0].split(" ")[1]).split(", ")
        self._kept = list(self._outputs) if kept is None else [x for x in kept.split(", ") if x]
        self._tensors = [x for x, kind in self._inputs.items() if kind.startswith("Tensor")]
        asked = [f"{self._outputs[x]} {x}_grad" for x in self._given] + [f"{self._outputs[x]} {x}" for x in self._kept]
        learn = ["bool learn"] if "tensors" in self._inputs else []
        found = [self._inputs[x].rstrip("?") for x in self._learned]
        kinds = (
            f"({inputs}) -> {_returned(self._outputs.values())}",
            f"({', '.join([*asked, inputs, *learn])}) -> {_returned(found)}",
        )
        self.forward, self.backward = (
            torch.library.custom_op(f"kernelformer::{x}", run, mutates_args=(), schema=kind)
            for x, run, kind in zip((name, f"{name}_backward"), (forward, backward), kinds, strict=True)
        )
        self.forward.register_fake(fake)
        self.backward.register_fake(fake_backward or self._fake_backward)
        self.forward.register_autograd(self._grad, setup_context=self._save)

    def _fake_backward(self, *arguments: Any) -> Any:
        rest = arguments[len(self._given) + len(self._kept) :]
        inputs: dict[str, Any] = dict(zip(self._inputs, rest, strict=False))
        made: list[Any] = []
        for name in self._learned:
            x = inputs[name]
            if isinstance(x, list):
                made.append([torch.empty_like(y) for y in x] if name != "tensors" or rest[-1] else [])
            else:
                made.append(empty_rows(x, x.shape[3]) if x.dim() == 4 else torch.empty_like(x))
        return made[0] if len(made) == 1 else tuple(made)

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        named = dict(zip(self._inputs, inputs, strict=True))
        results = dict(zip(self._outputs, output if len(self._outputs) > 1 else [output], strict=True))
        tensors = [results[x] for x in self._kept] + [named[x] for x in self._tensors]
        ctx.lengths = [len(x) if isinstance(x, list) else None for x in tensors]
        ctx.call_settings = [y for x, y in named.items() if x not in self._tensors]
        ctx.learn = any(x.requires_grad for x in named.get("tensors", ()))
        ctx.save_for_backward(*(y for x in tensors for y in (x if isinstance(x, list) else [x])))

    def _grad(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        known = dict(zip(self._outputs, grads, strict=True))
        rest, arguments = list(ctx.saved_tensors), []  # read once: checkpointing makes them anew each time
        for length in ctx.lengths:
            arguments.append(rest.pop(0) if length is None else [rest.pop(0) for _ in range(length)])
        kept, inputs = arguments[: len(self._kept)], arguments[len(self._kept) :]
        outputs, by_name = dict(zip(self._kept, kept, strict=True)), dict(zip(self._tensors, inputs, strict=True))
        if all(known[x] is None for x in self._given):
            return tuple(_padded(None, by_name.get(x)) for x in self._inputs)
        given = [_or_zeros(known[x], outputs.get(x)) for x in self._given]
        made = None
        if torch.is_grad_enabled() and self._plain is not None:
            made = plain_grads(self._plain, dict(zip(self._inputs, [*inputs, *ctx.call_settings], strict=True)), given)
        if made is None:
            learn = [ctx.learn] if "tensors" in self._inputs else []
            found = self.backward(*given, *kept, *inputs, *ctx.call_settings, *learn)
            made = dict(zip(self._learned, found if len(self._learned) > 1 else [found], strict=True))
        return tuple(_padded(made.get(x), by_name.get(x)) for x in self._inputs)


def plain_grads(plain: Callable[..., Any], inputs: dict[str, Any], grads: Any) -> dict[str, Any] | None:
    """Gradients of the inputs by name, with a graph; see ``plain`` of `Operator`.

    Inputs are views of their own here: one may be another, or be made of it outside, which is not this operator's.
    """
    own, given = tree_map_only(Tensor, lambda x: x.view_as(x), inputs), tree_leaves(grads)
    outs = plain(**own) if all(x.numel() for x in given) else None
    if outs is None:
        return None
    pairs = [(x, g) for x, g in zip(tree_leaves(outs), given, strict=True) if x.requires_grad]
    learned = [x for x in tree_leaves(own) if isinstance(x, Tensor) and x.requires_grad]
    options: dict[str, Any] = {"create_graph": True, "allow_unused": True}
    found = iter(torch.autograd.grad([x for x, _ in pairs], learned, [g for _, g in pairs], **options))
    made: dict[str, Any] = tree_map(lambda x: next(found) if isinstance(x, Tensor) and x.requires_grad else None, own)
    return made


def _types(schema: str) -> dict[str, str]:
    """The types of a schema's arguments, by name."""
    return {name: kind for kind, name in (x.split(" ") for x in schema.split(", "))}


def _returned(kinds: Iterable[str]) -> str:
    kinds = list(kinds)
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _or_zeros(grad: Any, output: Any) -> Any:
    """A gradient of an output; zeros where there is none."""
    if isinstance(output, list):
        return [_or_zeros(x, y) for x, y in zip(grad or [None] * len(output), output, strict=True)]
    return torch.zeros_like(output) if grad is None else grad


def _padded(grad: Any, x: Any) -> Any:
    """The gradient of an input, in its dtype; None where there is none."""
    if isinstance(x, list):
        found = [_padded(*pair) for pair in zip(grad or (), x, strict=False)]
        return found + [None] * (len(x) - len(found))
    return None if grad is None or x is None else grad.to(x.dtype)
