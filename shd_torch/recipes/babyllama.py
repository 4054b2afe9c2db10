"""BabyLlama: the mean logits of several teachers, softened (REC-15)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shd_torch.kd import kd_loss, mean_logits
from shd_torch.kd.targets import check_logits
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import as_labels, label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_share, join


@without_autocast
def babyllama(
    student_logits: Tensor,
    labels: Tensor,
    teacher_logits: Sequence[Tensor],
    *,
    kd_weight: float = 0.5,
    temperature: float = 2.0,
    shift: bool = True,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 sum over all positions of KL(P || Q) / B`` with P of the mean logits (REC-15).

    The cross entropy is a mean over the rows whose label counts. The KD term counts every position, padding
    included, and is divided by B alone: at the published 128 positions it is 128 times a mean over tokens, and so is
    the beta of SHD that balances it. Defaults are BabyLlama's (w = 1 - alpha = .5, T = 2, Hugging Face's shift).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``, -100 = the row does not count in the cross entropy.
        teacher_logits: one tensor ``(B, L, V)`` a teacher; the published student has two.
        kd_weight: w, one less the published alpha.
        temperature: T.
        shift: as in ``cross_entropy``; the teachers' rows are never shifted.
        shd: the attention term beside it, of one of the teachers or the mean of all.
        check: look at the values, which makes the host wait for the device.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w; ``T^2`` is in its value).

    Raises:
        ShdError: as ``cross_entropy``, ``mean_logits`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    check_logits(student_logits, "student_logits", check=check)
    checked = as_labels(labels, student_logits, check=check, shift=shift)
    soft = kd_loss(
        mean_logits(teacher_logits, check=check),
        student_logits,
        temperature=temperature,
        reduction="batch_mean",
        check=check,
    )
    return join(shd, cross_entropy=Term(label_loss(student_logits, checked), 1 - weight), kd=Term(soft, weight))
