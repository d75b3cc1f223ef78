"""Learned spectral kernels: maps whose frequencies follow from parameters and a noise draw (KL-Transformer, Sec. 2).

    RKS: phi(x) = 1/sqrt(M) [cos(w_i . x), sin(w_i . x)]            K = Fourier transform of the density of w   (Eq. 3)
    PRF: phi(x) = exp(-|x|^2) / sqrt(M) [exp(w_i . x)]              with w ~ N(0, I) the Gaussian kernel        (Eq. 9)

M counts all frequencies. The signed RKS maps add one constant feature sqrt(s), which makes the kernel K + s: with s = 1
no denominator can fall below zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.contract import Spec
from kernelformer.errors import choice, flag, number, positive_int
from kernelformer.feature_maps.base import FIRST, FeatureMap, parameter
from kernelformer.feature_maps.draws import generator
from kernelformer.feature_maps.exponential import DENSE, Dense, ExponentialSpec
from kernelformer.feature_maps.fourier import FourierSpec

Smoothing = float | Literal["noise"]
STARTS = ("identity", "xavier")  # of a mixture's covariances


class SpectralMap(FeatureMap):
    """RKS or PRF features of frequencies that follow from parameters and the noise draw.

    Args:
        features: ``rks`` or ``prf``.
        smoothing: s of RKS features, a number of at least 0; ``noise`` is 1 / sqrt(2m), the standard deviation of an
            estimated kernel entry far from the diagonal: it keeps the contrast of the kernel and vanishes as m grows.
        width: number of frequencies, of which ``num_features`` are independent; None: all are.
        transform: x -> W x.

    The others are those of `FeatureMap`.
    """

    noise: Tensor

    def __init__(
        self,
        features: str,
        *,
        smoothing: Smoothing,
        settings: Mapping[str, object],
        num_features: int,
        width: int | None = None,
        transform: Dense = DENSE,
        **common: Any,
    ) -> None:
        choice("features", features, ("rks", "prf"))
        if isinstance(smoothing, str):
            choice("smoothing", smoothing, ("noise",))
        elif number("smoothing", smoothing, at_least=0) > 1e6:
            raise ValueError(f"smoothing must be at most 1e6, got {smoothing:g}: every key would weigh the same.")
        own, width = {"features": features, **settings}, num_features if width is None else width
        spec: Spec = ExponentialSpec(row=-1.0, constant=-0.5 * math.log(width), transform=transform)
        if features == "rks":
            own["smoothing"] = smoothing if isinstance(smoothing, str) else float(smoothing)
            size = 1 / math.sqrt(2 * num_features) if isinstance(smoothing, str) else float(smoothing)
            spec = FourierSpec(row=0.0, amplitude=1 / math.sqrt(width), transform=transform, smoothing=size)
        super().__init__(spec, num_features=num_features, settings=own, **common)

    def _draws(self, draw: int) -> dict[str, Tensor]:
        return {"noise": self._noise(draw)}


class MixtureMap(SpectralMap):
    """Gaussian mixture as spectral density, C components of weight 1/C.

        w_{c,i} = S_c n_i + mu_c,      n_i ~ N(0, I) shared by the components           (KL-Transformer, Eq. 5, 10)

    Covariances are S_c S_c^T (the paper writes Sigma_c n). It starts at S = I and small means: near the Gaussian
    kernel, and not exactly at it, for equal components would stay equal. C * num_features frequencies.

    ``start="xavier"`` is where the authors' code starts, with Xavier's uniform draw T of variance 2 / (fan in + fan
    out), the fans being those of a tensor with the heads in front:

        full        S = T,  T (heads, D, D)           covariances with eigenvalues of mean 2 / (D + heads)
        diagonal    S = exp(T / 2),  T (heads, D)     covariances exp(T), T of variance 2 / (D + heads): around 1

    Parameters: mu (heads, C, D); S (heads, C, D, D), or (heads, C, D) if diagonal; C / 2 of both if tied.

    Args:
        features: ``rks`` or ``prf``.
        components: C, the number of Gaussians in the mixture.
        tied: components in pairs (S, mu), (S, -mu), as in the paper's experiments.
        covariance: ``full`` or ``diagonal``; the paper: full for RKS, diagonal for PRF.
        start: first covariances: ``identity``, or ``xavier`` as above, which learns from there as from anywhere.
        mean_std: standard deviation of the first means; None: 0.01, with ``xavier`` uniform in +-1/sqrt(fan in).
        smoothing: s of RKS features, a number of at least 0 or ``noise``; see `SpectralMap`.
        per_head: parameters and noise of its own for each head.

    The others are those of `FeatureMap`.
    """

    def __init__(
        self,
        *,
        features: str,
        num_features: int = 256,
        components: int = 2,
        tied: bool = False,
        covariance: str = "full",
        start: str = "identity",
        mean_std: float | None = None,
        smoothing: Smoothing = 1.0,
        per_head: bool = True,
        **common: Any,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        components = positive_int("components", components)
        choice("covariance", covariance, ("full", "diagonal"))
        if flag("tied", tied) and components % 2:
            raise ValueError(f"tied components come in pairs, got components={components}; use an even number.")
        choice("start", start, STARTS)
        mean_std = None if mean_std is None else number("mean_std", mean_std, at_least=0)
        super().__init__(
            features,
            width=components * num_features,
            smoothing=smoothing,
            settings={"components": components, "tied": tied, "covariance": covariance},
            num_features=num_features,
            per_head=per_head,
            **common,
        )
        self.components, self.tied, self.diagonal = components, tied, covariance == "diagonal"
        self.start, self.mean_std = start, mean_std
        own = components // 2 if tied else components
        self.mu = parameter(self.heads, own, self.head_dim)
        self.S = parameter(self.heads, own, self.head_dim, *(() if self.diagonal else (self.head_dim,)))
        self._start()

    def _reset_learned(self) -> None:
        gen = generator(self.seed_number, FIRST)
        if self.mean_std is None and self.start == "xavier":
            self.mu.copy_(_uniform(self.mu, 1 / math.sqrt(self._fans[0]), gen))
        else:
            std = 0.01 if self.mean_std is None else self.mean_std
            self.mu.copy_(std * torch.randn(self.mu.shape, generator=gen, dtype=torch.float64, device="cpu"))
        if self.start == "xavier":
            drawn = _uniform(self.S, math.sqrt(6 / sum(self._fans)), gen)
            self.S.copy_((drawn / 2).exp() if self.diagonal else drawn)
        else:
            self.S.copy_(torch.ones((), device="cpu") if self.diagonal else torch.eye(self.head_dim, device="cpu"))

    @property
    def _fans(self) -> tuple[int, int]:
        """Fan in and fan out of one component, (heads, D) or (heads, D, D), as torch counts them: the first dimension
        is the outputs', and what follows the second multiplies both."""
        width = 1 if self.diagonal else self.head_dim
        return self.head_dim * width, self.heads * width

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Frequencies S n + mu, component after component, (heads, C num_features, D)."""
        noise, S, mu = self.noise.to(dtype).unsqueeze(1), self.S.to(dtype), self.mu.to(dtype).unsqueeze(2)
        spread = noise * S.unsqueeze(2) if self.diagonal else noise @ S.transpose(-1, -2)  # (heads, C, M, D)
        if self.tied:
            return torch.stack([spread + mu, spread - mu], 2).flatten(1, 3)
        return (spread + mu).flatten(1, 2)

    def covariances(self) -> Tensor:
        """Covariances S_c S_c^T, (H, C, D, D)."""
        S = self.S.detach().float()
        own = S.square().diag_embed() if self.diagonal else S @ S.transpose(-1, -2)
        both = own.repeat_interleave(2, 1) if self.tied else own
        return self._spread_heads(both, 0).expand(self.num_heads, -1, -1, -1)


def _uniform(like: Tensor, bound: float, gen: torch.Generator) -> Tensor:
    """Draw numbers from -bound to bound in the shape of a tensor, in float64."""
    return (2 * torch.rand(like.shape, generator=gen, dtype=torch.float64, device="cpu") - 1) * bound


class Generator(nn.Module):
    """Network from noise to frequencies: ``depth`` times (linear, batch norm, leaky ReLU), then linear and tanh.

    Linear layers before a normalization have no bias: it would take it away again.
    Normalization is by the statistics of the noise at hand, in training and in evaluation: the kernel is a function of
    the parameters and the draw alone. Running averages would give evaluation a kernel that was never trained, and
    activation checkpointing would update them twice.
    """

    def __init__(self, dim: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [dim] + [width] * depth
        self.weights = nn.ParameterList(parameter(b, a) for a, b in zip(sizes, [*sizes[1:], dim], strict=True))
        self.bias = parameter(dim)
        self.gains = nn.ParameterList(parameter(x) for x in sizes[1:])
        self.shifts = nn.ParameterList(parameter(x) for x in sizes[1:])

    @torch.no_grad()
    def start(self, gen: torch.Generator) -> None:
        """Initialize as torch's own layers: uniform in +-1/sqrt(fan in)."""
        for x in (*self.weights, self.bias):
            bound = 1 / math.sqrt(x.shape[1] if x.dim() == 2 else self.weights[-1].shape[1])
            x.copy_(_uniform(x, bound, gen))
        for gain, shift in zip(self.gains, self.shifts, strict=True):
            gain.fill_(1)
            shift.fill_(0)

    def forward(self, noise: Tensor) -> Tensor:
        """Map noise to frequencies, (n, D) -> (n, D), in the dtype of the noise."""
        dtype, h = noise.dtype, noise
        for weight, gain, shift in zip(self.weights, self.gains, self.shifts, strict=False):
            h = F.linear(h, weight.to(dtype))
            h = F.batch_norm(h, None, None, gain.to(dtype), shift.to(dtype), training=True)
            h = F.leaky_relu(h)
        return F.linear(h, self.weights[-1].to(dtype), self.bias.to(dtype)).tanh()


class GenerativeMap(SpectralMap):
    """Frequencies by a neural network from noise.

        w_i = g(n_i),      n_i ~ N(0, I)           (KL-Transformer, Eq. 8, 11)

    One generator for all heads of a layer. Its tanh keeps the entries of w below 1, so that the start is a smooth
    kernel but not the Gaussian one.

    Args:
        features: ``rks`` or ``prf``.
        width: of the generator's hidden layers, default head_dim.
        depth: number of hidden layers.
        smoothing: s of RKS features, a number of at least 0 or ``noise``; see `SpectralMap`.
        per_head: noise of its own for each head.

    The others are those of `FeatureMap`.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        features: str,
        num_features: int = 256,
        width: int | None = None,
        depth: int = 4,
        smoothing: Smoothing = 1.0,
        **common: Any,
    ) -> None:
        num_features, head_dim = positive_int("num_features", num_features), positive_int("head_dim", head_dim)
        if num_features == 1:
            raise ValueError(
                "the generator normalizes over the frequencies (BatchNorm), which takes more than one sample, got "
                "num_features=1; use at least 2."
            )
        width = positive_int("width", head_dim if width is None else width)
        depth = positive_int("depth", depth)
        super().__init__(
            features,
            smoothing=smoothing,
            settings={"width": width, "depth": depth},
            num_features=num_features,
            head_dim=head_dim,
            **common,
        )
        self.generator = Generator(head_dim, width, depth)
        self._start()

    def _reset_learned(self) -> None:
        self.generator.start(generator(self.seed_number, FIRST))

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Frequencies g(n), (heads, num_features, D); all heads are one batch."""
        flat: Tensor = self.generator(self.noise.to(dtype).flatten(0, 1))
        return flat.view(self.noise.shape)


class ScaledFourierMap(SpectralMap):
    """Fourier features with a learned scale for every coordinate of the frequencies.

        phi(x) = 1 / sqrt(m) [cos(w_i . x), sin(w_i . x)],      w_i = sigma * n_i,  n_i ~ N(0, I)

    Meant for unit vectors, where the Gaussian kernel is the softmax kernel up to a factor. M = 2 num_features.

    Parameters: sigma (heads, D), at first 1.
    """

    def __init__(self, *, num_features: int = 256, per_head: bool = True, **common: Any) -> None:
        num_features = positive_int("num_features", num_features)
        super().__init__("rks", smoothing=0.0, settings={}, num_features=num_features, per_head=per_head, **common)
        self.sigma = parameter(self.heads, self.head_dim)
        self._start()

    def _reset_learned(self) -> None:
        self.sigma.fill_(1.0)

    def frequencies(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Frequencies sigma * n, (heads, num_features, D)."""
        return self.noise.to(dtype) * self.sigma.to(dtype).unsqueeze(1)
