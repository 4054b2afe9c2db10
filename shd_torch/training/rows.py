"""Which rows of a batch count, how many, and what share of a whole batch they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number

ROWS: Final[tuple[str, ...]] = ("positions", "labels", "next_labels")
"""Rules by which rows of logits count."""

IGNORED: Final = -100
"""The label that does not count, by the convention of PyTorch's cross entropy and Hugging Face."""


def mask_of_rows(given: Mapping[str, Any], *, of_decoder: bool = False) -> Tensor | None:
    """``(B, L)``, True = a position of the sample (or of its decoder), by the batch's own mask; None without one."""
    mask = given.get("decoder_attention_mask" if of_decoder else "attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def counted_rows(rule: str, given: Mapping[str, Any], *, of_decoder: bool = False) -> Tensor | None:
    """``(B, L)``, True = the row of logits counts by a rule of ``ROWS``; None: all do."""
    mask = mask_of_rows(given, of_decoder=of_decoder)
    if rule == "positions":
        return mask
    labels = given.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        got = "none" if labels is None else f"{tuple(getattr(labels, 'shape', ()))}"
        raise ShdError("argument-value", f"a batch must hold labels (B, L) where rows={rule!r}; got {got}")
    counted = labels != IGNORED
    if rule == "next_labels":
        counted = torch.cat((counted[:, 1:], torch.zeros_like(counted[:, :1])), 1)
    return counted if mask is None else counted & mask


def count_rows(given: Mapping[str, Any], rule: str = "positions", *, of_decoder: bool = False) -> int:
    """Rows of a batch that count by a rule of ``ROWS``, or its ``"samples"``."""
    first = next(value for value in given.values() if isinstance(value, Tensor))
    if rule == "samples":
        return int(first.shape[0])
    mask = counted_rows(rule, given, of_decoder=of_decoder)
    if mask is not None:
        return int(mask.sum())
    if of_decoder:
        tokens = given.get("decoder_input_ids", given.get("labels"))
        return int(tokens.numel()) if isinstance(tokens, Tensor) else int(first.shape[0])
    if "supervision" in given:
        return sum(given["supervision"].lengths)
    return int(first.shape[0] * (first.shape[1] if first.ndim == 2 else 1))


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
        return torch.tensor(check_number(name, value, least=float(least)), dtype=torch.float64)
    if value.ndim or value.dtype == torch.bool or value.is_complex():
        raise ShdError("argument-value", f"{name} must be one number; got {value!r}")
    if value.is_cpu:
        check_number(name, value.item(), least=float(least))
    return value.detach().to(torch.float64)
