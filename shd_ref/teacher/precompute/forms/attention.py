"""Both forms of attention: merged maps, coded in graph or on host, and the teacher's queries and keys.

They share the squeeze and its weights. Queries and keys are judged by the maps that they make, and held against the
teacher's mask.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    Attention,
    CodecError,
    Extent,
    Factors,
    LayerFactors,
    LayerPair,
    Maps,
    Matching,
    SampleRecord,
    codec_error,
    decode,
    decode_factors,
    encode,
    encode_factors,
    rebuild_maps,
)
from shd_ref.cache.codecs.codecs import code_dtype, merge_errors, row_tv_bound
from shd_ref.cache.codecs.factored import factored_kl_bound, row_bounds
from shd_ref.cache.forms.attention import blob_name, cut_map
from shd_ref.errors import inputs_invalid, need
from shd_ref.merging.alpha import ALPHA_RULES
from shd_ref.merging.mixing import compose_mixing
from shd_ref.teacher.options import CODECS_OF, MATCHED, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms.maker import Maker, not_now, tolerance_of
from shd_ref.teacher.run.outputs import COMPARED_ENTRIES, MEASURED_ENTRIES, BatchOutputs, LayerOutputs
from shd_ref.teacher.run.teacher import TeacherRun

CODED_IN_GRAPH: Final = "sqrt8-row"
"""The codec whose quantiser ends the graph; the others code the graph's float32 maps on the host."""

AttentionT = TypeVar("AttentionT", Maps, Factors)
Bound: TypeAlias = Callable[[NDArray[Any], slice], NDArray[np.float64]]
"""Of some rows of merged maps ``(H_s, rows, S)``, by where they lie: ``(H_s, rows)``."""


class AttentionMaker(Maker[AttentionT]):
    """Makes one of the two forms of attention, by its name in options and manifests."""

    NAME: ClassVar[str]
    BY_LAYER: ClassVar[bool] = True

    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> AttentionT | None:
        options, plans = work.options, work.plans
        if options.form != self.NAME or not outputs.layers:
            return None
        same = len(set(plans)) == 1
        squeeze: dict[str, Any] = {
            "num_student_heads": options.num_student_heads,
            "layers": tuple(
                LayerPair(student, site.layer, site.name, work.graph.num_heads) for student, site in work.graph.layers
            ),
            "plan": plans[0] if same else (),
            "plans": None if same else plans,
            "matching": matching_of(options, work.run),
            "strategy": options.strategy,
            "alpha_rule": ALPHA_RULES[0],
            "codec": options.stored_codec,
            "num_student_layers": work.graph.num_student_layers,
            "kinds": work.graph.kinds,
        }
        return self.describe_form(work, outputs, squeeze)

    @abstractmethod
    def describe_form(self, work: TeacherRun, outputs: BatchOutputs, squeeze: dict[str, Any]) -> AttentionT:
        """The form, with the members that both forms share."""

    def options(self, form: AttentionT) -> dict[str, Any]:
        options = {
            "num_student_heads": form.num_student_heads,
            "layer_pairs": tuple((layer.student_layer, layer.teacher_layer) for layer in form.layers),
            "plans": form.layer_plans,
            "strategy": form.strategy,
            "temperature": form.bound_temperature or 1.0,
            "form": form.form,
            "groups": getattr(form, "groups", None),
            CODECS_OF[form.form][0]: form.codec,
        }
        if form.matching is not None:
            matching = {"matched_by": form.matching.by, "calibration_samples": form.matching.samples}
            options |= {"plan": MATCHED} | matching
        return options

    def make(
        self, form: AttentionT, samples: Sequence[BatchOutputs], extents: Sequence[Extent]
    ) -> list[dict[str, Any]]:
        """Alphas before clipping, mixing, and codes."""
        alphas = np.array([[layer.alphas for layer in sample.layers] for sample in samples], np.float32)
        mixings = mixings_of(form, alphas)
        records = []
        for number, sample in enumerate(samples):
            parts: dict[str, Any] = {"alphas": alphas[number]} if alphas.size else {}
            parts["mixing"] = mixings[number]
            codes = self.make_codes(form, sample)
            records.append(parts | dict(zip(map(blob_name, form.student_layers), codes, strict=True)))
        return records

    @abstractmethod
    def make_codes(self, form: AttentionT, sample: BatchOutputs) -> list[Any]:
        """The codes of each layer."""

    @abstractmethod
    def bound(self, form: AttentionT, layer: LayerOutputs, extent: Extent) -> Bound:
        """The total variation that coding may cost each row of a sample's merged maps (CACHE-91)."""

    def recheck(
        self, form: AttentionT, dtype: str, sample: BatchOutputs, record: SampleRecord, entries: int | None = None
    ) -> tuple[int, float]:
        """The total variation between each stored row, decoded, and the row that the teacher gives now."""
        count, largest = 0, 0.0
        for layer in sample.layers:
            student_layer = layer.layer.student_layer
            stored, bound = form.decode_rows(record, student_layer), self.bound(form, layer, record.extent)
            num_rows, keys = form.map_shapes(record.extent)[form.column(student_layer)]
            # Rows of padding are empty (CACHE-129), and factored records leave out those in front.
            counted = (np.arange(num_rows) >= record.first) | layer.layer.rule.pooled
            counted &= True if layer.stored_mask is None else layer.stored_mask[:num_rows]
            for rows, maps in layer.tiles(entries, shape=(num_rows, keys)):  # not all at once: a sample may be long
                current = np.where(counted[rows, None], maps["merged"][..., :keys], 0.0).astype(np.float32)
                difference = 0.5 * np.abs(stored(rows) - current).sum(axis=-1, dtype=np.float64)
                limits = bound(current, rows) + tolerance_of("recheck", dtype)
                if not (difference <= limits).all():
                    head, row = np.unravel_index(int((difference - limits).argmax()), difference.shape)
                    where = f"layer {student_layer} head {head} row {rows.start + row}"
                    raise not_now(record, where, limits[head, row], difference[head, row])
                count, largest = count + difference.size, max(largest, float(difference.max()))
        return count, largest


class MapsMaker(AttentionMaker[Maps]):
    """Makes ``Maps``."""

    NAME: ClassVar[str] = "maps"

    def describe_form(self, work: TeacherRun, outputs: BatchOutputs, squeeze: dict[str, Any]) -> Maps:
        """Causal where no row that counts attends to later keys; records have shapes where maps are not square."""
        axes = {layer.map_axes for layer in outputs.layers}
        one_sequence = {work.graph.site_kinds.kind(site) for _, site in work.graph.layers} <= {None, "encoder"}
        groups = work.options.groups
        has_shapes = not one_sequence or len(axes) > 1 or any(rows != keys for rows, keys in axes)  # CACHE-128
        has_shapes = has_shapes or groups is not None
        first = outputs.layers[0]
        rows = first.map_axes[0] if first.row_mask is None else first.row_mask.sum(axis=-1).max()
        # One row, behind padding in front or not, shows nothing.
        full = has_shapes or rows == 1 or any(layer.looks_ahead.any() for layer in outputs.layers)
        return Maps(
            **squeeze,
            support="full" if full else "causal",
            temperature=work.options.temperature,
            shapes="own" if has_shapes else "length",
            groups=groups,
        )

    def make_codes(self, form: Maps, sample: BatchOutputs) -> list[Any]:
        """Codes ``(H_s, rows, keys)``; ``support-mismatch`` for a teacher that attends to padding."""
        coded: list[Any] = []
        for layer, (rows, keys) in zip(sample.layers, sample.extent.shapes, strict=True):
            where = f"record {sample.index} layer {layer.layer.student_layer}"
            # Rows of padding may also attend to padding at the end: they are emptied before that is refused.
            codes = cut_map(_without_padding(layer.codes[:, :rows], layer), rows, keys, where)
            in_graph = form.codec == CODED_IN_GRAPH and codes.dtype == code_dtype(CODED_IN_GRAPH)
            coded.append(np.ascontiguousarray(codes) if in_graph else encode(form.codec, codes))
        return coded

    def measure(self, form: Maps, samples: Sequence[BatchOutputs], records: Sequence[SampleRecord]) -> CodecError:
        """Over the merged maps before coding; rows without mass do not count."""
        errors = []
        for sample in samples:
            for layer, shape in zip(sample.layers, sample.extent.shapes, strict=True):
                for tile, maps in layer.tiles(MEASURED_ENTRIES, sample.index, shape):
                    merged = _without_padding(maps["merged"][..., : shape[1]], layer, tile.start)
                    merged = merged.astype(np.float32, copy=False)
                    decoded = [decode(form.codec, encode(form.codec, head)) for head in merged]
                    errors.append(codec_error(merged, np.stack(decoded)))
        return merge_errors(CodecError, errors)

    def bound(self, form: Maps, layer: LayerOutputs, extent: Extent) -> Bound:
        """By CACHE-121."""
        return lambda merged, _: row_tv_bound(form.codec, merged)


def matching_of(options: PrecomputeOptions, run: RunOptions) -> Matching | None:
    """The manifest's entry for plans that are matched on the data; None for others."""
    if options.plan != MATCHED:
        return None
    return Matching(options.matched_by, options.calibration_samples, run.seed)


def mixings_of(form: Attention, raw_alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of some samples ``(B, num_layers, H_s, H_t)``, from alphas before clipping ``(B, num_layers, n)``."""
    (samples, num_layers, number), heads = raw_alphas.shape, form.num_teacher_heads
    shape = (samples, num_layers, form.num_student_heads, heads)
    if form.strategy == "mean":
        return np.full(shape, 1.0 / heads, dtype=np.float32)
    if not number:
        return np.broadcast_to(np.eye(heads, dtype=np.float32), (samples, num_layers, heads, heads))
    clipped = np.clip(raw_alphas.astype(np.float64), 0.0, 1.0)
    mixings = np.empty(shape, dtype=np.float32)
    for plan in set(form.layer_plans):  # layers that share a plan are composed at once
        columns = [column for column, other in enumerate(form.layer_plans) if other == plan]
        ends = np.cumsum([len(one_round) for one_round in plan])
        rounds: list[NDArray[Any]] = np.split(clipped[:, columns].reshape(-1, number), ends[:-1], axis=1)
        composed = compose_mixing(rounds, plan, heads)
        mixings[:, columns] = composed.reshape(samples, len(columns), *composed.shape[1:])
    return mixings


def _without_padding(maps: NDArray[Any], layer: LayerOutputs, start: int = 0) -> NDArray[Any]:
    """A copy of maps or codes ``(H_s, rows, keys)`` from a row on, with 0 in the rows of padding (CACHE-129)."""
    rows = maps.copy()
    if layer.stored_mask is not None:
        rows[:, ~layer.stored_mask[start : start + rows.shape[1]]] = 0
    return rows


class FactorsMaker(AttentionMaker[Factors]):
    """Makes ``Factors``."""

    NAME: ClassVar[str] = "factored"

    def describe_form(self, work: TeacherRun, outputs: BatchOutputs, squeeze: dict[str, Any]) -> Factors:
        """Support and windows are read off the mask of a longest sample."""
        support, windows = describe_mask(read_spans(work, outputs))
        factors = tuple(
            LayerFactors(layer.num_kv_heads, layer.d, layer.scale, window)
            for layer, window in zip(work.graph.factors, windows, strict=True)
        )
        padding = "around" if work.inputs.firsts.any() else "behind"
        return Factors(**squeeze, support=support, factors=factors, padding=padding)

    def compare(self, work: TeacherRun, sample: BatchOutputs) -> None:
        """Refuse maps that differ from those of queries and keys (CACHE-143), under the mask that this sample has."""
        if not work.options.is_factored:
            return
        first, length = sample.extent.first, sample.extent.length
        support, windows = describe_mask([layer.spans[:, first:length] - first for layer in sample.layers])
        _check_sample(sample, support, windows)
        stored = zip(work.graph.layers, work.graph.factors, strict=True)
        scales = {student: factors.scale for (student, _), factors in stored}
        for layer, window in zip(sample.layers, windows, strict=True):
            tiles = layer.tiles(COMPARED_ENTRIES if layer.rows else None)
            _compare_maps(layer, tiles, sample.extent, scales[layer.layer.student_layer], support, window)

    def make_codes(self, form: Factors, sample: BatchOutputs) -> list[Any]:
        """Queries and keys of each layer, where the teacher masked the sample as in the manifest."""
        _check_sample(sample, form.support, [factors.window for factors in form.factors])
        return [encode_factors(form.codec, *_cut(layer, sample.extent)) for layer in sample.layers]

    def measure(self, form: Factors, samples: Sequence[BatchOutputs], records: Sequence[SampleRecord]) -> CodecError:
        """Of the maps that the stored numbers make (CACHE-152)."""
        errors = []
        for sample, record in zip(samples, records, strict=True):
            for layer, factors, mixing in zip(sample.layers, form.factors, record.parts["mixing"], strict=True):
                size = sample.extent.length
                tiles = list(layer.tiles(MEASURED_ENTRIES, sample.index, (size, size)))
                _compare_maps(layer, tiles, sample.extent, factors.scale, form.support, factors.window)
                queries, keys = decode_factors(record.parts[blob_name(layer.layer.student_layer)])
                rebuild = functools.partial(rebuild_maps, queries, keys, factors.scale, form.support, mixing)
                for rows, maps in _cut_tiles(tiles, sample.extent):
                    errors.append(codec_error(maps["merged"], rebuild(window=factors.window, rows=rows)))
        return merge_errors(CodecError, errors)

    def bound(self, form: Factors, layer: LayerOutputs, extent: Extent) -> Bound:
        """By CACHE-151, and the difference that queries and keys may make from the teacher's maps."""
        factors = form.factors[form.column(layer.layer.student_layer)]
        bound = factored_kl_bound(form.codec, *_cut(layer, extent), factors.scale, form.support)
        # A merged row is moved at most as far as the row of its head that is moved the most.
        limits = np.full(extent.length, tolerance_of("factored", layer.layer.site.dtype or "float32"))
        limits[extent.first :] += np.sqrt(bound.max(axis=0) / 2)
        return lambda merged, rows: np.broadcast_to(limits[rows], merged.shape[:-1])


def _cut(layer: LayerOutputs, extent: Extent) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Queries ``(H_t, n, d)`` and keys ``(H_kv, n, d)`` of one sample, before they are coded."""
    counted = slice(extent.first, extent.length)
    return layer.queries[:, counted], layer.keys[:, counted]


def _cut_tiles(
    tiles: Iterable[tuple[slice, Mapping[str, NDArray[Any]]]], extent: Extent
) -> Iterator[tuple[slice, dict[str, NDArray[Any]]]]:
    """Rows that count, of these, and maps of them and the keys that count."""
    first, length = extent.first, extent.length
    for tile, maps in tiles:
        low, high = max(tile.start, first), min(tile.stop, length)
        if low < high:
            inside = slice(low - tile.start, high - tile.start)
            cut = {role: array[:, inside, first:length] for role, array in maps.items()}
            yield slice(low - first, high - first), cut


def _check_sample(sample: BatchOutputs, support: str, windows: Sequence[int | None]) -> None:
    mask = sample.layers[0].row_mask
    if mask is not None and not mask[sample.extent.first : sample.extent.length].all():
        rule = f"sample {sample.index} must have its positions in one run to be stored as queries and keys"
        remedy = "pad in front or behind, or use --form maps"
        raise inputs_invalid(f"{rule}; got padding between them: {remedy}", "CACHE-145")
    check_mask(sample, support, windows)


def _compare_maps(
    layer: LayerOutputs,
    tiles: Iterable[tuple[slice, Mapping[str, NDArray[Any]]]],
    extent: Extent,
    scale: float,
    support: str,
    window: int | None,
) -> None:
    site = layer.layer.site
    queries, keys = _cut(layer, extent)
    share, difference = len(queries) // len(keys), 0.0
    for rows, maps in _cut_tiles(tiles, extent):
        for head, probs in enumerate(maps["probs"]):
            of_head = queries[head : head + 1], keys[head // share][None]
            (rebuilt,) = rebuild_maps(*of_head, scale, support, window=window, rows=rows)
            rebuilt -= probs
            difference = float(np.maximum(difference, (0.5 * np.abs(rebuilt, out=rebuilt).sum(axis=-1)).max()))
    limit = tolerance_of("factored", site.dtype or "float32")
    if not difference <= limit:
        rule = f"have the maps that its queries and keys make, within a total variation of {limit:g}"
        remedy = "something else takes part, such as a bias; use --form maps"
        got = f"{difference:.3g}"
        need(False, "graph-unsupported", site.label, rule, got, remedy=remedy, spec_id="CACHE-143")


def describe_mask(spans: Sequence[NDArray[Any]]) -> tuple[str, tuple[int | None, ...]]:
    """The support and each layer's window (None: all), from spans ``(H_t, n, 3)`` of a longest sample (CACHE-144)."""
    windows: list[int | None] = []
    for layer in spans:
        first, n = int(layer[0, -1, 0]), layer.shape[1]
        windows.append(None if first == 0 else n - first)
    ahead = any((layer[..., 1] > np.arange(layer.shape[1])).any() for layer in spans)
    return "full" if ahead or spans[0].shape[1] == 1 else "causal", tuple(windows)


def read_spans(work: TeacherRun, outputs: BatchOutputs) -> list[NDArray[Any]]:
    """The input of ``describe_mask``, without padding in front, which would hide a short window."""
    index = outputs.indices[0]
    if work.inputs.firsts[index]:
        alone = work.inputs.unmasked(work.inputs.batch([index]))
        outputs = work.squeeze(alone)
    length = outputs[0].extent.length
    return [layer.spans[0, :, :length] for layer in outputs.layers]


def check_mask(sample: BatchOutputs, support: str, windows: Sequence[int | None]) -> None:
    """Refuse a teacher that masked this sample in another way than by ``describe_mask`` (CACHE-143)."""
    first, length = sample.extent.first, sample.extent.length
    for outputs, window in zip(sample.layers, windows, strict=True):
        layer = outputs.layer
        low, high = row_bounds(length - first, support, window)
        expected = np.stack([first + low, first + high, high - low + 1], axis=-1)
        actual = outputs.spans[:, first:length]
        wrong = np.argwhere((actual != expected).any(axis=-1))
        if len(wrong):
            head, row = (int(index) for index in wrong[0])
            seen, limits = actual[head, row].tolist(), expected[row].tolist()
            span = f"{limits[2]} from {limits[0]} to {limits[1]} for row {first + row} ({support}, window {window})"
            rule = f"let a row see the keys that causality and a window say, {span}"
            got = f"{seen[2]} from {seen[0]} to {seen[1]} in head {head}: it has a mask of its own; use --form maps"
            need(False, "graph-unsupported", layer.site.label, rule, got, spec_id="CACHE-143")
