"""``shd plan`` and ``--dry-run``: what they say is what precompute then writes, and one way is advised."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.attention_graphs import bare_attention, bare_samples, language_model, saved, token_samples, token_teacher
from support.commands import shd

from shd_ref.cache import CODECS, FACTORED_CODECS, CacheReader, CodecError, Receipt
from shd_ref.teacher import PrecomputeOptions, RunOptions, forecast_cache
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.study.forecast import FormForecast, advise

OPTIONS = PrecomputeOptions(num_student_heads=2)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(token_teacher(), tmp_path_factory.mktemp("teacher"))


def make_tokens(num_samples: int = 60) -> dict[str, Any]:
    return token_samples(num_samples, 20, least=5)


def stored_sizes(folder: Path) -> list[int]:
    """Bytes of every record of a cache, alphas and mixing included."""
    manifest = CacheReader(folder).manifest
    shards = range(manifest.shards.num_shards)
    receipts = [Receipt.read(folder, shard, manifest) for shard in shards]
    records = [record for receipt in receipts for record in receipt.records]
    return [sum(blob.end - blob.start for blob in record.blobs if blob is not None) for record in records]


@pytest.mark.parametrize("front", [False, True], ids=["padding behind", "padding in front"])
def test_every_form_and_codec_is_forecast_as_it_is_written(teacher: Path, tmp_path: Path, front: bool) -> None:
    inputs = {name: array[:, ::-1] if front else array for name, array in make_tokens().items()}
    counted = inputs["attention_mask"].sum()
    forecast = forecast_cache(teacher, inputs, OPTIONS, samples=5)
    assert (forecast.num_samples, forecast.read_samples, forecast.measured_samples) == (60, 60, 5)
    assert (forecast.mean_length, forecast.max_length) == ((20, 20) if front else (counted / 60, 20))
    assert [(way.form, way.codec) for way in forecast.ways] == [
        *(("maps", codec) for codec in CODECS),
        *(("factored", codec) for codec in FACTORED_CODECS),
    ]
    for way in forecast.ways:
        options = replace(OPTIONS, **way.options)
        assert (options.form, options.stored_codec) == (way.form, way.codec)
        summary = precompute(teacher, inputs, tmp_path / way.title, options, RunOptions(samples_per_shard=20))
        stored = stored_sizes(tmp_path / way.title)
        assert way.total_bytes == pytest.approx(sum(stored))
        assert way.bytes_per_sample == pytest.approx(sum(stored) / 60)
        assert way.bytes_per_token == pytest.approx(sum(stored) / counted)
        assert way.break_even == pytest.approx(way.bytes_per_sample / forecast.teacher_seconds)
        assert way.error.rows > 0
        assert way.error.kl_mean == pytest.approx(summary.errors["attention"].kl_mean, rel=0.5, abs=1e-7)


def test_maps_alone_are_forecast_where_there_are_no_factors(teacher: Path, tmp_path: Path) -> None:
    """At a temperature; and for logits that are inputs, whose samples are as long as their maps."""
    onnx.save(bare_attention(4), tmp_path / "bare.onnx")
    warm = replace(OPTIONS, temperature=2.0)
    for number, (file, data, options) in enumerate(
        ((teacher, make_tokens(), warm), (tmp_path / "bare.onnx", bare_samples(6, 5, 7), OPTIONS))
    ):
        forecast = forecast_cache(file, data, options)
        assert {way.form for way in forecast.ways} == {"maps"}
        assert any("factored: temperature must be 1" in reason for reason in forecast.refused) == (options is warm)
        precompute(file, data, tmp_path / str(number), options)
        (way,) = [way for way in forecast.ways if way.codec == "sqrt8-row"]
        assert way.total_bytes == pytest.approx(sum(stored_sizes(tmp_path / str(number))))


def test_logits_and_hidden_states_count_in_every_form(tmp_path: Path) -> None:
    onnx.save(language_model(), tmp_path / "teacher.onnx")
    options = replace(OPTIONS, logits="topk", logits_top=4, hidden=(0, 1), hidden_codec="int8")
    forecast = forecast_cache(tmp_path / "teacher.onnx", make_tokens(), options)
    assert [(each.subject, each.codec) for each in forecast.targets] == [("logits", "topk"), ("hidden", "int8")]
    alone = forecast_cache(tmp_path / "teacher.onnx", make_tokens(), OPTIONS)
    targets = sum(each.total_bytes for each in forecast.targets)
    for way, other in zip(forecast.ways, alone.ways, strict=True):
        assert way.total_bytes == pytest.approx(other.total_bytes + targets)
    way = forecast.taken
    summary = precompute(
        tmp_path / "teacher.onnx", make_tokens(), tmp_path / "cache", replace(options, **way.options)
    )
    assert way.total_bytes == pytest.approx(sum(stored_sizes(tmp_path / "cache")))
    for each in forecast.targets:
        measured = summary.errors[each.subject]
        for name in ("gradient_mean", "relative_mean"):
            if hasattr(measured, name):
                assert getattr(each.error, name) == pytest.approx(getattr(measured, name), rel=0.5)


def test_a_long_data_set_is_read_in_part_and_lengths_are_represented(teacher: Path) -> None:
    forecast = forecast_cache(teacher, make_tokens(1300), OPTIONS, samples=3)
    assert (forecast.num_samples, forecast.read_samples) == (1300, 1000)
    assert forecast.ways[0].total_bytes == pytest.approx(1300 * forecast.ways[0].bytes_per_sample)


def way(title: str, size: float, moved: float) -> FormForecast:
    """A token a sample, and a teacher of a second a sample: break-even is the size."""
    form, codec = title.split()
    return FormForecast(form, codec, {}, size, size, size, size, CodecError(moved, moved, moved, 1))


FLOAT32, SQRT8 = way("maps float32", 400, 0.0), way("maps sqrt8-row", 100, 0.004)
U4, INT8 = way("maps u4", 50, 0.04), way("factored int8", 60, 0.012)
FLOAT16 = way("factored float16", 90, 0.0004)
WAYS = [FLOAT32, SQRT8, U4, FLOAT16, INT8]


def test_the_smallest_that_is_exact_enough_is_advised() -> None:
    assert advise(WAYS).title == "factored float16"
    assert advise([FLOAT32, SQRT8, U4]).title == "maps sqrt8-row"
    assert advise([INT8, U4]).title == "factored int8"  # none is: the nearest
    coarse = way("maps coarse", 90, 0.009)
    assert advise([coarse, *WAYS]).title == "factored float16"  # as large, and more exact


def test_commands_print_and_write_nothing(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", **make_tokens())
    arguments = (teacher, "--inputs", "data.npz", "--student-heads", 2)
    table = shd("plan", *arguments)
    for word in (*CODECS, *FACTORED_CODECS, "break-even", "60 samples", "take: ", "residual: "):
        assert word in table
    dry = shd("precompute", *arguments, "--dry-run", "--out", "cache")
    assert "take: maps sqrt8-row" in dry
    assert "--out cache" in dry
    assert not Path("cache").exists()
    assert "--out cache-2" in shd("precompute", *arguments, "--dry-run")
    assert "--out must be given" in shd("precompute", *arguments, code=1)
    assert "--student-heads must be given unless" in shd("plan", *arguments[:-2], code=1)
    found = json.loads(shd("plan", *arguments, "--json", "--samples", "2"))
    assert found["measured_samples"] == 2
    assert len(found["ways"]) == 5
    slow = shd("plan", *arguments, "--read-bandwidth", "1e-9")
    assert "take: no cache; run the teacher while training" in slow
    assert "shd precompute" not in slow
    wrong = shd("plan", *arguments, "--read-bandwidth", "0", code=1)
    assert "error (argument-value): --read-bandwidth must be" in wrong
    assert "inputs-invalid" in shd("plan", teacher, "--inputs", "absent.npz", "--student-heads", "2", code=1)


def test_the_command_makes_the_cache_that_was_forecast(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("my data.npz", **token_samples(20, 60, least=60))
    given = (teacher, "--inputs", "my data.npz", "--student-heads", 2, "--plan", "balanced", "--layer-pairs", "1:0")
    found = json.loads(shd("plan", *given, "--student-layers", 3, "--json"))
    program, *words = shlex.split(found["command"])
    assert program == "shd"
    shd(*words)
    form = CacheReader("cache-2").manifest.attention
    taken = found["taken"]
    assert (form.form, form.codec) == (taken["form"], taken["codec"]) == ("factored", "float16")
    assert (form.layers[0].student_layer, form.num_student_layers) == (1, 3)
    assert sum(stored_sizes(Path("cache-2"))) == pytest.approx(taken["total_bytes"])
