"""Attention as modules: the core by name, the layer with projections, the redraw schedule."""

from kernelformer.modules.build import build_attention
from kernelformer.modules.calibration import calibrate
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, SoftmaxCore
from kernelformer.modules.functional import kernel_attention
from kernelformer.modules.groups import parameter_groups
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.layer import KernelAttention
from kernelformer.modules.method import Method
from kernelformer.modules.methods import METHODS, list_methods
from kernelformer.modules.mixed import MixedCore
from kernelformer.modules.multihead import MultiheadAttention
from kernelformer.modules.options import method_options
from kernelformer.modules.positions import RelativePositions
from kernelformer.modules.redraw import redraw
from kernelformer.modules.replacing import replace_attention, restore_attention
from kernelformer.modules.rotary import RotaryPositions
from kernelformer.modules.spec import AttentionSpec, parse_attention, parse_method

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
    "replace_attention",
    "restore_attention",
]
