"""The masks of `torch.nn.MultiheadAttention`, read as what kernel attention can do: hidden keys, and causality."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.errors import shape
from kernelformer.modules.checks import assert_values, can_read


def hidden_keys(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """``key_padding_mask`` (B, S), True or -inf = ignore, as bool with True = ignore.

    Raises:
        ValueError: another shape, or numbers that would be added to the logits.
    """
    if mask is None:
        return None
    _check_tensor(mask, "key_padding_mask")
    if tuple(mask.shape) != (batch, keys):
        raise ValueError(f"key_padding_mask must be (batch, keys) = {(batch, keys)}, got {shape(mask)}.")
    return _hidden(mask, "key_padding_mask")


def is_causal_mask(mask: Tensor | None, queries: int, keys: int, heads: int, hint: bool) -> bool:
    """Whether ``attn_mask`` hides the future, key j from query i iff j > i, rather than nothing.

    Args:
        mask: (L, S), or (batch * heads, L, S) with the same in each; bool with True = ignore, or 0 and -inf. None with
            the hint is causal: no (L, S) mask has to be made.
        queries: L.
        keys: S.
        heads: batch * heads.
        hint: torch's ``is_causal``, which says that the mask is causal. It is checked; without it a compiled graph
            breaks here, since what comes next depends on values.

    Raises:
        ValueError: it hides anything else, or does not do what the hint says.
    """
    if mask is None:
        return hint
    _check_tensor(mask, "attn_mask")
    sizes = (queries, keys), (heads, queries, keys)
    if tuple(mask.shape) not in sizes:
        raise ValueError(
            f"attn_mask must be (queries, keys) = {sizes[0]} or (batch * heads, queries, keys) = {sizes[1]}, got "
            f"{shape(mask)}."
        )
    hidden = _hidden(mask, "attn_mask")
    future = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    causal = (hidden == future).all()
    if hint:
        wrong = (
            f"is_causal=True says that attn_mask hides key j from query i iff j > i, and the one of shape "
            f"{shape(mask)} does not; give the causal one, or none."
        )
        assert_values(causal, wrong)
        if can_read(mask) and not bool(causal):
            raise ValueError(wrong)
        return True
    if not bool(hidden.any()):
        return False
    if bool(causal):
        return True
    raise ValueError(
        f"attn_mask of shape {shape(mask)} is neither causal nor empty; kernel attention cannot hide single pairs. "
        f"Hide keys by key_padding_mask, and the future by a causal mask or is_causal=True; other masks need torch's "
        f"own attention."
    )


def _check_tensor(mask: object, name: str) -> None:
    if not isinstance(mask, Tensor):
        way = "; the causal one is is_causal=True" if name == "attn_mask" else ""
        raise ValueError(f"{name} must be a tensor or None, got {type(mask).__name__} {mask!r:.40}{way}.")


def _hidden(mask: Tensor, name: str) -> Tensor:
    """True, or -inf, = ignore, as bool."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool or floating point, got {mask.dtype}; convert it with .bool().")
    hidden = mask == -torch.inf
    plain = (hidden | (mask == 0)).all()
    wrong = (
        f"{name} in {mask.dtype} must be 0 or -inf, got other numbers, which would be a bias: kernel attention cannot "
        f"add them to logits that it never forms. Large negative numbers that hide are to be -inf."
    )
    assert_values(plain, wrong)
    if can_read(mask) and not bool(plain):
        raise ValueError(wrong)
    return hidden
