"""Sizes of probes, from the names that exporters give the axes of their inputs."""

from __future__ import annotations

import pytest

from shd_ref.teacher import InputSpec
from shd_ref.teacher.graph.inputs import InputSizes, batch_axes

SIZES = InputSizes(batch=4, length=5)
PAST = InputSpec("past_key_values.0.key", "float32", ("batch_size", 2, "past_sequence_length", 8))
IDS = InputSpec("input_ids", "int64", ("batch_size", "sequence_length"))


@pytest.mark.parametrize(
    "axis",
    [
        "past_sequence_length + sequence_length",
        "past_sequence_length+sequence_length",
        "past_sequence_length + 1",
        "total_sequence_length",
        "sequence_length",
        "attention_mask_dim_1",
        None,
    ],
)
def test_an_empty_past_leaves_the_mask_as_long_as_the_tokens(axis: str | None) -> None:
    mask = InputSpec("attention_mask", "int64", ("batch_size", axis))
    shapes = SIZES.shapes((PAST, mask, IDS))
    assert shapes == {"input_ids": (4, 5), "attention_mask": (4, 5), "past_key_values.0.key": (4, 2, 0, 8)}


@pytest.mark.parametrize("shape", [("batch", 2, None, 8), (None, 2, None, 8), ("b", 2, "past_len", 8), (4, 2, 0, 8)])
def test_the_past_is_empty_under_any_name_of_its_axis(shape: tuple[int | str | None, ...]) -> None:
    assert SIZES.shapes((InputSpec("past_key_values.3.value", "float16", shape),)) == {
        "past_key_values.3.value": (4, 2, 0, 8)
    }


def test_equal_names_are_equal_sizes_wherever_they_stand() -> None:
    first = InputSpec("tokens", "int64", ("N", "T"))
    turned = InputSpec("x", "float32", ("T", "N", 3))
    assert SIZES.shapes((turned, first)) == {"tokens": (4, 5), "x": (5, 4, 3)}
    assert batch_axes((turned, first), SIZES) == {"tokens": 0, "x": 1}
