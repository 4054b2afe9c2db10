"""Attention in tiles of query rows: what is stored is what whole maps give, and long samples need no whole map."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.attention_graphs import (
    attention_operator,
    encoder_layer,
    language_model,
    saved,
    token_samples,
    vector_samples,
)
from support.two_sequences import encoder_decoder

from shd_ref.cache import CacheReader, list_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.rewrite.tiles import find_tiles
from shd_ref.teacher.run.inputs import run_batch
from shd_ref.teacher.run.teacher import TeacherRun

LENGTH = 9
make_inputs = partial(vector_samples, 5, LENGTH)


def _run(tile: int) -> RunOptions:
    return RunOptions(mask="mask", batch_size=2, samples_per_shard=3, num_threads=1, tile=tile)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(encoder_layer(num_heads=4, num_kv_heads=2, mask="where"), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize(
    "options",
    [
        PrecomputeOptions(2, codec="float32"),
        PrecomputeOptions(1),
        PrecomputeOptions(2, strategy="mean"),
        PrecomputeOptions(3),
        PrecomputeOptions(2, form="factored", factored_codec="float16"),
        PrecomputeOptions(1, form="factored", strategy="constant"),
    ],
    ids=["float32", "one-head", "mean", "three-heads", "factored", "factored-constant"],
)
def test_records_are_those_of_whole_maps(teacher: Path, tmp_path: Path, options: PrecomputeOptions) -> None:
    inputs = make_inputs()
    compare_with_whole_maps(teacher, inputs, options, tmp_path, mask="mask")
    assert recheck_records(tmp_path / "4", teacher, inputs, num_records=2).records == 2


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"mask": "add"}, "maps"),
        ({"mask": "add", "nan_guard": True}, "factored"),
        ({"mask": "where", "float16": True}, "maps"),
        ({"mask": "where", "head_mask": True}, "maps"),
        ({"mask": "causal"}, "maps"),
        ({"mask": "causal", "float16": True}, "factored"),
        ({"mask": "window"}, "maps"),
        ({"mask": "window"}, "factored"),
        ({"layout": "batch-folded", "mask": None}, "maps"),
        ({"layout": "heads-batch", "mask": None}, "factored"),
        ({"layout": "heads-folded", "mask": None}, "maps"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_attention_as_exporters_write_it(tmp_path: Path, changes: dict[str, Any], form: str) -> None:
    """What is stored is the same either way, whatever the order of heads and samples."""
    teacher = saved(encoder_layer(**changes), tmp_path)
    options = PrecomputeOptions(2, codec="float32", form=form, factored_codec="float16")
    # Without a mask in the graph, samples must not be padded.
    inputs = make_inputs(least=2 if changes["mask"] else LENGTH)
    compare_with_whole_maps(teacher, inputs, options, tmp_path, mask="mask")
    model = load_teacher(teacher)
    (tiles,) = find_tiles(model, find_sites(model))
    assert tiles.reason is None
    if changes["mask"] in ("causal", "window"):
        (mask,) = tiles.masks
        assert mask.shown  # the condition, not the numbers that it chooses


@pytest.mark.parametrize("opset", [23, 24])
def test_attention_as_its_operator_defines_it(tmp_path: Path, opset: int) -> None:
    """From opset 24 on with a zero for rows of NaN, of the type of the map."""
    teacher = saved(attention_operator(opset, masked=True), tmp_path)
    model = load_teacher(teacher)
    assert [tiles.reason for tiles in find_tiles(model, find_sites(model))] == [None]
    compare_with_whole_maps(teacher, make_inputs(), PrecomputeOptions(2, codec="float32"), tmp_path, mask="mask")


def test_a_bias_that_begins_beyond_short_samples_is_no_mask(tmp_path: Path) -> None:
    """Keys 30 and more behind a row count less; the run that looks for masks has fewer."""
    model = encoder_layer(mask="window")
    (causal,) = (node for node in model.graph.node if node.op_type == "LessOrEqual")
    causal.input[1] = causal.input[0]  # always
    changes = {3.0: np.array(30), -3e4: np.array([-1.0], np.float32)}
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.size == 1 and float(array.item()) in changes:
            tensor.CopyFrom(onnx.numpy_helper.from_array(changes[float(array.item())], tensor.name))
    inputs, options = vector_samples(2, 40, least=40), PrecomputeOptions(2, codec="float32")
    compare_with_whole_maps(saved(model, tmp_path), inputs, options, tmp_path, mask=None)


def test_no_tile_reads_keys_beyond_its_window(tmp_path: Path) -> None:
    """A key that is NaN spoils whole maps, and of tiles of four rows the first."""
    teacher = saved(encoder_layer(mask="window"), tmp_path)
    inputs = {"x": np.ones((1, 24, 12), np.float32), "mask": np.ones((1, 24), np.int64)}
    inputs["x"][:, 0] = np.nan
    options = PrecomputeOptions(2, strategy="constant", codec="float32")
    for tile, spoilt in ((4, 4), (0, 24)):
        work = TeacherRun.open(teacher, inputs, options, replace(_run(tile), batch_size=1))
        opened = work.sessions.open()
        (codes,) = run_batch(opened.session, [opened.graph.layers[0].names["codes"]], work.inputs.batch([0])).values()
        assert np.isfinite(codes[0]).all(axis=(0, 2)).tolist() == [False] * spoilt + [True] * (24 - spoilt)


def test_queries_and_keys_behind_tiles_are_the_same_bytes(tmp_path: Path) -> None:
    """Of three layers, so that two of them read what tiles gave; padding behind."""
    teacher = saved(language_model(num_layers=3), tmp_path)
    options = PrecomputeOptions(2, form="factored", factored_codec="float16")
    compare_with_whole_maps(teacher, token_samples(5, 12, least=5), options, tmp_path, mask=None)


def test_cross_attention_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Rows of the decoder, keys of the encoder; both sequences padded."""
    teacher = saved(encoder_decoder(vocabulary=50), tmp_path)
    sides = [token_samples(5, length, seed=length) for length in (9, 7)]
    inputs = {
        prefix + name: array
        for prefix, side in zip(("", "decoder_"), sides, strict=True)
        for name, array in side.items()
    }
    options = PrecomputeOptions(2, {"encoder": 1, "decoder": 1, "cross": 1}, codec="float32")
    compare_with_whole_maps(teacher, inputs, options, tmp_path, mask=None)
    model = load_teacher(teacher)
    assert [tiles.reason for tiles in find_tiles(model, find_sites(model))] == [None, None, None]


def compare_with_whole_maps(
    teacher: Path, inputs: dict[str, Any], options: PrecomputeOptions, folder: Path, mask: str | None
) -> None:
    for tile in (0, 4):
        precompute(teacher, inputs, folder / str(tile), options, replace(_run(tile), mask=mask))
    whole, tiled = (CacheReader(folder / str(tile)) for tile in (0, 4))
    # A code of sqrt8 may round the other way.
    limit = 1e-3 if options.is_factored else 1e-5 if options.codec == "float32" else 0.01
    for key in whole:
        expected, got = whole.read(key), tiled.read(key)
        assert expected.parts.keys() == got.parts.keys()
        if options.is_factored:
            for name in (name for name in got.parts if name.startswith("L")):
                np.testing.assert_array_equal(got.parts[name].view(np.uint8), expected.parts[name].view(np.uint8))
        if "alphas" in got.parts:
            np.testing.assert_allclose(got.parts["alphas"], expected.parts["alphas"], rtol=0, atol=1e-5)
        for layer in range(len(whole.manifest.attention.layers)):
            np.testing.assert_allclose(tiled.decode(got, layer), whole.decode(expected, layer), rtol=0, atol=limit)


def test_a_run_goes_on_with_another_tile(teacher: Path, tmp_path: Path) -> None:
    options = PrecomputeOptions(2, codec="float32", form="factored")
    for part, tile in enumerate((4, 0)):
        precompute(teacher, make_inputs(), tmp_path / "cache", options, replace(_run(tile), shards=(part, 2)))
    assert recheck_records(tmp_path / "cache", teacher, make_inputs(), num_records=5).records == 5


@pytest.mark.parametrize(("tile", "form"), [(0, "factored"), (4, "maps")])
def test_errors_of_some_rows_leave_the_records_as_they_are(
    teacher: Path, tmp_path: Path, tile: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHE-120: two tiles of one row each, of nine."""
    runs = []
    for name in ("all", "some"):
        run = replace(_run(tile), batch_size=5, samples_per_shard=5)
        precompute(teacher, make_inputs(), tmp_path / name, PrecomputeOptions(2, form=form), run)
        runs.append(list_cache(tmp_path / name).errors["attention"])
        monkeypatch.setattr("shd_ref.teacher.precompute.forms.attention.MEASURED_ENTRIES", 4 * LENGTH)
    whole, some = runs
    # The first and the last of each head, none of padding; in tiles of one sample.
    assert some.rows == (1 if tile else 5) * 2 * 2 < whole.rows
    assert 0 < some.kl_max <= whole.kl_max * (1 + 1e-4)
    shards = [sorted((tmp_path / name / "shards").rglob("*.safetensors")) for name in ("all", "some")]
    assert [one.read_bytes() for one in shards[0]] == [one.read_bytes() for one in shards[1]]
