"""The student's attention from the teacher's, in closed form (HEAD-7..18), float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.tolerances import tie_width
from shd_torch.shrink.merges import HeadMerge
from shd_torch.shrink.weights import AttentionWeights

RIDGE = 1e-6
"""Share of a moment's mean eigenvalue that is added to all: directions without data then have an inverse."""
SLOW_ANGLE = 1.0
"""A rotated pair that turns by less than this, in radians, over a calibration sample is slow (HEAD-16)."""
Roots: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """What one layer's attention says over the whole calibration set, float64.

    Attributes:
        gram: the gram tensor, summed ``(H, H, H, H)``.
        augmented: second moment of the inputs with a one, ``[x, 1]``, ``(D + 1, D + 1)``.
        centred: of the inputs less their mean over the sample, ``(D, D)``.
        query_size: root mean square of each head's queries ``(H,)``.
        length: of the longest sample.
        output_size: mean length of each head's output before the projection ``(H,)``, for comparisons.
    """

    gram: Tensor
    augmented: Tensor
    centred: Tensor
    query_size: Tensor
    length: int
    output_size: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Squeezed:
    """A student's attention, the case of chapter HEAD that made it, and whether that is exact."""

    weights: AttentionWeights
    case: str
    exact: bool


def squeeze_attention(
    weights: AttentionWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
    num_kv_heads: int,
    head_dim: int,
    *,
    frequencies: Tensor | None = None,
    query_norm: bool = False,
) -> Squeezed:
    """The best case that applies (HEAD's table).

    Args:
        weights: of the teacher.
        merge: groups and C.
        statistics: of the layer.
        num_kv_heads: of the student.
        head_dim: of the student.
        frequencies: of rotary positions, one a pair of entries i and ``i + d / 2``; None without.
        query_norm: whether queries are normed before their product with keys.
    """
    same_shape = num_kv_heads == weights.num_kv_heads and head_dim == weights.head_dim
    if len(merge.groups) == weights.num_heads and same_shape:
        return Squeezed(weights, "copied", True)
    if same_shape and merge.shares_keys(num_kv_heads):
        if query_norm:
            merge = replace(merge, mixing=merge.mixing / statistics.query_size)
        return Squeezed(_mix_queries(weights, merge), "queries", not query_norm)
    if query_norm:
        raise ShdError(
            "shrink-unsupported",
            "heads must merge inside key and value heads where queries are normed, since keys are normed too: ask "
            f"for a multiple of the teacher's {weights.num_kv_heads} key and value heads; got groups {merge.groups}",
            "HEAD-18",
        )
    longest = max(len(group) for group in merge.groups)
    fits = num_kv_heads == len(merge.groups) and longest * weights.head_dim <= head_dim
    if frequencies is None and fits:
        return Squeezed(_lay_side_by_side(weights, merge, head_dim), "side-by-side", True)
    case = "low-rank" if frequencies is None else "rotary"
    slow = None if frequencies is None else frequencies * statistics.length < SLOW_ANGLE
    return Squeezed(_factor_heads(weights, merge, statistics, num_kv_heads, head_dim, slow), case, False)


def _mix_queries(weights: AttentionWeights, merge: HeadMerge) -> AttentionWeights:
    c = merge.mixing
    return replace(
        weights,
        query=torch.einsum("ht,tik->hik", c, weights.query),
        query_bias=None if weights.query_bias is None else c @ weights.query_bias,
        output=torch.einsum("ht,tvi->hvi", merge.members, weights.output),
    )


def _lay_side_by_side(weights: AttentionWeights, merge: HeadMerge, head_dim: int) -> AttentionWeights:
    """Queries of a group one after the other, each with its weight and the scale's ratio (HEAD-9, HEAD-10)."""
    ratio = (head_dim / weights.head_dim) ** 0.5
    reads = [weights.read_by(head) for head in range(weights.num_heads)]
    scaled = ratio * merge.mixing.sum(0)  # every teacher head is in one group

    def lay(parts: Tensor, dim: int) -> Tensor:
        made = []
        for group in merge.groups:
            together = torch.cat([parts[t] for t in group], dim=dim)
            shape = list(together.shape)
            shape[dim] = head_dim - shape[dim]
            made.append(torch.cat([together, together.new_zeros(shape)], dim=dim))
        return torch.stack(made)

    query_bias = None if weights.query_bias is None else weights.query_bias * scaled[:, None]
    return AttentionWeights(
        lay(weights.query * scaled[:, None, None], 1),
        lay(weights.key[reads], 1),
        lay(weights.value[reads], 1),
        lay(weights.output, 0),
        None if query_bias is None else lay(query_bias, 0),
        None if weights.key_bias is None else lay(weights.key_bias[reads], 0),
        None if weights.value_bias is None else lay(weights.value_bias[reads], 0),
        weights.output_bias,
    )


def _factor_heads(
    weights: AttentionWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
    num_kv_heads: int,
    head_dim: int,
    slow: Tensor | None,
) -> AttentionWeights:
    """Nearest forms by rank; ``slow`` says which rotated pairs are, None without rotary positions (HEAD-11..16)."""
    students, width = len(merge.groups), weights.query.shape[1]
    query = weights.query.new_zeros(students, width + 1, head_dim)
    key, value = (query.new_zeros(num_kv_heads, width + 1, head_dim) for _ in range(2))
    output = query.new_zeros(students, head_dim, width)
    reads = [weights.read_by(head) for head in range(weights.num_heads)]
    queries, keys = _augment(weights.query, weights.query_bias), _augment(weights.key, weights.key_bias)[reads]
    values = _augment(weights.value, weights.value_bias if weights.output_bias is None else None)[reads]
    c = merge.mixing * (head_dim / weights.head_dim) ** 0.5
    whole = _roots(statistics.augmented)
    if slow is None:
        forms = torch.einsum("ht,tik,tjk->hij", c, queries, keys)[:, :, :-1]
        centred = _roots(statistics.centred)
    else:
        first = torch.arange(len(slow), device=query.device)
        real = torch.complex(queries[..., first], queries[..., first + len(slow)])
        facing = torch.complex(keys[..., first], keys[..., first + len(slow)])
    of_values = torch.einsum("ht,tiv,tvj->hij", merge.members, values, weights.output)
    per = students // num_kv_heads
    for kv in range(num_kv_heads):
        heads = slice(kv * per, (kv + 1) * per)
        if slow is None:
            left, right = _factor(forms[heads], head_dim, whole, centred)
            query[heads], key[kv, :-1] = left, right
        else:
            for pair in (~slow).nonzero()[:, 0].tolist():
                form = torch.einsum("ht,ti,tj->hij", c[heads] + 0j, real[..., pair], facing[..., pair].conj())
                left, right = _factor(form, 1, whole, whole)
                for entry, part in ((pair, torch.real), (pair + len(slow), torch.imag)):
                    query[heads, :, entry], key[kv, :, entry] = part(left[..., 0]), part(right[..., 0])
            still = slow.nonzero()[:, 0]
            still = torch.cat([still, still + len(slow)])
            if len(still):
                form = torch.einsum("ht,tik,tjk->hij", c[heads], queries[..., still], keys[..., still])
                query[heads][..., still], key[kv][..., still] = _factor(form, len(still), whole, whole)
        left, right = _factor(of_values[heads].mT, head_dim, None, whole)
        value[kv], output[heads] = right, left.mT
    return _take_biases(weights, reads, query, key, value, output, rotary=slow is not None)


def _take_biases(
    weights: AttentionWeights,
    reads: list[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    rotary: bool,
) -> AttentionWeights:
    out_bias, value_bias = weights.output_bias, None
    if weights.value_bias is not None:
        value_bias = value[:, -1]
        if out_bias is not None:  # rows of a map sum to one
            out_bias = out_bias + torch.einsum("tv,tvi->i", weights.value_bias[reads], weights.output)
            value_bias = torch.zeros_like(value_bias)
    biased = weights.query_bias is not None or weights.key_bias is not None
    return AttentionWeights(
        query[:, :-1],
        key[:, :-1],
        value[:, :-1],
        output,
        query[:, -1] if biased else None,
        (key[:, -1] if rotary else torch.zeros_like(key[:, -1])) if biased else None,
        value_bias,
        out_bias,
    )


def _augment(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The bias as one more row, for inputs ``[x, 1]``."""
    row = matrix.new_zeros(matrix.shape[0], matrix.shape[2]) if bias is None else bias
    return torch.cat([matrix, row[:, None]], dim=1)


def _factor(forms: Tensor, rank: int, left: Roots | None, right: Roots) -> tuple[Tensor, Tensor]:
    """``forms[h] ~ left[h] @ right^H`` of least weighted error (HEAD-13)."""
    groups, rows, columns = forms.shape
    if left is None:
        eye = torch.eye(rows, dtype=right[0].dtype, device=right[0].device)
        left = eye, eye
    whitened = (left[0].to(forms.dtype) @ forms @ right[0].to(forms.dtype)).reshape(groups * rows, columns)
    u, singular, vh = torch.linalg.svd(whitened, full_matrices=False)
    u, vh = u * leading_phases(vh.mH), vh / leading_phases(vh.mH)[:, None]
    kept = min(rank, len(singular))
    half = singular[:kept].sqrt()
    made_left = forms.new_zeros(groups, rows, rank)
    made_right = forms.new_zeros(columns, rank)
    made_left[..., :kept] = left[1].to(forms.dtype) @ (u[:, :kept] * half).reshape(groups, rows, kept)
    made_right[:, :kept] = right[1].to(forms.dtype) @ (vh[:kept].mH * half)
    return made_left, made_right


def leading_phases(vectors: Tensor) -> Tensor:
    """For each column ``(D, k)`` the number of length 1 that makes its largest entry positive (HEAD-13)."""
    sizes = vectors.abs()
    first = (sizes >= (1.0 - tie_width()) * sizes.amax(0)).int().argmax(0)
    leading = vectors.gather(0, first[None])[0]
    return torch.where(leading == 0, 1.0, leading.conj() / leading.abs().masked_fill(leading == 0, 1.0))


def _roots(moment: Tensor) -> Roots:
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    raised = (values.clamp_min(0.0) + RIDGE * values.mean().clamp_min(torch.finfo(values.dtype).tiny)).sqrt()
    return (vectors * raised) @ vectors.mT, (vectors / raised) @ vectors.mT
