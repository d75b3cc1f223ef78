"""Feature maps phi: R^D -> R^M, one file a family."""

from kernelformer.feature_maps.base import FeatureMap
from kernelformer.feature_maps.elementwise import GeneralizedMap
from kernelformer.feature_maps.exponential import PositiveMap
from kernelformer.feature_maps.fastfood import FastFoodMap
from kernelformer.feature_maps.formula import FormulaMap
from kernelformer.feature_maps.fourier import TrigonometricMap
from kernelformer.feature_maps.nystrom import NystromMap
from kernelformer.feature_maps.optimal import OptimalMap
from kernelformer.feature_maps.pivots import WildcatMap
from kernelformer.feature_maps.spectral import GenerativeMap, MixtureMap, ScaledFourierMap
from kernelformer.feature_maps.untied import HedgehogMap, LogLinearMap

__all__ = [
    "FastFoodMap",
    "FeatureMap",
    "FormulaMap",
    "GeneralizedMap",
    "GenerativeMap",
    "HedgehogMap",
    "LogLinearMap",
    "MixtureMap",
    "NystromMap",
    "OptimalMap",
    "PositiveMap",
    "ScaledFourierMap",
    "TrigonometricMap",
    "WildcatMap",
]
