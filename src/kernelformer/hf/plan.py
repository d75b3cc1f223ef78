"""The plan of a conversion: the method of each attention of a model, and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from kernelformer.hf.adapters import family_of
from kernelformer.hf.adapters.base import Way
from kernelformer.hf.find import Attention, find_attentions
from kernelformer.modules import AttentionCore, MixedCore, method_options
from kernelformer.modules.multihead import select
from kernelformer.modules.spec import AttentionSpec, build_core, cross_options, maps_by_head, resolve_options

EXACT = "softmax"


@dataclass(frozen=True)
class Layer:
    """Plan for one attention, or the record of what was done to it.

    Args:
        name: of the module.
        way: see `Attention`.
        num_heads: H.
        head_dim: D.
        scale: of the model.
        causal: whether it is.
        method: `EXACT` where it was kept, by choice or for a reason.
        options: of the method.
        exact_heads: those that attend exactly in a layer that was replaced.
        calls: in one pass, when the conversion was verified; 0: not verified.
        cross: whether its keys are those of other tokens than its queries.
        reason: why it could not be replaced and goes on as the model has it; "" for all others.
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
    cross: bool = False
    reason: str = ""

    @property
    def replaced(self) -> bool:
        """Whether its attention is replaced by a method's."""
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
        """Whether a pass has shown that every attention is called."""
        return all(x.calls for x in self.layers)

    def as_json(self) -> list[dict[str, Any]]:
        """The plan as plain values; ``reason`` only where there is one."""
        rows = [{**asdict(x), "exact_heads": list(x.exact_heads)} for x in self.layers]
        return [{name: x for name, x in row.items() if name != "reason" or x} for row in rows]

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
    """Check that some attentions or heads are left to be linear.

    Raises:
        ValueError: all of them, or more than there are, would be kept exact.
    """
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
    """Make the plan that `convert` was asked for, attention by attention.

    Args:
        attentions: of a model.
        method: see `convert`, also for the next three.
        layers: None: all that can be replaced; of patterns, too.
        exact_heads: by attention.
        options: of the method.
        longest: tokens that the model takes; for methods that have a ``max_length``.

    Raises:
        ValueError: an option, an attention or a head that is not there, an option of exact attention, or an attention
            that cannot be replaced.
    """
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
    """The numbers of the attentions that are meant and can be replaced.

    Raises:
        ValueError: a number or a name means one that is kept, or a pattern means no other.
    """
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
    copied = ("name", "way", "num_heads", "head_dim", "scale", "causal", "cross")
    own: dict[str, Any] = {x: getattr(attention, x) for x in copied}
    if attention.reason:
        return Layer(**own, method=EXACT, reason=attention.reason)
    if method == EXACT or len(heads) == attention.num_heads:
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
