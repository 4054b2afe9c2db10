"""Outputs of a squeezed graph as factored records: queries and keys coded, and judged by the maps that they make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    CodecError,
    CodedFactors,
    NewRecord,
    codec_error,
    decode_factors,
    encode_factors,
    merge_codec_errors,
    rebuild_maps,
)
from shd_ref.errors import ShdError
from shd_ref.teacher.faults import Outputs
from shd_ref.teacher.inputs import Batch
from shd_ref.teacher.run import TeacherRun
from shd_ref.teacher.squeeze import SqueezedLayer
from shd_ref.tolerances import load_tolerances


def code_factors(
    work: TeacherRun, batch: Batch, outputs: Outputs, number: int, length: int
) -> tuple[CodedFactors, ...]:
    """The queries and keys of one sample, a layer each.

    Args:
        work: the run.
        batch: what was fed.
        outputs: what came back.
        number: of the sample in the batch.
        length: n, its counted positions.

    Raises:
        ShdError: ``inputs-invalid`` for padding before position n; ``argument-value`` for numbers beyond float16.
    """
    mask = work.query_mask(batch)
    if mask is not None and not mask[number, :length].all():
        raise _padding_error(f"sample {batch.indices[number]}")
    codec = work.options.factored_codec
    return tuple(code_layer(codec, layer, outputs, number, length) for layer in work.graph.layers)


def code_layer(codec: str, layer: SqueezedLayer, outputs: Outputs, number: int, length: int) -> CodedFactors:
    """The queries and keys of one sample and layer."""
    return encode_factors(codec, *_factors_of(layer, outputs, number, length))


def measure_factors(
    work: TeacherRun, outputs: Outputs, numbers: Sequence[int], records: Sequence[NewRecord], support: str
) -> CodecError:
    """What coding cost the merged maps of these records (CACHE-110), from outputs with check outputs.

    Args:
        work: the run.
        outputs: what came back.
        numbers: of the records' samples in the batch.
        records: as they will be stored.
        support: of the manifest.

    Raises:
        ShdError: ``graph-unsupported`` as ``check_factors``.
    """
    errors = []
    for number, record in zip(numbers, records, strict=True):
        n = record.length
        _compare_maps(work, outputs, number, n, support)
        if record.mixing is None:
            continue
        for layer, factors, coded, mixing in zip(
            work.graph.layers, work.factors, record.factors, record.mixing, strict=True
        ):
            found = rebuild_maps(*decode_factors(coded), factors.scale, support, mixing)
            errors.append(codec_error(outputs[layer.merged][number, :, :n, :n], found))
    return merge_codec_errors(errors)


def check_factors(work: TeacherRun, outputs: Outputs, mask: NDArray[np.bool_] | None, support: str) -> None:
    """Refuse a teacher whose maps are not what its queries and keys make, before anything is written (CACHE-103).

    Args:
        work: the run.
        outputs: of a batch, with check outputs.
        mask: boolean ``(B, L)``, True = the row counts; None where every row does.
        support: of the manifest.

    Raises:
        ShdError: ``graph-unsupported``; ``inputs-invalid`` for padding before a position that counts.
    """
    count, _, longest, _ = outputs[work.graph.layers[0].probs].shape
    for number in range(count):
        length = longest
        if mask is not None:
            length = int(np.flatnonzero(mask[number]).max()) + 1
            if not mask[number, :length].all():
                raise _padding_error("a sample")
        _compare_maps(work, outputs, number, length, support)


def _compare_maps(work: TeacherRun, outputs: Outputs, number: int, length: int, support: str) -> None:
    limits = load_tolerances()["factored"]["total_variation"]
    for layer, factors in zip(work.graph.layers, work.factors, strict=True):
        queries, keys = _factors_of(layer, outputs, number, length)
        made = rebuild_maps(queries, keys, factors.scale, support)
        probs = outputs[layer.probs][number, :, :length, :length]
        difference = float((0.5 * np.abs(made - probs).sum(axis=-1)).max())
        limit = limits.get(layer.site.dtype, limits["float32"])
        if not difference <= limit:
            raise ShdError(
                "graph-unsupported",
                f"attention site {layer.site.layer} ({layer.site.name}) must have the maps that its queries and keys "
                f"make, within a total variation of {limit:g}; got {difference:.3g}: something else takes part, such "
                "as a window, a bias or a mask of its own; use --form maps",
                "CACHE-103",
            )


def _factors_of(
    layer: SqueezedLayer, outputs: Outputs, number: int, length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    queries, keys = (outputs[str(name)][number, :, :length] for name in (layer.queries, layer.keys))
    return queries, keys


def _padding_error(whose: str) -> ShdError:
    return ShdError(
        "inputs-invalid",
        f"{whose} must have padding behind its last position only to be stored as queries and keys; got padding "
        "before it: pad on the right, or use --form maps",
        "CACHE-103",
    )
