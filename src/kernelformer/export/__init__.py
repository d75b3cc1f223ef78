"""Models as graphs that run without this library: by `torch.export`, and from there as ONNX."""

from kernelformer.lazy import require_extra

require_extra(__name__)

from kernelformer.export.graphs import LayerPrompt, LayerStep, Prompt, Step, Whole, trace_step, trace_whole
from kernelformer.export.onnx_files import OPSET, save_onnx

__all__ = ["OPSET", "LayerPrompt", "LayerStep", "Prompt", "Step", "Whole", "save_onnx", "trace_step", "trace_whole"]
