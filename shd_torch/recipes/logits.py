"""Base losses on logits: cross entropy, KD, BabyLlama, GKD, DeiT's distillation token and NKD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shd_torch.checks import check_shapes, check_temperature, compute_dtype
from shd_torch.kd import kd_loss, mean_logits
from shd_torch.kd.rows import Targets
from shd_torch.kd.targets import check_logits, cut
from shd_torch.precision import without_autocast
from shd_torch.recipes.terms import (
    SHD,
    Labels,
    Term,
    Terms,
    as_labels,
    check_alike,
    check_share,
    check_weight,
    first_largest,
    join,
    label_loss,
)


@without_autocast
def cross_entropy(
    student_logits: Tensor, labels: Tensor, *, shift: bool = False, shd: SHD | None = None, check: bool = True
) -> Terms:
    """``- mean over counted rows of log softmax(z)_y``, with soft labels ``- sum_c y_c log softmax(z)_c``.

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
    """``(1 - w) CE + w T^2 soft CE``, both means over the rows whose label counts.

    ``soft CE = - sum_v P_v log Q_v``, which is ``KL(P || Q)`` and the teacher's entropy. Rows: those whose label is
    not -100; denominator of both terms: their number. Defaults (w = .5, T = 1, unshifted labels) and form
    are those of MiniLLM's KD baseline and pre-training loss (``minillm/finetune.py``, ``--kd-ratio``).

    Args:
        student_logits: z ``(B, L, V)``.
        labels: ``(B, L)``, -100 = the row does not count, in either term.
        targets: of the teacher, as in ``kd_loss``: its logits, or a record of top-k targets.
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
    return _join_kd(shd, kept, checked, soft, weight)


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
    """``(1 - w) CE + w T^2 soft CE``, means over images.

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
    return _join_kd(shd, student_logits, checked, soft, weight)


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
    """``(1 - w) CE + w T^2 sum over all positions of KL(P || Q) / B`` with P of the mean logits.

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
    return _join_kd(shd, student_logits, checked, soft, weight)


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
    """``jsd_m(P, Q)``, the mean over the rows whose label counts; no ``T^2``, no cross entropy.

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


@without_autocast
def deit_soft(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    targets: Targets,
    *,
    kd_weight: float = 0.5,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w T^2 sum KL(P || Q_dist) / (B C)``.

    Every row counts. The published denominator is the number of logits: the KD term is C times smaller than the mean
    over images that ``image_kd`` takes, a thousandfold on ImageNet. Defaults are DeiT's (w = .5, T = 1).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        targets: of the teacher, as in ``kd_loss``.
        kd_weight: w.
        shd: the attention term; the student has one token more than a teacher without such a token.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w; ``T^2`` is in its value).

    Raises:
        ShdError: as ``cross_entropy`` and ``kd_loss``.
    """
    weight = check_share("kd_weight", kd_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "deit_soft", check)
    soft = kd_loss(targets, distillation_logits, temperature=temperature, reduction="sum", check=check)
    return _join_kd(shd, student_logits, checked, soft / distillation_logits.numel(), weight)


@without_autocast
def deit_hard(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kd_weight: float = 0.5,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``(1 - w) CE + w CE(z_dist, argmax u)``.

    Every row counts; denominator of both terms: B. Default: DeiT's (w = .5).

    Args:
        student_logits: of the class token ``(B, C)``.
        labels: ``(B,)`` or ``(B, C)``.
        distillation_logits: of the distillation token ``(B, C)``.
        teacher_logits: u ``(B, C)``.
        kd_weight: w.

    Returns:
        The terms ``cross_entropy`` (1 - w) and ``kd`` (w).

    Raises:
        ShdError: as ``cross_entropy``.
    """
    weight = check_share("kd_weight", kd_weight)
    checked = check_tokens(student_logits, labels, distillation_logits, "deit_hard", check)
    models = {"teacher_logits": teacher_logits, "distillation_logits": distillation_logits}
    check_alike("(B, C)", check=check, **models)
    decided = Labels(first_largest(teacher_logits.detach().to(distillation_logits.device)), None, None)
    return _join_kd(shd, student_logits, checked, label_loss(distillation_logits, decided), weight)


@without_autocast
def nkd(
    student_logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    *,
    nontarget_weight: float = 1.0,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``CE - mean P_y log Q_y - g T^2 mean sum_{c != y} P'_c log Q'_c``.

    ``P_y``, ``Q_y`` are at temperature 1; ``P'``, ``Q'`` are softmax over the other classes, at T. Every row counts;
    denominator: B. The cross entropy keeps the weight 1. Defaults are those of cls_KD's DeiT configurations (g = 1,
    T = 1; for convolutional students g = 1.5).

    Args:
        student_logits: z ``(B, C)``, C of at least 2.
        labels: ``(B,)``, or ``(B, C)``: y is then the likeliest class, the first of several.
        teacher_logits: u ``(B, C)``.
        nontarget_weight: g.
        temperature: T of the other classes; the target class has none.

    Returns:
        The terms ``cross_entropy`` (1), ``target`` (1) and ``nontarget`` (g; ``T^2`` is in its value).

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.
    """
    weight, temperature = check_weight("nontarget_weight", nontarget_weight), check_temperature(temperature)
    check_alike("(B, C)", check=check, student_logits=student_logits, teacher_logits=teacher_logits)
    check_shapes(student_logits.shape[-1] > 1, "student_logits must have two classes at least", student_logits)
    checked = as_labels(labels, student_logits, check=check, all_count="nkd")
    dtype, at = compute_dtype(student_logits), checked.classes[..., None]
    z, u = student_logits.to(dtype), teacher_logits.detach().to(student_logits.device, dtype)
    target = -(u.log_softmax(-1).gather(-1, at).exp() * z.log_softmax(-1).gather(-1, at)).mean()
    nontarget = kd_loss(
        _without(u, at), _without(z, at), divergence="cross_entropy", temperature=temperature, check=False
    )
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1.0),
        target=Term(target, 1.0),
        nontarget=Term(nontarget, weight),
    )


def _without(logits: Tensor, at: Tensor) -> Tensor:
    """The logits of all classes but one per row ``(..., C - 1)``."""
    columns = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, columns + (columns >= at))


def _join_kd(shd: SHD | None, student_logits: Tensor, labels: Labels, soft: Tensor, weight: float) -> Terms:
    """Cross entropy and KD, which share the weight 1."""
    cross_entropy = Term(label_loss(student_logits, labels), 1 - weight)
    return join(shd, cross_entropy=cross_entropy, kd=Term(soft, weight))


def check_tokens(
    student_logits: Tensor, labels: Tensor, distillation_logits: Tensor, recipe: str, check: bool
) -> Labels:
    """Labels of two tokens' logits, which share one shape."""
    tokens = {"student_logits": student_logits, "distillation_logits": distillation_logits}
    check_alike("(B, C)", check=check, **tokens)
    return as_labels(labels, student_logits, check=check, all_count=recipe)
