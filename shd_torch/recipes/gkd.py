"""GKD: a generalised Jensen-Shannon divergence with the teacher, on text of either (REC-14)."""

from __future__ import annotations

from torch import Tensor

from shd_torch.kd import kd_loss
from shd_torch.kd.rows import Targets
from shd_torch.kd.targets import check_logits, cut
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import as_labels
from shd_torch.recipes.terms import SHD, Term, Terms, join


@without_autocast
def gkd(
    student_logits: Tensor,
    labels: Tensor,
    targets: Targets,
    *,
    mixing: float = 0.5,
    shift: bool = False,
    vocab_size: int | None = None,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``jsd_m(P, Q)``, the mean over the rows whose label counts; no ``T^2``, no cross entropy (REC-14).

    ``m KL(P || R) + (1 - m) KL(Q || R)`` with ``R = m P + (1 - m) Q``, both softmax at temperature 1. Rows: those
    whose label is not -100; denominator: their number. Default: that of TRL and Liger (m = .5), whose published
    temperature .9 is of the sampling alone; half of their batches are the student's own text, which is the
    caller's to sample.

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``; only whether they are -100 is read. Padding has -100, or it is learned from.
        targets: of the teacher, as in ``kd_loss``, at temperature 1.
        mixing: m, the published beta: 0 is ``KL(P || Q)``, 1 ``KL(Q || P)``.
        shift: as in ``cross_entropy``.
        vocab_size: as in ``kd_loss``.
        shd: the attention term beside it; on the student's own text its teachers are live.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The term ``jsd``, weight 1.

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    check_logits(student_logits, "student_logits", check=check)
    kept = cut(student_logits, vocab_size, "student_logits")
    value = kd_loss(
        targets,
        student_logits,
        divergence="jsd",
        mixing=mixing,
        temperature=1.0,
        t_squared=False,
        loss_mask=as_labels(labels, kept, check=check, shift=shift).counted,
        vocab_size=vocab_size,
        check=check,
    )
    return join(shd, jsd=Term(value, 1.0))
