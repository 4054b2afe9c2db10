"""Cross entropy with labels: what a student without a teacher learns from (REC-7)."""

from __future__ import annotations

from torch import Tensor

from shd_torch.kd.targets import check_logits
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import as_labels, label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, join


@without_autocast
def cross_entropy(
    student_logits: Tensor, labels: Tensor, *, shift: bool = False, shd: SHD | None = None, check: bool = True
) -> Terms:
    """``- mean over counted rows of log softmax(z)_y``, with soft labels ``- sum_c y_c log softmax(z)_c`` (REC-7).

    Rows: those whose label is not -100; denominator: their number. Defaults: those of a Hugging Face model, but that
    labels belong to their own rows unless ``shift`` is given.

    Args:
        student_logits: z ``(..., C)``.
        labels: classes ``(...)``, -100 = the row does not count; or distributions ``(..., C)``.
        shift: row t of ``(B, L, C)`` predicts the label at t + 1, as in Hugging Face's language models.
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The term ``cross_entropy``, weight 1.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    check_logits(student_logits, "student_logits", check=check)
    checked = as_labels(labels, student_logits, check=check, shift=shift)
    return join(shd, cross_entropy=Term(label_loss(student_logits, checked), 1.0))
