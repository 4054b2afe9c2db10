"""What a student learns from where a teacher's rows are not kept whole (KD-8, KD-13)."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]


class TopkTargets(NamedTuple):
    """The k likeliest classes of every row, and the mass of all others in one number (KD-8)."""

    ids: Ids  # (..., k), ascending
    log_probs: NDArray[np.float64]  # (..., k), log P at the temperature
    log_tail: NDArray[np.float64]  # (...), log of the mass of all others; -inf where there are none
    temperature: float
    vocab_size: int


class SampledTargets(NamedTuple):
    """Classes kept and drawn, with weights that make any sum over the vocabulary unbiased (KD-12, KD-13)."""

    ids: Ids  # (..., keep + n), kept classes first; may repeat
    weights: NDArray[np.float64]  # (..., keep + n)
    entropy: NDArray[np.float64]  # (...), that of the whole row
    temperature: float
    vocab_size: int
