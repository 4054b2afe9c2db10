"""Intervals of means, and of differences that are paired, by Student's t."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95
_ANGLES: Final = 2**16  # steps of the integral below; the quantile is right to six digits


def half_width(values: NDArray[np.float64]) -> float | None:
    """Half of the ``CONFIDENCE`` interval of the mean of ``(n,)``; None below 2."""
    count = len(values)
    if count < 2:
        return None
    return float(t_quantile((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) / np.sqrt(count))


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t, which is ``sqrt(freedom) tan(angle)`` of density ``cos(angle)^(freedom-1)``."""
    step = np.pi / 2 / _ANGLES
    density = np.cos((np.arange(_ANGLES) + 0.5) * step) ** (freedom - 1)
    below = np.concatenate([np.zeros(1), np.cumsum(density)])
    angle = np.interp(2 * probability - 1, below / below[-1], np.arange(_ANGLES + 1) * step)
    return float(np.sqrt(freedom) * np.tan(angle))
