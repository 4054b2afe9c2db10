"""The divergence and its gradients from the codes of a supervision cache, decoded inside the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.cache import packed_size
from shd_ref.errors import ShdError
from shd_torch.checks import check_finite, check_option, check_temperature
from shd_torch.kernels.arguments import check_heads, check_lse, check_weights, make_mask
from shd_torch.kernels.launch import compute_lse, compute_masses, make_heads, require_support, run_passes
from shd_torch.kernels.operands import Coded, RowsKl

CODECS: tuple[str, ...] = ("sqrt8-row", "sqrt8-abs")
"""What the kernels decode: the two give the same rows from the same codes (CACHE-27, CACHE-35)."""

_SUPPORTS = ("full", "causal")


class PackedCodes(NamedTuple):
    """The codes of one layer as a cache stores them, sample by sample, each of its own length.

    Attributes:
        buffer: uint8, one axis; may hold other layers as well.
        starts: where each sample's first map begins in the buffer.
        lengths: positions of each sample.
        support: ``"full"``, or ``"causal"`` with only the lower triangle stored.
    """

    buffer: Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    support: str


@torch.no_grad()
def kl_coded(
    student_q: Tensor,
    student_k: Tensor,
    codes: Tensor | PackedCodes,
    row_weights: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    temperature: float = 1.0,
    student_lse: Tensor | None = None,
    deterministic: bool = True,
    want_value: bool = True,
) -> RowsKl:
    """KL of stored maps and student maps, row by row, and its gradients; neither map is ever decoded in memory.

    The codes are those of ``sqrt8-row`` or ``sqrt8-abs`` (CACHE-27, CACHE-34, CACHE-35): code 0 is exactly zero, and
    a row is made to sum to one by what its codes sum to. A row of zeros does not count. A row with a code on a key
    that the student may not attend to has an infinite divergence (LOSS-6) and gives no gradient: check the support
    once, at set-up.

    Args:
        student_q: ``(B, H_s, L, d)`` float16, bfloat16 or float32, d at most 256, in float32 128.
        student_k: ``(B, H_kv, S, d)`` of the same dtype; query head h reads key head ``h // (H_s / H_kv)``.
        codes: ``(B, H_s, L, S)`` uint8, or the cache's own bytes; what they lack up to L and S is zero.
        row_weights: g ``(B, H_s, L)`` float32, at least 0; 0 where a row does not count. Rows with a mass other than
            one (attention sinks) bring it in here (LOSS-11).
        scale: of the student's logits, before the division by T.
        key_mask: boolean ``(B, S)``, True = may attend.
        is_causal: row i attends to keys up to i.
        window: sliding window, at least 1: keys with ``|i - j| < window``.
        temperature: T_a of the student's map; the codes are already at it.
        student_lse: as for ``kl_factored``.
        deterministic: as for ``kl_factored``.
        want_value: as for ``kl_factored``.

    Returns:
        As ``kl_factored``.

    Raises:
        ShdError: as ``kl_factored``; ``argument-dtype`` for codes that are not uint8.

    Source: the gradient of Eq. 11.
    """
    scale, temperature = check_finite("scale", scale, "GRAD-8"), check_temperature(temperature)
    check_heads("student", student_q, student_k)
    require_support(student_q, student_k)
    weights = check_weights(row_weights, student_q)
    mask = make_mask(key_mask, window, student_q, student_k)
    student = make_heads(student_q, student_k, scale, temperature)
    check_lse("student_lse", student_lse, student_q)
    student = student._replace(lse=compute_lse(student, mask, is_causal) if student_lse is None else student_lse)
    if isinstance(codes, PackedCodes):
        supervision = _locate_packed(codes, student_q)
    else:
        supervision = _locate_plain(codes, student_q, student_k.shape[2])
    is_triangular = isinstance(codes, PackedCodes) and codes.support == "causal"
    compute_masses(supervision, mask, is_causal, is_triangular)
    return run_passes(
        student,
        supervision,
        mask,
        weights,
        is_causal=is_causal,
        is_triangular=is_triangular,
        group_sizes=set(),
        scale=scale,
        temperature=temperature,
        deterministic=deterministic,
        want_value=want_value,
    )


def _locate_plain(codes: Tensor, student_q: Tensor, num_keys: int) -> Coded:
    batch, num_heads, num_rows, _ = student_q.shape
    expected = (batch, num_heads, num_rows, num_keys)
    if tuple(codes.shape) != expected:
        raise ShdError(
            "argument-shape", f"codes must be (B, H_s, L, S) = {expected}; got {tuple(codes.shape)}", "LOSS-3"
        )
    _check_codes(codes, student_q)
    maps = torch.arange(batch * num_heads, dtype=torch.int64, device=codes.device)
    return Coded(
        codes=codes.contiguous().view(-1),
        starts=(maps * (num_rows * num_keys)).view(batch, num_heads),
        num_rows=torch.full((batch,), num_rows, dtype=torch.int32, device=codes.device),
        num_keys=torch.full((batch,), num_keys, dtype=torch.int32, device=codes.device),
        masses=torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=codes.device),
        num_heads=num_heads,
    )


def _locate_packed(codes: PackedCodes, student_q: Tensor) -> Coded:
    batch, num_heads, num_rows, _ = student_q.shape
    check_option("codes.support", codes.support, _SUPPORTS, "CACHE-43")
    _check_codes(codes.buffer, student_q)
    if codes.buffer.ndim != 1 or len(codes.starts) != batch or len(codes.lengths) != batch:
        raise ShdError(
            "argument-shape",
            f"codes must be a buffer of one axis with a start and a length for each of B={batch} samples; "
            f"got {codes.buffer.ndim} axes, {len(codes.starts)} starts and {len(codes.lengths)} lengths",
        )
    starts = []
    for sample, (start, length) in enumerate(zip(codes.starts, codes.lengths, strict=True)):
        size = packed_size("sqrt8-row", codes.support, num_heads, length)
        if start < 0 or start + size > codes.buffer.numel():
            raise ShdError(
                "argument-shape",
                f"codes must hold {size} bytes from byte {start} on for sample {sample}; "
                f"got a buffer of {codes.buffer.numel()}",
            )
        starts.append([start + head * (size // num_heads) for head in range(num_heads)])
    device = codes.buffer.device
    lengths = torch.tensor(codes.lengths, dtype=torch.int32, device=device)
    return Coded(
        codes=codes.buffer,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        num_rows=lengths,
        num_keys=lengths,
        masses=torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=device),
        num_heads=num_heads,
    )


def _check_codes(codes: Tensor, student_q: Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise ShdError("argument-dtype", f"codes must be uint8, the codec sqrt8-row; got {codes.dtype}", "CACHE-30")
    if codes.device != student_q.device:
        raise ShdError(
            "argument-value", f"codes must be on the student's device {student_q.device}; got {codes.device}"
        )
