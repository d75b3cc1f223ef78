"""Attention as modules: the core by name, the layer with projections, the redraw schedule."""

from kernelformer.modules.calibration import calibrate
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, SoftmaxCore
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.layer import KernelAttention
from kernelformer.modules.methods import METHODS, Method, list_methods, register_method
from kernelformer.modules.mixed import MixedCore
from kernelformer.modules.multihead import MultiheadAttention, replace_attention, restore_attention
from kernelformer.modules.positions import RelativePositions, RotaryPositions
from kernelformer.modules.schedules import parameter_groups, redraw
from kernelformer.modules.spec import (
    AttentionSpec,
    build_attention,
    kernel_attention,
    method_options,
    parse_attention,
    parse_method,
)

__all__ = [
    "METHODS",
    "AttentionCore",
    "AttentionSpec",
    "GaussianCore",
    "KernelAttention",
    "KernelCore",
    "Method",
    "MixedCore",
    "MultiheadAttention",
    "RelativePositions",
    "RotaryPositions",
    "SoftmaxCore",
    "build_attention",
    "calibrate",
    "kernel_attention",
    "list_methods",
    "method_options",
    "parameter_groups",
    "parse_attention",
    "parse_method",
    "redraw",
    "register_method",
    "replace_attention",
    "restore_attention",
]
