"""Distance of a converted model from its original: attention by attention, and layer after layer as errors add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernelformer.attention.reference import near_keys
from kernelformer.conversion.losses import HiddenStateErrors
from kernelformer.errors import choice, number, shape
from kernelformer.hf.attend import attend, attend_exactly, read_mask
from kernelformer.hf.convert import EXACT, Layer, check_kept, conversion, cores
from kernelformer.hf.find import probing
from kernelformer.kernels import gaussian_kernel, softmax_kernel
from kernelformer.modules import AttentionCore, MixedCore
from kernelformer.modules.evaluating import evaluating

KERNELS = {"softmax": softmax_kernel, "gaussian": gaussian_kernel}


@torch.no_grad()
def score_spectrum(query: Tensor, key: Tensor, kernel: str, scale: float | None = None) -> Tensor:
    """Singular values of the scores before normalization, descending, by SVD in float64.

        exp(scale q_i . k_j)  or  exp(-scale |q_i - k_j|^2 / 2)

    Args:
        query: (*, L, D).
        key: (*, S, D).
        kernel: ``softmax`` or ``gaussian``.
        scale: default 1 / sqrt(D).

    Returns:
        (*, min(L, S)).
    """
    choice("kernel", kernel, KERNELS)
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(f"a spectrum needs queries and keys, got shapes {shape(query)} and {shape(key)}.")
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    values: Tensor = torch.linalg.svdvals(KERNELS[kernel](query.double() * root, key.double() * root))
    return values


def condition_number(singular: Tensor, rank: float = 1.0) -> Tensor:
    """The largest singular value over the one at a share ``rank`` of the spectrum, (*); 1 is the smallest of all.

    Float64 resolves ratios up to about 1e16. Smaller shares say how fast the spectrum falls where that is not enough.
    """
    share = number("rank", rank, above=0)
    if share > 1:
        raise ValueError(f"rank is a share of the spectrum, at most 1, got {rank}.")
    last = max(1, round(share * singular.shape[-1])) - 1
    return singular[..., 0] / singular[..., last]


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
    norm = score_spectrum(query, key, "gaussian", scale)[..., :1]
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
        key: the same of keys.
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
    """Measure what the heads of an attention look at.

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

    return AttentionProfile(
        query=_plain(norms(query)),
        key=_plain(norms(key)),
        near={w: _plain(share(w, 0)) for w in WINDOWS},
        first={s: _plain(share(0, s)) for s in SINKS},
        far=_plain(1 - share(WINDOWS[1], SINKS[1])),
        dimension=_plain(_dimension(query, key, scale, real)),
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
        scale: of the product.
        causal: whether query i sees keys up to i alone.
        key_mask: (B, S) bool; None: all keys are real.
        position_bias: (1, H, L, S).
        rows: (N), which queries; None: all.

    Returns:
        (B, H, N or L, S).
    """
    rows = torch.arange(query.shape[2], device=query.device) if rows is None else rows
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query[:, :, rows] @ key.mT * scale
    logits = logits if position_bias is None else logits + position_bias[:, :, rows]
    if causal:
        logits = logits.masked_fill(torch.arange(key.shape[2], device=key.device) > rows.unsqueeze(1), -math.inf)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -math.inf)
    return logits.softmax(-1).nan_to_num()


def _dimension(query: Tensor, key: Tensor, scale: float, real: Tensor) -> Tensor:
    """Statistical dimension (H) of evenly spread real tokens of the first sample."""
    tokens = real[0].nonzero().flatten()
    some = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), TOKENS)).long()]
    return statistical_dimension(query[0, :, some], key[0, :, some], [EPSILON], scale)[:, 0]


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
        core: of all heads.
        query: (B, H, L, D).
        key: (B, H, S, D).
        weights: (B, H, L, S), A.
        scale: the model's.

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
    """Why there is no formula for the variance of a core, or None; not of a mixed one."""
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


QUERIES = 32  # of each text, evenly spread, whose weights are compared: all would be L x L numbers
FLOOR = 1e-9  # of a weight in a divergence: signed maps have weights of 0 and below
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
        name: of the attention.
        call: number of the call in the pass; above 0 where layers share their weights.
        method: `EXACT` where it was kept.
        query: norms of the queries, of all heads and real tokens.
        key: norms of the keys.
        error: ``|core - exact|_F / |exact|_F`` of the output, at the original's queries, keys and values.
        heads: the same of each head.
        predicted: expected relative error of the weights, see `predicted_error`; None where there is no formula.
        reason: why there is none.
        divergence: mean KL of the rows of weights, exact against approximate; None where nobody asked.
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
    divergence: float | None


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
        worst: dict[str, list[int]] = {}
        for name, head in _largest(errors, count):
            worst.setdefault(name, []).append(head)
        return {name: sorted(heads) for name, heads in worst.items()}


def _largest(errors: Mapping[Any, float], count: int) -> list[Any]:
    check_kept("heads", len(errors), count)
    # nan is the largest error of all
    return sorted(errors, key=lambda x: math.inf if math.isnan(errors[x]) else errors[x], reverse=True)[:count]


@torch.no_grad()
def measure(
    teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterable[Batch], *, divergence: bool = False
) -> Report:
    """Run both models on the same inputs and compare them.

        report = measure(original, converted, [tokenizer(texts, padding=True, return_tensors="pt")])

    The original's attentions are watched: each core of the student attends to the same queries, keys and values, so
    that its own error is seen apart from what layers before it did. Then the student runs by itself, and its hidden
    states are compared with the original's: there errors add up (Performer, Fig. 14).

    Args:
        teacher: the original, not converted.
        student: the same model, converted.
        batches: of inputs, a few texts each.
        divergence: measure the KL of the weights too; takes L x L numbers for each head.

    Raises:
        ValueError: a model that is not of transformers, one that was not converted, or no inputs.
    """
    for model in (teacher, student):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"models of transformers can be measured, got {type(model).__name__}.")
    layers = conversion(student).layers
    alone, causal = not student.config.is_encoder_decoder, any(x.causal for x in layers)
    errors = HiddenStateErrors(pools=alone and not causal, predicts=alone and causal and student.can_generate())
    watch = _Watch(teacher, student, divergence)
    with evaluating(teacher, student):
        for batch in batches:
            watch.start()
            with probing(teacher, watch):
                want = teacher(**batch, output_hidden_states=True)
            errors.add(batch, want, student(**batch, output_hidden_states=True))
    if not errors.samples:
        raise ValueError("nothing was measured: there was not one batch of inputs.")
    return Report(
        rows=watch.rows(),
        hidden={part: tuple(math.sqrt(x.value or 0.0) for x in means) for part, means in errors.hidden.items()},
        output=math.sqrt(errors.output.value or 0.0),
        agreement=errors.agreement.value,
        cosine=errors.cosine.value,
        samples=errors.samples,
        tokens=errors.tokens,
        unseen=tuple(x.name for x in layers if x.way == "multihead"),
        perplexity=errors.perplexity("converted"),
        original_perplexity=errors.perplexity("original"),
    )


@dataclass
class _Sums:
    """Sums over all batches that a `Row` is made of."""

    layer: Layer
    error: Tensor
    size: Tensor
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of queries, of keys
    counts: list[int] = field(default_factory=lambda: [0, 0])
    largest: list[float] = field(default_factory=lambda: [0.0, 0.0])
    variance: float = 0.0
    weight: float = 0.0
    reason: str = ""
    divergence: float = 0.0
    rows: int = 0

    def row(self, name: str, call: int, divergence: bool) -> Row:
        query, key = (
            Norms(math.sqrt(s / max(1, n)), top)
            for s, n, top in zip(self.squares, self.counts, self.largest, strict=True)
        )
        return Row(
            name=name,
            call=call,
            method=self.layer.method,
            query=query,
            key=key,
            error=_ratio(self.error.sum(), self.size.sum()),
            heads=tuple(_ratio(x, y) for x, y in zip(self.error, self.size, strict=True)),
            predicted=None if self.reason else min(CEILING, math.sqrt(self.variance / max(self.weight, 1e-300))),
            reason=self.reason,
            divergence=self.divergence / max(1, self.rows) if divergence else None,
        )


def _ratio(error: Tensor, size: Tensor) -> float:
    return float((error / size.clamp(min=1e-300)).sqrt())


class _Watch:
    """Attention of the original that has the student's cores attend to the same queries, keys and values."""

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel, divergence: bool) -> None:
        self.names = {id(module): name for name, module in teacher.named_modules()}
        self.student, self.cores, self.divergence = student, cores(student), divergence
        self.layers = {x.name: x for x in conversion(student).layers}
        self.sums: dict[tuple[str, int], _Sums] = {}
        self.calls: Counter[str] = Counter()

    def start(self) -> None:
        """Begin a new pass: calls count from 0."""
        self.calls.clear()

    def rows(self) -> tuple[Row, ...]:
        return tuple(sums.row(name, call, self.divergence) for (name, call), sums in self.sums.items())

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = self.names[id(module)]
        if name not in self.cores:
            if name in self.layers:  # kept as it was: there is no core to compare
                return attend_exactly(module, query, key, value, mask, **options)
            raise ValueError(f"the original attends in {name}, which the converted model does not have.")
        exact, _ = attend_exactly(module, query, key, value, mask, **options)
        layer, core = self.layers[name], self.cores[name]
        approximate, weights = attend(
            core,
            self.student.get_submodule(name),
            query,
            key,
            value,
            mask,
            **{**options, "output_attentions": self.divergence},
        )
        call = (name, self.calls[name])
        self.calls[name] += 1
        none = torch.zeros(layer.num_heads, dtype=torch.float64)
        sums = self.sums.setdefault(call, _Sums(layer, none, none.clone()))
        key_mask, causal = read_mask(mask, query, key, layer.causal)
        seen = None if key_mask is None else key_mask[:, None, None]
        if causal:
            seen = _causal(seen, query, key)
        real = key_mask if query.shape[2] == key.shape[2] else None
        self._errors(sums, approximate, exact, real)
        for i, (x, kept) in enumerate(((query, real), (key, key_mask))):
            norms = _kept(x.float().square().sum(-1).transpose(1, 2) * layer.scale, kept)
            sums.squares[i] += float(norms.sum(dtype=torch.float64))
            sums.counts[i] += norms.numel()
            sums.largest[i] = max(sums.largest[i], math.sqrt(float(norms.max())))
        self._weights(sums, core, query, key, seen, real, options.get("position_bias"), weights)
        return exact, None

    @staticmethod
    def _errors(sums: _Sums, approximate: Tensor, exact: Tensor, real: Tensor | None) -> None:
        for total, x in ((sums.error, approximate.double() - exact.double()), (sums.size, exact.double())):
            total += _kept(x.square().sum(-1), real).sum(0).cpu()

    def _weights(
        self,
        sums: _Sums,
        core: AttentionCore,
        query: Tensor,
        key: Tensor,
        seen: Tensor | None,
        real: Tensor | None,
        bias: Tensor | None,
        approximate: Tensor | None,
    ) -> None:
        """Count in the predicted error and the divergence, by the exact weights of some queries.

        Args:
            sums: to count into.
            core: of the student.
            query: (B, H, L, D).
            key: (B, G, S, D).
            seen: which keys each query sees, (B or 1, 1, 1 or L, S); None: all.
            real: (B, L), which queries are no padding; None: all.
            bias: (1, H, L, S), added to the logits.
            approximate: weights of the core (B, H, L, S), where the divergence is wanted.
        """
        if sums.reason and approximate is None:
            return
        length = query.shape[2]
        some = torch.linspace(0, length - 1, min(length, QUERIES)).long().unique()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        query = query[:, :, some]
        logits = (query.double() @ key.double().mT) * sums.layer.scale
        if bias is not None:
            logits = logits + bias[:, :, some]
        if seen is not None:
            logits = logits.masked_fill(~(seen if seen.shape[2] == 1 else seen[:, :, some]), -math.inf)
        weights = logits.softmax(-1).nan_to_num()
        if real is not None:
            weights = weights * real[:, None, some, None]
        variance = predicted_error(core, query, key, weights, sums.layer.scale)
        if isinstance(variance, str):
            sums.reason = variance
        else:
            sums.variance += float(variance.sum())
            sums.weight += float(weights.square().sum())
        if approximate is not None:
            near = approximate[:, :, some].double().clamp(min=FLOOR)
            sums.divergence += float(torch.special.xlogy(weights, weights / near).sum())
            sums.rows += int((weights > 0).any(-1).sum())


def _kept(x: Tensor, real: Tensor | None) -> Tensor:
    """Numbers of all tokens without those of padding, (B, L, ...) -> (N, ...)."""
    return x.flatten(0, 1) if real is None else x[real.expand(x.shape[:2])]


def _causal(keys: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Mask of the keys that each query sees, (B or 1, 1, L, S)."""
    L, S = query.shape[2], key.shape[2]
    past = torch.ones(L, S, dtype=torch.bool, device=query.device).tril(S - L)[None, None]
    return past if keys is None else past & keys
