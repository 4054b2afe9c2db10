"""Alignment (spec chapter ALIGN): last matrices refitted on the student's own stream, one layer's sums at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.tolerances import degenerate_threshold

RIDGE = 1e-4
"""Share of the inputs' mean square that holds a refitted matrix to the closed form (ALIGN-2)."""
RIDGES = (RIDGE, 1e-2, 1.0, 1e2)
"""From these one is chosen for each matrix where none is given (ALIGN-7)."""
HELD_OUT = 4
"""Every fourth sample of the calibration set chooses the ridge; the others are fitted (ALIGN-7)."""


class OutputFit:
    """Sums of one ridge regression, batch by batch (ALIGN-2, ALIGN-7).

    Args:
        matrix: W0 of the closed form ``(F, D)``, float64.
        bias: ``(D,)``, or None where the layer has none.
        ridge: see ``RIDGE``; None chooses one of ``RIDGES``, or no change at all, on samples that are held out.

    Attributes:
        chosen: the ridge of the last ``solve``; None where the closed form stayed as it was.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None, ridge: float | None = RIDGE) -> None:
        self.start = matrix if bias is None else torch.cat([matrix, bias[None]])
        self.biased, self.ridge = bias is not None, ridge
        self.chosen: float | None = ridge
        self.fitted, self.held = _Sums(self.start), _Sums(self.start)
        self._held_size = 0.0

    def add(self, inputs: Tensor, targets: Tensor, held: Tensor | None = None) -> None:
        """Rows that count: what the matrix reads ``(n, F)`` and what it should give ``(n, D)``.

        ``held`` is boolean ``(n,)``, True = a row of a held-out sample; it matters where no ridge is given.
        """
        z = inputs.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        goal = targets.double()
        left = goal - z @ self.start
        if held is None or self.ridge is not None:
            self.fitted.add(z, left)
            return
        self.fitted.add(z[~held], left[~held])
        self.held.add(z[held], left[held])
        self._held_size += float(goal[held].square().sum())

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """The refitted matrix and bias."""
        self.chosen = self.ridge if self.ridge is not None else self._choose_ridge()
        whole = self.fitted + self.held
        found = self.start if self.chosen is None else self.start + self._change(whole, self.chosen)
        return (found[:-1], found[-1]) if self.biased else (found, None)

    def _choose_ridge(self) -> float | None:
        """What leaves the least error on the held-out samples; the largest ridge where there are none.

        What rounding alone tells apart counts as equal; then the closed form stays, or the larger ridge is taken.
        """
        if not self.held.rows or not self.fitted.rows:
            return RIDGES[-1]
        errors = {ridge: self.held.error(self._change(self.fitted, ridge)) for ridge in RIDGES}
        most = min(0.0, *errors.values()) + degenerate_threshold() * self._held_size
        return None if most >= 0.0 else max(ridge for ridge in RIDGES if errors[ridge] <= most)

    def _change(self, sums: _Sums, ridge: float) -> Tensor:
        hold = torch.zeros(len(self.start), dtype=sums.inner.dtype, device=sums.inner.device)
        columns = len(self.start) - self.biased
        hold[:columns] = ridge * sums.inner.diagonal()[:columns].sum() / columns
        held = sums.inner + hold.diag()
        factor, failed = torch.linalg.cholesky_ex(held)
        if not failed:
            change: Tensor = torch.cholesky_solve(sums.cross, factor)
            return change
        # Without a ridge, or without rows enough for it: the change of least norm.
        driver = "gelsd" if held.device.type == "cpu" else None
        least: Tensor = torch.linalg.lstsq(held, sums.cross, driver=driver).solution
        return least


class _Sums:
    """Of rows z and what the start leaves of their targets: ``Z^T Z``, ``Z^T R``, and how many rows there are."""

    def __init__(self, start: Tensor) -> None:
        self.inner, self.cross = start.new_zeros(len(start), len(start)), torch.zeros_like(start)
        self.rows = 0

    def add(self, z: Tensor, left: Tensor) -> None:
        self.inner += z.mT @ z
        self.cross += z.mT @ left
        self.rows += len(z)

    def __add__(self, other: _Sums) -> _Sums:
        both = _Sums(self.cross)
        both.inner, both.cross, both.rows = self.inner + other.inner, self.cross + other.cross, self.rows + other.rows
        return both

    def error(self, change: Tensor) -> float:
        """The squared error of these rows after a change of the matrix, less that before it."""
        return float((change * (self.inner @ change - 2.0 * self.cross)).sum())
