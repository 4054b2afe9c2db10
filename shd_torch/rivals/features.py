"""Rivals on features: projectors, self-correlation, outputs of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shd_torch.capture import AttentionCall
from shd_torch.maps import softmax
from shd_torch.recipes import OrthogonalProjection
from shd_torch.rivals.rival import LayerPair, Rival, mean_rows


class Projector(Rival):
    """The mean squared error of projected features: ``mean (P_l S_l - T_l)^2`` over rows and channels.

    Args:
        widths: ``(D_s, D_t)`` of each pair of layers.
        hidden_layer: False for a linear P; True for Linear, GELU, Linear of the teacher's width.
    """

    reads_hidden = True

    def __init__(
        self, *args: Any, widths: Sequence[tuple[int, int]], hidden_layer: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.projectors = nn.ModuleList(
            nn.Sequential(nn.Linear(student, teacher), nn.GELU(), nn.Linear(teacher, teacher))
            if hidden_layer
            else nn.Linear(student, teacher)
            for student, teacher in widths
        )

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over rows that count and channels."""
        student, teacher = self._features(pair)
        return mean_rows((self.projectors[pair.number](student) - teacher).square().mean(-1), loss_mask)

    def _features(self, pair: LayerPair) -> tuple[Tensor, Tensor]:
        assert pair.student_hidden is not None
        assert pair.teacher_hidden is not None
        return pair.student_hidden, pair.teacher_hidden


class AttentionOutput(Projector):
    """The same on what attention returns before its output projection, heads side by side ``(B, L, H d_v)``."""

    reads_hidden = False

    def _features(self, pair: LayerPair) -> tuple[Tensor, Tensor]:
        return attention_output(pair.student), attention_output(pair.teacher)


class OrthogonalProjector(Rival):
    """VkD: ``SmoothL1(W S, LN(T))`` with a W whose rows or columns stay orthonormal (REC-19), position by position.

    Deviation: VkD pools the positions of an image first; the rows of a text are not one thing.

    Args:
        widths: ``(D_s, D_t)`` of each pair of layers.
    """

    reads_hidden = True

    def __init__(self, *args: Any, widths: Sequence[tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.projectors = nn.ModuleList(OrthogonalProjection(*each) for each in widths)

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over rows that count and channels."""
        assert pair.student_hidden is not None
        assert pair.teacher_hidden is not None
        target = F.layer_norm(pair.teacher_hidden, pair.teacher_hidden.shape[-1:])
        projected = self.projectors[pair.number](pair.student_hidden)
        return mean_rows(F.smooth_l1_loss(projected, target, reduction="none").mean(-1), loss_mask)


class SelfCorrelation(Rival):
    """Cosines of each position's features with every other's, compared by their mean squared difference (Eq. 12).

    ``G_ij = cos(f_i, f_j)``: no width takes part, so that there is no projector. Our reading: the source names the
    Gram matrix and the cosine, and no reduction.
    """

    reads_hidden = True

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over pairs of positions that both count."""
        assert pair.student_hidden is not None
        assert pair.teacher_hidden is not None
        own, other = (F.normalize(each, dim=-1) for each in (pair.student_hidden, pair.teacher_hidden))
        difference = (own @ own.mT - other @ other.mT).square()
        if loss_mask is None:
            return difference.mean()
        both = loss_mask[:, :, None] & loss_mask[:, None, :]
        return difference.masked_fill(~both, 0.0).sum() / both.sum().clamp(min=1)


def attention_output(call: AttentionCall) -> Tensor:
    """``A V`` of a call, heads side by side: ``(B, L, H d_v)``, with gradient."""
    assert call.value is not None
    maps = softmax(call.compute_logits(), check=False)
    value = call.value[:, :, : maps.shape[3]].repeat_interleave(call.num_heads // call.value.shape[1], 1)
    return torch.einsum("bhls,bhsd->blhd", maps.to(value.dtype), value).flatten(2)
