"""Merged maps: cut to each sample, coded in the graph or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CodecError, CodedFactors, Extent, Maps, NewRecord, codec_error, decode, encode
from shd_ref.cache.codecs.codecs import code_dtype
from shd_ref.cache.codecs.distortion import merge_codec_errors, row_tv_bound
from shd_ref.cache.forms.maps import cut_map
from shd_ref.teacher.precompute.forms.maker import Maker
from shd_ref.teacher.run.outputs import LayerOutputs, SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

CODED_IN_GRAPH: Final = "sqrt8-row"
"""The codec whose quantiser ends the graph; the others code the graph's float32 maps on the host."""


class MapsMaker(Maker[Maps]):
    """Makes ``Maps``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> Maps:
        """Causal where no row that counts looks ahead; each record with its shape where maps are not square."""
        shapes = "own" if has_own_shapes(work, outputs) else "length"
        support = find_support(work, outputs)
        return Maps(**squeeze, support=support, temperature=outputs.student.options.temperature, shapes=shapes)

    def check(self, form: Maps, samples: Sequence[SampleOutputs]) -> None:
        """Maps hold what any teacher gives."""

    def extent(self, form: Maps, sample: SampleOutputs) -> Extent:
        """Padding in front is stored, as rows of zeros."""
        return Extent(sample.extent.length, shapes=sample.extent.shapes if form.shapes == "own" else ())

    def make(self, form: Maps, sample: SampleOutputs) -> list[NDArray[Any] | CodedFactors]:
        """Codes ``(H_s, rows, keys)``, of a graph that codes so, or of one that gives float32 maps.

        Raises:
            ShdError: ``support-mismatch`` for a teacher that attends to padding.
        """
        made: list[NDArray[Any] | CodedFactors] = []
        for layer, (rows, keys) in zip(sample.layers, sample.extent.shapes, strict=True):
            where = f"record {sample.index} layer {layer.layer.student_layer}"
            # Rows of padding may also look at padding at the end: they are emptied before that is refused.
            codes = cut_map(_without_padding(layer.codes[:, :rows], layer), rows, keys, where)
            in_graph = form.codec == CODED_IN_GRAPH and codes.dtype == code_dtype(CODED_IN_GRAPH)
            made.append(np.ascontiguousarray(codes) if in_graph else encode(form.codec, codes))
        return made

    def measure(self, form: Maps, samples: Sequence[SampleOutputs], records: Sequence[NewRecord]) -> CodecError:
        """Over the merged maps before coding; rows without mass do not count."""
        errors = []
        for sample in samples:
            for layer, (rows, keys) in zip(sample.layers, sample.extent.shapes, strict=True):
                merged = _without_padding(layer.merged[:, :rows, :keys], layer).astype(np.float32, copy=False)
                decoded = [decode(form.codec, encode(form.codec, head)) for head in merged]
                errors.append(codec_error(merged, np.stack(decoded)))
        return merge_codec_errors(errors)

    def bound(self, form: Maps, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]) -> NDArray[np.float64]:
        """By CACHE-121."""
        return row_tv_bound(form.codec, merged)


def find_support(work: TeacherRun, outputs: StudentOutputs) -> str:
    """Whether no row that counts looks ahead: ``"causal"``, else ``"full"``, as are maps that are not square.

    Args:
        work: the run.
        outputs: with check outputs, or what was seen of these.
    """
    rows, columns = outputs.layers[0].map_axes
    if rows != columns or rows == 1 or has_own_shapes(work, outputs):
        return "full"
    return "full" if any(layer.looks_ahead.any() for layer in outputs.layers) else "causal"


def has_own_shapes(work: TeacherRun, outputs: StudentOutputs) -> bool:
    """Whether the maps of some layers have other rows and keys than the positions of the sample (CACHE-128)."""
    shapes = {layer.map_axes for layer in outputs.layers}
    one_sequence = {work.site_kinds.kind(site) for _, site in work.layers} <= {None, "encoder"}
    return not one_sequence or len(shapes) > 1 or any(rows != keys for rows, keys in shapes)


def _without_padding(maps: NDArray[Any], layer: LayerOutputs) -> NDArray[Any]:
    """A copy of maps or codes ``(H_s, rows, keys)`` with 0 in the rows of padding (CACHE-129)."""
    rows = maps.copy()
    if layer.row_mask is not None:
        rows[:, ~layer.row_mask[: rows.shape[1]]] = 0
    return rows
