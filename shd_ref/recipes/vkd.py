"""VkD: features through an orthogonal projection, of images (REC-19, REC-20) and of detectors (REC-34)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.kd.loss import Targets, kd_loss
from shd_ref.recipes.cross_entropy import label_loss
from shd_ref.recipes.deit import check_tokens
from shd_ref.recipes.terms import Term, Terms, check_weight

LAYER_NORM_EPSILON = 1e-5


def vkd(
    student_logits: ArrayLike,
    labels: ArrayLike,
    distillation_logits: ArrayLike,
    targets: Targets,
    student_features: ArrayLike,
    teacher_features: ArrayLike,
    projection: ArrayLike,
    *,
    kd_weight: float = 1.0,
    feature_weight: float = 1.0,
    temperature: float = 1.0,
) -> Terms:
    """``CE + g T^2 mean KL(P || Q_dist) + a SmoothL1(W pool(S), LN(pool(T)))`` (REC-19, REC-20).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        targets: of the teacher, as in ``kd_loss``.
        student_features: patch tokens after the final norm ``(B, N, D_s)``.
        teacher_features: a convolutional teacher's last features ``(B, D_t, h, w)``, or tokens ``(B, M, D_t)``.
        projection: W ``(D_t, D_s)``, with orthonormal rows or columns.
        kd_weight: g.
        feature_weight: a.
        temperature: T.

    Returns:
        The terms ``cross_entropy`` (weight 1), ``kd`` and ``features``.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weights = check_weight("kd_weight", kd_weight), check_weight("feature_weight", feature_weight)
    token, logits, checked = check_tokens(student_logits, labels, distillation_logits, "vkd")
    soft = kd_loss(targets, token, temperature=temperature)
    student = as_float(student_features, "student_features", ndim=3).mean(axis=1)
    teacher = _pool(as_float(teacher_features, "teacher_features"))
    matrix = as_float(projection, "projection", ndim=2)
    if matrix.shape != (teacher.shape[-1], student.shape[-1]) or len(student) != len(teacher):
        raise ShdError(
            "argument-shape",
            f"projection must be (D_t, D_s) = {(teacher.shape[-1], student.shape[-1])}, and both features of one "
            f"batch; got {matrix.shape}, {len(student)} and {len(teacher)} samples",
            "REC-19",
        )
    centred = teacher - teacher.mean(axis=-1, keepdims=True)
    target = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON)
    smooth = _smooth(student @ matrix.T - target)
    return {
        "cross_entropy": Term(label_loss(logits, checked), 1.0),
        "kd": Term(soft, weights[0]),
        "features": Term(float(smooth.mean()), weights[1]),
    }


def vkd_detection(
    student_tokens: Sequence[ArrayLike], teacher_tokens: Sequence[ArrayLike], *, feature_weight: float = 4.0
) -> Terms:
    """``a sum over groups of SmoothL1(s(S), s(T))`` with rows standardised channel by channel (REC-34).

    Args:
        student_tokens: a group's rows ``(n, D)`` each, projected.
        teacher_tokens: the same groups of the teacher.
        feature_weight: a.

    Returns:
        The term ``features``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``not-finite``.
    """
    weight = check_weight("feature_weight", feature_weight)
    students = [as_float(each, "student_tokens", ndim=2) for each in student_tokens]
    teachers = [as_float(each, "teacher_tokens", ndim=2) for each in teacher_tokens]
    shapes = [each.shape for each in students], [each.shape for each in teachers]
    if not students or shapes[0] != shapes[1] or min(len(each) for each in students) < 2:
        raise ShdError(
            "argument-shape",
            "student_tokens and teacher_tokens must be groups (n, D) of the same shapes with n of at least 2; got "
            f"{shapes[0]} and {shapes[1]}",
            "REC-34",
        )
    groups = zip(students, teachers, strict=True)
    value = sum(float(_smooth(_standardised(s) - _standardised(t)).mean()) for s, t in groups)
    return {"features": Term(value, weight)}


def _standardised(rows: Array) -> Array:
    centred = rows - rows.mean(axis=0)
    deviation = rows.std(axis=0, ddof=1)
    divided: Array = centred / np.where(deviation == 0, 1.0, deviation)
    return np.where((rows == rows[0]).all(axis=0), 0.0, divided)


def _smooth(difference: Array) -> Array:
    """SmoothL1: a square near 0, a distance beyond 1."""
    distance = np.abs(difference)
    smooth: Array = np.where(distance < 1, 0.5 * distance**2, distance - 0.5)
    return smooth


def _pool(features: Array) -> Array:
    """One vector a sample ``(B, D_t)``: the mean over positions."""
    if features.ndim not in (3, 4):
        raise ShdError(
            "argument-shape",
            f"teacher_features must be (B, D_t, h, w), or tokens (B, M, D_t); got {features.shape}",
            "REC-19",
        )
    pooled: Array = features.mean(axis=1) if features.ndim == 3 else features.mean(axis=(2, 3))
    return pooled
