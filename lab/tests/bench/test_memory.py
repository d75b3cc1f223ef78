"""Memory does not grow with the length; measured in processes of their own."""

from __future__ import annotations

import pytest

from kernelformer_lab.bench.attention import Case
from kernelformer_lab.bench.benchmark import job

MIB = 2**20


def weigh(method: str, case: Case) -> tuple[float, float]:
    """(peak beyond the inputs, of which results) in MiB."""
    figures = job("memory", case, [method], heap="default", threads=2, budget=1.0)
    return figures["peak"] / MIB, figures["results"] / MIB


@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_a_forward_needs_buffers_of_one_size(task):
    peak, results = weigh("favor+", Case(task, 8192))  # a whole mapped tensor would be 64 MiB, and there are two
    assert peak - results < 32


@pytest.mark.slow
@pytest.mark.parametrize("method", ["favor+", "relu", "trigonometric", "elu"])
@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_a_forward_of_65536_tokens_needs_less_than_64_mib(method, task):
    peak, results = weigh(method, Case(task, 65536))
    assert peak - results < 64


@pytest.mark.slow
def test_training_keeps_little_beyond_its_results():
    peak, results = weigh("favor+", Case("bidirectional", 16384, backward=True))
    assert peak - results < 40
    peak, results = weigh("favor+", Case("causal", 16384, backward=True))  # and a state per group of chunks
    assert peak - results < 80
