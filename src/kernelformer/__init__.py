"""Linear-time attention by kernels, for PyTorch."""

from kernelformer.attention import State
from kernelformer.modules import (
    KernelAttention,
    RelativePositions,
    build_attention,
    list_methods,
    method_options,
    parameter_groups,
    redraw,
)

__version__ = "0.1.0"
__all__ = [
    "KernelAttention",
    "RelativePositions",
    "State",
    "__version__",
    "build_attention",
    "list_methods",
    "method_options",
    "parameter_groups",
    "redraw",
]
