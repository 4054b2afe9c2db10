"""What a live teacher's forward pass gives beside attention: targets for a loss on logits, and hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer
from shd_torch.checks import check_temperature
from shd_torch.kd.targets import cut_teacher, kd_targets_topk
from shd_torch.supervision.targets import TopkTargets


@dataclass(frozen=True)
class LiveTargets:
    """How to reduce a live teacher's logits: keep all of them, or the same part of a row as a cache.

    Attributes:
        vocab_size: number of classes to read; the others must be padding without mass.
        head: number of the likeliest classes to keep of each row, with the total mass of the rest; None keeps all
            logits.
        temperature: of kept classes and of the cut mass; complete logits work at any.

    Raises:
        ShdError: ``argument-value``.
    """

    vocab_size: int | None = None
    head: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.head is not None:
            check_integer("head", self.head, 1, None)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, None)

    @torch.no_grad()
    def read(self, logits: Tensor, *, check: bool) -> Tensor | TopkTargets:
        """Targets for ``kd_loss`` of logits ``(..., padded V)``, in the teacher's own dtype, or a record."""
        if self.head is None:  # the loss itself looks at what it is given
            return cut_teacher(logits, self.vocab_size, self.temperature, check=check)
        return kd_targets_topk(
            logits, self.head, temperature=self.temperature, vocab_size=self.vocab_size, check=check
        )


def read_hidden_layers(layers: Iterable[int]) -> tuple[int, ...]:
    """Numbers of hidden states, each once, ascending."""
    try:
        numbers = {as_index(number) for number in layers}
    except TypeError:
        numbers = {-1}
    if min(numbers, default=0) < 0:
        raise ShdError(
            "layers-invalid", f"hidden_layers must be integers of at least 0, 0 for the embeddings; got {layers!r}"
        )
    return tuple(sorted(numbers))
