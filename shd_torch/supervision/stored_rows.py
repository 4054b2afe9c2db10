"""A batch of a cache, and the rows of its other forms in its buffer, beside its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.cache import Embeddings, Exact, Hidden, Logits, Manifest, SampleRecord
from shd_ref.cache.forms.rows import Rows
from shd_torch.supervision.coded import check_length
from shd_torch.supervision.mask import move
from shd_torch.supervision.supervision import tile_entries
from shd_torch.supervision.targets import EmbeddingTargets, StoredRows, Taught, TopkTargets


@dataclass(frozen=True)
class CachedBatch(Taught):
    """A batch of a cache in one buffer, whatever its form of attention.

    Attributes:
        buffer: uint8: the codes of attention, then the rows of all other forms, part by part.
        lengths: positions of each sample.
        layers: student layers in the buffer's order; give it to ``capture_attention``, which then refuses a student
            with another number of layers than the cache was made for. None of a cache without attention.
        num_student_heads: H_s.
        codec: of the attention.
        support: ``"full"`` or ``"causal"``.
        firsts: positions of padding in front of each sample, which have no row; empty where no sample has any.
        decoder: positions of each sample's second sequence, where a form has a row for each; else empty.
        start: where the first row begins in the buffer; None where there are no rows.
        forms: that have rows, in stored order.
        names: of their parts that the buffer holds.
    """

    buffer: Tensor
    lengths: tuple[int, ...]
    layers: tuple[int, ...]
    num_student_heads: int
    codec: str
    support: str
    firsts: tuple[int, ...] = field(default=(), kw_only=True)
    decoder: tuple[int, ...] = field(default=(), kw_only=True)
    start: int | None = field(default=None, kw_only=True)
    forms: tuple[Rows, ...] = field(default=(), kw_only=True)
    names: frozenset[str] = field(default=frozenset(), kw_only=True)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy on another device."""
        return move(self, device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; a ``DataLoader`` with ``pin_memory=True`` calls this."""
        return replace(self, buffer=self.buffer.pin_memory())

    @property
    def counts(self) -> tuple[int, ...]:
        """Positions of each sample without padding in front: those that the buffer holds."""
        firsts = self.firsts or (0,) * len(self.lengths)
        return tuple(n - first for n, first in zip(self.lengths, firsts, strict=True))

    def query_mask(self, length: int | None = None) -> Tensor:
        """``(B, L)``, True where a sample has a position."""
        return held_positions(self.lengths, self.firsts, length, self.buffer.device)

    def decoder_mask(self, length: int | None = None) -> Tensor | None:
        """``(B, L)``, True where a decoder's logits or hidden states are stored; None where neither are its rows."""
        return held_positions(self.decoder, (), length, self.buffer.device) if self.decoder else None

    def stored_rows(self, subject: str, length: int | None = None) -> StoredRows | None:
        """The rows of a form, by its ``SUBJECT``, to be spread over ``length`` positions; None where none were read.

        Raises:
            ShdError: ``argument-shape`` for a length, as for ``targets``, below the longest sample; when rows spread.
        """
        num_rows = {"positions": sum(self.counts), "decoder": sum(self.decoder), "sample": len(self.lengths)}
        start = self.start or 0
        for form in self.forms:
            codes: dict[str, Tensor] = {}
            for part, size in zip(form.parts, form.row_sizes, strict=True):
                if part.name in self.names:
                    count = num_rows[form.rows]
                    codes[part.name] = self.buffer[start : start + count * size].view(count, size)
                    start += count * size
            if subject == form.SUBJECT:
                return StoredRows(form, codes, partial(self._pad_rows, form, length)) if codes else None
        return None

    def targets(self, length: int | None = None) -> Tensor | TopkTargets | None:
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
        if (stored := self.stored_rows(Logits.SUBJECT, length)) is None:
            return None
        form, (codes,) = stored.form, stored.codes.values()
        if form.codec == "float16":
            return stored.spread(view_rows(codes, torch.float16))
        ids, log_probs, log_tail = map(stored.spread, decode_rows(form, codes))
        return TopkTargets(ids, log_probs, log_tail, form.temperature, form.vocab_size)

    def hidden_states(self, length: int | None = None) -> dict[int, Tensor]:
        """Hidden states by the teacher's number, ``(B, L, width)`` float32; empty where none were read.

        Raises:
            ShdError: ``argument-shape`` for a length, as for ``targets``, below the longest sample.
        """
        if (stored := self.stored_rows(Hidden.SUBJECT, length)) is None:
            return {}
        layers = {part.name: part.layer for part in stored.form.parts}
        return {layers[name]: _decode_vectors(stored, codes) for name, codes in stored.codes.items()}

    def embeddings(self) -> EmbeddingTargets | None:
        """The teacher's embedding of each text, with how it was pooled; None where none were read."""
        if (stored := self.stored_rows(Embeddings.SUBJECT)) is None:
            return None
        (codes,) = stored.codes.values()
        return EmbeddingTargets(_decode_vectors(stored, codes), stored.form.pooling, stored.form.normalize)

    def last_states(self, length: int | None = None) -> Tensor | None:
        """What the teacher's head reads, ``(B, L, width)`` float32, for ``ExactTargets``; None where none were read.

        Raises:
            ShdError: ``argument-shape`` for a length, as for ``targets``, below the longest sample.
        """
        if (stored := self.stored_rows(Exact.SUBJECT, length)) is None:
            return None
        (codes,) = stored.codes.values()
        return _decode_vectors(stored, codes)

    def _pad_rows(self, form: Rows, length: int | None, values: Tensor) -> Tensor:
        """``(R, ...)`` as ``(B, L, ...)``, zero where nothing is stored; one row per sample stays as it is.

        A classifier's logits have no axis of positions, which a student's second axis would be taken for.
        """
        if form.rows == "sample":
            return values
        lengths, counts = (self.decoder, self.decoder) if form.rows == "decoder" else (self.lengths, self.counts)
        size = check_length(lengths, length)
        shape = (len(lengths), size, *values.shape[1:])
        if len(values) == shape[0] * size:
            return values.view(shape)
        spread = values.new_zeros((shape[0] * size, *values.shape[1:]))
        spans = enumerate(zip(counts, lengths, strict=True))
        spots = torch.cat([torch.arange(n - count, n) + size * number for number, (count, n) in spans])
        spread[spots.to(values.device, non_blocking=True)] = values
        return spread.view(shape)


def _decode_vectors(stored: StoredRows, codes: Tensor) -> Tensor:
    """Rows of bytes as float32 vectors (CACHE-177, CACHE-183)."""
    codec = stored.form.codec
    if codec == "int8":
        return stored.spread(codes[:, 4:].view(torch.int8) * codes[:, :4].contiguous().view(torch.float32))
    return stored.spread(view_rows(codes, torch.float32 if codec == "float32" else torch.float16).float())


def held_positions(lengths: Sequence[int], firsts: Sequence[int], length: int | None, device: torch.device) -> Tensor:
    """``(B, L)``, True where a sample has a position: from its first, if there are any, to its length."""
    positions = torch.arange(max(lengths) if length is None else length, device=device)
    mask = positions < torch.tensor(lengths, device=device)[:, None]
    if any(firsts):
        mask &= positions >= torch.tensor(firsts, device=device)[:, None]
    return mask


def find_firsts(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """The field of a ``CachedBatch`` for positions of padding in front, where any sample has some."""
    firsts = tuple(record.first for record in records)
    return {"firsts": firsts} if any(firsts) else {}


def find_rows(records: Sequence[SampleRecord], manifest: Manifest, start: int) -> dict[str, Any]:
    """Fields of a ``CachedBatch`` for the rows that its records were read with, from a byte of its buffer on."""
    forms = tuple(form for form in manifest.forms if isinstance(form, Rows))
    names = {part.name for form in forms for part in form.parts} & records[0].parts.keys()
    if not names:
        return {}
    decoder = tuple(record.decoder for record in records) if manifest.has_decoder_rows else ()
    return find_firsts(records) | {"decoder": decoder, "start": start, "forms": forms, "names": frozenset(names)}


def row_blobs(records: Sequence[SampleRecord], manifest: Manifest) -> list[NDArray[np.uint8]]:
    """The bytes of those rows in the buffer's order: form by form, part by part."""
    names = [part.name for form in manifest.forms if isinstance(form, Rows) for part in form.parts]
    return [record.parts[name] for name in names if name in records[0].parts for record in records]


def view_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers; copied where they do not begin at a whole number of them."""
    return (rows.clone() if rows.storage_offset() % dtype.itemsize else rows).view(dtype)


_TINY = 2.0**-25  # what float16 rounds to nothing: a tail that close to one leaves at least this to the head


def decode_rows(form: Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first three fields of ``TopkTargets`` of rows of bytes (CACHE-164 to CACHE-166).

    Bytes that no encoder makes give numbers that mean nothing, within the vocabulary; a reader has compared their
    checksums, and the loss looks at its first targets.
    """
    together = max(tile_entries(rows.device) // (8 * rows.shape[1]), 1)  # bits are unpacked to a number each
    parts = [_decode(form, block) for block in torch.split(rows, together)]
    ids, log_probs, log_tail = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, log_probs, log_tail


def _decode(form: Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_tail = rows[:, :2].contiguous().view(torch.float16).double()
    codes_end = 2 + -(-form.head * form.value_bits // 8)
    codes = _unpack(rows[:, 2:codes_end], form.head, form.value_bits)
    shares = (codes.double() / ((1 << form.value_bits) - 1)).pow(3)
    # log(1 - exp(log_tail)), stable: what the tail leaves is shared out by the codes.
    rest = torch.log(-torch.expm1(log_tail.clamp(max=-_TINY)))
    log_probs = torch.log(shares / shares.sum(-1, keepdim=True)) + rest
    ids = _unpack_ids(rows[:, codes_end:], form.head, form.vocab_size)
    return ids, log_probs.float(), log_tail[:, 0].float()


def _unpack_ids(rows: Tensor, count: int, vocab_size: int) -> Tensor:
    """Ascending ids by Elias and Fano: low bits side by side, then a one at ``i + (id >> low)`` for each id."""
    low = max(vocab_size // count, 1).bit_length() - 1
    start = -(-count * low // 8)
    eight = torch.arange(8, device=rows.device, dtype=torch.uint8)
    bits = ((rows[:, start:, None] >> eight) & 1).flatten(1)
    # Where the running number of ones reaches i + 1 stands the i-th of them.
    numbers = torch.arange(count, device=rows.device, dtype=torch.int32)
    ordinals = (numbers + 1).expand(len(rows), count).contiguous()
    places = torch.searchsorted(bits.cumsum(-1, dtype=torch.int32), ordinals)
    ids = ((places - numbers) << low) | _unpack(rows[:, :start], count, low)
    # An index beyond the vocabulary would end a process on a GPU.
    return ids.clamp_(max=vocab_size - 1)


def _unpack(rows: Tensor, count: int, width: int) -> Tensor:
    """``(R, count)`` numbers of ``width`` bits, at most 24, side by side from the lowest bit up."""
    if not width:
        return torch.zeros((len(rows), count), dtype=torch.int64, device=rows.device)
    first = torch.arange(count, device=rows.device) * width
    byte, shift = first >> 3, first & 7
    numbers = torch.zeros((len(rows), count), dtype=torch.int64, device=rows.device)
    for step in range((width + 14) // 8):  # the bytes that a number may touch
        # Beyond the last byte nothing of a number stands.
        numbers |= rows[:, (byte + step).clamp(max=rows.shape[1] - 1)].long() << (8 * step)
    return (numbers >> shift) & ((1 << width) - 1)
