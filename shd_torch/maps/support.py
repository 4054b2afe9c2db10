"""Teacher mass where the student may not attend (spec chapter LOSS), and positions that only one side has (TOKEN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_torch.checks import (
    INTEGERS,
    check_dtype,
    check_entries,
    check_mask,
    check_probs,
    check_real,
    check_shapes,
    compute_dtype,
    map_dtype,
    without_autocast,
)
from shd_torch.maps.attention import mask_logits


class IntersectedMaps(NamedTuple):
    """The result of ``intersect_support`` (LOSS-15)."""

    supervision: Tensor  # (B, H_s, L, S), rows with the sums they had, or zero where nothing is left
    dropped: Tensor  # (B, H_s, L), the mass taken from each row


@torch.no_grad()
def intersect_support(
    supervision: Tensor,
    student_logits: Tensor,
    *,
    loss_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    row_sums: str = "one",
    check: bool = True,
) -> IntersectedMaps:
    """Supervision without the mass that the student may not attend to; rows keep their sums (LOSS-15).

    Arguments and errors are those of ``shd_ref.intersect_support``.

    Returns:
        ``supervision`` in the dtype it came in, and ``dropped`` in float64 or float32.
    """
    teacher, logits, _ = check_layer(
        supervision, student_logits, loss_mask=loss_mask, attn_mask=attn_mask, row_sums=row_sums, check=check, layer=0
    )
    result = intersect(teacher, ~torch.isneginf(logits))
    return result._replace(supervision=result.supervision.to(map_dtype(supervision)))


def intersect(teacher: Tensor, may_attend: Tensor) -> IntersectedMaps:
    dropped = teacher.masked_fill(may_attend, 0.0).sum(-1)
    return IntersectedMaps(rescale_rows(teacher.masked_fill(~may_attend, 0.0), teacher.sum(-1), dropped), dropped)


def rescale_rows(rows: Tensor, mass: Tensor, dropped: Tensor) -> Tensor:
    """The remaining entries of each row ``(..., S)`` at its former mass; a row that lost nothing as it was."""
    sums = rows.sum(-1, keepdim=True)
    # Divided first: the quotient of two tiny numbers is not tiny, and its reciprocal would overflow.
    scaled = rows / sums.masked_fill(sums == 0, 1.0) * mass[..., None]
    return torch.where(dropped[..., None] == 0, rows, scaled)


def check_layer(
    supervision: Tensor,
    student_logits: Tensor,
    *,
    loss_mask: Tensor | None,
    attn_mask: Tensor | None,
    row_sums: str,
    check: bool,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The teacher's maps, the student's logits, -inf where it may not attend, and the loss mask (LOSS-3, LOSS-9).

    Checked, on the student's device and in the compute dtype.
    """
    check_real(student_logits, "student_logits", check=check, ndim=4, allow_minus_inf=True, layer=layer)
    check_real(supervision, "supervision", check=False)
    rule = f"supervision and student_logits must share one shape (B, H_s, L, S) in layer {layer}"
    check_shapes(supervision.shape == student_logits.shape, rule, supervision, student_logits, spec_id="LOSS-3")
    device, dtype = student_logits.device, compute_dtype(supervision, student_logits)
    # Layers may live on several devices; masks are shared.
    if loss_mask is not None:
        check_mask(loss_mask, "loss_mask", (supervision.shape[0], supervision.shape[2]))
        loss_mask = loss_mask.to(device)
    check_probs(supervision, "supervision", check=check, query_mask=loss_mask, layer=layer, row_sums=row_sums)
    if isinstance(attn_mask, Tensor):
        attn_mask = attn_mask.to(device)
    return supervision.detach().to(dtype), mask_logits(student_logits.to(dtype), attn_mask), loss_mask


def find_violations(teacher: Tensor, may_attend: Tensor, counted: Tensor, divergence: str) -> Tensor:
    """Keys ``(B, H_s, L, S)`` at which a counted row makes the loss an error (LOSS-6, LOSS-13)."""
    wrong = (teacher != 0) & ~may_attend
    if divergence == "reverse_kl":
        wrong = wrong | ((teacher == 0) & may_attend)
    return wrong & counted[..., None]


def check_support(teacher: Tensor, violations: Tensor, layer: int) -> None:
    if not violations.any():
        return
    b, h, i, j = (int(index) for index in violations.nonzero()[0])
    value = teacher[b, h, i, j].item()
    place = f"layer {layer}, sample {b}, head {h}, row {i}, key {j}"
    if value == 0:
        rule = "supervision must be above 0 with divergence='reverse_kl' wherever the student may attend"
        advice = "the divergence would be infinite, 'js' is finite there"
        raise ShdError("support-mismatch", f"{rule}; got 0 at {place}: {advice}", "LOSS-13")
    raise support_mismatch(f"got {value:.6g} at {place}")


def support_mismatch(got: str) -> ShdError:
    rule = "supervision must be 0 where the student may not attend"
    advice = "teacher and student must share one mask, or support='intersect' drops that mass"
    return ShdError("support-mismatch", f"{rule}; {got}: {advice}", "LOSS-6")


class AlignedMaps(NamedTuple):
    """The result of ``align_tokens`` and ``pool_tokens`` (TOKEN-2, TOKEN-9)."""

    probs: Tensor  # (B, H, l, s), rows with the sums they had, or zero where nothing is left
    dropped: Tensor  # (B, H, l), the mass that lay on columns not kept, or on tokens without a group


@torch.no_grad()
def align_tokens(
    attn_probs: Tensor,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    *,
    query_mask: Tensor | None = None,
    row_sums: str = "one",
    check: bool = True,
) -> AlignedMaps:
    """Keep the listed query and key positions, scale the rows back, report the mass that was dropped (TOKEN-1..4).

    For merged maps, after ``squeeze_heads`` (TOKEN-5): alpha reads every position of the teacher. Runs without
    gradient.

    Arguments and errors are those of ``shd_ref.align_tokens``.

    Returns:
        The aligned maps in the dtype they came in, and the dropped mass of each kept row in float64 or float32.
    """
    num_rows, num_columns = _check_maps(attn_probs, query_mask, row_sums, check)
    kept_rows = _check_positions("rows", rows, num_rows)
    kept_columns = _check_positions("columns", columns, num_columns)
    probs = attn_probs.detach()[:, :, kept_rows].to(compute_dtype(attn_probs))
    dropped_columns = sorted(set(range(num_columns)) - set(kept_columns))
    dropped = probs[..., dropped_columns].sum(-1)
    aligned = rescale_rows(probs[..., kept_columns], probs.sum(-1), dropped)
    return AlignedMaps(aligned.to(map_dtype(attn_probs)), dropped)


@without_autocast
def pool_tokens(
    attn_probs: Tensor,
    row_groups: Tensor | None = None,
    column_groups: Tensor | None = None,
    *,
    query_mask: Tensor | None = None,
    row_sums: str = "one",
    check: bool = True,
) -> AlignedMaps:
    """Maps over the tokens of a student that cuts its input otherwise: rows averaged, columns summed (TOKEN-8..11).

    For merged maps, after ``squeeze_heads`` (TOKEN-12). Gradients reach ``attn_probs``. Groups are on its device;
    ``torch.from_numpy`` takes those of ``shd_ref``, and ``id_groups`` makes them of tokens merged in a forward pass.

    Arguments and errors are those of ``shd_ref.pool_tokens``.

    Returns:
        The pooled maps in the dtype they came in, and the dropped mass of each row in float64 or float32.
    """
    num_rows, num_columns = _check_maps(attn_probs, query_mask, row_sums, check)
    dtype = compute_dtype(attn_probs)
    rows = _check_groups("row_groups", row_groups, attn_probs, num_rows, check)
    columns = _check_groups("column_groups", column_groups, attn_probs, num_columns, check)
    counted = (attn_probs != 0).any(-1)  # (B, H, L)
    if query_mask is not None:
        counted = counted & query_mask[:, None]
    weights = rows * counted[:, :, None]  # (B, H, l, L)
    total, shared = weights.sum(-1, keepdim=True), columns.sum(-2, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    shares = columns / shared.masked_fill(shared == 0, 1)
    # Rows that do not count may hold anything, which a weight of 0 would not hide.
    probs = attn_probs.to(dtype).masked_fill(~counted[..., None], 0)
    averaged = weights @ probs
    dropped = averaged.masked_fill(shared != 0, 0).sum(-1)
    return AlignedMaps(
        rescale_rows(averaged @ shares.mT, averaged.sum(-1), dropped).to(map_dtype(attn_probs)), dropped
    )


def id_groups(ids: Tensor, num_groups: int | None = None) -> Tensor:
    """Groups ``(l, L)`` or ``(B, l, L)`` in float32, for ``pool_tokens``, of tokens that were merged.

    Arguments and errors are those of ``shd_ref.id_groups``; with ``num_groups`` nothing waits for the device.
    """
    check_dtype(ids, INTEGERS, "ids must be a tensor of integers")
    check_shapes(ids.ndim in (1, 2), "ids must be (L,) or (B, L)", ids)
    if num_groups is None:
        num_groups = max(int(ids.max()) + 1, 1)
    count = torch.arange(check_integer("num_groups", num_groups, 1, None), device=ids.device)
    return (ids[..., None, :] == count[:, None]).float()


def _check_maps(attn_probs: Tensor, query_mask: Tensor | None, row_sums: str, check: bool) -> tuple[int, int]:
    check_real(attn_probs, "attn_probs", check=False, ndim=4)
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (attn_probs.shape[0], attn_probs.shape[2]))
    check_probs(attn_probs, "attn_probs", check=check, query_mask=query_mask, row_sums=row_sums)
    return attn_probs.shape[2], attn_probs.shape[3]


def _check_groups(name: str, groups: Tensor | None, maps: Tensor, size: int, check: bool) -> Tensor:
    """Weights ``(B or 1, 1, l, L)`` in the dtype that is computed in (TOKEN-8, TOKEN-11)."""
    dtype = compute_dtype(maps)
    if groups is None:
        return torch.eye(size, dtype=dtype, device=maps.device)[None, None]
    check_real(groups, name, check=check)
    by_sample = groups.ndim == 3
    fits = groups.ndim in (2, 3) and groups.shape[-1] == size and (not by_sample or len(groups) == len(maps))
    rule = f"{name} must be (groups, tokens), or (B, groups, tokens) by sample, with the maps' tokens and B"
    check_shapes(fits, rule, groups, maps, spec_id="TOKEN-11")
    if check:
        check_entries(groups, groups < 0, "argument-value", f"{name} must be at least 0", "TOKEN-11")
    return (groups[:, None] if by_sample else groups[None, None]).to(dtype)


def _check_positions(name: str, positions: Sequence[int] | None, size: int) -> list[int]:
    """A list of distinct positions of an axis (TOKEN-4)."""
    if positions is None:
        return list(range(size))
    listed = positions.tolist() if isinstance(positions, Tensor) else list(positions)
    indices = [check_integer(name, position, 0, size - 1, "TOKEN-4") for position in listed]
    if not indices or len(set(indices)) < len(indices):
        raise ShdError(
            "argument-value", f"{name} must name at least one position, each once; got {indices}", "TOKEN-4"
        )
    return indices
