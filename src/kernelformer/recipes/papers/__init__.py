"""The papers' training settings, one file a paper."""

from __future__ import annotations

from kernelformer.recipes.papers.base import Recipe
from kernelformer.recipes.papers.kernelized_rpe import KERNELIZED_RPE
from kernelformer.recipes.papers.learned_kernels import LEARNED_KERNELS
from kernelformer.recipes.papers.performer import PERFORMER
from kernelformer.recipes.papers.skyformer import SKYFORMER

PAPERS: dict[str, Recipe] = {**LEARNED_KERNELS, **SKYFORMER, **KERNELIZED_RPE, **PERFORMER}

__all__ = ["PAPERS", "Recipe"]
