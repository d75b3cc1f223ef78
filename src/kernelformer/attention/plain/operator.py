"""Plain attention as one operator, for compiled graphs: they see no loop over segments, and serve all lengths.

The forward pass runs the plain functions as they are; the backward pass runs them again under autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.plain.attend import (
    plain_causal_attention,
    plain_key_sums,
    plain_linear_attention,
    plain_read_sums,
)
from kernelformer.attention.plain.layout import autograd_inside
from kernelformer.attention.plain.near_far import plain_near_far_attention
from kernelformer.attention.state import state_shapes
from kernelformer.contract import compute_dtype, lookup

END = "\x1f"  # between the arguments of a form


def run_plain(function: str, **arguments: Any) -> list[Tensor]:
    """Outputs, if there are any, and the tensors of a state of one of `FUNCTIONS`, in a compiled graph as an operator.

    Args:
        function: its name.
        arguments: tensors, lists of tensors, None, numbers and strings.
    """
    if torch.compiler.is_compiling():
        results: list[Tensor] = _forward(*_packed(function, arguments))
        return results
    if arguments["query" if "query" in arguments else "key"].is_meta:  # shapes alone, of a map that may lie elsewhere
        arguments["tensors"] = [x.to("meta") for x in arguments["tensors"]]
    return FUNCTIONS[function](**arguments)


def _linear(**arguments: Any) -> list[Tensor]:
    return [plain_linear_attention(**arguments)]


def _causal(**arguments: Any) -> list[Tensor]:
    out, state = plain_causal_attention(**arguments)
    return [out, *state]


def _near_far(leading: int, streams: bool, **arguments: Any) -> list[Tensor]:
    out, state = plain_near_far_attention(NearFarCall(**arguments), leading=leading, streams=streams)
    return [out, *state]


def _read_sums(**arguments: Any) -> list[Tensor]:
    return [plain_read_sums(**arguments)]


FUNCTIONS: dict[str, Callable[..., list[Tensor]]] = {
    "linear": _linear,
    "causal": _causal,
    "near_far": _near_far,
    "key_sums": plain_key_sums,
    "read_sums": _read_sums,
}


def _packed(function: str, arguments: dict[str, Any]) -> tuple[list[Tensor], str, list[int]]:
    """Arguments as an operator takes them: tensors, a form that says what they are, and sizes, which may be symbols."""
    form = function
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for name, x in arguments.items():
        if x is None:
            kind = "none"
        elif isinstance(x, Tensor):
            kind = "tensor"
            tensors.append(x)
        elif isinstance(x, list | tuple):
            kind = f"list {len(x)}"
            tensors.extend(x)
        elif isinstance(x, bool):
            kind = "true" if x else "false"
        elif isinstance(x, float):
            kind = f"float {x!r}"
        elif isinstance(x, str):
            kind = f"str {x}"
        else:
            kind = "size"
            sizes.append(x)
        form += f"{END}{name}:{kind}"
    return tensors, form, sizes


def _unpacked(tensors: Sequence[Tensor], form: str, sizes: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """The inverse of `_packed`."""
    rest, numbers = iter(tensors), iter(sizes)
    arguments: dict[str, Any] = {}
    function, *items = form.split(END)
    for item in items:
        name, kind = item.split(":", 1)
        what, _, value = kind.partition(" ")
        if what == "tensor":
            arguments[name] = next(rest)
        elif what == "list":
            arguments[name] = [next(rest) for _ in range(int(value))]
        elif what == "size":
            arguments[name] = next(numbers)
        else:
            arguments[name] = {"none": None, "true": True, "false": False}.get(what, value)
            arguments[name] = float(value) if what == "float" else arguments[name]
    return function, arguments


@torch.library.custom_op(
    "kernelformer::plain_attention",
    mutates_args=(),
    schema="(Tensor[] tensors, str form, SymInt[] sizes) -> Tensor[]",
)
def _forward(tensors: list[Tensor], form: str, sizes: list[int]) -> list[Tensor]:
    function, arguments = _unpacked(tensors, form, sizes)
    # What is returned is no input, and lies in memory as the graph expects it.
    return [x.clone(memory_format=torch.contiguous_format) for x in FUNCTIONS[function](**arguments)]


@_forward.register_fake
def _(tensors: list[Tensor], form: str, sizes: list[int]) -> list[Tensor]:
    function, x = _unpacked(tensors, form, sizes)
    query, key, value = (x.get(name) for name in ("query", "key", "value"))
    outs = []
    if query is not None:
        width = x["state"][1].shape[3] if value is None else value.shape[3]
        outs = [query.new_empty(*query.shape[:3], width)]
    if (
        function in ("linear", "read_sums")
        or key is None
        or value is None
        or not x["spec"]
        or not x.get("streams", True)
    ):
        return outs
    spec, width = lookup(x["spec"]), value.shape[3]
    features = spec.feature_dim(x["tensors"], key.shape[3])
    like = value.new_empty(0, dtype=compute_dtype(value.dtype))
    return outs + [like.new_empty(*key.shape[:2], *size) for size in state_shapes(spec, features, width)]


@torch.library.custom_op(
    "kernelformer::plain_attention_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] tensors, str form, SymInt[] sizes) -> Tensor[]",
)
def _backward(grads: list[Tensor], tensors: list[Tensor], form: str, sizes: list[int]) -> list[Tensor]:
    """Gradients of the tensors with a floating point."""
    with autograd_inside():
        own = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
        function, arguments = _unpacked(own, form, sizes)
        outs = FUNCTIONS[function](**arguments)
        pairs = [(x, g) for x, g in zip(outs, grads, strict=True) if x.requires_grad]
        leaves = [x for x in own if x.is_floating_point()]
        found = torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else torch.empty_like(x).copy_(g) for x, g in zip(leaves, found, strict=True)
    ]


@_backward.register_fake
def _(grads: list[Tensor], tensors: list[Tensor], form: str, sizes: list[int]) -> list[Tensor]:
    return [torch.empty_like(x) for x in tensors if x.is_floating_point()]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.form, ctx.sizes = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _grad(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors, outs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    given = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, outs, strict=True)]
    found = iter(_backward(given, list(tensors), ctx.form, ctx.sizes))
    return [next(found) if x.is_floating_point() else None for x in tensors], None, None if ctx.sizes else []


_forward.register_autograd(_grad, setup_context=_save)
