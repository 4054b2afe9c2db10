"""Teacher mass where the student may not attend (spec chapter LOSS), and positions that only one side has (TOKEN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_torch.checks import check_mask, check_probs, check_real, check_shapes, compute_dtype, map_dtype
from shd_torch.maps.attention import mask_logits


class IntersectedMaps(NamedTuple):
    """What ``intersect_support`` returns (LOSS-15)."""

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


def rescale_rows(kept: Tensor, mass: Tensor, dropped: Tensor) -> Tensor:
    """What is left of each row ``(..., S)``, scaled to the mass it had; untouched where nothing was dropped."""
    rest = kept.sum(-1, keepdim=True)
    # Divided first: the quotient of two tiny numbers is not tiny, and its reciprocal would overflow.
    scaled = kept / rest.masked_fill(rest == 0, 1.0) * mass[..., None]
    return torch.where(dropped[..., None] == 0, kept, scaled)


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
    where = f"layer {layer}, sample {b}, head {h}, row {i}, key {j}"
    if value == 0:
        raise ShdError(
            "support-mismatch",
            f"supervision must be above 0 with divergence='reverse_kl' wherever the student may attend; got 0 at "
            f"{where}: the divergence would be infinite, 'js' is finite there",
            "LOSS-13",
        )
    raise ShdError(
        "support-mismatch",
        f"supervision must be 0 where the student may not attend; got {value:.6g} at {where}: teacher and student "
        "must share one mask, or support='intersect' drops that mass",
        "LOSS-6",
    )


class AlignedMaps(NamedTuple):
    """What ``align_tokens`` returns (TOKEN-2)."""

    probs: Tensor  # (B, H, len(rows), len(columns)), rows with the sums they had, or zero where nothing is left
    dropped: Tensor  # (B, H, len(rows)), the mass that lay on columns not kept


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
    check_real(attn_probs, "attn_probs", check=False, ndim=4)
    batch, _, num_rows, num_columns = attn_probs.shape
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, num_rows))
    check_probs(attn_probs, "attn_probs", check=check, query_mask=query_mask, row_sums=row_sums)
    kept_rows = _check_positions("rows", rows, num_rows)
    kept_columns = _check_positions("columns", columns, num_columns)
    probs = attn_probs.detach()[:, :, kept_rows].to(compute_dtype(attn_probs))
    others = sorted(set(range(num_columns)) - set(kept_columns))
    dropped = probs[..., others].sum(-1)
    aligned = rescale_rows(probs[..., kept_columns], probs.sum(-1), dropped)
    return AlignedMaps(aligned.to(map_dtype(attn_probs)), dropped)


def _check_positions(name: str, positions: Sequence[int] | None, size: int) -> list[int]:
    """A list of distinct positions of an axis (TOKEN-4)."""
    if positions is None:
        return list(range(size))
    listed = positions.tolist() if isinstance(positions, Tensor) else list(positions)
    kept = [check_integer(name, position, 0, size - 1, "TOKEN-4") for position in listed]
    if not kept or len(set(kept)) < len(kept):
        raise ShdError("argument-value", f"{name} must name at least one position, each once; got {kept}", "TOKEN-4")
    return kept
