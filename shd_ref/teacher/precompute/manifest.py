"""What a precompute run writes: its manifest, decided before the first record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import shd_ref
from shd_ref.cache import (
    NO_ATTENTION,
    Dataset,
    Factors,
    LayerPair,
    Manifest,
    Maps,
    Matching,
    SampleInputs,
    ShardPlan,
    dataset_fingerprint,
)
from shd_ref.cache.storage.layout import MANIFEST_NAME
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.teacher.precompute.forms.targets import Forms, describe_hidden, describe_logits
from shd_ref.teacher.precompute.records import MAKERS, extent_of
from shd_ref.teacher.run.options import MATCHED, PrecomputeOptions, RunOptions
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

SHARD_BYTES: Final = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS: Final = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""


def matching_of(options: PrecomputeOptions, run: RunOptions) -> Matching | None:
    """What the manifest says of plans that are matched on the data; None for others."""
    if options.plan != MATCHED:
        return None
    return Matching(options.matched_by, options.calibration_samples, run.seed)


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options of a job that a folder may hold already: matched plans are then those of its manifest (CACHE-103).

    Where it holds another job, the options come back as they are, and the writer will refuse the folder.
    """
    if matching_of(options, run) is None or not open_storage(folder).exists(MANIFEST_NAME):
        return options
    manifest = Manifest.read(folder)
    if manifest.attention is NO_ATTENTION:
        return options
    same = (
        manifest.attention.matching == matching_of(options, run)
        and manifest.attention.num_student_heads == options.num_student_heads
    )
    return replace(options, plans=manifest.attention.layer_plans) if same else options


def make_manifests(work: TeacherRun, outputs: Sequence[StudentOutputs]) -> list[Manifest]:
    """The manifest of every student of a run.

    They hold equally many samples per shard, as many as suit the largest records, so that all share their batches.

    Args:
        work: the run.
        outputs: of its longest samples, with check outputs, by student.

    Raises:
        ShdError: ``graph-unsupported``.
    """
    run, inputs, count = work.run, work.inputs, len(work.inputs)
    forms = [describe_attention(work, each) for each in outputs]
    logits, hidden = describe_logits(work, outputs[0]), describe_hidden(work, outputs[0])
    extents = [
        extent_of(Forms(form, logits, hidden), work.sample(each, 0))
        for form, each in zip(forms, outputs, strict=True)
    ]
    rows = [each for each in (logits, hidden) if each is not None]
    per_sample = max(
        (0 if form is NO_ATTENTION else sum(form.blob_sizes(extent))) + sum(each.held_size(extent) for each in rows)
        for form, extent in zip(forms, extents, strict=True)
    )
    size = run.samples_per_shard or max(1, min(SHARD_BYTES // per_sample, math.ceil(count / LEAST_SHARDS)))
    teacher = work.fingerprint()
    fingerprint = dataset_fingerprint(inputs.key(index) for index in range(count))
    return [
        Manifest(
            spec_version=shd_ref.SPEC_VERSION,
            created_by=f"squeezing-heads {shd_ref.__version__}",
            teacher=teacher,
            attention=form,
            logits=logits,
            hidden=hidden,
            compression=each.student.options.compression,
            on_error=each.student.options.on_error,
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
        for form, each in zip(forms, outputs, strict=True)
    ]


def describe_attention(work: TeacherRun, outputs: StudentOutputs) -> Maps | Factors:
    """How attention is stored for a student, see ``make_manifests``; ``NO_ATTENTION`` where it is not."""
    if not outputs.layers:
        return NO_ATTENTION  # type: ignore[no-any-return]  # which stands for any form
    options, plans = outputs.student.options, outputs.student.plans
    same = len(set(plans)) == 1
    squeeze: dict[str, Any] = {
        "num_student_heads": options.num_student_heads,
        "layers": tuple(
            LayerPair(student, site.layer, site.name, work.num_teacher_heads) for student, site in work.layers
        ),
        "plan": plans[0] if same else (),
        "plans": None if same else plans,
        "matching": matching_of(options, work.run),
        "strategy": options.strategy,
        "alpha_rule": options.alpha_rule,
        "alpha_per": options.alpha_per,
        "codec": options.stored_codec,
        "num_student_layers": work.num_student_layers,
        "kinds": work.kinds,
    }
    form: Maps | Factors = MAKERS[options.form].describe(work, outputs, squeeze)
    return form
