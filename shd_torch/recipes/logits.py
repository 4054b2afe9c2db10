"""Base losses on logits: cross entropy, KD, BabyLlama, GKD, DeiT's distillation token and NKD.

Every recipe takes, beside its own arguments:

- ``student_logits``: z ``(B, L, V)`` of texts, or ``(B, C)`` of samples;
- ``labels``: classes, one a row, -100 = the row does not count; where every row counts also distributions, as mixup
  and smoothing make them;
- ``targets``: of the teacher, as ``kd_loss`` takes them: its logits, or a record of top-k targets;
  ``teacher_logits``: all of them, u;
- ``kd_weight``: w, 0 to 1, in ``(1 - w) CE + w KD``; ``temperature``: T of both softmaxes (``T^2`` is in the value);
- ``shift``: row t of ``(B, L, V)`` predicts the label at t + 1, as in Hugging Face's language models; the teacher's
  rows are never shifted;
- ``vocab_size``: number of classes to read on either side, the others being padding;
- ``shd``: the attention term; ``check``: validate the values, which costs a device sync.

They give ``Terms``: ``cross_entropy`` (weight 1 - w) and ``kd`` (w), unless they say otherwise, and raise what
``kd_loss`` raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shd_torch.checks import check_shapes, check_temperature, compute_dtype, without_autocast
from shd_torch.kd import kd_loss, mean_logits
from shd_torch.kd.chunks import Targets
from shd_torch.kd.targets import check_logits, cut
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


def prepare(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor | None = None,
    *,
    check: bool,
    shift: bool = False,
    vocab_size: int | None = None,
    all_count: str | None = None,
) -> tuple[Tensor, Labels]:
    """The start of every recipe: checked logits without padded classes, and their labels.

    Logits of a distillation token must be of the same shape. Of a recipe ``all_count`` every row counts.
    """
    if distillation_logits is None:
        check_logits(student_logits, "student_logits", check=check)
    else:
        tokens = {"student_logits": student_logits, "distillation_logits": distillation_logits}
        check_alike("(B, C)", check=check, **tokens)
    logits = cut(student_logits, vocab_size, "student_logits")
    return logits, as_labels(labels, logits, check=check, shift=shift, all_count=all_count)


def _join_kd(shd: SHD | None, student_logits: Tensor, labels: Labels, soft: Tensor, weight: float) -> Terms:
    cross_entropy = Term(label_loss(student_logits, labels), 1 - weight)
    return join(shd, cross_entropy=cross_entropy, kd=Term(soft, weight))


@without_autocast
def cross_entropy(
    student_logits: Tensor, labels: Tensor, *, shift: bool = False, shd: SHD | None = None, check: bool = True
) -> Terms:
    """``- mean over counted rows of log softmax(z)_y``, with soft labels ``- sum_c y_c log softmax(z)_c``.

    Logits are ``(..., C)``, labels ``(...)`` or distributions ``(..., C)``. Rows: those whose label is not -100;
    denominator: their number. Defaults: those of a Hugging Face model, but that labels belong to their own rows
    unless ``shift`` is given. The term has weight 1.
    """
    logits, checked = prepare(student_logits, labels, shift=shift, check=check)
    return join(shd, cross_entropy=Term(label_loss(logits, checked), 1.0))


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
    not -100; denominator of both terms: their number. T is by default that of the record, 1 for logits. Defaults
    (w = .5, T = 1, unshifted labels) and form are those of MiniLLM's KD baseline and pre-training loss
    (``minillm/finetune.py``, ``--kd-ratio``).
    """
    weight = check_share("kd_weight", kd_weight)
    logits, checked = prepare(student_logits, labels, shift=shift, vocab_size=vocab_size, check=check)
    soft = kd_loss(
        targets,
        student_logits,
        divergence="cross_entropy",
        temperature=temperature,
        loss_mask=checked.counted,
        vocab_size=vocab_size,
        check=check,
    )
    return _join_kd(shd, logits, checked, soft, weight)


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
    """``(1 - w) CE + w T^2 soft CE``, means over images ``(B, C)``.

    Every row counts; denominator: B. Defaults are cls_KD's ``KDLoss`` (w = .5, T = 4; its DeiT configurations have
    T = 1).
    """
    weight = check_share("kd_weight", kd_weight)
    logits, checked = prepare(student_logits, labels, all_count="image_kd", check=check)
    soft = kd_loss(targets, student_logits, divergence="cross_entropy", temperature=temperature, check=check)
    return _join_kd(shd, logits, checked, soft, weight)


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
    the beta of SHD that balances it. ``teacher_logits`` are one tensor ``(B, L, V)`` per teacher; the published
    student has two. Defaults are BabyLlama's (w = 1 - alpha = .5, T = 2, Hugging Face's shift).
    """
    weight = check_share("kd_weight", kd_weight)
    logits, checked = prepare(student_logits, labels, shift=shift, check=check)
    mean = mean_logits(teacher_logits, check=check)
    soft = kd_loss(mean, student_logits, temperature=temperature, reduction="batch_mean", check=check)
    return _join_kd(shd, logits, checked, soft, weight)


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

    ``m KL(P || R) + (1 - m) KL(Q || R)`` with ``R = m P + (1 - m) Q``, both softmax at temperature 1, as the targets
    must be; m is the published beta, 0 being ``KL(P || Q)`` and 1 ``KL(Q || P)``. Of labels only whether they are
    -100 is read: padding must have -100, or it is trained on. Denominator: the number of counted rows. The term
    ``jsd`` has weight 1. Default: that of TRL and Liger (m = .5), whose published temperature .9 applies only to
    sampling; half of their batches are student-generated text, which the caller samples, and on which the teachers of
    ``shd`` must be live.
    """
    _, checked = prepare(student_logits, labels, shift=shift, vocab_size=vocab_size, check=check)
    value = kd_loss(
        targets,
        student_logits,
        divergence="jsd",
        mixing=mixing,
        temperature=1.0,
        t_squared=False,
        loss_mask=checked.counted,
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
    """``(1 - w) CE + w T^2 sum KL(P || Q_dist) / (B C)``, with logits ``(B, C)`` of class and distillation token.

    Every row counts. The published denominator is the number of logits: the KD term is C times smaller than the mean
    over images that ``image_kd`` takes, a thousandfold on ImageNet. The student has one token more than a teacher
    without such a token, which ``shd`` must know. Defaults are DeiT's (w = .5, T = 1).
    """
    weight = check_share("kd_weight", kd_weight)
    logits, checked = prepare(student_logits, labels, distillation_logits, all_count="deit_soft", check=check)
    soft = kd_loss(targets, distillation_logits, temperature=temperature, reduction="sum", check=check)
    return _join_kd(shd, logits, checked, soft / distillation_logits.numel(), weight)


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
    """``(1 - w) CE + w CE(z_dist, argmax u)``, with logits ``(B, C)`` of class and distillation token.

    Every row counts; denominator of both terms: B. Default: DeiT's (w = .5).
    """
    weight = check_share("kd_weight", kd_weight)
    logits, checked = prepare(student_logits, labels, distillation_logits, all_count="deit_hard", check=check)
    models = {"teacher_logits": teacher_logits, "distillation_logits": distillation_logits}
    check_alike("(B, C)", check=check, **models)
    decided = Labels(first_largest(teacher_logits.detach().to(distillation_logits.device)), None, None)
    return _join_kd(shd, logits, checked, label_loss(distillation_logits, decided), weight)


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
    """``CE - mean P_y log Q_y - g T^2 mean sum_{c != y} P'_c log Q'_c``, for logits ``(B, C)`` with C of at least 2.

    ``P_y``, ``Q_y`` are at temperature 1; ``P'``, ``Q'`` are softmax over the other classes, at T. Of soft labels y
    is the likeliest class, the first of several. Every row counts; denominator: B. Terms: ``cross_entropy`` (1),
    ``target`` (1) and ``nontarget`` (g; ``T^2`` is in its value). Defaults are those of cls_KD's DeiT configurations
    (g = 1, T = 1; for convolutional students g = 1.5).
    """
    weight, temperature = check_weight("nontarget_weight", nontarget_weight), check_temperature(temperature)
    check_alike("(B, C)", check=check, student_logits=student_logits, teacher_logits=teacher_logits)
    check_shapes(student_logits.shape[-1] > 1, "student_logits must have two classes at least", student_logits)
    checked = as_labels(labels, student_logits, check=check, all_count="nkd")
    dtype, label_column = compute_dtype(student_logits), checked.classes[..., None]
    z, u = student_logits.to(dtype), teacher_logits.detach().to(student_logits.device, dtype)
    target = -(u.log_softmax(-1).gather(-1, label_column).exp() * z.log_softmax(-1).gather(-1, label_column)).mean()
    # All classes but one per row, (..., C - 1).
    columns = torch.arange(z.shape[-1] - 1, device=z.device)
    off_target = [logits.gather(-1, columns + (columns >= label_column)) for logits in (u, z)]
    nontarget = kd_loss(*off_target, divergence="cross_entropy", temperature=temperature, check=False)
    return join(
        shd,
        cross_entropy=Term(label_loss(student_logits, checked), 1.0),
        target=Term(target, 1.0),
        nontarget=Term(nontarget, weight),
    )
