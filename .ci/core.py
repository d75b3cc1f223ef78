"""Use an installed kernelformer without its extras: layers train and decode, and what needs more says so."""

import importlib.util
from importlib.metadata import version

import torch

import kernelformer as kf

extras = [x for x in ("transformers", "accelerate", "typer", "numpy") if importlib.util.find_spec(x)]
assert not extras, f"{extras} are installed: this says nothing about an environment without extras"
assert version("kernelformer") == kf.__version__

for method in kf.list_methods():
    length = {"max_length": 24} if method == "linformer" else {}
    core = kf.build_attention(method, head_dim=16, num_heads=2, num_features=16, **length)
    q, k, v = (torch.randn(2, 2, 24, 16, requires_grad=True) for _ in range(3))
    out = core(q, k, v, is_causal=method == "rfa-gate")
    out.sum().backward()
    assert torch.isfinite(out).all(), method
    assert torch.isfinite(q.grad).all(), method

layer = kf.KernelAttention(64, 4, method="favor+", num_features=32, causal=True, window=8, sinks=2)
y, state = layer(torch.randn(1, 40, 64), return_state=True)
y, state = layer.step(torch.randn(1, 1, 64), state)

for needs_more in ("hf", "models"):
    try:
        importlib.import_module(f"kernelformer.{needs_more}")
    except ModuleNotFoundError as problem:
        said = str(problem)
    else:
        said = "nothing"
    assert "pip install 'kernelformer[hf]'" in said, f"kernelformer.{needs_more} said {said}"
print(f"kernelformer {kf.__version__} without extras: {len(kf.list_methods())} methods forward and backward")
