"""Losses of distillation: distances of attention, hidden states and outputs from the original's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec
from kernelformer.hf.attend import bias_table
from kernelformer.hf.convert import conversion
from kernelformer.modules import AttentionCore, KernelCore, MixedCore
from kernelformer.modules.calibration import evaluating

ROWS = 128  # of a text's queries in a step of transfer: more texts teach more than more rows of one
POOLED = 5.0  # weight of the mean output: small beside the errors of single tokens, and what embeddings are made of
TINY = 1e-30
HIDDEN = -1e30  # the logarithm of a weight that is none; an infinity would make 0 * inf of it


def attention_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    *,
    seed: int = 0,
    turn: int = 0,
    window_dropout: float = 0.0,
) -> Tensor:
    """Distance of a core from exact attention at these inputs, a number; see `transfer` for the formula.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        key_mask: (B, S) bool, True = attend; where queries and keys are equally many, padded queries do not count.
        scaling: of the product q . k; default 1 / sqrt(D).
        position_bias: (1, H, L, S).
        turn: which rows in that order: the first `ROWS`, the next ones, and so on, round and round.
        window_dropout: share of the rows in which near keys get the map's weights too, so that it learns all of them.
    """
    if isinstance(core, MixedCore):
        query, key, value = (core._split(x, 1) for x in (query, key, value))
        position_bias = None if position_bias is None else position_bias[:, core.heads[1]]
        core = core.linear
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert isinstance(core, KernelCore)
    groups = query.shape[1] // key.shape[1]
    inputs = (query, key, value)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    L, S = query.shape[2], key.shape[2]
    real = torch.ones(query.shape[0], L, dtype=torch.bool, device=query.device)
    if key_mask is not None and L == S:
        real = key_mask
    whole = not isinstance(core.feature_map.spec, PositiveSpec) or core.feature_map.sees_sequence or not core.normalize
    gen = torch.Generator().manual_seed(seed)
    rows = torch.arange(L)
    if not whole and L > ROWS:
        rows = torch.randperm(L, generator=gen)[(torch.arange(ROWS) + turn * ROWS) % L].sort().values
    rows = rows.to(query.device)
    seen = torch.ones(1, 1, len(rows), S, dtype=torch.bool, device=query.device)
    if causal:
        seen = (torch.arange(S, device=query.device) <= rows.unsqueeze(1))[None, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    with torch.no_grad():
        scores = (query[:, :, rows] @ key.transpose(2, 3)) * scale
        logits = scores if position_bias is None else scores + position_bias[:, :, rows]
        wanted = logits.masked_fill(~seen, -torch.inf).log_softmax(-1)
        share = wanted.exp()
    if whole:
        return _output_loss(core, inputs, share @ value, key_mask, causal, position_bias, real)
    weights, row_logs = _weights(core, query[:, :, rows], key, key_mask)
    extra = None if position_bias is None else position_bias[:, :, rows]
    if core.has_near:
        far = weights.clamp_min(TINY).log() + row_logs
        alone = torch.rand(len(rows), generator=gen).to(query.device) < window_dropout
        assert core.near is not None
        if core.normalize_qk or core.near.scale_of(core.scale) != scale:
            q, k = core._normalize_qk(query, key, key_mask)
            scores = q[:, :, rows] @ k.transpose(2, 3) * core.near.scale_of(core.scale)
        approximate = _near_and_far(core, scores, key_mask, rows, alone, far, extra).masked_fill(~seen, HIDDEN)
        mass = approximate.logsumexp(-1)
    else:
        weights = weights if extra is None else weights * (extra - extra.amax((2, 3), keepdim=True)).exp()
        weights = weights.masked_fill(~seen, 0)
        approximate, mass = weights.clamp_min(TINY).log(), weights.sum(-1).clamp_min(TINY).log()
    # sum_j p_j (log p_j - log w_j) + log sum_j w_j: each matrix is gone through as few times as can be.
    terms = mass - (share * approximate).sum(-1) + (share * wanted.clamp_min(HIDDEN)).sum(-1)  # (B, H, rows)
    counts = (real[:, None, rows] & seen.any(-1)).expand_as(terms)
    return torch.where(counts, terms, 0).sum() / counts.sum().clamp_min(1)


def _near_and_far(
    core: KernelCore,
    scores: Tensor,
    key_mask: Tensor | None,
    rows: Tensor,
    alone: Tensor,
    far: Tensor,
    position_bias: Tensor | None,
) -> Tensor:
    """Logarithms of the weights of some rows, (B, H, rows, S): exact ones of near keys, those of the map elsewhere.

    Args:
        scores: of the near keys, (B, H, rows, S).
        alone: (rows) bool, those without near keys.
        far: log phi(q) phi(k), (B, H, rows, S).
    """
    places = torch.arange(scores.shape[-1], device=rows.device, dtype=torch.int32)
    near = (places - rows.unsqueeze(1).int()).abs() < (core.window or 0)
    if core.sinks:
        first = places < core.sinks if key_mask is None else key_mask & (key_mask.cumsum(-1) <= core.sinks)
        near = near | (first if key_mask is None else first[:, None, None])
    far = far if core.beta is None else far + core.beta[:, None, None]
    weights = torch.where(near & ~alone.unsqueeze(-1), scores, far)
    return weights if position_bias is None else weights + position_bias


def _weights(core: KernelCore, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights phi(q) phi(k) (B, H, L, S) up to a factor for each row, and its logarithm (B, H, L, 1).

    Keys are (B, H, S, D). What cancels under normalization is left out, unless near keys share it.
    """
    phi, scale = core.feature_map, core.scale
    query, key = core._normalize_qk(query, key, key_mask)
    spec = phi.spread_spec
    assert isinstance(spec, PositiveSpec)
    tensors = phi.for_query_heads(phi.prepare(query, key, key_mask, scale))
    features = spec.log_features if core.has_near else spec.log_shares
    logs_q, logs_k = features(query, tensors, scale, "query"), features(key, tensors, scale, "key")
    visible = logs_k.detach()
    if key_mask is not None:
        visible = visible.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    top_k = visible.amax(2, keepdim=True).clamp_min(-1e30)  # of each feature, as the algorithms do
    logs_q = logs_q + top_k
    top_q = logs_q.detach().amax(3, keepdim=True)
    return (logs_q - top_q).exp() @ (logs_k - top_k).clamp_max(0).exp().transpose(2, 3), top_q


def _output_loss(
    core: AttentionCore,
    inputs: tuple[Tensor, Tensor, Tensor],
    wanted: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    position_bias: Tensor | None,
    real: Tensor,
) -> Tensor:
    table = bias_table(position_bias)
    extra: dict[str, Any] = {} if table is None else {"bias": table}
    if table is not None and isinstance(core, KernelCore) and core.has_near:
        extra["max_distance"] = core.window or 0
    out = core(*inputs, is_causal=causal, key_mask=key_mask, **extra)
    counts = real[:, None, :, None]
    loss: Tensor = ((out - wanted.nan_to_num()).square() * counts).sum() / (
        (wanted.nan_to_num().square() * counts).sum().clamp_min(TINY)
    )
    return loss


def output_loss(outputs: Any, wanted: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Distance of outputs and hidden states from the original's, a number; see `tune` for the formula."""
    mask = inputs.get("attention_mask")
    masks = {"decoder_hidden_states": inputs.get("decoder_attention_mask")}
    total: Tensor | float = 0.0
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if wanted.get(name) is None:
            continue
        layers = list(zip(outputs[name], wanted[name], strict=True))[1:]
        real = masks.get(name, mask)
        total = total + sum((_relative(a, b, real) for a, b in layers), torch.tensor(0.0)) / max(1, len(layers))
    real = masks["decoder_hidden_states"] if wanted.get("decoder_hidden_states") is not None else mask
    name = next((x for x in ("logits", "prediction_logits") if wanted.get(x) is not None), "")
    if name:
        logits = wanted[name]
        kl = nn.functional.kl_div(
            outputs[name].float().log_softmax(-1), logits.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return total + (kl.mean() if real is None or real.shape != kl.shape else (kl * real).sum() / real.sum())
    last = wanted.get("last_hidden_state")
    if last is None:
        return torch.as_tensor(total)  # hidden states alone
    real = real if real is not None and real.shape == last.shape[:2] else None
    ours, theirs = (pooled(x.float(), real) for x in (outputs["last_hidden_state"], last))
    return total + POOLED * (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())


def _relative(hidden: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Squared error over the squared distance from the mean, of real tokens."""
    hidden, wanted = hidden.float(), wanted.float()
    off, size = (hidden - wanted).square().sum(-1), (wanted - wanted.mean()).square().sum(-1)
    if mask is not None and mask.shape == off.shape:
        off, size = off * mask, size * mask
    return off.sum() / size.sum().clamp_min(TINY)


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the hidden states of real tokens, (B, L, d) -> (B, d)."""
    if mask is None:
        return hidden.mean(1)
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)


ORIGINAL, CONVERTED = "original", "converted"
NEAR, KERNEL = "window and sinks alone", "kernel alone"
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")


@dataclass
class Mean:
    """Running mean of any number of values."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Count these values in, of any shape."""
        self.total += float(values.sum(dtype=torch.float64))
        self.count += values.numel()

    @property
    def value(self) -> float | None:
        """The mean; None where there were no values."""
        return self.total / self.count if self.count else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    return float(torch.tensor(values, dtype=torch.float64).std() / math.sqrt(len(values)))


class HiddenStateErrors:
    """Errors of a converted model that runs by itself: after each layer, and of its output."""

    def __init__(self, pools: bool, predicts: bool = False) -> None:
        self.pools, self.predicts = pools, predicts
        self.hidden: dict[str, list[Mean]] = {}
        self.output, self.agreement, self.cosine = Mean(), Mean(), Mean()
        self.losses = {ORIGINAL: Mean(), CONVERTED: Mean()}  # of the next token
        self.right: dict[str, list[Tensor]] = {ORIGINAL: [], CONVERTED: []}  # hidden tokens that are found
        self.samples = self.tokens = 0

    @classmethod
    def of(cls, student: Any) -> HiddenStateErrors:
        """Make those for a converted model: encoders are pooled, causal language models predict."""
        alone, causal = not student.config.is_encoder_decoder, any(x.causal for x in conversion(student).layers)
        return cls(alone and not causal, alone and causal and student.can_generate())

    def add(self, batch: Mapping[str, Any], want: Any, got: Any, answers: Tensor | None = None) -> None:
        """Count in a batch.

        Args:
            answers: tokens (B, L) before some were hidden, for masked models; None: not known.
        """
        mask = batch.get("attention_mask")
        masks = {"decoder": batch.get("decoder_attention_mask")}
        for part in ("encoder", "decoder", "layers"):
            name = "hidden_states" if part == "layers" else f"{part}_hidden_states"
            wanted, ours = getattr(want, name, None), getattr(got, name, None)
            if wanted is None or ours is None:
                continue
            means = self.hidden.setdefault(part, [Mean() for _ in wanted])
            for mean, x, y in zip(means, wanted, ours, strict=True):
                mean.add(_relative_error(x, y, masks.get(part, mask)))
            if self.pools and part == "layers":
                real = None if mask is None or mask.shape != wanted[-1].shape[:2] else mask
                self.cosine.add(torch.cosine_similarity(pooled(wanted[-1], real), pooled(ours[-1], real)))
        name = output_name(want)
        x, y = getattr(want, name), getattr(got, name)
        over = masks["decoder"] if "decoder" in self.hidden else mask
        self.output.add(_relative_error(x, y, over))
        if "logits" in name:
            self.agreement.add(_kept_tokens((x.argmax(-1) == y.argmax(-1)).double(), over))
        if self.predicts and "input_ids" in batch:
            for which, logits in ((ORIGINAL, x), (CONVERTED, y)):
                self.losses[which].add(next_token_losses(logits, batch["input_ids"], mask))
        if answers is not None:
            hidden = answers != batch["input_ids"]
            for which, logits in ((ORIGINAL, x), (CONVERTED, y)):
                self.right[which].append((logits.argmax(-1) == answers)[hidden].double())
        inputs = next(iter(batch.values()))
        self.samples += len(inputs)
        self.tokens += int(mask.sum()) if mask is not None else inputs.numel() if inputs.dim() == 2 else 0

    def perplexity(self, which: str) -> float | None:
        """Perplexity of the next token, of the `ORIGINAL` or the `CONVERTED` model; None if it was not measured."""
        loss = self.losses[which].value
        return None if loss is None else float(torch.tensor(loss, dtype=torch.float64).exp())

    def accuracy(self, which: str) -> float | None:
        """Share of hidden tokens that a model finds; None if it was not measured."""
        values = torch.cat(self.right[which] or [torch.empty(0)])
        return float(values.mean()) if len(values) else None

    def figures(self) -> Figures:
        """Figures of the converted model."""
        differences = [x - y for x, y in zip(self.right[CONVERTED], self.right[ORIGINAL], strict=True)]
        return Figures(
            perplexity=self.perplexity(CONVERTED),
            accuracy=self.accuracy(CONVERTED),
            accuracy_error=standard_error(torch.cat(differences).tolist()) if differences else None,
            agreement=self.agreement.value,
            cosine=self.cosine.value,
            output=math.sqrt(self.output.value or 0.0),
        )


def next_token_losses(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Losses ``-log p`` of every real token after the first, (N).

    Args:
        logits: (B, L, V).
        ids: (B, L).
        mask: (B, L), 1 = real; None: all are.
    """
    losses = F.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    return losses if mask is None else losses[(mask[:, 1:] * mask[:, :-1]).bool()]


def output_divergence(batch: Mapping[str, Any], want: Any, got: Any) -> float:
    """Distance of the outputs of a model from those of the original, in one number.

    mean over tokens of  KL(softmax(want) || softmax(got))      logits, (B, L, V) or (B, V)
    mean over tokens of  |got - want|^2 / |want|^2              hidden states, and logits of a single number
    """
    name = output_name(want)
    x, y = getattr(want, name), getattr(got, name)
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    if "logits" not in name or x.shape[-1] == 1:
        return float(_relative_error(x, y, mask).mean())
    ours, theirs = (z.float().log_softmax(-1) for z in (y, x))
    return float(_kept_tokens(F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1), mask).mean())


def output_name(outputs: Any) -> str:
    """Name the output of a model that is compared."""
    name = next((x for x in OUTPUTS if getattr(outputs, x, None) is not None), "")
    if not name:
        raise ValueError(f"the model returns none of {', '.join(OUTPUTS)}, so that there is nothing to compare.")
    return name


def _kept_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Numbers of tokens, (B, L), without those of padding; other shapes, such as one number a sample, stay whole.

    Numbers, not vectors: logits of a sample, (B, V), have the shape of a mask where classes are as many as tokens.
    """
    return x if mask is None or x.shape != mask.shape else x[mask.bool()]


def _relative_error(want: Tensor, got: Tensor, mask: Tensor | None) -> Tensor:
    """Squared relative error of each real token, (B, L, d) -> (N)."""
    want, got = want.double(), got.double()
    return _kept_tokens((got - want).square().sum(-1) / want.square().sum(-1).clamp(min=1e-300), mask)


Batch = Mapping[str, Any]
RATIO, COSINE = "perplexity ratio", "cosine"
TOLERANCE = {RATIO: 1.25, COSINE: 0.98}
LEAST = 1e-5  # a loss below it is rounding


@dataclass(frozen=True)
class Figures:
    """Figures of a whole model beside its original; None where a model has none of the kind.

    Args:
        perplexity: of the next token, of causal language models.
        accuracy: share of hidden tokens that the model finds, of masked models.
        accuracy_error: standard error of the difference of ``accuracy`` from the original's, token by token.
        agreement: share of tokens whose likeliest one is the original's.
        cosine: mean cosine of mean outputs to the original's, of encoders.
    """

    perplexity: float | None = None
    accuracy: float | None = None
    accuracy_error: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    output: float | None = None


@dataclass(frozen=True)
class Figure:
    """Distance of a converted model from its original, in one figure.

    Args:
        kind: `RATIO`, of the perplexities of the next token, for causal language models; `COSINE` of mean-pooled last
            hidden states, mean over texts, for all others.
        value: 1 is the original.
    """

    kind: str
    value: float
    agreement: float | None = None

    @property
    def loss(self) -> float:
        """Distance from the original: the logarithm of the ratio, or 1 - cosine; at least 1e-5."""
        if not math.isfinite(self.value):
            return math.inf
        return max(LEAST, math.log(self.value) if self.kind == RATIO else 1 - self.value)

    def within(self, tolerance: float) -> bool:
        """Return True if it is at least as near as a figure of the same kind."""
        return self.value <= tolerance if self.kind == RATIO else self.value >= tolerance

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.kind} {self.value:.3f}" if self.kind == RATIO else f"{self.kind} {self.value:.4f}"


def value_of_loss(kind: str, loss: float) -> float:
    """The value of a figure of this loss, the inverse of `Figure.loss`."""
    return math.exp(min(loss, 700.0)) if kind == RATIO else 1 - loss


class Reference:
    """The original's outputs on some inputs, kept as little as it takes to compare another model with them."""

    def __init__(self, model: Any, batches: Sequence[Batch], *, predicts: bool) -> None:
        self.kind = RATIO if predicts else COSINE
        self.batches = list(batches)
        self.wanted = [_digest(model, x, predicts) for x in self.batches]

    def figure(self, model: Any) -> Figure:
        """Run another model on the same inputs and compare it."""
        found = [_digest(model, x, self.kind == RATIO) for x in self.batches]
        ours, theirs = (torch.cat([x for x, _ in some]).double() for some in (found, self.wanted))
        if self.kind == RATIO:
            value = math.exp(min(700.0, float(ours.mean() - theirs.mean())))
        else:
            value = float(torch.cosine_similarity(ours, theirs, dim=-1).mean())
        likeliest = [torch.eq(a, b) for (_, a), (_, b) in zip(found, self.wanted, strict=True) if a is not None]
        return Figure(self.kind, value, float(torch.cat(likeliest).double().mean()) if likeliest else None)


@torch.no_grad()
def _digest(model: Any, batch: Batch, predicts: bool) -> tuple[Tensor, Any]:
    """Losses (N) or pooled states (B, d) of a batch; and the likeliest token of each real one, None without logits."""
    with evaluating(model):
        out = model(**batch, output_hidden_states=not predicts)
    mask = batch.get("attention_mask")
    logits: Any = getattr(out, "logits", None)
    likeliest = None if logits is None or logits.dim() != 3 else _kept_tokens(logits.argmax(-1), mask).flatten()
    if predicts:
        return next_token_losses(logits, batch["input_ids"], mask).flatten(), likeliest
    hidden = out.hidden_states[-1]
    fits = mask is not None and mask.shape == hidden.shape[:2]
    return pooled(hidden, mask if fits else None), likeliest
