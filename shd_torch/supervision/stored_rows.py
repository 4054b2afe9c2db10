"""The rows of logits and hidden states in a batch's buffer, beside its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.cache import Hidden, Logits, Manifest, StoredRecord
from shd_ref.errors import ShdError
from shd_torch.supervision.row_codes import decode_rows
from shd_torch.supervision.targets import SampledTargets, TopkTargets


@dataclass(frozen=True)
class StoredRows:
    """What the buffer holds after the codes of attention: logits, then hidden states layer by layer.

    Attributes:
        lengths: positions of each sample.
        firsts: positions of padding in front of each, which have no row.
        start: where the first row begins in the buffer.
        logits: form of the logits, where the buffer has some.
        hidden: form of the hidden states, with the layers that the buffer has; None without any.
        decoder: positions of each sample's second sequence, where a form has a row for each; else empty.
    """

    lengths: tuple[int, ...]
    firsts: tuple[int, ...]
    start: int
    logits: Logits | None = None
    hidden: Hidden | None = None
    decoder: tuple[int, ...] = ()

    def targets(self, buffer: Tensor, length: int | None) -> Tensor | TopkTargets | SampledTargets | None:
        """What ``kd_loss`` takes, on the buffer's device; see ``CodedSupervision.targets``."""
        form = self.logits
        if form is None:
            return None
        rows = self._rows(buffer, 0)
        place = self._place(form, length)
        if form.codec == "float16":
            return place.spread(_view(rows, torch.float16))
        assert form.temperature is not None  # it is None of float16 alone
        ids, by_slot, by_row = (place.spread(values) for values in decode_rows(form, rows))
        record = SampledTargets if form.draws else TopkTargets
        return record(ids, by_slot, by_row, form.temperature, form.vocab_size)

    def hidden_states(self, buffer: Tensor, length: int | None) -> dict[int, Tensor]:
        """By teacher's number ``(B, L, width)`` float32; see ``CodedSupervision.hidden_states``."""
        if self.hidden is None:
            return {}
        place = self._place(self.hidden, length)
        states = {}
        for number, each in enumerate(self.hidden.layers, start=self.logits is not None):
            rows = self._rows(buffer, number)
            if self.hidden.codec == "float16":
                values = _view(rows, torch.float16).float()
            else:
                values = rows[:, 4:].view(torch.int8) * rows[:, :4].contiguous().view(torch.float32)
            states[each.layer] = place.spread(values)
        return states

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each part."""
        return tuple(size for form in (self.logits, self.hidden) if form is not None for size in form.row_sizes)

    def _place(self, form: Logits | Hidden, length: int | None) -> _Place:
        """Where the rows of a form stand in a batch that is padded to a length."""
        by_sample, of_decoder = form.rows == "sample", form.rows == "decoder"
        lengths, firsts = (self.decoder, (0,) * len(self.decoder)) if of_decoder else (self.lengths, self.firsts)
        # A classifier's logits have no axis of positions, which a student's second axis would be taken for.
        return _Place(lengths, firsts, _check_length(lengths, None if by_sample else length), by_sample)

    def _rows(self, buffer: Tensor, part: int) -> Tensor:
        """A part as rows ``(R, bytes)``, a view of the buffer."""
        counts = [n - first for n, first in zip(self.lengths, self.firsts, strict=True)]
        of_kind = {"positions": sum(counts), "decoder": sum(self.decoder), "sample": len(counts)}
        forms = [form for form in (self.logits, self.hidden) if form is not None]
        numbers = [of_kind[form.rows] for form in forms for _ in form.row_sizes]
        sizes = [rows * size for rows, size in zip(numbers, self.row_sizes, strict=True)]
        starts = list(accumulate(sizes, initial=self.start))
        return buffer[starts[part] : starts[part + 1]].view(numbers[part], self.row_sizes[part])


def held_positions(lengths: Sequence[int], firsts: Sequence[int], length: int | None, device: torch.device) -> Tensor:
    """``(B, L)``, True where a sample has a position: from its first, if there are any, to its length."""
    positions = torch.arange(max(lengths) if length is None else length, device=device)
    mask = positions < torch.tensor(lengths, device=device)[:, None]
    if any(firsts):
        mask &= positions >= torch.tensor(firsts, device=device)[:, None]
    return mask


def _check_length(lengths: Sequence[int], length: int | None) -> int:
    longest = max(lengths)
    if length is not None and length < longest:
        raise ShdError(
            "argument-shape",
            f"length must be at least the longest sample's {longest}; got {length}: teacher and student must see "
            "the same positions",
        )
    return longest if length is None else length


def find_rows(records: Sequence[StoredRecord], manifest: Manifest, start: int) -> StoredRows | None:
    """Which rows the records of a batch were read with; None where with none.

    Args:
        records: of a batch, all read alike.
        manifest: of their cache.
        start: where their rows begin in the buffer.
    """
    hidden, held = manifest.hidden, records[0].hidden
    if records[0].logits is None and not held:
        return None
    if hidden is not None:
        kept = tuple(each for each in hidden.layers if each.layer in held)
        hidden = replace(hidden, layers=kept) if kept else None
    return StoredRows(
        lengths=tuple(record.length for record in records),
        firsts=tuple(record.first for record in records),
        start=start,
        logits=None if records[0].logits is None else manifest.logits,
        hidden=hidden,
        decoder=tuple(record.decoder for record in records) if manifest.has_decoder_rows else (),
    )


def row_blobs(records: Sequence[StoredRecord]) -> list[NDArray[np.uint8]]:
    """The bytes of those rows in the buffer's order: logits, then hidden states layer by layer."""
    blobs = [record.logits for record in records if record.logits is not None]
    return blobs + [record.hidden[layer] for layer in sorted(records[0].hidden) for record in records]


class BatchRows:
    """What a batch offers of the rows in its buffer, in every form of attention beside them."""

    buffer: Tensor
    rows: StoredRows | None

    def targets(self, length: int | None = None) -> Tensor | TopkTargets | SampledTargets | None:
        """The teacher's logits as ``kd_loss`` takes them, on the buffer's device; None where none were read.

        Args:
            length: L, to which shorter samples are padded; default: of the longest. Padded rows hold zeros: leave
                them out by ``loss_mask=query_mask(length)``, a decoder's by ``decoder_mask(length)``. A classifier's
                have no such axis.

        Returns:
            float16 ``(B, L, V)`` where all logits are stored, else the record of CACHE-164.

        Raises:
            ShdError: ``argument-shape`` for a length below the longest sample.
        """
        return None if self.rows is None else self.rows.targets(self.buffer, length)

    def hidden_states(self, length: int | None = None) -> dict[int, Tensor]:
        """Hidden states by the teacher's number, ``(B, L, width)`` float32; empty where none were read.

        Args:
            length: as for ``targets``.

        Raises:
            ShdError: ``argument-shape`` for a length below the longest sample.
        """
        return {} if self.rows is None else self.rows.hidden_states(self.buffer, length)

    def decoder_mask(self, length: int | None = None) -> Tensor | None:
        """``(B, L)``, True where a decoder's logits or hidden states are stored; None where neither are its rows."""
        if self.rows is None or not self.rows.decoder:
            return None
        return held_positions(self.rows.decoder, (), length, self.buffer.device)


@dataclass(frozen=True)
class _Place:
    """Where the rows of samples stand in a padded batch."""

    lengths: tuple[int, ...]
    firsts: tuple[int, ...]
    length: int
    by_sample: bool

    def spread(self, values: Tensor) -> Tensor:
        """``(R, ...)`` as ``(B, L, ...)``, zero where nothing is stored; of a classifier ``(B, ...)`` as it is."""
        if self.by_sample:
            return values
        shape = (len(self.lengths), self.length, *values.shape[1:])
        if len(values) == shape[0] * shape[1]:
            return values.view(shape)
        spread = values.new_zeros((shape[0] * shape[1], *values.shape[1:]))
        spans = zip(self.lengths, self.firsts, strict=True)
        spots = torch.cat([torch.arange(first, n) + self.length * b for b, (n, first) in enumerate(spans)])
        spread[spots.to(values.device, non_blocking=True)] = values
        return spread.view(shape)


def _view(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers; copied where they do not begin at a whole number of them."""
    return (rows.clone() if rows.storage_offset() % dtype.itemsize else rows).view(dtype)
