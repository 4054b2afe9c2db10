"""Run the teacher again on a few records of a cache and compare: the only check against a wrong teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CacheReader, Maps, factored_kl_bound
from shd_ref.cache.codecs.distortion import row_tv_bound
from shd_ref.errors import ShdError
from shd_ref.teacher.opening.external import hash_teacher
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.precompute.factored import factors_of
from shd_ref.teacher.rewrite.squeeze import SqueezedLayer
from shd_ref.teacher.run.faults import Outputs
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.tolerances import load_tolerances


@dataclass(frozen=True)
class RecheckReport:
    """What the second run showed.

    Attributes:
        records: how many were run again.
        rows: how many rows of maps were compared.
        tv_max: largest total variation between a stored row, decoded, and the same row run again.
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
    """Squeeze a seeded sample of records again and compare them with what the cache holds.

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
    form = reader.manifest.attention
    work = rerun_teacher(reader, teacher, inputs, provider=provider)
    count = len(work.inputs)
    skipped = {index for index in range(count) if work.inputs.key(index) in reader.skipped}
    chosen = [int(i) for i in np.random.default_rng(seed).permutation(count) if int(i) not in skipped][:num_records]
    rows, tv_max = 0, 0.0
    for batch in work.checked_batches(chosen):
        outputs = work.squeeze_checked(batch)
        for number, index in enumerate(batch.indices):
            record = reader.read(work.inputs.key(index))
            for student_layer, layer in zip(form.student_layers, work.graph.layers, strict=True):
                stored = reader.decode(record, student_layer)
                n, keys = form.map_shapes(record.extent)[form.column(student_layer)]
                again = np.asarray(outputs[layer.merged][number, :, :n, :keys], dtype=np.float32).copy()
                again[:, : record.first] = 0.0  # rows of padding in front, which factored records leave out
                mask = work.query_mask(batch, layer.site)
                if mask is not None:
                    # Rows of padding hold nothing (CACHE-121); caches from before that sentence hold what came.
                    again[:, ~mask[number, :n] & ~stored.any(axis=(0, 2))] = 0.0
                difference = 0.5 * np.abs(stored - again).sum(axis=-1, dtype=np.float64)
                rows += difference.size
                tv_max = max(tv_max, float(difference.max()))
                limits = _limit_rows(reader, layer, outputs, number, record.first, again)
                if not (difference <= limits).all():
                    head, row = np.unravel_index(int((difference - limits).argmax()), difference.shape)
                    raise ShdError(
                        "cache-mismatch",
                        f"{cache}: record {record.index} (key {record.key}) layer {student_layer} head {head} "
                        f"row {row} must equal what the teacher gives now within a total variation of "
                        f"{limits[head, row]:.4f}, which is what {form.codec} and another run of the teacher may "
                        f"cost it; got {difference[head, row]:.4f}: the cache was made another way",
                        "CACHE-91",
                    )
    return RecheckReport(records=len(chosen), rows=rows, tv_max=tv_max)


def _limit_rows(
    reader: CacheReader, layer: SqueezedLayer, outputs: Outputs, number: int, first: int, merged: NDArray[Any]
) -> NDArray[np.float64]:
    """``(H_s, n)``: the total variation that each row may have, by CACHE-91."""
    form, tolerances = reader.manifest.attention, load_tolerances()

    def of_dtype(name: str) -> float:
        table = tolerances[name]["total_variation"]
        return float(table.get(reader.manifest.teacher.dtype, table["float32"]))

    if isinstance(form, Maps):
        return of_dtype("recheck") + row_tv_bound(form.codec, merged)
    factors = form.factors[form.column(layer.student_layer)]
    queries, keys = factors_of(layer, outputs, number, first, merged.shape[-1])
    bound = factored_kl_bound(form.codec, queries, keys, factors.scale, form.support)
    # A merged row is moved at most as far as the row of its head that is moved the most.
    limits = np.full(merged.shape[:-1], of_dtype("recheck") + of_dtype("factored"))
    limits[:, first:] += np.sqrt(bound.max(axis=0) / 2)
    return limits


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
    manifest, form = reader.manifest, reader.manifest.attention
    load_teacher(teacher)  # refuses external data outside the folder before anything is hashed
    found = hash_teacher(teacher)
    if found != manifest.teacher.sha256:
        raise ShdError(
            "cache-mismatch",
            f"{reader.folder} must come from this teacher; it was made from {manifest.teacher.name!r} with SHA-256 "
            f"{manifest.teacher.sha256[:16]}..., and {teacher} has {found[:16]}...",
        )
    options = PrecomputeOptions(
        num_student_heads=form.num_student_heads,
        layer_pairs=tuple((layer.student_layer, layer.teacher_layer) for layer in form.layers),
        plans=form.layer_plans,
        strategy=form.strategy,
        alpha_rule=form.alpha_rule,
        alpha_per=form.alpha_per,
        temperature=form.bound_temperature or 1.0,
        form=form.form,
        on_error=manifest.on_error,
    )
    options = (
        replace(options, codec=form.codec) if isinstance(form, Maps) else replace(options, factored_codec=form.codec)
    )
    run = RunOptions(mask=manifest.inputs.mask, decoder_mask=manifest.inputs.decoder_mask, provider=provider)
    work = TeacherRun(Path(teacher), inputs, options, run, input_names=manifest.inputs.names)
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
