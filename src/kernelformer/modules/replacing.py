"""Replace every `torch.nn.MultiheadAttention` of a plain PyTorch model, in place."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from kernelformer.errors import unknown
from kernelformer.modules.multihead import MultiheadAttention
from kernelformer.modules.spec import build_core


def replace_attention(
    model: nn.Module, method: str, layers: Sequence[int | str] | int | str | None = None, **options: Any
) -> list[str]:
    """Replace every `torch.nn.MultiheadAttention` of a model by a `MultiheadAttention`, in place.

        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
        kf.replace_attention(model, "favor+", num_features=256)       # ["layers.0.self_attn", ...]

    The parameters are the very same ones, so that an optimizer, tied weights, frozen ones, their device and dtype stay
    as they are, and so does the mode of each module. A module that is used in several places is replaced once, in all
    of them. Each gets a draw of its own, ``seed`` plus its number. `restore_attention` undoes it.

    Dropout of attention weights is left out where a method forms none, with a warning.

    Args:
        model: any module that holds attentions; models of transformers mostly have their own: `hf.convert`.
        method: a name from `list_methods`.
        layers: which ones, by their number among the model's attentions, or by patterns of their names such as
            ``"encoder.*"``, one or several; None: all that are still torch's.
        options: of the method, see `build_attention`.

    Returns:
        The names of those that were replaced, in the order of the model's modules.

    Raises:
        ValueError: an unknown method, option or layer, an attention that cannot be replaced, or none; nothing is.
    """
    attentions = _attentions(model)
    names = [name for name, _ in attentions]
    chosen = sorted(select(names, layers))
    if layers is None:
        chosen = [i for i in chosen if type(attentions[i][1]) is not MultiheadAttention]
    if not chosen:
        raise ValueError(
            f"all {len(names)} attentions of {type(model).__name__} are replaced already; kf.restore_attention gives "
            f"torch's back."
        )
    for i in chosen:
        _check_replaceable(*attentions[i])
    new = []
    for i in chosen:
        old = attentions[i][1]
        core = build_core(method, num_heads=old.num_heads, head_dim=old.head_dim, layer=i, **options)
        new.append(MultiheadAttention.from_torch(old, core))
    for i, module in zip(chosen, new, strict=True):
        swap(model, attentions[i][1], module)
    warn_about_dropped_dropout(model, {names[i]: x for i, x in zip(chosen, new, strict=True)})
    return [names[i] for i in chosen]


def restore_attention(model: nn.Module) -> list[str]:
    """Give a model torch's own attentions back, with the weights as they are now; what cores learned is lost.

    Returns:
        The names of those that were restored.
    """
    replaced = [(name, x) for name, x in model.named_modules() if type(x) is MultiheadAttention]
    if not replaced or not replaced[0][0]:
        what = "is itself one: its restored() is" if replaced else "has none:"
        raise ValueError(f"{type(model).__name__} {what} a kf.MultiheadAttention that could be put back into a model.")
    for _, module in replaced:
        swap(model, module, module.restored())
    return [name for name, _ in replaced]


def select(names: Sequence[str], layers: Sequence[int | str] | int | str | None) -> set[int]:
    """The numbers of the attentions that numbers or patterns of names mean; None means all.

    Raises:
        ValueError: one of them means none.
    """
    if layers is None:
        return set(range(len(names)))
    if not isinstance(layers, Iterable | int):
        raise ValueError(f"layers are numbers or patterns of names, got {type(layers).__name__}.")
    chosen: set[int] = set()
    for wanted in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(wanted, str):
            some = {i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, wanted)}
            if not some:
                raise unknown("attention", wanted, names)
        elif isinstance(wanted, bool) or not isinstance(wanted, int) or not -len(names) <= wanted < len(names):
            raise ValueError(f"this model has {len(names)} attentions, numbered from 0, got {wanted!r:.60}.")
        else:
            some = {wanted % len(names)}
        chosen |= some
    return chosen


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever it is: layers that share one have it under several names."""
    for parent in list(model.modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            setattr(parent, name, new)


def warn_about_dropped_dropout(model: nn.Module, attentions: dict[str, MultiheadAttention]) -> None:
    """Warn of attentions that asked for a dropout of weights that they no longer form."""
    lost = {name: x for name, x in attentions.items() if x.dropout and not x.kernel.takes_dropout}
    if lost:
        name, first = next(iter(lost.items()))
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warnings.warn(
            f"attention dropout of {first.dropout:g} is left out in {name}{more} of {type(model).__name__}: "
            f"{first.kernel.method!r} forms no weights to drop. Other dropout of the model stays.",
            stacklevel=3,
        )


def _attentions(model: nn.Module) -> list[tuple[str, nn.MultiheadAttention]]:
    attentions = [(name, x) for name, x in model.named_modules() if isinstance(x, nn.MultiheadAttention)]
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.MultiheadAttention; attentions of transformers are replaced by "
            f"kernelformer.hf.convert, others by hand, with kf.KernelAttention or kf.build_attention."
        )
    if not attentions[0][0]:
        raise ValueError(
            f"the model is itself an attention, a {type(model).__name__}, and has no place in which it could be "
            f"replaced; build a kf.MultiheadAttention and load its state dict."
        )
    return attentions


def _check_replaceable(name: str, module: nn.MultiheadAttention) -> None:
    kind = type(module)
    if isinstance(module, MultiheadAttention):
        raise ValueError(f"{name} is a {kind.__name__} of {module.kernel.method!r} already; restore it first.")
    if kind is not nn.MultiheadAttention:
        raise ValueError(
            f"{name} is a {kind.__name__}, a kind of torch.nn.MultiheadAttention that may compute something else; "
            f"choose the others by layers=."
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"{name} has hooks, which would be lost; remove them, and register them again afterwards.")
