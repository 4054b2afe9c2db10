"""What part of a whole batch a rank or a micro-batch is, so that parts add up to what the whole would give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def batch_share(
    num_rows: int | Tensor, *, num_rows_in_all: int | Tensor | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """The factor for this process's SHD term with which several ranks train like one on the same global batch.

    ``attention_kl`` and ``shd_loss`` average over the query rows that count. If ranks (or micro-batches) have
    different numbers of them, as with padded text, the mean of their means is not the mean of all rows; with this
    factor it is, provided that all heads count the same rows of a sample.

    Args:
        num_rows: rows that count in this process's batch, at least 0: for supervision from a cache
            ``supervision.query_mask().sum()``.
        num_rows_in_all: with gradient accumulation, the total rows of all micro-batches of this process's step; the
            gradients of the step must then be summed, not averaged.
        group: the ranks among which gradients are averaged, as DDP and FSDP do; default all. Without an initialised
            process group there is one rank.

    Returns:
        ``()`` float32, on the device of ``num_rows`` if that is a tensor; ranks x rows here / rows in all, 0 where no
        row counts anywhere. Every rank must call this as often as the others.

    Raises:
        ShdError: ``argument-value``; on an accelerator values are not validated, to avoid a device sync.

    Source: silent, as it trains in one process. Decision: D-10, a mean over the rows of the whole batch.
    """
    rows = _read_number("num_rows", num_rows, 0.0)
    whole = rows if num_rows_in_all is None else _read_number("num_rows_in_all", num_rows_in_all, rows).to(rows)
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size(group)
        whole = whole.clone()
        dist.all_reduce(whole, group=group)
    return torch.where(whole == 0, 0.0, ranks * rows / whole).to(torch.float32)


def _read_number(name: str, value: object, least: float | Tensor) -> Tensor:
    """A number as float64; of a tensor on an accelerator the value is not read."""
    if not isinstance(value, Tensor):
        return torch.tensor(check_number(name, value, "", least=float(least)), dtype=torch.float64)
    if value.ndim or value.dtype == torch.bool or value.is_complex():
        raise ShdError("argument-value", f"{name} must be one number; got {value!r}")
    if value.is_cpu:
        check_number(name, value.item(), "", least=float(least))
    return value.detach().to(torch.float64)
