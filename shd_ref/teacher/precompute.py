"""Run a teacher graph over a data set and store its squeezed attention in a cache, resumably."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.cache import (
    CacheReader,
    CacheWriter,
    CodecError,
    Dataset,
    LayerPair,
    Manifest,
    NewRecord,
    SampleInputs,
    ShardPlan,
    codec_error,
    dataset_fingerprint,
    decode,
    encode,
    merge_codec_errors,
    packed_size,
)
from shd_ref.errors import ShdError
from shd_ref.mixing import compose_mixing
from shd_ref.teacher.compare import Comparison, compare_with_reference
from shd_ref.teacher.inputs import Arrays, Batch
from shd_ref.teacher.run import PrecomputeOptions, RunOptions, TeacherRun

SHARD_BYTES = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""

OnProgress = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written."""


@dataclass(frozen=True)
class PrecomputeSummary:
    """What ``precompute`` did and found.

    Attributes:
        folder: the cache.
        samples: in the cache.
        resumed: how many of them were there already.
        seconds: of this run.
        stored_bytes: of all codes in the cache; ``float32_bytes`` is the same maps, unpadded, as float32.
        alphas: all alphas before clipping ``(n,)``; empty for strategies without any.
        num_clipped, num_degenerate: counted over them.
        codec_error: over the rows that were measured.
        compared_samples: how many the first batch held, where teacher, reference and graph were all at hand.
        comparison: what it showed.
    """

    folder: Path
    samples: int
    resumed: int
    seconds: float
    stored_bytes: int
    float32_bytes: int
    alphas: NDArray[np.float32] = field(repr=False)
    num_clipped: int
    num_degenerate: int
    codec_error: CodecError
    compared_samples: int
    comparison: Comparison


def precompute(
    teacher: str | Path,
    arrays: Arrays,
    out: str | Path,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> PrecomputeSummary:
    """Squeeze a teacher's attention over a data set into a cache folder.

    The first batch is also squeezed by the NumPy reference; a difference above tolerance refuses the whole run
    before anything is written. Stopping it at any moment loses at most the shards in progress: the same call
    goes on where it stopped.

    Args:
        teacher: an ``.onnx`` file.
        arrays: model inputs by graph input name, first axis N; others are ignored.
        out: the cache folder, new or with the same job begun.
        options: what to make of the teacher.
        run: how to run it.
        on_progress: called after every batch and shard.

    Raises:
        ShdError: as ``TeacherRun``; ``graph-mismatch`` (in-graph squeeze against the reference), ``cache-mismatch``
            (the folder holds another job), ``cache-exists``, ``write-failed``, ``not-finite``.
    """
    started = time.monotonic()
    work = TeacherRun(Path(teacher), arrays, options, run or RunOptions())
    keys = list(work.inputs.keys())
    first = next(work.inputs.batches(range(len(keys)), work.run.batch_size))
    outputs = work.squeeze_checked(first)
    comparison = compare_with_reference(work.graph, outputs, query_mask=work.query_mask(first))
    manifest = _make_manifest(work, keys, outputs)
    writer = CacheWriter(out, manifest)
    missing = writer.missing_shards()
    done = len(keys) - sum(len(manifest.shard_samples(shard)) for shard in missing)
    resumed, written = done, 0
    for shard in missing:
        records: list[NewRecord] = []
        measured: CodecError | None = None
        for batch in work.inputs.batches(manifest.shard_samples(shard), work.run.batch_size):
            if measured is None:
                # The first batch of a shard also yields the uncoded maps: its receipt states a measured error.
                outputs = work.squeeze_checked(batch)
                records += _records(work, batch, outputs, keys)
                measured = _measure_codec(work, batch, outputs)
            else:
                records += _records(work, batch, work.squeeze(batch), keys)
            if on_progress:
                on_progress(done + len(records), len(keys), written)
        receipt = writer.write_shard(shard, records, measured or CodecError(0.0, 0.0, 0.0, 0))
        done += len(records)
        written += receipt.size
        if on_progress:
            on_progress(done, len(keys), written)
    writer.seal()
    return _summarise(Path(out), resumed, time.monotonic() - started, len(first.indices), comparison)


def _make_manifest(work: TeacherRun, keys: Sequence[str], outputs: dict[str, NDArray[Any]]) -> Manifest:
    options, run = work.options, work.run
    merged = [outputs[layer.merged] for layer in work.graph.layers]
    rows, columns = merged[0].shape[2:]
    if rows != columns:
        raise ShdError(
            "graph-unsupported",
            f"the cache holds square maps (self-attention); got L={rows}, S={columns}: select other layers",
        )
    causal = rows > 1 and all(not np.triu(maps, 1).any() for maps in merged)
    per_sample = len(work.layers) * options.num_student_heads * rows * columns
    per_sample = math.ceil(per_sample / 2) if causal else per_sample
    itemsize = {"sqrt8-row": 1, "bf16": 2}.get(options.codec, 4)
    size = run.samples_per_shard or max(
        1, min(SHARD_BYTES // (per_sample * itemsize), math.ceil(len(keys) / LEAST_SHARDS))
    )
    return Manifest(
        spec_version=shd_ref.SPEC_VERSION,
        created_by=f"squeezing-heads {shd_ref.__version__}",
        teacher=work.fingerprint(),
        num_student_heads=options.num_student_heads,
        layers=tuple(
            LayerPair(student, site.layer, site.name, work.num_teacher_heads) for student, site in work.layers
        ),
        plan=work.plan,
        strategy=options.strategy,
        alpha_rule=options.alpha_rule,
        alpha_per=options.alpha_per,
        temperature=options.temperature,
        support="causal" if causal else "full",
        codec=options.codec,
        inputs=SampleInputs(names=work.inputs.names, mask=work.inputs.mask),
        dataset=Dataset(fingerprint=dataset_fingerprint(keys), num_samples=len(keys)),
        shards=ShardPlan(samples_per_shard=size, seed=run.seed, num_shards=math.ceil(len(keys) / size)),
    )


def _records(
    work: TeacherRun, batch: Batch, outputs: dict[str, NDArray[Any]], keys: Sequence[str]
) -> list[NewRecord]:
    """The batch as records: codes as the graph wrote them, alphas before clipping, the mixing they compose to."""
    options = work.options
    count = len(batch.indices)
    codes = [_codes(options.codec, outputs[layer.codes][:count]) for layer in work.graph.layers]
    alphas = np.stack([outputs[layer.alphas][:count] for layer in work.graph.layers], axis=1)  # before clipping
    _refuse_nan(work, batch, codes, alphas)
    padded = codes[0].shape[2]
    records = []
    for number, index in enumerate(batch.indices):
        length = work.inputs.sample(index)[1] or padded
        records.append(
            NewRecord(
                index=index,
                key=keys[index],
                length=length,
                codes=[layer[number] for layer in codes],
                alphas=alphas[number],
                # Weights by row follow from the alphas and would double a record; weights by map are small.
                mixing=_mixing(work, alphas[number]) if options.alpha_per == "map" else None,
            )
        )
    return records


def _refuse_nan(work: TeacherRun, batch: Batch, codes: Sequence[NDArray[Any]], alphas: NDArray[np.float32]) -> None:
    """NaN is never stored, and the sample that it comes from is named."""
    finite = np.isfinite(alphas).reshape(len(alphas), -1).all(axis=1)  # (B,)
    mask = work.query_mask(batch)
    counted = np.True_ if mask is None else mask[: len(alphas), None, :]
    # A graph's quantiser turns NaN into a row of zeros, as it does a fully masked row: the uncoded maps tell which.
    if any(((layer == 0).all(axis=-1) & counted).any() or (layer != layer).any() for layer in codes):
        outputs = work.squeeze_checked(batch)
        for layer in work.graph.layers:
            maps = outputs[layer.merged][: len(alphas)]
            finite &= np.isfinite(maps).reshape(len(alphas), -1).all(axis=1)
    if not finite.all():
        index = batch.indices[int(np.argmin(finite))]
        raise ShdError(
            "not-finite", f"the teacher gives NaN or infinity on sample {index}: look at its inputs", "MAP-5"
        )


def _mixing(work: TeacherRun, raw_alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of every layer, ``(num_layers, H_s, H_t)``, from alphas before clipping ``(num_layers, n)``."""
    num_layers, heads = len(work.layers), work.num_teacher_heads
    if work.options.strategy == "mean":
        return np.full((num_layers, work.options.num_student_heads, heads), 1.0 / heads, dtype=np.float32)
    if not raw_alphas.shape[1]:
        return np.broadcast_to(np.eye(heads, dtype=np.float32), (num_layers, heads, heads))
    ends = np.cumsum([len(one_round) for one_round in work.plan])
    rounds = np.split(np.clip(raw_alphas.astype(np.float64), 0.0, 1.0), ends[:-1], axis=1)
    return compose_mixing(rounds, work.plan, heads).astype(np.float32)


def _codes(codec: str, output: NDArray[Any]) -> NDArray[Any]:
    return output if codec == "sqrt8-row" else encode(codec, output)


def _measure_codec(work: TeacherRun, batch: Batch, outputs: dict[str, NDArray[Any]]) -> CodecError:
    errors = []
    mask = work.query_mask(batch)
    count = len(batch.indices)
    for layer in work.graph.layers:
        merged = np.array(outputs[layer.merged][:count], dtype=np.float32)
        if mask is not None:
            merged *= mask[:count, None, :, None]  # rows without mass are not measured
        coded = decode(work.options.codec, encode(work.options.codec, merged))
        errors.append(codec_error(merged, coded))
    return merge_codec_errors(errors)


def _summarise(
    folder: Path, resumed: int, seconds: float, compared_samples: int, comparison: Comparison
) -> PrecomputeSummary:
    reader = CacheReader(folder)
    manifest = reader.manifest
    heads, num_layers = manifest.num_student_heads, len(manifest.layers)
    records = [reader.read(key, layers=()) for key in dict.fromkeys(reader.keys())]  # alphas, not maps
    alphas = np.concatenate([record.alphas.reshape(-1) for record in records])
    lengths = [record.length for record in records]
    return PrecomputeSummary(
        folder=folder,
        samples=len(reader),
        resumed=resumed,
        seconds=seconds,
        stored_bytes=num_layers * sum(packed_size(manifest.codec, manifest.support, heads, n) for n in lengths),
        float32_bytes=4 * num_layers * heads * sum(n * n for n in lengths),
        alphas=alphas,
        num_clipped=int(((alphas < 0) | (alphas > 1)).sum()),
        num_degenerate=int((alphas == 0.5).sum()) if manifest.strategy == "shd" else 0,
        codec_error=reader.codec_error,
        compared_samples=compared_samples,
        comparison=comparison,
    )
