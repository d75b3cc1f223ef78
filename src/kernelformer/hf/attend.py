"""Attention by a core as transformers calls it: with its masks, its cache and its keywords."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from kernelformer.cache import StateLayer, cached_in
from kernelformer.errors import shape
from kernelformer.modules import AttentionCore
from kernelformer.modules.context import active_ranks, needs_whole

NOT_SDPA = ("softcap", "s_aux")  # keywords of an attention that SDPA refuses or passes over
_EAGER = "eager_attention_forward"  # the name of the function in every file of transformers that has one


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the eager function that stands beside the module's class, with the model's own soft caps and sinks.

    The mask is (B or 1, 1, 1 or L, S), bool or added to the logits; None: all keys, or those so far. Returns
    (B, L, H, E) and the weights (B, H, L, S).
    """
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    attend = next((getattr(x, _EAGER) for x in files if hasattr(x, _EAGER)), None)
    if attend is None:
        raise ValueError(
            f"{type(module).__name__} of {type(module).__module__} has no {_EAGER} beside it, by which soft-capped "
            f"logits, sinks and weights could be computed exactly; use a model of transformers that has one."
        )
    if mask is None and is_causal:
        L, S = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, L, S, dtype=torch.bool, device=query.device).tril(S - L)
    if mask is not None and mask.dtype == torch.bool:
        # Models take the softmax in float32, where the least float64 is an infinity, and a row of them is no number.
        least = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
        mask = query.new_zeros(mask.shape).masked_fill(~mask, least)
    out: tuple[Tensor, Tensor | None] = attend(module, query, key, value, mask, **options)
    return out


def is_plain(mask_function: Callable[..., Any]) -> bool:
    """Tell whether a mask of transformers is causal or hides nothing, and is not a window, chunks or packed rows."""
    return mask_function in (causal_mask_function, bidirectional_mask_function)


@dataclass(frozen=True)
class PatternMask:
    """A mask of transformers that is not formed: L x S numbers would be the square of the length."""

    options: dict[str, Any]

    @property
    def reach(self) -> int | None:
        """The longest distance of a query to a key that it sees; None where there is no bound."""
        bound: int | None = self.options.get("local_size")
        return None if self.options.get("use_vmap") else bound  # else a pattern of the caller's own comes on top

    def whole(self, device: torch.device) -> Tensor | None:
        """The mask as SDPA takes it, (B, 1, L, S) bool; None where SDPA does without."""
        return sdpa_mask(**{**self.options, "device": device})

    def keys(self, start: int, end: int, causal: bool) -> tuple[int, int]:
        """The keys that queries from ``start`` to ``end`` can see at most, by their numbers."""
        assert self.reach is not None
        shift = int(self.options["q_offset"]) - int(self.options["kv_offset"])
        first = max(0, shift + start - self.reach)
        return first, min(self.options["kv_length"], shift + end + (0 if causal else self.reach))

    def block(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """The mask of some queries and keys, bool; ranges of their numbers in this call."""
        own = {
            "q_length": queries[1] - queries[0],
            "q_offset": self.options["q_offset"] + queries[0],
            "kv_length": keys[1] - keys[0],
            "kv_offset": self.options["kv_offset"] + keys[0],
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
            "device": device,
        }
        return sdpa_mask(**{**self.options, **own})


CORE = "kernel"  # the name of the core among the children of an attention module
CROSS = "is_cross_attention"  # attribute of cores whose keys are those of other tokens than their queries
ARGUMENTS = ("dropout", "scaling", "is_causal", "position_bias")  # of an attention, which `attend` takes by name
# Tensors that transformers passes along and that change nothing for attention.
_HARMLESS = (
    "cache_position",
    "encoder_hidden_states",
    "logits_to_keep",
    "num_items_in_batch",
    "position_ids",
    "token_type_ids",
)
_REFUSED = {
    "softcap": "soft-capped logits",
    "sliding_window": "a sliding window",
    "s_aux": "attention sinks",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "max_length_q": "packed sequences",
    "max_length_k": "packed sequences",
    "seq_idx": "packed sequences",
    "cache": "a paged cache",
    "head_mask": "a mask of heads",
}


def _no_pattern() -> ValueError:
    return ValueError(
        "this model asks for a mask that is neither causal nor bidirectional (a sliding window, chunks, blocks, or "
        "sequences packed into one row); kernel attention sees all tokens. Give one sequence a row with an "
        "attention_mask, or use a model without windows."
    )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Make the mask of a model, as transformers' `AttentionMaskInterface` asks for it; never L x S numbers.

    bool, True = attend: (B, S) for causal attention, (B, 1, 1, S) for all others. Where nothing is hidden it is one
    number, expanded.
    """
    if not is_plain(mask_function):
        raise _no_pattern()
    causal = mask_function is causal_mask_function
    if causal and q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"causal attention of {q_length} tokens after {q_offset} others over {kv_length} keys: there is a key "
            f"for each token so far. A cache of fixed length is not covered; use a DynamicCache or a StateCache."
        )
    if attention_mask is not None and attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, there are {kv_length} keys; give it a column for "
            f"each token of the context."
        )
    traced = torch.compiler.is_exporting()  # a graph is for all masks, and cannot look at this one
    if attention_mask is None or (not traced and bool(attention_mask.all())):
        attention_mask = torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch_size, kv_length)
    return attention_mask if causal else attention_mask[:, None, None]


def read_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Read from a mask which keys are visible, (B, S) bool or None for all, and whether attention is causal.

    It is one of `make_mask`, or (B, 1, 1 or L, S) of the caller's own, bool or added to the logits, as long as it hides
    whole keys, or keys and the future.
    """
    if mask is None:
        return None, is_causal
    L, S = query.shape[2], key.shape[2]
    if mask.dim() == 2:
        return _keys(mask), True
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(
            f"a mask must be (batch, 1, 1 or queries, keys), one for all heads, got {shape(mask)}; kernel attention "
            f"hides keys, not pairs of a query and a key."
        )
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise ValueError(
                "a mask that is added to the logits must be 0 or the smallest number, got others; a relative bias goes "
                "by position_bias."
            )
        mask = ~hidden
    if mask.shape[2] == 1:
        return _keys(mask[:, 0, 0]), is_causal and L == 1  # the same for all queries: no order among them
    keys = mask[:, 0].any(1)
    future = torch.ones(L, S, dtype=torch.bool, device=mask.device).tril(S - L)
    for causal, seen in ((False, keys[:, None]), (True, keys[:, None] & future)):
        if bool((mask[:, 0] == seen).all()):
            return _keys(keys), causal
    raise ValueError(
        f"this mask of {L} x {S} is neither one of keys nor a causal one; kernel attention cannot hide single pairs. "
        f"Give an attention_mask (batch, keys)."
    )


def _keys(mask: Tensor) -> Tensor | None:
    """Mask of keys (B, S), or None where it hides nothing."""
    stored = mask[:1, :1] if mask.stride() == (0, 0) else mask  # one number, expanded
    if torch.compiler.is_exporting():  # only what `make_mask` makes of no mask is one number, expanded
        return None if stored is not mask else mask.bool()
    return None if bool(stored.all()) else mask.bool()


def causal_without_mask(module: nn.Module, given: bool | None) -> bool:
    """Tell whether an attention that gets no mask is causal: as the call says, else as the module says, else it is not.

    transformers' SDPA takes a module that says nothing for causal. Such modules belong to encoders that transformers
    runs without SDPA (MPNet, Splinter).
    """
    return bool(getattr(module, "is_causal", False) if given is None else given)


def attend_exactly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as the original model does; see `causal_without_mask` and `attend` for shapes.

    By transformers' SDPA, and by the model's own eager attention where SDPA cannot: soft-capped logits, sinks.
    """
    needs_whole("exact attention, which this layer has kept,", "convert all layers")
    options["is_causal"] = causal_without_mask(module, options.get("is_causal"))
    if any(options.get(name) is not None for name in NOT_SDPA):
        return attend_eagerly(module, query, key, value, mask, **options)
    out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out


def check_keywords(keywords: dict[str, Any], method: str, module: nn.Module) -> None:
    """Raise for keywords that would have to change the weights: switches that transformers has, and unknown tensors.

    All others pass: transformers hands on whatever a model was called with, `generate` its tokenizer for example.
    """
    kind = type(module).__name__
    for name, value in keywords.items():
        if value is not None and name in _REFUSED:
            raise ValueError(
                f"{kind} asks for {_REFUSED[name]} ({name}={value!r:.40}), which {method!r} cannot honour. Use a model "
                f"without, or kernelformer.hf.convert, which keeps such attentions as they are."
            )
        if isinstance(value, Tensor) and name not in _HARMLESS:
            raise ValueError(f"{kind} gets a tensor {name} {shape(value)}, which {method!r} does not know.")


def bias_table(position_bias: Tensor | None) -> Tensor | None:
    """Turn a relative bias (1, H, L, S), as T5 adds it to the logits, into (H, L + S - 1) over j - i; None if it is 0.

    A table (1, H, n), as converted layers make it, is one already.
    """
    if position_bias is None:
        return None
    if position_bias.dim() == 3:
        return position_bias[0]
    if position_bias.grad_fn is None and not bool(position_bias.any()):
        return None  # zeros, not a table that has to learn
    if position_bias.dim() != 4 or not bool((position_bias == position_bias[:1]).all()):
        raise ValueError(
            f"position_bias must be (1, heads, queries, keys), the same for all samples, got {shape(position_bias)}."
        )
    values = position_bias[0]
    if not torch.equal(values[:, 1:, 1:], values[:, :-1, :-1]):
        raise ValueError("position_bias depends on more than the distance of query and key; kernel attention cannot.")
    return torch.cat([values[:, 1:, 0].flip(1), values[:, 0]], 1)


def _check_positions(position_ids: Tensor | None, query: Tensor) -> None:
    """Raise on every rank of a split sequence where transformers would count positions from 0 on each."""
    ranks, length = active_ranks(), query.shape[2]
    if ranks is None:
        return
    start = ranks.starts(length)[ranks.rank]
    fits = False
    if isinstance(position_ids, Tensor) and position_ids.shape[-1] == length:
        fits = not length or bool((position_ids[..., 0] == start).all())
    problem = ValueError(
        f"the tokens of this rank stand at {start} to {start + length - 1} of their sequence, and transformers counts "
        f"from 0; give the model position_ids=torch.arange({start}, {start + length})[None]. Models whose attention is "
        f"not told the positions cannot be split."
    )
    ranks.agree(None if fits else problem)


def attend(
    core: AttentionCore,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PatternMask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with a core, as transformers' `AttentionInterface` asks for it, after the cache.

    Attention dropout is left out, since there are no weights to drop. A warning says so; Python shows it once for each
    kind of module, not at every step, unless its filters say otherwise. Returns (B, L, H, E), and the weights
    (B, H, L, S) where ``output_attentions`` asks for them.
    """
    check_keywords(keywords, core.method, module)
    _check_positions(keywords.get("position_ids"), query)
    if isinstance(attention_mask, PatternMask):
        raise _no_pattern()
    if dropout:
        warnings.warn(
            f"{type(module).__name__} asks for attention dropout of {dropout:g}, which kernel attention leaves out: "
            f"there are no weights to drop.",
            stacklevel=2,
        )
    key_mask, causal = read_mask(attention_mask, query, key, causal_without_mask(module, is_causal))
    table = bias_table(position_bias)
    reach = getattr(module, "relative_attention_max_distance", None)
    extra: dict[str, Any] = {} if table is None else {"bias": table, "max_distance": reach}
    if getattr(core, CROSS, False):  # else a mask of the keys would be taken for one of the queries
        extra["query_mask"] = query.new_ones(query.shape[0], query.shape[2], dtype=torch.bool)
    layer, after = cached_in(key), causal and key.shape[2] != query.shape[2]
    weights = None
    if wants_weights(keywords):
        if layer is not None or after:
            raise ValueError("output_attentions needs all keys at once; call the model with use_cache=False.")
        weights = core.attention_matrix(query, key, is_causal=causal, key_mask=key_mask, **extra)
    if layer is not None and layer.cross:
        if table is not None:
            raise ValueError(
                "cross-attention with a relative bias cannot be cached; call the model with use_cache=False."
            )
        if layer.memory is None:
            layer.remember(core.remember(key, value, key_mask=key_mask), key)
        assert layer.memory is not None
        out = core.recall(query, layer.memory)
    elif layer is not None:
        if not causal:
            raise ValueError("a StateCache is for causal attention; call this model without past_key_values.")
        if position_bias is not None and position_bias.dim() == 4 and table is not None:
            raise ValueError("a StateCache with a relative bias is for converted models; use a DynamicCache.")
        out = _stream(core, layer, (query, key, value), key_mask, extra)
    elif after:
        out = _after_kept(core, (query, key, value), key_mask, extra)
    else:
        out = core(query, key, value, is_causal=causal, key_mask=key_mask, **extra)
    return out.transpose(1, 2), weights


def wants_weights(keywords: dict[str, Any]) -> bool:
    """Tell whether the caller of the model asked for attentions; some models keep this keyword from their attention."""
    collected = _active_collector.get() or {}
    return bool(keywords.get("output_attentions")) or any(x.endswith("attentions") for x in collected)


Tokens = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


def _stream(
    core: AttentionCore, layer: StateLayer, tokens: Tokens, key_mask: Tensor | None, extra: dict[str, Any]
) -> Tensor:
    """Attend from these tokens, after those that the cache has seen."""
    L = tokens[0].shape[2]
    if key_mask is not None:
        key_mask = _keys(key_mask[:, -L:])
    if L == 1 and layer.state is not None:
        bias = extra.get("bias")
        near = None if bias is None else bias.flip(1)
        out, layer.state = core.step(*tokens, layer.state, bias=near, key_mask=key_mask)
        return out
    resumed = {"is_causal": True, "state": layer.state, "return_state": True}
    out, layer.state = core(*tokens, key_mask=key_mask, **resumed, **extra)
    return out  # type: ignore[no-any-return]


def _after_kept(core: AttentionCore, tokens: Tokens, key_mask: Tensor | None, extra: dict[str, Any]) -> Tensor:
    """Attend from the last L tokens of S, with a cache that keeps all keys: the first S - L make a state."""
    query, key, value = tokens
    L, past = query.shape[2], key.shape[2] - query.shape[2]
    if past < 0:
        raise ValueError(f"causal attention of {L} queries over {past + L} keys: there is a key for each query.")
    table = extra.get("bias")
    if L == 1 and core.refusal(False) is None and not core.has_near:  # a window counts from the token's own place
        # The token sees all keys. Distances of the table end at 0, where a call without order has its first key: the
        # keys find their entries, but max_distance would be measured from the wrong end.
        alone = {} if table is None else {"bias": table}
        return core(query, key, value, key_mask=key_mask, **alone)  # type: ignore[no-any-return]
    before = dict(extra)
    if table is not None:  # of the first tokens; entries for the future of a token are not used
        before["bias"] = F.pad(table[:, L : L + past], (0, past - 1))
    first, last = slice(None, past), slice(past, None)
    masks = (None, None) if key_mask is None else (key_mask[:, first], key_mask[:, last])
    nothing = query.new_zeros(*query.shape[:2], past, query.shape[3])
    how: dict[str, Any] = {"is_causal": True, "return_state": True, "key_mask": masks[0], **before}
    _, state = core(nothing, key[:, :, first], value[:, :, first], **how)
    how = {"is_causal": True, "state": state, "key_mask": masks[1], **extra}
    return core(query, key[:, :, last], value[:, :, last], **how)  # type: ignore[no-any-return]


_PATTERN = "_kernelformer_pattern"  # attribute of masks of tried models that are a window, chunks or packed rows
_BLOCK = 256  # queries at least that a window is computed for at once

# Keywords of an attention that no kernel can honour, and why; the first that is set says it.
_REASONS = {
    "softcap": "soft-capped logits (softcap={:g}), which are no product of features",
    "s_aux": "sinks of its own (s_aux), which belong to no key",
    "sliding_window": "a sliding window (sliding_window={}), which is linear already",
}
KEPT_KEYWORDS = tuple(_REASONS)


def reason_to_keep(options: Mapping[str, Any], mask: Tensor | None) -> str:
    """Say why an attention that is called with these options and this mask is kept; "" if it can be replaced."""
    for name, words in _REASONS.items():
        if options.get(name) is not None:
            return words.format(options[name])
    return "a mask of its own (a window, chunks or blocks)" if getattr(mask, _PATTERN, False) else ""


def is_causal(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Tell whether an attention with a mask of any pattern, (B, 1, L, S), bool or added, keeps the future out."""
    if mask is None:
        return causal_without_mask(module, options.get("is_causal"))
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    return not bool(mask.triu(1 + mask.shape[3] - mask.shape[2]).any())


def make_mask_of_pattern(*args: Any, **options: Any) -> Tensor | None:
    """Make a mask as transformers' SDPA has it, (B, 1, L, S) bool, and mark it where it is a pattern of its own."""
    mask = sdpa_mask(*args, **options)
    if mask is not None and not is_plain(options.get("mask_function", causal_mask_function)):
        setattr(mask, _PATTERN, True)
    return mask


def make_mixed_mask(
    *, mask_function: Callable[..., Any] = causal_mask_function, **options: Any
) -> Tensor | PatternMask | None:
    """Make a mask of a converted model that has kept attentions: theirs is the model's own, see `make_mask`."""
    if is_plain(mask_function):
        return make_mask(mask_function=mask_function, **options)
    return PatternMask({"mask_function": mask_function, "q_offset": 0, "kv_offset": 0, **options})


class KeptAttention(nn.Module):
    """Placeholder for a core where the attention stays as it was, with the model's own mask and keys."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def extra_repr(self) -> str:
        """The reason."""
        return self.reason

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | PatternMask | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend exactly; see `attend` for shapes, and `make_mixed_mask` for the mask.

        Cost: O(L w) time and O(w^2) memory for a mask with a reach of w tokens, else O(L S).
        """
        if cached_in(key) is not None:
            raise ValueError(
                f"{type(module).__name__} is kept as it was ({self.reason}) and needs its keys, which this StateCache "
                f"does not keep; use the cache that kernelformer.hf.new_cache(model) makes."
            )
        causal, weights = causal_without_mask(module, options.pop("is_causal", None)), wants_weights(options)
        if isinstance(mask, PatternMask):
            if mask.reach is not None and query.shape[2] > max(_BLOCK, mask.reach) and not weights:
                return _attend_by_blocks(module, (query, key, value), mask, causal, options), None
            mask = mask.whole(query.device)
        elif mask is not None and mask.dim() == 2:
            mask = _pairs(mask, query, key)
        attend = attend_eagerly if weights else attend_exactly
        return attend(module, query, key, value, mask, is_causal=causal, **options)


def _attend_by_blocks(
    module: nn.Module, tokens: Tokens, mask: PatternMask, causal: bool, options: dict[str, Any]
) -> Tensor:
    """Attend from a block of queries at a time to the keys within its reach, (B, L, H, E)."""
    assert mask.reach is not None
    query, key, value = tokens
    size, parts = max(_BLOCK, mask.reach), []
    for start in range(0, query.shape[2], size):
        end = min(query.shape[2], start + size)
        first, last = mask.keys(start, end, causal)
        near = mask.block((start, end), (first, last), query.device)
        some = (query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
        parts.append(attend_exactly(module, *some, near, is_causal=causal, **options)[0])
    return torch.cat(parts, 1)


def _pairs(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Turn a mask of keys (B, S) for causal attention into one of pairs; None where SDPA does without."""
    L, S = query.shape[2], key.shape[2]
    seen, _ = read_mask(mask, query, key, True)
    if seen is None and L in (1, S):
        return None
    past = torch.ones(L, S, dtype=torch.bool, device=query.device).tril(S - L)[None, None]
    return past if seen is None else past & seen[:, None, None]


CONVERTED = "kernelformer"  # its name; the modules of converted models have their cores
MIXED = "kernelformer_mixed"  # of models with attentions that could not be replaced, whose masks are as before


def kernel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PatternMask | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the core that a converted module has; see `attend` for shapes."""
    core = module._modules.get(CORE)
    if isinstance(core, KeptAttention):
        return core(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if not isinstance(core, AttentionCore):
        raise ValueError(
            f"{type(module).__name__} has no core; the implementation {CONVERTED!r} is set by kernelformer.hf.convert, "
            f"not by hand."
        )
    return attend(core, module, query, key, value, attention_mask, **options)


def register_converted() -> None:
    """Make the implementations known to transformers; conversion and loading do this by themselves."""
    for name, mask in ((CONVERTED, make_mask), (MIXED, make_mixed_mask)):
        AttentionInterface.register(name, kernel_attention)
        AttentionMaskInterface.register(name, mask)
