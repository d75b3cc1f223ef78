"""Which method a pretrained model takes when nobody says."""

from __future__ import annotations

from torch import nn

from kernelformer.hf.adapters import family_of
from kernelformer.hf.find import find_attentions

LEARNED = "loglinear"  # after distillation nearest to the original, and causal
UNTRAINED = "wildcat"
NEAR = ":window=32:sinks=1"


def propose(model: nn.Module, *, distilled: bool) -> str:
    """The attention for `convert`: landmarks and a window for encoders without training, else a map to be learned.

    Args:
        model: a pretrained one.
        distilled: whether it will learn from its original.

    Returns:
        ``method:option=value:...``. A relative bias that goes on beyond the window leaves no room for one.
    """
    attentions = find_attentions(model, None)
    if distilled or any(x.causal or x.cross for x in attentions):
        return LEARNED
    modules = {x.name: model.get_submodule(x.name) for x in attentions}
    biased = any(family_of(module).has_bias(module, name, False) for name, module in modules.items())
    return UNTRAINED if biased else UNTRAINED + NEAR
