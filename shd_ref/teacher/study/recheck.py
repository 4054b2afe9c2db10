"""Run the teacher again on a few records of a cache and compare: the only check against a wrong teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, AveragedTeacher, CacheReader, Manifest, StoredRecord, Teacher
from shd_ref.errors import ShdError
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import hash_teacher
from shd_ref.teacher.precompute.forms.maker import tolerance_of
from shd_ref.teacher.precompute.forms.targets import check_targets
from shd_ref.teacher.precompute.records import maker_of
from shd_ref.teacher.run.options import CODECS_OF, NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.run.outputs import LayerOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.sources import Arrays, Source


@dataclass(frozen=True)
class RecheckReport:
    """What the second run showed.

    Attributes:
        records: how many were run again.
        rows: how many rows of maps were compared.
        target_rows: how many of logits and hidden states.
        tv_max: largest total variation between a stored row, decoded, and the same row run again.
    """

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
    """Squeeze a seeded sample of records again and compare them with what the cache holds.

    Args:
        cache: a sealed cache, a folder or an address.
        teacher: the ``.onnx`` file that it should come from.
        inputs: the model inputs that it should come from.
        with_teachers: the further teachers of a mean of logits, in the order of the manifest.
        num_records: how many records to run.
        seed: of the choice.
        provider: as in ``precompute``; it may differ from the first run's.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher, other inputs or maps that differ; ``sample-missing``.
    """
    reader = CacheReader(cache)
    work = rerun_teacher(reader, teacher, inputs, with_teachers=with_teachers, provider=provider)
    count = len(work.inputs)
    skipped = {index for index in range(count) if work.inputs.key(index) in reader.skipped}
    chosen = [int(i) for i in np.random.default_rng(seed).permutation(count) if int(i) not in skipped][:num_records]
    rows, tv_max, target_rows = 0, 0.0, 0
    for batch in work.checked_batches(chosen):
        for part, (outputs,) in enumerate(work.squeeze_parts(batch)):
            for number in range(len(batch.indices)):
                sample = work.sample(outputs, number)
                record = reader.read(sample.key)
                target_rows += 0 if part else check_targets(reader.manifest, sample, record)
                for layer in sample.layers:
                    difference = _compare_layer(reader, record, layer)
                    rows += difference.size
                    tv_max = max(tv_max, float(difference.max()))
    return RecheckReport(records=len(chosen), rows=rows, tv_max=tv_max, target_rows=target_rows)


def _compare_layer(reader: CacheReader, record: StoredRecord, layer: LayerOutputs) -> NDArray[np.float64]:
    """Total variation ``(H, n)`` between the stored rows of a layer, decoded, and those of the second run.

    Raises:
        ShdError: ``cache-mismatch`` for rows that differ by more than their codec may cost.
    """
    manifest, form, student_layer = reader.manifest, reader.manifest.attention, layer.layer.student_layer
    n, keys = form.map_shapes(record.extent)[form.column(student_layer)]
    again = np.asarray(layer.merged[:, :n, :keys], dtype=np.float32).copy()
    again[:, : record.first] = 0.0  # rows of padding in front, which factored records leave out
    if layer.row_mask is not None:
        again[:, ~layer.row_mask[:n]] = 0.0  # rows of padding hold nothing (CACHE-129)
    stored = reader.decode(record, student_layer)
    difference: NDArray[np.float64] = 0.5 * np.abs(stored - again).sum(axis=-1, dtype=np.float64)
    limits = maker_of(form).bound(form, layer, record.extent, again)
    limits = limits + tolerance_of("recheck", manifest.teacher.dtype)
    if not (difference <= limits).all():
        head, row = np.unravel_index(int((difference - limits).argmax()), difference.shape)
        raise ShdError(
            "cache-mismatch",
            f"{reader.folder}: record {record.index} (key {record.key}) layer {student_layer} head {head} row {row} "
            f"must equal what the teacher gives now within a total variation of {limits[head, row]:.4f}, which is "
            f"what {form.codec} and another run of the teacher may cost it; got {difference[head, row]:.4f}: the "
            "cache was made another way",
            "CACHE-91",
        )
    return difference


def rerun_teacher(
    reader: CacheReader,
    teacher: str | Path,
    inputs: Source | Arrays,
    *,
    with_teachers: Sequence[str | Path] | None = None,
    provider: str = "cpu",
) -> TeacherRun:
    """The teacher of a cache, ready to squeeze as the cache was squeezed.

    Args:
        reader: the cache; a partial one may lack some of the inputs.
        teacher: the ``.onnx`` file that it should come from.
        inputs: the model inputs that it should come from, or some of them.
        with_teachers: the further teachers of a mean of logits, in the order of the manifest; None to run for the
            attention alone.
        provider: as in ``precompute``.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher or other inputs; ``argument-value`` for another number of
            further teachers.
    """
    manifest = reader.manifest
    _check_teachers(reader, (teacher, *(with_teachers or ())), has_targets=with_teachers is not None)
    options = _options_of(manifest, has_targets=with_teachers is not None)
    options = replace(options, with_teachers=tuple(map(Path, with_teachers or ())))
    run = RunOptions(mask=manifest.inputs.mask, decoder_mask=manifest.inputs.decoder_mask, provider=provider)
    work = TeacherRun(Path(teacher), inputs, [options], run, input_names=manifest.inputs.names)
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


def _options_of(manifest: Manifest, *, has_targets: bool) -> PrecomputeOptions:
    """The options that ask for the attention of a cache, and for its logits and hidden states."""
    form, logits, hidden = manifest.attention, manifest.logits, manifest.hidden
    asked: dict[str, Any] = {"form": NO_FORM}
    if form is not NO_ATTENTION:
        asked = {
            "num_student_heads": form.num_student_heads,
            "layer_pairs": tuple((layer.student_layer, layer.teacher_layer) for layer in form.layers),
            "plans": form.layer_plans,
            "strategy": form.strategy,
            "alpha_rule": form.alpha_rule,
            "alpha_per": form.alpha_per,
            "temperature": form.bound_temperature or 1.0,
            "form": form.form,
            CODECS_OF[form.form][0]: form.codec,
        }
    if has_targets and logits is not None:
        asked |= {
            "logits": logits.codec,
            "logits_output": logits.tensor,
            "logits_temperature": logits.temperature or 1.0,
            # Several teachers may be padded to different sizes, or not at all.
            "vocab_size": logits.vocab_size if logits.padded_vocab_size or logits.with_teachers else None,
        }
    if has_targets and hidden is not None:
        asked["hidden"] = tuple(hidden.teacher_layers)
    return PrecomputeOptions(on_error=manifest.on_error, **asked)


def _check_teachers(reader: CacheReader, teachers: Sequence[str | Path], *, has_targets: bool) -> None:
    """Refuse other teachers than those of the cache; without targets its first one is enough."""
    manifest = reader.manifest
    averaged = manifest.logits.with_teachers if has_targets and manifest.logits is not None else ()
    if len(averaged) != len(teachers) - 1:
        raise ShdError(
            "argument-value",
            "with_teachers must be the further teachers whose logits were averaged, "
            f"{', '.join(repr(each.name) for each in averaged) or 'none'}, in this order; got "
            f"{', '.join(map(str, teachers[1:])) or 'none'}",
            "CACHE-163",
        )
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
