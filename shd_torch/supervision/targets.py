"""What a student learns of a teacher's logits without having them all, and of its embeddings."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TopkTargets(NamedTuple):
    """The k likeliest classes of every row, and the mass of all others in one number."""

    ids: Tensor  # (..., k), integers, ascending
    log_probs: Tensor  # (..., k), log P at the temperature
    log_tail: Tensor  # (...), log of the mass of all others; -inf where there are none
    temperature: float
    vocab_size: int


class EmbeddingTargets(NamedTuple):
    """The teacher's embeddings of a batch, and how a student's are made to compare (CACHE-182)."""

    vectors: Tensor  # (B, D)
    pooling: str  # "mean", "cls", "max" or "last"
    normalize: bool  # whether each was divided by its norm
