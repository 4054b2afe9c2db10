"""Intervals of means and of their differences, by Student's t; ratios of sums are linearised (the delta method)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE: Final = 0.95
_ANGLES: Final = 2**16  # steps of the integral below; the quantile is right to six digits


@dataclass(frozen=True, eq=False)
class Scores:
    """What every sample says of one number, the ratio of the totals of ``sums`` and ``counts``, both ``(n,)``."""

    sums: Array = field(default_factory=lambda: np.zeros(0))
    counts: Array = field(default_factory=lambda: np.zeros(0))

    def joined(self, other: Scores) -> Scores:
        """With further samples."""
        return Scores(np.concatenate([self.sums, other.sums]), np.concatenate([self.counts, other.counts]))

    @property
    def value(self) -> float:
        """NaN where nothing counted."""
        total = float(self.counts.sum())
        return float(self.sums.sum()) / total if total else float("nan")

    @property
    def value_or_none(self) -> float | None:
        """None where nothing counted."""
        return self.value if self.counts.any() else None

    @property
    def influences(self) -> Array:
        """``(n,)``, what each sample adds to the value, times n: they sum to 0, and their spread is the value's."""
        centred: Array = (self.sums - self.value * self.counts) / self.counts.mean()
        return centred

    def margin(self) -> float | None:
        """Half of the interval of the value; None of fewer than two samples."""
        return half_width(self.influences)

    def above(self, other: Scores, comparisons: int = 1) -> tuple[float, float | None]:
        """By how much it is above another on the same samples, and half of one of so many intervals."""
        return self.value - other.value, half_width(self.influences - other.influences, comparisons)


def half_width(influences: Array, comparisons: int = 1) -> float | None:
    """Half of the ``CONFIDENCE`` interval of the mean of influences ``(n,)``; None of fewer than two samples."""
    count = len(influences)
    if count < 2:
        return None
    tail = (1 - CONFIDENCE) / (2 * max(comparisons, 1))
    return float(t_quantile(1 - tail, count - 1) * influences.std(ddof=1) / np.sqrt(count))


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t, which is ``sqrt(freedom) tan(angle)`` of density ``cos(angle)^(freedom-1)``."""
    step = np.pi / 2 / _ANGLES
    density = np.cos((np.arange(_ANGLES) + 0.5) * step) ** (freedom - 1)
    below = np.concatenate([np.zeros(1), np.cumsum(density)])
    angle = np.interp(2 * probability - 1, below / below[-1], np.arange(_ANGLES + 1) * step)
    return float(np.sqrt(freedom) * np.tan(angle))
