"""What a run writes, and where: its manifest, and what can be refused of its folder before a sample is read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import shd_ref
from shd_ref.cache import Attention, Dataset, Manifest, SampleInputs, ShardPlan, dataset_fingerprint
from shd_ref.cache.storage.places import MANIFEST_NAME, Folder, open_storage
from shd_ref.cache.storage.storage import write_errors
from shd_ref.cache.writer import check_free, other_job
from shd_ref.errors import ShdError
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import MAKERS, describe_forms
from shd_ref.teacher.precompute.forms.attention import matching_of
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import PROVIDERS

SHARD_BYTES: Final = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS: Final = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""


def check_destination(folder: Folder, teacher: Path, options: PrecomputeOptions, run: RunOptions) -> None:
    """Refuse a place that cannot become this job's cache, as far as options tell; ``CacheWriter`` knows the rest."""
    storage = open_storage(folder)
    if isinstance(storage.root, Path):
        with write_errors(storage.root):
            _check_folder(storage.root)
    check_free(storage)
    if not storage.exists(MANIFEST_NAME):
        return
    existing = Manifest.read(storage)
    size = existing.shards.samples_per_shard
    members: list[tuple[str, object, object]] = [
        ("spec_version", existing.spec_version, shd_ref.SPEC_VERSION),
        ("teacher.name", existing.teacher.name, teacher.name),
        ("teacher.provider", existing.teacher.provider, PROVIDERS.get(run.provider, run.provider)),
        ("on_error", existing.on_error, options.on_error),
        ("inputs.seed", existing.inputs.seed, options.seed_column),
        ("shards.seed", existing.shards.seed, run.seed),
        ("shards.samples_per_shard", size, size if run.samples_per_shard is None else run.samples_per_shard),
    ]
    # Of the two forms of attention either decides for both.
    for subject, maker in {kind.SUBJECT: maker for kind, maker in MAKERS.items()}.items():
        form = next((form for form in existing.forms if subject == form.SUBJECT), None)
        members += [(f"{subject}.{name}", old, new) for name, old, new in maker.decided(form, options, run)]
    differences = [f"{name}: {old!r} -> {new!r}" for name, old, new in members if old != new]
    if differences:
        raise other_job(storage.root, differences)


def _check_folder(root: Path) -> None:
    there = next(path for path in (root, *root.parents) if path.exists())
    if there == root and not root.is_dir():
        raise ShdError("cache-exists", f"{root} must be a folder; it is a file: name another --out", "CACHE-60")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written" if there.is_dir() else "is a file"
        raise ShdError("write-failed", f"{root} could not be written: {there} {reason}: name another --out")


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options, with the plans that the manifest of this job says where they are matched (CACHE-103)."""
    if matching_of(options, run) is None or not open_storage(folder).exists(MANIFEST_NAME):
        return options
    form = Manifest.read(folder).find(Attention)
    if form is None or (form.matching, form.num_student_heads) != (
        matching_of(options, run),
        options.num_student_heads,
    ):
        return options
    return replace(options, plans=form.layer_plans)


def make_manifests(work: TeacherRun, outputs: Sequence[StudentOutputs]) -> list[Manifest]:
    """The manifest of every student, with equally many samples per shard, so that all share their batches."""
    run, inputs, count = work.run, work.inputs, len(work.inputs)
    forms = [describe_forms(work, output) for output in outputs]
    per_sample = max(
        sum(form.coded_size(of_student.extent_of(output[0].extent)) for form in of_student.forms)
        for of_student, output in zip(forms, outputs, strict=True)
    )
    size = run.samples_per_shard or max(1, min(SHARD_BYTES // per_sample, math.ceil(count / LEAST_SHARDS)))
    teacher = work.fingerprint()
    fingerprint = dataset_fingerprint(inputs.key(index) for index in range(count))
    return [
        Manifest(
            spec_version=shd_ref.SPEC_VERSION,
            created_by=f"squeezing-heads {shd_ref.__version__}",
            teacher=teacher,
            forms=of_student.forms,
            on_error=output.student.options.on_error,
            inputs=SampleInputs(
                names=inputs.names,
                mask=inputs.mask,
                seed=inputs.seed_column,
                decoder=inputs.decoder,
                decoder_mask=inputs.decoder_mask,
            ),
            dataset=Dataset(fingerprint=fingerprint, num_samples=count),
            shards=ShardPlan(samples_per_shard=size, seed=run.seed, num_shards=math.ceil(count / size)),
        )
        for of_student, output in zip(forms, outputs, strict=True)
    ]
