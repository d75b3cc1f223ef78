"""Algorithms over q, k, v and a feature map; `reference` is the definition of all the others."""

from kernelformer.attention.causal import causal_attention
from kernelformer.attention.exact import gaussian_attention
from kernelformer.attention.linear import linear_attention
from kernelformer.attention.short import direct_attention
from kernelformer.attention.state import State
from kernelformer.attention.step import read, step

__all__ = ["State", "causal_attention", "direct_attention", "gaussian_attention", "linear_attention", "read", "step"]
