"""Heads, widths and layout of an attention site, from the shapes along its walk.

Which axis holds the heads is not guessed: the layout operators between ``map @ V`` and W_o are replayed on an array
of indices, and W_o's rows say where every number came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.nodes import constant_of, data_inputs, int_attribute, name_of
from shd_ref.teacher.packages import ir
from shd_ref.teacher.shapes import Shapes
from shd_ref.teacher.walk import Walk

Layout: TypeAlias = Literal["batch-heads", "heads-batch", "batch-folded", "heads-folded"]
"""Axes of the map before (L, S): ``B, H``; ``H, B``; ``B * H`` with heads inside; ``H * B`` with samples inside."""

_MOST_INDICES: Final = 2**26  # 512 MB

_HEAD_AXES: Final[dict[Layout | None, int]] = {"batch-heads": 1, "heads-batch": 0}


@dataclass(frozen=True)
class Measure:
    """What a site's shapes tell; fields as in ``AttentionSite``."""

    layout: Layout | None  # None: W_o's rows are not in head order
    num_heads: int
    num_kv_heads: int
    shared_values: bool
    d_k: int | None
    d_v: int


def measure_site(walk: Walk, shapes: Shapes) -> Measure | None:
    """Heads, widths and layout from the shapes; None where a shape is missing or contradicts another."""
    if walk.reason is not None or walk.weight is None:
        return None
    probs, values, context, query = (
        None if value is None else shapes.get(name_of(value))
        for value in (walk.probs, walk.values, walk.context, walk.query)
    )
    if probs is None or values is None or context is None or len(context) not in (3, 4):
        return None
    d_v = context[-1]
    num_heads, rest = divmod(walk.weight.shape[0], d_v)
    repeats = _repeat_factor(walk.repeats, shapes)
    indices = replay(walk.path, context, shapes)
    if rest or repeats is None or indices is None or num_heads % repeats:
        return None
    layout = _layout(indices.reshape(-1, walk.weight.shape[0]), context, num_heads)
    one_head = tuple(1 if axis == _HEAD_AXES.get(layout) else size for axis, size in enumerate(context[:-2]))
    shared = values[:-2] == one_head != context[:-2]
    if probs[:-2] != context[:-2] or not (shared or values[:-2] == context[:-2]):
        return None
    return Measure(
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=1 if shared else num_heads // repeats,
        shared_values=shared,
        d_k=None if query is None else query[-1],
        d_v=d_v,
    )


def _repeat_factor(nodes: Iterable[ir.Node], shapes: Shapes) -> int | None:
    """How often value heads are repeated: elements out over elements in, whatever the axis."""
    factor = 1
    for node in nodes:
        sizes = [shapes.get(name_of(value)) for value in (*data_inputs(node), node.outputs[0])]
        if sizes[0] is None or sizes[1] is None:
            return None
        factor *= max(1, int(np.prod(sizes[1]) // np.prod(sizes[0])))
    return factor


def replay(path: Iterable[ir.Node], context: tuple[int, ...], shapes: Shapes) -> NDArray[np.int64] | None:
    """Apply operators that move or repeat numbers to an array of flat indices, of the shape that the first reads.

    None where a shape is missing or absurd, or an operator does something else.
    """
    if math.prod(context) > _MOST_INDICES:
        return None
    indices = np.arange(math.prod(context)).reshape(context)
    for node in path:
        shape = shapes.get(name_of(node.outputs[0]))
        if node.op_type == "Transpose":
            order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
            indices = indices.transpose(order)
        elif node.op_type in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
            if shape is None or np.prod(shape) != indices.size:
                return None
            indices = indices.reshape(shape)
        elif node.op_type == "Gather":
            places = constant_of(node.inputs[1])
            if places is None:
                return None
            indices = indices.take(places, axis=int_attribute(node, "axis") or 0)
        elif node.op_type == "Expand":
            if shape is None:
                return None
            indices = np.broadcast_to(indices, shape)
        elif node.op_type == "Tile":
            if shape is None or len(shape) != indices.ndim:
                return None
            indices = np.tile(indices, np.floor_divide(shape, indices.shape))
        elif node.op_type == "Concat":
            indices = np.concatenate([indices] * len(node.inputs), int_attribute(node, "axis") or 0)
    return indices


def _layout(rows: NDArray[np.int64], context: tuple[int, ...], num_heads: int) -> Layout | None:
    """The reading of the context's leading axes under which every row of indices is the heads in order."""
    indices = np.arange(np.prod(context)).reshape(context)
    batch, rest = divmod(context[0], num_heads)
    readings: dict[Layout, NDArray[np.int64]] = {}
    if len(context) == 4:
        readings = {"batch-heads": indices, "heads-batch": indices.swapaxes(0, 1)}
    elif not rest:
        readings = {
            "batch-folded": indices.reshape(batch, num_heads, *context[1:]),
            "heads-folded": indices.reshape(num_heads, batch, *context[1:]).swapaxes(0, 1),
        }
    # Rows may stand in any order: (B, L) or (L, B).
    wanted = rows[np.argsort(rows[:, 0])]
    for layout, reading in readings.items():
        if reading.shape[1] != num_heads:
            continue
        joined = reading.swapaxes(1, 2).reshape(-1, rows.shape[1])  # (B * L, H * d_v)
        if np.array_equal(joined[np.argsort(joined[:, 0])], wanted):
            return layout
    return None
