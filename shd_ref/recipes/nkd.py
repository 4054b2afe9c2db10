"""Normalised knowledge distillation: the target class and the others apart (REC-10, REC-11)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import check_temperature
from shd_ref.errors import ShdError
from shd_ref.kd.targets import as_logits, log_softmax
from shd_ref.recipes.cross_entropy import label_loss
from shd_ref.recipes.labels import as_labels, check_all_count
from shd_ref.recipes.terms import Term, Terms, check_weight


def nkd(
    student_logits: ArrayLike,
    labels: ArrayLike,
    teacher_logits: ArrayLike,
    *,
    nontarget_weight: float = 1.0,
    temperature: float = 1.0,
) -> Terms:
    """``CE - mean P_y log Q_y - g T^2 mean sum_{c != y} P'_c log Q'_c`` (REC-10, REC-11).

    Args:
        student_logits: z ``(B, C)``, C of at least 2.
        labels: ``(B,)``, or ``(B, C)``: y is then the likeliest class.
        teacher_logits: u ``(B, C)``.
        nontarget_weight: g.
        temperature: T of the other classes; the target class has none.

    Returns:
        The terms ``cross_entropy`` (weight 1), ``target`` (weight 1) and ``nontarget`` (``T^2`` in its value).

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    weight, temperature = check_weight("nontarget_weight", nontarget_weight), check_temperature(temperature)
    z, u = as_logits(student_logits, "student_logits"), as_logits(teacher_logits, "teacher_logits")
    if z.shape != u.shape or z.shape[-1] < 2:
        raise ShdError(
            "argument-shape",
            "student_logits and teacher_logits must share one shape (B, C) with two classes at least; "
            f"got {z.shape} and {u.shape}",
            "REC-10",
        )
    checked = as_labels(labels, z.shape)
    check_all_count(checked, "nkd")
    at = checked.classes[..., None]
    target = -np.exp(np.take_along_axis(log_softmax(u), at, -1)) * np.take_along_axis(log_softmax(z), at, -1)
    others = np.ones(z.shape, dtype=np.bool_)
    np.put_along_axis(others, at, False, -1)
    z_others, u_others = (x[others].reshape(*x.shape[:-1], -1) / temperature for x in (z, u))
    nontarget = -(np.exp(log_softmax(u_others)) * log_softmax(z_others)).sum(axis=-1)
    return {
        "cross_entropy": Term(label_loss(z, checked), 1.0),
        "target": Term(float(target.mean()), 1.0),
        "nontarget": Term(temperature**2 * float(nontarget.mean()), weight),
    }
