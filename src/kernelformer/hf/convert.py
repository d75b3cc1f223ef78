"""Pretrained models made linear: their attentions replaced by cores, in place."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from kernelformer.errors import unknown
from kernelformer.hf.adapters import ADAPTERS, tabulate_bias, untabulate_bias
from kernelformer.hf.attend import CORE
from kernelformer.hf.attentions import Attention, Way, find_attentions, run
from kernelformer.hf.cache import StateCache
from kernelformer.hf.multihead import KernelMultiheadAttention
from kernelformer.hf.register import CONVERTED, build_core, kernel_attention, register_converted
from kernelformer.modules import AttentionCore, MixedCore, method_options

Model = TypeVar("Model", bound=nn.Module)
EXACT = "softmax"
BEFORE = "_attention_before"  # of a converted model: its configurations and their implementation


@dataclass(frozen=True)
class Layer:
    """What became of one attention.

    Args:
        name: of the module.
        way: see `Attention`.
        num_heads: H.
        head_dim: D.
        scale: of the model.
        causal: whether it is.
        method: `EXACT` where it was kept.
        options: of the method.
        exact_heads: those that attend exactly in a layer that was replaced.
        calls: in one pass, when the conversion was verified; 0: nobody has looked.
    """

    name: str
    way: Way
    num_heads: int
    head_dim: int
    scale: float
    causal: bool
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    exact_heads: tuple[int, ...] = ()
    calls: int = 0

    @property
    def replaced(self) -> bool:
        """Whether it is linear now."""
        return self.method != EXACT

    def build(self, number: int) -> AttentionCore:
        """Its core, the ``number``-th of the model."""
        common: dict[str, Any] = {"head_dim": self.head_dim, "scale": self.scale}
        rest = self.num_heads - len(self.exact_heads)
        if rest == 0:
            return build_core(EXACT, num_heads=self.num_heads, **common)
        core = build_core(self.method, num_heads=rest, layer=number, **common, **self.options)
        if not self.exact_heads:
            return core
        exact = build_core(EXACT, num_heads=len(self.exact_heads), **common)
        return MixedCore(exact, core, self.exact_heads)


@dataclass(frozen=True)
class Conversion:
    """What was done to a model: its attentions in the order of its modules."""

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
        """Whether a pass has shown that every attention is called."""
        return all(x.calls for x in self.layers)

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [asdict(x) for x in self.layers]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> Conversion:
        """What `as_json` gave."""
        return cls(tuple(Layer(**{**x, "exact_heads": tuple(x["exact_heads"])}) for x in rows))

    def __str__(self) -> str:
        """One line for each attention."""
        lines = []
        for x in self.layers:
            options = "".join(f":{name}={value}" for name, value in x.options.items())
            exact = f", heads {', '.join(map(str, x.exact_heads))} exact" if x.exact_heads else ""
            called = f"called {x.calls}x" if x.calls else "not verified: give inputs="
            lines.append(f"{x.name}: {x.method}{options}{exact} ({called})")
        return "\n".join(lines)


class ConvertedModel:
    """What a converted model of transformers does otherwise: it generates from states, and saves what it is."""

    _is_stateful = True  # a state cannot go back, so no assisted decoding
    conversion: Conversion

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """States instead of keys and values."""
        kind = generation_config.cache_implementation
        if kind is not None:
            raise ValueError(f"this model keeps states, got cache_implementation={kind!r}; leave it out.")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = new_cache(self)

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """A folder that `kernelformer.hf.load` loads: configuration, safetensors, what was converted."""
        from kernelformer.hf.saving import save

        save(self, save_directory, **options)  # type: ignore[arg-type]


def new_cache(model: Any) -> StateCache | EncoderDecoderCache:
    """An empty cache for a converted decoder."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(StateCache(), StateCache(cross=True))  # type: ignore[no-untyped-call]
    return StateCache()


def conversion(model: nn.Module) -> Conversion:
    """What `convert` did to a model."""
    found = getattr(model, "conversion", None)
    if not isinstance(found, Conversion):
        raise ValueError(f"this {type(model).__name__} was not converted; use kernelformer.hf.convert.")
    return found


def cores(model: nn.Module) -> dict[str, AttentionCore]:
    """The cores of a converted model, by the names of its attentions."""
    return {x.name: model.get_submodule(f"{x.name}.{CORE}" if x.name else CORE) for x in conversion(model).layers}  # type: ignore[misc]


def convert(
    model: Model,
    method: str,
    layers: Sequence[int | str] | None = None,
    *,
    exact_heads: Mapping[int | str, Sequence[int]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Model:
    """Replace the attentions of a pretrained model by a method's, in place; its weights stay as they are.

        model = AutoModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")
        convert(model, "favor+", num_features=256)
        print(model.conversion)                       # which attentions were replaced, and that they are called

    Covered are models that attend through transformers' `AttentionInterface` (BERT, RoBERTa, ALBERT, GPT-2, Llama and
    its kin, T5, BART, ViT, ...), MPNet, and `torch.nn.MultiheadAttention` anywhere. The model is run on a few tokens
    before, to find its attentions, and after, to see that each is called. Maps become submodules: their draws and
    parameters are trained, moved and saved with the model.

    A converted decoder generates in constant memory. Relative biases (T5, MPNet) go on as relative biases, for methods
    that take one. Attention dropout is left out.

    Args:
        model: of transformers, or any module with `torch.nn.MultiheadAttention` inside.
        method: a name from `list_methods`; ``softmax`` changes nothing but the implementation.
        layers: which attentions, by their number in `model.conversion`, or by patterns of their names such as
            ``"decoder.*"``; None: all. The others attend exactly.
        exact_heads: heads that stay exact, by attention (number or name).
        inputs: keyword arguments of a call to try the model with; default: made from its configuration. A plain PyTorch
            model without them is not tried; its first call then checks that every attention is reached.
        options: of the method.

    Returns:
        The model itself.

    Raises:
        ValueError: an attention that is not covered or not called, or that the method cannot do; nothing is converted.
    """
    known = method_options(method)
    for option in options:
        if option not in known:
            raise unknown(f"option for method {method!r},", option, known)
    found = find_attentions(model, inputs)
    chosen = _choose(found, layers)
    heads = _heads(found, exact_heads or {})
    plan = Conversion(
        tuple(
            Layer(
                **{x: getattr(a, x) for x in ("name", "way", "num_heads", "head_dim", "scale", "causal")},
                method=method if i in chosen and len(heads.get(i, ())) < a.num_heads else EXACT,
                options=dict(options) if i in chosen and method != EXACT else {},
                exact_heads=heads.get(i, ()) if i in chosen and method != EXACT else (),
            )
            for i, a in enumerate(found)
        )
    )
    apply(model, plan)
    if isinstance(model, PreTrainedModel) or inputs is not None:
        try:
            _verify(model, inputs)
        except Exception:
            undo(model)
            raise
    else:
        _verify_first_call(model)
    return model


def _choose(found: Sequence[Attention], layers: Sequence[int | str] | None) -> set[int]:
    if layers is None:
        return set(range(len(found)))
    if isinstance(layers, str):
        layers = [layers]
    chosen = set()
    for wanted in layers:
        chosen |= _numbers(found, wanted)
    return chosen


def _numbers(found: Sequence[Attention], wanted: int | str) -> set[int]:
    """The attentions that a number or a pattern means."""
    if isinstance(wanted, str):
        some = {i for i, x in enumerate(found) if fnmatch.fnmatchcase(x.name, wanted)}
        if not some:
            raise unknown("attention", wanted, [x.name for x in found])
        return some
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not -len(found) <= wanted < len(found):
        raise ValueError(f"this model has {len(found)} attentions, numbered from 0, got {wanted!r}.")
    return {wanted % len(found)}


def _heads(found: Sequence[Attention], exact: Mapping[int | str, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    heads: dict[int, tuple[int, ...]] = {}
    for wanted, numbers in exact.items():
        for i in _numbers(found, wanted):
            for x in numbers:
                if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < found[i].num_heads:
                    raise ValueError(f"{found[i].name} has heads 0 to {found[i].num_heads - 1}, got {x!r}.")
            heads[i] = tuple(sorted(set(numbers)))
    return heads


def apply(model: nn.Module, plan: Conversion) -> None:
    """Put the cores of a plan into a model; all are built before the first is put there.

    Raises:
        ValueError: a method cannot do what an attention needs.
    """
    built = []
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for number, layer in enumerate(plan.layers):
        if layer.method == "linformer" and longest is not None:
            layer.options.setdefault("max_length", longest)
        core = layer.build(number)
        module = model.get_submodule(layer.name)
        problem = core.refusal(layer.causal)
        if problem is not None:
            raise ValueError(f"{layer.name}: {str(problem).rstrip('.')}; nothing was converted.")
        if _has_bias(model, layer) and not core.takes_bias:
            raise ValueError(
                f"{layer.name} adds a relative bias to its logits, which {layer.method!r} cannot; nothing was "
                f"converted. Use a normalized method with a feature map, such as 'favor+' or 'loglinear'."
            )
        like = next(module.parameters())
        core.to(like.device)
        if like.dtype == torch.float64:
            core.to(like.dtype)
        core.train(module.training)
        built.append((layer, module, core))
    register_converted()
    for layer, module, core in built:
        if layer.way == "multihead":
            assert isinstance(module, nn.MultiheadAttention)
            new = KernelMultiheadAttention(module, core)
            new.train(module.training)
            _replace(model, layer.name, new)
            continue
        module.add_module(CORE, core)
        if layer.way == "adapter":
            ADAPTERS[type(module).__name__].apply(module, kernel_attention)
    tabulate_bias(model)
    if isinstance(model, PreTrainedModel):
        model.__dict__[BEFORE] = [(x, x._attn_implementation_internal) for x in _configs(model)]
        for config in _configs(model):
            config._attn_implementation_internal = CONVERTED
        kind = type(model)
        model.__class__ = type(kind.__name__, (ConvertedModel, kind), {"__module__": kind.__module__})
    model.conversion = plan  # type: ignore[assignment]


def _has_bias(model: nn.Module, layer: Layer) -> bool:
    module: Any = model.get_submodule(layer.name)
    if layer.way == "adapter":
        return True
    own = getattr(module, "has_relative_attention_bias", None)
    # T5 shares the bias of its first layer with all layers of self-attention.
    return own is not None and ".EncDecAttention" not in f".{layer.name}"


def _configs(model: PreTrainedModel) -> list[Any]:
    return list({id(x.config): x.config for x in model.modules() if isinstance(x, PreTrainedModel)}.values())


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    if not name:
        raise ValueError("the model is itself an attention; convert a module that holds it.")
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def undo(model: nn.Module) -> None:
    """The model with its own attention again; what cores learned is lost."""
    plan = conversion(model)
    untabulate_bias(model)
    for layer in plan.layers:
        module = model.get_submodule(layer.name)
        if isinstance(module, KernelMultiheadAttention):
            _replace(model, layer.name, module.__dict__["original"])
            continue
        if layer.way == "adapter":
            ADAPTERS[type(module).__name__].undo(module)
        del module._modules[CORE]
    if isinstance(model, PreTrainedModel):
        for config, implementation in model.__dict__.pop(BEFORE):
            config._attn_implementation_internal = implementation
        model.__class__ = type(model).__bases__[1]
    del model.conversion


@torch.no_grad()
def _verify(model: nn.Module, inputs: Mapping[str, Any] | None) -> None:
    """Run the model and see that every core is called as often as its attention was."""
    counts = dict.fromkeys(cores(model), 0)
    handles = [_count(core, counts, name) for name, core in cores(model).items()]
    try:
        run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name, count in counts.items() if count == 0]
    if idle:
        raise ValueError(
            f"{type(model).__name__} goes around these attentions: {', '.join(idle)}; nothing was converted."
        )
    model.conversion = Conversion(tuple(replace(x, calls=counts[x.name]) for x in conversion(model).layers))  # type: ignore[assignment]


def _count(core: AttentionCore, counts: dict[str, int], name: str) -> Any:
    def note(*_: Any) -> None:
        counts[name] += 1

    return core.register_forward_pre_hook(note)


def _verify_first_call(model: nn.Module) -> None:
    """After the first call say which attentions were not reached."""
    counts = dict.fromkeys(cores(model), 0)
    handles = [_count(core, counts, name) for name, core in cores(model).items()]

    def look(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        idle = [name for name, count in counts.items() if count == 0]
        if idle:
            warnings.warn(
                f"{type(model).__name__} did not call these converted attentions: {', '.join(idle)}; what it computes "
                f"there is not what was asked for.",
                stacklevel=2,
            )
        model.conversion = Conversion(tuple(replace(x, calls=counts[x.name]) for x in conversion(model).layers))  # type: ignore[assignment]

    handles.append(model.register_forward_hook(look))
