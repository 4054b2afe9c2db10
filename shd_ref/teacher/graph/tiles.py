"""What makes a site's map and multiplies it by the values, read so that it can run on some query rows at a time.

From ``map @ V`` back, every tensor is followed with the axes on which its rows and its keys lie. A tensor with both
is made again in every tile; one with either is made once, and cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.factors import MASKED, Arrays, array_of
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.inputs import InputSizes, Shapes, probe_shapes, probe_tensors
from shd_ref.teacher.graph.projection import fixed_input
from shd_ref.teacher.graph.walk import Logits, is_value_product, operands, repeat_chain
from shd_ref.teacher.opening.model import PRODUCTS, SIZE_OPS, STANDARD_DOMAINS, ir, kinds, onnx

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
_OF_FIRST: Final = kinds("CastLike Clip DequantizeLinear Dropout QuantizeLinear")
_PROBED: Final = InputSizes(batch=2, length=11)  # no number of heads or features, so that axes are told apart
_MOST_VALUES: Final = 400
_MOST_STEPS: Final = 150


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
        steps: operators in order; what they read and none of them makes comes from outside.
        context, probs, logits: of ``map @ V``, of the map, and of what its softmax reads.
        rank: of the context.
        masks: all that keeps rows from keys, without heads; None where that cannot be told, or may be a bias.
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
        """What the steps read from outside."""
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
    names = {str(value.name) for found in behind for value in found if value.const_value is None}
    logits = [site.walk.read or Logits(reason="its map is not a softmax") for site in sites]
    # What is added to logits, and what stands in their place.
    added = (value for one in logits for _, value in (*one.addends, *one.fills))
    masks = {str(value.name) for value in added if value.const_value is None}
    try:
        shapes, arrays = probe_shapes(model, names, _PROBED), probe_tensors(model, masks, _PROBED)
    except ShdError as error:
        return tuple(SiteTiles(site, reason=f"its sizes cannot be measured: {error}") for site in sites)
    return tuple(
        _read_site(site, found, shapes, read, arrays) for site, found, read in zip(sites, behind, logits, strict=True)
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
        if value is context:
            waiting += sources[:1]
            repeats = (source for step in repeat_chain(operands(node)[1]) for source in (*step.inputs, *step.outputs))
            values |= dict.fromkeys(source for source in repeats if source is not None)
        elif not is_value_product(node):
            waiting += sources
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
    product = operands(context.producer())  # type: ignore[arg-type]  # it was read
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
        is_plain=not shared and tuple(one.name for one in product) == (site.probs, site.values),
    )


def _made_of_products(context: ir.Value, behind: Sequence[ir.Value]) -> set[ir.Value]:
    """Of what the context is made of, that which products of queries and keys are behind."""
    known = set(behind)
    waiting = [value for value in behind if value is not context and _is_product(value)]
    products = set(waiting)
    while waiting:
        for node, _ in waiting.pop().uses():
            new = {value for value in node.outputs if value in known and value not in products}
            if node.op_type not in SIZE_OPS:
                products |= new
                waiting += new
    return products


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and is_value_product(node)


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
        if node is None or node.op_type not in PRODUCTS or _turned(node) - {"transB"}:
            raise _Whole("map and values meet in no plain product")
        maps, values = operands(node)
        keys = -1 if "transB" in _turned(node) else -2
        inputs = (self.read(maps, _SQUARE, 0), self.read(values, (None, keys), 0))
        return self._add(node, inputs, (str(context.name), (-2, None)), len(self.shape(context)))

    def read(self, value: ir.Value, asked: Axes, depth: int) -> Key:
        """Note all steps that make a tensor in a tile; ``asked``: where what reads it has rows and keys."""
        shape = self.shape(value)
        rows, keys = (None if axis is None or -axis > len(shape) or shape[axis] == 1 else axis for axis in asked)
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
            inputs, sizes = self._inputs(node, asked, depth + 1)
        except _Whole:
            if is_inside:
                raise
            # A mask without heads, made by other operators: it stays whole, and is cut.
            del self.steps[begun[0] :]
            self._read = begun[1]
            return key
        return self._add(node, inputs, key, len(shape), sizes)

    def _add(
        self, node: ir.Node, inputs: tuple[Key | None, ...], output: Key, rank: int, sizes: int | None = None
    ) -> Key:
        self.steps.append(Step(ir.to_proto(node), inputs, output, rank, sizes))
        return output

    def _inputs(self, node: ir.Node, asked: Axes, depth: int) -> tuple[tuple[Key | None, ...], int | None]:
        """The inputs of an operator, with their axes, and which of them states the shape; ``_Whole`` of others."""
        axes_of, sizes = self._axes_of_inputs(node, asked)
        inputs = [
            None if value is None else self.read(value, axes, depth)
            for value, axes in zip(node.inputs, axes_of, strict=True)
        ]
        return tuple(inputs), sizes

    def _axes_of_inputs(self, node: ir.Node, asked: Axes) -> tuple[list[Axes], int | None]:
        kind, count = node.op_type, len(node.inputs)
        keys = asked[1]
        refusal = _Whole(f"{kind} stands on the way to its map")
        if node.domain not in STANDARD_DOMAINS:
            raise refusal
        if kind in _BY_ENTRY:
            if kind in ("QuantizeLinear", "DequantizeLinear") and np.prod(self._shape(node, 1), dtype=int) != 1:
                raise refusal
            return [asked, *([_WHOLE] * (count - 1) if kind in _OF_FIRST else [asked] * (count - 1))], None
        first = self._shape(node, 0)
        rest = [_WHOLE] * (count - 1)
        if kind == "Softmax":
            axis = node.attributes.get_int("axis")
            if keys != -1 or (-1 if axis is None else axis) not in (-1, len(first) - 1):
                raise refusal
            return [asked], None
        if kind in _REDUCTIONS:
            if (
                keys != -1
                or node.attributes.get_int("keepdims") == 0
                or _list(node, 1, "axes") not in ([-1], [len(first) - 1])
            ):
                raise refusal
            return [asked, *rest], None
        if kind in PRODUCTS and not _turned(node) and min(len(first), len(self._shape(node, 1))) > 1:
            left = [axis if axis != -1 else None for axis in asked]
            right = [axis if axis != -2 else None for axis in asked]
            return [(left[0], left[1]), (right[0], right[1])], None
        return self._axes_of_moved(node, asked, refusal), {"Expand": 1, "Reshape": 1, "ConstantOfShape": 0}.get(kind)

    def _axes_of_moved(self, node: ir.Node, asked: Axes, refusal: _Whole) -> list[Axes]:
        """Of operators that move, cut, join or repeat."""
        kind, rest = node.op_type, [_WHOLE] * (len(node.inputs) - 1)
        first, output = self._shape(node, 0), self.shape(node.outputs[0])
        if kind in ("Expand", "ConstantOfShape"):
            return [asked if kind == "Expand" else _WHOLE, *rest]
        if kind == "Trilu" and asked == _SQUARE:
            return [asked, *rest]
        if kind == "Reshape":
            start = min(axis for axis in asked if axis is not None)
            if first[start:] != output[start:]:
                raise refusal
            return [asked, *rest]
        if kind == "Transpose" and "perm" in node.attributes:
            order = node.attributes["perm"].as_ints()
            return [_mapped(asked, lambda axis: order[axis] - len(order))]
        if kind in ("Squeeze", "Unsqueeze"):
            shorter, longer = sorted((len(first), len(output)))
            listed = _list(node, 1, "axes")
            if listed is None:
                raise refusal
            new = {axis % longer for axis in listed}
            kept = [axis for axis in range(longer) if axis not in new]
            if kind == "Unsqueeze":
                return [_mapped(asked, lambda axis: kept.index(longer + axis) - shorter), *rest]
            return [_mapped(asked, lambda axis: kept[shorter + axis] - longer), *rest]
        if kind == "Concat":
            axis = (node.attributes.get_int("axis") or 0) % len(output) - len(output)
            joined = [self._shape(node, number)[axis] for number in range(len(node.inputs))]
            if axis == asked[0] or (axis == asked[1] and sum(size != 1 for size in joined) != 1):
                raise refusal
            return [asked] * len(node.inputs)
        if kind == "Slice":
            starts, ends, axes = (_list(node, number) for number in (1, 2, 3))
            if starts is None or ends is None or axes is None:
                raise refusal
            cut = {axis % len(first) - len(first): span for axis, *span in zip(axes, starts, ends, strict=True)}
            # Of keys the last ones, a sink's column.
            if asked[0] in cut or (asked[1] in cut and not (cut[asked[1]][0] == 0 > cut[asked[1]][1])):
                raise refusal
            return [asked, *rest]
        if kind == "Gather" and not node.attributes.get_int("axis") and node.inputs[0] not in self._inside:
            return [_WHOLE, _mapped(asked, lambda axis: min(axis + len(first) - 1, 0) or None)]
        is_plain = (
            kind == "GatherND" and not node.attributes.get_int("batch_dims") and node.inputs[0] not in self._inside
        )
        if is_plain and self._shape(node, 1)[-1] == len(first):
            return [_WHOLE, _mapped(asked, lambda axis: axis - 1)]
        raise refusal

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
    capped = (len(logits.addends), len(logits.conditions)) if logits.capped is None else logits.capped
    if logits.reason or site.layout != "batch-heads" or capped != (len(logits.addends), len(logits.conditions)):
        return None
    for scale, value in (*logits.addends, *logits.fills):
        numbers = scale * _numbers_of(value, arrays).astype(np.float64)
        if not ((numbers <= MASKED) | ((numbers == 0) & (value in {added for _, added in logits.addends}))).all():
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
        condition = _condition_of(value, scale) if shown is None else None
        if condition is not None and condition[1].name in read:  # cheaper than to read the numbers again
            shown, value = condition
        masks.append(Seen(read[str(value.name)], len(reader.shape(value)), shown, scale))
    return tuple(masks)


def _numbers_of(value: ir.Value, arrays: Arrays) -> NDArray[Any]:
    """The constants that a mask is or chooses between, which a run may not show all; else what a run gave."""
    node = value.producer()
    chosen = [fixed_input(node, slot) for slot in (1, 2)] if node is not None and node.op_type == "Where" else [None]
    if any(fixed is None for fixed in chosen):
        return array_of(value, arrays)
    return np.concatenate([fixed.ravel() for fixed in chosen if fixed is not None])


def _condition_of(value: ir.Value, scale: float) -> tuple[bool, ir.Value] | None:
    """The condition that chooses between 0 and a number far below it, and whether rows see keys where it is True."""
    node = value.producer()
    if node is None or node.op_type != "Where" or node.inputs[0] is None:
        return None
    numbers = [fixed_input(node, slot) for slot in (1, 2)]
    seen = [None if number is None or number.size != 1 else bool(scale * number.item() == 0) for number in numbers]
    return (seen[0], node.inputs[0]) if seen in ([True, False], [False, True]) and seen[0] is not None else None
