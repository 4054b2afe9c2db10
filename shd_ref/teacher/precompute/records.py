"""Outputs of a squeezed graph as records of a cache."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CodecError, Factors, Maps, NewRecord, codec_error, decode, encode, merge_codec_errors
from shd_ref.mixing import compose_mixing
from shd_ref.teacher.precompute.factored import code_factors, measure_factors
from shd_ref.teacher.rewrite.squeeze import SqueezedLayer
from shd_ref.teacher.run.faults import Outputs
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.run.teacher import TeacherRun

CODED_IN_GRAPH = "sqrt8-row"
"""The codec whose quantiser ends the graph; the others code the graph's float32 maps on the host."""


def make_records(
    work: TeacherRun, batch: Batch, outputs: Outputs, wanted: Container[int], form: Maps | Factors
) -> list[NewRecord]:
    """The batch as records: codes, alphas before clipping, and the mixing that they compose to.

    Args:
        work: the run.
        batch: what was fed.
        outputs: what came back.
        wanted: indices of the samples to make a record of.
        form: of the manifest.

    Raises:
        ShdError: as ``code_factors``, for factored records.
    """
    numbers = [number for number, index in enumerate(batch.indices) if index in wanted]
    if not numbers:
        return []
    inputs = work.inputs
    # A batch that goes into one shard whole needs no copy; a view of a part would keep the rest alive.
    part = slice(len(numbers)) if len(numbers) == len(batch.indices) else numbers
    codes = (
        []
        if isinstance(form, Factors)
        else [_codes_of(work, batch, outputs, layer, part) for layer in work.graph.layers]
    )
    if form.codec != CODED_IN_GRAPH:
        codes = [encode(form.codec, maps) for maps in codes]
    alphas = _stack_layers([outputs[layer.alphas][numbers] for layer in work.graph.layers])
    # Weights by row follow from the alphas and would double a record; weights by map are small.
    mixings = mixings_of(work, alphas) if work.options.alpha_per == "map" else None
    longest = next(outputs[layer.queries or layer.codes].shape[2] for layer in work.graph.layers)
    records = []
    for place, number in enumerate(numbers):
        index = batch.indices[number]
        length = longest if inputs.mask is None else batch.lengths[number]
        records.append(
            NewRecord(
                index=index,
                key=inputs.key(index),
                length=length,
                codes=code_factors(work, batch, outputs, number, length, form)
                if isinstance(form, Factors)
                else [layer[place] for layer in codes],
                alphas=alphas[place],
                mixing=None if mixings is None else mixings[place],
                seed=inputs.seed(index),
                first=int(inputs.firsts[index]) if isinstance(form, Factors) else 0,
                shapes=shapes_of(work, batch, outputs, number)
                if isinstance(form, Maps) and form.shapes == "own"
                else (),
            )
        )
    return records


def _codes_of(
    work: TeacherRun, batch: Batch, outputs: Outputs, layer: SqueezedLayer, part: slice | list[int]
) -> NDArray[Any]:
    """Codes or maps of some samples of a layer, 0 in the rows of padding that a record keeps (CACHE-121)."""
    codes, mask = outputs[layer.codes][part], work.query_mask(batch, layer.site)
    if mask is None:
        return codes
    counted = mask[part]
    # Rows of padding behind are cut off anyway.
    behind = ~np.logical_or.accumulate(counted[:, ::-1], axis=1)[:, ::-1]
    if (counted | behind).all():
        return codes
    zeroed: NDArray[Any] = np.where(counted[:, None, :, None], codes, codes.dtype.type(0))
    return zeroed


def shapes_of(work: TeacherRun, batch: Batch, outputs: Outputs, number: int) -> tuple[tuple[int, int], ...]:
    """Rows and keys of each layer that the record of a sample keeps."""
    held = ((layer.site, outputs[layer.codes].shape[2:]) for layer in work.graph.layers)
    return tuple(work.map_shape(batch, number, site, (rows, keys)) for site, (rows, keys) in held)


def _stack_layers(alphas: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Weights of all layers ``(B, layers, n)`` or ``(B, layers, n, L)``; layers with fewer rows end in zeros."""
    longest = max(each.shape[-1] for each in alphas)
    padded = [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, longest - a.shape[-1])]) for a in alphas]
    return np.stack(padded, axis=1)


def measure_codec(
    work: TeacherRun, batch: Batch, outputs: Outputs, records: Sequence[NewRecord], form: Maps | Factors
) -> CodecError:
    """What coding cost the rows of these samples that count, from outputs with check outputs.

    Args:
        work: the run.
        batch: what was fed.
        outputs: what came back.
        records: what ``make_records`` made of it.
        form: of the manifest.

    Raises:
        ShdError: ``graph-unsupported`` for maps that queries and keys do not make.
    """
    numbers = [batch.indices.index(record.index) for record in records]
    if isinstance(form, Factors):
        return measure_factors(work, outputs, numbers, records, form)
    errors = []
    for layer in work.graph.layers:
        mask = work.query_mask(batch, layer.site)
        merged = np.array(outputs[layer.merged][numbers], dtype=np.float32)
        if mask is not None:
            merged = np.where(mask[numbers, None, :, None], merged, np.float32(0))  # rows without mass do not count
        coded = decode(form.codec, encode(form.codec, merged))
        errors.append(codec_error(merged, coded))
    return merge_codec_errors(errors)


def mixings_of(work: TeacherRun, raw_alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of some samples ``(B, num_layers, H_s, H_t)``, from alphas before clipping ``(B, num_layers, n)``."""
    (samples, num_layers, number), heads = raw_alphas.shape, work.num_teacher_heads
    if work.options.strategy == "mean":
        shape = (samples, num_layers, work.options.num_student_heads, heads)
        return np.full(shape, 1.0 / heads, dtype=np.float32)
    if not number:
        return np.broadcast_to(np.eye(heads, dtype=np.float32), (samples, num_layers, heads, heads))
    clipped = np.clip(raw_alphas.astype(np.float64), 0.0, 1.0)
    mixings = np.empty((samples, num_layers, work.options.num_student_heads, heads), dtype=np.float32)
    for plan in set(work.plans):  # layers that share a plan are composed at once
        columns = [column for column, each in enumerate(work.plans) if each == plan]
        ends = np.cumsum([len(one_round) for one_round in plan])
        alphas = clipped[:, columns].reshape(-1, number)
        rounds: list[NDArray[Any]] = np.split(alphas, ends[:-1], axis=1)
        composed = compose_mixing(rounds, plan, heads)
        mixings[:, columns] = composed.reshape(samples, len(columns), *composed.shape[1:])
    return mixings
