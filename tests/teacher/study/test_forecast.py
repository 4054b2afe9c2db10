"""``shd plan`` and ``--dry-run``: what they say is what precompute then writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.attention_graphs import token_teacher
from support.students import precompute
from typer.testing import CliRunner

from shd_ref.cache import CODECS, FACTORED_CODECS
from shd_ref.cli import load_app
from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.study.forecast import Forecast, forecast_cache

app = load_app()
OPTIONS = PrecomputeOptions(num_student_heads=2)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    onnx.save(token_teacher(), path)
    return path


def make_tokens(num_samples: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    mask = (np.arange(20) < rng.integers(5, 21, num_samples)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(0, 50, (num_samples, 20)) * mask, "attention_mask": mask}


@pytest.mark.parametrize("codec", CODECS)
def test_the_forecast_is_what_is_written(teacher: Path, tmp_path: Path, codec: str) -> None:
    inputs = make_tokens()
    forecast = forecast_cache(teacher, inputs, OPTIONS, num_samples=5)
    assert (forecast.num_samples, forecast.read_samples, forecast.measured_samples) == (60, 60, 5)
    assert (forecast.mean_length, forecast.max_length) == (inputs["attention_mask"].sum(1).mean(), 20)
    (row,) = [row for row in forecast.codecs if row.codec == codec]
    options = PrecomputeOptions(num_student_heads=2, codec=codec)
    summary = precompute(teacher, inputs, tmp_path, options, RunOptions(samples_per_shard=10))
    weights = 60 * 4 * (2 + 2 * 4)  # two alphas and a mixing matrix 2 x 4, in float32
    assert row.total_bytes == pytest.approx(summary.coded_bytes + weights)
    assert row.bytes_per_sample == pytest.approx(row.total_bytes / 60)
    assert row.break_even == pytest.approx(row.bytes_per_sample / forecast.teacher_seconds)
    assert row.error.kl_mean == pytest.approx(summary.errors.attention.kl_mean, rel=0.5, abs=1e-7)


@pytest.mark.parametrize("codec", FACTORED_CODECS)
def test_the_forecast_of_queries_and_keys_is_what_is_written(teacher: Path, tmp_path: Path, codec: str) -> None:
    inputs = make_tokens()
    (row,) = [row for row in forecast_cache(teacher, inputs, OPTIONS).factored if row.codec == codec]
    options = PrecomputeOptions(num_student_heads=2, form="factored", factored_codec=codec)
    summary = precompute(teacher, inputs, tmp_path, options, RunOptions(samples_per_shard=10))
    assert row.total_bytes == pytest.approx(summary.coded_bytes + 60 * 4 * (2 + 2 * 4))
    assert row.error.rows > 0
    assert row.error.kl_mean == pytest.approx(summary.errors.attention.kl_mean, rel=0.5, abs=1e-7)
    assert row.error.kl_max > row.error.kl_mean > 0


def test_padding_in_front_costs_queries_and_keys_nothing(teacher: Path) -> None:
    tokens = make_tokens(8)
    behind, front = (
        {name: array[:, ::step] for name, array in tokens.items()} | {"attention_mask": mask}
        for step, mask in ((1, tokens["attention_mask"]), (-1, tokens["attention_mask"][:, ::-1]))
    )
    rows = [forecast_cache(teacher, inputs, OPTIONS).factored for inputs in (behind, front)]
    assert [row.bytes_per_sample for row in rows[0]] == [row.bytes_per_sample for row in rows[1]]
    assert rows[1][0].error.kl_max > 0


def test_a_long_data_set_is_read_in_part(teacher: Path) -> None:
    forecast = forecast_cache(teacher, make_tokens(1300), OPTIONS, num_samples=3)
    assert (forecast.num_samples, forecast.read_samples) == (1300, 1000)
    assert forecast.codecs[0].total_bytes == pytest.approx(1300 * forecast.codecs[0].bytes_per_sample)


def test_slow_storage_asks_for_smaller_codes_and_then_for_the_teacher(teacher: Path) -> None:
    def forecast(bandwidth: float) -> Forecast:
        return forecast_cache(teacher, make_tokens(), OPTIONS, num_samples=2, bandwidth=bandwidth)

    fast, slow = forecast(1e15), forecast(1e-3)
    assert (fast.recommended, fast.pays) == ("sqrt8-row", True)
    assert (slow.recommended, slow.pays) == ("sqrt8-row", False)
    for changes in ({"num_samples": 0}, {"bandwidth": 0.0}, {"bandwidth": float("nan")}):
        with pytest.raises(ShdError) as caught:
            forecast_cache(teacher, make_tokens(), OPTIONS, **changes)
        assert caught.value.code == "argument-value"


def test_the_form_turns_with_the_length(teacher: Path) -> None:
    """Four heads of width 3 with as many key heads, merged to two: 2 L bytes a row against 8 (3 + 4)."""

    def forecast(length: int) -> Forecast:
        tokens = np.random.default_rng(0).integers(0, 50, (4, length))
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        return forecast_cache(teacher, inputs, OPTIONS, num_samples=2)

    short, long = forecast(20), forecast(60)
    assert (short.form, long.form) == ("maps", "factored")
    assert {row.codec: row.bytes_per_sample for row in long.factored} == {
        "float16": 4 * (2 * 4 + 2) + 60 * 2 * 8 * 3,
        "int8": 4 * (2 * 4 + 2) + 60 * 8 * (3 + 4),
    }


def test_commands_print_and_write_nothing(teacher: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **make_tokens())
    arguments = [str(teacher), "--inputs", str(tmp_path / "data.npz"), "--student-heads", "2"]
    wide = {"COLUMNS": "200"}
    table = CliRunner().invoke(app, ["plan", *arguments], env=wide)
    assert table.exit_code == 0, table.output
    for word in (*CODECS, "break-even", "60 samples", "ms per sample"):
        assert word in table.output
    dry = CliRunner().invoke(app, ["precompute", *arguments, "--dry-run", "--out", str(tmp_path / "cache")], env=wide)
    assert dry.exit_code == 0, dry.output
    assert "break-even" in dry.output
    assert not (tmp_path / "cache").exists()
    found = json.loads(CliRunner().invoke(app, ["plan", *arguments, "--json", "--samples", "2"]).output)
    assert found["measured_samples"] == 2
    assert [row["codec"] for row in found["codecs"]] == list(CODECS)
    refused = CliRunner().invoke(app, ["plan", str(teacher), "--inputs", "absent.npz", "--student-heads", "2"])
    assert refused.exit_code == 1
    assert "inputs-invalid" in refused.output
