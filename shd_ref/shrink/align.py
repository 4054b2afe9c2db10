"""Alignment: the last matrix of a block, refitted on the student's own stream."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_ref.tolerances import degenerate_threshold

RIDGE = 1e-4
"""Share of the inputs' mean square that holds the refitted matrix to the one it started from."""
RIDGES = (RIDGE, 1e-2, 1.0, 1e2)
"""From these one is chosen for each matrix where none is given."""
HELD_OUT = 4
"""Every fourth sample of the calibration set chooses the ridge; the others are fitted."""


class RowSums(NamedTuple):
    """Sums over rows z of what a matrix reads and r of what it leaves of their targets t.

    With a bias, each z ends in a 1.
    """

    inner: Array  # Z^T Z, (F, F)
    cross: Array  # Z^T R, (F, D)
    rows: int  # how many there are
    size: float  # ||T||^2


def align_output(
    inputs: ArrayLike, targets: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *, ridge: float = RIDGE
) -> tuple[Array, Array | None]:
    """The matrix nearest to ``weight`` that maps the inputs to the targets, by ridge least squares.

    The ridge draws towards the closed form, not zero: directions without data keep what the algebra says.

    Args:
        inputs: what the matrix reads in the student ``(n, F)``, rows that count.
        targets: what the teacher's stream has there, less the student's stream before the block ``(n, D)``.
        weight: W of the closed form ``(F, D)``.
        bias: ``(D,)``, refitted too, or None where there is none.
        ridge: at least 0; see ``RIDGE``.

    Returns:
        W and bias: the minimum of ``||Z W + b - T||^2 + ridge * tr(Z^T Z) / F * ||W - W0||^2``.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``.
    """
    z, t = as_float(inputs, "inputs", ndim=2), as_float(targets, "targets", ndim=2)
    start = as_float(weight, "weight", ndim=2)
    if len(z) != len(t) or start.shape != (z.shape[1], t.shape[1]) or not len(z):
        got = f"{z.shape}, {t.shape} and {start.shape}"
        message = f"inputs (n, F), targets (n, D) and weight (F, D) must fit; got {got}"
        raise ShdError("argument-shape", message)
    ridge = check_number("ridge", ridge, least=0)
    shift = None if bias is None else as_float(bias, "bias", ndim=1)
    if shift is not None and len(shift) != t.shape[1]:
        raise ShdError("argument-shape", f"bias must have {t.shape[1]} entries; got {len(shift)}")
    if shift is not None:
        z = np.concatenate([z, np.ones((len(z), 1))], axis=1)
        start = np.concatenate([start, shift[None]])
    sums = RowSums(z.T @ z, z.T @ (t - z @ start), len(z), float((t**2).sum()))
    refitted = start + solve_change(sums, ridge, biased=bias is not None)
    return (refitted, None) if bias is None else (refitted[:-1], refitted[-1])


def choose_change(fitted: RowSums, held: RowSums, *, biased: bool) -> tuple[Array | None, float | None]:
    """The change of a matrix with the ridge of ``RIDGES`` that leaves the least error on held-out rows.

    On all rows, with its ridge; None twice where the closed form stays. ``biased``: no ridge holds the last row.
    """
    ridge = RIDGES[-1]
    if held.rows and fitted.rows:
        changes = {ridge: solve_change(fitted, ridge, biased=biased) for ridge in RIDGES}
        # The squared error of the held-out rows after the change, less that before it.
        errors = {ridge: float((x * (held.inner @ x - 2.0 * held.cross)).sum()) for ridge, x in changes.items()}
        # Errors that rounding may tell apart are equal: then the closed form stays, or the larger ridge is taken.
        most = min(0.0, *errors.values()) + degenerate_threshold() * held.size
        if most >= 0.0:
            return None, None
        ridge = max(ridge for ridge in RIDGES if errors[ridge] <= most)
    inner, cross = fitted.inner + held.inner, fitted.cross + held.cross
    whole = RowSums(inner, cross, fitted.rows + held.rows, fitted.size + held.size)
    return solve_change(whole, ridge, biased=biased), ridge


def solve_change(sums: RowSums, ridge: float, *, biased: bool) -> Array:
    """The change of a matrix by ridge least squares, of least norm where several do."""
    columns = len(sums.inner) - biased
    hold = np.zeros(len(sums.inner))
    hold[:columns] = ridge * sums.inner.diagonal()[:columns].sum() / columns
    held = sums.inner + np.diag(hold)
    try:
        np.linalg.cholesky(held)
    except np.linalg.LinAlgError:  # without a ridge, or without rows enough for it
        return np.asarray(np.linalg.lstsq(held, sums.cross, rcond=None)[0], np.float64)
    return np.asarray(np.linalg.solve(held, sums.cross), np.float64)
