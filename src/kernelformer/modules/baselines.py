"""Linear-time attention without a feature map, for comparison: Nystromformer and Linformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.contract import compute_dtype
from kernelformer.errors import integer, positive_int
from kernelformer.feature_maps.base import FIRST, parameter
from kernelformer.feature_maps.draws import generator
from kernelformer.feature_maps.landmarks import Tokens, sharper
from kernelformer.modules.bias import empty_attention
from kernelformer.modules.checks import Call
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import sdpa


class BaselineCore(AttentionCore):
    """Base class of methods that need the whole sequence at once."""

    takes_segments = False
    export_refusal = "has as many landmarks or mixtures as the length allows"

    def refusal(self, causal: bool) -> ValueError | None:
        """Return the error for a causal call, or None: these methods are bidirectional only."""
        if not causal:
            return None
        return ValueError(
            f"{self.method!r} mixes tokens of the whole sequence, later ones included, but is_causal=True was asked "
            f"for; use a method with a feature map, such as 'favor+'."
        )

    def _attend(self, call: Call) -> tuple[Tensor, None]:
        dtype = call.query.dtype
        work = compute_dtype(dtype)
        repeat = call.query.shape[1] // call.key.shape[1]
        key, value = (x.to(work).repeat_interleave(repeat, 1) for x in (call.key, call.value))
        if call.key_mask is not None:
            hidden = ~call.key_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        out = self._whole(replace(call, query=call.query.to(work), key=key, value=value))
        if call.key_mask is not None:  # a sample without any key
            out = out.masked_fill(~call.key_mask.any(1)[:, None, None, None], 0)
        return out.to(dtype), None

    def _whole(self, call: Call) -> Tensor:
        """Attend; keys and values have as many heads as the queries."""
        raise TypeError(f"{type(self).__name__} does not say how it attends.")


class NystromformerCore(BaselineCore):
    """Nystromformer: softmax attention through segment means of queries and keys.

        out = softmax(Q Kl^T) softmax(Ql Kl^T)^+ softmax(Ql K^T) V  (+ depthwise convolution of V)

    Segments are stretches of real tokens, as equal as can be, and as many as there are real queries and real keys, if
    those are fewer: any length, and padding changes nothing. The pseudoinverse is the published iteration, whose start
    value here is each matrix's own instead of the batch's.

    Args:
        num_landmarks: number of segments.
        rounds: how many rounds the iteration has.
        conv: length of the convolution, odd; 0 for none.
        seed: of the first values of the convolution.

    Cost: O(L s (D + E)), and O(s^3) once per sample and head.
    """

    mixes_queries = True

    def __init__(
        self, method: str, *, num_landmarks: int = 128, rounds: int = 6, conv: int = 0, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(method, **options)
        self.num_landmarks, self.rounds = positive_int("num_landmarks", num_landmarks), positive_int("rounds", rounds)
        self.conv, self.seed = integer("conv", conv, at_least=0), integer("seed", seed)
        if conv and conv % 2 == 0:
            raise ValueError(f"conv must be odd, so that it has a middle, got {conv}; use {conv + 1}.")
        if conv:
            self.conv_weight = parameter(self.num_heads, conv)
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the convolution uniformly in +-1/sqrt(conv)."""
        if self.conv:
            draw = torch.rand(self.conv_weight.shape, generator=generator(self.seed, FIRST), device="cpu")
            self.conv_weight.copy_((2 * draw - 1) * self.conv**-0.5)

    def _whole(self, call: Call) -> Tensor:
        query, key, value, scale = call.query, call.key, call.value, call.scale
        if key.shape[2] == 0 or query.shape[2] == 0:
            return empty_attention(query, key, value, *self.parameters())
        slots = min(self.num_landmarks, query.shape[2], key.shape[2])
        queries, keys = Tokens(query, call.real_queries, slots), Tokens(key, call.key_mask, slots)
        number = None
        if call.real_queries is not None or call.key_mask is not None:
            counts = [torch.as_tensor(x, device=key.device).clamp_max(slots) for x in (queries.count, keys.count)]
            number = torch.minimum(*counts).expand(key.shape[0], 1)
        (mean_q, some_q), (mean_k, some_k) = (x.segments(number) for x in (queries, keys))
        scores = scale * mean_q @ mean_k.transpose(-1, -2)
        eye = torch.eye(slots, dtype=scores.dtype, device=scores.device)
        if some_k is not None:
            scores = scores.masked_fill(~some_k.unsqueeze(-2), torch.finfo(scores.dtype).min)
        middle = scores.softmax(-1)
        if some_q is not None:  # a slot without tokens stands alone
            middle = torch.where(some_q.unsqueeze(-1), middle, eye)
        summary = sdpa(replace(call, query=mean_q))  # (B, H, s, E)
        if some_q is not None:
            summary = summary.masked_fill(~some_q.unsqueeze(-1), 0)
        mixed = _pseudoinverse(middle, self.rounds) @ summary
        columns = None if some_k is None else some_k[:, 0]
        out = sdpa(replace(call, key=mean_k, value=mixed, key_mask=columns))
        return out + self._convolved(value, query.shape[2]) if self.conv else out

    def _convolved(self, value: Tensor, length: int) -> Tensor:
        if value.shape[2] != length:
            raise ValueError(
                f"a convolution of the values needs as many queries as keys, got {length} and {value.shape[2]}; "
                f"build it with conv=0."
            )
        B, H, L, E = value.shape
        rows = value.permute(0, 3, 1, 2).reshape(B * E, H, L)
        weight = self.conv_weight.to(value.dtype).unsqueeze(1)
        return F.conv1d(rows, weight, padding=self.conv // 2, groups=H).view(B, E, H, L).permute(0, 2, 3, 1)


def _pseudoinverse(matrix: Tensor, rounds: int) -> Tensor:
    """Iterate `landmarks.sharper` from ``V = A^T / (|A|_1 |A|_inf)`` of each matrix."""
    size = matrix.abs()
    norm = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    inverse = matrix.transpose(-1, -2) / norm[..., None, None]
    for _ in range(rounds):
        inverse = sharper(inverse, matrix @ inverse)
    return inverse


class LinformerCore(BaselineCore):
    """Linformer: softmax attention to learned mixtures of the keys and values.

        out = softmax(Q (E K)^T) F V           E, F (rank, S): the first S columns of (rank, max_length)

    One pair E, F for all heads.

    Args:
        max_length: the longest sequence of keys.
        rank: number of mixtures.
        seed: of the first values.

    Cost: O(L rank (D + E)).
    """

    def __init__(
        self, method: str, *, max_length: int | None = None, rank: int = 128, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(method, **options)
        if max_length is None:
            raise ValueError(
                "linformer learns a weight for every position, so it needs max_length=, the longest sequence."
            )
        self.max_length, self.rank = positive_int("max_length", max_length), positive_int("rank", rank)
        self.seed = integer("seed", seed)
        self.E, self.F = parameter(self.rank, self.max_length), parameter(self.rank, self.max_length)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize with variance 1 / rank, like a random projection."""
        gen = generator(self.seed, FIRST)
        for x in (self.E, self.F):
            x.copy_(torch.randn(x.shape, generator=gen, dtype=torch.float64, device="cpu") * self.rank**-0.5)

    def _whole(self, call: Call) -> Tensor:
        length = call.key.shape[2]
        if length > self.max_length:
            raise ValueError(
                f"this linformer was built with max_length={self.max_length}, got {length} keys; build it with "
                f"max_length={length}, or cut the sequence."
            )
        key, value = (m[:, :length].to(x.dtype) @ x for m, x in ((self.E, call.key), (self.F, call.value)))
        return sdpa(replace(call, key=key, value=value, key_mask=None))
