"""Base losses on logits: cross entropy, KD, BabyLlama and GKD (REC-7 to REC-9, REC-14, REC-15)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shd_torch.kd import kd_loss, mean_logits
from shd_torch.kd.rows import Targets
from shd_torch.kd.targets import check_logits, cut
from shd_torch.precision import without_autocast
from shd_torch.recipes.terms import SHD, Term, Terms, as_labels, check_share, join, label_loss


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

    Returns:
        The term ``cross_entropy``, weight 1.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    check_logits(student_logits, "student_logits", check=check)
    checked = as_labels(labels, student_logits, check=check, shift=shift)
    return join(shd, cross_entropy=Term(label_loss(student_logits, checked), 1.0))


@without_autocast
def language_kd(
    student_logits: Tensor,
    labels: Tensor,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float | None = None,
    shift: bool = False,
    vocab_size: int | None = None,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 soft CE``, both means over the rows whose label counts (REC-8).

    ``soft CE = - sum_v P_v log Q_v``, which is ``KL(P || Q)`` and the teacher's entropy. Rows: those whose label is
    not -100; denominator of both terms: their number. Defaults (w = .5, T = 1, unshifted labels) and form
    are those of MiniLLM's KD baseline and pre-training loss (``minillm/finetune.py``, ``--kd-ratio``).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``, -100 = the row does not count, in either term.
        targets: of the teacher, as in ``kd_loss``: its logits, or a record of top-k or sampled targets.
        kd_weight: w.
        temperature: T; default that of the record, 1 for logits.
        shift: as in ``cross_entropy``; the teacher's rows are never shifted.
        vocab_size: as in ``kd_loss``, for both terms.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w; ``T^2`` is in its value).

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    check_logits(student_logits, "student_logits", check=check)
    kept = cut(student_logits, vocab_size, "student_logits")
    checked = as_labels(labels, kept, check=check, shift=shift)
    soft = kd_loss(
        targets,
        student_logits,
        divergence="cross_entropy",
        temperature=temperature,
        loss_mask=checked.counted,
        vocab_size=vocab_size,
        check=check,
    )
    return join(shd, cross_entropy=Term(label_loss(kept, checked), 1 - weight), kd=Term(soft, weight))


@without_autocast
def image_kd(
    student_logits: Tensor,
    labels: Tensor,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float = 4.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 soft CE``, means over images (REC-9).

    Every row counts; denominator: B. Defaults are cls_KD's ``KDLoss`` (w = .5, T = 4; its DeiT configurations have
    T = 1).

    Args:
        student_logits: z ``(B, C)``.
        labels: ``(B,)``, or ``(B, C)`` where they are mixed or smoothed.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w; ``T^2`` is in its value).

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    check_logits(student_logits, "student_logits", check=check)
    checked = as_labels(labels, student_logits, check=check, all_count="image_kd")
    soft = kd_loss(targets, student_logits, divergence="cross_entropy", temperature=temperature, check=check)
    return join(shd, cross_entropy=Term(label_loss(student_logits, checked), 1 - weight), kd=Term(soft, weight))


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
        teacher_logits: one tensor ``(B, L, V)`` per teacher; the published student has two.
        kd_weight: w, one minus the published alpha.
        shift: as in ``cross_entropy``; the teachers' rows are never shifted.
        shd: the attention term, from one of the teachers or the mean of all.

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
    temperature .9 applies only to sampling; half of their batches are student-generated text, which the caller
    samples.

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``; only whether they are -100 is read. Padding must have -100, or it is trained on.
        targets: of the teacher, as in ``kd_loss``, at temperature 1.
        mixing: m, the published beta: 0 is ``KL(P || Q)``, 1 ``KL(Q || P)``.
        shift: as in ``cross_entropy``.
        vocab_size: as in ``kd_loss``.
        shd: the attention term; on student-generated text its teachers must be live.

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
