"""Precompute of queries and keys: they make the teacher's maps, and what cannot be kept so is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, encoder_layer, saved, vector_samples
from support.refusals import refusal

from shd_ref.cache import CacheReader, Factors, codec_error, verify_cache
from shd_ref.cache.codecs.factored import factored_kl_bound
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES = 11
LENGTH = 9
OPTIONS = PrecomputeOptions(num_student_heads=2, form="factored")
RUN = RunOptions(mask="mask", batch_size=4, samples_per_shard=4)
make_inputs = partial(vector_samples, NUM_SAMPLES, LENGTH)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(encoder_layer(num_heads=4, num_kv_heads=2, mask="where"), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("codec", ["int8", "float16"])
def test_records_make_the_maps_that_a_cache_of_maps_holds(teacher: Path, tmp_path: Path, codec: str) -> None:
    inputs = make_inputs()
    exact = PrecomputeOptions(num_student_heads=2, codec="float32")
    precompute(teacher, inputs, tmp_path / "maps", exact, RUN)
    summary = precompute(teacher, inputs, tmp_path / "factored", replace(OPTIONS, factored_codec=codec), RUN)
    assert verify_cache(tmp_path / "factored").ok
    maps, factored = CacheReader(tmp_path / "maps"), CacheReader(tmp_path / "factored")
    assert factored.manifest.attention.codec == codec
    assert isinstance(factored.manifest.attention, Factors)
    (layer,) = factored.manifest.attention.factors
    assert (layer.num_key_heads, len(factored)) == (2, NUM_SAMPLES)
    rows, bounds = 0, []
    for key in maps:
        stored, record = maps.read(key), factored.read(key)
        assert "mixing" in record.parts
        np.testing.assert_allclose(record.parts["mixing"], stored.parts["mixing"], atol=1e-5)
        error = codec_error(maps.decode(stored, 0), factored.decode(record, 0))
        bounds.append(
            factored_kl_bound(codec, *factored.manifest.attention.decode_factors(record, 0), layer.scale).max()
        )
        # The bound of what was decoded stands for that of what was coded: they differ by one rounding.
        assert error.kl_max <= 1.05 * bounds[-1] + 1e-6
        rows += error.rows
    assert 0 < summary.errors["attention"].kl_max <= 1.05 * max(bounds) + 1e-6
    assert 0 < summary.errors["attention"].rows <= rows
    again = recheck_records(tmp_path / "factored", teacher, inputs, num_records=NUM_SAMPLES)
    assert again.records == NUM_SAMPLES
    assert 0 < again.tv_max <= np.sqrt(max(bounds) / 2) + 1e-4  # CACHE-151 with Pinsker's inequality


@pytest.mark.parametrize("tile", [None, 4])
def test_softmax_of_flat_rows(tile: int | None, tmp_path: Path) -> None:
    """Before operator set 13, softmax takes rows: converters flatten what it reads, and shape what it gives."""
    model = encoder_layer(num_heads=4, mask="where")
    place, softmax = next((n, node) for n, node in enumerate(model.graph.node) if node.op_type == "Softmax")
    del model.graph.node[place]
    (source,), (probs,) = softmax.input, softmax.output
    for node in (
        onnx.helper.make_node("Reshape", ["rows", "sizes"], [probs]),
        onnx.helper.make_node("Softmax", ["flat"], ["rows"], axis=1),
        onnx.helper.make_node("Flatten", [source], ["flat"], axis=3),
        onnx.helper.make_node("Shape", [source], ["sizes"]),
    ):
        model.graph.node.insert(place, node)
    teacher, inputs = saved(model, tmp_path), make_inputs()
    exact = PrecomputeOptions(num_student_heads=2, codec="float32")
    precompute(teacher, inputs, tmp_path / "maps", exact, RUN)
    options = replace(OPTIONS, factored_codec="float16")
    precompute(teacher, inputs, tmp_path / "factored", options, replace(RUN, tile=tile))
    maps, factored = CacheReader(tmp_path / "maps"), CacheReader(tmp_path / "factored")
    for key in maps:
        expected = maps.decode(maps.read(key), 0)
        np.testing.assert_allclose(factored.decode(factored.read(key), 0), expected, atol=5e-3)


def product_graph(change: Any) -> onnx.ModelProto:
    """Attention whose queries, keys and values are the input; ``change`` makes logits of their product."""
    build = GraphBuilder()
    product = build.op("MatMul", "x", build.op("Transpose", "x", perm=[0, 1, 3, 2]))
    probs = build.op("Softmax", change(build, product), axis=-1)
    output = build.project(build.op("MatMul", probs, "x"), 6, 5)
    return build.model({"x": (TensorProto.FLOAT, ["batch", 2, "rows", 3])}, [output])


def every_other(build: GraphBuilder, product: str) -> str:
    """Positions look at those an even number away: no run of keys, and nothing that maps' support can say."""
    far = np.abs(np.subtract.outer(np.arange(8), np.arange(8))) % 2 * np.float32(-1e9)
    size = build.op("Slice", build.op("Shape", product), [2], [4])
    start = build.const(np.array([0, 0]))
    return build.op("Add", product, build.op("Slice", far.astype(np.float32), start, size))


def by_sample(build: GraphBuilder, product: str) -> str:
    """Samples whose first number is large hide their first key from the rows from 5 on: in no other is it seen."""
    size = build.op("Slice", build.op("Shape", product), [2], [4])
    corner = np.zeros((8, 8), np.float32)
    corner[5:, 0] = -1e9
    hidden = build.op("Slice", corner, [0, 0], size)
    starts, ends, axes = (build.const(np.array(part)) for part in ([0, 0, 0], [1, 1, 1], [1, 2, 3]))
    number = build.op("Slice", "x", starts, ends, axes)  # (B, 1, 1, 1)
    large = build.op("Cast", build.op("Greater", number, np.float32(5)), to=TensorProto.FLOAT)
    return build.op("Add", product, build.op("Mul", hidden, large))


def test_holes_in_a_mask_are_refused(tmp_path: Path) -> None:
    inputs = {"x": np.random.default_rng(3).normal(size=(4, 2, 8, 3)).astype(np.float32)}
    options, teacher = replace(OPTIONS, num_student_heads=1), saved(product_graph(every_other), tmp_path)
    with refusal("graph-unsupported", "mask of its own.*--form maps"):
        precompute(teacher, inputs, tmp_path / "cache", options, RunOptions())
    assert not (tmp_path / "cache").exists()


def test_mask_of_a_single_sample_is_seen_in_any_batch(tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=(8, 2, 8, 3)).astype(np.float32)
    x[6, 0, 0, 0] = 6
    run = RunOptions(batch_size=2, samples_per_shard=4, seed=1)  # neither in the first batch nor in a shard's first
    with refusal("graph-unsupported", r"row 5 .* mask of its own"):
        precompute(
            saved(product_graph(by_sample), tmp_path),
            {"x": x},
            tmp_path / "cache",
            replace(OPTIONS, num_student_heads=1),
            run,
        )
    assert not (tmp_path / "cache" / "SEALED.json").exists()


def test_window_is_found_and_kept(tmp_path: Path) -> None:
    """Of three keys: nothing that a probe of length 3 can show."""
    teacher = saved(encoder_layer(mask="window"), tmp_path)
    for form in ("maps", "factored"):
        options = PrecomputeOptions(1, codec="float32", form=form, factored_codec="float16")
        precompute(teacher, make_inputs(), tmp_path / form, options, RUN)
    maps, factored = CacheReader(tmp_path / "maps"), CacheReader(tmp_path / "factored")
    assert isinstance(factored.manifest.attention, Factors)
    (layer,) = factored.manifest.attention.factors
    assert (layer.window, factored.manifest.attention.support) == (3, "causal")
    for key in maps:
        exact, found = maps.decode(maps.read(key), 0), factored.decode(factored.read(key), 0)
        np.testing.assert_array_equal(exact > 0, found > 0)
        assert codec_error(exact, found).kl_max < 1e-5


def test_padding_between_positions_is_refused(teacher: Path, tmp_path: Path) -> None:
    inputs = make_inputs()
    inputs["mask"][3] = [1, 0, 1, 1, 0, 0, 0, 0, 0]
    with refusal("inputs-invalid", "pad in front or behind"):
        precompute(teacher, inputs, tmp_path / "cache", OPTIONS, RUN)
