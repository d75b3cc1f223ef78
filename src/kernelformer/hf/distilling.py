"""What conversion has cost, won back: maps fitted to the original's attention, then everything to its outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernelformer.contract import PositiveSpec
from kernelformer.hf.attend import bias_table
from kernelformer.hf.attentions import probing
from kernelformer.hf.converting import conversion, cores
from kernelformer.modules import AttentionCore, KernelCore, MixedCore

Batches = Iterator[Mapping[str, Tensor]]
Tell = Callable[[int, float], None]
ROWS = 128  # of a text's queries that a step of transfer looks at: more texts teach more than more rows of one
WARM_UP = 20
POOLED = 5.0  # weight of the mean output: small beside the errors of single tokens, and what embeddings are made of
TINY = 1e-30


def learned(student: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of the maps of a converted model, by the names of its attentions."""
    found = {x.name: x for x in conversion(student).layers if x.replaced}
    maps = {name: list(core.parameters()) for name, core in cores(student).items() if name in found}
    return {name: own for name, own in maps.items() if own}


def learns(student: nn.Module) -> bool:
    """Whether there is anything in its maps to fit."""
    return bool(learned(student))


class _Seen:
    """Queries, keys, values, mask and bias of the original's attentions, call by call."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        name = self.names.get(id(module))
        if name is not None:
            wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in (query, key, value)]
            self.calls.append((name, (*wide, mask, options.get("scaling"), options.get("position_bias"))))
        return sdpa_attention_forward(module, query, key, value, mask, **options)


def transfer(
    student: nn.Module,
    teacher: PreTrainedModel,
    batches: Batches,
    *,
    steps: int,
    lr: float = 5e-2,
    seconds: float | None = None,
    autocast: torch.dtype | None = None,
    tell: Tell | None = None,
) -> list[float]:
    """Attention transfer: fit the maps of a converted model to the original's attention; the backbone stays.

    All layers at once: one pass of the original shows the queries, keys and values of each. The loss of a layer is

        mean over rows i, heads of  KL(softmax(scale q_i k_j + b_ij) || phi(q_i) phi(k_j) exp(b_ij) / sum)

    with positive features, over some of the rows; with signed ones, whose weights have no logarithm, the squared error
    of the outputs relative to their size.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: inputs of the models, without end.
        steps: at most.
        lr: of Adam, at its peak; it falls to nothing by a cosine.
        seconds: at most, if given; the schedule then follows the clock.
        autocast: the precision of the original's pass, such as ``torch.bfloat16``; maps are fitted in their own.
        tell: called after each step with its number and the mean loss of the layers.

    Returns:
        The mean loss of the layers, step by step.

    Raises:
        ValueError: there is nothing in the maps to learn.
    """
    own = learned(student)
    if not own:
        methods = ", ".join(sorted({x.method for x in conversion(student).layers if x.replaced})) or "nothing converted"
        raise ValueError(
            f"attention transfer fits what a map learns, and there is nothing to learn here ({methods}); use a learned "
            f"method such as 'loglinear', or fine-tune."
        )
    parameters = [x for some in own.values() for x in some]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    inside = cores(student)
    names = {id(teacher.get_submodule(name)): name for name in own}
    losses = []
    with _modes(student, teacher):
        for step, share in _clock(steps, seconds):
            _set_rate(optimizer, share, step)
            seen = _Seen(names)
            quick = torch.autocast(teacher.device.type, dtype=autocast, enabled=autocast is not None)
            with torch.no_grad(), probing(teacher, seen), quick:
                teacher(**next(batches))
            optimizer.zero_grad()
            total = 0.0
            while seen.calls:  # one call at a time, so that one graph is alive at a time
                name, call = seen.calls.pop()
                loss = attention_loss(inside[name], *call)
                loss.backward()
                total += float(loss.detach()) / len(own)
            optimizer.step()
            losses.append(total)
            if tell is not None:
                tell(step + 1, total)
    optimizer.zero_grad()
    return losses


def attention_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """How far a core is from exact attention at these inputs, see `transfer`.

    Args:
        core: to be fitted.
        query: (B, H, L, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        mask: bool, True = attend, broadcast to (B, 1, L, S); None: all.
        scaling: of the product q . k; default 1 / sqrt(D).
        position_bias: (1, H, L, S).
    """
    if isinstance(core, MixedCore):
        which = core.heads[1]
        query, key, value = (core._split(x, 1) for x in (query, key, value))
        bias = None if position_bias is None else position_bias[:, which]
        return attention_loss(core.linear, query, key, value, mask, scaling, bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert isinstance(core, KernelCore)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if not isinstance(core.feature_map.spec, PositiveSpec) or core.feature_map.sees_sequence or not core.normalize:
        return _output_loss(core, query, key, value, mask, scale, position_bias)
    L = query.shape[2]
    rows = torch.randperm(L)[:ROWS].sort().values.to(query.device) if L > ROWS else torch.arange(L)
    query = query[:, :, rows]
    seen = None if mask is None else (mask[:, :, rows] if mask.shape[2] > 1 else mask)
    extra = None if position_bias is None else position_bias[:, :, rows]
    with torch.no_grad():
        wanted = (query @ key.transpose(2, 3)) * scale
        wanted = wanted if extra is None else wanted + extra
        wanted = (wanted if seen is None else wanted.masked_fill(~seen, -torch.inf)).log_softmax(-1)
    weights = _weights(core, query, key)
    if extra is not None:
        weights = weights * (extra - extra.amax((2, 3), keepdim=True)).exp()
    weights = weights if seen is None else weights.masked_fill(~seen, 0)
    found = weights.clamp_min(TINY).log() - weights.sum(-1, keepdim=True).clamp_min(TINY).log()
    share = wanted.exp()
    terms = torch.where(share > 0, share * (wanted - found), 0).sum(-1)  # (B, H, rows)
    if seen is None:
        return terms.mean()
    # A padded query is nobody's: where queries and keys are the same tokens, the mask knows which are real.
    real = torch.isfinite(wanted).any(-1)
    if mask is not None and mask.shape[2] == 1 and mask.shape[3] == L:
        real = real & mask[:, :, 0, rows]
    return torch.where(real, terms, 0).sum() / real.sum().clamp_min(1)


def _weights(core: KernelCore, query: Tensor, key: Tensor) -> Tensor:
    """phi(q) phi(k) (B, H, L, S) up to a factor for each row."""
    phi, scale = core.feature_map, core.scale
    query, key = core._units(query, key, None)
    spec = phi.spec
    assert isinstance(spec, PositiveSpec)
    tensors = phi.prepare(query, key, None, scale)
    logs_q, logs_k = spec.log_shares(query, tensors, scale, "query"), spec.log_shares(key, tensors, scale, "key")
    top_k = logs_k.detach().amax(2, keepdim=True)  # of each feature, as the algorithms do
    logs_q = logs_q + top_k
    top_q = logs_q.detach().amax(3, keepdim=True)
    return (logs_q - top_q).exp() @ (logs_k - top_k).exp().transpose(2, 3)


def _output_loss(
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    position_bias: Tensor | None,
) -> Tensor:
    with torch.no_grad():
        added = position_bias
        if mask is not None:
            added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            added = added if position_bias is None else added + position_bias
        wanted = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
    key_mask, causal = None, False
    if mask is not None:
        causal = mask.shape[2] > 1
        key_mask = mask[:, 0, -1] if causal else mask[:, 0, 0]
        key_mask = key_mask.expand(query.shape[0], -1)
    table = bias_table(position_bias)
    found = core(query, key, value, is_causal=causal, key_mask=key_mask, **({} if table is None else {"bias": table}))
    off, size = (found - wanted).square(), wanted.square()
    if key_mask is not None and key_mask.shape[1] == query.shape[2]:
        real = key_mask[:, None, :, None]
        off, size = off * real, size * real
    loss: Tensor = off.sum() / size.sum().clamp_min(TINY)
    return loss


def tune(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Batches,
    *,
    steps: int,
    lr: float = 1.5e-4,
    map_lr: float = 1.5e-3,
    seconds: float | None = None,
    autocast: torch.dtype | None = None,
    tell: Tell | None = None,
) -> list[float]:
    """Train everything but the embeddings of a converted model against the original's hidden states and outputs.

        loss = mean over layers of |h - h'|^2 / |h' - mean|^2  +  KL(p' || p), or 5 (1 - cosine of the mean outputs)

    Dropout is off, as it is in the original's pass.

    Args:
        student: converted.
        teacher: the same model, not converted.
        batches: inputs of the models, without end.
        steps: at most.
        lr: of AdamW for the backbone, at its peak; 0 leaves it as it is.
        map_lr: for what maps learn.
        seconds: at most, if given.
        autocast: the precision of the passes, such as ``torch.bfloat16``; weights and losses stay as they are.
        tell: called after each step with its number and the loss.

    Returns:
        The loss, step by step.
    """
    maps = [x for some in learned(student).values() for x in some]
    fixed = {id(x) for x in maps}
    for part in (student.get_input_embeddings(), student.get_output_embeddings()):
        fixed |= {id(x) for x in part.parameters()} if part is not None else set()
    rest = [x for x in student.parameters() if id(x) not in fixed and x.is_floating_point() and x.requires_grad]
    groups = [{"params": x, "lr": rate, "peak": rate} for x, rate in ((maps, map_lr), (rest, lr)) if x and rate]
    if not groups:
        raise ValueError(f"nothing to train: lr={lr:g}, map_lr={map_lr:g} and no map that learns.")
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    trained = [x for group in groups for x in group["params"]]  # type: ignore[attr-defined]
    losses = []
    with _modes(student, teacher):
        for step, share in _clock(steps, seconds):
            _set_rate(optimizer, share, step)
            inputs = dict(next(batches))
            # Entered anew in each step: within one context autocast would go on with weights of its first pass.
            with torch.autocast(student.device.type, dtype=autocast, enabled=autocast is not None):
                with torch.no_grad():
                    wanted = teacher(**inputs, output_hidden_states=True)
                found = student(**inputs, output_hidden_states=True)
            loss = output_loss(found, wanted, inputs.get("attention_mask"))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if tell is not None:
                tell(step + 1, losses[-1])
    optimizer.zero_grad()
    return losses


def output_loss(found: Any, wanted: Any, mask: Tensor | None) -> Tensor:
    """See `tune`; ``found`` and ``wanted`` are outputs of a model with its hidden states, mask (B, L) 1 = real."""
    total: Tensor | float = 0.0
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if wanted.get(name) is None:
            continue
        layers = list(zip(found[name], wanted[name], strict=True))[1:]
        real = mask if name != "decoder_hidden_states" else None
        total = total + sum((_relative(a, b, real) for a, b in layers), torch.tensor(0.0)) / max(1, len(layers))
    logits = wanted.get("logits")
    if logits is not None:
        real = mask if mask is not None and mask.shape[:2] == logits.shape[:2] else None
        kl = nn.functional.kl_div(
            found["logits"].float().log_softmax(-1), logits.float().log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return total + (kl.mean() if real is None else (kl * real).sum() / real.sum())
    last = wanted["last_hidden_state"]
    real = mask if mask is not None and mask.shape[:2] == last.shape[:2] else None
    ours, theirs = (pooled(x.float(), real) for x in (found["last_hidden_state"], last))
    return total + POOLED * (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())


def _relative(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    found, wanted = found.float(), wanted.float()
    off, size = (found - wanted).square().sum(-1), (wanted - wanted.mean()).square().sum(-1)
    if mask is not None and mask.shape == off.shape:
        off, size = off * mask, size * mask
    return off.sum() / size.sum().clamp_min(TINY)


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens, (B, L, d) -> (B, d)."""
    if mask is None:
        return hidden.mean(1)
    real = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)


def quick_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 where the device multiplies it natively, else None."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else None


def _clock(steps: int, seconds: float | None) -> Iterator[tuple[int, float]]:
    """Numbers of steps, with the share of the work that is done."""
    start = time.monotonic()
    for step in range(steps):
        gone = 0.0 if seconds is None else (time.monotonic() - start) / seconds
        if gone >= 1:
            return
        yield step, max(step / steps, gone)


def _set_rate(optimizer: torch.optim.Optimizer, share: float, step: int) -> None:
    factor = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    for group in optimizer.param_groups:
        group.setdefault("peak", group["lr"])
        group["lr"] = group["peak"] * max(factor, 0.01)


@contextmanager
def _modes(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode: without dropout both see the same; as it was afterwards."""
    before = [(x, x.training) for model in models for x in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
