"""The table of methods: each fact about a method is stated in its one record."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kernelformer.errors import unknown
from kernelformer.feature_maps import (
    FastFoodMap,
    FeatureMap,
    FormulaMap,
    GeneralizedMap,
    GenerativeMap,
    HedgehogMap,
    LogLinearMap,
    MixtureMap,
    NystromMap,
    OptimalMap,
    PositiveMap,
    ScaledFourierMap,
    TrigonometricMap,
    WildcatMap,
)
from kernelformer.lazy import LAYERS
from kernelformer.modules.baselines import LinformerCore, NystromformerCore
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, LocalCore, SoftmaxCore
from kernelformer.modules.gated import GatedCore
from kernelformer.modules.kernel import KernelCore, WildcatCore


@dataclass(frozen=True)
class Paper:
    """Publication of a method."""

    name: str
    arxiv: str

    @property
    def url(self) -> str:
        """Page on arxiv.org."""
        return f"https://arxiv.org/abs/{self.arxiv}"


TRANSFORMER = Paper("Transformer", "1706.03762")
PERFORMER = Paper("Performer", "2009.14794")
KL_TRANSFORMER = Paper("KL-Transformer", "2110.08323")
SKYFORMER = Paper("Skyformer", "2111.00035")
NPRF = Paper("NPRF with RPE", "2106.12566")
LINEAR_TRANSFORMER = Paper("Linear Transformer", "2006.16236")
NYSTROMFORMER = Paper("Nystromformer", "2102.03902")
LINFORMER = Paper("Linformer", "2006.04768")
RFA = Paper("RFA", "2103.02143")
WILDCAT = Paper("WildCat", "2602.10056")
HEDGEHOG = Paper("Hedgehog", "2402.04347")
FAVOR_PLUS_PLUS = Paper("FAVOR++", "2205.15317")
FAVOR_SHARP = Paper("FAVOR#", "2302.00787")


Family = Literal["exact", "positive", "signed", "landmarks", "other"]
Fact = bool | Mapping[str, Any]  # true, false, or true with these options
QUADRATIC_COST = "L²"


@dataclass(frozen=True, kw_only=True)
class Method:
    """Record of one method.

    A fact that depends on options is the mapping of the options that make it true: skyformer is causal with
    ``{"landmarks": "learned"}``. `holds` evaluates it. A bias and a window need a normalized sum: with
    ``normalize=False`` no method takes one. Other facts are those of the classes.

    Args:
        about: what it is, in one line, without the paper.
        make: class of its feature map, or of the whole core where it has no map.
        core: class that attends through the feature map.
        fixed: settings that make it this method.
        default: settings that the caller may change, where they differ from the defaults of the class.
        unused: options of its classes that mean nothing to this method.
        paper: where it was published; None: here.
        equation: of the paper, where it has one.
        phi: its feature map, or what it does instead, in a few signs: w frequencies, m their number.
        cost: time in the length L: m features, d head dimension, C components, s landmarks, r rank.
        family: ``exact``; ``positive`` or ``signed`` features, with the default options; ``landmarks``; ``other``.
        size: the option that sets how many features, landmarks or rows it has; None where there is nothing to set.
        causal: whether it can attend to earlier tokens only, and so token by token with a state.
        normalized: whether weights are divided by their sum, which a bias and near tokens need.
        cross: whether it can attend to another sequence; a method that cannot is causal only.
        cross_method: what a model takes for attention to another sequence by default; None: the same method.
        per_head: whether each head has a map of its own, for methods with the option ``num_key_heads``.
    """

    about: str
    make: type[FeatureMap] | type[AttentionCore]
    core: type[KernelCore] = KernelCore
    fixed: Mapping[str, Any] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    paper: Paper | None = None
    equation: str = ""
    phi: str
    family: Family
    cost: str = "L m"
    size: str | None = "num_features"
    causal: Fact = True
    normalized: Fact = True
    cross: Fact = True
    cross_method: str | None = None
    per_head: Fact = field(default_factory=lambda: {"per_head": True})

    @property
    def quadratic(self) -> bool:
        """True if its time is quadratic in the length."""
        return self.cost == QUADRATIC_COST

    @property
    def has_map(self) -> bool:
        """True if it attends through a feature map."""
        return issubclass(self.make, FeatureMap)

    @property
    def attends(self) -> type[AttentionCore]:
        """Class of its core."""
        return self.core if issubclass(self.make, FeatureMap) else self.make

    @property
    def bias(self) -> Fact:
        """True if it takes a relative position bias."""
        return self.normalized if self.attends.takes_bias else False

    @property
    def window(self) -> Fact:
        """True if it can attend to near tokens and the first ones exactly, by ``window`` and ``sinks``."""
        return self.normalized if "window" in inspect.signature(self.attends).parameters else False

    @property
    def own_scale(self) -> bool:
        """True if its scale is not 1 / sqrt(D): for unit vectors, and for elu."""
        return "scale" in self.default or bool(self.fixed.get("normalize_qk"))

    def holds(self, fact: Fact, options: Mapping[str, Any] | None = None) -> bool:
        """Evaluate a fact of this record for these options; options that are not given have their defaults."""
        if isinstance(fact, bool):
            return fact
        parameters = inspect.signature(self.make).parameters
        defaults = {name: x.default for name, x in parameters.items()}
        settings = {**defaults, **self.default, **(options or {}), **self.fixed}
        return all(settings.get(name) == value for name, value in fact.items())


SIZE = "num_features"  # the size of every method, whatever it calls it
IN_LABORATORY = ("bigbird", "longformer", "reformer", "informer")
_POSITIVE = {"hyperbolic": False, "regularized": False}
_RKS = {"features": "rks"}
_PRF = {"features": "prf", "smoothing": 0.0}  # positive features need no smoothing
DRAWN = ("draw", "norms", "per_head", "num_key_heads")  # options of a map that draws frequencies, and of no other

METHODS: dict[str, Method] = {
    "softmax": Method(
        about="exact softmax attention by torch's SDPA, quadratic",
        make=SoftmaxCore,
        paper=TRANSFORMER,
        equation="Eq. 1",
        phi="exact",
        cost=QUADRATIC_COST,
        family="exact",
        size=None,
    ),
    "gaussian": Method(
        about="exact Gaussian kernelized attention in tiles, quadratic",
        make=GaussianCore,
        paper=SKYFORMER,
        equation="Eq. 3",
        phi="exact, in tiles; not normalized",
        cost=QUADRATIC_COST,
        family="exact",
        size=None,
    ),
    "local": Method(
        about="exact softmax attention to the tokens nearby and the first ones",
        make=LocalCore,
        phi="exact on the last `window` tokens and `sinks`, nothing else",
        cost="L w",
        family="exact",
        size=None,
    ),
    "favor+": Method(
        about="positive orthogonal random features",
        make=PositiveMap,
        fixed=_POSITIVE,
        paper=PERFORMER,
        equation="Eq. 7",
        phi="exp(wx - x²/2)",
        family="positive",
    ),
    "favor+hyperbolic": Method(
        about="positive features in pairs exp(wx), exp(-wx)",
        make=PositiveMap,
        fixed={**_POSITIVE, "hyperbolic": True},
        paper=PERFORMER,
        equation="Lemma 1",
        phi="exp(±wx - x²/2), 2m features",
        family="positive",
    ),
    "favor+regularized": Method(
        about="positive features with frequencies on a sphere",
        make=PositiveMap,
        fixed={**_POSITIVE, "regularized": True},
        paper=PERFORMER,
        equation="Theorem 1",
        phi="exp(wx - x²/2), w on a sphere",
        family="positive",
    ),
    "favor++": Method(
        about="optimal positive random features, calibrated",
        make=OptimalMap,
        fixed={"dense": False},
        paper=FAVOR_PLUS_PLUS,
        phi="exp(A w² + √(1-4A) wx - x²/2), A calibrated",
        family="positive",
        per_head=True,
    ),
    "favor#": Method(
        about="dense positive random features of balanced queries and keys, calibrated",
        make=OptimalMap,
        fixed={"dense": True},
        default={"balance": True},
        paper=FAVOR_SHARP,
        phi="`favor++` with a matrix A, of balanced tq and k/t",
        family="positive",
        per_head=True,
    ),
    "nprf": Method(
        about="positive features of unit vectors, for relative positions",
        make=PositiveMap,
        fixed={**_POSITIVE, "normalize_qk": True},
        paper=NPRF,
        equation="Sec. 3",
        phi="`favor+` of unit vectors, meant for a bias",
        family="positive",
        cross_method="favor+",  # without a bias, logits in [-1, 1] let no token stand out
    ),
    "trigonometric": Method(
        about="cosine and sine random features, signed",
        make=TrigonometricMap,
        paper=PERFORMER,
        equation="Eq. 5",
        phi="exp(x²/2) (cos wx, sin wx), signed, 2m features",
        family="signed",
    ),
    "relu": Method(
        about="generalized attention, relu by default",
        make=GeneralizedMap,
        paper=PERFORMER,
        equation="Eq. 5",
        phi="f(wx) + ε; `activation=` relu, exp, sigmoid, abs, gelu, cos, tanh, sign, identity",
        family="positive",
        per_head={"per_head": True, "projection": True},
    ),
    "elu": Method(
        about="elu(x) + 1",
        make=GeneralizedMap,
        fixed={"activation": "elu", "projection": False},
        default={"scale": 1.0},
        unused=("eps", "num_features", "seed", *DRAWN),
        paper=LINEAR_TRANSFORMER,
        phi="elu(x) + 1",
        cost="L d",
        family="positive",
        size=None,
    ),
    "gmm-rks": Method(
        about="learned Gaussian mixture, Fourier features, signed",
        make=MixtureMap,
        fixed=_RKS,
        paper=KL_TRANSFORMER,
        equation="Eq. 5",
        phi="(cos wx, sin wx), learned w = Sn + μ, C components",
        cost="L C m",
        family="signed",
    ),
    "gmm-prf": Method(
        about="learned Gaussian mixture, positive features",
        make=MixtureMap,
        fixed=_PRF,
        default={"covariance": "diagonal"},
        paper=KL_TRANSFORMER,
        equation="Eq. 10",
        phi="exp(wx - x²), learned w = Sn + μ, C components",
        cost="L C m",
        family="positive",
    ),
    "fastfood-rks": Method(
        about="learned FastFood, Fourier features, signed",
        make=FastFoodMap,
        fixed=_RKS,
        paper=KL_TRANSFORMER,
        equation="Eq. 6",
        phi="(cos wx, sin wx), learned w = rows of S H G P H B",
        family="signed",
    ),
    "fastfood-prf": Method(
        about="learned FastFood, positive features",
        make=FastFoodMap,
        fixed=_PRF,
        paper=KL_TRANSFORMER,
        equation="Eq. 12",
        phi="exp(wx - x²), learned w = rows of S H G P H B",
        family="positive",
    ),
    "generative-rks": Method(
        about="frequencies by a network, Fourier features, signed",
        make=GenerativeMap,
        fixed=_RKS,
        paper=KL_TRANSFORMER,
        equation="Eq. 8",
        phi="(cos wx, sin wx), w = network(n), learned",
        family="signed",
    ),
    "generative-prf": Method(
        about="frequencies by a network, positive features",
        make=GenerativeMap,
        fixed=_PRF,
        paper=KL_TRANSFORMER,
        equation="Eq. 11",
        phi="exp(wx - x²), w = network(n), learned",
        family="positive",
    ),
    "skyformer": Method(
        about="Nystrom features of the Gaussian kernel at landmarks",
        make=NystromMap,
        paper=SKYFORMER,
        equation="Eq. 5, 6",
        phi="Gaussian kernel at s landmarks, (M + gamma)⁻¹ between; not normalized",
        cost="L s²",
        family="landmarks",
        size="num_landmarks",
        causal={"landmarks": "learned"},
        normalized={"kernel": "softmax"},
        per_head={"landmarks": "learned"},
    ),
    "wildcat": Method(
        about="softmax attention to pivoted landmarks among the keys, without training",
        make=WildcatMap,
        core=WildcatCore,
        unused=("normalize",),  # outputs are clipped to the range of the values
        paper=WILDCAT,
        equation="Sec. 3",
        phi="e^(q Z) at s pivoted keys Z, which carry the weights of all; signed",
        cost="L s²",
        family="landmarks",
        size="num_landmarks",
        causal=False,
    ),
    "nystromformer": Method(
        about="softmax attention through segment means",
        make=NystromformerCore,
        paper=NYSTROMFORMER,
        phi="softmax through segment means",
        cost="L s",
        family="landmarks",
        size="num_landmarks",
        causal=False,
    ),
    "linformer": Method(
        about="softmax attention to learned mixtures of keys",
        make=LinformerCore,
        paper=LINFORMER,
        phi="softmax to `rank` learned mixtures of keys, up to `max_length`",
        cost="L r",
        family="other",
        size="rank",
        causal=False,
    ),
    "rfa": Method(
        about="Fourier features of unit vectors, learned scale",
        make=ScaledFourierMap,
        fixed={"normalize_qk": True},
        paper=RFA,
        phi="(cos wx, sin wx) of unit vectors, learned scale",
        family="signed",
    ),
    "rfa-gate": Method(
        about="Fourier features of unit vectors with a gate that forgets, causal only",
        make=ScaledFourierMap,
        core=GatedCore,
        fixed={"normalize_qk": True},
        unused=("num_key_heads",),  # gates are each query head's own
        paper=RFA,
        phi="`rfa` with a gate that forgets",
        family="signed",
        cross=False,
    ),
    "loglinear": Method(
        about="free positive map, for fitting a pretrained model",
        make=LogLinearMap,
        phi="exp(wx + b), w and b free, own ones for queries and keys; a key's features sum to 1",
        family="positive",
    ),
    "hedgehog": Method(
        about="softmax features of both signs, learned",
        make=HedgehogMap,
        paper=HEDGEHOG,
        phi="(softmax Wx, softmax -Wx), learned W, own ones for queries and keys, 2m features",
        family="positive",
    ),
}


def find_method(name: str) -> Method:
    """Return the record of a method."""
    if isinstance(name, str) and name in LAYERS:
        raise ValueError(
            f"{name!r} is a whole layer, for the self-attention of encoders of this library (KernelformerConfig, "
            f"train, compare, study encoder), and not a method; use one of list_methods() here, such as 'favor+'."
        )
    if isinstance(name, str) and name in IN_LABORATORY:
        raise ValueError(
            f"{name!r} is a sparse layer for encoders, which comes with the laboratory; install kernelformer-lab and "
            f"import kernelformer_lab."
        )
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"{unknown('method', name, METHODS)} If it is a feature map of your own, call kernelformer.register_method "
            f"first."
        )
    return METHODS[name]


def register_method(name: str, make: type[FeatureMap], *, about: str | None = None, **default: Any) -> None:
    """Give a feature map of your own a name, which then works wherever the name of a method does.

        kf.register_method("cube", CubeMap)
        layer = kf.KernelAttention(512, 8, method="cube", num_features=128)

    Its options are the arguments of its constructor, besides those of every core. All of them need a default, here or
    there; frequencies of a `FormulaMap` whose formula takes them are 256 by default. One map is built to see that.
    Registering a class again changes nothing, and one that was defined again (a cell of a notebook) takes its place.

    Args:
        name: letters, digits and ``+ - # _``, as in attention strings.
        make: the class of the map.
        about: one line for lists; default: the first line of the class's documentation.
        default: options with another default than the constructor's.

    Raises:
        ValueError: the name is taken or cannot be one, the class is no feature map or cannot be built by its defaults,
            or an option has the name of one of the core.
    """
    if not (isinstance(make, type) and issubclass(make, FeatureMap)):
        raise ValueError(
            f"a method is registered by the class of a feature map, a subclass of FeatureMap, got {make!r}."
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w+#-]*", name):
        raise ValueError(f"the name of a method is letters, digits and + - # _, the first a letter, got {name!r}.")
    known = METHODS.get(name)
    if name in LAYERS or name in IN_LABORATORY or not (known is None or _redefines(make, known.make)):
        owner = "a layer" if known is None else known.make.__name__
        raise ValueError(f"the name {name!r} is taken by {owner}; choose another for {make.__name__}.")
    parameters = set(inspect.signature(make).parameters) - {"head_dim", "num_heads"}
    shared = parameters & set(inspect.signature(KernelCore).parameters)
    if shared:
        raise ValueError(
            f"{make.__name__} has options of the names of a core's: {', '.join(sorted(shared))}; rename them."
        )
    one, default = _by_defaults(make, default)
    # A formula without frequencies has no use for what says how they are drawn.
    own = () if make.__init__ is FormulaMap.__init__ else inspect.signature(make.__init__).parameters
    idle = () if one.num_features else tuple(x for x in (SIZE, "draw", "norms") if x not in own)
    METHODS[name] = Method(
        about=about or (inspect.getdoc(make) or make.__name__).partition("\n")[0].rstrip("."),
        make=make,
        default=default,
        unused=idle,
        phi=make.__name__,
        family=one.spec.family,
        size=SIZE if SIZE in parameters.difference(idle) else None,
        causal=not one.sees_sequence,
        normalized=one.normalized,
        per_head={"per_head": True} if "per_head" in parameters else one.heads > 1,
    )


def _redefines(new: type, old: type) -> bool:
    """Return True if a class is another or its definition anew."""
    return new is old or ((new.__module__, new.__qualname__) == (old.__module__, old.__qualname__))


def _by_defaults(make: type[FeatureMap], default: dict[str, Any]) -> tuple[FeatureMap, dict[str, Any]]:
    """Build a map by its defaults, if need be with frequencies; also the defaults that do it."""
    problem: Exception | None = None
    for more in ({}, {SIZE: 256}) if make.__init__ is FormulaMap.__init__ else ({},):
        try:
            return make(head_dim=16, num_heads=2, **(settings := {**more, **default})), settings
        except (TypeError, ValueError, IndexError) as e:
            problem = e
    raise ValueError(
        f"{make.__name__} cannot be built by its defaults: {problem}; give its options defaults, in the constructor or "
        f"as register_method(..., option=value)."
    ) from problem


def list_methods() -> dict[str, str]:
    """Return every method's name with a line about it."""
    return {
        name: method.about if method.paper is None else f"{method.about} ({method.paper.name})"
        for name, method in METHODS.items()
    }
