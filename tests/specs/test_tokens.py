"""Positions that only one side has are left out by list, and what is dropped is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref import ShdError, align_tokens, shd_loss, shd_loss_gradient, softmax


def maps(seed: int = 0) -> Any:
    return softmax(np.random.default_rng(seed).normal(size=(2, 3, 4, 5)))


def test_rows_and_columns_are_kept_in_the_order_asked_for() -> None:
    probs = maps()
    aligned = align_tokens(probs, rows=[3, 1], columns=[4, 0, 2])
    kept = probs[:, :, [3, 1]][..., [4, 0, 2]]
    np.testing.assert_allclose(aligned.probs, kept / kept.sum(-1, keepdims=True), atol=1e-15)
    np.testing.assert_allclose(aligned.dropped, 1 - kept.sum(-1), atol=1e-15)


def test_keeping_all_changes_nothing_and_order_alone_drops_nothing() -> None:
    probs = maps()
    aligned = align_tokens(probs)
    np.testing.assert_array_equal(aligned.probs, probs)
    assert (aligned.dropped == 0.0).all()
    turned = align_tokens(probs, columns=np.array([4, 3, 2, 1, 0]))
    np.testing.assert_array_equal(turned.probs, probs[..., ::-1])


def test_a_row_with_nothing_left_is_zero_and_a_sink_keeps_its_mass() -> None:
    probs = np.array([[[[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]]])
    aligned = align_tokens(probs, columns=[0, 2])
    np.testing.assert_allclose(aligned.probs, [[[[0.0, 0.0], [2 / 3, 1 / 3]]]])
    assert aligned.dropped.tolist() == [[[1.0, 0.25]]]
    sunk = align_tokens(probs / 2, columns=[0, 2], row_sums="at_most_one")
    np.testing.assert_allclose(sunk.probs, aligned.probs / 2)


def test_rows_that_do_not_count_need_not_be_distributions() -> None:
    probs = maps()
    probs[0, :, 1] = 7.0
    mask = np.ones((2, 4), dtype=bool)
    mask[0, 1] = False
    assert align_tokens(probs, query_mask=mask).probs.shape == probs.shape
    with pytest.raises(ShdError):
        align_tokens(probs)


def test_the_student_leaves_its_extra_positions_out_of_its_logits() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 3, 5, 6))  # the student has one position more, in front
    student = softmax(logits)
    without = softmax(logits[:, :, 1:, 1:])
    np.testing.assert_allclose(align_tokens(student, [*range(1, 5)], [*range(1, 6)]).probs, without, atol=1e-14)
    assert shd_loss(without, logits[:, :, 1:, 1:]) == pytest.approx(0.0, abs=1e-14)
    assert np.abs(shd_loss_gradient(maps(), logits[:, :, 1:, 1:])).max() > 0.0


@pytest.mark.parametrize("bad", [[], [0, 0], [5], [-1], [1.0], [True], ["0"]])
def test_bad_positions(bad: list[Any]) -> None:
    for lists in ({"columns": bad}, {"rows": bad}):
        with pytest.raises(ShdError) as caught:
            align_tokens(maps(), **lists)
        assert caught.value.code == "argument-value"


def test_lengths_that_differ_are_an_error() -> None:
    with pytest.raises(ShdError) as caught:
        shd_loss(maps(), np.zeros((2, 3, 4, 6)))
    assert caught.value.code == "argument-shape"
    with pytest.raises(ShdError) as caught:
        align_tokens(maps()[0])
    assert caught.value.code == "argument-shape"
    with pytest.raises(ShdError) as caught:
        align_tokens(maps(), query_mask=np.ones((2, 5), dtype=bool))
    assert caught.value.code == "argument-shape"
