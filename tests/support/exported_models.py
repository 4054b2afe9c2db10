"""PyTorch models exported to ONNX for tests; importing this needs torch and transformers."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch


class _Flat(torch.nn.Module):
    """Tensors by place, and the first output alone, as the tracer needs them."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return first


def _norm(module: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Spelled out: the tracer has no operator for it."""
    normed: torch.Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * module.weight
    return normed


def trace(model: Any, inputs: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write a teacher by PyTorch's older exporter, in a fifth of the time that ``export_teacher`` takes.

    For tests of what is done with a teacher; those of export itself, and of whole ways from model to student, call
    ``export_teacher``, whose names of axes and output these are. The model keeps its eager attention.
    """
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
        model.config.use_cache = False
    lengths = {
        name: "decoder_sequence" if name.startswith("decoder_") else "sequence"
        for name, tensor in inputs.items()
        if tensor.ndim == 2 and not tensor.is_floating_point()
    }
    axes = {name: {0: "batch"} | ({1: lengths[name]} if name in lengths else {}) for name in inputs}
    with warnings.catch_warnings(), torch.no_grad(), patch.object(torch.nn.RMSNorm, "forward", _norm):
        warnings.simplefilter("ignore")  # the tracer warns of every branch, and of its age
        output = model.eval()(**inputs)
        name = "output" if isinstance(output, torch.Tensor) else next(iter(output))
        axes[name] = {0: "batch"} | ({1: list(lengths.values())[-1]} if lengths else {})
        torch.onnx.export(
            _Flat(model, tuple(inputs)).eval(),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[name],
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )
    return path
