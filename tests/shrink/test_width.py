"""A narrower stream: folding changes nothing, a full rotation changes nothing, a cut keeps the principal axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shd_ref.errors import ShdError
from shd_ref.shrink.align import align_output
from shd_ref.shrink.width import fold_norm, kept_scale, principal_axes

RANDOM = np.random.default_rng(1)
STREAM = RANDOM.normal(size=(200, 6)) * [5.0, 4.0, 3.0, 2.0, 0.1, 0.1] @ np.linalg.qr(RANDOM.normal(size=(6, 6)))[0]


def rms_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True))


def layer_norm(x: np.ndarray) -> np.ndarray:
    return rms_norm(x - x.mean(-1, keepdims=True))


def moment(rows: np.ndarray) -> np.ndarray:
    return rows.T @ rows / len(rows)


def test_no_share_leaves_its_range() -> None:
    """Axes that hold nothing of a moment, and all of them: rounding puts the share a little outside [0, 1]."""
    for _ in range(50):
        turn = np.linalg.qr(RANDOM.normal(size=(6, 6)))[0]
        thin = np.outer(turn[0], turn[0])
        assert 0.0 <= kept_scale(thin, turn[1:2].T) < 1e-6
        assert principal_axes(thin, 6).energy <= 1.0


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_signs_of_axes_are_chosen_by_rule(norm: str) -> None:
    for _ in range(10):
        rows = RANDOM.normal(size=(9, 6))
        basis = principal_axes(moment(rows), 6, norm).basis
        if norm == "rms":
            assert (basis[np.abs(basis).argmax(axis=0), range(6)] > 0.0).all()
        shaken = principal_axes(moment(rows) + 1e-13 * RANDOM.normal(size=(6, 6)), 6, norm).basis
        np.testing.assert_allclose(shaken, basis, atol=1e-8)


def test_folding_changes_nothing() -> None:
    matrix, scale, shift, bias = (RANDOM.normal(size=size) for size in ((6, 3), 6, 6, 3))
    folded, moved = fold_norm(matrix, scale, shift, bias)
    np.testing.assert_allclose(
        layer_norm(STREAM) @ folded + moved, (layer_norm(STREAM) * scale + shift) @ matrix + bias, atol=1e-12
    )
    assert fold_norm(matrix, scale)[1] is None


@pytest.mark.parametrize(("name", "norm"), [("rms", rms_norm), ("layer", layer_norm)])
def test_a_full_turn_changes_nothing(name: str, norm: Any) -> None:
    axes = principal_axes(moment(norm(STREAM)), 6, name)
    assert axes.energy == pytest.approx(1.0)
    np.testing.assert_allclose(norm(STREAM @ axes.basis) @ axes.basis.T, norm(STREAM), atol=1e-12)
    assert kept_scale(moment(norm(STREAM)), axes.basis) == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "norm"), [("rms", rms_norm), ("layer", layer_norm)])
def test_a_cut_keeps_the_principal_axes_and_the_norm_s_scale(name: str, norm: Any) -> None:
    s = moment(norm(STREAM))
    axes = principal_axes(s, 5, name)
    kept = 5 if name == "rms" else 4
    centred = s if name == "rms" else np.cov(norm(STREAM).T, bias=True) + np.outer(*[norm(STREAM).mean(0)] * 2)
    best = np.sort(np.linalg.eigvalsh(centred))[::-1][:kept].sum() / np.trace(s)
    assert axes.energy == pytest.approx(best)
    turned = norm(STREAM @ axes.basis) * kept_scale(s, axes.basis)
    wanted = norm(STREAM) @ axes.basis
    assert np.linalg.norm(turned - wanted) < 0.02 * np.linalg.norm(wanted)
    if name == "layer":  # a LayerNorm of the student finds nothing to subtract
        np.testing.assert_allclose((STREAM @ axes.basis).mean(1), 0.0, atol=1e-12)


def test_alignment_is_ridge_least_squares_around_the_closed_form() -> None:
    start, bias = RANDOM.normal(size=(6, 3)), RANDOM.normal(size=3)
    truth = RANDOM.normal(size=(6, 3))
    targets = STREAM @ truth + 2.0
    found, offset = align_output(STREAM, targets, start, bias, ridge=0.0)
    np.testing.assert_allclose(found, truth, atol=1e-8)
    np.testing.assert_allclose(offset, 2.0, atol=1e-8)
    held, none = align_output(STREAM, targets, start, ridge=1e9)
    assert none is None
    np.testing.assert_allclose(held, start, atol=1e-6)

    def cost(w: np.ndarray) -> float:
        hold = 0.3 * np.trace(STREAM.T @ STREAM) / 6
        return float(((STREAM @ w - targets) ** 2).sum() + hold * ((w - start) ** 2).sum())

    best = align_output(STREAM, targets, start, ridge=0.3)[0]
    for _ in range(5):
        assert cost(best) < cost(best + 1e-3 * RANDOM.normal(size=best.shape))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: principal_axes(np.eye(4), 5), "argument-value"),
        (lambda: principal_axes(np.eye(4), 1, "layer"), "argument-value"),
        (lambda: principal_axes(np.eye(4), True), "argument-value"),
        (lambda: principal_axes(np.eye(4), 2, "batch"), "argument-value"),
        (lambda: principal_axes(np.ones((4, 3)), 2), "argument-shape"),
        (lambda: fold_norm(np.ones((4, 3)), np.ones(3)), "argument-shape"),
        (lambda: fold_norm(np.ones((4, 3)), np.ones(4), np.ones(3)), "argument-shape"),
        (lambda: kept_scale(np.eye(3), np.ones((4, 2))), "argument-shape"),
        (lambda: align_output(np.ones((4, 3)), np.ones((5, 2)), np.ones((3, 2))), "argument-shape"),
        (lambda: align_output(np.ones((4, 3)), np.ones((4, 2)), np.ones((3, 2)), ridge=-1.0), "argument-value"),
    ],
)
def test_refusals(call: Any, code: str) -> None:
    with pytest.raises(ShdError) as error:
        call()
    assert error.value.code == code
