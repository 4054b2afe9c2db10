"""Precompute from graph to cache and back: right numbers, resumable, refusing what does not fit."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.attention_graphs import bare_attention, bare_samples, encoder_layer, read_site, saved, vector_samples
from support.commands import shd
from support.faults import file_size_limit
from support.refusals import refusal

from shd_ref import squeeze_heads
from shd_ref.cache import CacheReader, decode, encode, sample_key, verify_cache
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    ModelInputs,
    PrecomputeOptions,
    RunOptions,
    hash_teacher,
    input_specs,
    load_teacher,
    recheck_records,
)
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES = 23
LENGTH = 9
make_inputs = partial(vector_samples, NUM_SAMPLES, LENGTH)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(encoder_layer(num_heads=4, mask="where"), tmp_path_factory.mktemp("teacher"))


OPTIONS = PrecomputeOptions(num_student_heads=2)
RUN = RunOptions(mask="mask", batch_size=4, samples_per_shard=5)


def teacher_maps(teacher: Path, inputs: dict[str, NDArray[Any]], index: int) -> tuple[Any, Any]:
    """Maps and value outputs of one sample without its padding, straight from onnxruntime."""
    length = int(inputs["mask"][index].sum())
    feeds = {name: array[index : index + 1, :length] for name, array in inputs.items()}
    return read_site(load_teacher(teacher), feeds)


@pytest.mark.parametrize(
    ("codec", "strategy"),
    [("sqrt8-row", "shd"), ("u4", "shd"), ("float32", "shd"), ("float32", "hard"), ("float32", "mean")],
)
def test_cache_holds_what_the_reference_computes(teacher: Path, tmp_path: Path, codec: str, strategy: str) -> None:
    inputs = make_inputs()
    options = PrecomputeOptions(num_student_heads=2, codec=codec, strategy=strategy, temperature=1.5)
    progress: list[tuple[int, int, int]] = []
    summary = precompute(teacher, inputs, tmp_path / "cache", options, RUN, on_progress=lambda *p: progress.append(p))
    assert summary.samples == NUM_SAMPLES
    assert summary.resumed == 0
    assert [total for _, total, _ in progress] == [NUM_SAMPLES] * len(progress)
    assert progress[-1][0] == NUM_SAMPLES
    assert summary.comparison.residual < 1
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    assert len(reader) == NUM_SAMPLES
    limit = load_tolerances()["graph"]["probs"]["float32"]
    for index in range(NUM_SAMPLES):
        probs, outputs = teacher_maps(teacher, inputs, index)
        length = probs.shape[-1]
        reference = squeeze_heads(probs, outputs, 2, strategy=strategy, temperature=1.5)
        key = sample_key({"x": inputs["x"][index, :length], "mask": inputs["mask"][index, :length]})
        record = reader.read(key)
        assert record.length == length
        assert record.index == index
        exact = decode(codec, encode(codec, reference.probs[0].astype(np.float32)))
        np.testing.assert_allclose(reader.decode(record, 0), exact, atol=limit if codec == "float32" else 0.01)
        if strategy == "shd":
            np.testing.assert_allclose(np.clip(record.parts["alphas"][0], 0, 1), reference.alphas[0][0], atol=1e-3)
        np.testing.assert_allclose(record.parts["mixing"][0], reference.mixing[0], atol=1e-3)


def test_verify_runs_the_teacher_again(teacher: Path, tmp_path: Path) -> None:
    inputs = make_inputs()
    cache = tmp_path / "cache"
    precompute(teacher, inputs, cache, OPTIONS, RUN)
    report = recheck_records(cache, teacher, inputs, num_records=6)
    assert report.records == 6
    assert report.rows > 0
    assert report.tv_max < load_tolerances()["recheck"]["total_variation"]["float32"] + 0.01
    other = tmp_path / "other.onnx"
    onnx.save(encoder_layer(num_heads=4, mask="add"), other)
    assert hash_teacher(other) != hash_teacher(teacher)
    with refusal("cache-mismatch", "must come from this teacher"):
        recheck_records(cache, other, inputs)
    with refusal("cache-mismatch", "23 of 23 are not in it"):
        recheck_records(cache, teacher, make_inputs(seed=1))


def _change_codes(cache: Path, change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> None:
    """Put other codes in place of every record's, by its key, with valid checksums."""
    from shd_ref.cache import CacheWriter, CodecError, Errors, SampleRecord, unpack

    reader = CacheReader(cache)
    manifest, records = reader.manifest, {record.index: record for record in map(reader.read, reader)}
    shutil.rmtree(cache)
    writer = CacheWriter(cache, manifest)
    for shard in writer.missing_shards():
        new = []
        for record in (records[index] for index in manifest.shard_samples(shard)):
            codes = unpack(
                record.parts["L00"], manifest.attention.codec, manifest.attention.support, 2, record.length
            )
            changed = {**record.parts, "L00": change(record.key, codes)}
            new.append(SampleRecord(record.index, record.key, record.length, changed))
        writer.write_shard(shard, new, Errors({"attention": CodecError(0.0, 0.0, 0.0, 0)}))
    writer.seal()


def test_a_rounding_that_fell_the_other_way_is_no_difference(teacher: Path, tmp_path: Path) -> None:
    """In every row of a u4 cache, the entry that lies nearest to between two codes gets the other one (CACHE-91)."""
    for codec in ("float32", "u4"):
        precompute(teacher, make_inputs(), tmp_path / codec, PrecomputeOptions(num_student_heads=2, codec=codec), RUN)
    exact = CacheReader(tmp_path / "float32")
    moved = []

    def flip(key: str, codes: NDArray[Any]) -> NDArray[Any]:
        maps = exact.decode(exact.read(key), 0)
        places = 15 * np.cbrt(maps / np.maximum(maps.max(axis=-1, keepdims=True), 1e-30))
        distance = np.where((places > 2) & (codes < 15), np.abs(places % 1 - 0.5), 1.0)
        nearest = distance.argmin(axis=-1)[..., None]
        new, old = codes.copy(), np.take_along_axis(codes, nearest, axis=-1)
        other = np.where(np.take_along_axis(places, nearest, axis=-1) > old, old + 1, old - 1)
        close = np.take_along_axis(distance, nearest, axis=-1) < 0.05
        np.put_along_axis(new, nearest, np.where(close, other, old).astype(np.uint8), axis=-1)
        moved.append(float(0.5 * np.abs(decode("u4", codes) - decode("u4", new)).sum(axis=-1).max()))
        return new

    _change_codes(tmp_path / "u4", flip)
    assert max(moved) > 0.02, "a limit that holds for all codecs would refuse it"
    report = recheck_records(tmp_path / "u4", teacher, make_inputs(), num_records=NUM_SAMPLES)
    assert report.records == NUM_SAMPLES


def test_maps_that_are_not_rounded_must_not_be_off(teacher: Path, tmp_path: Path) -> None:
    options = PrecomputeOptions(num_student_heads=2, codec="float32")
    precompute(teacher, make_inputs(), tmp_path / "cache", options, RUN)
    assert recheck_records(tmp_path / "cache", teacher, make_inputs()).tv_max < 1e-4

    def shift(_: str, maps: NDArray[Any]) -> NDArray[Any]:
        """Move a hundredth of each row from its largest entry to its smallest that is not zero."""
        largest = maps.argmax(axis=-1)[..., None]
        smallest = np.where(maps > 0, maps, np.inf).argmin(axis=-1)[..., None]
        maps = maps.copy()
        for place, change in ((largest, -0.01), (smallest, 0.01)):
            np.put_along_axis(maps, place, np.take_along_axis(maps, place, axis=-1) + np.float32(change), axis=-1)
        return maps * (maps.sum(axis=-1, keepdims=True) > 0.5)

    _change_codes(tmp_path / "cache", shift)
    with refusal("cache-mismatch", r"within 0\.0020.* got 0\.0100"):
        recheck_records(tmp_path / "cache", teacher, make_inputs())


def test_causal_teachers_are_packed_as_triangles(tmp_path: Path) -> None:
    model = bare_attention(4, num_layers=2)
    onnx.save(model, tmp_path / "teacher.onnx")
    arrays = bare_samples(5, 6, num_layers=2)
    for layer in range(2):
        arrays[f"logits_{layer}"][..., np.triu(np.ones((6, 6), bool), 1)] = -np.inf
    options = PrecomputeOptions(num_student_heads=3, layer_pairs=((4, 1),))
    summary = precompute(tmp_path / "teacher.onnx", arrays, tmp_path / "cache", options, RunOptions(mask="mask"))
    manifest = CacheReader(tmp_path / "cache").manifest
    assert manifest.attention.support == "causal"
    assert manifest.attention.student_layers == [4]
    assert manifest.attention.layers[0].teacher_layer == 1
    assert summary.coded_bytes == 5 * 3 * 21


@pytest.mark.parametrize("strategy", ["shd", "hard"])
def test_nan_of_one_later_sample_is_named_and_not_stored(teacher: Path, tmp_path: Path, strategy: str) -> None:
    inputs = make_inputs()
    shortest = int(inputs["mask"].sum(1).argmin())
    inputs["x"][shortest, 0, 0] = np.nan
    with refusal("not-finite", f"sample {shortest}"):
        precompute(
            teacher, inputs, tmp_path / "cache", PrecomputeOptions(num_student_heads=2, strategy=strategy), RUN
        )
    partial = CacheReader(tmp_path / "cache", allow_partial=True)
    assert all(record.index != shortest for record in map(partial.read, partial))


def test_inputs_are_cast_without_loss_and_fixed_batches_are_filled(tmp_path: Path) -> None:
    model = encoder_layer(num_heads=4)
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 4
    past = onnx.helper.make_tensor_value_info(
        "past_key_values.0.key", onnx.TensorProto.FLOAT, ["batch", 2, "past", 4]
    )
    model.graph.input.append(past)
    arrays = make_inputs() | {"label": np.zeros(NUM_SAMPLES)}
    arrays["mask"] = arrays["mask"].astype(np.int32)
    inputs = ModelInputs(arrays, input_specs(model), "mask")
    assert inputs.ignored == ("label",)
    assert inputs.fixed_batch == 4
    batches = list(inputs.batches(range(NUM_SAMPLES), 16))
    assert [len(batch.indices) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert all(batch.arrays[name].shape[0] == 4 for batch in batches for name in ("x", "past_key_values.0.key"))
    assert batches[0].arrays["mask"].dtype == np.int64
    assert sorted(index for batch in batches for index in batch.indices) == list(range(NUM_SAMPLES))


def test_a_full_disk_loses_nothing(teacher: Path, tmp_path: Path) -> None:
    """What was committed before no file could grow beyond a size stays whole, and a rerun finishes."""
    np.savez(tmp_path / "data.npz", **make_inputs())
    command = ["precompute", teacher, "--inputs", tmp_path / "data.npz", "--student-heads", 2, "--mask", "mask"]
    command += ["--samples-per-shard", 5, "--out", tmp_path / "cache"]
    with file_size_limit(1700):
        failed = shd(*command, code=1)
    assert "write-failed" in failed
    assert (tmp_path / "cache" / "manifest.json").exists()
    assert not (tmp_path / "cache" / "SEALED.json").exists()
    shd(*command)
    assert verify_cache(tmp_path / "cache").ok
