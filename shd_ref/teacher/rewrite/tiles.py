"""Attention in tiles of query rows: a Loop makes some rows of a map, uses them, and continues.

First the operators behind a map are read: from ``map @ V`` back, every tensor is followed with the axes on which its
rows and its keys lie. A tensor with both is made again in every tile; one with either is made once, and cut.

Then one Loop of a site gives the context that the teacher continues with and, by the way, the products of its maps
with the values of other heads, which is all that alphas need; with these known another Loop makes the codes of merged
maps. Keys that no row of a tile sees are left out, so causal maps cost half, and windows linear time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.factors import MASKED, Arrays, Logits, condition_of, read_site, why_no_mask
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.inputs import InputSizes, Shapes, probe_tensors
from shd_ref.teacher.graph.walk import is_value_product
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.opening.model import PRODUCTS, SIZE_OPS, STANDARD_DOMAINS, fixed_input, ir, kinds, onnx
from shd_ref.teacher.rewrite.function import MergeRule, batch_heads, merge_and_code, spans_of, values_of

Axes: TypeAlias = tuple[int | None, int | None]
"""Of a tensor's rows and of its keys, from the end; None where it has none."""
Key: TypeAlias = tuple[str, Axes]
"""A tensor, with the axes on which a tile cuts it."""

_WHOLE: Final[Axes] = (None, None)
_SQUARE: Final[Axes] = (-2, -1)
_BY_ENTRY: Final = kinds(
    "Abs Add And BitwiseAnd BitwiseOr Cast CastLike Ceil Clip DequantizeLinear Div Dropout Equal Erf Exp "
    "Floor Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pow "
    "QuantizeLinear Reciprocal Relu Round Sigmoid Sign Softplus Sqrt Sub Sum Tanh Where Xor"
)
_REDUCTIONS: Final = kinds("ReduceMax ReduceMean ReduceMin ReduceSum")
_OF_FIRST: Final = kinds("Clip DequantizeLinear Dropout QuantizeLinear")
_PROBED: Final = InputSizes(batch=2, length=11)  # no number of heads or features, so that axes can be distinguished
_MOST_VALUES: Final = 400  # behind a map: a mask's arithmetic, and no whole network that makes a bias
_MOST_STEPS: Final = 150  # in one another, as reading calls itself
_SHAPE_PLACES: Final = {"Expand": 1, "Reshape": 1, "ConstantOfShape": 0}


@dataclass(frozen=True)
class Step:
    """One operator of a tile; ``sizes`` is the place of an input that states the output's shape."""

    node: onnx.NodeProto
    inputs: tuple[Key | None, ...]
    output: Key
    rank: int
    sizes: int | None = None


@dataclass(frozen=True)
class Seen:
    """A mask: rows see keys where it is ``shown`` (a condition), or times ``scale`` not far below 0 (added)."""

    key: Key
    rank: int
    shown: bool | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class SiteTiles:
    """How a tile of a site's rows is made.

    Attributes:
        steps: operators in order; inputs that none of them makes come from outside.
        context, probs, logits: of ``map @ V``, of the map, and of what its softmax reads.
        rank: of the context.
        masks: all that keeps rows from keys, without heads; None where that is not known, or may be a bias.
        value_heads: of each head, the first head with the same values.
        is_plain: whether the context is the product of the map and V as the site names them.
        reason: why its maps are made whole; None where tiles can be made.
    """

    site: AttentionSite
    steps: tuple[Step, ...] = ()
    context: Key = ("", _WHOLE)
    probs: Key = ("", _WHOLE)
    logits: Key | None = None
    rank: int = 4
    masks: tuple[Seen, ...] | None = None
    value_heads: tuple[int, ...] = ()
    is_plain: bool = False
    reason: str | None = None

    def sources(self) -> tuple[Key, ...]:
        """The inputs of the steps from outside."""
        outputs = {step.output for step in self.steps}
        read = (key for step in self.steps for key in step.inputs if key is not None)
        return tuple(dict.fromkeys(key for key in read if key not in outputs))

    def needed_for(self, key: Key) -> set[Key]:
        """A tensor with all that it is made of."""
        needed = {key}
        for step in reversed(self.steps):
            if step.output in needed:
                needed |= {source for source in step.inputs if source is not None}
        return needed

    def shape_source(self, axis: int) -> tuple[str, int]:
        """A tensor from outside, and its axis, that has as many positions as there are rows (0) or keys (1)."""
        return next((name, axes[axis]) for name, axes in self.sources() if axes[axis] is not None)  # type: ignore[return-value]


def find_tiles(model: onnx.ModelProto, sites: Sequence[AttentionSite]) -> tuple[SiteTiles, ...]:
    """How the maps of each site are made in tiles, or why they cannot be; the graph is not changed."""
    behind = [_read_behind(site.walk.context) for site in sites]
    names = {str(value.name) for values in behind for value in values if value.const_value is None}
    logits = [read_site(site) or Logits(reason="its map is not a softmax") for site in sites]
    # Numbers that are added to logits, and those that replace them.
    added = (value for of_site in logits for _, value in (*of_site.addends, *of_site.fills))
    masks = {str(value.name) for value in added if value.const_value is None}
    try:
        arrays, shapes = probe_tensors(model, masks, names, _PROBED)
    except ShdError as error:
        return tuple(SiteTiles(site, reason=f"its sizes cannot be measured: {error}") for site in sites)
    return tuple(
        _read_site(site, values, shapes, of_site, arrays)
        for site, values, of_site in zip(sites, behind, logits, strict=True)
    )


class _Whole(Exception):  # noqa: N818  # a finding, not an error
    """Why the maps of a site cannot be made in tiles."""


def _read_behind(context: ir.Value | None) -> list[ir.Value]:
    """Breadth first what ``map @ V`` is made of, up to the factors of products of computed tensors."""
    values = dict.fromkeys(() if context is None else (context,))
    waiting = deque(values)
    while waiting and len(values) < _MOST_VALUES:
        value = waiting.popleft()
        node = value.producer()
        if node is None or node.op_type in SIZE_OPS:
            continue
        sources = [source for source in node.inputs if source is not None and source not in values]
        values |= dict.fromkeys(sources)
        if value is context or not is_value_product(node):
            waiting += sources[:1] if value is context else sources
    return list(values)


def _read_site(
    site: AttentionSite, behind: Sequence[ir.Value], shapes: Shapes, logits: Logits, arrays: Arrays
) -> SiteTiles:
    context = site.walk.context
    if context is None:
        return SiteTiles(site, reason=site.reason or "the product of its map and its values was not found")
    reader = _Reader(shapes, _made_of_products(context, behind))
    try:
        key = reader.read_context(context)
    except _Whole as error:
        return SiteTiles(site, reason=str(error))
    outputs = {step.output for step in reader.steps}
    probs = (site.probs, _SQUARE)
    if probs not in outputs:
        return SiteTiles(site, reason="its map is turned on its way to the values")
    node = context.producer()
    product = [value.name for value in (() if node is None else node.inputs[:2]) if value is not None]
    shared = site.shared_values or site.joined_values
    read = (site.logits, _SQUARE)
    return SiteTiles(
        site,
        steps=tuple(reader.steps),
        context=key,
        probs=probs,
        logits=read if read in outputs else None,
        rank=len(shapes[site.context]),
        masks=_read_masks(site, logits, arrays, reader),
        value_heads=tuple(range(site.num_heads or 1)) if shared else site.value_heads,
        is_plain=not shared and product == [site.probs, site.values],
    )


def _made_of_products(context: ir.Value, behind: Sequence[ir.Value]) -> set[ir.Value]:
    """The sources of the context that come from products of queries and keys."""
    followed = set(behind)
    producers = ((value, value.producer()) for value in behind if value is not context)
    waiting = [value for value, node in producers if node is not None and is_value_product(node)]
    products = set(waiting)
    while waiting:
        for node, _ in waiting.pop().uses():
            new = {value for value in node.outputs if value in followed and value not in products}
            if node.op_type not in SIZE_OPS:
                products |= new
                waiting += new
    return products


class _Reader:
    """The steps of a tile, collected from its context back."""

    def __init__(self, shapes: Shapes, inside: set[ir.Value]) -> None:
        self.steps: list[Step] = []
        self._shapes, self._inside = shapes, inside
        self._read: set[Key] = set()

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        if value.const_value is not None:
            return value.const_value.numpy().shape
        if str(value.name) not in self._shapes:
            raise _Whole("more leads to its map than is followed")
        return self._shapes[str(value.name)]

    def read_context(self, context: ir.Value) -> Key:
        node = context.producer()
        maps, values = (None, None) if node is None else (*node.inputs, None)[:2]
        is_plain = node is not None and node.op_type in PRODUCTS and not _turned(node) - {"transB"}
        if node is None or maps is None or values is None or not is_plain:
            raise _Whole("map and values meet in no plain product")
        keys = -1 if "transB" in _turned(node) else -2
        inputs = (self.read(maps, _SQUARE, 0), self.read(values, (None, keys), 0))
        key = str(context.name), (-2, None)
        self.steps.append(Step(ir.to_proto(node), inputs, key, len(self.shape(context))))
        return key

    def read(self, value: ir.Value, cuts: Axes, depth: int) -> Key:
        """Note all steps that make a tensor in a tile; ``cuts`` are its axes of rows and keys where it is read."""
        shape = self.shape(value)
        rows, keys = (None if axis is None or -axis > len(shape) or shape[axis] == 1 else axis for axis in cuts)
        key = (str(value.name), (rows, keys))
        if key in self._read:
            return key
        self._read.add(key)
        node = value.producer()
        is_inside = value in self._inside
        if not is_inside and (rows is None or keys is None or node is None or value.const_value is not None):
            return key  # linear in the length, or there as a whole in any case
        if node is None or depth > _MOST_STEPS or value is not node.outputs[0]:
            raise _Whole("more leads to its map than is followed")
        begun = len(self.steps), set(self._read)
        try:
            axes_of = self._axes_of_inputs(node, cuts)
            if axes_of is None:
                raise _Whole(f"{node.op_type} stands on the way to its map")
            inputs = tuple(
                None if source is None else self.read(source, axes, depth + 1)
                for source, axes in zip(node.inputs, axes_of, strict=True)
            )
        except _Whole:
            if is_inside:
                raise
            # A mask without heads, made by other operators: it stays whole, and is cut.
            del self.steps[begun[0] :]
            self._read = begun[1]
            return key
        self.steps.append(Step(ir.to_proto(node), inputs, key, len(shape), _SHAPE_PLACES.get(node.op_type)))
        return key

    def _axes_of_inputs(self, node: ir.Node, cuts: Axes) -> list[Axes] | None:
        """Where each input of an operator has rows and keys; None where it cannot run on some of them."""
        kind, (rows, keys) = node.op_type, cuts
        first, output = self._shape(node, 0), self.shape(node.outputs[0])
        whole, outside = [_WHOLE] * (len(node.inputs) - 1), self._inside.isdisjoint(node.inputs[:1])
        if node.domain not in STANDARD_DOMAINS:
            return None
        if kind in _BY_ENTRY:
            # A scale of an axis would have to be cut with it.
            if kind in ("QuantizeLinear", "DequantizeLinear") and math.prod(self._shape(node, 1)) != 1:
                return None
            return [cuts, *(whole if kind in _OF_FIRST else [cuts] * len(whole))]
        if kind == "Softmax":
            return [cuts] if keys == -1 and node.attributes.get_int("axis", -1) in (-1, len(first) - 1) else None
        if kind in _REDUCTIONS:
            is_last = _list(node, 1, "axes") in ([-1], [len(first) - 1])
            return [cuts, *whole] if keys == -1 and is_last and node.attributes.get_int("keepdims") != 0 else None
        if kind in PRODUCTS and not _turned(node) and min(len(first), len(self._shape(node, 1))) > 1:
            left, right = ([None if axis == other else axis for axis in cuts] for other in (-1, -2))
            return [(left[0], left[1]), (right[0], right[1])]
        if kind in ("Expand", "ConstantOfShape"):
            return [cuts if kind == "Expand" else _WHOLE, *whole]
        if kind == "Trilu":
            return [cuts, *whole] if cuts == _SQUARE else None
        if kind == "Reshape":
            start = min(axis for axis in cuts if axis is not None)
            return [cuts, *whole] if first[start:] == output[start:] else None
        if kind == "Transpose" and "perm" in node.attributes:
            order = node.attributes["perm"].as_ints()
            return [_mapped(cuts, lambda axis: order[axis] - len(order))]
        if kind in ("Squeeze", "Unsqueeze") and (listed := _list(node, 1, "axes")) is not None:
            shorter, longer = sorted((len(first), len(output)))
            new = {axis % longer for axis in listed}
            remaining = [axis for axis in range(longer) if axis not in new]
            if kind == "Unsqueeze":
                return [_mapped(cuts, lambda axis: remaining.index(longer + axis) - shorter), *whole]
            return [_mapped(cuts, lambda axis: remaining[shorter + axis] - longer), *whole]
        if kind == "Concat":
            axis = node.attributes.get_int("axis", 0) % len(output) - len(output)
            joined = [self._shape(node, number)[axis] for number in range(len(node.inputs))]
            is_cut = axis == rows or (axis == keys and sum(size != 1 for size in joined) != 1)
            return None if is_cut else [cuts] * len(node.inputs)
        if kind == "Slice":
            starts, ends, axes = (_list(node, number) for number in (1, 2, 3))
            if starts is None or ends is None or axes is None:
                return None
            spans = {axis % len(first) - len(first): span for axis, *span in zip(axes, starts, ends, strict=True)}
            # Of keys the last ones, a sink's column.
            start, end = spans.get(keys, (0, -1)) if keys is not None else (0, -1)
            return [cuts, *whole] if rows not in spans and start == 0 > end else None
        if kind == "Gather" and not node.attributes.get_int("axis") and outside:
            return [_WHOLE, _mapped(cuts, lambda axis: min(axis + len(first) - 1, 0) or None)]
        is_plain = kind == "GatherND" and not node.attributes.get_int("batch_dims") and outside
        if is_plain and self._shape(node, 1)[-1] == len(first):
            return [_WHOLE, _mapped(cuts, lambda axis: axis - 1)]
        return None

    def _shape(self, node: ir.Node, place: int) -> tuple[int, ...]:
        value = node.inputs[place] if place < len(node.inputs) else None
        return () if value is None else self.shape(value)


def _mapped(axes: Axes, move: Callable[[int], int | None]) -> Axes:
    rows, keys = (None if axis is None else move(axis) for axis in axes)
    return rows, keys


def _turned(product: ir.Node) -> set[str]:
    """Transpositions that a product applies to its factors."""
    return {flag for flag in ("transA", "transB", "transBatchA", "transBatchB") if product.attributes.get_int(flag)}


def _list(node: ir.Node, place: int, attribute: str | None = None) -> list[int] | None:
    """Constant numbers from an input, or in older operator sets an attribute."""
    if attribute is not None and attribute in node.attributes:
        return list(node.attributes[attribute].as_ints())
    fixed = fixed_input(node, place)
    return None if fixed is None else [int(number) for number in fixed.ravel()]


def _read_masks(site: AttentionSite, logits: Logits, arrays: Arrays, reader: _Reader) -> tuple[Seen, ...] | None:
    """The masks; None where they differ between heads, or where more than masks changes the logits."""
    before_cap = logits.capped in (None, (len(logits.addends), len(logits.conditions)))
    if logits.reason or why_no_mask(logits, arrays) or site.layout != "batch-heads" or not before_cap:
        return None
    read = {key[0]: key for step in reader.steps for key in step.inputs if key is not None}
    masks = []
    for shown, scale, value in (
        *((None, scale, value) for scale, value in logits.addends),
        *((shown, 1.0, value) for shown, value in logits.conditions),
    ):
        shape = reader.shape(value)
        if str(value.name) not in read or len(shape) > 4 or (len(shape) == 4 and shape[1] != 1):
            return None
        condition = condition_of(value, scale) if shown is None else None
        if condition is not None and condition[1].name in read:  # cheaper than to read the numbers again
            shown, value = condition
        masks.append(Seen(read[str(value.name)], len(reader.shape(value)), shown, scale))
    return tuple(masks)


Span: TypeAlias = tuple[str, str]
"""Names of the first position and of the one behind the last, int64 ``(1,)``."""

TILES_DOMAIN: Final = "squeezing_heads_tiles"
"""Prefix of what belongs to the teacher's own pass."""


@dataclass(frozen=True)
class Tiling:
    """How a teacher's attention runs: ``rows`` in a tile, by site, and whose values each map is multiplied by.

    ``slots`` are by site, for each head as many heads with distinct values, its own first.
    """

    rows: int
    sites: Mapping[int, SiteTiles]
    slots: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def whole(self) -> tuple[SiteTiles, ...]:
        """Of the sites whose maps are made whole all the same, with a reason."""
        return tuple(tiles for tiles in self.sites.values() if tiles.reason is not None)

    def of(self, site: AttentionSite) -> SiteTiles | None:
        """The tiles of a site; None where its maps are made whole."""
        tiles = self.sites.get(site.layer)
        return None if tiles is None or tiles.reason is not None else tiles


class TileBody:
    """Nodes of one tile in the making: rows ``start`` to ``stop``, keys of ``span`` or all; int64 ``(1,)``."""

    def __init__(self, body: Body, tiles: SiteTiles, rows: Span, span: Span | None) -> None:
        self.body, self.tiles = body, tiles
        self.rows, self._span = rows, span
        self._made: dict[Key, str] = {}
        self._count = body.op("Sub", rows[1], rows[0])

    def make(self, key: Key) -> str:
        """The name of a tensor in this tile."""
        needed = self.tiles.needed_for(key) - self._made.keys()
        for source in self.tiles.sources():
            if source in needed:
                self._made[source] = self.cut(*source)
        for step in self.tiles.steps:
            if step.output in needed:
                self._made[step.output] = self._run(step)
        return self._made[key]

    def cut(self, name: str, axes: tuple[int | None, int | None]) -> str:
        """The rows and the keys of this tile, of a tensor from outside."""
        for axis, span in zip(axes, (self.rows, self._span), strict=True):
            if axis is not None and span is not None:
                name = self.body.op("Slice", name, *span, self.body.const([axis]))
        return name

    def _run(self, step: Step) -> str:
        inputs = ["" if key is None else self._made[key] for key in step.inputs]
        if step.sizes is not None:
            inputs[step.sizes] = self._sized(step, inputs[step.sizes])
        if step.node.op_type == "Trilu":
            offset = self.body.reshape(inputs[1] if len(inputs) > 1 and inputs[1] else self.body.const([0]), 1)
            offset = self.body.op("Add", offset, self.rows[0])
            if self._span is not None:
                offset = self.body.op("Sub", offset, self._span[0])
            inputs[1:] = [self.body.op("Squeeze", offset)]
        name = self.body.op(step.node.op_type, *inputs)
        self.body.nodes[-1].attribute.extend(step.node.attribute)
        self.body.nodes[-1].domain = step.node.domain
        return name

    def _sized(self, step: Step, shape: str) -> str:
        """A stated shape with the sizes of this tile."""
        counts = (self._count, None if self._span is None else self.body.op("Sub", self._span[1], self._span[0]))
        for axis, count in zip(step.output[1], counts, strict=True):
            if axis is not None and count is not None:
                # From the end: an expanded shape may be shorter than its result.
                length = self.body.op("Squeeze", self.body.op("Shape", shape))
                end, step_size = (self.body.const(np.array(number)) for number in (0, 1))
                places = self.body.op("Range", self.body.op("Neg", length), end, step_size)
                is_axis = self.body.op("Equal", places, self.body.const([axis]))
                shape = self.body.op("Where", is_axis, count, shape)
        return shape


class TileLoop:
    """A Loop over the tiles of one site's rows, in the making."""

    def __init__(self, body: Body, tiles: SiteTiles, rows: int, spans: str | None = None) -> None:
        """``spans``: first, last and number of each row's keys ``(_, _, L, 3)``, outside; None: look at all keys."""
        self.body, self.tiles = body, tiles
        self._length = body.sizes(*tiles.shape_source(0))
        self._tile = body.op("Min", body.const([rows]), self._length)
        inner = self.inner = body.inside("loop")
        self._number, self._keep = f"{inner.prefix}number", f"{inner.prefix}keep"
        begun = inner.op("Mul", inner.reshape(self._number, 1), self._tile)
        # The last tile begins earlier, so that all are of one size.
        start = inner.op("Min", begun, inner.op("Sub", self._length, self._tile))
        stop = inner.op("Add", start, self._tile)
        self.span: Span | None = None
        if spans is None:
            self.tile = TileBody(inner, tiles, (start, stop), None)
            return
        tile = inner.op("Slice", spans, start, stop, inner.const([-2]))
        first, last = (
            inner.reshape(inner.op("Gather", tile, inner.const(np.array(column)), axis=-1), -1) for column in range(2)
        )
        low = inner.op("ReduceMin", first, keepdims=1)
        self.span = low, inner.op("ReduceMax", inner.op("Add", last, inner.const([1])), keepdims=1)
        self.tile = TileBody(inner, tiles, (start, stop), self.span)

    def finish(self, *results: tuple[str, int]) -> list[str]:
        """Close the Loop, of tiles and their ranks: names of results with all rows, on their last axis but one."""
        body, inner = self.body, self.inner
        goes_on = inner.op("Identity", self._keep)
        graph = onnx.helper.make_graph(
            inner.nodes,
            f"{inner.prefix}body",
            [
                onnx.helper.make_tensor_value_info(self._number, onnx.TensorProto.INT64, []),
                onnx.helper.make_tensor_value_info(self._keep, onnx.TensorProto.BOOL, []),
            ],
            [
                onnx.helper.make_tensor_value_info(goes_on, onnx.TensorProto.BOOL, []),
                *(onnx.ValueInfoProto(name=name) for name, _ in results),
            ],
        )
        ahead = body.op("Sub", body.op("Add", self._length, self._tile), body.const([1]))
        count = body.op("Squeeze", body.op("Div", ahead, self._tile))
        stacked = [f"{inner.prefix}stacked{number}" for number in range(len(results))]
        body.nodes.append(onnx.helper.make_node("Loop", [count, ""], stacked, name=f"{inner.prefix}loop", body=graph))
        return [self._joined(name, rank) for name, (_, rank) in zip(stacked, results, strict=True)]

    def _joined(self, stacked: str, rank: int) -> str:
        """Tiles ``(T, ..., tile, ...)`` as ``(..., L, ...)``, without the rows that two of them have."""
        body, axis = self.body, rank - 2
        order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
        moved = body.op("Transpose", stacked, perm=order)
        ends = [body.sizes(moved, *range(low, high)) for low, high in ((0, axis), (axis + 2, rank + 1))]
        rows = body.op("Reshape", moved, body.concat([ends[0], body.const([-1]), ends[1]], 0))
        total = body.sizes(rows, -2)
        twice = body.op("Sub", total, self._length)
        head = body.op("Sub", total, self._tile)
        axes = body.const([-2])
        first = body.op("Slice", rows, body.const([0]), head, axes)
        last = body.op("Slice", rows, body.op("Add", head, twice), total, axes)
        return body.concat([first, last], -2)


def add_spans_of_masks(body: Body, tiles: SiteTiles, rows: int) -> str | None:
    """First, last and number of the keys that masks leave each row, int64 ``(B or 1, 1, L, 3)``; None without any."""
    if not tiles.masks:
        return None
    loop = TileLoop(body, tiles, rows)
    inner = loop.inner
    seen = ""
    for mask in tiles.masks:
        visible = _seen(inner, mask, loop.tile.make(mask.key))
        if mask.rank < 4:
            visible = inner.op("Unsqueeze", visible, inner.const(list(range(4 - mask.rank))))
        seen = inner.op("And", seen, visible) if seen else visible
    whole = inner.concat([inner.const([1, 1]), loop.tile._count, inner.sizes(*tiles.shape_source(1))], 0)
    return loop.finish((spans_of(inner, inner.op("Expand", seen, whole)), 4))[0]


def _seen(body: Body, mask: Seen, name: str) -> str:
    if mask.shown is not None:
        return name if mask.shown else body.op("Not", name)
    added = body.op("Mul", body.op("Cast", name, to=FLOAT), body.const(float(mask.scale)))
    return body.op("Greater", added, body.const(MASKED / 2))


class Forward(NamedTuple):
    """The results of the Loop of a site: spans of masks, and products with values of ``slots`` ``(B, H, L, W)``."""

    spans: str | None
    sums: str | None


def run_in_tiles(body: Body, tiling: Tiling) -> dict[int, Forward]:
    """Append a Loop for every site that can run in tiles, with its context under the name that the teacher reads."""
    forward: dict[int, Forward] = {}
    spans: dict[tuple[Seen, ...], str | None] = {}
    for layer, tiles in tiling.sites.items():
        if tiles.reason is not None:
            continue
        site = tiles.site
        body.prefix = f"{TILES_DOMAIN}/{layer}/"
        if tiles.masks is not None and tiles.masks not in spans:
            spans[tiles.masks] = add_spans_of_masks(body, tiles, tiling.rows)
        span = None if tiles.masks is None else spans[tiles.masks]
        slots = tiling.slots.get(layer)
        # Whether the context is the product with the head's own values, in the precision of the sums.
        has_own = tiles.is_plain and (site.dtype or "float32") == "float32"
        others = "" if slots is None else _other_values(body, tiles, slots, has_own=has_own)
        loop = TileLoop(body, tiles, tiling.rows, span)
        results = [(loop.tile.make(tiles.context), tiles.rank)]
        if others:
            probs = batch_heads(loop.inner, loop.tile.make(tiles.probs), site.layout, site.num_heads or 1)
            maps = loop.inner.op("Cast", probs, to=FLOAT)
            results.append((loop.inner.op("MatMul", maps, loop.tile.cut(others, (None, -2))), 4))
        context, *products = loop.finish(*results)
        body.rename(context, site.context)
        if slots is not None and has_own:
            with_own = body.op("Cast", batch_heads(body, site.context, site.layout, site.num_heads or 1), to=FLOAT)
            products = [body.concat([with_own, *products], -1) if products else with_own]
        forward[layer] = Forward(span, products[0] if products else None)
    return forward


def _other_values(body: Body, tiles: SiteTiles, slots: Sequence[Sequence[int]], *, has_own: bool) -> str:
    """Values of these heads side by side ``(B, H, S, W)``, without the own ones where the context has them."""
    heads = [head for of_head in slots for head in of_head[has_own:]]
    if not heads:
        return ""
    site, width = tiles.site, len(heads) // len(slots)
    values = body.op("Gather", body.op("Cast", values_of(body, site), to=FLOAT), body.const(heads), axis=1)
    split = body.op("Transpose", body.reshape(values, 0, len(slots), width, -1, site.d_v or 0), perm=[0, 1, 3, 2, 4])
    return body.reshape(split, 0, len(slots), -1, width * (site.d_v or 0))


def add_codes(
    body: Body, tiles: SiteTiles, rule: MergeRule, rows: int, spans: str | None, weights: str | None
) -> str:
    """Codes of merged maps ``(B, H_s, L, S)``, from every head's weight in its group, where there are any."""
    loop = TileLoop(body, tiles, rows, spans)
    inner = loop.inner
    codes = merge_rows(loop.tile, rule, weights)["codes"]
    if loop.span is not None:
        # The codes of keys outside the span are zero.
        lead = inner.sizes(codes, 0, 1, 2)
        sizes = loop.span[0], inner.op("Sub", inner.sizes(*tiles.shape_source(1)), loop.span[1])
        none = inner.const(np.zeros(1, np.uint8 if rule.codec == "sqrt8-row" else np.float32))
        before, behind = (inner.op("Expand", none, inner.concat([lead, size], 0)) for size in sizes)
        codes = inner.concat([before, codes, behind], -1)
    return loop.finish((codes, 4))[0]


def merge_rows(tile: TileBody, rule: MergeRule, weights: str | None) -> dict[str, str]:
    """The map ``probs`` of a tile, ``merged`` maps and ``codes``."""
    body, site = tile.body, tile.tiles.site
    probs = batch_heads(body, tile.make(tile.tiles.probs), site.layout, site.num_heads or 1)
    maps = body.op("Cast", probs, to=FLOAT)
    merged, codes = merge_and_code(body, rule, maps, weights)
    return {"probs": maps, "merged": merged, "codes": codes}


@dataclass(frozen=True)
class TiledRows:
    """How maps of some rows are made again, of a layer that ran in tiles.

    Attributes:
        slots: whose values ``sums`` are products with, see ``Tiling``.
        sources: the outputs that are read, by role, and the names that they have in the teacher.
    """

    tiles: SiteTiles
    rule: MergeRule
    slots: tuple[tuple[int, ...], ...]
    sources: Mapping[str, str]
    opset: int

    def graph(self, dtypes: Mapping[str, np.dtype[Any]]) -> onnx.ModelProto:
        """``probs``, ``merged`` and ``codes`` of the rows from ``start`` to ``stop``; other inputs by role."""
        body = Body(f"{TILES_DOMAIN}/rows/", self.opset)
        for role, source in self.sources.items():
            if role != source:
                body.rename(role, source)
        tile = TileBody(body, self.tiles, ("start", "stop"), None)
        results = merge_rows(tile, self.rule, "weights" if "weights" in self.sources else None)
        for role, name in results.items():
            body.rename(name, role)
        types = {role: onnx.helper.np_dtype_to_tensor_dtype(dtypes[role]) for role in self.sources}
        types |= dict.fromkeys(("start", "stop"), onnx.TensorProto.INT64)
        inputs = [onnx.helper.make_tensor_value_info(role, dtype, None) for role, dtype in types.items()]
        outputs = [onnx.ValueInfoProto(name=role) for role in results]
        graph = onnx.helper.make_graph(body.nodes, "rows", inputs, outputs, body.initializers)
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", self.opset)], ir_version=8)
