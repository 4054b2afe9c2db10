"""The divergence and its gradients from the codes of a supervision cache, decoded inside the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.cache import packed_size
from shd_torch.kernels.launch import compute_lse, compute_masses, make_heads, make_mask, run_passes
from shd_torch.kernels.operands import CodedOperands, RowsKl
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.mask import AttentionRule

CODECS: tuple[str, ...] = ("sqrt8-row", "sqrt8-abs")
"""What the kernels decode: the two give the same rows from the same codes (CACHE-116, CACHE-115)."""


@torch.no_grad()
def kl_coded(
    student_q: Tensor,
    student_k: Tensor,
    taught: Coded,
    row_weights: Tensor,
    rule: AttentionRule,
    *,
    temperature: float = 1.0,
    deterministic: bool = True,
    want_value: bool = True,
) -> RowsKl:
    """KL of stored maps and student maps, row by row, and its gradients; neither map is ever decoded in memory.

    Code 0 is exactly zero, and a row is made to sum to one by what its codes sum to. A row of zeros does not count. A
    row with a code on a key that the student may not attend to has an infinite divergence (LOSS-6) and gives no
    gradient: check the support once, at set-up.

    Args:
        student_q: as for ``kl_factored``.
        student_k: as for ``kl_factored``.
        taught: of one of ``CODECS``, already at this temperature, on the student's device.
        row_weights: as for ``kl_factored``. Rows with a mass other than one (attention sinks) bring it in here
            (LOSS-11).
        rule: of the student, as for ``kl_factored``.
        temperature: T_a of the student's map.
        deterministic: as for ``kl_factored``.
        want_value: as for ``kl_factored``.

    Returns:
        As ``kl_factored``.

    Source: the gradient of Eq. 11.
    """
    mask, scale = make_mask(rule, student_q, student_k), rule.scale_for(student_q.shape[3])
    student = make_heads(student_q, student_k, scale, temperature)
    student = student._replace(lse=compute_lse(student, mask, rule.is_causal))
    supervision = _locate(taught)
    is_triangular = taught.support == "causal"
    compute_masses(supervision, mask, rule.is_causal, is_triangular)
    return run_passes(
        student,
        supervision,
        mask,
        row_weights,
        is_causal=rule.is_causal,
        is_triangular=is_triangular,
        group_sizes=set(),
        factor=scale / temperature,
        deterministic=deterministic,
        want_value=want_value,
    )


def _locate(taught: Coded) -> CodedOperands:
    """Where the codes of each head lie; that the buffer holds them is checked where ``Coded`` is made."""
    batch, num_heads, num_rows, _ = taught.shape
    key_lengths = taught.lengths if taught.key_lengths is None else taught.key_lengths
    starts = []
    for start, *shape in zip(taught.starts, taught.lengths, key_lengths, strict=True):
        size = packed_size(taught.codec, taught.support, num_heads, *shape) // num_heads
        starts.append([start + head * size for head in range(num_heads)])
    device = taught.device
    return CodedOperands(
        codes=taught.buffer,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        num_rows=torch.tensor(taught.lengths, dtype=torch.int32, device=device),
        num_keys=torch.tensor(key_lengths, dtype=torch.int32, device=device),
        masses=torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=device),
        num_heads=num_heads,
    )
