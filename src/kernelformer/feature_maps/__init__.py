"""Feature maps phi: R^D -> R^M, one file a family."""

from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.elementwise import GeneralizedMap
from kernelformer.feature_maps.fourier import TrigonometricMap
from kernelformer.feature_maps.positive import PositiveMap

__all__ = ["FeatureMap", "GeneralizedMap", "PositiveMap", "TrigonometricMap"]
