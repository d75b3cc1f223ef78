"""Conversion of pretrained models: their attentions are replaced by cores, in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from kernelformer.cache import StateCache, StateLayer
from kernelformer.feature_maps.pivots import without_landmark_warnings
from kernelformer.hf.adapters import family_of, restore_bias, tabulate_bias
from kernelformer.hf.adapters.base import derive, underive
from kernelformer.hf.adapters.multihead import KernelMultiheadAttention
from kernelformer.hf.attend import CONVERTED, CORE, CROSS, MIXED, KeptAttention, register_converted
from kernelformer.hf.find import Attention, find_attentions, held_configs, run
from kernelformer.modules import AttentionCore, MixedCore, method_options
from kernelformer.modules.multihead import select, warn_about_dropped_dropout
from kernelformer.modules.spec import (
    AttentionSpec,
    build_core,
    cross_options,
    maps_by_head,
    move_to_inputs,
    resolve_options,
)

EXACT = "softmax"


@dataclass(frozen=True, kw_only=True)
class Layer(Attention):
    """Plan for one attention, or the record of what was done to it; ``calls`` are 0 until it was verified."""

    method: str  # `EXACT` where it was kept, by choice or for a reason
    options: dict[str, Any] = field(default_factory=dict)
    exact_heads: tuple[int, ...] = ()  # those that attend exactly in a layer that was replaced

    @property
    def replaced(self) -> bool:
        """True if its attention is replaced by a method's."""
        return self.method != EXACT

    def build(self, number: int) -> AttentionCore:
        """Build its core, the ``number``-th of the model."""
        common: dict[str, Any] = {"head_dim": self.head_dim, "scale": self.scale}
        rest = self.num_heads - len(self.exact_heads)
        core = build_core(self.method, num_heads=rest, layer=number, **{**common, **self.options})
        if not self.exact_heads:
            return core
        return MixedCore(build_core(EXACT, num_heads=len(self.exact_heads), **common), core, self.exact_heads)


@dataclass(frozen=True)
class Conversion:
    """Plan or record of a conversion: the attentions of a model in the order of its modules."""

    layers: tuple[Layer, ...]

    @property
    def replaced(self) -> list[str]:
        """Names of attentions that are linear now."""
        return [x.name for x in self.layers if x.replaced]

    @property
    def kept(self) -> list[str]:
        """Names of attentions that are exact as before."""
        return [x.name for x in self.layers if not x.replaced]

    @property
    def verified(self) -> bool:
        """True if a pass has shown that every attention is called."""
        return all(x.calls for x in self.layers)

    def as_json(self) -> list[dict[str, Any]]:
        """The plan as plain values; what says nothing is left out."""
        rows = [{**asdict(x), "exact_heads": list(x.exact_heads)} for x in self.layers]
        return [{name: x for name, x in row.items() if name not in ("reason", "num_key_heads") or x} for row in rows]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> Conversion:
        """Read what `as_json` gave."""
        return cls(tuple(Layer(**{**x, "exact_heads": tuple(x["exact_heads"])}) for x in rows))

    def __str__(self) -> str:
        """One line for each attention."""
        lines = []
        for x in self.layers:
            exact = f", heads {', '.join(map(str, x.exact_heads))} exact" if x.exact_heads else ""
            kept = f", kept: {x.reason}" if x.reason else ""
            called = f"called {x.calls}x" if x.calls else "not verified: give inputs="
            lines.append(f"{x.name}: {AttentionSpec.make(x.method, **x.options)}{exact}{kept} ({called})")
        return "\n".join(lines)


def check_kept(what: str, converted: int, kept: int) -> None:
    """Check that some attentions or heads are left to be linear."""
    if not 0 <= kept < converted:
        raise ValueError(
            f"{converted} {what} were converted, so that at most {max(0, converted - 1)} can be kept exact, got "
            f"{kept}; keep fewer."
        )


def make_plan(
    attentions: Sequence[Attention],
    method: str,
    layers: Sequence[int | str] | int | str | None,
    exact_heads: Mapping[int | str, Sequence[int]] | None,
    options: Mapping[str, Any],
    longest: int | None = None,
) -> Conversion:
    """Make the plan that `convert` was asked for; ``longest`` is for methods that have a ``max_length``."""
    settings = resolve_options(method, options)
    if method == EXACT and settings:
        raise ValueError(
            f"{EXACT!r} is the attention that the model has; it takes no options here, got {settings!r:.100}."
        )
    if "max_length" in method_options(method) and longest is not None:
        settings.setdefault("max_length", longest)
    chosen = _select(attentions, layers)
    heads = _heads(attentions, exact_heads or {})
    return Conversion(
        tuple(
            _layer(attention, method, heads.get(i, ()), settings)
            if i in chosen
            else _layer(attention, EXACT, (), settings)
            for i, attention in enumerate(attentions)
        )
    )


def _select(attentions: Sequence[Attention], layers: Sequence[int | str] | int | str | None) -> set[int]:
    """The numbers of the attentions that are meant and can be replaced."""
    names, chosen = [x.name for x in attentions], set[int]()
    several = isinstance(layers, Iterable) and not isinstance(layers, str)
    for wanted in [[x] for x in layers] if several else [layers]:  # type: ignore[union-attr]
        meant = select(names, wanted)
        free = {i for i in meant if not attentions[i].reason}
        if not free:
            kept = attentions[min(meant)]
            others = ", ".join(str(i) for i, x in enumerate(attentions) if not x.reason)
            raise ValueError(
                f"layers={wanted!r} means {kept.name}, which has {kept.reason}, and is kept as it is; nothing was "
                f"converted. Those that can be converted have the numbers {others}."
            )
        chosen |= free
    return chosen


def _layer(attention: Attention, method: str, heads: tuple[int, ...], options: Mapping[str, Any]) -> Layer:
    """Plan one attention; where all heads are exact, all of it is, and cross-attention has no window.

    Grouped queries get maps by key head, unless they are told otherwise: the state is then of the size of the keys.
    """
    if attention.cross:
        method, options = cross_options(method, options)
    own = {**vars(attention), "calls": 0, "num_key_heads": None}
    if attention.reason or method == EXACT or len(heads) == attention.num_heads:
        return Layer(**own, method=EXACT)
    settings = dict(options)
    if heads and "num_key_heads" in settings:
        raise ValueError(
            f"{attention.name} has exact heads among its {attention.num_heads}, so that keys are repeated for each of "
            f"the others; got num_key_heads={settings['num_key_heads']!r}, leave it out."
        )
    if attention.num_key_heads not in (None, attention.num_heads) and not heads and maps_by_head(method, settings):
        settings.setdefault("num_key_heads", attention.num_key_heads)
    return Layer(**own, method=method, options=settings, exact_heads=heads)


def _heads(attentions: Sequence[Attention], exact: Mapping[int | str, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Exact heads by the number of their attention."""
    heads: dict[int, tuple[int, ...]] = {}
    for wanted, numbers in exact.items():
        for i in _select(attentions, wanted):
            for x in numbers:
                if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < attentions[i].num_heads:
                    raise ValueError(f"{attentions[i].name} has heads 0 to {attentions[i].num_heads - 1}, got {x!r}.")
            heads[i] = tuple(sorted({*heads.get(i, ()), *numbers}))
    return heads


Model = TypeVar("Model", bound=nn.Module)
_CACHES = "kernelformer.hf.new_cache(model), a StateCache or a DynamicCache"  # that a converted model knows
BEFORE = "_attention_before"  # of a converted model: its configurations and their implementation


class ConvertedModel:
    """Methods of a converted model of transformers: it generates from states, and saves what was converted."""

    _is_stateful = True  # a state cannot go back, so no assisted decoding
    conversion: Conversion

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the model; a cache of a class that it does not know is refused first."""
        _check_cache(self, options.get("past_key_values"))
        return super().__call__(*args, **options)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:
        """Give `generate` a cache of states instead of keys and values."""
        kind = generation_config.cache_implementation
        if kind is not None:
            raise ValueError(
                f"this model keeps states, got cache_implementation={kind!r}; leave it out, or give past_key_values: "
                f"{_CACHES}."
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            _check_cache(self, given)
            given._is_user_defined = True  # as transformers marks it
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = new_cache(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle, whose process may not have converted anything before."""
        register_converted()
        super().__setstate__(state)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **options: Any) -> None:
        """Write a folder that `kernelformer.hf.load` loads: configuration, safetensors, what was converted."""
        from kernelformer.hf.save import save

        save(self, save_directory, is_main_process=is_main_process, **options)  # type: ignore[arg-type]


def new_cache(model: Any) -> StateCache | EncoderDecoderCache:
    """Make an empty cache for a converted decoder; `generate` makes one itself.

    Of attentions that were replaced it keeps states, of others what the model itself keeps: keys and values of all
    tokens, or of those in a sliding window.

    Raises:
        ValueError: the model was not converted, or has a cache of a class of its own.
    """
    plan = conversion(model)
    own = StateCache(layers=_cache_layers(model, plan))
    if model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False):
        kept = {model.get_submodule(x.name).layer_idx for x in plan.layers if x.cross and x.reason}
        across = [DynamicLayer() if i in kept else StateLayer(cross=True) for i in range(max(kept, default=-1) + 1)]
        return EncoderDecoderCache(own, StateCache(cross=True, layers=across))
    return own


def _cache_layers(model: Any, plan: Conversion) -> list[Any]:
    """Layers of a cache for self-attention by their number; none where all are states, which come as they turn up."""
    known = getattr(model, "_supports_default_dynamic_cache", lambda: True)()
    try:
        layers = DynamicCache(config=model.config).layers if known else None
    except KeyError:  # a type of layers that transformers has no cache for
        layers = None
    except AttributeError:  # a configuration that says nothing of layers
        layers = []
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} has a cache of a class of its own, which states cannot go into; call it with "
            f"use_cache=False."
        )
    if all(type(x) is DynamicLayer for x in layers) and not any(x.reason for x in plan.layers):
        return []
    own = [x for x in plan.layers if x.causal and not x.cross and not x.reason]
    states = {model.get_submodule(x.name).layer_idx for x in own}
    return [StateLayer() if i in states else x for i, x in enumerate(layers)]


def _check_cache(model: object, cache: Any) -> None:
    """Raise for a cache of another class than those that a converted model knows."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    for part in parts:
        if part is not None and not isinstance(part, StateCache | DynamicCache):
            fixed = " of fixed length" if getattr(part, "is_compileable", False) else ""
            raise ValueError(
                f"past_key_values of a converted {type(model).__name__} got a {type(part).__name__}, a cache{fixed} "
                f"that it does not know; give {_CACHES}, or leave it out."
            )


def conversion(model: nn.Module) -> Conversion:
    """Return what `convert` did to a model."""
    plan = getattr(model, "conversion", None)
    if not isinstance(plan, Conversion):
        raise ValueError(f"this {type(model).__name__} was not converted; use kernelformer.hf.convert.")
    return plan


def cores(model: nn.Module) -> dict[str, AttentionCore]:
    """Collect the cores of a converted model, by the names of its attentions; what was kept for a reason has none."""
    names = [x.name for x in conversion(model).layers if not x.reason]
    return {name: model.get_submodule(f"{name}.{CORE}" if name else CORE) for name in names}  # type: ignore[misc]


def convert(
    model: Model,
    method: str,
    layers: Sequence[int | str] | int | str | None = None,
    *,
    exact_heads: Mapping[int | str, Sequence[int]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Model:
    """Replace the attentions of a pretrained model by a method's, in place; its weights stay as they are.

        model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")
        convert(model, "favor+", num_features=256)
        print(model.conversion)                       # which attentions were replaced, and that they are called

    Covered are models that attend through transformers' `AttentionInterface` (BERT, RoBERTa, ALBERT, GPT-2, Llama, T5,
    BART, ViT and many more), MPNet, and `torch.nn.MultiheadAttention` anywhere. The model is run on a few tokens
    before, to find its attentions, and after, to see that each is called. Maps become submodules: their draws and
    parameters are trained, moved and saved with the model.

    What no kernel can do is kept as the model has it, and `model.conversion` says why: sliding windows (Mistral, Gemma,
    Qwen2, ModernBERT), which are linear already, soft-capped logits, sinks, disentangled attention (DeBERTa).

    A converted decoder generates in constant memory. Relative biases (T5, MPNet) stay relative biases, for methods
    that take one. Attention dropout is left out, with a warning (see `attend`). The model gets configurations of its
    own, so that another model of the same configuration is left alone.

    Args:
        model: of transformers, or any module with `torch.nn.MultiheadAttention` inside.
        method: a name from `list_methods`; ``softmax`` changes nothing but the implementation.
        layers: which attentions, by their number in `model.conversion`, or by patterns of their names such as
            ``"decoder.*"``, one or several; None: all that can be. The others attend exactly.
        exact_heads: heads that stay exact, by attention (number or name).
        inputs: keyword arguments of a call to try the model with; default: made from its configuration. A plain PyTorch
            model without them is not tried; its first call then checks that every attention is reached.
        options: of the method. Of grouped queries per-head maps are by key head (``num_key_heads``), which keeps the
            state at the size of the keys; ``num_key_heads`` = H gives every query head maps of its own.

    Returns:
        The model itself.

    Raises:
        ValueError: an attention that is not covered or not called, that was chosen and has to be kept, or that the
            method cannot do; or nothing that could be replaced. Nothing is converted.
    """
    if not isinstance(model, nn.Module) or not isinstance(method, str):
        raise ValueError(
            f"convert takes a model and the name of a method, in this order, got {type(model).__name__} and "
            f"{type(method).__name__}."
        )
    attentions = find_attentions(model, inputs)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    apply(model, make_plan(attentions, method, layers, exact_heads, options, longest))
    if isinstance(model, PreTrainedModel) or inputs is not None:
        try:
            _verify(model, inputs)
        except Exception:
            undo(model)
            raise
    else:
        model.register_forward_hook(_verify_first_call)
    return model


def apply(model: nn.Module, plan: Conversion) -> None:
    """Put the cores of a plan into a model; all are built before the first is put there."""
    modules = [model.get_submodule(x.name) for x in plan.layers]
    built = [_build(module, layer, i) for i, (module, layer) in enumerate(zip(modules, plan.layers, strict=True))]
    register_converted()
    for module, new in zip(modules, built, strict=True):
        family_of(module).install(model, module, new)
    attentions = zip(plan.layers, built, strict=True)
    warn_about_dropped_dropout(
        model, {layer.name: x for layer, x in attentions if isinstance(x, KernelMultiheadAttention)}
    )
    tabulate_bias(model)
    if isinstance(model, PreTrainedModel):
        vars(model)[BEFORE] = _own_configs(model, MIXED if any(x.reason for x in plan.layers) else CONVERTED)
        derive(model, ConvertedModel)
    model.conversion = plan  # type: ignore[assignment]


def _build(module: nn.Module, layer: Layer, number: int) -> nn.Module:
    """Build the core of an attention, or the module that replaces a `torch.nn.MultiheadAttention`."""
    family = family_of(module)
    if family.way != layer.way:
        raise ValueError(f"{layer.name} of {type(module).__name__} is converted by {family.way!r}, not {layer.way!r}.")
    if layer.reason:
        return KeptAttention(layer.reason)
    core = layer.build(number)
    problem = core.refusal(layer.causal)
    if problem is not None:
        raise ValueError(f"{layer.name}: {str(problem).rstrip('.')}; nothing was converted.")
    if family.has_bias(module, layer.name, layer.cross) and not core.takes_bias:
        raise ValueError(
            f"{layer.name} adds a relative bias to its logits, which {layer.method!r} cannot; nothing was converted. "
            f"Use a normalized method with a feature map, such as 'favor+' or 'loglinear'."
        )
    move_to_inputs(core, next(module.parameters()))
    setattr(core, CROSS, layer.cross)
    new = family.build(module, core)
    if new is not core and not layer.name:
        raise ValueError("the model is itself an attention; convert a module that holds it.")
    return new.train(module.training)


def _own_configs(model: nn.Module, implementation: str) -> list[tuple[Any, Any]]:
    """Give a model configurations that no other model has, for its own implementation; returns what they said before.

    A configuration may serve several models, and it says for all of them how to attend.
    """
    copies: dict[int, Any] = {}
    for module, name, config in held_configs(model):
        vars(module)[name] = copy.deepcopy(config, copies)  # the same copy for the same object, also inside of others
    configs = {id(x): x for _, _, x in held_configs(model)}.values()
    before = [(x, x._attn_implementation_internal) for x in configs]
    for config in configs:
        config._attn_implementation_internal = implementation
    return before


def undo(model: nn.Module) -> None:
    """Give a model its own attention back; what cores learned is lost."""
    plan = conversion(model)
    _remove_first_check(model)
    restore_bias(model)
    for layer in plan.layers:
        module = model.get_submodule(layer.name)
        family_of(module).remove(model, module)
    if isinstance(model, PreTrainedModel):
        for config, implementation in vars(model).pop(BEFORE):
            config._attn_implementation_internal = implementation
        underive(model)
    del model.conversion


@torch.no_grad()
def _verify(model: nn.Module, inputs: Mapping[str, Any] | None) -> None:
    """Run the model and check that every core is called, and every attention that was kept."""
    called: dict[str, nn.Module] = {x.name: model.get_submodule(x.name) for x in conversion(model).layers if x.reason}
    called |= cores(model)
    counts = dict.fromkeys(called, 0)

    def count(name: str, *_: Any) -> None:
        counts[name] += 1

    with ExitStack() as hooks, without_landmark_warnings(model):
        for name, module in called.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(count, name)))
        run(model, inputs)
    idle = _record_calls(model, counts)
    if idle:
        raise ValueError(
            f"{type(model).__name__} goes around these attentions: {', '.join(idle)}; nothing was converted."
        )


def _record_calls(model: nn.Module, counts: Mapping[str, int]) -> list[str]:
    """Record how often each attention was called that was counted; returns those that were not."""
    layers = conversion(model).layers
    model.conversion = Conversion(tuple(replace(x, calls=counts.get(x.name, x.calls)) for x in layers))  # type: ignore[assignment]
    return [name for name, count in counts.items() if count == 0]


def _verify_first_call(model: nn.Module, *_: Any) -> None:
    """Hook that warns after the first call of attentions that were not reached, and removes itself.

    It is a plain function and the counts are the modules' own, so that a copy of the model checks itself.
    """
    _remove_first_check(model)
    modules: dict[str, Any] = {x.name: model.get_submodule(x.name) for x in conversion(model).layers if not x.reason}
    idle = _record_calls(model, {name: x.calls for name, x in modules.items()})
    if idle:
        warnings.warn(
            f"{type(model).__name__} did not call these converted attentions: {', '.join(idle)}; what it computes "
            f"there is not what was asked for.",
            stacklevel=2,
        )


def _remove_first_check(model: nn.Module) -> None:
    for key in [key for key, hook in model._forward_hooks.items() if hook is _verify_first_call]:
        del model._forward_hooks[key]
