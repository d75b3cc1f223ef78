"""Measuring on a device: what is there, waiting for it, its memory, and the contenders of other runtimes."""

from __future__ import annotations

import json

import pytest
import torch

from kernelformer_lab.bench import devices
from kernelformer_lab.bench.attention import contender
from kernelformer_lab.bench.benchmark import heaps, run
from kernelformer_lab.bench.case import Case
from kernelformer_lab.bench.harness import time_bursts
from kernelformer_lab.bench.settings import DEVICES, BenchSettings
from kernelformer_lab.bench.timing import Step


def test_an_unknown_device_and_an_absent_one_are_named_with_those_that_are_there():
    with pytest.raises(ValueError, match=r"unknown device 'tpu'.*cuda"):
        BenchSettings(device="tpu")
    with pytest.raises(ValueError, match=r"'cpu:1' is not here: there are 1 of kind 'cpu'"):
        devices.check_device("cpu:1")
    absent = [x for x in DEVICES if x not in devices.present_devices()]
    for name in absent:
        with pytest.raises(ValueError, match=f"'{name}' is not here: torch .* finds cpu"):
            run(BenchSettings(device=name), 1)
    assert devices.check_device("cpu") == torch.device("cpu")


def test_a_clock_is_read_only_when_the_device_is_idle(monkeypatch):
    """The CPU has the same interface as an accelerator, and nothing to wait for."""
    events = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: events.append("wait"))
    Step(lambda: events.append("run"), lambda: events.append("clean")).seconds()
    assert events == ["wait", "run", "wait", "clean"]


def test_a_contender_without_memory_is_noted_and_the_others_are_timed():
    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB.\nmore")

    figures = time_bursts({"a": Step(too_much), "b": Step(lambda: None)}, 0.001)
    assert figures["a"] == {"problem": "CUDA out of memory. Tried to allocate 40 GiB."}
    assert figures["b"]["seconds"] >= 0


def test_the_record_names_the_machine_in_plain_values():
    facts = devices.device_facts(torch.device("cpu"))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["device"] == "cpu"
    assert facts["name"]
    assert facts["os"].split()[0] in ("Linux", "Darwin", "Windows")


def test_the_heap_of_the_cpu_is_not_varied_on_other_devices():
    assert heaps(BenchSettings()) == ("default", "kept")
    assert heaps(BenchSettings(device="cuda")) == ("default",)


@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_attention_of_onnxruntime_is_softmax(task):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    case, peer = Case(task, 256, batch=2, heads=2, head_dim=8), contender("onnxruntime")
    assert peer.refuses(case) is None
    assert peer.error(case) < peer.tolerance
    assert "backward" in peer.refuses(Case(task, 256, backward=True))
    assert "mps" in peer.refuses(Case(task, 256, device="mps"))


def test_kernels_for_other_devices_say_so():
    peer = contender("flash-linear-attention")
    assert "CUDA" in peer.refuses(Case("causal", 256))
    assert peer.refuses(Case("causal", 256, device="cuda:1")) is None
    assert "no kernel" in peer.refuses(Case("bidirectional", 256, device="cuda"))
