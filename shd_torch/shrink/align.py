"""Alignment (spec chapter ALIGN): last matrices refitted on the student's own stream, one layer's sums at a time."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-4
"""Share of the inputs' mean square that holds a refitted matrix to the closed form (ALIGN-2)."""


class OutputFit:
    """Sums of one ridge regression, batch by batch (ALIGN-2).

    Args:
        matrix: W0 of the closed form ``(F, D)``, float64.
        bias: ``(D,)``, or None where the layer has none.
        ridge: see ``RIDGE``.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None, ridge: float = RIDGE) -> None:
        self.start = matrix if bias is None else torch.cat([matrix, bias[None]])
        self.biased, self.ridge = bias is not None, ridge
        self.inner = matrix.new_zeros(len(self.start), len(self.start))
        self.cross = torch.zeros_like(self.start)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Rows that count: what the matrix reads ``(n, F)`` and what it should give ``(n, D)``."""
        z = inputs.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        self.inner += z.mT @ z
        self.cross += z.mT @ (targets.double() - z @ self.start)

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """The refitted matrix and bias."""
        hold = torch.zeros(len(self.start), dtype=self.inner.dtype, device=self.inner.device)
        columns = len(self.start) - self.biased
        hold[:columns] = self.ridge * self.inner.diagonal()[:columns].sum() / columns
        held = self.inner + hold.diag()
        factor, failed = torch.linalg.cholesky_ex(held)
        if failed:  # without a ridge, or without rows enough for it: the change of least norm
            driver = "gelsd" if held.device.type == "cpu" else None
            change = torch.linalg.lstsq(held, self.cross, driver=driver).solution
        else:
            change = torch.cholesky_solve(self.cross, factor)
        found = self.start + change
        return (found[:-1], found[-1]) if self.biased else (found, None)
