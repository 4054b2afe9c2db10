"""Rows in chunks: how many at once, so that no copy of all logits is made in a wide dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shd_ref.integers import check_integer
from shd_torch.checks import check_real

_ENTRIES = {"cpu": 1 << 22}
_ENTRIES_OF_A_DEVICE = 1 << 26  # 256 MiB of float32: products large enough for a GPU


def row_chunks(rows: int, width: int, device: torch.device, chunk_rows: int | None) -> Iterator[slice]:
    """Slices over rows, each of at most ``chunk_rows`` rows, or of what a device is given at once."""
    size = chunk_rows or max(_ENTRIES.get(device.type, _ENTRIES_OF_A_DEVICE) // max(width, 1), 1)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def check_rows(value: Tensor, name: str, *, check: bool, ndim: int | None = None) -> None:
    """``check_real``, which would make copies of the whole; the host waits once."""
    check_real(value, name, check=False, ndim=ndim)
    if not check or value.ndim < 2:
        check_real(value, name, check=check)
        return
    rows = value.flatten(0, -2)
    parts = row_chunks(len(rows), rows.shape[-1], value.device, None)
    finite = [torch.isfinite(rows[part]).all() for part in parts]
    if finite and not bool(torch.stack(finite).all()):
        check_real(value, name, check=True)


def check_chunk_rows(chunk_rows: int | None) -> None:
    """None, or an integer of at least 1."""
    if chunk_rows is not None:
        check_integer("chunk_rows", chunk_rows, 1, None, "ERR-6")
