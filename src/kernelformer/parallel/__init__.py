"""Sequences and models beyond one process."""

from kernelformer.parallel.context import context_parallel, sum_gradients

__all__ = ["context_parallel", "sum_gradients"]
