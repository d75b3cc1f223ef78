"""Every method as an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kernelformer.errors import unknown
from kernelformer.hf.attend import CORE, CROSS, attend, causal_without_mask, make_mask, read_mask
from kernelformer.modules import AttentionCore, list_methods, method_options
from kernelformer.modules.spec import applicable_options, build_core, cross_options, move_to_inputs, near_settings

SETTINGS = "registered_as"  # attribute of cores that were built on the way: for whom


class Registered:
    """Attention by a method, with a core that is built when a module first attends.

    Cross-attention is told by the module or the call, see `_crosses`; it has no window. The core becomes a child of the
    module, with a draw of its own where modules know their number (``layer_idx``). A method that learns should be there
    before an optimizer is, and when weights are loaded: use `convert`.
    """

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        self.method, self.options = method, applicable_options(method, options)
        self.takes_length = "max_length" in method_options(method)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the module's core, which is built at the first call; see `attend` for shapes."""
        core, settings = module._modules.get(CORE), self._options(module)
        causal = causal_without_mask(module, given.get("is_causal"))
        key_mask, causal = read_mask(attention_mask, query, key, causal)
        cross = _crosses(module, query, key, causal)
        if not isinstance(core, AttentionCore) or getattr(core, SETTINGS, None) != (self.method, settings):
            self._refuse_learned(module, core)
            scale = given.get("scaling")
            method, options = cross_options(self.method, settings) if cross else (self.method, settings)
            with torch.inference_mode(False):  # its parameters may be trained later
                core = build_core(
                    method,
                    num_heads=query.shape[1],
                    head_dim=query.shape[3],
                    scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                    layer=int(getattr(module, "layer_idx", None) or 0),
                    **options,
                )
                move_to_inputs(core, query)
            core.train(module.training)
            setattr(core, SETTINGS, (self.method, settings))
            if cross is None and core.has_near:
                raise _untold(module, core, f"a window ({near_settings(core)}) is for self-attention")
            module.add_module(CORE, core)
        if cross is None and key_mask is not None and core.refusal(True) is not None:
            raise _untold(module, core, "a mask of the keys hides queries too in self-attention")
        setattr(core, CROSS, cross is True)
        return attend(core, module, query, key, value, attention_mask, **given)

    def _refuse_learned(self, module: nn.Module, core: nn.Module | None) -> None:
        """Raise rather than replace a core that has learned something; a draw can be replaced."""
        if core is not None and next(core.parameters(), None) is not None:
            raise ValueError(
                f"{type(module).__name__} has a core of {getattr(core, 'method', '?')!r} with parameters, which "
                f"{self.method!r} with {self._options(module)} would replace; build the model anew, or use "
                f"kernelformer.hf.convert."
            )

    def _options(self, module: nn.Module) -> dict[str, Any]:
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        more = {"max_length": longest} if self.takes_length and longest is not None else {}
        return {**more, **self.options}


def _crosses(module: nn.Module, query: Tensor, key: Tensor, causal: bool) -> bool | None:
    """Tell whether the keys are those of other tokens than the queries; None where nothing says it.

    Causal attention is to a token's own past. Without order, self-attention has as many queries as keys; where
    cross-attention has as many too, the module has to say what it is: in a decoder, only cross-attention has no order.
    """
    config, kind = getattr(module, "config", None), type(module).__name__.lower()
    if getattr(module, CROSS, False):
        return True
    if causal or not (getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)):
        return False
    if query.shape[2] != key.shape[2] or "cross" in kind:
        return True
    return False if "selfattention" in kind else getattr(module, "is_decoder", None)


def _untold(module: nn.Module, core: AttentionCore, why: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} is of a model with cross-attention and does not say whether it is one, and {why}, "
        f"got {core.method!r}; use kernelformer.hf.convert, which sees it when it tries the model."
    )


def register(**options: Any) -> list[str]:
    """Make every method of `list_methods` an attention implementation of transformers, under its own name.

        register()
        AutoModel.from_pretrained(name, attn_implementation="favor+")

    Of each implementation both halves are registered: the attention, and
    the mask function without which a model would get no mask at all and lose its causality. Padding leaves numerator
    and denominator; what cannot be honoured (soft-capping, sliding windows, sinks, packed sequences) raises. Attention
    dropout is left out, with a warning (see `attend`). Cross-attention is told from self-attention and has no window;
    where it cannot be told, a window and landmarks with padding raise. Calling it again changes the options, also of
    models that are there, unless their maps have parameters: those raise then.

    A model that ignores its ``attn_implementation`` stays as it is, silently: `convert` says so. What
    maps learn is not read again by `from_pretrained`: `convert` saves and loads it.

    Args:
        options: of the methods, ``num_features=128`` for example; each takes those that it knows, and
            ``num_features`` is the size of each, whatever it calls it.

    Returns:
        The names.

    Raises:
        ValueError: an option that no method knows.
    """
    names = list(list_methods())
    known = {x for name in names for x in method_options(name)}
    for option in options:
        if option not in known:
            raise unknown("option of the methods,", option, known)
    for name in names:
        AttentionInterface.register(name, Registered(name, options))
        AttentionMaskInterface.register(name, make_mask)
    return names
