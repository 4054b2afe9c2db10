"""What teaches a batch, from a cache or a live teacher: its protocol, layers, and targets beside tensors.

The k likeliest classes of a row are stored in few bits (CACHE-164 to CACHE-166), which ``decode_rows`` takes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from shd_ref.cache import Attention, Logits, Manifest
from shd_ref.errors import need
from shd_torch.supervision.supervision import Supervision, tile_entries

Kinds: TypeAlias = tuple[tuple[str, int], ...]
Length: TypeAlias = int | Sequence[tuple[int, int]] | None
"""Positions to pad to; or rows and keys of each taught layer; None: of the longest sample."""
Call = TypeVar("Call")


class TaughtLayers(tuple[int, ...]):
    """Numbers of student layers, a tuple, with the number of layers that their teaching was made for.

    A layer map spreads the teacher over so many layers: for another student the same numbers would mean other depths.
    So a capture for these layers refuses a student that makes more or fewer attention calls.

    Args:
        numbers: zero-based, in any order.
        num_student_layers: L_s; None where explicit pairs say which layers are taught, in a student of any depth.
        kinds: of an encoder-decoder: how many calls of each kind of attention (``encoder``, ``decoder``, ``cross``)
            it was meant to make, in the order in which they are numbered; calls of other kinds are not taught.

    Source: section 3 (t = s * L_t / L_s). Specification: CACHE-104.
    """

    num_student_layers: int | None
    kinds: Kinds

    def __new__(cls, numbers: Iterable[int], num_student_layers: int | None = None, kinds: Kinds = ()) -> Self:
        self = super().__new__(cls, numbers)
        self.num_student_layers = num_student_layers
        self.kinds = kinds
        return self

    def __getnewargs__(self) -> tuple[tuple[int, ...], int | None, Kinds]:
        return tuple(self), self.num_student_layers, self.kinds

    def kind(self, number: int) -> str | None:
        """The kind of a student layer; None where there is one kind alone."""
        for kind, count in self.kinds:
            if number < count:
                return kind
            number -= count
        return None

    def order_calls(self, calls: Sequence[Call], kinds: Sequence[str], name: str) -> list[Call]:
        """The calls of a forward pass of a student ``name``, kind after kind; ``cache-mismatch`` for other counts."""
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys([*(kind for kind, _ in self.kinds), *kinds])}
        fits = all(counts[kind] == count for kind, count in self.kinds)
        meant, got = (", ".join(f"{kind}={n}" for kind, n in pairs) for pairs in (self.kinds, counts.items()))
        who, rule = f"a forward pass of {name}", f"make as many attention calls of each kind as its teaching, {meant}"
        advice = "precompute with --student-layers of this student's numbers"
        need(fits, "cache-mismatch", who, rule, got, remedy=advice, spec_id="CACHE-105")
        by_call = list(zip(calls, kinds, strict=True))
        return [call for taught_kind, _ in self.kinds for call, kind in by_call if kind == taught_kind]

    def check_calls(self, num_calls: int, name: str) -> None:
        """Refuse a student ``name`` of another depth than was meant: ``cache-mismatch``."""
        meant = None if self.kinds else self.num_student_layers
        rule = f"make {meant} attention calls, as its teaching was made for {meant} student layers"
        advice = f"precompute with --student-layers {num_calls} (a live teacher: layer_map={num_calls}), or with "
        advice += "--layer-pairs where some are not to be taught"
        who, fits = f"a forward pass of {name}", meant in (None, num_calls)
        need(fits, "cache-mismatch", who, rule, num_calls, remedy=advice, spec_id="CACHE-104")


def unite_layers(taught: Sequence[tuple[int, ...]]) -> TaughtLayers:
    """The layers that several teachers teach, ascending; ``cache-mismatch`` for students of different depths."""
    meant = {layers.num_student_layers for layers in taught if isinstance(layers, TaughtLayers)} - {None}
    counts = " and ".join(map(str, sorted(count for count in meant if count is not None)))
    rule, advice = (
        "be mapped to one number of student layers",
        "precompute, or make the live teacher, for this student",
    )
    need(len(meant) < 2, "cache-mismatch", "all teachers", rule, counts, remedy=advice, spec_id="CACHE-104")
    kinds = {layers.kinds for layers in taught if isinstance(layers, TaughtLayers)}
    rule, got = "number one set of attention kinds", " and ".join(map(str, sorted(kinds)))
    need(len(kinds) < 2, "cache-mismatch", "all teachers", rule, got, spec_id="CACHE-105")
    numbers = sorted({layer for layers in taught for layer in layers})
    return TaughtLayers(numbers, meant.pop() if meant else None, kinds.pop() if kinds else ())


def taught_layers(manifest: Manifest, numbers: Iterable[int] | None = None) -> TaughtLayers:
    """Some layers of a cache, by default all, with the student that its manifest was made for."""
    if numbers is None:
        if manifest.find(Attention) is None:
            return TaughtLayers(())
        numbers = manifest.attention.student_layers
    kinds = tuple((entry.kind, entry.num_student_layers) for entry in manifest.attention.kinds)
    return TaughtLayers(numbers, manifest.attention.num_student_layers, kinds)


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

    def supervise(self, length: Length = None) -> Sequence[Supervision]:
        """The maps, one for each of ``layers``; ``length`` may be rows and keys of each."""
        return ()

    def targets(self, length: int | None = None) -> Tensor | TopkTargets | None:
        """Logits as ``kd_loss`` takes them."""
        return None

    def hidden_states(self, length: int | None = None) -> Mapping[int, Tensor]:
        return {}

    def embeddings(self) -> EmbeddingTargets | None:
        return None

    def last_states(self, length: int | None = None) -> Tensor | None:
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
