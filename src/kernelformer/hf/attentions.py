"""Finding the attentions of a model: which modules attend, by which way, with how many heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from kernelformer.hf.adapters import ADAPTERS
from kernelformer.hf.multihead import KernelMultiheadAttention

PROBE = "kernelformer_probe"
TOKENS = 6  # of the inputs that a model is tried with
Way = Literal["interface", "adapter", "multihead"]


@dataclass(frozen=True)
class Attention:
    """One attention of a model.

    Args:
        name: of the module, as `named_modules` has it.
        way: how its computation is replaced: through transformers' `AttentionInterface`, by an adapter of ours, or as a
            `torch.nn.MultiheadAttention`.
        num_heads: H.
        head_dim: D.
        scale: of the product q . k.
        causal: whether it was causal when the model was tried.
        calls: in one pass; several where layers share their weights, 0 where nobody has tried.
    """

    name: str
    way: Way
    num_heads: int
    head_dim: int
    scale: float
    causal: bool
    calls: int = 0


@dataclass
class _Seen:
    heads: int
    dim: int
    scale: float
    causal: bool
    calls: int = 1


@dataclass
class Probe:
    """What a model's attentions were called with."""

    seen: dict[int, _Seen] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        """Attend exactly, and take notes."""
        before = self.seen.get(id(module))
        if before is not None:
            before.calls += 1
        else:
            scale = options.get("scaling")
            given = options.get("is_causal")
            causal = bool(getattr(module, "is_causal", False) if given is None else given)
            causal = causal and getattr(getattr(module, "config", None), "is_causal", True)
            self.seen[id(module)] = _Seen(
                query.shape[1], query.shape[3], query.shape[3] ** -0.5 if scale is None else float(scale), causal
            )
        return sdpa_attention_forward(module, query, key, value, mask, **options)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like an attention: so named, with projections of their own; by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | KernelMultiheadAttention):
            found[name] = module
        elif "Attention" in type(module).__name__:
            own = sum(isinstance(x, nn.Linear | Conv1D | nn.Conv1d) for x in module.children())
            own += sum(x is not None for x in module._parameters.values())
            if own >= 2:
                found[name] = module
    return found


@torch.no_grad()
def find_attentions(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[Attention]:
    """All attentions of a model, in the order of its modules.

    A model of transformers is run once on a few tokens, with its own exact attention, to see which of them it calls and
    with what; a plain PyTorch model is run where ``inputs`` are given.

    Args:
        model: any module.
        inputs: keyword arguments of a call; default: made from the configuration.

    Raises:
        ValueError: there is no attention, one is not covered, or one is not called.
    """
    found = candidates(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention: nothing in it to convert.")
    if any(isinstance(x, KernelMultiheadAttention) or "kernel" in x._modules for x in found.values()):
        raise ValueError(f"{type(model).__name__} is converted already; load the original again to convert it anew.")
    probe = Probe()
    if isinstance(model, PreTrainedModel):
        with probing(model, probe):
            run(model, inputs)
    elif inputs is not None:
        with _counting(found, probe):
            run(model, inputs)
    attentions, uncovered = [], []
    for name, module in found.items():
        seen = probe.seen.get(id(module))
        kind = type(module).__name__
        if isinstance(module, nn.MultiheadAttention):
            dim = module.embed_dim // module.num_heads
            calls = 0 if seen is None else seen.calls
            attentions.append(Attention(name, "multihead", module.num_heads, dim, dim**-0.5, False, calls))
        elif kind in ADAPTERS:
            heads, dim = ADAPTERS[kind].sizes(module)
            attentions.append(
                Attention(name, "adapter", heads, dim, dim**-0.5, False, 0 if seen is None else seen.calls)
            )
        elif seen is not None:
            attentions.append(Attention(name, "interface", seen.heads, seen.dim, seen.scale, seen.causal, seen.calls))
        else:
            uncovered.append(f"{name} ({kind})")
    if uncovered:
        raise ValueError(
            f"{type(model).__name__} has attention that is not covered, or that was not called when it was tried: "
            f"{', '.join(uncovered[:4])}{' ...' if len(uncovered) > 4 else ''}. Nothing was converted. Covered are "
            f"models that attend through transformers' AttentionInterface, {', '.join(sorted(ADAPTERS))}, and "
            f"torch.nn.MultiheadAttention; a model that needs other inputs gets them by inputs=."
        )
    tried = isinstance(model, PreTrainedModel) or inputs is not None
    idle = [x.name for x in attentions if tried and x.calls == 0]
    if idle:
        raise ValueError(
            f"{type(model).__name__} did not call {', '.join(idle[:4])}{' ...' if len(idle) > 4 else ''} when it was "
            f"tried, so that a conversion would change nothing there. Nothing was converted; give inputs= that reach "
            f"them, or leave them out by layers=."
        )
    return attentions


def run(model: nn.Module, inputs: Mapping[str, Any] | None) -> None:
    """One pass in evaluation mode, whatever mode each part is in."""
    modes = {x: x.training for x in model.modules()}
    model.eval()
    try:
        model(**(try_inputs(model) if inputs is None else inputs))
    finally:
        for module, mode in modes.items():
            module.training = mode


def try_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A few tokens, or an image, by what the model's configuration says.

    Raises:
        ValueError: neither fits the model.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a model of transformers; say what to call it with by inputs=.")
    config, device, kind = model.config, model.device, model.main_input_name
    text = config.get_text_config()
    if kind == "pixel_values":
        size = getattr(config, "image_size", None)
        if size is None:
            raise ValueError(f"the configuration of {type(model).__name__} has no image_size; give inputs=.")
        rows, columns = (size, size) if isinstance(size, int) else size
        dtype = next(model.parameters()).dtype
        return {kind: torch.zeros(1, config.num_channels, rows, columns, device=device, dtype=dtype)}
    if kind != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {kind!r}, which cannot be made up; give inputs=.")
    # Ids from the middle of the vocabulary: the first ones are special.
    tokens = (text.vocab_size // 2 + torch.arange(TOKENS, device=device)).remainder(text.vocab_size).unsqueeze(0)
    inputs = {kind: tokens, "attention_mask": torch.ones_like(tokens)}
    if config.is_encoder_decoder:
        if getattr(config, "eos_token_id", None) is not None and isinstance(config.eos_token_id, int):
            tokens[:, -1] = config.eos_token_id
        inputs["decoder_input_ids"] = tokens.clone()
    return inputs


@contextmanager
def probing(model: PreTrainedModel, probe: Any) -> Iterator[None]:
    """A model whose attention goes through ``probe``, whichever way it goes."""
    AttentionInterface.register(PROBE, probe)
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    configs = {id(x.config): x.config for x in model.modules() if isinstance(x, PreTrainedModel)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    adapted = [(x, ADAPTERS[type(x).__name__]) for x in model.modules() if type(x).__name__ in ADAPTERS]
    for config in configs.values():
        config._attn_implementation_internal = PROBE
    for module, adapter in adapted:
        adapter.apply(module, probe)
    try:
        yield
    finally:
        for module, adapter in adapted:
            adapter.undo(module)
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        AttentionInterface.register(PROBE, sdpa_attention_forward)  # it is global: a probe would stay alive


@contextmanager
def _counting(found: Mapping[str, nn.Module], probe: Probe) -> Iterator[None]:
    """Calls of modules, counted by hooks."""

    def note(module: nn.Module, *_: Any) -> None:
        seen = probe.seen.setdefault(id(module), _Seen(0, 0, 1.0, False, 0))
        seen.calls += 1

    handles = [x.register_forward_pre_hook(note) for x in found.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
