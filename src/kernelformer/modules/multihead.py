"""`torch.nn.MultiheadAttention` by any method, and its place in any plain PyTorch model."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kernelformer.errors import fraction, positive_int, shape, unknown
from kernelformer.modules.checks import assert_values, can_read, no_weights
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.spec import build_core, method_options, move_to_inputs, near_settings


def hidden_keys(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Convert ``key_padding_mask`` (B, S), True or -inf = ignore, to bool with True = ignore."""
    if mask is None:
        return None
    _check_tensor(mask, "key_padding_mask")
    if tuple(mask.shape) != (batch, keys):
        raise ValueError(f"key_padding_mask must be (batch, keys) = {(batch, keys)}, got {shape(mask)}.")
    return _hidden(mask, "key_padding_mask")


def is_causal_mask(mask: Tensor | None, queries: int, keys: int, heads: int, hint: bool) -> bool:
    """Return True if ``attn_mask`` hides the future, key j from query i iff j > i, and False if it hides nothing.

    It is (L, S), or (batch * heads, L, S) with the same in each; bool with True = ignore, or 0 and -inf. The hint is
    torch's ``is_causal``: without a mask it is believed, else checked; a compiled graph without it breaks here.
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
    """Convert a mask with True, or -inf, = ignore, to bool."""
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


# What the two share, by the names under which torch keeps it.
_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for `torch.nn.MultiheadAttention`, also inside torch's own Transformer layers.

        layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
        layer.self_attn = kf.MultiheadAttention(512, 8, batch_first=True, method="favor+", num_features=256)

    Arguments, shapes, masks and names of weights are torch's, and with ``method="softmax"`` so are the numbers. A state
    dict of torch's module loads as it is; the other way it loads with ``strict=False``, since a core has draws or
    parameters of its own under ``kernel.``. Copies of a module, such as `nn.TransformerEncoder` makes of its layer,
    have one draw: `replace_attention` gives each its own.

    It differs where kernel attention must: masks hide keys or the future, and nothing else; a query that sees no key
    gets zeros and not NaN; ``is_causal=True`` needs no mask. Attention of a tensor to itself (the same object) is
    self-attention, whose queries are padded where its keys are. Torch's fused kernels are never used: they would go
    around the method.

    Args:
        embed_dim: width of queries and outputs.
        num_heads: H, divides embed_dim.
        dropout: of the attention weights, in training; for exact methods, since the others form no weights.
        bias: whether the projections have a bias.
        add_bias_kv: whether there is one more key and value, learned, which every query sees.
        add_zero_attn: whether there is one more key and value, zero, which every query sees.
        kdim: width of the keys; default embed_dim.
        vdim: width of the values; default embed_dim.
        batch_first: whether inputs are (B, L, E) instead of (L, B, E).
        device: of everything.
        dtype: of the projections.
        method: a name from `list_methods`.
        options: of the method, see `build_attention`.
    """

    kernel: AttentionCore

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "favor+",
        **options: Any,
    ) -> None:
        if positive_int("embed_dim", embed_dim) % positive_int("num_heads", num_heads):
            raise ValueError(f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}.")
        if "attention_dropout" in options:
            raise ValueError(
                f"dropout= is the name that torch has for attention_dropout, got {options['attention_dropout']!r} for "
                f"that; give dropout=."
            )
        more = (bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        super().__init__(embed_dim, num_heads, fraction("dropout", dropout), *more)
        core = build_core(method, num_heads=num_heads, head_dim=self.head_dim, **options)
        if dropout and not core.takes_dropout:
            raise no_weights(method, f"dropout={dropout!r}", window="window" in method_options(method))
        self._attach(core)

    @classmethod
    def from_torch(cls, original: nn.MultiheadAttention, core: AttentionCore) -> MultiheadAttention:
        """Build one that shares the weights of another and attends by ``core``.

        Dropout of weights is left out where the core forms none; `restored` gives it back.
        """
        new = cls.__new__(cls)
        nn.MultiheadAttention.__init__(new, **_settings(original))
        _take_over(original, new)
        new._attach(core)
        vars(new)["original"] = original  # not a child: its weights are here already
        return new.train(original.training)

    def restored(self) -> nn.MultiheadAttention:
        """Return torch's own module with these weights, shared; parameters of the core are left out.

        After `from_torch` it is the very module that was replaced, with its hooks.
        """
        original: nn.MultiheadAttention = vars(self).get("original") or nn.MultiheadAttention(**_settings(self))
        _take_over(self, original)
        return original.train(self.training)

    def _attach(self, core: AttentionCore) -> None:
        if core.takes_dropout:
            core.attention_dropout = self.dropout = self.dropout or core.attention_dropout
        self.kernel = move_to_inputs(core, self.out_proj.weight)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # nn.TransformerEncoderLayer goes around this module by a fused kernel where torch finds True here.
        self._qkv_same_embed_dim = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A state dict of torch's module knows of no core, which stays as it is. One with a part of a core is checked.
        inner = f"{prefix}kernel."
        if not any(name.startswith(inner) for name in state_dict):
            state_dict.update(self.kernel.state_dict(prefix=inner))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as torch's module does.

        Args:
            query: (B, L, E) with ``batch_first``, else (L, B, E); or (L, E).
            key: (B, S, kdim), (S, B, kdim) or (S, kdim).
            value: (B, S, vdim), (S, B, vdim) or (S, vdim).
            key_padding_mask: (B, S) or (S); True, or -inf, = ignore.
            need_weights: also return the weights, which costs L x S: torch's default, but for looking, at small L and
                S. Torch's own layers pass False.
            attn_mask: (L, S) or (B H, L, S), True or -inf = ignore: causal, or empty. Others are refused.
            average_attn_weights: whether the weights are the mean over heads.
            is_causal: key j is visible to query i iff j <= i. A mask, if there is one, has to say the same.

        Returns:
            Outputs as wide as the queries, in their layout; and the weights (B, L, S), or (B, H, L, S) for each head,
            without B where the inputs have none; None without ``need_weights``. Keys of `add_bias_kv` and
            `add_zero_attn` are the last columns.
        """
        if query.is_nested:
            masked = query is not key or key is not value or key_padding_mask is not None or attn_mask is not None
            how = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
            return self._attend_nested(query, masked, **how)
        self._check_inputs(query, key, value)
        itself, single = query is key, query.dim() == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        (batch, length), keys = query.shape[:2], key.shape[1]
        causal = is_causal_mask(attn_mask, length, keys, batch * self.num_heads, is_causal)
        if self.kernel.has_near and not itself and not causal:
            raise ValueError(
                f"a window and sinks are near tokens of one sequence, got queries and keys of two for "
                f"{self.kernel.method!r} with {near_settings(self.kernel)}; give query and key as one tensor, or leave "
                f"them out in cross-attention (replace_attention: choose by layers=)."
            )
        hidden = hidden_keys(key_padding_mask, batch, keys)
        q, k, v = self._project(query, key, value)
        out, weights = self._attend(q, k, v, hidden, causal, itself, need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, itself: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: (B, H, L, D), and the weights (B, H, L, S + extra)."""
        key_mask = query_mask = None
        if hidden is not None:
            key_mask = ~hidden
            # Said in any case: by default a core would take a mask of as many keys for one of the queries.
            query_mask = key_mask if itself else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        k, v, extra = self._with_own_keys(k, v)
        # Queries and keys keep their distance: causality and windows count it.
        in_order = causal or self.kernel.has_near
        if extra:  # they come first, so that causality hides them from no query: as many queries precede the others
            key_mask = None if key_mask is None else F.pad(key_mask, (extra, 0), value=True)
            if in_order:
                q = F.pad(q, (0, 0, extra, 0))
                query_mask = None if query_mask is None else F.pad(query_mask, (extra, 0), value=False)
        if self.kernel.takes_dropout and self.kernel.attention_dropout != self.dropout:  # it may be changed, as torch's
            self.kernel.attention_dropout = self.dropout
        options: dict[str, Any] = {"is_causal": causal, "key_mask": key_mask, "query_mask": query_mask}
        weights = self.kernel.attention_matrix(q, k, **options) if need_weights else None
        drops = bool(self.dropout) and self.training and self.kernel.takes_dropout
        # Another pass would drop other weights than those that are returned.
        out = weights @ v if drops and weights is not None else self.kernel(q, k, v, **options)
        first = extra if in_order else 0
        if weights is not None:
            weights = weights[:, :, first:].roll(-extra, -1)
        return out[:, :, first:], weights

    def _attend_nested(self, x: Tensor, masked: bool, **how: Any) -> tuple[Tensor, Tensor | None]:
        """Self-attention of a nested tensor, which `nn.TransformerEncoder` makes of a padded batch in evaluation."""
        if masked or not self.batch_first:
            raise ValueError(
                "a nested tensor attends to itself, without masks and with batch_first=True; pad other inputs."
            )
        rows = x.unbind()
        lengths = torch.tensor([len(row) for row in rows], device=x.device)
        padded = pad_sequence(list(rows), batch_first=True)
        hidden = torch.arange(padded.shape[1], device=x.device) >= lengths.unsqueeze(1)
        out, weights = MultiheadAttention.forward(self, padded, padded, padded, hidden, **how)
        parts = [y[: len(row)] for y, row in zip(out, rows, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=x.layout), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (x, width) in widths.items():
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                order = "(batch, length, width)" if self.batch_first else "(length, batch, width)"
                raise ValueError(
                    f"{name} must be {order} or (length, width) with width {width}, as all three, got {shape(x)}."
                )

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        """Project and split into heads, (B, H, L, D) each."""
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        return [self._heads(x) for x in projected]

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return heads

    def _with_own_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Prepend the module's own keys and values, and return their number."""
        own: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            own.append((self._heads(self.bias_k).to(k.dtype), self._heads(self.bias_v).to(v.dtype)))
        if self.add_zero_attn:
            own.append((torch.zeros_like(k[:1, :, :1]), torch.zeros_like(v[:1, :, :1])))
        if not own:
            return k, v, 0
        keys, values = ([x.expand(k.shape[0], -1, -1, -1) for x in rows] for rows in zip(*own, strict=True))
        return torch.cat([*keys, k], 2), torch.cat([*values, v], 2), len(own)

    def extra_repr(self) -> str:
        """Settings, for printing a model."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _settings(module: nn.MultiheadAttention) -> dict[str, Any]:
    """Constructor arguments of a copy, without memory for weights, which come from elsewhere."""
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout,
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "batch_first": module.batch_first,
        "device": "meta",
    }


def _take_over(old: nn.MultiheadAttention, new: nn.MultiheadAttention) -> None:
    """Share the parameters of one module with another."""
    for name in _WEIGHTS:
        setattr(new, name, getattr(old, name))
    new.out_proj = old.out_proj


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
    """Restore torch's own attentions in a model, with the weights as they are now; parameters of cores are lost.

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
    """Resolve numbers or patterns of names to the numbers of attentions; None means all."""
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
    """Replace a module by another at every place: layers that share one have it under several names."""
    for parent in list(model.modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            setattr(parent, name, new)


def warn_about_dropped_dropout(model: nn.Module, attentions: dict[str, MultiheadAttention]) -> None:
    """Warn about attentions with a dropout of weights that they no longer form."""
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
