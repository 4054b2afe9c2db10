"""The supervision of a student: merged maps A~ behind one small interface, and ``Dense``, which holds them.

At its end the supervision of a batch: its layers, and its targets besides maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_torch.checks import (
    ROW_SUMS,
    check_option,
    check_probs,
    check_real,
    check_temperature,
    compute_dtype,
    without_autocast,
)
from shd_torch.maps.support import id_groups, pool_tokens
from shd_torch.supervision.mask import expand_heads, move

TILE_ENTRIES = 2**19
"""Entries of the largest tile that is formed at once on a processor: its cache holds a few of them."""

ACCELERATOR_TILE_ENTRIES = 2**23
"""``TILE_ENTRIES`` of an accelerator: a kernel over fewer entries ends before the next one can be launched."""

ALL: slice = slice(None)


def tile_entries(device: torch.device) -> int:
    return TILE_ENTRIES if device.type == "cpu" else ACCELERATOR_TILE_ENTRIES


class Supervision(ABC):
    """Merged maps A~ ``(B, H_s, L, S)`` that need not exist.

    Attributes:
        row_sums: ``"one"``, or ``"at_most_one"`` where rows have less mass, as with attention sinks (LOSS-10).
        temperature: T_a that the maps were softened with before mixing; None for any that the loss is called with.
        PER_SAMPLE: names of the fields with an entry for each sample.
        REMEDY: what to do where another temperature is needed.
    """

    PER_SAMPLE: ClassVar[tuple[str, ...]]
    REMEDY: ClassVar[str] = "softening a mixture is not mixing softened maps"
    row_sums: str
    temperature: float | None = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H_s, L, S)``."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it lies."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of ``probs``: float64 or float32."""

    @property
    def num_heads(self) -> int:
        return self.shape[1]

    @abstractmethod
    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        """A tile of the maps, without gradient.

        Args:
            rows: query rows.
            keys: keys; those outside of it must have no mass in these rows (see ``key_range``).
            temperature: T_a > 0 (TEMP-2, TEMP-5).

        Returns:
            ``(B, H_s, R, K)``.
        """

    @abstractmethod
    def mass(self) -> Tensor:
        """The sum of each row, ``(B, H_s, L)``; 0 where a row does not count. The same at every temperature."""

    def samples(self, start: int, stop: int) -> Self:
        record: Any = self
        by_sample = {name: value for name in self.PER_SAMPLE if (value := getattr(record, name)) is not None}
        return replace(record, **{name: value[start:stop] for name, value in by_sample.items()})  # type: ignore[no-any-return]

    def drop_rows(self, loss_mask: Tensor) -> Self:
        """A copy for a loss that does not count some rows: they may hold anything, but make no sum NaN.

        Args:
            loss_mask: boolean ``(B, L)``, True = the row counts; on the same device.
        """
        return self

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return move(self, device, non_blocking=non_blocking)

    @abstractmethod
    def check(self, loss_mask: Tensor | None, layer: int) -> None:
        """Check the values, which costs a device sync.

        Args:
            loss_mask: boolean ``(B, L)``, True = the row counts; others may hold anything. None: all count.
            layer: named in errors.

        Raises:
            ShdError: ``not-finite``, ``not-a-distribution``, ``mixing-invalid``.
        """

    def key_range(self, rows: slice) -> slice:
        """Keys outside of which these rows are known to have no mass."""
        return slice(0, self.shape[3])

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that the maps were not made for: ``argument-value``."""
        if self.temperature is not None and temperature != self.temperature:
            rule = f"temperature must be {self.temperature:g}, which the maps were softened with before mixing"
            remedy = self.REMEDY.format(temperature)
            raise ShdError("argument-value", f"{rule}; got {temperature:g}: {remedy}", "TEMP-2")

    def tiles(self) -> Iterator[tuple[Self, slice, slice]]:
        """Tiles that cover the maps: the supervision of some samples, which samples, and which rows."""
        batch, heads, num_rows, num_keys = self.shape
        entries = tile_entries(self.device)
        least = min(num_rows, 64)  # rows that make a matrix product worth its call
        together = max(1, min(batch, entries // (heads * least * num_keys)))
        # Keys are read once a tile: few rows, and a product waits for them.
        height = max(min(num_rows, 32), entries // (together * heads * num_keys))
        for first in range(0, batch, together):
            samples = slice(first, min(first + together, batch))
            subset = self if together == batch else self.samples(samples.start, samples.stop)
            # Of a triangle the largest tile comes first: the allocator then has memory that the others fit into.
            for start in reversed(range(0, num_rows, height)):
                yield subset, samples, slice(start, min(start + height, num_rows))

    @without_autocast
    def apply_to(self, vectors: Tensor, *, temperature: float = 1.0) -> Tensor:
        """``A~ v`` ``(B, H_s, L, d)``, float64 or float32, without gradient.

        The vectors are ``(B, H_s, S, d)``, or ``(B, H_kv, S, d)`` with H_kv a divisor of H_s.
        """
        dtype = compute_dtype(vectors)
        vectors = expand_heads(vectors.detach(), self.num_heads).to(dtype)
        result = vectors.new_empty((*self.shape[:3], vectors.shape[3]))
        for subset, samples, rows in self.tiles():
            keys = subset.key_range(rows)
            probs = subset.probs(rows, keys, temperature=temperature).to(dtype)
            result[samples, :, rows] = probs @ vectors[samples, :, keys]
        return result

    @without_autocast
    def products(self, vectors: Tensor, weighted: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``A~ v`` and ``A~^T y``, the two products that a gradient needs, without gradient, float64 or float32.

        v is ``(B, H_s, S, d)``, in whose float16 the products may be made, and y, ``weighted``, ``(B, H_s, L, d)``.
        """
        dtype = compute_dtype(vectors)
        vectors, weighted = vectors.detach().to(dtype), weighted.detach().to(dtype)
        forward = vectors.new_empty((*self.shape[:3], vectors.shape[3]))
        transposed = torch.zeros_like(vectors)
        for subset, samples, rows in self.tiles():
            keys = subset.key_range(rows)
            probs = subset.probs(rows, keys, temperature=temperature).to(dtype)
            forward[samples, :, rows] = probs @ vectors[samples, :, keys]
            transposed[samples, :, keys] += probs.mT @ weighted[samples, :, rows]
        return forward, transposed


@dataclass(frozen=True, eq=False)
class Dense(Supervision):
    """Merged maps as they were cached or computed.

    Attributes:
        maps: A~ ``(B, H_s, L, S)``, in any floating-point dtype.
        temperature: T_a that they were softened with before mixing; None for any that the loss is called with.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks.
        counted: boolean ``(B, L)``, True = the row counts, where a loss has said so (``drop_rows``).

    Raises:
        ShdError: ``argument-shape``, ``argument-dtype``, ``argument-value``.

    Source: MAP-3, MAP-9.
    """

    PER_SAMPLE: ClassVar[tuple[str, ...]] = ("maps", "counted")

    maps: Tensor
    temperature: float | None = None
    row_sums: str = "one"
    counted: Tensor | None = None

    def __post_init__(self) -> None:
        check_option("row_sums", self.row_sums, ROW_SUMS, "MAP-9")
        check_real(self.maps, "maps", check=False, ndim=4)
        if self.temperature is not None:
            check_temperature(self.temperature)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, rows, keys = self.maps.shape
        return batch, heads, rows, keys

    @property
    def device(self) -> torch.device:
        return self.maps.device

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.maps)

    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        self.check_temperature(temperature)
        tile = self.maps.detach()[:, :, rows, keys].to(self.dtype)
        return tile if self.counted is None else tile.masked_fill(~self.counted[:, None, rows, None], 0.0)

    def mass(self) -> Tensor:
        return self.maps.detach().sum(-1, dtype=self.dtype)

    def drop_rows(self, loss_mask: Tensor) -> Self:
        return replace(self, counted=loss_mask)

    def check(self, loss_mask: Tensor | None, layer: int) -> None:
        maps = self.maps if loss_mask is None else self.maps.masked_fill(~loss_mask[:, None, :, None], 0)
        check_probs(maps, "supervision", check=True, layer=layer, row_sums=self.row_sums)


@torch.no_grad()
def pool_supervision(
    supervision: Supervision,
    groups: Tensor,
    num_tokens: int,
    *,
    query_mask: Tensor | None,
    temperature: float,
    check: bool,
) -> Dense:
    """Maps over a student's ``num_tokens``, which ``groups`` say as for ``layer_kls``; whole ones exist for a moment.

    ``query_mask`` ``(B, L)`` is over the teacher's tokens. ``argument-shape``, ``argument-value``.
    """
    groups = groups.detach().to(supervision.device)
    if not groups.is_floating_point():
        if check and int(groups.max()) >= num_tokens:
            rule = f"groups must be numbers below {num_tokens}, the tokens of the student's layer"
            raise ShdError("argument-value", f"{rule}; got {int(groups.max())}", "TOKEN-11")
        groups = id_groups(groups, num_tokens)
    maps = supervision.probs(temperature=temperature)
    query_mask = None if query_mask is None else query_mask.to(maps.device)
    options: dict[str, Any] = {"query_mask": query_mask, "row_sums": supervision.row_sums, "check": check}
    pooled = pool_tokens(maps, groups, groups, **options).probs
    return Dense(pooled, temperature, supervision.row_sums)


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
        expected, got = (", ".join(f"{kind}={n}" for kind, n in pairs) for pairs in (self.kinds, counts.items()))
        who, rule = (
            f"a forward pass of {name}",
            f"make as many attention calls of each kind as its teaching, {expected}",
        )
        advice = "precompute with --student-layers of this student's numbers"
        need(fits, "cache-mismatch", who, rule, got, remedy=advice, spec_id="CACHE-105")
        by_call = list(zip(calls, kinds, strict=True))
        return [call for taught_kind, _ in self.kinds for call, kind in by_call if kind == taught_kind]

    def check_calls(self, num_calls: int, name: str) -> None:
        """Refuse a student ``name`` of another depth than was meant: ``cache-mismatch``."""
        depth = None if self.kinds else self.num_student_layers
        rule = f"make {depth} attention calls, as its teaching was made for {depth} student layers"
        advice = f"precompute with --student-layers {num_calls} (a live teacher: layer_map={num_calls}), or with "
        advice += "--layer-pairs where some are not to be taught"
        who, fits = f"a forward pass of {name}", depth in (None, num_calls)
        need(fits, "cache-mismatch", who, rule, num_calls, remedy=advice, spec_id="CACHE-104")


def unite_layers(layer_lists: Sequence[tuple[int, ...]]) -> TaughtLayers:
    """The layers that several teachers teach, ascending; ``cache-mismatch`` for students of different depths."""
    depths = {layers.num_student_layers for layers in layer_lists if isinstance(layers, TaughtLayers)} - {None}
    counts = " and ".join(map(str, sorted(count for count in depths if count is not None)))
    rule, advice = (
        "be mapped to one number of student layers",
        "precompute, or make the live teacher, for this student",
    )
    need(len(depths) < 2, "cache-mismatch", "all teachers", rule, counts, remedy=advice, spec_id="CACHE-104")
    kinds = {layers.kinds for layers in layer_lists if isinstance(layers, TaughtLayers)}
    rule, got = "number one set of attention kinds", " and ".join(map(str, sorted(kinds)))
    need(len(kinds) < 2, "cache-mismatch", "all teachers", rule, got, spec_id="CACHE-105")
    numbers = sorted({layer for layers in layer_lists for layer in layers})
    return TaughtLayers(numbers, depths.pop() if depths else None, kinds.pop() if kinds else ())


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
    """The supervision of a batch; a teacher overrides the forms that it has. Rows are padded to ``length`` positions.

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
