"""Sequences and models beyond one process."""

from kernelformer.parallel.context import context_parallel

__all__ = ["context_parallel"]
