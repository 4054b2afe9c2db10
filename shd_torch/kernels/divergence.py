"""The divergence and its gradients from a factored supervision, or from codes that the kernels decode."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shd_ref.cache import packed_size
from shd_torch.kernels.launch import (
    CodedOperands,
    FactoredOperands,
    Heads,
    Mask,
    RowsKl,
    constant,
    fill_masses,
    make_heads,
    make_mask,
    row_bytes,
    run_passes,
    with_lse,
)
from shd_torch.kernels.tiles import count_unrolled
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule

CODECS: tuple[str, ...] = ("sqrt8-row", "sqrt8-abs")
"""What the kernels decode: the two give the same rows from the same codes (CACHE-116, CACHE-115)."""


@torch.no_grad()
def kl_rows(
    student_q: Tensor,
    student_k: Tensor,
    taught: Factored | Coded,
    row_weights: Tensor,
    rule: AttentionRule,
    *,
    temperature: float = 1.0,
    deterministic: bool = True,
    want_value: bool = True,
) -> RowsKl:
    """KL of the teacher's and the student's maps, row by row, and its gradients; no map is ever in memory.

    ``A~_h = sum_t C[h,t] softmax(teacher_scale q_t k_t^T / T)`` and ``dz = g (rho A_student - A~) / T`` (GRAD-1,
    GRAD-4, GRAD-5), with rho the row's sum of mixing weights. The divergence is that of LOSS-11: zero where
    ``A~ = rho A_student``. A row that may attend to nothing gives exactly 0.

    Of codes, code 0 is exactly zero, and a row is made to sum to one by what its codes sum to; one of zeros does not
    count. A row with a code on a key that the student may not attend to has an infinite divergence (LOSS-6) and no
    gradient. A mass other than one (attention sinks) comes in by ``row_weights`` (LOSS-11).

    What the kernels read is checked before (``unsupported_reason`` here and of ``kl/triton.py``), and not again.

    Args:
        student_q: ``(B, H_s, L, d)`` float16, bfloat16 or float32, d at most 256, in float32 128.
        student_k: ``(B, H_kv, S, d)`` of the same dtype.
        taught: on the same device; codes already at this temperature, queries and keys by one rule with the student
            except for the scale.
        row_weights: g ``(B, H_s, L)`` float32, at least 0; 0 where a row does not count.
        rule: of the student: a scale, causality, a window and a mask of keys ``(B, 1, 1, S)``; fits.
        temperature: T_a of both maps.
        deterministic: two passes, the same bits in every run; False: one pass that adds up dk in any order.
        want_value: False leaves the divergence itself out, which costs a logarithm an entry.
    """
    mask, factor = make_mask(rule, student_q, student_k), rule.scale_for(student_q.shape[3]) / temperature
    student = with_lse(make_heads(student_q, student_k, factor), mask)
    supervision = _decode(taught, mask) if isinstance(taught, Coded) else _factor(taught, student, mask, temperature)
    return run_passes(
        student, supervision, mask, row_weights, factor=factor, deterministic=deterministic, want_value=want_value
    )


def _factor(taught: Factored, student: Heads, mask: Mask, temperature: float) -> FactoredOperands:
    """Queries and keys of the heads of the groups, and their mixing weights in every row."""
    teacher = make_heads(taught.queries, taught.keys, taught.rule.scale_for(taught.queries.shape[3]) / temperature)
    every_head = tuple(range(teacher.num_heads))
    groups = tuple(map(tuple, taught.groups)) if taught.groups else (every_head,) * taught.num_heads
    members, counts, merged = _make_members(groups, teacher.num_heads, teacher.queries.device)
    mixing = taught.mixing if taught.mixing.ndim == 4 else taught.mixing[..., None]
    if taught.row_mass is not None:
        mixing = mixing * taught.row_mass[:, None]
    mixing = mixing.float().expand(-1, -1, -1, mask.num_rows)
    unrolled = count_unrolled(
        {len(group) for group in groups},
        max(row_bytes(student), row_bytes(teacher)),
        is_float32=torch.float32 in (student.queries.dtype, teacher.queries.dtype),
    )
    return FactoredOperands(
        teacher=with_lse(teacher, mask),
        mixing=mixing,
        mixing_strides=mixing.stride(),
        members=members,
        counts=counts,
        max_members=members.shape[1],
        masses=torch.einsum("bhtl,ht->bhl", mixing, merged).contiguous(),
        num_rows=mask.num_rows,
        unrolled=constant(unrolled),
        is_coded=constant(False),
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


def _decode(taught: Coded, mask: Mask) -> CodedOperands:
    """Where the codes of each head lie, and what rows sum to; that the buffer holds them is checked in ``Coded``."""
    batch, num_heads, num_rows, _ = taught.shape
    key_lengths = taught.lengths if taught.key_lengths is None else taught.key_lengths
    starts = []
    for start, *shape in zip(taught.starts, taught.lengths, key_lengths, strict=True):
        size = packed_size(taught.codec, taught.support, num_heads, *shape) // num_heads
        starts.append([start + head * size for head in range(num_heads)])
    device = taught.device
    coded = CodedOperands(
        codes=taught.buffer,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        num_rows=torch.tensor(taught.lengths, dtype=torch.int32, device=device),
        num_keys=torch.tensor(key_lengths, dtype=torch.int32, device=device),
        masses=torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=device),
        num_heads=num_heads,
        is_triangular=constant(taught.support == "causal"),
        is_coded=constant(True),
    )
    fill_masses(coded, mask)
    return coded
