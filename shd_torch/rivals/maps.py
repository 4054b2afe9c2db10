"""Rivals on attention maps and on the logits behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.merging.plans import plan_groups
from shd_torch.maps import shd_loss
from shd_torch.rivals.rival import LayerPair, Lesson, Rival
from shd_torch.rivals.watch import Seen
from shd_torch.teacher import layer_kls


class MergedMaps(Rival):
    """The KL of the teacher's maps, merged as ``online`` does it: SHD, and every other mixing matrix (Eq. 11)."""

    merges_maps = True

    def forward(self, seen: Seen, lesson: Lesson, *, loss_mask: Tensor | None = None) -> Tensor:
        """``layer_kls``, a sum over layers and heads."""
        kls = layer_kls(
            seen.captured, lesson.squeezed, loss_mask=loss_mask, temperature=self.temperature, check=False
        )
        return torch.stack(list(kls.values())).sum()


class Divergence(Rival):
    """Another divergence of the same merged maps: ``mse`` (summed over keys), ``js`` or ``reverse_kl`` (LOSS-11)."""

    merges_maps = True

    def __init__(self, *args: Any, divergence: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divergence = divergence

    def forward(self, seen: Seen, lesson: Lesson, *, loss_mask: Tensor | None = None) -> Tensor:
        """``shd_loss``, a sum over layers and heads."""
        return shd_loss(
            [each.probs(temperature=self.temperature) for each in lesson.squeezed.supervisions],
            [seen.captured.layer(student).compute_logits() for student, _ in self.pairs],
            loss_mask=loss_mask,
            temperature=self.temperature,
            divergence=self.divergence,
            check=self.is_first(),
        )


class GeometricMean(Rival):
    """The KL of geometric means: ``A~_h ~ prod_t A_t^(1/k)`` over the k heads of a group, rows renormalised.

    With ``all_heads`` one map of all teacher heads teaches one of all student heads, as AttnDistill (BMVC 2022) does
    for heads of any numbers; with ``class_row`` the first row alone counts, as there. A geometric mean is the softmax
    of mean logits. Our reading: no code of theirs was at hand.
    """

    merges_maps = True

    def __init__(self, *args: Any, all_heads: bool = False, class_row: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all_heads, self.class_row = all_heads, class_row

    def forward(self, seen: Seen, lesson: Lesson, *, loss_mask: Tensor | None = None) -> Tensor:
        """A sum over layers and over maps."""
        taught, logits = [], []
        for (student, teacher), squeeze in zip(self.pairs, lesson.squeezed.squeezes, strict=True):
            own = seen.captured.layer(student).compute_logits()
            other = lesson.calls[teacher].compute_logits()
            groups = plan_groups(squeeze.plan, other.shape[1])
            if self.all_heads:
                own, groups = own.mean(1, keepdim=True), (tuple(range(other.shape[1])),)
            means = torch.stack([other[:, list(group)].mean(1) for group in groups], dim=1)
            taught.append((means / self.temperature).softmax(-1).nan_to_num(0.0))  # rows that see no key
            logits.append(own)
        if self.class_row:
            first = torch.zeros(taught[0].shape[0], taught[0].shape[2], dtype=torch.bool, device=taught[0].device)
            first[:, 0] = True
            loss_mask = first if loss_mask is None else first & loss_mask
        return shd_loss(taught, logits, loss_mask=loss_mask, temperature=self.temperature, check=self.is_first())


class ScoreMse(Rival):
    """TinyBERT: the mean squared difference of attention logits, head by head; heads must be equally many.

    Deviation: the published code sets masked entries to 0 and counts them; here the mean is over entries that both
    models may attend to, in rows that count.
    """

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """The mean over samples, heads, rows and keys."""
        if pair.student.num_heads != pair.teacher.num_heads:
            raise ShdError(
                "argument-shape",
                "score_mse compares head with head, so that both models must have equally many; got "
                f"{pair.teacher.num_heads} of the teacher and {pair.student.num_heads} of the student",
            )
        own, other = pair.student.compute_logits(), pair.teacher.compute_logits()
        counted = ~(torch.isneginf(own) | torch.isneginf(other))
        if loss_mask is not None:
            counted = counted & loss_mask[:, None, :, None]
        difference = own.masked_fill(~counted, 0.0) - other.masked_fill(~counted, 0.0)
        return difference.square().sum() / counted.sum().clamp(min=1)
