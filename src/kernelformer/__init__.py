"""Linear-time attention by kernels, for PyTorch.

Importing it takes no time: torch is imported with the first name that needs it.
"""

from typing import TYPE_CHECKING

from kernelformer.lazy import lazy_names

if TYPE_CHECKING:
    from kernelformer.attention import State
    from kernelformer.modules import (
        KernelAttention,
        MultiheadAttention,
        RelativePositions,
        build_attention,
        calibrate,
        kernel_attention,
        list_methods,
        method_options,
        parameter_groups,
        redraw,
        register_method,
        replace_attention,
        restore_attention,
    )

__version__ = "0.2.0"
__all__ = [
    "KernelAttention",
    "MultiheadAttention",
    "RelativePositions",
    "State",
    "__version__",
    "build_attention",
    "calibrate",
    "kernel_attention",
    "list_methods",
    "method_options",
    "parameter_groups",
    "redraw",
    "register_method",
    "replace_attention",
    "restore_attention",
]
_PACKAGES = ("attention", "contract", "errors", "feature_maps", "kernels", "modules")  # there without an import
__getattr__, __dir__ = lazy_names(
    __name__,
    {name: f"{__name__}.modules" for name in __all__ if not name.startswith("__")}
    | {"State": f"{__name__}.attention"}
    | {name: f"{__name__}.{name}" for name in _PACKAGES},
)
