"""What the kernels read, as named tuples: Triton passes them on by name.

A tensor is a pointer there, and a None leaves its part of the program out.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """Queries and keys of one model."""

    queries: Tensor  # (B, H, L, d), the last axis contiguous
    keys: Tensor  # (B, H / group_size, S, d), the last axis contiguous
    query_strides: tuple[int, ...]  # of batch, head, row
    key_strides: tuple[int, ...]
    lse: Tensor | None  # (B, H, L), natural log-sum-exp of the scaled and tempered logits
    num_heads: int
    group_size: int  # query heads that read one key head
    scale: float  # of the logits, over T, in units of log2


class Mask(NamedTuple):
    """Which keys a row may attend to; causality is decided when the program is compiled."""

    key_mask: Tensor | None  # (B, S) uint8, 1 = may attend
    window: int | None
    num_rows: int  # L
    num_keys: int  # S


class FactoredOperands(NamedTuple):
    """The supervision as the teacher's queries and keys with a mixing matrix."""

    teacher: Heads
    mixing: Tensor  # (B, H_s, H_t, L), float32
    mixing_strides: tuple[int, ...]
    members: Tensor  # (H_s, max_members) int32, the teacher heads merged into each student head
    counts: Tensor  # (H_s,) int32, how many of them
    max_members: int
    masses: Tensor  # (B, H_s, L) float32, rho: what the mixing weights of a row sum to
    num_rows: int  # L


class CodedOperands(NamedTuple):
    """The supervision as stored codes of ``sqrt8-row``."""

    codes: Tensor  # uint8, one axis
    starts: Tensor  # (B, H_s) int64, where a map begins in it
    num_rows: Tensor  # (B,) int32, rows stored of each sample
    num_keys: Tensor  # (B,) int32
    masses: Tensor  # (B, H_s, L) float32, what the entries of a row sum to
    num_heads: int


class RowsKl(NamedTuple):
    """What the kernels return.

    Attributes:
        kl: divergence of each row ``(B, H_s, L)`` float32 in nats, before its weight; 0 where the row does not
            count, None if not wanted.
        dq: gradient of ``sum(row_weights * kl)`` with respect to the student's queries, float32.
        dk: the same with respect to its keys, float32.
    """

    kl: Tensor | None
    dq: Tensor
    dk: Tensor
