"""The papers' training settings, one or two files a paper."""

from __future__ import annotations

from kernelformer_lab.recipes.papers.base import Recipe
from kernelformer_lab.recipes.papers.kernelized_rpe import KERNELIZED_RPE, RPE_ON_IMAGES
from kernelformer_lab.recipes.papers.learned_kernels import KERNELS_ON_GLUE, LEARNED_KERNELS
from kernelformer_lab.recipes.papers.performer import PERFORMER
from kernelformer_lab.recipes.papers.skyformer import SKYFORMER

PAPERS: dict[str, Recipe] = {
    **LEARNED_KERNELS,
    **KERNELS_ON_GLUE,
    **SKYFORMER,
    **KERNELIZED_RPE,
    **RPE_ON_IMAGES,
    **PERFORMER,
}

__all__ = ["PAPERS", "Recipe"]
