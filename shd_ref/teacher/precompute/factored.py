"""Outputs of a squeezed graph as factored records: queries and keys coded, and judged by the maps that they make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    CodecError,
    CodedFactors,
    Factors,
    LayerFactors,
    NewRecord,
    codec_error,
    decode_factors,
    encode_factors,
    merge_codec_errors,
    rebuild_maps,
)
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.masks import check_mask
from shd_ref.teacher.rewrite.squeeze import SqueezedLayer
from shd_ref.teacher.run.faults import Outputs
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.tolerances import load_tolerances


def code_factors(
    work: TeacherRun, batch: Batch, outputs: Outputs, number: int, length: int, form: Factors
) -> tuple[CodedFactors, ...]:
    """The queries and keys of one sample, a layer each, where the teacher masked it as the manifest says.

    Args:
        work: the run.
        batch: what was fed.
        outputs: what came back.
        number: of the sample in the batch.
        length: n, its counted positions.
        form: of the manifest.

    Raises:
        ShdError: ``inputs-invalid`` for padding between positions; ``argument-value`` for numbers beyond float16;
            ``graph-unsupported`` for another mask.
    """
    index = batch.indices[number]
    first, mask = int(work.inputs.firsts[index]), work.query_mask(batch, work.layers[0][1])
    if mask is not None and not mask[number, first:length].all():
        raise _padding_error(f"sample {index}")
    check_mask(form, work.graph.layers, outputs, number, first, length)
    return tuple(code_layer(form.codec, layer, outputs, number, first, length) for layer in work.graph.layers)


def code_layer(
    codec: str, layer: SqueezedLayer, outputs: Outputs, number: int, first: int, length: int
) -> CodedFactors:
    """The queries and keys of one sample and layer."""
    return encode_factors(codec, *factors_of(layer, outputs, number, first, length))


def measure_factors(
    work: TeacherRun, outputs: Outputs, numbers: Sequence[int], records: Sequence[NewRecord], form: Factors
) -> CodecError:
    """What coding cost the merged maps of these records (CACHE-110), from outputs with check outputs.

    Args:
        work: the run.
        outputs: what came back.
        numbers: of the records' samples in the batch.
        records: as they will be stored.
        form: of the manifest.

    Raises:
        ShdError: ``graph-unsupported`` as ``check_factors``.
    """
    errors = []
    for number, record in zip(numbers, records, strict=True):
        first, n = record.first, record.length
        _compare_maps(work, outputs, number, first, n, form)
        if record.mixing is None:
            continue
        for layer, factors, coded, mixing in zip(
            work.graph.layers, form.factors, record.codes, record.mixing, strict=True
        ):
            assert isinstance(coded, CodedFactors)
            found = _rebuild(factors, form.support, *decode_factors(coded), mixing)
            errors.append(codec_error(outputs[layer.merged][number, :, first:n, first:n], found))
    return merge_codec_errors(errors)


def check_factors(work: TeacherRun, outputs: Outputs, mask: NDArray[np.bool_] | None, form: Factors) -> None:
    """Refuse a teacher whose maps are not what its queries and keys make, before anything is written (CACHE-103).

    Args:
        work: the run.
        outputs: of a batch, with check outputs.
        mask: boolean ``(B, L)``, True = the row counts; None where every row does.
        form: of the manifest.

    Raises:
        ShdError: ``graph-unsupported``; ``inputs-invalid`` for padding between positions that count.
    """
    count, _, longest, _ = outputs[work.graph.layers[0].probs].shape
    for number in range(count):
        first, length = 0, longest
        if mask is not None:
            first, length = counted_range(mask[number])
            if not mask[number, first:length].all():
                raise _padding_error("a sample")
        check_mask(form, work.graph.layers, outputs, number, first, length)
        _compare_maps(work, outputs, number, first, length, form)


def counted_range(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """The first position of a mask ``(L,)`` that counts, and one more than the last."""
    counted = np.flatnonzero(mask)
    return int(counted[0]), int(counted[-1]) + 1


def _compare_maps(work: TeacherRun, outputs: Outputs, number: int, first: int, length: int, form: Factors) -> None:
    limits = load_tolerances()["factored"]["total_variation"]
    for layer, factors in zip(work.graph.layers, form.factors, strict=True):
        queries, keys = factors_of(layer, outputs, number, first, length)
        made = _rebuild(factors, form.support, queries, keys)
        probs = outputs[layer.probs][number, :, first:length, first:length]
        difference = float((0.5 * np.abs(made - probs).sum(axis=-1)).max())
        limit = limits.get(layer.site.dtype, limits["float32"])
        if not difference <= limit:
            raise ShdError(
                "graph-unsupported",
                f"attention site {layer.site.layer} ({layer.site.name}) must have the maps that its queries and keys "
                f"make, within a total variation of {limit:g}; got {difference:.3g}: something else takes part, such "
                "as a bias; use --form maps",
                "CACHE-103",
            )


def _rebuild(
    factors: LayerFactors,
    support: str,
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    mixing: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    return rebuild_maps(queries, keys, factors.scale, support, mixing, window=factors.window)


def factors_of(
    layer: SqueezedLayer, outputs: Outputs, number: int, first: int, length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Queries ``(H_t, n, d)`` and keys ``(H_kv, n, d)`` of one sample and layer, before they are coded."""
    queries, keys = (outputs[str(name)][number, :, first:length] for name in (layer.queries, layer.keys))
    return queries, keys


def _padding_error(whose: str) -> ShdError:
    return ShdError(
        "inputs-invalid",
        f"{whose} must have its positions in one run to be stored as queries and keys; got padding between them: "
        "pad in front or behind, or use --form maps",
        "CACHE-113",
    )
