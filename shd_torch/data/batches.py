"""What a ``DataLoader`` reads of a cache and a user's data: pairs, and batches that share one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shd_ref.cache import Manifest, SampleRecord
from shd_ref.errors import ShdError
from shd_torch.supervision.cached import CachedSupervision, pack_records


class Pair(tuple[Any, SampleRecord]):
    """A sample with its record: a type of its own, so that PyTorch's default collation says what to use instead."""

    __slots__ = ()


def _refuse_default(batch: Any, **_: Any) -> Any:
    rule = "a loader of supervised data must have a collation that takes records; got PyTorch's default_collate"
    advice = "collate_fn=joined.collate for tensors of one shape, or joined.collate_with(pad) with what pads samples"
    raise ShdError("argument-value", f"{rule}: give it {advice} (docs/training.md)")


default_collate_fn_map[Pair] = default_collate_fn_map[SampleRecord] = _refuse_default


class ReadBatch(list[tuple[Any, SampleRecord]]):
    """Samples and records as ``__getitems__`` read them together, with the buffer that holds all codes."""

    def __init__(self, pairs: Iterable[tuple[Any, SampleRecord]], buffer: Tensor, layers: tuple[int, ...]) -> None:
        super().__init__(pairs)
        self._read = [record for _, record in self]
        self._buffer, self._layers = buffer, layers

    def buffer_of(self, layers: Sequence[int]) -> Tensor | None:
        """The buffer, where it holds these layers of what is in the list now; else None."""
        unchanged = len(self) == len(self._read) and all(a is b for (_, a), b in zip(self, self._read, strict=True))
        return self._buffer if unchanged and tuple(layers) == tuple(self._layers) else None


def pack_batch(
    batch: Sequence[tuple[Any, SampleRecord]], manifest: Manifest, layers: Sequence[int]
) -> CachedSupervision:
    """The records of a batch in one buffer: that which they were read into, where it still holds the batch."""
    buffer = batch.buffer_of(layers) if isinstance(batch, ReadBatch) else None
    return pack_records([record for _, record in batch], manifest, layers, buffer)


def allocate_codes(size: int) -> Tensor:
    """Memory for the codes of a batch; in a worker of a ``DataLoader`` what it shares with the training process."""
    if get_worker_info() is None:
        # From 4 MB on NumPy asks the kernel for huge pages, as PyTorch does not: fewer page faults while they fill.
        return torch.from_numpy(np.empty(size, np.uint8))
    # As PyTorch's own collation does it: a tensor that is shared only afterwards is copied.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)
