"""Which method a pretrained model takes when nobody says, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kernelformer.hf.adapters import family_of
from kernelformer.hf.find import find_attentions

LEARNED = "loglinear"  # after distillation nearest to the original, and causal
UNTRAINED = "wildcat"
NEAR = ":window=32:sinks=1"
ENCODER_NEAR, DECODER_NEAR = ":window=64:sinks=1", ":window=64:sinks=4"
WINDOW = 64  # of both
FEATURES = 64  # of maps that are learned beside a window
# Of a decoder without training: random features carry little of what is far, and sometimes cost more than they carry;
# maps that start at the original's keys carry more, where there are texts to take them from.
DECODERS = (
    "local:window=64:sinks=4",
    "favor+:window=64:sinks=4",
    "loglinear:window=64:sinks=4",
)
Compare = Callable[[Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True)
class Proposal:
    """An attention for a pretrained model.

    Args:
        attention: ``method:option=value:...``.
        reason: why, in a sentence.
        features: number of features; None: that of all conversions.
    """

    attention: str
    reason: str
    features: int | None = None


def propose(model: nn.Module, *, distilled: bool) -> str:
    """The attention for `convert`, without a measurement; see `proposal`."""
    return proposal(model, distilled=distilled).attention


def proposal(
    model: nn.Module, *, distilled: bool, length: int | None = None, compare: Compare | None = None
) -> Proposal:
    """The attention for `convert`, and why.

        encoder, not distilled    wildcat with a window          a model of two sequences, not distilled    loglinear
        decoder, not distilled    local, favor+ or loglinear with a window, whichever is nearest to the original
        distilled                 loglinear with a window

    A relative bias that goes on beyond the window leaves no room for one.

    Args:
        model: a pretrained one.
        distilled: whether it will learn from its original.
        length: tokens of the texts that it learns from; with less than two windows there is nothing far to learn.
        compare: gives the losses of a model with each of some attentions, less is nearer; None: nothing to measure on.
    """
    attentions = find_attentions(model, None)
    modules = {x.name: model.get_submodule(x.name) for x in attentions}
    biased = any(family_of(module).has_bias(module, name, False) for name, module in modules.items())
    causal, pair = any(x.causal for x in attentions), any(x.cross for x in attentions)
    if distilled:
        return _learned(biased, causal, length)
    if pair or (causal and biased):
        return Proposal(
            LEARNED, f"{LEARNED}: the model is causal or reads two sequences; it needs --distill to be of use"
        )
    if not causal:
        near = "; its relative bias leaves no room for a window" if biased else " and a window"
        attention = UNTRAINED if biased else UNTRAINED + NEAR
        return Proposal(attention, f"{attention}: an encoder without training is nearest with landmarks{near}")
    if length is not None and length <= WINDOW:
        first = DECODERS[0]
        return Proposal(first, f"{first}: texts of {length} tokens are within its window, nothing is far in them")
    return _decoder(compare)


def _learned(biased: bool, causal: bool, length: int | None) -> Proposal:
    if biased:
        return Proposal(LEARNED, f"{LEARNED}: it is distilled, and its relative bias leaves no room for a window")
    if length is not None and length < 2 * WINDOW:
        why = f"texts of {length} tokens leave little to learn beyond a window of {WINDOW}"
        return Proposal(LEARNED, f"{LEARNED}: it is distilled, and {why}")
    attention = LEARNED + (DECODER_NEAR if causal else ENCODER_NEAR)
    reason = "it is distilled, and a learned map beside a window is nearest then"
    more = "" if causal else f"; without training {UNTRAINED}{NEAR} may be nearer still"
    return Proposal(attention, f"{attention}: {reason}{more}", FEATURES)


def _decoder(compare: Compare | None) -> Proposal:
    if compare is None:
        first = DECODERS[0]
        return Proposal(first, f"{first}: a decoder without training, and no texts to measure anything else on")
    losses = compare(DECODERS)
    best = min(losses, key=lambda x: losses[x])
    said = ", ".join(f"{x} {loss:.3g}" for x, loss in losses.items())
    return Proposal(best, f"{best}: the nearest for a decoder without training, by the rise of the loss ({said})")
