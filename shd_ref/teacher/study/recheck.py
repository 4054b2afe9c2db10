"""Run the teacher again on a few records of a cache and compare: the only check against a wrong teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shd_ref.cache import AveragedTeacher, CacheReader, Teacher
from shd_ref.errors import ShdError, need
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import hash_teacher
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import maker_of, options_for
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.sources import Arrays, Source


@dataclass(frozen=True)
class RecheckReport:
    """Records and rows (of targets apart) that were run again, and the largest total variation of a map's row."""

    records: int
    rows: int
    tv_max: float
    target_rows: int


def recheck_records(
    cache: str | Path,
    teacher: str | Path,
    inputs: Source | Arrays,
    *,
    with_teachers: Sequence[str | Path] = (),
    num_records: int = 8,
    seed: int = 0,
    provider: str = "cpu",
) -> RecheckReport:
    """Squeeze a seeded sample of records again and compare them with the cache.

    Args:
        cache: a sealed cache, a folder or an address.
        teacher: the ``.onnx`` file that it should come from.
        inputs: the model inputs that it should come from.
        with_teachers: the further teachers of a mean of logits, in the order of the manifest.
        provider: as in ``precompute``; it may differ from the first run's.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher, other inputs or maps that differ; ``sample-missing``.
    """
    reader = CacheReader(cache)
    manifest = reader.manifest
    work = rerun_teacher(reader, teacher, inputs, with_teachers=with_teachers, provider=provider)
    for form in manifest.forms:
        maker_of(form).files(work, form)  # refuses other ones than the manifest's
    count = len(work.inputs)
    skipped = {index for index in range(count) if work.inputs.key(index) in reader.skipped}
    chosen = [int(i) for i in np.random.default_rng(seed).permutation(count) if int(i) not in skipped][:num_records]
    rows, tv_max, target_rows = 0, 0.0, 0
    parts = (
        (position, outputs)
        for batch in work.checked_batches(chosen)
        for position, outputs in enumerate(work.squeeze_parts(batch))
    )
    for position, outputs in parts:
        for number in range(len(outputs.indices)):
            sample = outputs[number]
            record = reader.read(sample.key)
            for form in manifest.forms:
                maker = maker_of(form)
                if maker.BY_LAYER:
                    compared, difference = maker.recheck(form, manifest.teacher.dtype, sample, record)
                    rows, tv_max = rows + compared, max(tv_max, difference)
                elif not position:
                    target_rows += maker.recheck(form, manifest.teacher.dtype, sample, record)[0]
    return RecheckReport(records=len(chosen), rows=rows, tv_max=tv_max, target_rows=target_rows)


def rerun_teacher(
    reader: CacheReader,
    teacher: str | Path,
    inputs: Source | Arrays,
    *,
    with_teachers: Sequence[str | Path] | None = None,
    provider: str = "cpu",
) -> TeacherRun:
    """The teacher of a cache, ready to squeeze as that was; without ``with_teachers`` for attention alone."""
    manifest, has_targets = reader.manifest, with_teachers is not None
    _check_teachers(reader, (teacher, *(with_teachers or ())), has_targets=has_targets)
    others = tuple(map(Path, with_teachers or ()))
    options = PrecomputeOptions(**options_for(manifest, has_targets=has_targets) | {"with_teachers": others})
    # Alone, as a record is a sample's own: in a batch, padding may move what was made one at a time.
    run = RunOptions(manifest.inputs.mask, batch_size=1, provider=provider)
    work = TeacherRun.open(Path(teacher), inputs, options, run, input_names=manifest.inputs.names)
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


def _check_teachers(reader: CacheReader, teachers: Sequence[str | Path], *, has_targets: bool) -> None:
    """Refuse other teachers than those of the cache; without targets its first one is enough."""
    manifest = reader.manifest
    averaged = manifest.logits.with_teachers if has_targets and manifest.logits is not None else ()
    if len(averaged) != len(teachers) - 1:
        names = ", ".join(repr(teacher.name) for teacher in averaged) or "none"
        rule, got = f"be those whose logits were averaged, {names}, in this order", ", ".join(map(str, teachers[1:]))
        need(False, "argument-value", "with_teachers", rule, got or "none", spec_id="CACHE-163")
    expected: tuple[Teacher | AveragedTeacher, ...] = (manifest.teacher, *averaged)
    for path, known in zip(teachers, expected, strict=True):
        load_teacher(path)  # refuses external data outside the folder before anything is hashed
        sha256 = hash_teacher(path)
        if sha256 != known.sha256:
            raise ShdError(
                "cache-mismatch",
                f"{reader.folder} must come from this teacher; it was made from {known.name!r} with SHA-256 "
                f"{known.sha256[:16]}..., and {path} has {sha256[:16]}...",
            )
