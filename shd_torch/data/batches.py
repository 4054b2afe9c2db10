"""A batch of a cache of maps: its codes in one buffer, between processes and to the device, decoded there."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shd_ref.cache import Attention, Factors, Manifest, Maps, SampleRecord, packed_size
from shd_ref.cache.forms.attention import blob_name
from shd_ref.errors import ShdError
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored_codes import FactoredCodes, pack_factored
from shd_torch.supervision.stored_rows import CachedBatch, find_rows, row_blobs
from shd_torch.supervision.taught_layers import taught_layers


@dataclass(frozen=True)
class CodedSupervision(CachedBatch):
    """The supervision of a batch as the cache stores it: a byte or two an entry; see ``CachedBatch``.

    The buffer holds the packed codes layer by layer, sample by sample.

    Attributes:
        temperature: T_a of the cache, where it is known.
        shapes: by layer, rows and keys of each sample's maps, where these are not its positions (cross attention);
            else empty.

    Raises:
        ShdError: not when it is made, from records that the reader has checked; see ``supervise`` and ``decode``.

    Source: CACHE-125, CACHE-126.
    """

    temperature: float | None = None
    shapes: tuple[tuple[tuple[int, int], ...], ...] = ()

    def supervise(self, length: int | Sequence[tuple[int, int]] | None = None) -> list[Coded]:
        """One ``Coded`` a layer, for ``attention_kl``: maps are made tile by tile, and never held.

        Args:
            length: L to pad to, the student's sequence length; or rows and keys ``(L, S)`` of each layer; default: of
                the longest sample.

        Raises:
            ShdError: ``argument-shape`` for a length below the longest sample.
        """
        sizes_of = functools.cache(self._sizes)
        supervisions, start = [], 0
        for layer, shapes in enumerate(self.shapes or (tuple((n, n) for n in self.lengths),) * len(self.layers)):
            *starts, start = accumulate(sizes_of(shapes), initial=start)
            rows, keys = (tuple(side) for side in zip(*shapes, strict=True))
            if length is None:
                num_rows, num_keys = max(rows), max(keys)
            else:
                num_rows, num_keys = (length, length) if isinstance(length, int) else length[layer]
            supervisions.append(
                Coded(
                    self.buffer,
                    tuple(starts),
                    rows,
                    self.num_student_heads,
                    self.codec,
                    self.support,
                    num_rows,
                    self.temperature,
                    key_lengths=None if rows == keys and num_rows == num_keys else keys,
                    num_keys=num_keys,
                )
            )
        return supervisions

    def _sizes(self, shapes: tuple[tuple[int, int], ...]) -> list[int]:
        return [packed_size(self.codec, self.support, self.num_student_heads, *shape) for shape in shapes]

    def decode(
        self, length: int | Sequence[tuple[int, int]] | None = None, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """The merged maps, one tensor ``(B, H_s, L, S)`` a layer, on the buffer's device.

        Args:
            length: as for ``supervise``. Padding is zero, which ``shd_loss`` does not count.
            dtype: of the maps; the arithmetic is float32.

        Raises:
            ShdError: as ``supervise``.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        return [coded.probs(temperature=temperature).to(dtype) for coded in self.supervise(length)]


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


def pack_records(
    batch: Sequence[tuple[Any, SampleRecord]], manifest: Manifest, layers: Sequence[int]
) -> CachedSupervision:
    """The records of a batch in one buffer, layer by layer, so that they cross processes and devices once."""
    records = [record for _, record in batch]
    form = manifest.find(Attention)
    buffer = batch.buffer_of(layers) if isinstance(batch, ReadBatch) else None
    if isinstance(form, Factors):
        return pack_factored(records, manifest, layers)
    if isinstance(form, Maps):
        return _pack_maps(records, manifest, form, layers, buffer)
    if buffer is None:
        buffer = torch.from_numpy(np.concatenate(row_blobs(records, manifest)))
    lengths = tuple(record.length for record in records)
    fields = find_rows(records, manifest, 0)
    return CodedSupervision(buffer, lengths, taught_layers(manifest), 0, "float32", "full", **fields)


def _pack_maps(
    records: Sequence[SampleRecord], manifest: Manifest, form: Maps, layers: Sequence[int], buffer: Tensor | None
) -> CodedSupervision:
    """A batch of maps, from the buffer that its records were read into, or a new one."""
    codes = [record.parts[blob_name(layer)] for layer in layers for record in records]
    if buffer is None:
        buffer = torch.from_numpy(np.concatenate([*codes, *row_blobs(records, manifest)]))
    columns = [form.column(layer) for layer in layers] if any(record.shapes for record in records) else []
    return CodedSupervision(
        buffer=buffer,
        lengths=tuple(record.length for record in records),
        layers=taught_layers(manifest, layers),
        num_student_heads=form.num_student_heads,
        codec=form.codec,
        support=form.support,
        temperature=form.bound_temperature,
        shapes=tuple(tuple(record.extent.shapes[column] for record in records) for column in columns),
        **find_rows(records, manifest, sum(map(len, codes))),
    )


def allocate_codes(size: int) -> Tensor:
    """Memory for the codes of a batch; in a worker of a ``DataLoader`` what it shares with the training process."""
    if get_worker_info() is None:
        # From 4 MB on NumPy asks the kernel for huge pages, as PyTorch does not: fewer page faults while they fill.
        return torch.from_numpy(np.empty(size, np.uint8))
    # As PyTorch's own collation does it: a tensor that is shared only afterwards is copied.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


CachedSupervision: TypeAlias = CodedSupervision | FactoredCodes
"""A batch of a cache of maps, or of queries and keys: both ``supervise`` and ``decode`` alike."""
