"""The sums of a refitted matrix (spec chapter ALIGN), gathered where the model is; ``shd_ref.shrink`` solves them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shd_ref.shrink.align import RowSums, choose_change, solve_change
from shd_torch.shrink.families import Array, Rows, as_array


class OutputFit:
    """Sums of one ridge regression, batch by batch (ALIGN-2, ALIGN-7).

    Args:
        matrix: W0 of the closed form ``(F, D)``.
        bias: ``(D,)``, or None where the layer has none.
        ridge: see ``shrink``; None chooses one, or no change at all, on samples that are held out.
        device: where rows are.

    Attributes:
        chosen: the ridge of the last ``solve``; None where the closed form stayed as it was.
    """

    def __init__(self, matrix: Array, bias: Array | None, ridge: float | None, device: torch.device) -> None:
        self.start = matrix if bias is None else np.concatenate([matrix, bias[None]])
        self.biased, self.ridge = bias is not None, ridge
        self.chosen = ridge
        self._matrix = torch.from_numpy(self.start).to(device)
        self._fitted, self._held = _Sums(self._matrix), _Sums(self._matrix)

    def add(self, inputs: Tensor, targets: Tensor, held: Tensor) -> None:
        """Rows that count: what the matrix reads ``(n, F)`` and what it should give ``(n, D)``.

        ``held`` is boolean ``(n,)``, True = a row of a held-out sample; it matters where no ridge is given.
        """
        z, goal = inputs.double(), targets.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        if self.ridge is not None:
            self._fitted.add(z, goal)
        else:
            self._fitted.add(z[~held], goal[~held])
            self._held.add(z[held], goal[held])

    def solve(self) -> Rows:
        """The refitted matrix and bias."""
        if self.ridge is not None:
            change: Array | None = solve_change(self._fitted.read(), self.ridge, biased=self.biased)
        else:
            change, self.chosen = choose_change(self._fitted.read(), self._held.read(), biased=self.biased)
        refitted = self.start if change is None else self.start + change
        return (refitted[:-1], refitted[-1]) if self.biased else (refitted, None)


class _Sums:
    """``RowSums`` on the device, of rows z and what ``matrix`` leaves of their targets."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.inner, self.cross = matrix.new_zeros(len(matrix), len(matrix)), torch.zeros_like(matrix)
        self.rows, self.size = 0, 0.0

    def add(self, z: Tensor, goal: Tensor) -> None:
        self.inner += z.mT @ z
        self.cross += z.mT @ (goal - z @ self.matrix)
        self.rows += len(z)
        self.size += float(goal.square().sum())

    def read(self) -> RowSums:
        return RowSums(as_array(self.inner), as_array(self.cross), self.rows, self.size)
