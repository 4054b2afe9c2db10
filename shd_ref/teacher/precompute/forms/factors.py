"""The teacher's queries and keys: coded, judged by the maps that they make, and held against the teacher's mask."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    CodecError,
    Extent,
    Factors,
    LayerFactors,
    SampleRecord,
    codec_error,
    decode_factors,
    encode_factors,
    factored_kl_bound,
    merge_codec_errors,
    rebuild_maps,
    row_bounds,
)
from shd_ref.cache.forms.attention import blob_name
from shd_ref.errors import graph_unsupported, inputs_invalid
from shd_ref.teacher.precompute.forms.attention import AttentionMaker
from shd_ref.teacher.precompute.forms.maker import tolerance_of
from shd_ref.teacher.run.outputs import LayerOutputs, StudentOutputs
from shd_ref.teacher.run.rows import COMPARED_ENTRIES, MEASURED_ENTRIES
from shd_ref.teacher.run.teacher import TeacherRun


class FactorsMaker(AttentionMaker[Factors]):
    """Makes ``Factors``."""

    NAME: ClassVar[str] = "factored"

    def describe_form(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> Factors:
        """Support and windows are read off the mask of a longest sample."""
        support, windows = describe_mask(read_spans(work, outputs))
        factors = tuple(
            LayerFactors(layer.num_kv_heads, layer.d, layer.scale, window)
            for layer, window in zip(work.factors, windows, strict=True)
        )
        padding = "around" if work.inputs.firsts.any() else "behind"
        return Factors(**squeeze, support=support, factors=factors, padding=padding)

    def check(self, form: Factors, samples: Sequence[StudentOutputs], extents: Sequence[Extent]) -> None:
        """Refuse a teacher that masks these samples in another way, or padding between positions (CACHE-143)."""
        for sample in samples:
            _check_sample(sample, form.support, [factors.window for factors in form.factors])

    def compare(self, work: TeacherRun, sample: StudentOutputs) -> None:
        """Refuse maps that are not what queries and keys make (CACHE-143), under the mask that this sample has."""
        if not work.options.is_factored:
            return
        first, length = sample.extent.first, sample.extent.length
        support, windows = describe_mask([layer.spans[:, first:length] - first for layer in sample.layers])
        _check_sample(sample, support, windows)
        scales = {student: factors.scale for (student, _), factors in zip(work.layers, work.factors, strict=True)}
        for layer, window in zip(sample.layers, windows, strict=True):
            tiles = layer.tiles(COMPARED_ENTRIES if layer.rows else None)
            _compare_maps(layer, tiles, sample.extent, scales[layer.layer.student_layer], support, window)

    def make_codes(self, form: Factors, sample: StudentOutputs) -> list[Any]:
        """Queries and keys of each layer, where the teacher masked the sample as the manifest says."""
        _check_sample(sample, form.support, [factors.window for factors in form.factors])
        return [encode_factors(form.codec, *_cut(layer, sample.extent)) for layer in sample.layers]

    def measure(
        self, form: Factors, samples: Sequence[StudentOutputs], records: Sequence[SampleRecord]
    ) -> CodecError:
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
        return merge_codec_errors(errors)

    def bound(self, form: Factors, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]) -> NDArray[np.float64]:
        """By CACHE-151, and what queries and keys may make otherwise than the teacher."""
        factors = form.factors[form.column(layer.layer.student_layer)]
        bound = factored_kl_bound(form.codec, *_cut(layer, extent), factors.scale, form.support)
        # A merged row is moved at most as far as the row of its head that is moved the most.
        limits = np.full(merged.shape[:-1], tolerance_of("factored", layer.layer.site.dtype or "float32"))
        limits[:, extent.first :] += np.sqrt(bound.max(axis=0) / 2)
        return limits


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


def _check_sample(sample: StudentOutputs, support: str, windows: Sequence[int | None]) -> None:
    mask = sample.layers[0].row_mask
    if mask is not None and not mask[sample.extent.first : sample.extent.length].all():
        raise inputs_invalid(
            f"sample {sample.index} must have its positions in one run to be stored as queries and keys; got padding "
            "between them: pad in front or behind, or use --form maps",
            "CACHE-145",
        )
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
            one = queries[head : head + 1], keys[head // share][None]
            (made,) = rebuild_maps(*one, scale, support, window=window, rows=rows)
            made -= probs
            difference = float(np.maximum(difference, (0.5 * np.abs(made, out=made).sum(axis=-1)).max()))
    limit = tolerance_of("factored", site.dtype or "float32")
    if not difference <= limit:
        raise graph_unsupported(
            f"attention site {site.layer} ({site.name}) must have the maps that its queries and keys "
            f"make, within a total variation of {limit:g}; got {difference:.3g}: something else takes part, such "
            "as a bias; use --form maps",
            "CACHE-143",
        )


def describe_mask(spans: Sequence[NDArray[Any]]) -> tuple[str, tuple[int | None, ...]]:
    """The support and each layer's window (None: all), from spans ``(H_t, n, 3)`` of a longest sample (CACHE-144)."""
    windows: list[int | None] = []
    for layer in spans:
        first, n = int(layer[0, -1, 0]), layer.shape[1]
        windows.append(None if first == 0 else n - first)
    ahead = any((layer[..., 1] > np.arange(layer.shape[1])).any() for layer in spans)
    return "full" if ahead or spans[0].shape[1] == 1 else "causal", tuple(windows)


def read_spans(work: TeacherRun, outputs: StudentOutputs) -> list[NDArray[Any]]:
    """What ``describe_mask`` takes, without padding in front, which would hide a short window."""
    index = outputs.indices[0]
    if work.inputs.firsts[index]:
        alone = work.inputs.unmasked(work.inputs.batch([index]))
        outputs = work.squeeze(alone)[outputs.student.number]
    length = outputs[0].extent.length
    return [layer.spans[0, :, :length] for layer in outputs.layers]


def check_mask(sample: StudentOutputs, support: str, windows: Sequence[int | None]) -> None:
    """Refuse a teacher that masked this sample in another way than ``describe_mask`` says (CACHE-143)."""
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
            raise graph_unsupported(
                f"attention site {layer.site.layer} ({layer.site.name}) must let a row see the keys that causality "
                f"and a window say, {limits[2]} from {limits[0]} to {limits[1]} for row {first + row} "
                f"({support}, window {window}); got {seen[2]} from {seen[0]} to {seen[1]} in head "
                f"{head}: it has a mask of its own; use --form maps",
                "CACHE-143",
            )
