"""Distance of a converted model from its original: attention by attention, and layer after layer as errors add up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernelformer.attention.reference import near_keys
from kernelformer.conversion.losses import CONVERTED, ORIGINAL, HiddenStateErrors
from kernelformer.errors import choice, number
from kernelformer.hf.convert import EXACT, check_kept, conversion, cores
from kernelformer.hf.find import AttentionCall, hearing
from kernelformer.kernels import gaussian_kernel
from kernelformer.modules import AttentionCore, MixedCore
from kernelformer.modules.calibration import evaluating


@torch.no_grad()
def statistical_dimension(query: Tensor, key: Tensor, epsilons: Sequence[float], scale: float | None = None) -> Tensor:
    """d_stat of the completed Gaussian scores, as a function of the ridge (Skyformer, Theorem 2).

        d_stat = Tr(C' (C' + lambda I)^-1)       C' = kappa([Q; K], [Q; K]),  lambda = epsilon |C|,  C = kappa(Q, K)

    Landmarks needed for a spectral error of ``epsilon |C|`` grow with it.

    Args:
        query: (*, L, D).
        key: (*, S, D).
        epsilons: of the ridge, relative to the spectral norm of C.
        scale: default 1 / sqrt(D).

    Returns:
        (*, number of epsilons); at most L + S.
    """
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    both = torch.cat([query, key], -2).double() * root
    values = torch.linalg.eigvalsh(gaussian_kernel(both, both)).clamp_min(0)
    norm = torch.linalg.svdvals(gaussian_kernel(query.double() * root, key.double() * root))[..., :1]
    ridges = norm * torch.tensor([number("epsilon", x, above=0) for x in epsilons], dtype=norm.dtype)
    dimensions: Tensor = (values.unsqueeze(-2) / (values.unsqueeze(-2) + ridges.unsqueeze(-1))).sum(-1)
    return dimensions


WINDOWS = (32, 64, 128)  # a key is near where |i - j| is less
SINKS = (1, 4)  # first visible keys
TOKENS = 128  # of the statistical dimension, whose cost is cubic
EPSILON = 0.1  # of its ridge


@dataclass(frozen=True)
class AttentionProfile:
    """Figures of one attention, a number for each head.

    Args:
        query: root mean square of the norms of sqrt(scale) q, which is what a kernel sees.
        near: mean share of a query's weight on keys with |i - j| < w, by w.
        first: the same on the first s visible keys, by s.
        far: on keys that are neither within 64 tokens nor among the first 4.
        dimension: `statistical_dimension` of 128 tokens, at a ridge of 0.1; at most 256.
    """

    query: tuple[float, ...]
    key: tuple[float, ...]
    near: dict[int, tuple[float, ...]]
    first: dict[int, tuple[float, ...]]
    far: tuple[float, ...]
    dimension: tuple[float, ...]


@torch.no_grad()
def attention_profile(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> AttentionProfile:
    """Measure where the attention weights of each head go.

        share on a set of keys = mean over real queries i of  sum_{j in set(i)} A_ij,   A = softmax(scale q k + bias)

    Args:
        query: (B, H, L, D).
        key: (B, G, L, D), of the same tokens; G divides H.
        scale: of the product q . k.
        causal: whether query i sees keys up to i alone.
        key_mask: (B, L) bool, which tokens are real; None: all.
        position_bias: (1, H, L, L), added to the logits.

    Cost: O(L^2) numbers for each head.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    weights = attention_weights(query, key, scale=scale, causal=causal, key_mask=key_mask, position_bias=position_bias)
    everyone = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    real = everyone if key_mask is None else key_mask

    def share(window: int, sinks: int) -> Tensor:
        where = near_keys(
            query.shape[2], query.shape[2], window=window, sinks=sinks, key_mask=key_mask, device=query.device
        )
        rows = (weights * where).sum(-1).transpose(1, 2)  # (B, L, H)
        return rows[real].mean(0)

    def norms(x: Tensor) -> Tensor:
        return (x.float().square().sum(-1).transpose(1, 2)[real].mean(0) * scale).sqrt()

    tokens = real[0].nonzero().flatten()  # of the first sample, evenly spread
    some = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), TOKENS)).long()]
    return AttentionProfile(
        query=_plain(norms(query)),
        key=_plain(norms(key)),
        near={w: _plain(share(w, 0)) for w in WINDOWS},
        first={s: _plain(share(0, s)) for s in SINKS},
        far=_plain(1 - share(WINDOWS[1], SINKS[1])),
        dimension=_plain(statistical_dimension(query[0, :, some], key[0, :, some], [EPSILON], scale)[:, 0]),
    )


@torch.no_grad()
def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Weights of softmax attention, ``softmax(scale q_i k_j + b_ij)``; rows of queries that see nothing are zero.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D), G divides H.
        key_mask: (B, S) bool; None: all keys are real.
        position_bias: (1, H, L, S).
        rows: (N), which queries; None: all.
    """
    rows = torch.arange(query.shape[2], device=query.device) if rows is None else rows
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query[:, :, rows] @ key.mT * scale
    logits = logits if position_bias is None else logits + position_bias[:, :, rows]
    if causal:
        past = key.shape[2] - query.shape[2]
        logits = logits.masked_fill(torch.arange(key.shape[2], device=key.device) - past > rows.unsqueeze(1), -math.inf)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -math.inf)
    return logits.softmax(-1).nan_to_num()


def _plain(x: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in x)


FORMULAS = ("favor+", "favor+hyperbolic", "trigonometric")  # methods whose variance has a closed form


def log_variance(method: str, query: Tensor, key: Tensor, num_features: int, scale: float) -> Tensor:
    """Logarithm of the relative variance of each estimated weight before normalization.

        favor+              (exp(|x + y|^2) - 1) / m                                      (Performer, Lemma 2)
        favor+hyperbolic    (exp(|x + y|^2) - 1) (1 - exp(-|x + y|^2)) / 2m
        trigonometric       exp(|x - y|^2) (1 - exp(-|x - y|^2))^2 / 2m

    with x = sqrt(scale) q, y = sqrt(scale) k. They hold for independent draws; orthogonal ones do a little better.

    Args:
        method: one of `FORMULAS`, for the softmax kernel.
        query: (*, L, D).
        key: (*, S, D).
        num_features: m, the frequencies drawn.
        scale: of the product q . k.

    Returns:
        (*, L, S), in float64.
    """
    choice("method", method, FORMULAS)
    x, y = query.double() * scale**0.5, key.double() * scale**0.5
    sign = -1.0 if method == "trigonometric" else 1.0
    squares: Tensor = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2) + 2 * sign * (x @ y.mT)
    squares.clamp_(min=1e-12)
    rest = torch.log(-torch.expm1(-squares))
    if method == "favor+":
        return squares + rest - math.log(num_features)
    return squares + 2 * rest - math.log(2 * num_features)


CEILING = 1e30  # of a predicted error; beyond any meaning, and JSON has no infinity


def predicted_error(core: AttentionCore, query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor | str:
    """Expected squared error of estimated weights for each head, ``sum_ij A_ij^2 var_ij``, or why it is not known.

    Over ``sum_ij A_ij^2`` it is the square of a relative error. That of the normalized weights is close to it while it
    is small, and never much above 1: a larger one says that the estimate is worthless.

    Args:
        weights: (B, H, L, S), A.

    Returns:
        (H), in float64; or a few words: "exact", "near tokens exactly", "learned", "no formula", "another kernel".
    """
    parts: list[tuple[AttentionCore, list[int]]] = [(core, list(range(core.num_heads)))]
    if isinstance(core, MixedCore):
        parts = list(zip(core.cores, core.heads, strict=True))[1:]
    total = torch.zeros(core.num_heads, dtype=torch.float64)
    for part, heads in parts:
        reason = _no_formula(part, scale)
        if reason is not None:
            return reason
        phi: Any = part.feature_map
        variance = log_variance(part.method, query[:, heads], key[:, heads], phi.num_features, scale)
        logs = variance + 2 * weights[:, heads].double().log()
        total[heads] = logs.transpose(0, 1).flatten(1).logsumexp(1).clamp(max=2 * math.log(CEILING)).exp().cpu()
    return total


def _no_formula(core: AttentionCore, scale: float) -> str | None:
    """Explain why there is no formula for the variance of a core, or None; not for a mixed one."""
    if core.method == EXACT:
        return "exact"
    if core.has_near:
        return "near tokens exactly"
    if core.method not in FORMULAS:
        learned = any(True for _ in core.parameters())
        return "learned" if learned else "no formula"
    phi: Any = core.feature_map
    if core.normalize_qk or core.scale != scale or phi.options.get("kernel", "softmax") != "softmax":
        return "another kernel"
    return None


QUERIES = 32  # of each text, evenly spread, whose weights count: all would be L x L numbers
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Norms:
    """Norms of ``sqrt(scale) x``, which is what a kernel sees: root of the mean square, and the largest."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Row:
    """One call of an attention in a pass.

    Args:
        call: number of the call in the pass; above 0 where layers share their weights.
        error: ``|core - exact|_F / |exact|_F`` of the output, at the original's queries, keys and values.
        predicted: expected relative error of the weights, see `predicted_error`; None where there is no formula.
    """

    name: str
    call: int
    method: str
    query: Norms
    key: Norms
    error: float
    heads: tuple[float, ...]
    predicted: float | None
    reason: str


@dataclass(frozen=True)
class Report:
    """Distance of a converted model from its original, see `measure`.

    Args:
        rows: by attention, in the order of the calls.
        hidden: relative error of the hidden states, before the first layer and after each: root of the mean, over real
            tokens, of ``|student - teacher|^2 / |teacher|^2``; under ``layers``, or ``encoder`` and ``decoder``.
        output: the same of the output: logits, or the last hidden state.
        agreement: share of tokens for which the largest logit is the same; None without logits.
        cosine: mean over texts between mean-pooled last hidden states; None for decoders.
        samples: texts.
        tokens: real ones.
        unseen: attentions inside `torch.nn.MultiheadAttention`, of which only the effect on the layers was measured.
        perplexity: of the next token, for causal language models; None for others.
        original_perplexity: the original's on the same tokens.
    """

    rows: tuple[Row, ...]
    hidden: dict[str, tuple[float, ...]]
    output: float
    agreement: float | None
    cosine: float | None
    samples: int
    tokens: int
    unseen: tuple[str, ...] = ()
    perplexity: float | None = None
    original_perplexity: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def worst_heads(self, count: int, names: Iterable[str]) -> dict[str, list[int]]:
        """Find the ``count`` heads with the largest errors among those of some attentions, by the attention's name."""
        wanted = set(names)
        errors: dict[tuple[str, int], float] = {}
        for row in self.rows:
            if row.name in wanted:
                for head, error in enumerate(row.heads):
                    errors[row.name, head] = max(error, errors.get((row.name, head), 0.0))
        return best_heads(errors, count)


def best_heads(scores: Mapping[tuple[str, int], float], count: int) -> dict[str, list[int]]:
    """Choose the ``count`` heads with the largest scores, by the attention's name; nan is the largest of all."""
    check_kept("heads", len(scores), count)
    chosen: dict[str, list[int]] = {}
    for name, head in sorted(scores, key=lambda x: math.inf if math.isnan(scores[x]) else scores[x], reverse=True)[
        :count
    ]:
        chosen.setdefault(name, []).append(head)
    return {name: sorted(heads) for name, heads in chosen.items()}


@torch.no_grad()
def measure(teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterable[Batch]) -> Report:
    """Run both models on the same inputs and compare them.

        report = measure(original, converted, [tokenizer(texts, padding=True, return_tensors="pt")])

    The original's attentions are watched: each core of the student attends to the same queries, keys and values, so
    that its own error is seen apart from what layers before it did. Then the student runs by itself, and its hidden
    states are compared with the original's: there errors add up (Performer, Fig. 14).

    Args:
        teacher: the original, not converted.
        student: the same model, converted.
        batches: of inputs, a few texts each.

    Raises:
        ValueError: a model that is not of transformers, one that was not converted, or no inputs.
    """
    for model in (teacher, student):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"models of transformers can be measured, got {type(model).__name__}.")
    errors = HiddenStateErrors.of(student)
    attentions = _Attentions(student)
    with evaluating(teacher, student):
        for batch in batches:
            with hearing(teacher, attentions.add):
                want = teacher(**batch, output_hidden_states=True)
            errors.add(batch, want, student(**batch, output_hidden_states=True))
    if not errors.samples:
        raise ValueError("nothing was measured: there was not one batch of inputs.")
    return Report(
        rows=attentions.rows(),
        hidden={part: tuple(math.sqrt(x.value or 0.0) for x in means) for part, means in errors.hidden.items()},
        output=math.sqrt(errors.output.value or 0.0),
        agreement=errors.agreement.value,
        cosine=errors.cosine.value,
        samples=errors.samples,
        tokens=errors.tokens,
        unseen=tuple(x.name for x in conversion(student).layers if x.way == "multihead"),
        perplexity=errors.perplexity(CONVERTED),
        original_perplexity=errors.perplexity(ORIGINAL),
    )


@dataclass
class CallErrors:
    """Errors of a core in calls of one attention, as sums over the real tokens, by head (H).

    Args:
        error: ``|core - exact|^2`` of the outputs.
        size: ``|exact|^2``.
        variance: expected squared errors of the weights of some queries, see `predicted_error`.
        reason: why there is no formula for the variance; "" where there is one.
    """

    error: Tensor
    size: Tensor
    variance: Tensor
    weight: Tensor
    reason: str

    @classmethod
    def of(cls, call: AttentionCall, core: AttentionCore) -> CallErrors:
        """Measure a core on the inputs of a call whose output is known."""
        assert call.output is not None
        query, key, none = call.query, call.key, torch.zeros(call.query.shape[1], dtype=torch.float64)
        key_mask, causal = call.visible()
        real = call.real
        off = kept_tokens((call.attend(core).double() - call.output.double()).square().sum(-1), real)
        size = kept_tokens(call.output.double().square().sum(-1), real)
        errors = cls(off.sum(0).cpu(), size.sum(0).cpu(), none, none, "near tokens exactly")
        if core.has_near:
            return errors
        length = query.shape[2]
        some = torch.linspace(0, length - 1, min(length, QUERIES)).long().unique().to(query.device)
        how: dict[str, Any] = {"position_bias": call.options.get("position_bias"), "rows": some, "scale": call.scale}
        weights = attention_weights(query.double(), key.double(), causal=causal, key_mask=key_mask, **how)
        if real is not None:
            weights = weights * real[:, None, some, None]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        variance = predicted_error(core, query[:, :, some], key, weights, call.scale)
        if isinstance(variance, str):
            return replace(errors, reason=variance)
        return replace(errors, variance=variance, weight=weights.square().sum((0, 2, 3)).cpu(), reason="")

    def __add__(self, other: CallErrors) -> CallErrors:
        """Errors of both."""
        sums = {x: getattr(self, x) + getattr(other, x) for x in ("error", "size", "variance", "weight")}
        return replace(other, **sums)

    def relative(self, head: int | slice = slice(None)) -> float:
        """Relative error of the outputs, of a head or of all together."""
        return _ratio(self.error[head].sum(), self.size[head].sum())

    @property
    def predicted(self) -> float | None:
        """Expected relative error of the weights; None where there is no formula."""
        return None if self.reason else min(CEILING, _ratio(self.variance.sum(), self.weight.sum()))


def _ratio(error: Tensor, size: Tensor) -> float:
    return float((error / size.clamp(min=1e-300)).sqrt())


def kept_tokens(x: Tensor, real: Tensor | None) -> Tensor:
    """Numbers of all tokens without those of padding, (B, L, ...) -> (N, ...)."""
    return x.flatten(0, 1) if real is None else x[real.expand(x.shape[:2])]


@dataclass
class _NormSums:
    """Sums over all batches that `Norms` are made of."""

    squares: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, x: Tensor, scale: float, real: Tensor | None) -> None:
        """Count in vectors (B, H, L, D)."""
        norms = kept_tokens(x.float().square().sum(-1).transpose(1, 2) * scale, real)
        self.squares += float(norms.sum(dtype=torch.float64))
        self.count += norms.numel()
        self.largest = max(self.largest, math.sqrt(float(norms.max())))

    @property
    def norms(self) -> Norms:
        return Norms(math.sqrt(self.squares / max(1, self.count)), self.largest)


class _Attentions:
    """Errors of a student's cores, and norms, at the queries, keys and values of the original's attentions."""

    def __init__(self, student: PreTrainedModel) -> None:
        self.student, self.cores = student, cores(student)
        self.layers = {x.name: x for x in conversion(student).layers}
        self.errors: dict[tuple[str, int], CallErrors] = {}
        self.norms: defaultdict[tuple[str, int], tuple[_NormSums, _NormSums]] = defaultdict(
            lambda: (_NormSums(), _NormSums())
        )

    def rows(self) -> tuple[Row, ...]:
        rows = []
        for (name, call), x in self.errors.items():
            query, key = self.norms[name, call]
            heads = tuple(x.relative(i) for i in range(len(x.error)))
            method = self.layers[name].method
            rows.append(Row(name, call, method, query.norms, key.norms, x.relative(), heads, x.predicted, x.reason))
        return tuple(rows)

    def add(self, call: AttentionCall) -> None:
        if call.name not in self.layers:
            raise ValueError(f"the original attends in {call.name}, which the converted model does not have.")
        if call.name not in self.cores:  # it was kept: there is no core to compare
            return
        place, call = (call.name, call.call), replace(call, module=self.student.get_submodule(call.name))
        errors = CallErrors.of(call, self.cores[call.name])
        self.errors[place] = self.errors[place] + errors if place in self.errors else errors
        inputs = (call.query, call.key), (call.real, call.visible()[0])
        for sums, x, real in zip(self.norms[place], *inputs, strict=True):
            sums.add(x, call.scale, real)
