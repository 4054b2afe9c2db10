"""The SHD loss (spec chapter LOSS): teach the student's maps with the merged ones.

``L = beta * sum_layers sum_heads mean_rows KL(A~ || A_student)``, natural logarithm, the teacher's entropy
included, so that it is zero exactly where the maps are equal. Differentiable in the student's logits only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.attention import mask_logits
from shd_torch.checks import check_mask, check_option, check_probs, check_real, check_temperature, compute_dtype

REDUCTIONS: tuple[str, ...] = ("sum", "mean")

Layers: TypeAlias = Tensor | Sequence[Tensor]


def shd_loss(
    supervision: Layers,
    student_logits: Layers,
    *,
    beta: float = 1.0,
    loss_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
    check: bool = True,
) -> Tensor:
    """``beta * KL(supervision || softmax(student_logits / T))``, teacher first (LOSS-1..9).

    Per map: the sum over keys, then the mean over the rows that count in the whole batch. A row counts where
    ``loss_mask`` is True and the supervision has mass. A map with no such row contributes exactly 0.

    The gradient of a counted row is ``beta * (A_student - A~) / (rows * T)`` (that over the number of maps with
    ``reduction="mean"``); of any other row exactly 0, whatever stands in it. None reaches the supervision. The
    result is always attached to the student's graph.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one tensor a layer; already at this temperature.
        student_logits: before softmax, same shape(s); -inf marks a masked key.
        beta: weight of the term, at least 0.
        loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
        attn_mask: boolean, broadcastable to ``(B, H_s, L, S)``, True = may attend.
        temperature: T_a of both maps; the supervision is softened before mixing, the student's map here.
        reduction: ``"sum"`` over layers and heads (the source), or ``"mean"`` over both.
        check: look at the values (finite, distributions, support), which makes the host wait for the device.
            Without it a violation ends in an infinite or NaN loss instead of an error, and
            ``torch.compile(fullgraph=True)`` works.

    Returns:
        The loss ``()``, in nats times beta; float64 if an argument is, else float32.

    Raises:
        ShdError: ``support-mismatch`` (the teacher has mass where the student may not attend: LOSS-6),
            ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 11.
    """
    check_option("reduction", reduction, REDUCTIONS, "LOSS-5")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < math.inf:
        raise ShdError("argument-value", f"beta must be a finite number of at least 0; got {beta!r}", "LOSS-2")
    temperature = check_temperature(temperature)
    teachers, students = _as_layers(supervision), _as_layers(student_logits)
    if len(teachers) != len(students) or not teachers:
        raise ShdError(
            "argument-shape",
            f"supervision and student_logits must hold the same number of layers, at least 1; "
            f"got {len(teachers)} and {len(students)}",
            "LOSS-3",
        )
    terms = [
        _layer_loss(teacher, student, loss_mask, attn_mask, temperature, check=check, layer=layer)
        for layer, (teacher, student) in enumerate(zip(teachers, students, strict=True))
    ]
    total = torch.stack([term.to(terms[0].device) for term in terms]).sum()
    num_maps = sum(student.shape[1] for student in students)
    return total * (beta / num_maps if reduction == "mean" else beta)


def _layer_loss(
    supervision: Tensor,
    student_logits: Tensor,
    loss_mask: Tensor | None,
    attn_mask: Tensor | None,
    temperature: float,
    *,
    check: bool,
    layer: int,
) -> Tensor:
    """The sum over heads of the mean KL of the rows that count (LOSS-1, LOSS-4)."""
    check_real(student_logits, "student_logits", check=check, ndim=4, allow_minus_inf=True, layer=layer)
    check_real(supervision, "supervision", check=False)
    if supervision.shape != student_logits.shape:
        raise ShdError(
            "argument-shape",
            f"supervision and student_logits must share one shape (B, H_s, L, S) in layer {layer}; "
            f"got {tuple(supervision.shape)} and {tuple(student_logits.shape)}",
            "LOSS-3",
        )
    if loss_mask is not None:
        check_mask(loss_mask, "loss_mask", (supervision.shape[0], supervision.shape[2]))
        loss_mask = loss_mask.to(student_logits.device)  # layers may live on several devices; masks are shared
    check_probs(supervision, "supervision", check=check, query_mask=loss_mask, layer=layer)
    dtype = compute_dtype(supervision, student_logits)
    teacher = supervision.detach().to(dtype)
    logits = mask_logits(student_logits.to(dtype), None if attn_mask is None else attn_mask.to(student_logits.device))
    counted = teacher.sum(-1) > 0  # (B, H_s, L)
    if loss_mask is not None:
        counted = counted & loss_mask[:, None, :]
    has_mass = (teacher > 0) & counted[..., None]
    if check:
        _check_support(teacher, has_mass & torch.isneginf(logits), layer)
    # Each fill comes twice, before and after the function that would give NaN: a row without mass may be all
    # -inf, a key without mass may have log-probability -inf or probability 0, and 0 * inf is NaN in a gradient.
    student_log_probs = (logits / temperature).masked_fill(~counted[..., None], 0.0).log_softmax(dim=-1)
    log_ratio = teacher.masked_fill(~has_mass, 1.0).log() - student_log_probs.masked_fill(~has_mass, 0.0)
    kl = (teacher.masked_fill(~has_mass, 0.0) * log_ratio).sum(-1)  # (B, H_s, L)
    return (kl.sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)).sum()


def _check_support(teacher: Tensor, outside: Tensor, layer: int) -> None:
    if outside.any():
        b, h, i, j = (int(index) for index in outside.nonzero()[0])
        raise ShdError(
            "support-mismatch",
            f"supervision must be 0 where the student may not attend; got {teacher[b, h, i, j].item():.6g} at "
            f"layer {layer}, sample {b}, head {h}, row {i}, key {j}: teacher and student must share one mask",
            "LOSS-6",
        )


def _as_layers(value: Layers) -> list[Tensor]:
    """One tensor is one layer; a sequence holds one tensor a layer (LOSS-3)."""
    return [value] if isinstance(value, Tensor) else list(value)
