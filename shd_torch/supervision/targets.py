"""What teaches a batch, from a cache or a live teacher: its protocol, and targets that are more than a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from shd_torch.supervision.supervision import Supervision


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


class StoredRows(NamedTuple):
    """The rows of one form of a cache in a batch, as bytes: decode them, then spread them."""

    form: Any  # a subclass of Rows
    codes: dict[str, Tensor]  # (R, bytes), by the names of the parts that were read
    spread: Callable[[Tensor], Tensor]  # (R, ...) to (B, L, ...), zero where nothing is stored


class Taught:
    """What teaches a batch; a teacher overrides what it has. Rows are padded to ``length`` positions.

    Attributes:
        layers: student layers whose attention it teaches, zero-based.
    """

    layers: tuple[int, ...]

    def supervise(self, length: Any = None) -> Sequence[Supervision]:
        """The maps, one for each of ``layers``."""
        return ()

    def targets(self, length: int | None = None) -> Tensor | TopkTargets | None:
        """Logits as ``kd_loss`` takes them."""
        return None

    def hidden_states(self, length: int | None = None) -> Mapping[int, Tensor]:
        """Hidden states ``(B, L, D)`` by the teacher's number."""
        return {}

    def embeddings(self) -> EmbeddingTargets | None:
        """One vector a text."""
        return None

    def last_states(self, length: int | None = None) -> Tensor | None:
        """What the teacher's head reads, ``(B, L, D)``."""
        return None

    def stored_rows(self, subject: str, length: int | None = None) -> StoredRows | None:
        """The rows of any form of a cache."""
        return None
