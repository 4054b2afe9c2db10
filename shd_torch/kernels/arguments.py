"""Checks of the arguments that the entry points share; none looks at values, which would wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_mask
from shd_torch.kernels.operands import Mask


def check_heads(owner: str, queries: Tensor, keys: Tensor) -> None:
    """Queries ``(B, H, L, d)`` and keys ``(B, H_kv, S, d)`` of one dtype, H_kv a divisor of H (GRAD-5)."""
    fits = (
        queries.ndim == keys.ndim == 4
        and 0 not in (*queries.shape, *keys.shape)
        and queries.shape[0] == keys.shape[0]
        and queries.shape[3] == keys.shape[3]
        and queries.shape[1] % keys.shape[1] == 0
    )
    if not fits:
        raise ShdError(
            "argument-shape",
            f"{owner}_q and {owner}_k must be (B, H, L, d) and (B, H_kv, S, d) with H_kv a divisor of H; "
            f"got {tuple(queries.shape)} and {tuple(keys.shape)}",
            "GRAD-5",
        )
    if queries.dtype != keys.dtype:
        raise ShdError(
            "argument-dtype",
            f"{owner}_q and {owner}_k must have one dtype; got {queries.dtype} and {keys.dtype}",
            "MAP-5",
        )


def check_weights(row_weights: Tensor, student_q: Tensor) -> Tensor:
    """The rows' weights, contiguous: ``(B, H_s, L)`` float32 on the student's device."""
    _check_rows("row_weights", row_weights, student_q)
    return row_weights.detach().contiguous()


def check_lse(name: str, lse: Tensor | None, queries: Tensor) -> None:
    """A log-sum-exp as the kernels read it: ``(B, H, L)`` float32, contiguous, on the queries' device."""
    if lse is None:
        return
    _check_rows(name, lse, queries)
    if not lse.is_contiguous():
        raise ShdError("argument-value", f"{name} must be contiguous; got strides {lse.stride()}: call contiguous()")


def make_mask(key_mask: Tensor | None, window: int | None, student_q: Tensor, student_k: Tensor) -> Mask:
    """The mask of one call, without its causality."""
    num_rows, num_keys = student_q.shape[2], student_k.shape[2]
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ShdError("argument-value", f"window must be an integer of at least 1; got {window!r}")
    if key_mask is not None:
        check_mask(key_mask, "key_mask", (student_q.shape[0], num_keys))
        key_mask = key_mask.to(student_q.device).contiguous().view(torch.uint8)
    return Mask(key_mask=key_mask, window=window, num_rows=num_rows, num_keys=num_keys)


def _check_rows(name: str, rows: Tensor, queries: Tensor) -> None:
    expected = tuple(queries.shape[:3])
    if tuple(rows.shape) != expected:
        raise ShdError("argument-shape", f"{name} must be (B, H, L) = {expected}; got {tuple(rows.shape)}")
    if rows.dtype != torch.float32:
        raise ShdError("argument-dtype", f"{name} must be float32; got {rows.dtype}")
    if rows.device != queries.device:
        raise ShdError(
            "argument-value", f"{name} must be on the device of the queries, {queries.device}; got {rows.device}"
        )
