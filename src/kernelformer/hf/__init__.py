"""Kernel attention in Hugging Face models."""

from kernelformer.hf.cache import StateCache

__all__ = ["StateCache"]
