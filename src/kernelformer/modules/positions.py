"""Positions: relative biases, learned or fixed, and rotary positions."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import compute_dtype, wide_dtype
from kernelformer.errors import choice, flag, integer, number, positive_int, shape, unknown
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
        """Slopes of ALiBi, (H)."""
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
        """Largest distance with an entry of its own."""
        if self.max_distance is not None:
            return self.max_distance
        if self.max_length is None:
            raise ValueError("a table needs max_length=, or max_distance= beyond which distances share an entry.")
        return self.max_length - 1

    def entries(self, distance: Tensor) -> Tensor:
        """Return the bias (H, n) at distances j - i (n)."""
        if self.scheme == "alibi":  # in float32 whatever the layer's dtype: a line of rounded numbers is none
            return -self.slopes.unsqueeze(1) * distance.abs()
        if self.scheme == "t5":
            return self.weight[:, t5_buckets(distance, self.num_buckets, self._reach, self.causal)]
        reach = self._reach
        if self.causal:
            return self.weight[:, (-distance).clamp(0, reach)]
        return self.weight[:, distance.clamp(-reach, reach) + reach]

    def forward(self, queries: int, keys: int, past: int = 0) -> dict[str, Any]:
        """Return arguments for a core's call: bias (H, past + L + S - 1), and its known properties.

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
        """Return arguments for a core's step: bias (H, W + 1) over distances 0 to W."""
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
        """Settings, for printing a model."""
        if self.grid is not None:
            return f"grid={self.grid}, num_prefix={self.num_prefix}"
        return f"{self.scheme!r}, max_length={self.max_length}, max_distance={self.max_distance}"


def alibi_slopes(num_heads: int) -> Tensor:
    """Compute ``2^(-8 h / n)`` for h = 1..n, n the largest power of two within H; the rest from between those of 2n."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / whole) for h in range(1, whole + 1)]
    slopes += [2 ** (-8 * h / (2 * whole)) for h in range(1, 2 * (num_heads - whole) + 1, 2)]
    return torch.tensor(slopes)


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Compute buckets of distances j - i: one each for the nearest half, then logarithmic up to ``max_distance``."""
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


# By kind of scaling: the settings that it needs, and those that it may have, as transformers calls them.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


class Rotation(torch.autograd.Function):
    """Rotation of pairs of dimensions; its gradient is the inverse rotation.

    By plain operations it would take three times as long at 16384 tokens: each makes a tensor of the size of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, H, L, D) by cos (B or 1, 1, L, D) or (L, D), and sin the same with n columns -> (B, H, L, D)."""
        ctx.save_for_backward(cos, sin)
        n, wide = sin.shape[-1], x.to(cos.dtype)
        out = wide * cos
        out[..., :n].addcmul_(wide[..., n : 2 * n], sin, value=-1)
        out[..., n : 2 * n].addcmul_(wide[..., :n], sin)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Rotate the gradient back."""
        cos, sin = ctx.saved_tensors
        return Rotation.apply(grad, cos, -sin), None, None  # type: ignore[no-untyped-call]


class RotaryPositions(nn.Module):
    """Rotary positions (RoFormer, 2104.09864): each pair of dimensions of q and k turns with the position p.

        (x_i, x_(n+i)) <- a (x_i cos p w_i - x_(n+i) sin p w_i, x_(n+i) cos p w_i + x_i sin p w_i)
        w_i = base^(-i / n),      i = 0, ..., n - 1,      n = rotary_dim / 2,      a = 1 but for yarn

    so that q . k depends on positions by their difference alone. Pairs are halves apart, as in transformers' Llama. It
    comes before the feature map: an exact kernel then knows differences only; an approximation of one, or a kernel that
    is no function of q . k (elu), also depends a little on where a sequence starts.

    Angles are in float64 where the device has it, so that they hold after a million tokens; the rotation is in float32,
    for float64 inputs in float64, and its result in the inputs' dtype. There is nothing to learn or to save.

    Args:
        head_dim: D.
        rotary_base: of the wavelengths, which go from 2 pi to 2 pi base.
        rotary_dim: how many dimensions turn, the first ones, an even number; None: all.
        rotary_scaling: for sequences longer than those that weights were trained on, as transformers names it:
            ``{"rope_type": "linear", "factor": 4.0}``, or ``"linear(factor=4.0)"``, which fits into an attention
            string; also "llama3" and "yarn" with their settings.

    Cost: O(L D) for each of q and k.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_base: float = 10000.0,
        rotary_dim: int | None = None,
        rotary_scaling: Mapping[str, Any] | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = _check_dim(positive_int("head_dim", head_dim), rotary_dim)
        self.base = number("rotary_base", rotary_base, above=1)
        self.scaling = read_scaling(rotary_scaling)
        # Plain numbers: a buffer would be rounded by `half()`, and be empty after a start on the meta device.
        self.frequencies, self.factor = frequencies(self.base, self.dim, self.scaling)

    def forward(
        self, query: Tensor, key: Tensor, past: int = 0, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the same tokens.

        Args:
            query: (B, H, L, D).
            key: (B, G, L, D).
            past: tokens before them, so that their positions are past, ..., past + L - 1.
            position_ids: (B or 1, L) integers, the positions themselves.

        Returns:
            (B, H, L, D) and (B, G, L, D).
        """
        wide, dtype = compute_dtype(wide_dtype(query)), compute_dtype(query.dtype)  # a device may have no float64
        if position_ids is None:
            position = torch.arange(past, past + query.shape[2], device=query.device, dtype=wide)
        else:
            batch, _, length, _ = query.shape
            if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
                raise ValueError(
                    f"position_ids must be (batch or 1, length) = ({batch}, {length}), got {shape(position_ids)}."
                )
            if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
                raise ValueError(f"position_ids must be integers, got {position_ids.dtype}.")
            position = position_ids.to(query.device, wide).unsqueeze(1)  # the same for all heads
        rate = torch.tensor(self.frequencies, device=query.device, dtype=wide)
        angle = (position.unsqueeze(-1) * rate).remainder_(2 * math.pi).to(dtype)
        cos, sin = angle.cos(), angle.sin()
        if self.factor != 1:
            cos, sin = self.factor * cos, self.factor * sin
        if torch.compiler.is_exporting():
            return _turned(query, cos, sin), _turned(key, cos, sin)
        rest = cos.new_ones(*cos.shape[:-1], query.shape[-1] - self.dim)
        cos = torch.cat([cos, cos, rest], -1)
        return Rotation.apply(query, cos, sin), Rotation.apply(key, cos, sin)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Settings, for printing a model."""
        scaling = f", scaling={self.scaling}" if self.scaling else ""
        return f"dim={self.dim}, base={self.base:g}{scaling}"


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by plain operations, none in place, for an exported graph; cos and sin have n columns."""
    n, wide = sin.shape[-1], x.to(cos.dtype)
    a, b, rest = wide[..., :n], wide[..., n : 2 * n], wide[..., 2 * n :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def _check_dim(head_dim: int, rotary_dim: int | None) -> int:
    if rotary_dim is None:
        if head_dim % 2:
            way = f", or give rotary_dim={head_dim - 1}" if head_dim > 1 else ""
            raise ValueError(
                f"rotary positions turn pairs of dimensions, got an odd head_dim={head_dim}; make it even{way}."
            )
        return head_dim
    dim = positive_int("rotary_dim", rotary_dim)
    if dim % 2 or dim > head_dim:
        raise ValueError(
            f"rotary_dim must be even and at most head_dim, got {dim} and {head_dim}; give rotary_dim="
            f"{min(dim, head_dim) // 2 * 2 or 2}."
        )
    return dim


def read_scaling(scaling: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Check a scaling of frequencies, also as a text: ``yarn(factor=4, original_max_position_embeddings=2048)``."""
    if scaling is None:
        return None
    settings = _parse(scaling) if isinstance(scaling, str) else scaling
    if not isinstance(settings, Mapping) or "rope_type" not in settings:
        raise ValueError(
            f"rotary_scaling must be a dict with a rope_type ({', '.join(_NEEDED)}), or a text such as "
            f"'linear(factor=4.0)', got {scaling!r:.80}."
        )
    kind, own = settings["rope_type"], {name: x for name, x in settings.items() if name != "rope_type"}
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise unknown("rope_type of rotary_scaling,", kind, _NEEDED)
    known = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    for name in own:
        if name not in known:
            raise unknown(f"setting of rotary_scaling {kind!r},", name, known)
    missing = [name for name in _NEEDED[kind] if name not in own]
    if missing:
        raise ValueError(f"rotary_scaling {kind!r} needs {', '.join(_NEEDED[kind])}, got no {missing[0]}.")
    return {"rope_type": kind, **{name: _checked_value(name, x) for name, x in own.items() if x is not None}}


def _parse(text: str) -> dict[str, Any] | None:
    """Parse the settings in ``kind(name=value, ...)``; None if it is something else."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            values = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
            return {"rope_type": call.func.id, **values} if len(values) == len(call.keywords) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    return None


def _checked_value(name: str, value: Any) -> float | bool:
    what = f"{name} of rotary_scaling"
    if name == "truncate":
        return flag(what, value)
    if name == "original_max_position_embeddings":
        return integer(what, value, at_least=1)
    return number(what, value, at_least=1) if name == "factor" else number(what, value, above=0)


def frequencies(base: float, dim: int, scaling: Mapping[str, Any] | None = None) -> tuple[tuple[float, ...], float]:
    """Compute the angles of pairs of dimensions from one token to the next, and the factor of what is rotated.

        w_i = base^(-2 i / dim)                                     unscaled
        w_i / factor                                                linear
        ((1 - r_i) / factor + r_i) w_i                              llama3, yarn

    with r_i from 1 for short wavelengths, which stay, to 0 for long ones, which are stretched: for llama3 a line in the
    number of turns within the original length, from low_freq_factor to high_freq_factor; for yarn (2309.00071) a line
    in i, between the dimensions that make beta_fast and beta_slow turns.

    Returns:
        (dim / 2) numbers, and the factor, 1 but for yarn.
    """
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return tuple(plain), 1.0
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return tuple(w / factor for w in plain), 1.0
    kept = _llama3_kept(plain, scaling) if kind == "llama3" else _yarn_kept(base, dim, scaling)
    scaled = tuple(((1 - r) / factor + r) * w for r, w in zip(kept, plain, strict=True))
    return scaled, _yarn_factor(scaling) if kind == "yarn" else 1.0


def _llama3_kept(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if high <= low:
        raise ValueError(f"high_freq_factor of rotary_scaling must be above low_freq_factor, got {high} and {low}.")
    turns = [scaling["original_max_position_embeddings"] * w / (2 * math.pi) for w in plain]
    return [_within((x - low) / (high - low)) for x in turns]


def _yarn_kept(base: float, dim: int, scaling: Mapping[str, Any]) -> list[float]:
    fast, slow = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
    if fast < slow:
        raise ValueError(f"beta_fast of rotary_scaling must be at least beta_slow, got {fast} and {slow}.")
    length = scaling["original_max_position_embeddings"]
    first, last = (dim * math.log(length / (x * 2 * math.pi)) / (2 * math.log(base)) for x in (fast, slow))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # as transformers has it
    return [1 - _within((i - first) / width) for i in range(dim // 2)]


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    """Compute the factor of q and k: ``0.1 log(factor) + 1``, or the ratio of two such with weights of the log."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    weights = (
        (scaling["mscale"], scaling["mscale_all_dim"]) if {"mscale", "mscale_all_dim"} <= scaling.keys() else (1, 0)
    )
    above, below = (0.1 * float(x) * math.log(scaling["factor"]) + 1 for x in weights)
    return above / below


def _within(x: float) -> float:
    return min(max(x, 0.0), 1.0)
