"""What all feature maps share: their draw, its number, and the way to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec, Spec, compute_dtype, register
from kernelformer.errors import positive_int
from kernelformer.feature_maps.draws import draw_frequencies, generator


class FeatureMap(nn.Module):
    """phi: R^D -> R^M with ``K(q, k) ~ phi(q) . phi(k)``.

    Draw number t is a pure function of (seed, t). Both numbers and the draw itself are buffers, saved with the model:
    a resumed run continues the same draws, and evaluation is deterministic. Only `resample` changes them.

    Args:
        spec: how the map acts on a chunk.
        head_dim: D.
        num_heads: H.
        num_features: number of frequencies drawn; 0 for a map without any.
        seed: of the draws.
        draw: see `draws.draw_frequencies`.
        norms: see `draws.draw_frequencies`.
        per_head: one independent draw for each head instead of one for all. With grouped queries a shared draw keeps
        the
            state at the size of the key heads.
    """

    omega: Tensor | None
    seed: Tensor
    draw: Tensor
    age: Tensor

    def __init__(
        self,
        spec: Spec,
        *,
        head_dim: int,
        num_heads: int,
        num_features: int,
        seed: int = 0,
        draw: str = "orthogonal",
        norms: str | None = None,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.key = register(spec)
        self.head_dim = positive_int("head_dim", head_dim)
        self.num_heads = positive_int("num_heads", num_heads)
        self.num_features = num_features
        self.draw_kind, self.norms = draw, norms
        self.draw_heads = num_heads if per_head else 1
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.int64, device="cpu"))
        self.register_buffer("draw", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("age", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("omega", self._frequencies(seed, 0) if num_features else None)
        self._seen: tuple[int, int, int] | None = None
        self.feature_dim = spec.feature_dim(self.tensors(), head_dim)

    def _frequencies(self, seed: int, draw: int) -> Tensor:
        gen = generator(seed, draw)
        heads = [
            draw_frequencies(self.num_features, self.head_dim, gen, draw=self.draw_kind, norms=self.norms)
            for _ in range(self.draw_heads)
        ]
        return torch.stack(heads).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FeatureMap:
        # model.half() must not round the draw: it is cast when it is used, to float32 at least.
        draws = {name: x for name, x in self._buffers.items() if x is not None and x.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in draws.items():
            after = self._buffers[name]
            if after is not None and after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = before.to(after.device)
        return self

    @property
    def draw_number(self) -> int:
        """The number of the current draw, as an int; reads the buffer only when it has changed."""
        draw, seen = self.draw, self._seen
        if seen is None or seen[0] != id(draw) or seen[1] != draw._version:
            seen = self._seen = (id(draw), draw._version, int(draw))
        return seen[2]

    def tensors(self) -> list[Tensor]:
        """What the spec is bound to: (B or 1, H or 1, ...) each."""
        omega = self.omega
        return [] if omega is None else [omega.unsqueeze(0)]

    def prepare(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> list[Tensor]:
        """The tensors for one call, with q, k and the mask in view, in the dtype of the arithmetic."""
        dtype = compute_dtype(query.dtype)
        return [x if x.dtype == dtype else x.to(dtype) for x in self.tensors()]

    @torch.no_grad()
    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw, or to number ``draw``."""
        number = int(self.draw) + 1 if draw is None else draw
        if number < 0:
            raise ValueError(f"draw must be at least 0, got {number}.")
        self.draw.fill_(number)
        self.age.zero_()
        if self.omega is not None:
            self.omega.copy_(self._frequencies(int(self.seed), number))

    def forward(self, x: Tensor, role: str = "query", scale: float = 1.0) -> Tensor:
        """phi(sqrt(scale) x) as one tensor, (B, H, L, D) -> (B, H, L, M): for looking and for small L."""
        tensors = self.prepare(x, x, None)
        x = x.to(compute_dtype(x.dtype))
        if isinstance(self.spec, PositiveSpec):
            return self.spec.log_features(x, tensors, scale, role).exp()  # type: ignore[arg-type]
        phi, factor = self.spec.features(x, tensors, scale, role)  # type: ignore[attr-defined]
        return phi if factor is None else phi * factor.exp()  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        what: dict[str, Any] = {"features": self.feature_dim, "heads": self.num_heads, "head_dim": self.head_dim}
        if self.omega is not None:
            what |= {"draw": self.draw_kind, "per_head": self.draw_heads > 1}
        return ", ".join(f"{k}={v}" for k, v in what.items()) + f", spec={self.spec}"
