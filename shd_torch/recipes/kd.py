"""Knowledge distillation beside a cross entropy, for language models and for images (REC-8, REC-9)."""

from __future__ import annotations

from torch import Tensor

from shd_torch.kd import kd_loss
from shd_torch.kd.rows import Targets
from shd_torch.kd.targets import check_logits, cut
from shd_torch.precision import without_autocast
from shd_torch.recipes.labels import as_labels, label_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_share, join


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
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

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
        temperature: T.
        shd: the attention term beside it.
        check: look at the values, which makes the host wait for the device.

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
