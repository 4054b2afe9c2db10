"""Attention in tiles of query rows: a Loop makes some rows of a map, uses them up, and goes on.

Of a site one Loop gives what the teacher goes on with and, by the way, the products of its maps with the values of
other heads, which is all that alphas need; with these known another Loop makes the codes of merged maps. Keys that no
row of a tile sees are left out, so causal maps cost half, and windows grow linearly with the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from shd_ref.teacher.graph.factors import MASKED
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.tiles import Key, Seen, SiteTiles, Step
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.opening.model import onnx
from shd_ref.teacher.rewrite.function import MergeRule, batch_heads, merge_and_code, spans_of, values_of

Span: TypeAlias = tuple[str, str]
"""Names of the first position and of the one behind the last, int64 ``(1,)``."""

TILES_DOMAIN: Final = "squeezing_heads_tiles"
"""Prefix of what all students of a teacher share."""
TILE_BYTES: Final = 2**24
"""Maps of a tile in float32, about."""
WHOLE_BYTES: Final = 2**24
"""Maps of a batch in float32 that are made whole."""
_LEAST_ROWS: Final = 16
_MOST_ROWS: Final = 256


def choose_tile(heads: int, samples: int, rows: int, keys: int) -> int:
    """Query rows of a tile, or 0 where whole maps of so many heads and samples are small."""
    if 4 * heads * samples * rows * keys <= WHOLE_BYTES:
        return 0
    fitting = TILE_BYTES // (4 * heads * samples * max(keys, 1))
    return min(_MOST_ROWS, max(_LEAST_ROWS, fitting // _LEAST_ROWS * _LEAST_ROWS))


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


def list_slots(tiles: SiteTiles, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """For each head the heads whose values its map meets in the groups that hold it; equally many, its own first."""
    needed = []
    for head in range(len(tiles.value_heads)):
        others = {tiles.value_heads[other] for group in groups if head in group for other in group}
        own = tiles.value_heads[head]
        needed.append((own, *sorted(others - {own})))
    most = max(map(len, needed))
    return tuple(slots + slots[:1] * (most - len(slots)) for slots in needed)


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
                zero, one = (self.body.const(np.array(number)) for number in (0, 1))
                places = self.body.op("Range", self.body.op("Neg", length), zero, one)
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
        kept = inner.op("Identity", self._keep)
        graph = onnx.helper.make_graph(
            inner.nodes,
            f"{inner.prefix}body",
            [
                onnx.helper.make_tensor_value_info(self._number, onnx.TensorProto.INT64, []),
                onnx.helper.make_tensor_value_info(self._keep, onnx.TensorProto.BOOL, []),
            ],
            [
                onnx.helper.make_tensor_value_info(kept, onnx.TensorProto.BOOL, []),
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
        one = _seen(inner, mask, loop.tile.make(mask.key))
        one = one if mask.rank == 4 else inner.op("Unsqueeze", one, inner.const(list(range(4 - mask.rank))))
        seen = inner.op("And", seen, one) if seen else one
    whole = inner.concat([inner.const([1, 1]), loop.tile._count, inner.sizes(*tiles.shape_source(1))], 0)
    return loop.finish((spans_of(inner, inner.op("Expand", seen, whole)), 4))[0]


def _seen(body: Body, mask: Seen, name: str) -> str:
    if mask.shown is not None:
        return name if mask.shown else body.op("Not", name)
    added = body.op("Mul", body.op("Cast", name, to=FLOAT), body.const(float(mask.scale)))
    return body.op("Greater", added, body.const(MASKED / 2))


@dataclass(frozen=True)
class Forward:
    """What the Loop of a site gives: spans of masks, and products with values of ``slots`` ``(B, H, L, W)``."""

    spans: str | None
    sums: str | None


class TiledAttention:
    """A teacher whose sites run in tiles: nodes in a body, and the nodes of the graph that they stand for."""

    def __init__(self, body: Body, tiling: Tiling) -> None:
        self.tiling = tiling
        self.replaced: set[str] = set()
        self.forward: dict[int, Forward] = {}
        spans: dict[tuple[Seen, ...], str | None] = {}
        for layer, tiles in tiling.sites.items():
            if tiles.reason is not None:
                continue
            body.prefix = f"{TILES_DOMAIN}/{layer}/"
            if tiles.masks is not None and tiles.masks not in spans:
                spans[tiles.masks] = add_spans_of_masks(body, tiles, tiling.rows)
            span = None if tiles.masks is None else spans[tiles.masks]
            slots = tiling.slots.get(layer)
            made = self._add_loop(body, tiles, tiling.rows, span, slots)
            self.forward[layer] = Forward(span, self._take(body, tiles, slots, *made))

    def _add_loop(
        self, body: Body, tiles: SiteTiles, rows: int, spans: str | None, slots: Sequence[Sequence[int]] | None
    ) -> list[str]:
        site = tiles.site
        others = "" if slots is None else self._other_values(body, tiles, slots)
        loop = TileLoop(body, tiles, rows, spans)
        results = [(loop.tile.make(tiles.context), tiles.rank)]
        if others:
            probs = batch_heads(loop.inner, loop.tile.make(tiles.probs), site.layout, site.num_heads or 1)
            maps = loop.inner.op("Cast", probs, to=FLOAT)
            results.append((loop.inner.op("MatMul", maps, loop.tile.cut(others, (None, -2))), 4))
        return loop.finish(*results)

    def _take(
        self, body: Body, tiles: SiteTiles, slots: Sequence[Sequence[int]] | None, context: str, *products: str
    ) -> str | None:
        """Give the teacher its context; the products that alphas need."""
        site = tiles.site
        body.rename(context, site.context)
        self.replaced.add(site.context)
        if slots is None or not self._reads_context(tiles):
            return products[0] if products else None
        own = body.op("Cast", batch_heads(body, site.context, site.layout, site.num_heads or 1), to=FLOAT)
        return body.concat([own, *products], -1) if products else own

    @staticmethod
    def _reads_context(tiles: SiteTiles) -> bool:
        """Whether the context is the product with the head's own values, in the precision of the sums."""
        return tiles.is_plain and (tiles.site.dtype or "float32") == "float32"

    def _other_values(self, body: Body, tiles: SiteTiles, slots: Sequence[Sequence[int]]) -> str:
        """Values of these heads side by side ``(B, H, S, W)``, without the own ones where the context has them."""
        start = 1 if self._reads_context(tiles) else 0
        heads = [head for of_head in slots for head in of_head[start:]]
        if not heads:
            return ""
        site, width = tiles.site, len(heads) // len(slots)
        values = body.op("Gather", body.op("Cast", values_of(body, site), to=FLOAT), body.const(heads), axis=1)
        split = body.reshape(values, 0, len(slots), width, -1, site.d_v or 0)
        return body.reshape(
            body.op("Transpose", split, perm=[0, 1, 3, 2, 4]), 0, len(slots), -1, width * (site.d_v or 0)
        )


def add_codes(
    body: Body, tiles: SiteTiles, rule: MergeRule, rows: int, spans: str | None, weights: str | None
) -> str:
    """Codes of merged maps ``(B, H_s, L, S)``, from every head's weight in its group, where there are any."""
    loop = TileLoop(body, tiles, rows, spans)
    inner = loop.inner
    codes = merge_rows(loop.tile, rule, weights)["codes"]
    if loop.span is not None:
        # The other keys are told nothing of.
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
        made = merge_rows(tile, self.rule, "weights" if "weights" in self.sources else None)
        for role, name in made.items():
            body.rename(name, role)
        types = {role: onnx.helper.np_dtype_to_tensor_dtype(dtypes[role]) for role in self.sources}
        types |= dict.fromkeys(("start", "stop"), onnx.TensorProto.INT64)
        inputs = [onnx.helper.make_tensor_value_info(role, dtype, None) for role, dtype in types.items()]
        outputs = [onnx.ValueInfoProto(name=role) for role in made]
        graph = onnx.helper.make_graph(body.nodes, "rows", inputs, outputs, body.initializers)
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", self.opset)], ir_version=8)
