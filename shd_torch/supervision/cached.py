"""A batch of a cache: the records of its samples in one buffer, decoded where the student trains.

``pack_records`` puts the bytes of attention first, then the rows of all other forms, part by part. So a batch crosses
processes and devices as one tensor. The k likeliest classes of a row are stored in few bits (CACHE-164 to CACHE-166),
which ``decode_rows`` takes apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.cache import (
    Attention,
    Embeddings,
    Exact,
    Factors,
    Hidden,
    LayerFactors,
    Logits,
    Manifest,
    Maps,
    SampleRecord,
    packed_size,
)
from shd_ref.cache.forms.attention import blob_name
from shd_ref.cache.forms.rows import Rows
from shd_ref.errors import ShdError
from shd_ref.merging.plans import plan_groups
from shd_torch.supervision.coded import Coded, check_length
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import move
from shd_torch.supervision.supervision import (
    EmbeddingTargets,
    Length,
    StoredRows,
    Supervision,
    Taught,
    TaughtLayers,
    TopkTargets,
    tile_entries,
)


@dataclass(frozen=True)
class CachedSupervision(Taught):
    """A batch of a cache in one buffer, whatever its forms.

    Attention comes first: packed maps layer by layer, sample by sample (CACHE-125, CACHE-126), or of queries and keys
    the mixing matrices and steps of all layers and samples, then their codes (CACHE-140).
    """

    buffer: Tensor  # uint8: the codes of attention, then the rows of all other forms, part by part
    lengths: tuple[int, ...]  # positions of each sample
    # In the buffer's order; given to ``capture_attention``, they refuse a student of another depth than was meant.
    layers: TaughtLayers
    attention: Attention | None  # how the cache holds it; None where it holds none
    # By layer, rows and keys of each sample's maps, where these are not its positions (cross attention); else empty.
    shapes: tuple[tuple[tuple[int, int], ...], ...]
    firsts: tuple[int, ...]  # positions of padding in front of each sample, without a row; empty where there are none
    decoder: tuple[int, ...]  # positions of the second sequence, where a form has a row for each; else empty
    start: int  # where the first row begins in the buffer
    forms: tuple[Rows, ...]  # that have rows, in stored order
    names: frozenset[str]  # of their parts that the buffer holds

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return move(self, device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; a ``DataLoader`` with ``pin_memory=True`` calls this."""
        return replace(self, buffer=self.buffer.pin_memory())

    @property
    def counts(self) -> tuple[int, ...]:
        firsts = self.firsts or (0,) * len(self.lengths)
        return tuple(n - first for n, first in zip(self.lengths, firsts, strict=True))

    def query_mask(self, length: int | None = None) -> Tensor:
        """``(B, L)``, True where a sample has a position."""
        return positions_mask(self.lengths, self.firsts, length, self.buffer.device)

    def decoder_mask(self, length: int | None = None) -> Tensor | None:
        """``(B, L)``, True where a decoder's logits or hidden states are stored; None where neither are its rows."""
        return positions_mask(self.decoder, (), length, self.buffer.device) if self.decoder else None

    def stored_rows(self, subject: str, length: int | None = None) -> StoredRows | None:
        """The rows of a form, by its ``SUBJECT``, spread over ``length`` positions; None where none were read."""
        num_rows = {"positions": sum(self.counts), "decoder": sum(self.decoder), "sample": len(self.lengths)}
        start = self.start
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
        """Hidden states by the teacher's number, ``(B, L, width)`` float32; empty where none were read."""
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
        """The states that the teacher's head reads, ``(B, L, width)`` float32; None where none were read."""
        if (stored := self.stored_rows(Exact.SUBJECT, length)) is None:
            return None
        (codes,) = stored.codes.values()
        return _decode_vectors(stored, codes)

    def decode(self, length: Length = None, *, temperature: float = 1.0) -> list[Tensor]:
        """The merged maps, one tensor ``(B, H_s, L, S)`` a layer, on the buffer's device; padding is zero.

        Args:
            length: as for ``supervise``.
            temperature: the T_a that the loss will be called with, where the cache leaves it open.
        """
        return [layer.probs(temperature=layer.temperature or temperature) for layer in self.supervise(length)]

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

    def supervise(self, length: Length = None) -> Sequence[Supervision]:
        """The supervision of each layer for ``attention_kl``, whose maps are made a tile at a time, or never.

        Args:
            length: L to pad to, the student's sequence length; or rows and keys ``(L, S)`` of each layer, which are
                alike but for layers whose keys are of another sequence; default: of the longest sample. Padded rows
                do not count, and padded keys have no mass.

        Raises:
            ShdError: ``argument-shape`` for a length below the longest sample.
        """
        if isinstance(self.attention, Factors):
            return self._supervise_factors(self.attention, check_length(self.lengths, most_rows(length)))
        return self._supervise_maps(self.attention, length) if isinstance(self.attention, Maps) else []

    def _supervise_maps(self, form: Maps, length: Length) -> list[Coded]:
        length = length if self.shapes else most_rows(length)
        supervisions, start = [], 0
        for layer, shapes in enumerate(self.shapes or (tuple((n, n) for n in self.lengths),) * len(self.layers)):
            sizes = [packed_size(form.codec, form.support, form.num_student_heads, *shape) for shape in shapes]
            *starts, start = accumulate(sizes, initial=start)
            rows, keys = (tuple(side) for side in zip(*shapes, strict=True))
            if length is None:
                num_rows, num_keys = max(rows), max(keys)
            else:
                num_rows, num_keys = (length, length) if isinstance(length, int) else length[layer]
            if form.groups is not None and form.groups.startswith("patches:"):  # which nothing may pad
                rule = f"a student must have the {rows[0]} tokens of groups {form.groups}, as the cache was made"
                message = f"{rule}; got {num_rows}: count a class token in them too (patches:14x14:7x7:1)"
                if num_rows != rows[0]:
                    raise ShdError("cache-mismatch", message, "CACHE-131")
            supervisions.append(
                Coded(
                    self.buffer,
                    tuple(starts),
                    rows,
                    form.num_student_heads,
                    form.codec,
                    form.support,
                    num_rows,
                    form.temperature,
                    key_lengths=None if rows == keys and num_rows == num_keys else keys,
                    num_keys=num_keys,
                )
            )
        return supervisions

    def _supervise_factors(self, form: Factors, size: int) -> list[Factored]:
        num_heads, columns = form.num_teacher_heads, [form.column(layer) for layer in self.layers]
        mixing, steps, codes = self._sections(form, [form.factors[column] for column in columns])
        present = self.query_mask(size)
        padded = any(self.firsts) or any(n != size for n in self.lengths)
        row_mass = present[:, None].float().expand(-1, num_heads, -1) if padded else None
        supervision = []
        for number, column in enumerate(columns):
            factors = form.factors[column]
            heads = num_heads + factors.num_key_heads
            values = self._spread(codes[number], heads, factors.width, size)
            if steps is not None:
                values *= self._spread(steps[number], heads, 1, size)
            queries, keys = torch.split(values, [num_heads, factors.num_key_heads], dim=1)
            supervision.append(
                Factored(
                    queries,
                    keys,
                    mixing[number],
                    scale=factors.scale,
                    attn_mask=present[:, None, None] if padded else None,
                    is_causal=form.support == "causal",
                    window=factors.window,
                    # The mean merges all heads into each.
                    groups=None if form.strategy == "mean" else plan_groups(form.layer_plans[column], num_heads),
                    row_mass=row_mass,
                )
            )
        return supervision

    def _sections(
        self, form: Factors, layers: Sequence[LayerFactors]
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
        shape = (len(layers), len(self.lengths), form.num_student_heads, form.num_teacher_heads)
        vectors = [(form.num_teacher_heads + layer.num_key_heads) * sum(self.counts) for layer in layers]
        # Numbers of four bytes come first, so that every section is aligned.
        start = 4 * math.prod(shape)
        mixing = self.buffer[:start].view(torch.float32).view(shape)
        steps = None
        if form.codec == "int8":
            end = start + 4 * sum(vectors)
            steps = torch.split(self.buffer[start:end].view(torch.float32), vectors)
            start = end
        codes = self.buffer[start : self.start].view(torch.int8 if form.codec == "int8" else torch.float16)
        sizes = [n * layer.width for n, layer in zip(vectors, layers, strict=True)]
        return mixing, steps, torch.split(codes, sizes)

    def _spread(self, packed: Tensor, heads: int, width: int, size: int) -> Tensor:
        """Numbers, sample by sample, as float32 ``(B, heads, size, width)``, padded with zeros."""
        if all(n == size for n in self.counts):
            return packed.view(len(self.lengths), heads, size, width).to(torch.float32, copy=True)
        spread = torch.zeros(len(self.lengths), heads, size, width, device=packed.device)
        parts = torch.split(packed, [heads * n * width for n in self.counts])
        for target, block, n, count in zip(spread, parts, self.lengths, self.counts, strict=True):
            target[:, n - count : n].copy_(block.view(heads, count, width))
        return spread


def pack_records(
    records: Sequence[SampleRecord], manifest: Manifest, layers: Sequence[int], buffer: Tensor | None = None
) -> CachedSupervision:
    """The records of a batch, layer by layer; in a buffer that they were read into in this order, or a new one."""
    form = manifest.find(Attention)
    blobs = [] if form is None else _attention_blobs(records, form, layers)
    forms = tuple(rows for rows in manifest.forms if isinstance(rows, Rows))
    names = [part.name for rows in forms for part in rows.parts if part.name in records[0].parts]
    start = sum(map(len, blobs))
    if buffer is None:
        blobs += [record.parts[name] for name in names for record in records]
        buffer = torch.from_numpy(np.concatenate(blobs))
    firsts = tuple(record.first for record in records)
    columns = [] if form is None else [form.column(layer) for layer in layers]
    shapes = [tuple(record.extent.shapes[column] for record in records) for column in columns if records[0].shapes]
    return CachedSupervision(
        buffer=buffer,
        lengths=tuple(record.length for record in records),
        layers=taught_layers(manifest, None if form is None else layers),
        attention=form,
        shapes=tuple(shapes),
        firsts=firsts if any(firsts) else (),
        decoder=tuple(record.decoder for record in records) if names and manifest.has_decoder_rows else (),
        start=start,
        forms=forms,
        names=frozenset(names),
    )


def _attention_blobs(
    records: Sequence[SampleRecord], form: Attention, layers: Sequence[int]
) -> list[NDArray[np.uint8]]:
    codes = [[record.parts[blob_name(layer)] for record in records] for layer in layers]
    if not isinstance(form, Factors):
        return [blob for blobs in codes for blob in blobs]
    # Numbers of four bytes come first, so that every section is aligned: mixing and steps, then codes.
    mixing: list[Any] = []
    steps, vectors_codes = [], []
    for layer, blobs in zip(layers, codes, strict=True):
        column = form.column(layer)
        vectors = form.num_teacher_heads + form.factors[column].num_key_heads
        for record, blob in zip(records, blobs, strict=True):
            end = 4 * vectors * (record.length - record.first) if form.codec == "int8" else 0
            mixing.append(np.ascontiguousarray(record.parts["mixing"][column]).reshape(-1).view(np.uint8))
            steps.append(blob[:end])
            vectors_codes.append(blob[end:])
    return [*mixing, *steps, *vectors_codes]


def _decode_vectors(stored: StoredRows, codes: Tensor) -> Tensor:
    """Rows of bytes as float32 vectors (CACHE-177, CACHE-183)."""
    codec = stored.form.codec
    if codec == "int8":
        return stored.spread(codes[:, 4:].view(torch.int8) * codes[:, :4].contiguous().view(torch.float32))
    return stored.spread(view_rows(codes, torch.float32 if codec == "float32" else torch.float16).float())


def most_rows(length: Length) -> int | None:
    return max(rows for rows, _ in length) if isinstance(length, Sequence) else length


def positions_mask(lengths: Sequence[int], firsts: Sequence[int], length: int | None, device: torch.device) -> Tensor:
    """``(B, L)``, True where a sample has a position: from its first, if there are any, to its length."""
    positions = torch.arange(max(lengths) if length is None else length, device=device)
    mask = positions < torch.tensor(lengths, device=device)[:, None]
    if any(firsts):
        mask &= positions >= torch.tensor(firsts, device=device)[:, None]
    return mask


def taught_layers(manifest: Manifest, numbers: Iterable[int] | None = None) -> TaughtLayers:
    """Some layers of a cache, by default all, with the student that its manifest was made for."""
    if numbers is None:
        if manifest.find(Attention) is None:
            return TaughtLayers(())
        numbers = manifest.attention.student_layers
    kinds = tuple((entry.kind, entry.num_student_layers) for entry in manifest.attention.kinds)
    return TaughtLayers(numbers, manifest.attention.num_student_layers, kinds)


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
    log_head = torch.log(-torch.expm1(log_tail.clamp(max=-_TINY)))
    log_probs = torch.log(shares / shares.sum(-1, keepdim=True)) + log_head
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
