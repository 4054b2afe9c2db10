"""Merged maps as a supervision cache stores them, decoded a tile at a time where the student trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from shd_ref.cache import code_bits, packed_size
from shd_ref.errors import ShdError
from shd_torch.checks import check_probs
from shd_torch.supervision.supervision import ALL, Supervision

# Power of a code, and what code 1 stands for once it is raised (CACHE-115, CACHE-118).
_LAWS: dict[str, tuple[int, float]] = {"sqrt8-row": (2, 0.75), "u4": (3, 0.84375)}


class _Part(NamedTuple):
    """Neighbouring samples whose maps have one shape."""

    samples: slice
    codes: Tensor  # (samples, H_s, entries), or with two codes a byte (samples, bytes)
    length: int
    num_keys: int


@dataclass(frozen=True, eq=False)
class Coded(Supervision):
    """Merged maps as the bytes of a cache: a byte per entry, or less, until a tile is read (CACHE-125, CACHE-126).

    Raises:
        ShdError: ``argument-shape`` where a sample is longer than ``length``.
    """

    PER_SAMPLE: ClassVar[tuple[str, ...]] = ("starts", "lengths", "key_lengths", "counted")
    REMEDY: ClassVar[str] = "precompute with --temperature {:g}"

    buffer: Tensor  # uint8, one axis: the codes of one layer, sample by sample; may hold other layers as well
    starts: tuple[int, ...]  # where each sample's codes begin in it
    lengths: tuple[int, ...]  # positions of each sample
    num_student_heads: int
    codec: str  # of the cache (CACHE-110)
    support: str  # "full", or "causal" with only the lower triangle stored
    length: int  # L, to which shorter samples are padded; there rows are 0 and do not count
    temperature: float | None = None  # T_a of the cache; with None any that the loss is called with
    key_lengths: tuple[int, ...] | None = None  # of each sample, where keys are of another sequence than queries
    num_keys: int | None = None  # S, to which shorter samples are padded; by default L
    row_sums: str = "one"
    counted: Tensor | None = None  # boolean (B, L), True = the row counts, where a loss has said so (``drop_rows``)
    _parts: tuple[_Part, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_length(self.lengths, self.length)
        check_length(self.key_lengths or self.lengths, self.shape[3], "num_keys")
        # Views of the buffer, found once: a lazy property would take a lock, which no compiler follows.
        object.__setattr__(self, "_parts", tuple(self._find_parts()))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        num_keys = self.length if self.num_keys is None else self.num_keys
        return len(self.lengths), self.num_student_heads, self.length, num_keys

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        self.check_temperature(temperature)
        tile = decode_codes(self.codec, self._tile(rows, keys, torch.float32))
        return tile if self.counted is None else tile.masked_fill(~self.counted[:, None, rows, None], 0.0)

    def mass(self) -> Tensor:
        # Codes of float32 are stored as they were, not made to sum to one; other rows have mass where any code has.
        numbers = self.codec == "float32"
        sums = torch.zeros(self.shape[:3], device=self.device)
        for subset, samples, rows in self.tiles():
            tile = subset._tile(rows, subset.key_range(rows), torch.float32 if numbers else torch.uint8)
            sums[samples, :, rows] = tile.sum(-1) if numbers else (tile != 0).any(-1).float()
        return sums

    def drop_rows(self, loss_mask: Tensor) -> Self:
        # Only codes that are numbers themselves can be NaN.
        return replace(self, counted=loss_mask) if self.codec == "float32" else self

    def check(self, loss_mask: Tensor | None, layer: int) -> None:
        """Codes that are numbers themselves must be distributions; all others are by their decoding."""
        if self.codec != "float32":
            return
        counted = self if loss_mask is None else self.drop_rows(loss_mask)
        softened = 1.0 if self.temperature is None else self.temperature  # the one temperature that codes are read at
        for subset, _, rows in counted.tiles():
            check_probs(subset.probs(rows, temperature=softened), "supervision", check=True, layer=layer)

    def key_range(self, rows: slice) -> slice:
        last = self.shape[3] if self.support == "full" else rows.indices(self.length)[1]
        return slice(0, last)

    def _find_parts(self) -> Iterator[_Part]:
        """The codes as tensors; views of the buffer wherever a code fills whole bytes."""
        first = 0
        key_lengths = self.lengths if self.key_lengths is None else self.key_lengths
        while first < len(self.lengths):
            length, keys = self.lengths[first], key_lengths[first]
            size = packed_size(self.codec, self.support, self.num_student_heads, length, keys)
            numbers = range(len(self.lengths) - first)
            expected = [(self.starts[first] + number * size, length, keys) for number in numbers]
            places = zip(self.starts[first:], self.lengths[first:], key_lengths[first:], strict=True)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(places, expected, strict=True)))
            start, end = self.starts[first], self.starts[first] + count * size
            codes = self.buffer[start:end]
            if self.codec == "float32":
                codes = codes.view(torch.float32)
            codes = codes.view(count, -1)
            if code_bits(self.codec) != 4:
                codes = codes.view(count, self.num_student_heads, -1)
            yield _Part(slice(first, first + count), codes, length, keys)
            first += count

    def _read_rows(self, part: _Part, top: int, bottom: int) -> Tensor:
        """The stored codes of some rows of a part, ``(samples, H_s, entries)``; a view unless two are in a byte."""
        full, codes = self.support == "full", part.codes
        first, last = (top * part.num_keys, bottom * part.num_keys) if full else (_triangle(top), _triangle(bottom))
        if codes.ndim == 3:
            return codes[..., first:last]
        entries = part.length * part.num_keys if full else _triangle(part.length)
        heads = []
        for head in range(self.num_student_heads):
            start, end = head * entries + first, head * entries + last
            stored = codes[:, start // 2 : (end + 1) // 2]
            # The earlier one is in the lower half; a row need not begin with a byte.
            pairs = torch.stack([stored & 0x0F, stored >> 4], dim=-1).view(stored.shape[0], -1)
            heads.append(pairs[:, start % 2 : start % 2 + last - first])
        return torch.stack(heads, dim=1)

    def _tile(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        top, bottom, _ = rows.indices(self.length)
        left, right, _ = keys.indices(self.shape[3])
        part = self._parts[0]
        is_filled = (
            len(self._parts) == 1 and bottom <= part.length and right <= part.num_keys and self.support == "full"
        )
        shape = (*self.shape[:2], bottom - top, right - left)
        # Zeros are written only where nothing else will be.
        tile = (torch.empty if is_filled else torch.zeros)(shape, dtype=dtype, device=self.device)
        for part in self._parts:
            length, end = part.num_keys, min(bottom, part.length)
            if top >= end:
                continue
            codes = self._read_rows(part, top, end)
            stored = tile[part.samples, :, : end - top, : max(0, length - left)]
            if self.support == "full":
                stored.copy_(codes.view(*codes.shape[:2], end - top, length)[..., left:right])
            elif codes.is_cpu:
                # A row at a time is five times faster here than an index for every entry.
                for row in range(top, end):
                    start = _triangle(row) - _triangle(top)
                    stored[:, :, row - top, : max(0, row + 1 - left)].copy_(
                        codes[:, :, start + left : start + min(right, row + 1)]
                    )
            else:
                lines = torch.arange(top, end, device=codes.device)[:, None]
                columns = torch.arange(left, min(right, length), device=codes.device)
                places = (lines * (lines + 1) // 2 - _triangle(top) + columns).clamp_(max=codes.shape[2] - 1)
                stored.copy_(codes[:, :, places].masked_fill_(columns > lines, 0))
        return tile


def _triangle(rows: int) -> int:
    return rows * (rows + 1) // 2


def check_length(lengths: Sequence[int], length: int | None, name: str = "length") -> int:
    """The length to pad to, by default that of the longest sample."""
    longest = max(lengths)
    if length is not None and length < longest:
        rule = f"{name} must be at least the longest sample's {longest}"
        raise ShdError("argument-shape", f"{rule}; got {length}: teacher and student must see the same positions")
    return longest if length is None else length


def decode_codes(codec: str, codes: Tensor) -> Tensor:
    """Whole rows of codes, as float32 numbers, to probabilities in place (CACHE-112, -115, -118)."""
    if codec == "float32":
        return codes
    power, centroid = _LAWS[codec]
    codes.pow_(power)
    # 1 becomes the centroid of its bin, 0 and more than 2 stay exactly as they are, and no second tile is made.
    torch.nn.functional.leaky_relu_(codes.sub_(2.0), 2.0 - centroid)
    codes.clamp_min_(-2.0).add_(2.0)
    return codes.mul_(codes.sum(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_())
