"""What a live teacher's forward pass gives beside attention: targets for a loss on logits, and hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer
from shd_torch.checks import check_temperature
from shd_torch.kd.rows import Record
from shd_torch.kd.targets import cut_teacher, kd_targets_sampled, kd_targets_topk


@dataclass(frozen=True)
class LiveTargets:
    """How to reduce a live teacher's logits: keep all of them, or the same part of a row as a cache.

    Attributes:
        vocab_size: number of classes to read; the others must be padding without mass (KD-7).
        head: number of the likeliest classes to keep of each row; None, without draws, keeps all logits.
        draws: number of classes drawn from the rest; 0 gives top-k targets with the total mass of the rest.
        temperature: of kept or drawn classes (KD-6) and of the cut mass; complete logits work at any.
        seed: of the draws.

    Raises:
        ShdError: ``argument-value``.
    """

    vocab_size: int | None = None
    head: int | None = None
    draws: int = 0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_integer("draws", self.draws, 0, None, "KD-13")
        check_integer("seed", self.seed, 0, None, "KD-13")
        if self.head is not None:
            check_integer("head", self.head, 0 if self.draws else 1, None, "KD-13" if self.draws else "KD-8")
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, None, "KD-7")

    @property
    def keeps_all(self) -> bool:
        """Whether the targets are the logits themselves."""
        return self.head is None and not self.draws


class TargetReader:
    """Makes targets of a teacher's logits, batch after batch."""

    def __init__(self, options: LiveTargets) -> None:
        self.options = options
        self._draws: torch.Generator | None = None

    @torch.no_grad()
    def read(self, logits: Tensor, *, check: bool) -> Tensor | Record:
        """Targets for ``kd_loss`` of logits ``(..., padded V)``, in the teacher's own dtype, or a record."""
        options = self.options
        if options.keeps_all:  # the loss itself looks at what it is given
            return cut_teacher(logits, options.vocab_size, options.temperature, check=check)
        keywords: dict[str, Any] = {
            "temperature": options.temperature,
            "vocab_size": options.vocab_size,
            "check": check,
        }
        if not options.draws:
            return kd_targets_topk(logits, options.head or 1, **keywords)
        if self._draws is None:
            self._draws = torch.Generator(logits.device).manual_seed(options.seed)
        # At equal distances from one random start a row: each is uniform, and sums vary less. The start is a float32
        # below one, so that no sum rounds up to the next whole number in float64.
        start = torch.rand((*logits.shape[:-1], 1), generator=self._draws, device=logits.device).double()
        points = (torch.arange(options.draws, device=logits.device) + start) / options.draws
        return kd_targets_sampled(logits, points, keep=options.head or 0, **keywords)


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
