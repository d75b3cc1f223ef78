"""Relative positions: the bias of every head as a function of distance, learned or fixed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.errors import choice, integer, positive_int
from kernelformer.feature_maps.base import parameter
from kernelformer.modules.context import active_ranks

SCHEMES = ("table", "t5", "alibi")
BAND = 64  # distances that ALiBi's attention meets key by key; beyond, sums fade


class RelativePositions(nn.Module):
    """Relative position bias: b per head over distances j - i, or over differences of rows and columns on a grid.

    One module may serve several layers: give it to each as ``relative=``.

    Args:
        num_heads: H.
        scheme: ``table``, one learned number per distance; ``t5``, one per bucket of distances that widen; ``alibi``,
            ``-slope |j - i|`` with fixed slopes 2^(-8 h / H).
        max_length: the longest sequence, tokens of a state included; a table without ``max_distance`` needs it.
        max_distance: distances beyond it share its entry, which makes the cost of attention linear; t5: where buckets
            end, default 128.
        num_buckets: how many buckets t5 has.
        causal: distances to the future have no entries.
        grid: (R, C), for tokens on a grid; then there is a table over row and column differences, and nothing above but
            ``num_heads`` counts.
        num_prefix: tokens before the grid, with bias 0.

    Parameters: weight, (H, number of entries), starting at 0; none for alibi.
    """

    empty: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        scheme: str = "table",
        max_length: int | None = None,
        max_distance: int | None = None,
        num_buckets: int = 32,
        causal: bool = False,
        grid: tuple[int, int] | None = None,
        num_prefix: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        self.scheme, self.causal = choice("scheme", scheme, SCHEMES), causal
        self.max_length = None if max_length is None else positive_int("max_length", max_length)
        self.max_distance = None if max_distance is None else integer("max_distance", max_distance, at_least=0)
        self.num_buckets = positive_int("num_buckets", num_buckets)
        self.num_prefix = integer("num_prefix", num_prefix, at_least=0)
        if grid is not None and not (isinstance(grid, tuple | list) and len(grid) == 2):
            raise ValueError(f"grid must be a pair (rows, columns), got {grid!r}.")
        self.grid = (
            None if grid is None else (positive_int("grid rows", grid[0]), positive_int("grid columns", grid[1]))
        )
        if self.grid is not None:
            if scheme != "table" or max_length is not None or max_distance is not None:
                raise ValueError(
                    f"a grid has a table over all differences, got scheme={scheme!r}, max_length={max_length} and "
                    f"max_distance={max_distance}; leave them out."
                )
            self.weight = parameter(num_heads, 2 * self.grid[0] - 1, 2 * self.grid[1] - 1)
        elif num_prefix:
            raise ValueError(f"num_prefix={num_prefix} is for tokens before a grid; give grid=(rows, columns) too.")
        elif scheme == "alibi":
            if max_distance is not None:
                raise ValueError(f"alibi falls for ever, got max_distance={max_distance}; leave it out.")
            self.register_buffer("empty", torch.empty(0), persistent=False)  # moves with the module: see `_device`
        elif scheme == "t5":
            self.max_distance = 128 if max_distance is None else max_distance
            if self.max_distance < num_buckets or num_buckets < 4 or num_buckets % 2:
                raise ValueError(
                    f"t5 needs an even num_buckets of at least 4 and max_distance at least as large, got {num_buckets} "
                    f"and {self.max_distance}."
                )
            self.weight = parameter(num_heads, num_buckets)
        else:
            reach = self._reach
            self.weight = parameter(num_heads, reach + 1 if causal else 2 * reach + 1)
        self.reset_parameters()

    @property
    def slopes(self) -> Tensor:
        """The slopes of ALiBi, (H)."""
        return alibi_slopes(self.num_heads).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.empty.device if self.scheme == "alibi" else self.weight.device

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the table to zeros: attention starts without positions."""
        if self.scheme != "alibi":
            self.weight.zero_()

    @property
    def _reach(self) -> int:
        """The largest distance with an entry of its own."""
        if self.max_distance is not None:
            return self.max_distance
        if self.max_length is None:
            raise ValueError("a table needs max_length=, or max_distance= beyond which distances share an entry.")
        return self.max_length - 1

    def entries(self, distance: Tensor) -> Tensor:
        """The bias (H, n) at distances j - i (n)."""
        if self.scheme == "alibi":  # in float32 whatever the layer's dtype: a line of rounded numbers is none
            return -self.slopes.unsqueeze(1) * distance.abs()
        if self.scheme == "t5":
            return self.weight[:, t5_buckets(distance, self.num_buckets, self._reach, self.causal)]
        reach = self._reach
        if self.causal:
            return self.weight[:, (-distance).clamp(0, reach)]
        return self.weight[:, distance.clamp(-reach, reach) + reach]

    def forward(self, queries: int, keys: int, past: int = 0) -> dict[str, Any]:
        """Arguments of a core's call: bias (H, past + L + S - 1) and what is known of it.

        Where sequences are split over ranks the bias is over distances up to ``max_distance`` on each side.

        Args:
            queries: L.
            keys: S.
            past: tokens of the state before them.
        """
        if self.grid is not None:
            tokens = self.grid[0] * self.grid[1] + self.num_prefix
            if queries != tokens or keys != tokens or past:
                raise ValueError(
                    f"a grid of {self.grid[0]} x {self.grid[1]} after num_prefix={self.num_prefix} tokens has {tokens} "
                    f"tokens, got {queries} queries and {keys} keys{f' after {past}' if past else ''}."
                )
            return {"bias": self.weight, "num_prefix": self.num_prefix}
        ranks = active_ranks()
        if ranks is not None:
            if self.max_length is not None:
                self._check(ranks.starts(max(queries, keys))[-1])
            reach = self._known().get("max_distance")
            if reach is not None:  # all that tokens on other ranks need
                return {"bias": self.entries(torch.arange(-reach, reach + 1, device=self._device)), **self._known()}
        self._check(past + max(queries, keys))
        distance = torch.arange(max(past + queries + keys - 1, 0), device=self._device) - (past + queries - 1)
        return {"bias": self.entries(distance), **self._known()}

    def step(self, past: int) -> dict[str, Any]:
        """Arguments of a core's step: bias (H, W + 1) over distances 0 to W."""
        if self.grid is not None:
            raise ValueError("positions on a grid do not stream; give the whole grid in one call.")
        self._check(past + 1)
        known = self._known()
        window = known.pop("max_distance", self._reach if self.scheme == "table" else 0)
        return {"bias": self.entries(-torch.arange(window + 1, device=self._device)), **known}

    def _known(self) -> dict[str, Any]:
        if self.scheme == "alibi":
            return {"max_distance": BAND, "slope": self.slopes}
        return {} if self.max_distance is None else {"max_distance": self.max_distance}

    def _check(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"these positions were built with max_length={self.max_length}, got {length} tokens; build them with "
                f"max_length={length}, or with max_distance= and no max_length for any length."
            )

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        if self.grid is not None:
            return f"grid={self.grid}, num_prefix={self.num_prefix}"
        return f"{self.scheme!r}, max_length={self.max_length}, max_distance={self.max_distance}"


def alibi_slopes(num_heads: int) -> Tensor:
    """``2^(-8 h / n)`` for h = 1..n, n the largest power of two within H; the rest from between those of 2n."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / whole) for h in range(1, whole + 1)]
    slopes += [2 ** (-8 * h / (2 * whole)) for h in range(1, 2 * (num_heads - whole) + 1, 2)]
    return torch.tensor(slopes)


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Buckets of distances j - i: one each for the nearest half, then by their logarithm up to ``max_distance``."""
    bucket = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp_min(0)
    else:
        num_buckets //= 2
        bucket = (distance > 0).long() * num_buckets
        distance = distance.abs()
    exact = num_buckets // 2
    ratio = (distance.clamp_min(1).double() / exact).log() / math.log(max_distance / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)
    return bucket + torch.where(distance < exact, distance, large)
