"""GKD: a generalised Jensen-Shannon divergence with the teacher, on text of either (REC-14)."""

from __future__ import annotations

from numpy.typing import ArrayLike

from shd_ref.kd.loss import Targets, kd_loss
from shd_ref.kd.targets import as_logits, cut
from shd_ref.recipes.labels import as_labels
from shd_ref.recipes.terms import Term, Terms


def gkd(
    student_logits: ArrayLike,
    labels: ArrayLike,
    targets: Targets,
    *,
    mixing: float = 0.5,
    shift: bool = False,
    vocab_size: int | None = None,
) -> Terms:
    """``jsd_m(P, Q)``, the mean over the rows whose label counts; no ``T^2``, no cross entropy (REC-14).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``; only whether they are -100 is read.
        targets: of the teacher, as in ``kd_loss``, at temperature 1.
        mixing: m, the published beta: 0 is ``KL(P || Q)``, 1 ``KL(Q || P)``.
        shift: as in ``cross_entropy``.
        vocab_size: as in ``kd_loss``.

    Returns:
        The term ``jsd``, weight 1.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    logits = as_logits(student_logits, "student_logits")
    counted = as_labels(labels, cut(logits, vocab_size, "student_logits").shape, shift=shift).counted
    value = kd_loss(
        targets,
        logits,
        divergence="jsd",
        mixing=mixing,
        temperature=1.0,
        t_squared=False,
        loss_mask=counted,
        vocab_size=vocab_size,
    )
    return {"jsd": Term(value, 1.0)}
