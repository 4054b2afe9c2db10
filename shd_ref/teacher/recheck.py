"""Run the teacher again on a few records of a cache and compare: the only check against a wrong teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CacheReader, StoredRecord, decode, decode_factors, encode, rebuild_maps
from shd_ref.errors import ShdError
from shd_ref.teacher.external import hash_teacher
from shd_ref.teacher.factored import code_layer
from shd_ref.teacher.faults import Outputs
from shd_ref.teacher.load import load_teacher
from shd_ref.teacher.records import mixing_of
from shd_ref.teacher.run import PrecomputeOptions, RunOptions, TeacherRun
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.squeeze import SqueezedLayer
from shd_ref.tolerances import load_tolerances


@dataclass(frozen=True)
class RecheckReport:
    """What the second run showed.

    Attributes:
        records: how many were run again.
        rows: how many rows of maps were compared.
        tv_max: largest total variation between a stored row and the same row run again and coded anew.
    """

    records: int
    rows: int
    tv_max: float


def recheck_records(
    cache: str | Path,
    teacher: str | Path,
    inputs: Source | Arrays,
    *,
    num_records: int = 8,
    seed: int = 0,
    provider: str = "cpu",
) -> RecheckReport:
    """Squeeze a seeded sample of records anew and compare them with what the cache holds.

    Args:
        cache: a sealed cache, a folder or an address.
        teacher: the ``.onnx`` file that it should come from.
        inputs: the model inputs that it should come from.
        num_records: how many records to run.
        seed: of the choice.
        provider: as in ``precompute``; it may differ from the first run's.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher, other inputs or maps that differ; ``sample-missing``.
    """
    reader = CacheReader(cache)
    manifest = reader.manifest
    work = rerun_teacher(reader, teacher, inputs, provider=provider)
    count = len(work.inputs)
    skipped = {index for index in range(count) if work.inputs.key(index) in reader.skipped}
    chosen = [int(i) for i in np.random.default_rng(seed).permutation(count) if int(i) not in skipped][:num_records]
    rows, tv_max = 0, 0.0
    for batch in work.batches(chosen):
        outputs = work.squeeze_checked(batch)
        for number, index in enumerate(batch.indices):
            record = reader.read(work.inputs.key(index))
            for student_layer, layer in zip(manifest.student_layers, work.graph.layers, strict=True):
                stored = reader.decode(record, student_layer)
                again = _map_again(work, outputs, layer, number, reader, record)
                difference = 0.5 * np.abs(stored - again).sum(axis=-1)
                rows += difference.size
                tv_max = max(tv_max, float(difference.max()))
                limit = float(load_tolerances()["recheck"]["total_variation"])
                if difference.max() > limit:
                    head, row = np.unravel_index(int(difference.argmax()), difference.shape)
                    raise ShdError(
                        "cache-mismatch",
                        f"{cache}: record {record.index} (key {record.key}) layer {student_layer} head {head} "
                        f"row {row} must equal what the teacher gives now within a total variation of {limit}; "
                        f"got {difference.max():.4f}: the cache was made another way",
                    )
    return RecheckReport(records=len(chosen), rows=rows, tv_max=tv_max)


def _map_again(
    work: TeacherRun, outputs: Outputs, layer: SqueezedLayer, number: int, reader: CacheReader, record: StoredRecord
) -> NDArray[np.float32]:
    """The maps of one layer as the cache would hold them, had it been made now."""
    manifest, n = reader.manifest, record.length
    if manifest.factors is None:
        merged = np.asarray(outputs[layer.merged][number, :, :n, :n], dtype=np.float32)
        return decode(manifest.codec, encode(manifest.codec, merged))
    column = manifest.student_layers.index(layer.student_layer)
    queries, keys = decode_factors(code_layer(manifest.codec, layer, outputs, number, record.first, n))
    alphas = np.stack([outputs[each.alphas][number] for each in work.graph.layers])
    mixing = mixing_of(work, alphas)[column]
    factors = manifest.factors[column]
    return rebuild_maps(
        queries, keys, factors.scale, manifest.support, mixing, window=factors.window, first=record.first
    )


def rerun_teacher(
    reader: CacheReader, teacher: str | Path, inputs: Source | Arrays, *, provider: str = "cpu"
) -> TeacherRun:
    """The teacher of a cache, ready to squeeze as the cache was squeezed.

    Args:
        reader: the cache; a partial one may lack some of the inputs.
        teacher: the ``.onnx`` file that it should come from.
        inputs: the model inputs that it should come from, or some of them.
        provider: as in ``precompute``.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher or other inputs.
    """
    manifest = reader.manifest
    load_teacher(teacher)  # refuses external data outside the folder before anything is hashed
    found = hash_teacher(teacher)
    if found != manifest.teacher.sha256:
        raise ShdError(
            "cache-mismatch",
            f"{reader.folder} must come from this teacher; it was made from {manifest.teacher.name!r} with SHA-256 "
            f"{manifest.teacher.sha256[:16]}..., and {teacher} has {found[:16]}...",
        )
    options = PrecomputeOptions(
        num_student_heads=manifest.num_student_heads,
        layer_pairs=tuple((layer.student_layer, layer.teacher_layer) for layer in manifest.layers),
        plans=manifest.layer_plans,
        strategy=manifest.strategy,
        alpha_rule=manifest.alpha_rule,
        alpha_per=manifest.alpha_per,
        temperature=manifest.temperature,
        on_error=manifest.on_error,
    )
    options = (
        replace(options, codec=manifest.codec)
        if manifest.factors is None
        else replace(options, form="factored", factored_codec=manifest.codec)
    )
    work = TeacherRun(Path(teacher), inputs, options, RunOptions(mask=manifest.inputs.mask, provider=provider))
    count = len(work.inputs)
    keys = map(work.inputs.key, range(count))
    absent = [i for i, key in enumerate(keys) if key not in reader and key not in reader.skipped]
    if absent and (reader.sealed or len(absent) == count):
        raise ShdError(
            "cache-mismatch",
            f"{reader.folder} must hold every sample of these inputs; {len(absent)} of {count} are not in it, "
            f"first sample {absent[0]} with key {work.inputs.key(absent[0])}: they are other inputs",
        )
    return work
