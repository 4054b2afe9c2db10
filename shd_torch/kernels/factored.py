"""The divergence and its gradients from a factored supervision: the teacher's queries, keys and mixing matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_finite, check_temperature
from shd_torch.kernels.arguments import check_heads, check_lse, check_weights, make_mask
from shd_torch.kernels.launch import compute_lse, make_heads, require_support, run_passes
from shd_torch.kernels.operands import Factored, RowsKl


@torch.no_grad()
def kl_factored(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    mixing: Tensor,
    row_weights: Tensor,
    *,
    scale: float,
    teacher_scale: float,
    groups: Sequence[Sequence[int]] | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    temperature: float = 1.0,
    student_lse: Tensor | None = None,
    teacher_lse: Tensor | None = None,
    deterministic: bool = True,
    want_value: bool = True,
) -> RowsKl:
    """KL of merged teacher maps and student maps, row by row, and its gradients; no map is ever in memory.

    ``A~_h = sum_t C[h,t] softmax(teacher_scale q_t k_t^T / T)`` and ``dz = g (rho A_student - A~) / T`` (GRAD-1,
    GRAD-4, GRAD-5), with rho the row's sum of mixing weights. The divergence is that of LOSS-11: zero where
    ``A~ = rho A_student``. Teacher and student share one mask, so A~ has no mass where the student may not attend.
    A row that may attend to nothing gives exactly 0.

    Args:
        student_q: ``(B, H_s, L, d)`` float16, bfloat16 or float32, d at most 256, in float32 128.
        student_k: ``(B, H_kv, S, d)`` of the same dtype; query head h reads key head ``h // (H_s / H_kv)``.
        teacher_q: ``(B, H_t, L, d_t)``; its dtype may differ from the student's.
        teacher_k: ``(B, H_tkv, S, d_t)``, grouped likewise.
        mixing: C ``(B, H_s, H_t)``, or ``(B, H_s, H_t, L)`` with one weight a row; for a teacher with attention
            sinks times the mass of its rows.
        row_weights: g ``(B, H_s, L)`` float32, at least 0; 0 where a row does not count.
        scale: of the student's logits, before the division by T.
        teacher_scale: of the teacher's.
        groups: the teacher heads merged into each student head; the others are not computed. Default: those with a
            weight other than 0, which makes the host wait for the device.
        key_mask: boolean ``(B, S)``, True = may attend.
        is_causal: row i attends to keys up to i.
        window: sliding window, at least 1: keys with ``|i - j| < window``.
        temperature: T_a of both maps.
        student_lse: natural log-sum-exp of the student's rows ``(B, H_s, L)`` float32 at this scale, temperature
            and mask, as fused attention returns it; computed if not given.
        teacher_lse: the same ``(B, H_t, L)`` of the teacher's; worth keeping for a frozen teacher.
        deterministic: two passes, the same bits in every run; False: one pass that adds up dk in any order.
        want_value: False leaves the divergence itself out, which costs a logarithm an entry.

    Returns:
        ``kl`` per row, ``dq`` and ``dk`` of ``sum(row_weights * kl)``, in float32: multiply by the gradient from
        above before rounding to the student's dtype.

    Raises:
        ShdError: ``dependency-missing`` (Triton), ``argument-shape``, ``argument-dtype``, ``argument-value`` (what
            ``unsupported_reason`` names; scale, temperature, window, groups).

    Source: the gradient of Eq. 11.
    """
    scale, teacher_scale = (
        check_finite("scale", scale, "GRAD-8"),
        check_finite("teacher_scale", teacher_scale, "GRAD-8"),
    )
    temperature = check_temperature(temperature)
    check_heads("student", student_q, student_k)
    check_heads("teacher", teacher_q, teacher_k)
    require_support(student_q, student_k, teacher_q, teacher_k)
    batch, num_student_heads, num_rows, _ = student_q.shape
    num_teacher_heads = teacher_q.shape[1]
    expected = (batch, num_rows, student_k.shape[2])
    if (teacher_q.shape[0], teacher_q.shape[2], teacher_k.shape[2]) != expected:
        raise ShdError(
            "argument-shape",
            f"teacher_q and teacher_k must have the student's (B, L, S) = {expected}; "
            f"got {tuple(teacher_q.shape)} and {tuple(teacher_k.shape)}",
        )
    mixing_shape = (batch, num_student_heads, num_teacher_heads)
    if tuple(mixing.shape) not in (mixing_shape, (*mixing_shape, num_rows)):
        raise ShdError(
            "argument-shape",
            f"mixing must be (B, H_s, H_t) = {mixing_shape}, or that with a last axis L = {num_rows}; "
            f"got {tuple(mixing.shape)}",
            "MIX-10",
        )
    weights = check_weights(row_weights, student_q)
    mask = make_mask(key_mask, window, student_q, student_k)
    mixing = mixing.detach().to(device=student_q.device, dtype=torch.float32)
    mixing = mixing if mixing.ndim == 4 else mixing[..., None].expand(*mixing_shape, num_rows)
    merging = _find_groups(mixing) if groups is None else tuple(tuple(map(int, group)) for group in groups)
    _check_groups(merging, num_student_heads, num_teacher_heads)
    members, counts, merged = _make_members(merging, num_teacher_heads, student_q.device)

    student = make_heads(student_q, student_k, scale, temperature)
    teacher = make_heads(teacher_q, teacher_k, teacher_scale, temperature)
    check_lse("student_lse", student_lse, student_q)
    check_lse("teacher_lse", teacher_lse, teacher_q)
    student = student._replace(lse=compute_lse(student, mask, is_causal) if student_lse is None else student_lse)
    teacher = teacher._replace(lse=compute_lse(teacher, mask, is_causal) if teacher_lse is None else teacher_lse)
    supervision = Factored(
        teacher=teacher,
        mixing=mixing,
        mixing_strides=mixing.stride(),
        members=members,
        counts=counts,
        max_members=members.shape[1],
        masses=torch.einsum("bhtl,ht->bhl", mixing, merged).contiguous(),
        num_rows=num_rows,
    )
    return run_passes(
        student,
        supervision,
        mask,
        weights,
        is_causal=is_causal,
        is_triangular=False,
        group_sizes={len(group) for group in merging},
        scale=scale,
        temperature=temperature,
        deterministic=deterministic,
        want_value=want_value,
    )


def _find_groups(mixing: Tensor) -> tuple[tuple[int, ...], ...]:
    used = (mixing != 0).any(-1).any(0)  # (H_s, H_t)
    return tuple(tuple(int(t) for t in row.nonzero()[:, 0]) for row in used.cpu())


def _check_groups(groups: tuple[tuple[int, ...], ...], num_student_heads: int, num_teacher_heads: int) -> None:
    if len(groups) != num_student_heads:
        raise ShdError(
            "argument-shape", f"groups must name a group for each of H_s={num_student_heads} heads; got {len(groups)}"
        )
    for head, group in enumerate(groups):
        if len(set(group)) != len(group) or any(not 0 <= member < num_teacher_heads for member in group):
            raise ShdError(
                "argument-value",
                f"groups must hold teacher heads from 0 to {num_teacher_heads - 1}, each once; "
                f"got {list(group)} for student head {head}",
            )


@lru_cache(maxsize=64)
def _make_members(
    groups: tuple[tuple[int, ...], ...], num_teacher_heads: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The groups on the device, as lists, their lengths, and ones and zeros: the same few in every step of a run."""
    width = max(max(map(len, groups)), 1)
    padded = [[*group, *[0] * (width - len(group))] for group in groups]
    counts = [len(group) for group in groups]
    merged = [[float(head in group) for head in range(num_teacher_heads)] for group in groups]
    return (
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(merged, dtype=torch.float32, device=device),
    )
