"""Alignment (spec chapter ALIGN): the last matrix of a block, refitted on the student's own stream."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.integers import check_number

RIDGE = 1e-4
"""Share of the inputs' mean square that holds the refitted matrix to the one it started from."""


def align_output(
    inputs: ArrayLike,
    targets: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ridge: float = RIDGE,
) -> tuple[Array, Array | None]:
    """The matrix nearest to ``weight`` that maps the inputs to the targets, by ridge least squares (ALIGN-2).

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
        raise ShdError(
            "argument-shape",
            f"inputs (n, F), targets (n, D) and weight (F, D) must fit; got {z.shape}, {t.shape} and {start.shape}",
            "ALIGN-2",
        )
    ridge = check_number("ridge", ridge, "ALIGN-2", least=0)
    shift = None if bias is None else as_float(bias, "bias", ndim=1)
    if shift is not None and len(shift) != t.shape[1]:
        raise ShdError("argument-shape", f"bias must have {t.shape[1]} entries; got {len(shift)}", "ALIGN-2")
    hold = np.full(z.shape[1], ridge * float((z**2).sum()) / z.shape[1])
    if shift is not None:
        z = np.concatenate([z, np.ones((len(z), 1))], axis=1)
        start = np.concatenate([start, shift[None]])
        hold = np.append(hold, 0.0)
    change = np.linalg.lstsq(z.T @ z + np.diag(hold), z.T @ (t - z @ start), rcond=None)[0]
    found = start + change
    return (found, None) if bias is None else (found[:-1], found[-1])
