"""The sizes of a walked site: heads, layout and W_o, by replay of the operators between ``map @ V`` and W_o."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.graph.inputs import Layout, Shapes
from shd_ref.teacher.graph.projection import Term
from shd_ref.teacher.graph.walk import Walk
from shd_ref.teacher.opening.model import (
    ADDING_OPS,
    MOVING_OPS,
    REPEAT_OPS,
    SCALING_OPS,
    fixed_input,
    ir,
    onnx,
    run_operator,
)

_MOST_INDICES: Final = 2**25  # 256 MB, several times; a probe's sizes are tiny, stated ones need not be
_EVALUATED: Final = frozenset({"Concat", "Gather", "GatherND", "Slice", "Transpose"})


def static_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors whose dimensions are all numbers or names, each name bound to its own small number."""
    numbers: dict[str, int] = {}
    shapes = {}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if not value.type.tensor_type.HasField("shape") or not all(d.dim_param or d.dim_value for d in dims):
            continue
        shapes[value.name] = tuple(
            numbers.setdefault(d.dim_param, len(numbers) + 2) if d.dim_param else d.dim_value for d in dims
        )
    return shapes


@dataclass(frozen=True)
class Measure:
    """The part of an ``AttentionSite`` that follows from shapes."""

    layout: Layout | None = None  # None: W_o does not read every head at every position
    num_heads: int | None = None
    num_kv_heads: int | None = None
    value_heads: tuple[int, ...] = ()
    shared_values: bool = False
    joined_values: bool = False
    d_k: int | None = None
    d_v: int | None = None
    output_projection: NDArray[Any] | None = field(default=None, repr=False, compare=False)


def measure_site(walk: Walk, shapes: Shapes) -> Measure | None:
    """Heads, widths and layout from the shapes; None where a shape is missing or contradicts another."""
    if walk.reason is not None or walk.context is None:
        return None
    probs, values, context, query = (
        None if value is None else shapes.get(str(value.name))
        for value in (walk.probs, walk.values, walk.context, walk.query)
    )
    if probs is None or values is None or context is None or len(context) not in (3, 4) or 0 in context:
        return None
    d_v = context[-1]
    scaled = any(node.op_type in SCALING_OPS for node in walk.projection.path)
    indices_of = replay(walk.context, context, walk.projection.path, shapes, scaled=scaled)
    if indices_of is None:
        return None
    read = [_rows_of(term, *indices_of[term.source]) for term in walk.projection.terms]
    rows = [row for row in read if row is not None]
    if len(rows) < len(read):
        return None
    # A row of the attention output reads d_v numbers of every head at one position, so their number gives the heads.
    num_heads, rest = divmod(len(np.unique(np.concatenate([row.indices[0] for row in rows]))), d_v)
    if rest:
        return None
    layout, weight = _read_layout(rows, context, num_heads)
    head_axis = {"batch-heads": 1, "heads-batch": 0}.get(layout or "")
    # V with one head is repeated by the product itself, which leaves no operator to see.
    one_head = tuple(1 if axis == head_axis else size for axis, size in enumerate(context[:-2]))
    shared = values[:-2] == one_head != context[:-2]
    if probs[:-2] != context[:-2] or not (shared or values[:-2] == context[:-2]):
        return None
    alike: tuple[int, ...] | None = (0,) * num_heads
    if not shared and layout is not None:
        alike = alike_heads(walk.repeats, layout, num_heads, shapes)
    if alike is None:
        return None
    if walk.mixing is not None:
        if layout != "batch-heads" or len(walk.mixing) != num_heads or weight is None:
            return None
        # For maps before they are mixed: head h gives sum_g mixing[h, g] V_g W_g, of all values side by side.
        by_head = weight.reshape(num_heads, -1, weight.shape[1])
        unmixed = walk.mixing.astype(weight.dtype)[:, :, None, None] * by_head
        weight, d_v = unmixed.reshape(-1, weight.shape[1]), num_heads * d_v
    return Measure(
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=len(set(alike)),
        value_heads=alike,
        shared_values=shared,
        d_k=None if query is None else query[-1],
        d_v=d_v,
        output_projection=weight,
        joined_values=walk.mixing is not None,
    )


def describe_contradiction(walk: Walk, shapes: Shapes) -> str:
    """Why a site with known sizes has no measure, and the remedy."""
    named = (("map", walk.probs), ("values", walk.values), ("outputs", walk.context))
    sizes = ", ".join(f"{name} {list(shapes.get(str(value.name), ()))}" for name, value in named if value is not None)
    return (
        f"the number of heads cannot be determined from its sizes ({sizes}), as where several windows or samples "
        "share a map: select other sites (--sites), or take a teacher of one map a head, all of them projected"
    )


def alike_heads(chain: Sequence[ir.Node], layout: Layout, heads: int, shapes: Shapes) -> tuple[int, ...] | None:
    """Of each head the first that has the same keys or values, by replay of the repeats; None if unknown."""
    factors = [
        shapes.get(str(factor.name)) if factor.const_value is None else factor.const_value.numpy().shape
        for node in chain
        if node.op_type in SCALING_OPS and (factor := node.inputs[1]) is not None
    ]
    source = chain[0].inputs[0] if chain and all(math.prod(shape or ()) == 1 for shape in factors) else None
    if source is None:  # scaled by more than a number, heads differ
        return tuple(range(heads))
    shape = shapes.get(str(source.name)) if source.const_value is None else source.const_value.numpy().shape
    moved = None if shape is None else replay(source, shape, chain, shapes)
    if moved is None:
        return None
    by_head = by_sample(moved[chain[-1].outputs[0]][0], layout, heads)
    if not by_head.size or by_head.shape[1] != heads:
        return None
    # Backwards, so that of equal heads the first stays.
    firsts = {by_head[:, head].tobytes(): head for head in reversed(range(heads))}
    return tuple(firsts[by_head[:, head].tobytes()] for head in range(heads))


def by_sample(array: NDArray[Any], layout: Layout | None, num_heads: int) -> NDArray[Any]:
    """``(N, H, L, S)``; empty where the first axis is not a multiple of the heads."""
    if layout in ("batch-folded", "heads-folded"):
        sizes = (-1, num_heads) if layout == "batch-folded" else (num_heads, -1)
        array = (array if len(array) % num_heads == 0 else array[:0]).reshape(*sizes, *array.shape[1:])
    if layout in ("heads-batch", "heads-folded"):
        array = array.swapaxes(0, 1)
    return array


def replay(
    source: ir.Value, shape: tuple[int, ...], path: Iterable[ir.Node], shapes: Shapes, *, scaled: bool = False
) -> dict[ir.Value, list[NDArray[Any]]] | None:
    """Operators that move, pick or repeat numbers, applied to flat indices of a tensor; None where that is not known.

    By tensor its indices, and if ``scaled`` the factors of its numbers.
    """
    if math.prod(shape) > _MOST_INDICES:
        return None
    first: list[NDArray[Any]] = [np.arange(math.prod(shape)).reshape(shape), np.ones(shape)][: 1 + scaled]
    moved_of = {source: first}
    for node in path:
        sources = [moved_of[value] for value in node.inputs if value is not None and value in moved_of]
        moved = [part for arrays in zip(*sources, strict=True) if (part := _move(node, list(arrays), shapes))]
        if len(moved) < len(first):
            return None
        if scaled and node.op_type in SCALING_OPS:
            constants = (fixed_input(node, slot) for slot in range(len(node.inputs)))
            factor = next(constant for constant in constants if constant is not None)
            moved[1] = [moved[1][0] * factor if node.op_type == "Mul" else moved[1][0] / factor]
            if moved[1][0].shape != moved[0][0].shape:
                return None
        moved_of.update(zip(node.outputs, (list(arrays) for arrays in zip(*moved, strict=True)), strict=False))
    return moved_of


def _move(node: ir.Node, arrays: list[NDArray[Any]], shapes: Shapes) -> list[NDArray[Any]] | None:
    """The outputs of an operator on arrays in place of computed tensors; None where it cannot be run."""
    kind, array, shape = node.op_type, arrays[0], shapes.get(str(node.outputs[0].name))
    try:
        if kind in _EVALUATED:
            inputs = {value: value.const_value for value in node.inputs if value is not None}
            arrays_of = {value: fixed.numpy() for value, fixed in inputs.items() if fixed is not None}
            arrays_of |= dict(zip((value for value in inputs if value not in arrays_of), arrays, strict=False))
            return run_operator(node, arrays_of) if len(arrays_of) == len(inputs) else None
        if kind == "Split":
            axis = node.attributes.get_int("axis", 0)
            parts = [shapes.get(str(output.name)) for output in node.outputs]
            sizes = [part[axis] for part in parts if part is not None]
            complete = len(sizes) == len(parts) and sum(sizes) == array.shape[axis]
            return np.split(array, np.cumsum(sizes)[:-1], axis) if complete else None
        if shape is None:
            return [array] if kind not in (*MOVING_OPS, *REPEAT_OPS, *ADDING_OPS, *SCALING_OPS) else None
        if kind in MOVING_OPS:
            return [array.reshape(shape)] if np.prod(shape) == array.size else None
        if kind == "Expand":
            return [np.broadcast_to(array, shape)]
        if kind == "Tile":
            return [np.tile(array, np.floor_divide(shape, array.shape))] if len(shape) == array.ndim else None
    except Exception:  # its attributes do not fit the shapes; the evaluator raises what NumPy and its operators raise
        return None
    return [array] if kind not in ADDING_OPS | SCALING_OPS or shape == array.shape else None


class _Rows(NamedTuple):
    """The numbers that one product reads: a row for each row of the attention output."""

    indices: NDArray[np.int64]  # (rows, in): places in the heads' outputs
    factors: NDArray[Any]  # (in,): by which these numbers were multiplied on the way
    weight: NDArray[Any]  # (in, out)


def _rows_of(term: Term, indices: NDArray[np.int64], *factors: NDArray[Any]) -> _Rows | None:
    """The rows that a product reads; a matrix a head is one matrix for the heads side by side."""
    weight, both = term.weight, [indices, *factors]
    if weight.ndim == 3:
        if indices.ndim < 3 or indices.shape[-3] != len(weight):
            return None
        both = [np.moveaxis(array, -3, -2).reshape(-1, indices.shape[-3] * indices.shape[-1]) for array in both]
        weight = weight.reshape(-1, weight.shape[-1])
    else:
        both = [np.moveaxis(array, term.axis, -1) for array in both]
    if both[0].shape[-1] != len(weight) or not both[0].size:
        return None
    both = [array.reshape(-1, len(weight)) for array in both]
    if not factors:
        return _Rows(both[0], np.ones(len(weight)), weight)
    return _Rows(both[0], both[1][0], weight) if (both[1] == both[1][0]).all() else None


def _read_layout(
    rows: list[_Rows], context: tuple[int, ...], num_heads: int
) -> tuple[Layout | None, NDArray[Any] | None]:
    """The reading of the context's leading axes under which each row is all heads at one position; W_o under it."""
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
    for layout, reading in readings.items():
        if reading.shape[1] == num_heads:
            joined = reading.swapaxes(1, 2).reshape(-1, num_heads * context[-1])  # (B * L, H * d_v)
            weight = _weight_in_order(rows, joined)
            if weight is not None:
                return layout, weight
    return None, None


def _weight_in_order(rows: list[_Rows], joined: NDArray[np.int64]) -> NDArray[Any] | None:
    """W_o with a row for each column of ``joined``; None where products read other rows, or in other orders."""
    count, width = joined.shape
    row_of, column_of = np.empty((2, joined.size), dtype=np.int64)
    row_of[joined], column_of[joined] = np.arange(count)[:, None], np.arange(width)
    dtype = np.result_type(*(row.weight for row in rows))
    weight = np.zeros((width, rows[0].weight.shape[1]), dtype=np.float64)
    order = row_of[rows[0].indices[:, 0]]
    for row in rows:
        columns = column_of[row.indices[0]]
        is_same = (row_of[row.indices] == order[:, None]).all() if len(row.indices) == len(order) else False
        if not is_same or not (column_of[row.indices] == columns).all():
            return None
        # Not ``+=``, which adds a column once where a product reads it several times.
        np.add.at(weight, columns, row.factors[:, None] * row.weight)
    return weight.astype(dtype) if np.array_equal(np.sort(order), np.arange(count)) else None
