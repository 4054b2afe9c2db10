"""Records of one attention layer (spec chapter HEAD): its weights, and its rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import Array, Mask, as_float, check_option
from shd_ref.errors import ShdError
from shd_ref.integers import check_number

LAYOUTS: tuple[str, ...] = ("half", "adjacent")


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One layer of attention, head by head; inputs are rows (HEAD-1).

    Attributes:
        query: ``(H, D, d)``.
        key: ``(H_kv, D, d)``; query head i reads key and value head ``i // (H / H_kv)``.
        value: ``(H_kv, D, d_v)``.
        output: ``(H, d_v, D)``.
        query_bias: ``(H, d)``, or None without one, as the other three: ``(H_kv, d)``, ``(H_kv, d_v)``, ``(D,)``.
        key_bias: see ``query_bias``.
        value_bias: see ``query_bias``.
        output_bias: see ``query_bias``.
        scale: logits are ``scale * q k^T``; default ``d ** -0.5``.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    query_bias: Array | None = None
    key_bias: Array | None = None
    value_bias: Array | None = None
    output_bias: Array | None = None
    scale: float | None = None

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.query)

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return len(self.key)

    @property
    def head_dim(self) -> int:
        """Entries of a query."""
        return int(self.query.shape[2])

    @property
    def reads(self) -> list[int]:
        """For each query head the key and value head that it reads (MAP-6)."""
        per = self.num_heads // self.num_kv_heads
        return [head // per for head in range(self.num_heads)]

    @property
    def logit_scale(self) -> float:
        """The factor of ``q k^T``."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (HEAD-14).

    Attributes:
        frequencies: radians a position, one a rotated pair; the remaining ``d - 2 * len(frequencies)`` entries of a
            head are not rotated.
        layout: ``"half"`` pairs entry i with ``i + len(frequencies)``, ``"adjacent"`` pairs ``2 i`` with ``2 i + 1``.
        slow: boolean, one a pair: True where the pair barely turns over the lengths that occur (HEAD-16).
    """

    frequencies: Array
    layout: str = "half"
    slow: Mask | None = None

    def entries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Positions in a head of each pair's first and second entry."""
        pairs = np.arange(len(self.frequencies))
        return (pairs, pairs + len(pairs)) if self.layout == "half" else (2 * pairs, 2 * pairs + 1)

    def turn(self, rows: Array) -> Array:
        """Queries or keys ``(..., L, d)`` turned to their positions 0 .. L - 1."""
        first, second = self.entries()
        angles = np.arange(rows.shape[-2])[:, None] * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        turned = rows.copy()
        turned[..., first] = rows[..., first] * cos - rows[..., second] * sin
        turned[..., second] = rows[..., first] * sin + rows[..., second] * cos
        return turned


def join_heads(part: Array) -> Array:
    """Heads ``(H, D, d)`` side by side, as one matrix of rows ``(D, H * d)``."""
    return part.swapaxes(0, 1).reshape(part.shape[1], -1)


def split_heads(matrix: Array, num_heads: int) -> Array:
    """A matrix ``(D, H * d)`` as its heads ``(H, D, d)``."""
    return matrix.reshape(len(matrix), num_heads, -1).swapaxes(0, 1)


def as_weights(given: HeadWeights | Mapping[str, Any]) -> HeadWeights:
    """A layer's weights in float64 after the checks of HEAD-1, from the record or a mapping of its fields.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``.
    """
    fields = given if isinstance(given, Mapping) else vars(given)
    query, key, value, output = (as_float(fields[name], name, ndim=3) for name in ("query", "key", "value", "output"))
    heads, width, dim = query.shape
    kv_heads, value_dim = len(key), value.shape[2]
    shapes: dict[str, tuple[int, ...]] = {"key": (kv_heads, width, dim), "value": (kv_heads, width, value_dim)}
    shapes |= {"output": (heads, value_dim, output.shape[2])}
    shapes |= {"query_bias": (heads, dim), "key_bias": (kv_heads, dim), "value_bias": (kv_heads, value_dim)}
    shapes |= {"output_bias": output.shape[2:]}
    biases = {
        name: as_float(fields[name], name)
        for name in shapes
        if name.endswith("_bias") and fields.get(name) is not None
    }
    for name, part in {"key": key, "value": value, "output": output, **biases}.items():
        if part.shape != shapes[name]:
            raise ShdError(
                "argument-shape",
                f"{name} must be {shapes[name]} beside a query {query.shape}; got {part.shape}",
                "HEAD-1",
            )
    if not kv_heads or heads % kv_heads or not dim:
        raise ShdError(
            "argument-shape", f"query must have a multiple of the {kv_heads} key heads; got {query.shape}", "HEAD-1"
        )
    scale = fields.get("scale")
    scale = None if scale is None else check_number("scale", scale, "HEAD-1", above=0)
    return HeadWeights(query, key, value, output, **biases, scale=scale)


def as_rotary(given: Rotary | Mapping[str, Any]) -> Rotary:
    """Rotary positions, from the record or a mapping of its fields; checked (HEAD-14)."""
    found = given if isinstance(given, Rotary) else Rotary(**given)
    check_option("layout", found.layout, LAYOUTS, "HEAD-14")
    frequencies = as_float(found.frequencies, "frequencies", ndim=1)
    slow = None if found.slow is None else np.asarray(found.slow)
    if slow is not None and (slow.shape != frequencies.shape or slow.dtype != np.bool_):
        raise ShdError(
            "argument-shape", f"slow must be {len(frequencies)} booleans, one a pair; got {slow.shape}", "HEAD-16"
        )
    return Rotary(frequencies, found.layout, slow)
