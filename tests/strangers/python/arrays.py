"""Arrays as flat lists, errors with codes, and the checks of chapter MAP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NoReturn

DEGENERATE = 1e-10
ROW_SUM = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}
Row = list[float]
Rows = list[Row]


class ShdError(Exception):
    """Bad input, with the stable code of ERR-2."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def fail(code: str, message: str) -> NoReturn:
    raise ShdError(code, message)


@dataclass(frozen=True)
class Array:
    """Entries in order, the last axis fastest."""

    shape: tuple[int, ...]
    data: list[Any]
    dtype: str = "float64"

    def row(self, *index: int) -> list[Any]:
        """The last axis at an index of all axes but the last."""
        start = 0
        for i, size in zip(index, self.shape, strict=False):
            start = start * size + i
        width = self.shape[-1]
        return self.data[start * width : (start + 1) * width]

    def block(self, *index: int) -> list[list[Any]]:
        """The last two axes, as rows, at an index of the others."""
        return [self.row(*index, i) for i in range(self.shape[-2])]

    def positions(self) -> Iterator[tuple[int, ...]]:
        """All indices of the axes but the last, in order."""
        return indices(self.shape[:-1])


def indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for head in range(shape[0]):
        for rest in indices(shape[1:]):
            yield (head, *rest)


def pack(nested: Any, shape: Sequence[int]) -> Array:
    """Nested lists of a known shape as an array."""
    flat = nested
    for _ in range(len(shape) - 1):
        flat = [entry for part in flat for entry in part]
    return Array(tuple(shape), list(flat))


def dot(x: Row, y: Row) -> float:
    return sum(map(mul, x, y))


def flatten(rows: Rows) -> Row:
    return [entry for row in rows for entry in row]


def matmul(left: Rows, right: Rows) -> Rows:
    columns = list(zip(*right, strict=True))
    return [[sum(map(mul, row, column)) for column in columns] for row in left]


def add(x: Rows, y: Rows, a: float = 1.0, b: float = 1.0) -> Rows:
    """``a x + b y``."""
    return [[a * u + b * v for u, v in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)]


def real(array: Any, name: str, axes: int | None = None, *, minus_inf: bool = False) -> Array:
    """MAP-5, and the number of axes (MAP-4)."""
    if not isinstance(array, Array):
        if isinstance(array, int | float) and not isinstance(array, bool):
            array = Array((), [float(array)])
        else:
            fail("argument-dtype", f"{name} is not an array of real numbers")
    if array.dtype not in ROW_SUM and not array.dtype.startswith(("int", "uint")):
        fail("argument-dtype", f"{name} holds {array.dtype}")
    if axes is not None and len(array.shape) != axes:
        fail("argument-shape", f"{name} has {len(array.shape)} axes, not {axes}")
    for at, entry in enumerate(array.data):
        if not math.isfinite(entry) and not (minus_inf and entry == -math.inf):
            where = []
            for size in reversed(array.shape):
                where.append(at % size)
                at //= size
            labels = ["sample", "head"] if len(array.shape) >= 4 else ["sample"]
            place = ", ".join(f"{label} {i}" for label, i in zip(labels, reversed(where), strict=False))
            fail("not-finite", f"{name}: {entry} at {place}, index {where[::-1]}")
    return array


def row_mask(mask: Any, batch: int, length: int, name: str) -> list[list[bool]]:
    """MAP-7: a mask ``(B, L)``; none means that every row counts."""
    if mask is None:
        return [[True] * length for _ in range(batch)]
    if not isinstance(mask, Array) or mask.dtype != "bool":
        fail("argument-dtype", f"{name} is not boolean")
    if mask.shape != (batch, length):
        fail("argument-shape", f"{name} is {mask.shape}, not {(batch, length)}")
    return [mask.row(b) for b in range(batch)]


def key_mask(mask: Any, shape: tuple[int, ...]) -> list[bool] | None:
    """MAP-10: ``attn_mask`` spread over the shape of the logits, flat."""
    if mask is None:
        return None
    if not isinstance(mask, Array) or mask.dtype != "bool":
        fail("argument-dtype", "attn_mask is not boolean")
    axes = (1,) * (len(shape) - len(mask.shape)) + mask.shape
    if len(axes) != len(shape) or any(m not in (1, n) for m, n in zip(axes, shape, strict=True)):
        fail("argument-shape", f"attn_mask {mask.shape} does not broadcast to {shape}")
    strides, stride = [], 1
    for size in reversed(axes):
        strides.append(0 if size == 1 else stride)
        stride *= size
    strides.reverse()
    offsets = [0]
    for size, step in zip(shape, strides, strict=True):
        offsets = [offset + i * step for offset in offsets for i in range(size)]
    return [mask.data[offset] for offset in offsets]


def option(value: Any, allowed: Sequence[str], name: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        fail("argument-value", f"{name} is {value!r}, not one of {', '.join(allowed)}")


def number(value: Any, name: str) -> float:
    """A finite number that is not an array; otherwise `argument-value`."""
    if isinstance(value, Array) and value.shape == ():
        value = value.data[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        fail("argument-value", f"{name} is {value!r}, not a finite number")
    return float(value)


def positive(value: Any, name: str) -> float:
    """TEMP-1."""
    value = number(value, name)
    if value <= 0:
        fail("argument-value", f"{name} is {value}, not above 0")
    return value


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def probabilities(
    probs: Any, name: str, axes: int | None, row_sums: str = "one", mask: Any = None, mask_name: str = "query_mask"
) -> tuple[Array, list[list[bool]]]:
    """MAP-3, MAP-9: checked maps, and which rows count. The sample is the first axis, the row the last but one."""
    option(row_sums, ("one", "at_most_one"), "row_sums")
    probs = real(probs, name, axes)
    if len(probs.shape) < 2:
        fail("argument-shape", f"{name} has {len(probs.shape)} axes")
    batch = probs.shape[0] if len(probs.shape) > 2 else 1
    counted = row_mask(mask, batch, probs.shape[-2], mask_name)
    slack = ROW_SUM.get(probs.dtype, ROW_SUM["float64"])
    for index in probs.positions():
        row = probs.row(*index)
        if min(row) < 0:
            fail("not-a-distribution", f"{name}: a negative probability in row {index}")
        if not counted[index[0] if len(index) > 1 else 0][index[-1]]:
            continue
        total = math.fsum(row)
        if total > 1 + slack or (row_sums == "one" and total != 0 and total < 1 - slack):
            fail("not-a-distribution", f"{name}: row {index} sums to {total}")
    return probs, counted


def softmax_row(row: Row, temperature: float) -> Row:
    """MAP-1, MAP-2: masked keys have the logit -inf."""
    top = max(row)
    if top == -math.inf:
        return [0.0] * len(row)
    powers = [math.exp((z - top) / temperature) for z in row]
    total = math.fsum(powers)
    return [power / total for power in powers]


def softmax(attn_logits: Any, attn_mask: Any = None, *, temperature: Any = 1) -> Array:
    """MAP-1, MAP-2, TEMP-2."""
    logits = real(attn_logits, "attn_logits", minus_inf=True)
    temperature = positive(temperature, "temperature")
    if len(logits.shape) < 2:
        fail("argument-shape", "attn_logits needs the axes (..., L, S)")
    logits = mask_logits(logits, attn_mask)
    return Array(logits.shape, flatten([softmax_row(logits.row(*i), temperature) for i in logits.positions()]))


def mask_logits(logits: Array, attn_mask: Any) -> Array:
    """Logits with -inf on masked keys."""
    allowed = key_mask(attn_mask, logits.shape)
    if allowed is None:
        return logits
    data = [z if may else -math.inf for z, may in zip(logits.data, allowed, strict=True)]
    return Array(logits.shape, data, logits.dtype)


def soften_row(row: Row, temperature: float, row_sums: str) -> Row:
    """TEMP-2, TEMP-5, TEMP-6, TEMP-7."""
    top = max(row)
    if temperature == 1 or top == 0:
        return row
    powers = [(p / top) ** (1 / temperature) if p else 0.0 for p in row]
    mass = math.fsum(row) if row_sums == "at_most_one" else 1.0
    total = math.fsum(powers)
    return [mass * power / total for power in powers]


def soften(attn_probs: Any, temperature: Any, *, row_sums: Any = "one") -> Array:
    """TEMP-2: the softened map."""
    temperature = positive(temperature, "temperature")
    probs, _ = probabilities(attn_probs, "attn_probs", None, row_sums)
    return soften_all(probs, temperature, row_sums)


def soften_all(probs: Array, temperature: float, row_sums: str) -> Array:
    rows = [soften_row(probs.row(*i), temperature, row_sums) for i in probs.positions()]
    return Array(probs.shape, flatten(rows), probs.dtype)


def rescale(row: Row, kept: Row) -> tuple[Row, float]:
    """The kept entries scaled back to the sum of the whole row, and the mass lost (TOKEN-2, LOSS-15)."""
    total, rest = math.fsum(row), math.fsum(kept)
    lost = math.fsum([*row, *(-p for p in kept)])
    if lost == 0:
        return kept, 0.0
    return ([p / rest * total for p in kept] if rest > 0 else kept), lost


def align_tokens(
    attn_probs: Any, rows: Any = None, columns: Any = None, *, query_mask: Any = None, row_sums: Any = "one"
) -> tuple[Array, Array]:
    """TOKEN-1 to TOKEN-4: `probs` and `dropped`."""
    probs, _ = probabilities(attn_probs, "attn_probs", 4, row_sums, query_mask)
    batch, heads, length, keys = probs.shape

    def chosen(wanted: Any, size: int, name: str) -> list[int]:
        if wanted is None:
            return list(range(size))
        if isinstance(wanted, Array):
            wanted = wanted.data
        good = isinstance(wanted, list) and wanted and all(whole(i) and 0 <= i < size for i in wanted)
        if not good or len(set(wanted)) < len(wanted):
            fail("argument-value", f"{name} must be distinct positions below {size}")
        return list(wanted)

    rows, columns = chosen(rows, length, "rows"), chosen(columns, keys, "columns")
    data: Row = []
    dropped: Row = []
    for b, h in indices((batch, heads)):
        for i in rows:
            row = probs.row(b, h, i)
            kept, lost = rescale(row, [row[j] for j in columns])
            data += kept
            dropped.append(lost)
    return (
        Array((batch, heads, len(rows), len(columns)), data),
        Array((batch, heads, len(rows)), dropped),
    )
