"""Queries, keys and values of the attentions of a transformers model on real inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelformer.hf.attend import attend, attend_exactly, causal_without_mask, read_mask
from kernelformer.hf.find import probing
from kernelformer.modules import AttentionCore
from kernelformer.modules.calibration import evaluating


@torch.no_grad()
def attention_inputs(model: Any, **inputs: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Collect queries, keys and values (B, H, L, D) of every attention layer, in the order of the calls.

    Args:
        model: a model of transformers whose attention goes through `transformers.AttentionInterface`.
        inputs: of the model, ``input_ids`` and so on; all texts of one length.
    """
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        seen.append((query, key, value))
        return attend_exactly(module, query, key, value, mask, **options)

    with probing(model, record):
        model(**inputs)
    if not seen:
        raise ValueError(
            f"{type(model).__name__} does not send its attention through transformers' AttentionInterface, so that its "
            f"queries and keys cannot be seen; use a model that does, such as BERT."
        )
    return seen


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention in a pass of a model: what it was given and what it returned.

    Args:
        name: of the attention, as `named_modules` has it.
        call: number of the call in the pass; above 0 where layers share their weights.
        module: the attention.
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        mask: as transformers made it; see `read_mask`.
        options: keywords of the call.
        output: (B, L, H, E); None where it was not kept.
    """

    name: str
    call: int
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor | None

    @property
    def scale(self) -> float:
        """Scale of the product q . k."""
        given = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if given is None else float(given)

    def visible(self) -> tuple[Tensor | None, bool]:
        """Which keys are real, (B, S) bool or None for all, and whether attention is causal."""
        causal = causal_without_mask(self.module, self.options.get("is_causal"))
        return read_mask(self.mask, self.query, self.key, causal)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What `attention_loss` takes: queries, keys, values, key mask, causality, scale, relative bias.

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


@torch.no_grad()
def attention_calls(
    model: Any, inputs: Mapping[str, Tensor], *, outputs: bool = True, only: Collection[str] | None = None
) -> list[AttentionCall]:
    """Record the attentions of one pass, in the order of the calls; the model is left as it was.

    Args:
        model: of transformers.
        inputs: of the model, padded where its texts differ in length.
        outputs: keep what attentions returned, too.
        only: names of attentions to record; None: all.

    Raises:
        ValueError: the model does not attend through transformers' AttentionInterface.
    """
    names = {id(module): name for name, module in model.named_modules()}
    counts: Counter[str] = Counter()
    calls: list[AttentionCall] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        name = names[id(module)]
        exact = attend_exactly(module, query, key, value, mask, **options)
        if only is None or name in only:
            kept = exact[0] if outputs else None
            calls.append(AttentionCall(name, counts[name], module, query, key, value, mask, options, kept))
            counts[name] += 1
        return exact

    # Logits over a vocabulary can cost as much as all layers: a body that holds all attentions runs alone.
    body, wanted = model.base_model, set(names.values()) if only is None else set(only)
    inside = {names[id(x)] for x in body.modules()}
    heads_attend = any("attention" in type(model.get_submodule(x)).__name__.lower() for x in wanted - inside)
    with evaluating(model), probing(model, record):
        (model if heads_attend else body)(**inputs)
    if not calls:
        raise ValueError(
            f"{type(model).__name__} does not send its attention through transformers' AttentionInterface."
        )
    return calls
