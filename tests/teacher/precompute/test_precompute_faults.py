"""What goes wrong while a cache is made: other jobs on resume, NaN, small windows, readers beside writers."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.attention_graphs import (
    GraphBuilder,
    attend,
    bare_attention,
    bare_samples,
    language_model,
    random_projection,
    saved,
    token_samples,
    token_teacher,
)
from support.calls import calls_of
from support.commands import shd
from support.makers import contents
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, Receipt
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import PrecomputeJob, precompute

NUM_SAMPLES = 60
OPTIONS = PrecomputeOptions(num_student_heads=2)
RUN = RunOptions(batch_size=4, samples_per_shard=5)
make_tokens = partial(token_samples, NUM_SAMPLES, 10)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(token_teacher(), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("run", [RUN, RunOptions(batch_tokens=30, samples_per_shard=6)])
def test_resumed_runs_give_the_same_bytes(teacher: Path, tmp_path: Path, run: RunOptions) -> None:
    """The batches are always those of an undisturbed run, so even rounding is the same."""
    inputs = make_tokens()
    precompute(teacher, inputs, tmp_path / "whole", OPTIONS, run)
    for number, lost in enumerate(([3], [0, 2, 5, 9])):
        folder = tmp_path / f"resumed-{number}"
        precompute(teacher, inputs, folder, OPTIONS, run)
        for shard in lost:
            (folder / f"receipts/{shard:06d}.json").unlink()
        summary = precompute(teacher, inputs, folder, OPTIONS, run)
        assert summary.resumed == NUM_SAMPLES - len(lost) * (run.samples_per_shard or 0)
        assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("form", ["maps", "factored"])
def test_large_maps_are_checked_a_sample_at_a_time(
    teacher: Path, tmp_path: Path, checked_bytes: Callable[[int], None], form: str
) -> None:
    """What is stored does not change, its error is measured."""
    options, inputs, run = replace(OPTIONS, form=form), make_tokens(), RunOptions(batch_size=10, samples_per_shard=20)
    whole = precompute(teacher, inputs, tmp_path / "whole", options, run)
    checked_bytes(1)
    cut = precompute(teacher, inputs, tmp_path / "cut", options, run)
    assert (whole.compared_samples, cut.compared_samples) == (2, 1)
    one, two = CacheReader(tmp_path / "whole"), CacheReader(tmp_path / "cut")
    assert one.manifest == two.manifest
    for key in one:
        np.testing.assert_allclose(one.decode(one.read(key), 0), two.decode(two.read(key), 0), atol=0.01)
    fewer = 0
    for shard in range(3):
        all_rows, some_rows = (Receipt.read(at.folder, shard, at.manifest).errors["attention"] for at in (one, two))
        assert 0 < some_rows.rows <= all_rows.rows
        assert 0 < some_rows.kl_max <= 1.01 * all_rows.kl_max
        fewer += some_rows.rows < all_rows.rows
    assert fewer == 3
    before = contents(tmp_path / "cut")
    (tmp_path / "cut/receipts/000001.json").unlink()
    assert precompute(teacher, inputs, tmp_path / "cut", options, run).written == 20
    assert contents(tmp_path / "cut") == before
    assert recheck_records(tmp_path / "cut", teacher, inputs).records == 8


@pytest.fixture
def checked_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Check outputs of a large teacher do not fit a batch: how much of them is taken for large."""
    return lambda count: monkeypatch.setattr("shd_ref.teacher.run.teacher.CHECKED_BYTES", count)


def test_a_fault_is_looked_for_in_its_own_sample(tmp_path: Path, checked_bytes: Callable[[int], None]) -> None:
    """Not in check outputs of its whole batch, which need not fit."""
    onnx.save(bare_attention(4, num_layers=2), tmp_path / "teacher.onnx")
    inputs = bare_samples(32, 12, num_layers=2)
    inputs["values_1"][20, 1, 3] = np.nan
    checked_bytes(1)
    run = RunOptions(batch_size=16, samples_per_shard=32, mask="mask", num_threads=1)
    with (
        calls_of("run_batch") as calls,
        refusal("not-finite", r"sample 20 \(key .* at layer 1 \(softmax_1\), head 1: "),
    ):
        precompute(tmp_path / "teacher.onnx", inputs, tmp_path / "cache", OPTIONS, run)
    runs = [
        (len(call["batch"].indices), any("merged" in name for name in call["names"]))
        for call in calls
        if any("alphas" in name for name in call["names"])  # not the teacher's own maps alone
    ]
    # Besides, one sample was looked at alone and with another.
    assert {count for count, checked in runs if checked} == {1, 2}
    assert [count for count, checked in runs if not checked] == [1, 16, 16]


@pytest.fixture(scope="module")
def begun(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    precompute(teacher, make_tokens(), folder, OPTIONS, replace(RUN, shards=(0, 6)))
    return folder


def one_token_more(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    inputs["input_ids"][17, 1] += 1
    return inputs


@pytest.mark.parametrize(
    ("options", "run", "change", "message"),
    [
        ({"num_student_heads": 3}, {}, None, "num_student_heads: 2 -> 3"),
        ({"plan": (((0, 2), (1, 3)),)}, {}, None, "plan: "),
        ({"codec": "u4"}, {}, None, "codec: "),
        ({}, {"seed": 3}, None, "shards.seed: 0 -> 3"),
        ({}, {}, one_token_more, r"dataset\.fingerprint: "),
        ({}, {}, lambda inputs: {name: array[::-1] for name, array in inputs.items()}, r"dataset\.fingerprint: "),
    ],
    ids=["heads", "plan", "codec", "seed", "one token", "order"],
)
def test_another_job_does_not_resume(
    teacher: Path, begun: Path, options: Any, run: Any, change: Any, message: str
) -> None:
    before, inputs = contents(begun), make_tokens()
    with refusal("cache-mismatch", message):
        precompute(
            teacher, change(inputs) if change else inputs, begun, replace(OPTIONS, **options), replace(RUN, **run)
        )
    assert contents(begun) == before


def test_another_teacher_does_not_resume(begun: Path, tmp_path: Path) -> None:
    model = token_teacher()
    model.producer_name = "another"
    with refusal("cache-mismatch", r"teacher\.sha256: "):
        precompute(saved(model, tmp_path), make_tokens(), begun, OPTIONS, RUN)


def test_inputs_that_the_teacher_cannot_run_on_are_named(tmp_path: Path) -> None:
    build = GraphBuilder()
    half = random_projection(2, 12)
    # Of a table that is computed only the run tells the size: numbers of its rows cannot be checked beforehand.
    rows = build.op("Gather", build.op("Add", half, half), "kind")
    model = build.model(
        {"kind": (onnx.TensorProto.INT64, ["batch", "length"])}, [attend(build, rows, rows, None, 4, 0)]
    )
    kinds = np.ones((9, 3), np.int64)
    kinds[5, 1] = 7
    with refusal("inputs-invalid", r"samples \[.*5.* failed: "):
        precompute(saved(model, tmp_path), {"kind": kinds}, tmp_path / "cache", OPTIONS, RunOptions())


@pytest.mark.parametrize("how", ["sliced", "chosen", "given"])
def test_texts_beyond_the_positions_are_named(how: str, tmp_path: Path) -> None:
    build = GraphBuilder()
    table, ids = 0.1 * random_projection(7, 12, 5), "input_ids"
    length = build.op("Slice", build.op("Shape", ids), [1], [2])
    if how == "sliced":
        added = build.op("Slice", table, [0], length, [0])
    elif how == "chosen":
        added = build.op("Gather", table, build.op("Range", 0, build.op("Squeeze", length), 1))
    else:
        added = build.op("Gather", table, "position_ids")
    rows = build.op("Add", build.op("Gather", random_projection(50, 12, 9), ids), added)
    output = attend(build, rows, rows, "attention_mask", 4, 0)
    names = [ids, "attention_mask", *["position_ids"] * (how == "given")]
    model = build.model({name: (onnx.TensorProto.INT64, ["batch", "length"]) for name in names}, [output])
    mask = np.arange(9) < np.array([[3], [9], [7], [8]])
    inputs = {ids: np.full((4, 9), 5), "attention_mask": mask.astype(np.int64)}
    message = "row 1: it must have at most 7 positions, .*; got 9: cut texts with --max-length 7"
    message = message if how == "given" else "row 1 of 9 positions, is too long for the model, cut texts"
    with refusal("inputs-invalid", message):
        precompute(saved(model, tmp_path), inputs, tmp_path / "cache", OPTIONS)


def test_seeds_travel_from_the_inputs_to_the_reader(teacher: Path, tmp_path: Path) -> None:
    inputs = make_tokens() | {"augmentation": np.arange(NUM_SAMPLES) * 7}
    options = PrecomputeOptions(num_student_heads=2, seed_column="augmentation")
    precompute(teacher, inputs, tmp_path / "cache", options, RUN)
    reader = CacheReader(tmp_path / "cache")
    assert reader.manifest.inputs.seed == "augmentation"
    records = [reader.read(key) for key in reader]
    assert all(record.seed == record.index * 7 for record in records)
    assert recheck_records(tmp_path / "cache", teacher, make_tokens()).records == 8
    for wrong in (-np.arange(NUM_SAMPLES), np.arange(NUM_SAMPLES) / 2):
        with pytest.raises(ShdError, match="augmentation must be an integer from 0"):
            precompute(teacher, inputs | {"augmentation": wrong}, tmp_path / "other", options, RUN)
    with pytest.raises(ShdError, match="must hold the seed column"):
        precompute(teacher, make_tokens(), tmp_path / "other", options, RUN)


@pytest.mark.slow
def test_precompute_verify_and_report_take_addresses(teacher: Path, tmp_path: Path, bucket: str) -> None:
    import fsspec

    inputs = make_tokens()
    np.savez(tmp_path / "data.npz", **inputs)
    address, data = f"{bucket}/runs/cache", ("--inputs", tmp_path / "data.npz")
    made = ("--student-heads", 2, "--batch-size", 4, "--samples-per-shard", 5)
    assert f"shd verify {address} --teacher" in shd("precompute", teacher, *data, *made, "--out", address)
    assert "60 (60 resumed)" in shd("precompute", teacher, *data, *made, "--out", address)
    precompute(teacher, inputs, tmp_path / "cache", OPTIONS, RUN)
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    root = address.removeprefix("s3://")
    stored = {path.removeprefix(f"{root}/"): store.cat_file(path) for path in store.find(root)}
    assert stored == contents(tmp_path / "cache")
    assert "60 records in 12 shards" in shd("verify", address, "--teacher", teacher, *data)
    store.rm_file(f"{root}/receipts/000003.json")
    damaged = shd("verify", address, code=1)
    assert "cache-incomplete: receipts/000003.json: 1 of 12 shards have no receipt" in damaged
    pytest.importorskip("jinja2", reason="shd report needs the extra 'report'")
    store.rm_file(f"{root}/SEALED.json")
    shd("report", address, "--out", tmp_path / "report.html")
    assert "11 of 12 shards are committed" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["maps", "factored"])
def test_checks_of_long_samples_take_the_memory_of_a_few_maps(
    tmp_path: Path, checked_bytes: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Of one layer at a time, and in tiles: not of every layer in float64."""
    length, teacher = 512, saved(language_model(num_layers=3), tmp_path)  # its graph takes 2 MB besides
    maps = 4 * 4 * length**2  # bytes of a layer, in float32
    checked_bytes(maps)
    monkeypatch.setattr("shd_ref.teacher.run.outputs.TILE_BYTES", maps // 16)
    options, run = replace(OPTIONS, form=form), RunOptions(batch_size=1, num_threads=1)
    samples = token_samples(3, length, least=length)
    with calls_of("run_batch") as calls:  # keeps local variables: memory is measured without it
        PrecomputeJob(teacher, samples, tmp_path / "watched", options, run)
    tracemalloc.start()
    try:
        PrecomputeJob(teacher, samples, tmp_path / "measured", options, run)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sizes = [call["batch"].arrays["input_ids"].shape for call in calls]
    assert sizes == [(1, length)] * 7  # layer by layer, twice, and once as it is stored
    assert peak < 6 * maps
