"""The teacher's queries and keys: coded, and judged by the maps that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    CodecError,
    CodedFactors,
    Extent,
    Factors,
    LayerFactors,
    NewRecord,
    codec_error,
    decode_factors,
    encode_factors,
    factored_kl_bound,
    merge_codec_errors,
    rebuild_maps,
)
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.forms.maker import Maker, tolerance_of
from shd_ref.teacher.precompute.forms.masks import check_mask, describe_mask, read_spans
from shd_ref.teacher.run.outputs import LayerOutputs, SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


class FactorsMaker(Maker[Factors]):
    """Makes ``Factors``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> Factors:
        """Support and windows are read off the mask of a longest sample."""
        support, windows = describe_mask(read_spans(work, outputs))
        factors = tuple(
            LayerFactors(each.num_kv_heads, each.d, each.scale, window)
            for each, window in zip(work.factors, windows, strict=True)
        )
        padding = "around" if work.inputs.firsts.any() else "behind"
        return Factors(**squeeze, support=support, factors=factors, padding=padding)

    def check(self, form: Factors, samples: Sequence[SampleOutputs]) -> None:
        """Refuse a teacher that masks these samples in another way (CACHE-143).

        Raises:
            ShdError: ``graph-unsupported``; ``inputs-invalid`` for padding between positions that count.
        """
        for sample in samples:
            _check_sample(sample, form.support, [factors.window for factors in form.factors])

    def compare(self, work: TeacherRun, sample: SampleOutputs) -> None:
        """Refuse maps that are not what queries and keys make (CACHE-143), under the mask that this sample has."""
        first, length = sample.extent.first, sample.extent.length
        support, windows = describe_mask([layer.spans[:, first:length] - first for layer in sample.layers])
        _check_sample(sample, support, windows)
        scales = {student: factors.scale for (student, _), factors in zip(work.layers, work.factors, strict=True)}
        for layer, window in zip(sample.layers, windows, strict=True):
            _compare_maps(layer, sample.extent, scales[layer.layer.student_layer], support, window)

    def extent(self, form: Factors, sample: SampleOutputs) -> Extent:
        """Padding in front is left out."""
        return Extent(sample.extent.length, sample.extent.first)

    def make(self, form: Factors, sample: SampleOutputs) -> list[NDArray[Any] | CodedFactors]:
        """Queries and keys of each layer, where the teacher masked the sample as the manifest says.

        Raises:
            ShdError: ``inputs-invalid`` for padding between positions; ``argument-value`` for numbers beyond float16;
                ``graph-unsupported`` for another mask.
        """
        _check_sample(sample, form.support, [factors.window for factors in form.factors])
        return [encode_factors(form.codec, *_cut(layer, sample.extent)) for layer in sample.layers]

    def measure(self, form: Factors, samples: Sequence[SampleOutputs], records: Sequence[NewRecord]) -> CodecError:
        """Of the maps that the stored numbers make (CACHE-152).

        Raises:
            ShdError: ``graph-unsupported`` as ``check``.
        """
        errors = []
        for sample, record in zip(samples, records, strict=True):
            assert record.mixing is not None
            first, n = record.first, record.length
            for layer, factors, coded, mixing in zip(
                sample.layers, form.factors, record.codes, record.mixing, strict=True
            ):
                assert isinstance(coded, CodedFactors)
                _compare_maps(layer, sample.extent, factors.scale, form.support, factors.window)
                found = _rebuild(factors, form.support, *decode_factors(coded), mixing)
                errors.append(codec_error(layer.merged[:, first:n, first:n], found))
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


def _check_sample(sample: SampleOutputs, support: str, windows: Sequence[int | None]) -> None:
    mask = sample.layers[0].row_mask
    if mask is not None and not mask[sample.extent.first : sample.extent.length].all():
        raise ShdError(
            "inputs-invalid",
            f"sample {sample.index} must have its positions in one run to be stored as queries and keys; got padding "
            "between them: pad in front or behind, or use --form maps",
            "CACHE-145",
        )
    check_mask(sample, support, windows)


def _compare_maps(layer: LayerOutputs, extent: Extent, scale: float, support: str, window: int | None) -> None:
    counted, site = slice(extent.first, extent.length), layer.layer.site
    queries, keys = _cut(layer, extent)
    share, difference = len(queries) // len(keys), 0.0
    for head, probs in enumerate(layer.probs[:, counted, counted]):
        (made,) = rebuild_maps(queries[head : head + 1], keys[head // share][None], scale, support, window=window)
        made -= probs
        difference = float(np.maximum(difference, (0.5 * np.abs(made, out=made).sum(axis=-1)).max()))
    limit = tolerance_of("factored", site.dtype or "float32")
    if not difference <= limit:
        raise ShdError(
            "graph-unsupported",
            f"attention site {site.layer} ({site.name}) must have the maps that its queries and keys "
            f"make, within a total variation of {limit:g}; got {difference:.3g}: something else takes part, such "
            "as a bias; use --form maps",
            "CACHE-143",
        )


def _rebuild(
    factors: LayerFactors,
    support: str,
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    mixing: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    return rebuild_maps(queries, keys, factors.scale, support, mixing, window=factors.window)
