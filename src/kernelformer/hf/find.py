"""Find the attentions of a model, and record their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from kernelformer.hf.adapters import FAMILIES, family_of
from kernelformer.hf.adapters.base import AdaptedFamily, Way
from kernelformer.hf.adapters.multihead import KernelMultiheadAttention
from kernelformer.hf.attend import (
    ARGUMENTS,
    KEPT_KEYWORDS,
    attend,
    attend_exactly,
    causal_without_mask,
    check_keywords,
    is_causal,
    make_mask_of_pattern,
    read_mask,
    reason_to_keep,
)
from kernelformer.modules import AttentionCore
from kernelformer.modules.calibration import evaluating

PROBE = "kernelformer_probe"
TOKENS = 6  # of the inputs that a model is tried with


@dataclass(frozen=True)
class Attention:
    """One attention of a model."""

    name: str
    way: Way
    num_heads: int
    head_dim: int
    scale: float
    causal: bool
    calls: int = 0  # in one pass; several where layers share their weights, 0 if the model was not tried
    cross: bool = False  # whether its keys were those of other tokens than its queries
    num_key_heads: int | None = None  # G, fewer than H for grouped queries; None if the model was not tried
    reason: str = ""  # why it cannot be replaced and is kept


@dataclass
class Probe:
    """Sizes and number of calls of the attentions that are heard, by module."""

    seen: dict[int, Attention] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)

    def hear(self, call: AttentionCall) -> None:
        """Note sizes, scale and mask, and count the call."""
        module, mask, options, key = call.module, call.mask, call.options, id(call.module)
        known = (*ARGUMENTS, *KEPT_KEYWORDS)
        check_keywords({name: x for name, x in options.items() if name not in known}, "kernel attention", module)
        self.calls[key] += 1
        if key not in self.seen:
            reason = reason_to_keep(options, mask)
            self.seen[key] = Attention(
                call.name,
                "interface",
                call.query.shape[1],
                call.query.shape[3],
                call.scale,
                is_causal(module, mask, options) if reason else call.visible()[1],
                cross=call.query.shape[2] != call.key.shape[2],
                num_key_heads=call.key.shape[1],
                reason=reason,
            )


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Collect modules that seem to be attentions, by their class's name and projections of their own; by name."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        if isinstance(module, nn.MultiheadAttention):
            modules[name] = module
        elif "attention" in kind or "attn" in kind:
            linear = any(isinstance(x, nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d) for x in module.children())
            if linear or sum(x is not None for x in module._parameters.values()) > 1:
                modules[name] = module
    return modules


def held_configs(model: nn.Module) -> list[tuple[nn.Module, str, PretrainedConfig]]:
    """List every module that holds a configuration, the attribute that does, and the configuration."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PretrainedConfig)
    ]


@torch.no_grad()
def find_attentions(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[Attention]:
    """Find all attentions of a model, in the order of its modules; those that cannot be replaced say why.

    A model of transformers is run once on a few tokens, with exact attention, to see which of its modules attend and
    with what; a plain PyTorch model is run where ``inputs`` are given. A ValueError where there is no attention, none
    can be replaced, one is not covered, or one is not called.
    """
    if any("conversion" in vars(x) or isinstance(x, KernelMultiheadAttention) for x in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is converted already, or a part of it is; load the original again, or use "
            f"kernelformer.hf.undo, to convert it anew."
        )
    possible, probe = candidates(model), Probe()
    tried = isinstance(model, PreTrainedModel) or inputs is not None
    if tried:
        with _watching(model, probe):
            run(model, inputs)
    attentions, uncovered = [], []
    for name, module in model.named_modules():
        attention = _describe(name, module, probe)
        if attention is not None:
            attentions.append(attention)
        elif name in possible:
            uncovered.append(name)
    names = [x.name for x in attentions]
    # Around an attention, or inside of one, a name says nothing more.
    uncovered = [x for x in uncovered if not any(_within(x, y) or _within(y, x) for y in names)]
    idle = [x for x in attentions if tried and not x.calls]
    _refuse(model, [f"{x} ({type(possible[x]).__name__})" for x in uncovered], idle)
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no attention: nothing in it to convert.")
    if all(x.reason for x in attentions):
        raise _nothing(model, attentions)
    return attentions


def _within(inner: str, outer: str) -> bool:
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _describe(name: str, module: nn.Module, probe: Probe) -> Attention | None:
    """Describe a module if it is an attention that can be replaced."""
    family, seen, calls = family_of(module), probe.seen.get(id(module)), probe.calls[id(module)]
    if family.way != "interface":
        heads, dim = family.sizes(module)
        return Attention(name, family.way, heads, dim, dim**-0.5, False, calls, reason=family.reason_to_keep(module))
    return None if seen is None else replace(seen, calls=calls)


def _refuse(model: nn.Module, uncovered: list[str], idle: list[Attention]) -> None:
    kind = type(model).__name__
    if uncovered:
        inside = not isinstance(model, PreTrainedModel) and any(isinstance(x, PreTrainedModel) for x in model.modules())
        raise ValueError(
            f"{kind} has attention that is not covered, or that was not called when it was tried: "
            f"{_few(uncovered)}. Nothing was converted. Covered are models that attend through transformers' "
            f"AttentionInterface, {' and '.join(x.covers for x in FAMILIES if x.covers)}; "
            + ("convert the model of transformers inside." if inside else "other inputs to try it with go by inputs=.")
        )
    if idle:
        raise ValueError(
            f"{kind} did not call {_few([x.name for x in idle])} when it was tried, so that a conversion would change "
            f"nothing there. Nothing was converted; give inputs= that reach them."
        )


def _nothing(model: nn.Module, attentions: list[Attention]) -> ValueError:
    """Say for a model without anything to convert what each of its attentions is."""
    names: dict[str, list[str]] = {}
    for x in attentions:
        names.setdefault(f"{type(model.get_submodule(x.name)).__name__} has {x.reason}", []).append(x.name)
    reasons = "; ".join(f"{reason} ({_few(some)})" for reason, some in names.items())
    return ValueError(
        f"{type(model).__name__} has no attention that a kernel could replace: {reasons}. Nothing was converted; use a "
        f"model with full attention in some layers, such as BERT, RoBERTa, ModernBERT, Llama or Gemma 3."
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def run(model: nn.Module, inputs: Mapping[str, Any] | None) -> None:
    """Run one pass in evaluation mode, whatever mode each part is in."""
    given = try_inputs(model) if inputs is None else inputs
    with evaluating(model):
        model(**given)


def try_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Make up inputs for a model by its configuration: a few tokens, or an image."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a model of transformers; say what to call it with by inputs=.")
    config, device, kind = model.config, model.device, model.main_input_name
    text, dtype = config.get_text_config(), next(model.parameters()).dtype
    if kind == "pixel_values":
        size = getattr(config, "image_size", None)
        if size is None:
            raise ValueError(f"the configuration of {type(model).__name__} has no image_size; give inputs=.")
        rows, columns = (size, size) if isinstance(size, int) else size
        return {kind: torch.zeros(1, config.num_channels, rows, columns, device=device, dtype=dtype)}
    if kind != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {kind!r}, which cannot be made up; give inputs=.")
    # Ids from the middle of the vocabulary: the first ones are special.
    tokens = (text.vocab_size // 2 + torch.arange(TOKENS, device=device)).remainder(text.vocab_size).unsqueeze(0)
    inputs = {kind: tokens, "attention_mask": torch.ones_like(tokens)}
    # Contexts of another length than the tokens that attend to them show which attention is cross-attention.
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :-1].clone()
        if isinstance(getattr(config, "eos_token_id", None), int):
            tokens[:, -1] = config.eos_token_id
    elif getattr(config, "add_cross_attention", False):
        width = getattr(config, "cross_attention_hidden_size", None) or text.hidden_size
        inputs["encoder_hidden_states"] = torch.zeros(1, TOKENS - 1, width, device=device, dtype=dtype)
    return inputs


@contextmanager
def probing(model: PreTrainedModel, probe: Any, mask: Any = sdpa_mask) -> Iterator[None]:
    """Send the attention of a model through a probe for a block, an `AttentionInterface` of transformers."""
    AttentionInterface.register(PROBE, probe)
    AttentionMaskInterface.register(PROBE, mask)
    configs = {id(x): x for _, _, x in held_configs(model)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    families = [(x, family_of(x)) for x in model.modules()]
    adapted = [(x, family) for x, family in families if isinstance(family, AdaptedFamily)]
    own = [family.adapt(module, probe) for module, family in adapted]
    for config in configs.values():
        config._attn_implementation_internal = PROBE
    try:
        yield
    finally:
        for (module, family), interface in zip(adapted, own, strict=True):
            family.restore(module, interface)
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        AttentionInterface.register(PROBE, sdpa_attention_forward)  # it is global: a probe would stay alive


@contextmanager
def _watching(model: nn.Module, probe: Probe) -> Iterator[None]:
    """Send every attention that is covered through a probe for a block."""

    def note(module: nn.Module, *_: Any) -> None:
        probe.calls[id(module)] += 1

    def whole_mask(*args: Any, **options: Any) -> Any:
        """Make a mask also where SDPA would do without: it shows if attention is causal, or has a pattern."""
        return make_mask_of_pattern(*args, **{**options, "allow_is_causal_skip": False})

    with ExitStack() as hooks:
        for x in model.modules():
            if family_of(x).way in ("multihead", "own"):  # which no interface sees
                hooks.enter_context(x.register_forward_pre_hook(note))
        if isinstance(model, PreTrainedModel):
            hooks.enter_context(hearing(model, probe.hear, whole_mask))
        yield


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention in a pass of a model: what it was given and what it returned."""

    name: str
    call: int  # its number in the pass; above 0 where layers share their weights
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # as transformers made it; see `read_mask`
    options: dict[str, Any]
    output: Tensor | None  # (B, L, H, E); None where it was not kept

    @property
    def scale(self) -> float:
        """Scale of the product q . k."""
        given = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if given is None else float(given)

    def visible(self) -> tuple[Tensor | None, bool]:
        """Return the mask of real keys, (B, S) bool or None for all, and True if attention is causal."""
        causal = causal_without_mask(self.module, self.options.get("is_causal"))
        return read_mask(self.mask, self.query, self.key, causal)

    @property
    def real(self) -> Tensor | None:
        """Mask (B, L) of queries that are no padding; None for all, and for those of other tokens than the keys."""
        return self.visible()[0] if self.query.shape[2] == self.key.shape[2] else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of `attention_loss`: queries, keys, values, key mask, causality, scale, relative bias.

        Those of half precision come as float32, and causality as the model leaves it to the implementation: without
        padding it gives no mask at all.
        """
        wide = (
            x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in (self.query, self.key, self.value)
        )
        return (*wide, *self.visible(), self.scale, self.options.get("position_bias"))

    def attend(self, core: AttentionCore) -> Tensor:
        """Output (B, L, H, E) of a core on the same inputs."""
        return attend(core, self.module, self.query, self.key, self.value, self.mask, **self.options)[0]


@contextmanager
def hearing(model: PreTrainedModel, hear: Callable[[AttentionCall], None], mask: Any = sdpa_mask) -> Iterator[None]:
    """Call ``hear`` with every call of an attention in a block, which is one pass of the model; see `probing`."""
    names = {id(module): name for name, module in model.named_modules()}
    counts: Counter[str] = Counter()

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, **options: Any) -> Any:
        name = names[id(module)]
        exact = attend_exactly(module, query, key, value, seen, **options)
        hear(AttentionCall(name, counts[name], module, query, key, value, seen, options, exact[0]))
        counts[name] += 1
        return exact

    with probing(model, record, mask):
        yield


@torch.no_grad()
def attention_calls(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    outputs: bool = True,
    only: Collection[str] | None = None,
    autocast: torch.dtype | None = None,
) -> list[AttentionCall]:
    """Record the attentions of one pass, or those named in ``only``, in the order of the calls."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> None:
        if only is None or call.name in only:
            calls.append(call if outputs else replace(call, output=None))

    # Logits over a vocabulary can cost as much as all layers: a body that holds all attentions runs alone.
    body, named = model.base_model, dict(model.named_modules())
    inside, wanted = set(body.modules()), named if only is None else only
    heads_attend = any("attention" in type(named[x]).__name__.lower() for x in wanted if named[x] not in inside)
    precision = torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None)
    with evaluating(model), hearing(model, record), precision:
        (model if heads_attend else body)(**inputs)
    if not calls:
        raise ValueError(
            f"{type(model).__name__} does not send its attention through transformers' AttentionInterface."
        )
    return calls
