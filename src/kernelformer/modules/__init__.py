"""Attention as modules: the core by name, the layer with projections, the redraw schedule."""

from kernelformer.modules.build import build_attention, list_methods, method_options, parse_method
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.exact import GaussianCore, SoftmaxCore
from kernelformer.modules.functional import kernel_attention
from kernelformer.modules.groups import parameter_groups
from kernelformer.modules.kernel import KernelCore
from kernelformer.modules.layer import KernelAttention
from kernelformer.modules.mixed import MixedCore
from kernelformer.modules.multihead import MultiheadAttention
from kernelformer.modules.positions import RelativePositions
from kernelformer.modules.redraw import redraw
from kernelformer.modules.replacing import replace_attention, restore_attention

__all__ = [
    "AttentionCore",
    "GaussianCore",
    "KernelAttention",
    "KernelCore",
    "MixedCore",
    "MultiheadAttention",
    "RelativePositions",
    "SoftmaxCore",
    "build_attention",
    "kernel_attention",
    "list_methods",
    "method_options",
    "parameter_groups",
    "parse_method",
    "redraw",
    "replace_attention",
    "restore_attention",
]
