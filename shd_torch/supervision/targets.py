"""What teaches a batch, from a cache or a live teacher: its protocol, and targets that are more than a tensor.

The k likeliest classes of a row are stored in few bits (CACHE-164 to CACHE-166), which ``decode_rows`` takes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shd_ref.cache import Logits
from shd_torch.supervision.supervision import Supervision, tile_entries


class TopkTargets(NamedTuple):
    """The k likeliest classes of every row, and the mass of all others in one number."""

    ids: Tensor  # (..., k), integers, ascending
    log_probs: Tensor  # (..., k), log P at the temperature
    log_tail: Tensor  # (...), log of the mass of all others; -inf where there are none
    temperature: float
    vocab_size: int


class EmbeddingTargets(NamedTuple):
    """The teacher's embeddings of a batch, and how a student's are made to compare (CACHE-182)."""

    vectors: Tensor  # (B, D)
    pooling: str  # "mean", "cls", "max" or "last"
    normalize: bool  # whether each was divided by its norm


class StoredRows(NamedTuple):
    """The rows of one form of a cache in a batch, as bytes: decode them, then spread them."""

    form: Any  # a subclass of Rows
    codes: dict[str, Tensor]  # (R, bytes), by the names of the parts that were read
    spread: Callable[[Tensor], Tensor]  # (R, ...) to (B, L, ...), zero where nothing is stored


class Taught:
    """What teaches a batch; a teacher overrides what it has. Rows are padded to ``length`` positions.

    Attributes:
        layers: student layers whose attention it teaches, zero-based.
    """

    layers: tuple[int, ...]

    def supervise(self, length: Any = None) -> Sequence[Supervision]:
        """The maps, one for each of ``layers``."""
        return ()

    def targets(self, length: int | None = None) -> Tensor | TopkTargets | None:
        """Logits as ``kd_loss`` takes them."""
        return None

    def hidden_states(self, length: int | None = None) -> Mapping[int, Tensor]:
        """Hidden states ``(B, L, D)`` by the teacher's number."""
        return {}

    def embeddings(self) -> EmbeddingTargets | None:
        """One vector a text."""
        return None

    def last_states(self, length: int | None = None) -> Tensor | None:
        """What the teacher's head reads, ``(B, L, D)``."""
        return None

    def stored_rows(self, subject: str, length: int | None = None) -> StoredRows | None:
        """The rows of any form of a cache."""
        return None


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
