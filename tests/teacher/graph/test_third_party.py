"""Graphs written by others: test fixtures of other projects, inspected and, where possible, squeezed."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.attention_graphs import squeeze_and_compare

from shd_ref.teacher import find_sites, load_teacher


class Verdict(NamedTuple):
    sites: int
    op_type: str = "Softmax"
    supported: bool = True
    layout: str | None = "batch-heads"
    heads: int | None = None
    kv_heads: int | None = None
    reason: str = ""


FUSED = "attention fusion off"
VERDICTS = {
    "02_bert_toy_pytorch_h4.onnx": Verdict(5, heads=4, kv_heads=4),
    "04_gpt2_one_layer_h2.onnx": Verdict(1, heads=2, kv_heads=2),
    "08_nn_transformer_encoder_mlm_folded_h2.onnx": Verdict(2, layout="batch-folded", heads=2, kv_heads=2),
    "11_tiny_random_gpt2_fused_attention_5L_h4.onnx": Verdict(5, "Attention", False, None, 4, None, FUSED),
    "12_tiny_qwen_gqa_fp16_2L_q4kv2.onnx": Verdict(2, "GroupQueryAttention", False, None, 4, 2, FUSED),
    "attention_no_mask_fp16.onnx": Verdict(1, "Softmax", False, None, None, None, "no output projection"),
    "attention_symbolic_batch.onnx": Verdict(1, heads=2, kv_heads=2),
    "hf_fp32_encoder_self_attention.onnx": Verdict(1, "Attention", False, None, 2, None, FUSED),
    "random_encoder.onnx": Verdict(1, layout="batch-folded", heads=1, kv_heads=1),
}
CONVERTED = (
    "02_bert_toy_pytorch_h4.onnx",
    "04_gpt2_one_layer_h2.onnx",
    "attention_symbolic_batch.onnx",
    "random_encoder.onnx",
)


def graph(shared_data: Path, name: str) -> onnx.ModelProto:
    path = shared_data / "onnx_graphs" / name
    if not path.is_file():
        pytest.skip(f"public graph not found: {name}")
    return load_teacher(path)


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(shared_data: Path, name: str) -> None:
    wanted, sites = VERDICTS[name], find_sites(graph(shared_data, name))
    assert len(sites) == wanted.sites
    assert len({site.name for site in sites}) == len(sites)
    for layer, site in enumerate(sites):
        assert site.layer == layer
        assert (site.op_type, site.supported, site.layout) == (wanted.op_type, wanted.supported, wanted.layout)
        assert (site.num_heads, site.num_kv_heads) == (wanted.heads, wanted.kv_heads)
        assert wanted.reason in (site.reason or "")
        assert (site.reason is None) == site.supported


@pytest.mark.parametrize("name", CONVERTED)
def test_squeezed_and_compared(shared_data: Path, name: str) -> None:
    model, rng = graph(shared_data, name), np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or 3 + axis for axis, dim in enumerate(kind.shape.dim)]
        is_whole = kind.elem_type == onnx.TensorProto.INT64
        feeds[value.name] = rng.integers(0, 2, shape) if is_whole else rng.normal(size=shape).astype(np.float32)
        feeds[value.name][..., :1] = 1  # no row is masked whole
    squeeze_and_compare(model, feeds)
