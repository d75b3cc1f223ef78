"""The papers' training settings, one or two files a paper."""

from __future__ import annotations

from kernelformer.recipes.papers.base import Recipe
from kernelformer.recipes.papers.kernelized_rpe import KERNELIZED_RPE
from kernelformer.recipes.papers.kernels_on_glue import KERNELS_ON_GLUE
from kernelformer.recipes.papers.learned_kernels import LEARNED_KERNELS
from kernelformer.recipes.papers.performer import PERFORMER
from kernelformer.recipes.papers.rpe_on_images import RPE_ON_IMAGES
from kernelformer.recipes.papers.skyformer import SKYFORMER

PAPERS: dict[str, Recipe] = {
    **LEARNED_KERNELS,
    **KERNELS_ON_GLUE,
    **SKYFORMER,
    **KERNELIZED_RPE,
    **RPE_ON_IMAGES,
    **PERFORMER,
}

__all__ = ["PAPERS", "Recipe"]
