"""Alignment: a matrix W0 of the closed form, refitted by ridge least squares on the student's own stream.

The refitted W minimises ``||Z W - T||^2 + ridge * tr(Z^T Z) / F * ||W - W0||^2``. The ridge draws towards the closed
form, not zero: directions without data keep what the algebra says. No ridge holds a bias, the last row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shd_ref.attention import Array
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


def choose_change(fitted: RowSums, held_out: RowSums, *, biased: bool) -> tuple[Array | None, float | None]:
    """The change of a matrix with the ridge of ``RIDGES`` that leaves the least error on held-out rows.

    On all rows, with its ridge; None twice where the closed form stays. ``biased``: the last row is a bias.
    """
    ridge = RIDGES[-1]
    if held_out.rows and fitted.rows:
        changes = {ridge: solve_change(fitted, ridge, biased=biased) for ridge in RIDGES}
        # The squared error of the held-out rows after the change, less that before it.
        errors = {
            ridge: float((x * (held_out.inner @ x - 2.0 * held_out.cross)).sum()) for ridge, x in changes.items()
        }
        # Errors that rounding may tell apart are equal: then the closed form stays, or the larger ridge is taken.
        most = min(0.0, *errors.values()) + degenerate_threshold() * held_out.size
        if most >= 0.0:
            return None, None
        ridge = max(ridge for ridge in RIDGES if errors[ridge] <= most)
    inner, cross = fitted.inner + held_out.inner, fitted.cross + held_out.cross
    whole = RowSums(inner, cross, fitted.rows + held_out.rows, fitted.size + held_out.size)
    return solve_change(whole, ridge, biased=biased), ridge


def solve_change(sums: RowSums, ridge: float, *, biased: bool) -> Array:
    """``W - W0``, of least norm where several do."""
    columns = len(sums.inner) - biased
    penalty = np.zeros(len(sums.inner))
    penalty[:columns] = ridge * sums.inner.diagonal()[:columns].sum() / columns
    inner = sums.inner + np.diag(penalty)
    try:
        np.linalg.cholesky(inner)
    except np.linalg.LinAlgError:  # without a ridge, or without rows enough for it
        return np.asarray(np.linalg.lstsq(inner, sums.cross, rcond=None)[0], np.float64)
    return np.asarray(np.linalg.solve(inner, sums.cross), np.float64)
