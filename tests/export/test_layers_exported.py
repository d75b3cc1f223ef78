"""The graphs of one causal layer: a prompt and steps with the state as inputs and outputs equal the layer."""

from __future__ import annotations

import pytest
import torch

import kernelformer as kf
from kernelformer.export import LayerPrompt, LayerStep, save_onnx, trace_step, trace_whole
from kernelformer.export.onnx_files import run_graph, session

ELU = {"method": "elu", "num_kv_heads": 1}


def graphs(layer):
    """Programs of the prompt and of a step, with the modules that they were traced from."""
    prompt = LayerPrompt(layer)
    first = trace_whole(prompt)
    step = LayerStep(layer, prompt.layouts)
    return prompt, first, step, trace_step(step, first.module()(*prompt.example(8)))


def test_a_prompt_and_steps_in_torch_equal_the_layer():
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 2, causal=True, **ELU).eval()
    prompt, first, step, second = graphs(layer)
    assert prompt.outputs == step.outputs == ["y", "next_position", "next_state_0_0", "next_state_0_1"]
    x, mask = torch.randn(3, 13, 16), torch.ones(3, 13, dtype=torch.bool)
    mask[0, :4] = False
    with torch.no_grad():
        want = layer(x, key_mask=mask)
    got = first.module()(x[:, :9], mask[:, :9])
    for i in range(9, 13):
        torch.testing.assert_close(got[0][:, -1], want[:, i - 1], rtol=1e-4, atol=1e-5)
        got = second.module()(x[:, i : i + 1], *got[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ELU,
        {"method": "loglinear", "num_features": 8, "window": 4, "sinks": 2, "rotary": True},
        {"method": "trigonometric", "num_features": 8, "window": 4},
        {"method": "softmax", "rotary": True},
    ],
)
def test_a_prompt_and_steps_in_torch_and_onnxruntime_equal_the_layer(options, tmp_path):
    torch.manual_seed(0)
    layer = kf.KernelAttention(16, 2, causal=True, **options).eval()
    prompt, first, step, second = graphs(layer)
    for program, module, name in ((first, prompt, "prompt.onnx"), (second, step, "step.onnx")):
        assert not [n for n in program.graph.nodes if "kernelformer" in str(n.target)]
        save_onnx(program, module, tmp_path / name)
    start, go_on = (session(tmp_path / name, 1) for name in ("prompt.onnx", "step.onnx"))
    assert [x.name for x in start.get_outputs()][1:] == [f"next_{x.name}" for x in go_on.get_inputs()[1:]]
    for batch, length in ((1, 1), (3, 9), (2, 65)):
        x, mask = torch.randn(batch, length + 12, 16), torch.ones(batch, length + 12, dtype=torch.bool)
        mask[0, : length // 2] = False
        with torch.no_grad():
            want = layer(x, key_mask=mask)
        ours = first.module()(x[:, :length], mask[:, :length])
        theirs = run_graph(start, [x[:, :length].numpy(), mask[:, :length].numpy()])
        for i in range(length, length + 12):
            for got in (ours[0], torch.from_numpy(theirs[0])):
                torch.testing.assert_close(got[:, -1], want[:, i - 1], rtol=1e-4, atol=1e-5)
            ours = second.module()(x[:, i : i + 1], *ours[1:])
            theirs = run_graph(go_on, [x[:, i : i + 1].numpy(), *theirs[1:]])


def test_a_layer_without_a_state_says_how_it_is_exported():
    with pytest.raises(ValueError, match=r"causal=False has no state; give it to torch\.export\.export itself"):
        LayerPrompt(kf.KernelAttention(16, 2, method="elu"))


def test_sinks_without_a_window_are_refused_with_a_way_out():
    layer = kf.KernelAttention(16, 2, method="favor+", num_features=8, causal=True, sinks=2).eval()
    with pytest.raises(ValueError, match="sinks=2 and no window cannot be exported as a stream; give window=1"):
        trace_whole(LayerPrompt(layer))
