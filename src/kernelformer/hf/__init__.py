"""Kernel attention in Hugging Face models: registered as an implementation, or put into pretrained ones.

Importing this package makes transformers' Auto classes know folders of converted models, and nothing else.
"""

from kernelformer.lazy import require_extra

require_extra(__name__)

from kernelformer.cache import StateCache
from kernelformer.hf.convert import Conversion, conversion, convert, cores, new_cache, undo
from kernelformer.hf.load import load, register_auto
from kernelformer.hf.register import register
from kernelformer.hf.save import save

register_auto()  # so that transformers' Auto classes and pipelines open converted folders after this import

__all__ = [
    "Conversion",
    "StateCache",
    "conversion",
    "convert",
    "cores",
    "load",
    "new_cache",
    "register",
    "save",
    "undo",
]
