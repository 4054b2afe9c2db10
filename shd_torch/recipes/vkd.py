"""VkD: pooled features through an orthogonal projection, and KD on the distillation token (REC-19, REC-20)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from shd_ref.errors import ShdError
from shd_torch.checks import check_real, compute_dtype
from shd_torch.kd import kd_loss
from shd_torch.kd.rows import Targets
from shd_torch.precision import without_autocast
from shd_torch.recipes.deit import check_tokens
from shd_torch.recipes.labels import label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_weight, join

LAYER_NORM_EPSILON = 1e-5


class OrthogonalProjection(nn.Module):
    """A trained matrix ``(D_t, D_s)`` whose rows or columns stay orthonormal (REC-19).

    It is the exponential of a skew-symmetric matrix, cut to size (PyTorch's own parametrisation), so that it cannot
    learn what the student's features should: it keeps their lengths and angles.

    Args:
        student_dim: D_s.
        teacher_dim: D_t.
    """

    def __init__(self, student_dim: int, teacher_dim: int) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(student_dim, teacher_dim, bias=False), orthogonal_map="matrix_exp")

    @property
    def matrix(self) -> Tensor:
        """W ``(D_t, D_s)``, attached to its parameters."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, features: Tensor) -> Tensor:
        """``(..., D_s)`` to ``(..., D_t)``."""
        return F.linear(features, self.matrix)


@without_autocast
def vkd(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    targets: Targets,
    student_features: Tensor,
    teacher_features: Tensor,
    projection: Tensor,
    *,
    kd_weight: float = 1.0,
    feature_weight: float = 1.0,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``CE + g T^2 mean KL(P || Q_dist) + a SmoothL1(W pool(S), LN(pool(T)))`` (REC-19, REC-20).

    Every row counts; the first two terms are means over B, the third is one over B and D_t. Weights are summed, not
    shared out. Defaults are those of VkD's ImageNet training (a = g = T = 1; its ``engine.py``).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)``, or ``(B, C)`` as mixup and cutmix make them there.
        distillation_logits: of the distillation token ``(B, C)``.
        targets: of the teacher, as in ``kd_loss``.
        student_features: patch tokens after the final norm ``(B, N, D_s)``, class and distillation token left out.
        teacher_features: a convolutional teacher's last features ``(B, D_t, h, w)``, or tokens ``(B, M, D_t)``.
        projection: W ``(D_t, D_s)`` with orthonormal rows or columns, as of ``OrthogonalProjection(...).matrix``.
        kd_weight: g.
        feature_weight: a.
        temperature: T.
        shd: the attention term beside it. The published teacher is convolutional, and has no attention: this asks
            for a transformer.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The terms ``cross_entropy`` (1), ``kd`` (g; ``T^2`` is in its value) and ``features`` (a).

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weights = check_weight("kd_weight", kd_weight), check_weight("feature_weight", feature_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "vkd", check)
    soft = kd_loss(targets, distillation_logits, temperature=temperature, check=check)
    check_real(student_features, "student_features", check=check, ndim=3)
    check_real(teacher_features, "teacher_features", check=check)
    check_real(projection, "projection", check=check, ndim=2)
    dtype = compute_dtype(student_features, projection)
    student = student_features.to(dtype).mean(1)
    teacher = _pool(teacher_features.detach().to(student.device, dtype))
    if tuple(projection.shape) != (teacher.shape[-1], student.shape[-1]) or len(student) != len(teacher):
        raise ShdError(
            "argument-shape",
            f"projection must be (D_t, D_s) = {(teacher.shape[-1], student.shape[-1])}, and both features of one "
            f"batch; got {tuple(projection.shape)}, {len(student)} and {len(teacher)} samples",
            "REC-19",
        )
    target = F.layer_norm(teacher, teacher.shape[-1:], eps=LAYER_NORM_EPSILON)
    features = F.smooth_l1_loss(F.linear(student, projection.to(dtype)), target)
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1.0),
        kd=Term(soft, weights[0]),
        features=Term(features, weights[1]),
    )


@without_autocast
def vkd_detection(
    student_tokens: Sequence[Tensor],
    teacher_tokens: Sequence[Tensor],
    *,
    feature_weight: float = 4.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``a sum over groups of SmoothL1(s(S), s(T))`` with rows standardised channel by channel (REC-34).

    Beside a detector's own loss, which is the caller's to add. Groups are what ViDT matches: patches of each of four
    scales, detection tokens of the body and of the neck, rows of all samples together. Denominator: the numbers of a
    group; groups are summed. Default: that of VkD's ViDT training (a = 4.0; its ``criterion.py``), whose projections
    are orthogonal, with a trained scale and bias.

    Args:
        student_tokens: a group's rows ``(n, D)`` each, projected, n of at least 2.
        teacher_tokens: the same groups of the teacher.
        feature_weight: a.
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The term ``features`` (a).

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    weight = check_weight("feature_weight", feature_weight)
    for name, groups in (("student_tokens", student_tokens), ("teacher_tokens", teacher_tokens)):
        for rows in groups:
            check_real(rows, name, check=check, ndim=2)
    shapes = [[tuple(rows.shape) for rows in groups] for groups in (student_tokens, teacher_tokens)]
    if not shapes[0] or shapes[0] != shapes[1] or min(rows for rows, _ in shapes[0]) < 2:
        raise ShdError(
            "argument-shape",
            "student_tokens and teacher_tokens must be groups (n, D) of the same shapes with n of at least 2; got "
            f"{shapes[0]} and {shapes[1]}",
            "REC-34",
        )
    values = [
        F.smooth_l1_loss(_standardised(rows), _standardised(taught.detach().to(rows.device)).to(compute_dtype(rows)))
        for rows, taught in zip(student_tokens, teacher_tokens, strict=True)
    ]
    return join(shd, features=Term(torch.stack([each.to(values[0]) for each in values]).sum(), weight))


def _standardised(rows: Tensor) -> Tensor:
    """Channels with mean 0 and deviation 1 over rows; 0, with no gradient, where they do not vary."""
    wide = rows.to(compute_dtype(rows))
    varies = (wide != wide[0]).any(0)
    variance = wide.masked_fill(~varies, 0.0).var(0)
    centred = (wide - wide.mean(0)).masked_fill(~varies, 0.0)
    return centred * torch.where(varies, variance, 1.0).rsqrt()


def _pool(features: Tensor) -> Tensor:
    """One vector a sample ``(B, D_t)``: the mean over positions."""
    if features.ndim not in (3, 4):
        raise ShdError(
            "argument-shape",
            f"teacher_features must be (B, D_t, h, w), or tokens (B, M, D_t); got {tuple(features.shape)}",
            "REC-19",
        )
    return features.mean(1) if features.ndim == 3 else features.mean((2, 3))
