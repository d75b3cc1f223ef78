"""What all feature maps share: their draw, its number, and the way to the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec, Spec, compute_dtype, register
from kernelformer.errors import integer, positive_int
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
            the state at the size of the key heads.
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
        # The numbers stand beside their buffers, so that nothing has to be read back from a device.
        self.seed_number, self.draw_number = integer("seed", seed), 0
        self.register_buffer("seed", torch.tensor(self.seed_number, dtype=torch.int64, device="cpu"))
        self.register_buffer("draw", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("age", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("omega", self._frequencies(0) if num_features else None)
        self.feature_dim = spec.feature_dim(self.tensors(), head_dim)

    @property
    def is_random(self) -> bool:
        """Whether there is anything to draw."""
        return self.omega is not None

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two maps the same function: a state goes only to a map that equals its maker's."""
        return (self.key, self.draw_kind, self.norms, self.draw_heads, self.seed_number, self.draw_number)

    def _frequencies(self, draw: int) -> Tensor:
        gen = generator(self.seed_number, draw)
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

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.draw.is_meta:  # from the buffers, as loaded: a strict=False dict may have left them as they were
            self.seed_number, self.draw_number = int(self.seed), int(self.draw)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register(self.spec)  # in the process that unpickles

    def tensors(self) -> list[Tensor]:
        """What the spec is bound to: (B or 1, H or 1, ...) each."""
        omega = self.omega
        return [] if omega is None else [omega.unsqueeze(0)]

    def prepare(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> list[Tensor]:
        """The tensors for one call, with q, k and the mask in view, in the dtype of the arithmetic."""
        dtype = compute_dtype(query.dtype)
        return [x if x.dtype == dtype else x.to(dtype) for x in self.tensors()]

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw, or to number ``draw``.

        The frequencies become a new tensor: a graph that is still to be differentiated keeps those it was built with.
        """
        self.draw_number = integer("draw", self.draw_number + 1 if draw is None else draw, at_least=0)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw again what (seed, draw) say, into buffers that may hold anything, as after `Module.to_empty`."""
        self.seed.fill_(self.seed_number)
        self.draw.fill_(self.draw_number)
        self.age.zero_()
        if self.omega is not None:
            self.omega = self._frequencies(self.draw_number).to(self.omega)

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
