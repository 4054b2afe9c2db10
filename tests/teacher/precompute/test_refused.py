"""Options, data and teachers that do not fit are refused before anything is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attention_graphs import language_model, saved, token_samples
from support.refusals import refusal

from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute

COUNT, LENGTH = 5, 9
NONE: dict[str, Any] = {"form": "none", "num_student_heads": 0, "logits": "topk"}
PATCHES = {"groups": "patches:4x4:2x2"}
IDS = {"groups": "ids:parts"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(language_model(), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize(
    ("code", "message", "options", "data"),
    [
        ("heads-exceed", "num_teacher_heads=4; got 5", {"num_student_heads": 5}, {}),
        ("layers-invalid", "at most 2", {"num_student_layers": 3}, {}),
        ("layers-invalid", "pairs must lie in", {"layer_pairs": ((0, 3),)}, {}),
        ("argument-value", "codec must be one of", {"codec": "jpeg"}, {}),
        ("argument-value", "temperature must be", {"temperature": 0.0}, {}),
        ("argument-value", "matching.samples must be", {"plan": "matched", "calibration_samples": 2**60}, {}),
        ("argument-value", "vocab_size must go with logits", {"vocab_size": 50}, {}),
        ("argument-value", "with_teachers must go with logits", {"with_teachers": (Path("a.onnx"),)}, {}),
        ("argument-value", "logits_temperature must go with topk", {"logits_temperature": 2.0}, {}),
        ("argument-value", "must be finite and above 0", {"logits": "topk", "logits_temperature": 0.0}, {}),
        ("argument-value", "logits_top must be at least 1", {"logits": "topk", "logits_top": 0}, {}),
        ("argument-value", "value_bits 4 to 16", {"logits": "topk", "logits_bits": 3}, {}),
        ("argument-value", "hidden must hold layers from 0", {"hidden": (3,)}, {}),
        ("argument-value", "logits or hidden must be requested", NONE | {"logits": "none"}, {}),
        ("argument-value", "num_student_heads must be left out", NONE | {"num_student_heads": 2}, {}),
        ("argument-value", "num_student_heads must be", {"num_student_heads": 0}, {}),
        ("argument-value", "groups must be patches:14x14:7x7", {"groups": "patches:4x4"}, {}),
        ("argument-value", "as many axes", {"groups": "patches:4x4:2"}, {}),
        ("argument-value", "form must be left out", IDS | {"form": "factored"}, {}),
        ("argument-value", "where rows of positions are stored; got logits", IDS | {"logits": "topk"}, {}),
        ("argument-value", "tile must be 0, or left out, where maps are pooled", IDS | {"tile": 4}, {}),
        ("argument-shape", "a place for each token .* got 16 tokens: count those", PATCHES, {}),
        ("inputs-invalid", "missing other", {"groups": "ids:other"}, {}),
        ("inputs-invalid", "parts must be int64", IDS, {"parts": np.ones((COUNT, 9))}),
        ("inputs-invalid", "a group for each of 9 tokens", IDS, {"parts": np.ones((COUNT, 8), int)}),
        ("inputs-invalid", "1000001 groups", IDS, {"parts": np.full((COUNT, 9), 10**6)}),
        (
            "inputs-invalid",
            "weights of at least 0",
            {"groups": "weights:parts"},
            {"parts": -np.ones((COUNT, 9, 2), int)},
        ),
        ("inputs-invalid", "missing input_ids", {}, {"input_ids": None}),
        ("inputs-invalid", "input_ids must be int64", {}, {"input_ids": np.ones((COUNT, LENGTH))}),
        ("inputs-invalid", "share one first axis", {}, {"input_ids": np.ones((2, LENGTH), int)}),
        ("inputs-invalid", "leave at least one token", {}, {"attention_mask": np.zeros((COUNT, LENGTH), int)}),
    ],
)
def test_nothing_is_written(
    teacher: Path, tmp_path: Path, code: str, message: str, options: dict[str, Any], data: dict[str, Any]
) -> None:
    inputs = token_samples(COUNT, LENGTH, least=LENGTH) | {"parts": np.zeros((COUNT, LENGTH), int)} | data
    inputs = {name: array for name, array in inputs.items() if array is not None}
    asked = {"num_student_heads": 2} | options
    run = RunOptions(tile=asked.pop("tile", None))
    with refusal(code, message):
        precompute(teacher, inputs, tmp_path / "cache", PrecomputeOptions(**asked), run)
    assert not (tmp_path / "cache").exists()
