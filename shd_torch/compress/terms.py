"""What scores and independent labels of a teacher teach, as terms of ``SHDTrainer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor

from shd_torch.capture.outputs import read_logits
from shd_torch.compress.samples import QUERY
from shd_torch.supervision.supervision import Taught
from shd_torch.training.batch import Forward, MicroBatch, count_samples
from shd_torch.training.terms import KdTerm, Measured, Term, Weight

if TYPE_CHECKING:
    from shd_torch.data.dataset import CacheJoin

_MEASURED: Final = 1000  # records whose scores say how far scores are from each other


@dataclass(frozen=True, eq=False)
class ScoreTerm(Term):
    """The squared error of scores, and that of their differences within a query, in units of the teacher's variance.

    So both sides are standardised by the teacher's mean, which falls out, and deviation.
    """

    NAME: ClassVar[str] = "score"
    WEIGHT_NAME: ClassVar[str] = "score_weight"

    weight: Weight = 1.0
    _deviation: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must hold scores; their deviation is read now."""
        cache = joined.cache
        records = (cache.read(key, (), logits=True, hidden=()) for key in sorted(cache.keys())[:_MEASURED])
        scores = torch.stack([torch.as_tensor(cache.decode_logits(record)).reshape(-1) for record in records])
        deviation = scores.float().std(0)
        self._deviation[:] = [torch.where(deviation > 0, deviation, 1.0)]

    def count(self, batch: MicroBatch) -> int:
        return count_samples(batch)

    def measure(self, forward: Forward) -> Measured:
        """On scores ``(B, K)``."""
        logits = read_logits(forward.outputs)
        assert logits is not None
        (scores,) = forward.learn(_read_scores, "score must have a cache of scores; got none")
        errors = (logits.float() - scores) / self._deviation[0].to(logits.device)
        losses = {"_errors": errors.square().mean()}
        queries = forward.batch.inputs.get(QUERY)
        if queries is not None:
            same = (queries[:, None] == queries).fill_diagonal_(False)
            differences = (errors[:, None] - errors).square().mean(-1)
            losses["_differences"] = (differences * same).sum() / same.sum().clamp(min=1)
        return Measured(losses, count_samples)


def _read_scores(taught: Taught) -> Tensor | None:
    targets = taught.targets()
    return targets if isinstance(targets, Tensor) else None


class LabelTerm(KdTerm):
    """``KdTerm`` on each label by itself: has it or not, the sigmoid of its logit."""

    def loss(self, targets: Sequence[Any], logits: Tensor, *, loss_mask: Tensor | None, check: bool) -> Tensor:
        """The mean over samples and labels of logits ``(B, C)``."""
        return super().loss([_in_two(target) for target in targets], _in_two(logits), loss_mask=None, check=check)


def _in_two(logits: Tensor) -> Tensor:
    """Logits of yes and no ``(B, C, 2)``, whose softmax is the sigmoid."""
    return torch.stack((logits, torch.zeros_like(logits)), -1)
