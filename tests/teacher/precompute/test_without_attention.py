"""Logits and hidden states alone: of a language model, and of a classifier that has no attention (CACHE-160)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from support.attention_graphs import language_model, token_samples
from support.commands import shd

from shd_ref.cache import Attention, CacheReader, sample_key, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES, LENGTH = 10, 7
RUN = RunOptions(batch_size=2, samples_per_shard=2, num_threads=1)
ALONE = PrecomputeOptions(form="none", logits="topk", logits_top=4, hidden=(0, 1, 2))


def make_tokens() -> dict[str, NDArray[Any]]:
    tokens = token_samples(NUM_SAMPLES, LENGTH, least=3)
    tokens["attention_mask"][::3, 0] = 0  # padding in front
    return tokens


def make_images() -> dict[str, NDArray[Any]]:
    return {"pixels": np.random.default_rng(1).normal(size=(NUM_SAMPLES, 3, 6, 6)).astype(np.float32)}


def convolutional_classifier() -> onnx.ModelProto:
    """Convolution, mean over the image, ten classes: no attention, and an output that is not named logits."""
    rng = np.random.default_rng(2)
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in (("kernel", (4, 3, 3, 3)), ("head", (4, 10)))
    ]
    nodes = [
        helper.make_node("Conv", ["pixels", "kernel"], ["features"], pads=[1] * 4),
        helper.make_node("Relu", ["features"], ["active"]),
        helper.make_node("ReduceMean", ["active"], ["pooled"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["pooled", "head"], ["scores"]),
    ]
    inputs = [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 6, 6])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])]
    graph = helper.make_graph(nodes, "classifier", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    paths = {"tokens": folder / "tokens.onnx", "images": folder / "images.onnx"}
    onnx.save(language_model(), paths["tokens"])
    onnx.save(convolutional_classifier(), paths["images"])
    return paths


def test_rows_are_those_beside_attention(teachers: dict[str, Path], tmp_path: Path) -> None:
    inputs = make_tokens()
    precompute(teachers["tokens"], inputs, tmp_path / "alone", ALONE, RUN)
    beside = replace(ALONE, form="factored", num_student_heads=2)  # which leaves padding in front out, too
    precompute(teachers["tokens"], inputs, tmp_path / "beside", beside, RUN)
    assert verify_cache(tmp_path / "alone").ok
    again = recheck_records(tmp_path / "alone", teachers["tokens"], inputs, num_records=NUM_SAMPLES)
    assert (again.records, again.rows) == (NUM_SAMPLES, 0)
    alone, other = CacheReader(tmp_path / "alone"), CacheReader(tmp_path / "beside")
    assert again.target_rows == 4 * sum(alone.read(key).length - alone.read(key).first for key in alone)
    assert alone.manifest.find(Attention) is None
    assert alone.manifest.logits == other.manifest.logits
    for key in other:
        one, two = alone.read(key), other.read(key)
        assert (one.length, one.first) == (two.length, two.first)
        np.testing.assert_array_equal(one.parts["logits"], two.parts["logits"])
        for name in one.parts:
            np.testing.assert_array_equal(one.parts[name], two.parts[name])


@pytest.mark.parametrize("codec", ["float16", "topk"])
def test_a_classifier_without_attention(teachers: dict[str, Path], tmp_path: Path, codec: str) -> None:
    images, options = make_images(), PrecomputeOptions(form="none", logits=codec, logits_top=3)
    precompute(teachers["images"], images, tmp_path / "cache", options, RUN)
    assert recheck_records(tmp_path / "cache", teachers["images"], images).target_rows == 8
    reader = CacheReader(tmp_path / "cache")
    assert reader.manifest.logits is not None
    (scores,) = onnxruntime.InferenceSession(teachers["images"]).run(None, images)
    for image, row in zip(images["pixels"], scores, strict=True):
        record = reader.read(sample_key({"pixels": image}))
        found: Any = reader.manifest.logits.decode(record)
        assert record.length == 1
        if codec == "float16":
            np.testing.assert_allclose(found[0], row, rtol=2e-3, atol=1e-3)
        else:
            np.testing.assert_array_equal(found.ids[0], np.sort(np.argsort(row)[-3:]))


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_the_commands_plan_make_check_and_show_it(teachers: dict[str, Path], tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "data.npz", **(make_tokens() if kind == "tokens" else make_images()))
    cache = tmp_path / "cache"
    asked = (teachers[kind], "--inputs", tmp_path / "data.npz", "--no-attention", "--logits", "float16")
    planned = shd("plan", *asked, "--samples", 3)
    assert "no attention; 10 samples" in planned
    assert "SHD term" not in planned
    (command,) = (line.split() for line in planned.splitlines() if line.startswith("  shd precompute"))
    words = [*command[1 : command.index("--out")], "--out", cache]
    shd(*words, "--dry-run")
    following = shd(*words).rpartition("next: shd ")[2].split()
    assert "rows of other targets" in shd(*following)
    shd("ls", cache)
    shd("report", cache, "--out", tmp_path / "page.html")
    refused = shd("precompute", *asked, "--student-heads", 2, "--out", cache, code=1)
    assert "--student-heads must be left out with --no-attention" in " ".join(refused.split())
