"""How much the SHD term weighs: schedules of beta over the training, and a balancer against the base loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from shd_ref.errors import need
from shd_ref.integers import check_number

SHAPES: Final[tuple[str, ...]] = ("constant", "linear", "cosine")
"""How beta goes from its peak to its end."""


@dataclass(frozen=True)
class BetaSchedule:
    """Beta as a function of training progress: linear warm-up, then decay to ``end``.

    Attributes:
        peak: beta after the warm-up, at least 0.
        kind: ``"constant"`` (stays at the peak), ``"linear"`` or ``"cosine"``.
        warmup: share of the training for the warm-up from 0, in [0, 1).
        end: beta at the end of a linear or cosine decay, at least 0.

    Raises:
        ShdError: ``argument-value`` naming what is out of range or no number.
    """

    peak: float
    kind: str = "constant"
    warmup: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        need(self.kind in SHAPES, "argument-value", "kind", f"be one of {', '.join(SHAPES)}", repr(self.kind))
        for name, value in (("peak", self.peak), ("end", self.end)):
            check_number(name, value, least=0.0)
        inside = 0 <= check_number("warmup", self.warmup) < 1
        need(inside, "argument-value", "warmup", "be in [0, 1), a part of the training", repr(self.warmup))

    def __call__(self, progress: float) -> float:
        """Beta at this part of the training, 0 at its first step and 1 after its last."""
        progress = min(max(progress, 0.0), 1.0)
        if progress < self.warmup:
            return self.peak * progress / self.warmup
        if self.kind == "constant":
            return self.peak
        way = (progress - self.warmup) / (1.0 - self.warmup)
        left = 1.0 - way if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * way))
        return self.end + (self.peak - self.end) * left


@dataclass(frozen=True)
class LossBalancer:
    """Scales the SHD term to a fraction of the base loss at every step, independent of the scale of either.

    Beta then multiplies a term as large as ``fraction`` of the base loss. No gradient flows through the scale. A
    nearly converged term is not amplified without bound: the scale never exceeds ``limit``.

    Attributes:
        fraction: of the base loss, above 0.
        limit: the largest scale.

    Raises:
        ShdError: ``argument-value`` naming what is out of range or no number.
    """

    fraction: float = 1.0
    limit: float = 1e3

    def __post_init__(self) -> None:
        for name, value in (("fraction", self.fraction), ("limit", self.limit)):
            check_number(name, value, above=0.0)

    @torch.no_grad()
    def scale(self, base: Tensor, term: Tensor) -> Tensor:
        """``min(fraction |base| / term, limit)``, ``()``; the same on every rank of a running process group."""
        both = torch.stack([base.detach().abs().float(), term.detach().float()])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(both)
        return (self.fraction * both[0] / both[1].clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=self.limit)
