"""Base class of feature maps: the draw, its number, and redrawing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernelformer.contract import PositiveSpec, Spec, compute_dtype, intern_formula, no_autocast
from kernelformer.errors import flag, integer, positive_int
from kernelformer.feature_maps.draws import draw_frequencies, generator

# Arguments of `FeatureMap` that constructors pass on as ``**common``.
_SIZES = ("head_dim", "num_heads")
_DRAWING = ("seed", "draw", "norms", "per_head", "num_key_heads")
FIRST = -1  # number of the stream that first values of parameters come from; draws count from 0


def parameter(*size: int) -> nn.Parameter:
    """Create an empty parameter, on the CPU in float32 like draws, whatever the defaults."""
    return nn.Parameter(torch.empty(*size, dtype=torch.float32, device="cpu"))


class FeatureMap(nn.Module):
    """Feature map phi: R^D -> R^M with ``K(q, k) ~ phi(q) . phi(k)``.

    Draw number t is a pure function of (seed, t). Both numbers, the draw itself and the settings are buffers, saved
    with the model: a resumed run continues the same draws, evaluation is deterministic, and a map of other settings
    refuses to be loaded into. Only `resample` changes them.

    A map of your own is easiest made from its formula, see `FormulaMap`. A subclass of this class registers what it
    learns, if anything, and ends its constructor with `_start`. It overrides `_draws` if a draw is more than
    frequencies, `frequencies` if those follow from parameters, and `_reset_learned`.

    Args:
        spec: how the map acts on a chunk.
        head_dim: D.
        num_heads: H.
        num_features: number of frequencies drawn; 0 for a map without any.
        seed: of the random draws.
        draw: how frequencies are drawn: ``orthogonal``, ``iid``, ``simplex``, ``spherical``, ``hadamard`` or
            ``givens``; see `draws.draw_frequencies`.
        norms: lengths of the frequencies: ``chi``, as of Gaussian vectors, or ``sqrt``, all sqrt(D). None: chi for iid,
            orthogonal and simplex draws, else sqrt.
        per_head: one independent map for each head instead of one for all.
        num_key_heads: G, with ``per_head``: one map for each of so many key heads instead of each query head, which
            keeps the state of grouped queries at the size of the key heads. None means num_heads.
        settings: what else tells this map from others of its class, by the names of the options.
    """

    omega: Tensor | None
    seed: Tensor
    draw: Tensor
    age: Tensor
    settings: Tensor
    feature_dim: int
    normalized = True  # whether attention with it divides by the sum of the weights, by default
    aligns = False  # whether `align` does something, which needs that division
    sees_sequence = False  # whether `prepare` looks at all tokens, later ones included, so that causality would be lost

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Show the arguments that a constructor passes on as ``**common`` in the signature of its class."""
        super().__init_subclass__(**keywords)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            given = {x.name: x for x in own[:-1]}
            common = inspect.signature(FeatureMap.__init__).parameters
            sizes, drawing = ([given.get(x, common[x]) for x in names] for names in (_SIZES, _DRAWING))
            own = [*sizes, *(x for x in own[:-1] if x.name not in (*_SIZES, *_DRAWING)), *drawing]
        cls.__signature__ = inspect.Signature(sorted(own, key=lambda x: x.kind))  # type: ignore[attr-defined]

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
        num_key_heads: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.spec_id = intern_formula(spec)
        # Of the tensors that `for_query_heads` gives.
        self.spread_spec, self.spread_spec_id = spec, self.spec_id
        self.head_dim = positive_int("head_dim", head_dim)
        self.num_heads = positive_int("num_heads", num_heads)
        self.num_features = num_features
        # Whether there is anything to draw; and whether that is frequencies, which have a spectral density.
        self.is_random = self.has_density = num_features > 0
        self.draw_kind, self.norms = draw, norms
        if num_key_heads is not None and num_heads % positive_int("num_key_heads", num_key_heads):
            raise ValueError(f"num_key_heads must divide num_heads, got {num_key_heads} and {num_heads}.")
        if num_key_heads is not None and not per_head:
            raise ValueError(
                f"num_key_heads={num_key_heads} says how many maps there are, but per_head=False shares one between "
                f"all heads; leave one of them out."
            )
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.heads = self.num_key_heads if flag("per_head", per_head) else 1
        drawing = {"num_features": num_features, "draw": draw, "norms": norms, "per_head": per_head}
        self.options: dict[str, object] = {
            "head_dim": self.head_dim,
            **(settings or {}),
            **(drawing if num_features else {}),
            # Absent where it changes nothing, so that weights from before it existed are those of the same map.
            **({} if self.num_key_heads == num_heads else {"num_key_heads": self.num_key_heads}),
        }
        # The numbers stand beside their buffers, so that nothing has to be read back from a device.
        self.seed_number, self.draw_number = integer("seed", seed), 0
        self.register_buffer("seed", torch.tensor(self.seed_number, dtype=torch.int64, device="cpu"))
        self.register_buffer("draw", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("age", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.register_buffer("settings", _encode(self.options))
        self.register_buffer("omega", None)

    def _start(self) -> None:
        """Take the first draw and the initial values of the parameters."""
        for name, x in self._draws(0).items():
            self.register_buffer(name, x)
        with torch.no_grad():
            self._reset_learned()
            self.feature_dim = self._width()

    def _width(self) -> int:
        return self.spec.feature_dim(self.tensors(), self.head_dim)

    @property
    def identity(self) -> dict[str, object]:
        """Settings and draw that determine the function: a state fits only maps with equal ones."""
        return {**self.options, "seed": self.seed_number, "draw number": self.draw_number}

    @property
    def stamp(self) -> tuple[object, ...]:
        """Sources of `identity`, which every step compares."""
        return self.options, self.seed_number, self.draw_number

    def _noise(self, draw: int) -> Tensor:
        """Draw number ``draw`` of frequencies, (heads, num_features, D)."""
        gen = generator(self.seed_number, draw)
        heads = [
            draw_frequencies(self.num_features, self.head_dim, gen, draw=self.draw_kind, norms=self.norms)
            for _ in range(self.heads)
        ]
        return torch.stack(heads).float()

    def _draws(self, draw: int) -> dict[str, Tensor]:
        """Buffers of draw number ``draw``, by name."""
        return {"omega": self._noise(draw)} if self.is_random else {}

    def _reset_learned(self) -> None:
        """Reset parameters to their initial values, a function of the seed; called within `torch.no_grad`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FeatureMap:
        # model.half() must not round the draw: it is cast when it is used, to float32 at least.
        draws = {name: x for name, x in self._buffers.items() if x is not None and x.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in draws.items():
            after = self._buffers[name]
            if after is not None and after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = before.to(after.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # As they are, whatever averaging or casting has made of the buffers.
        for name, x in (
            ("seed", torch.tensor(self.seed_number, device="cpu")),
            ("draw", torch.tensor(self.draw_number, device="cpu")),
            ("settings", _encode(self.options)),
        ):
            buffer = self.get_buffer(name)
            destination[prefix + name] = buffer if buffer.is_meta else x.to(buffer.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        *_, errors = rest
        saved = state_dict.get(f"{prefix}settings")
        if isinstance(saved, Tensor) and not saved.is_meta:
            problem = _other_settings(prefix, saved, self.options)
            if problem:
                errors.append(problem)
                for name in [x for x in state_dict if x.startswith(prefix)]:
                    del state_dict[name]  # nor may a child of the map take its part
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # As loaded: a strict=False dict may have left the buffers as they were. Parts of a map load after it.
        FeatureMap.take_numbers(self)

    def take_numbers(self) -> None:
        """Read seed and draw from their buffers, after something other than `load_state_dict` has filled them."""
        if self.draw.is_meta:
            return
        problem = _other_settings("", self.settings, self.options)
        if problem:
            raise ValueError(problem)
        self.seed_number, self.draw_number = int(self.seed), int(self.draw)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # In the process that unpickles.
        self.spec_id, self.spread_spec_id = intern_formula(self.spec), intern_formula(self.spread_spec)

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Frequencies ``omega`` (heads, M, D) in ``dtype``, heads = H or 1, as `tensors` returns them."""
        if self.omega is None:
            raise ValueError(
                f"{type(self).__name__} has no frequencies, and so no spectral density; maps that draw them have."
            )
        return self.omega if self.omega.dtype == dtype else self.omega.to(dtype)

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Tensors that the spec is bound to: (B or 1, H or 1, ...) each."""
        if not self.is_random:
            return []
        return [self.frequencies(dtype).unsqueeze(0)]

    def for_query_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of `prepare` for keys that were repeated for every query head: (B or 1, H or 1, ...) each."""
        return [self._spread_heads(x, 1) for x in tensors]

    def _spread_heads(self, x: Tensor, dim: int) -> Tensor:
        """Repeat a tensor of each key head for its query heads; one shared by all heads stays as it is."""
        repeats = 1 if self.heads == 1 else self.num_heads // self.heads
        return x if repeats == 1 else x.repeat_interleave(repeats, dim)

    def align(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Transform queries and keys before the kernel sees them; here not at all. Masks are those of `prepare`."""
        return query, key

    def prepare(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, query_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the tensors for one call of q (B, H, L, D) and k (B, G, S, D), in the dtype of the arithmetic.

        Masks (B, n) say which tokens are real; None means all.
        """
        return self.tensors(compute_dtype(query.dtype))

    def covariances(self) -> Tensor:
        """Covariance of the frequencies, (H, C, D, D) for C components; here that of the sample, C = 1."""
        with no_autocast(self.seed.device.type):
            omega = self.frequencies().detach()
            centred = omega - omega.mean(1, keepdim=True)
            sample = centred.transpose(1, 2) @ centred / omega.shape[1]
        return self._spread_heads(sample.unsqueeze(1), 0).expand(self.num_heads, -1, -1, -1)

    def resample(self, draw: int | None = None) -> None:
        """Advance to the next draw, or to number ``draw``.

        The draw becomes a new tensor: a graph that is still to be differentiated keeps the one it was built with.
        """
        self.draw_number = integer("draw", self.draw_number + 1 if draw is None else draw, at_least=0)
        self._redraw()

    @torch.inference_mode(False)  # a later call may need gradients
    @torch.no_grad()
    def _redraw(self) -> None:
        self._buffers["draw"] = torch.full_like(self.draw, self.draw_number)
        self._buffers["age"] = torch.zeros_like(self.age)
        for name, x in self._draws(self.draw_number).items():
            self._buffers[name] = x.to(self.get_buffer(name))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Restore what (seed, draw) determine, in tensors that may hold anything, as after `Module.to_empty`."""
        self.seed.fill_(self.seed_number)
        self.settings.copy_(_encode(self.options))
        self._redraw()
        self._reset_learned()

    def forward(self, x: Tensor, role: str = "query", scale: float = 1.0) -> Tensor:
        """Compute phi(sqrt(scale) x) as one tensor, (B, H, L, D) -> (B, H, L, M): for inspection and small L.

        Keys may come by key head too, (B, G, L, D) -> (B, G, L, M).
        """
        if self.sees_sequence:
            raise ValueError(
                f"{type(self).__name__} takes its landmarks from the queries and keys of a call, so that it has no "
                f"features of x alone; use the core's attention_matrix, or landmarks='learned'."
            )
        with no_autocast(x.device.type):
            spec, tensors = self.spec, self.prepare(x, x, None, scale)
            if role == "query" or x.shape[1] == self.num_heads:
                spec, tensors = self.spread_spec, self.for_query_heads(tensors)
            x = x.to(compute_dtype(x.dtype))
            if isinstance(spec, PositiveSpec):
                return spec.log_features(x, tensors, scale, role).exp()  # type: ignore[arg-type]
            phi, factor = spec.features(x, tensors, scale, role)  # type: ignore[attr-defined]
            return phi if factor is None else phi * factor.exp()  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Settings, for printing a model."""
        what: dict[str, Any] = {"features": self.feature_dim, "heads": self.num_heads, "head_dim": self.head_dim}
        return ", ".join(f"{k}={v}" for k, v in {**what, **self.options}.items()) + f", spec={self.spec}"


def _encode(options: Mapping[str, object]) -> Tensor:
    """Encode settings as bytes in a tensor: every format of weights can carry them, without unpickling."""
    return torch.frombuffer(bytearray(json.dumps(options), "utf-8"), dtype=torch.uint8).clone()


def _other_settings(prefix: str, saved: Tensor, ours: Mapping[str, object]) -> str | None:
    """Describe how the settings of a state dict differ from ours; None if they do not."""
    name = prefix.removesuffix(".") or "the map"
    try:
        theirs = json.loads(bytes(saved.to(torch.uint8).tolist()))
    except (ValueError, RecursionError):
        return f"{name}: its saved settings cannot be read; save the model itself again, or load it without them."
    ours = json.loads(json.dumps(ours))  # as they are after saving and loading
    rows = [(x, theirs.get(x), ours.get(x)) for x in {**theirs, **ours} if theirs.get(x) != ours.get(x)]
    if not rows:
        return None
    there = ", ".join(f"{what}={a!r}" for what, a, _ in rows)
    here = ", ".join(f"{what}={b!r}" for what, _, b in rows)
    return f"{name} was saved with {there}, this one has {here}; build it with the saved settings."
