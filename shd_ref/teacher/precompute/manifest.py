"""What a precompute run writes: its manifest, decided before the first record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.cache import (
    Dataset,
    Extent,
    Factors,
    LayerFactors,
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
from shd_ref.teacher.precompute.masks import describe_mask
from shd_ref.teacher.run.faults import Outputs
from shd_ref.teacher.run.options import MATCHED, PrecomputeOptions, RunOptions
from shd_ref.teacher.run.teacher import TeacherRun

SHARD_BYTES: Final = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS: Final = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""

Masks: TypeAlias = Mapping[int, NDArray[np.bool_] | None]
"""``(B, L)`` by student layer, True = the row of its maps counts; None where every row does."""


def find_support(work: TeacherRun, outputs: Outputs, masks: Masks) -> str:
    """Whether no row that counts looks ahead: ``"causal"``, else ``"full"``, as are maps that are not square.

    Args:
        work: the run.
        outputs: with check outputs.
        masks: of the rows of each layer's maps, by student layer.
    """
    rows, columns = outputs[work.graph.layers[0].merged].shape[2:]
    if rows != columns or rows == 1 or has_own_shapes(work, outputs):
        return "full"
    for layer in work.graph.layers:
        # What rows of padding look at is not stored (CACHE-121), and often all keys.
        ahead, mask = np.triu(outputs[layer.merged], 1).any(axis=(1, 3)), masks.get(layer.student_layer)
        if (ahead if mask is None else ahead & mask).any():
            return "full"
    return "causal"


def has_own_shapes(work: TeacherRun, outputs: Outputs) -> bool:
    """Whether the maps of some layers have other rows and keys than the positions of the sample (CACHE-116)."""
    shapes = {outputs[layer.merged].shape[2:] for layer in work.graph.layers}
    one_sequence = {work.site_kinds.kind(site) for _, site in work.layers} <= {None, "encoder"}
    return not one_sequence or len(shapes) > 1 or any(rows != keys for rows, keys in shapes)


def matching_of(options: PrecomputeOptions, run: RunOptions) -> Matching | None:
    """What the manifest says of plans that are matched on the data; None for others."""
    if options.plan != MATCHED:
        return None
    return Matching(options.matched_by, options.calibration_samples, run.seed)


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options of a job that a folder may hold already: matched plans are then taken from its manifest (CACHE-18).

    Where it holds another job, the options come back as they are, and the writer will refuse the folder.
    """
    if matching_of(options, run) is None or not open_storage(folder).exists(MANIFEST_NAME):
        return options
    manifest = Manifest.read(folder)
    same = (
        manifest.attention.matching == matching_of(options, run)
        and manifest.attention.num_student_heads == options.num_student_heads
    )
    return replace(options, plans=manifest.attention.layer_plans) if same else options


def make_manifest(work: TeacherRun, outputs: Outputs, masks: Masks, spans: Sequence[NDArray[Any]] = ()) -> Manifest:
    """The manifest of a run.

    Args:
        work: the run.
        outputs: of its longest samples, with check outputs.
        masks: of the rows of each layer's maps, by student layer.
        spans: for factored records: what the mask of each layer leaves one of the longest samples, see
            ``describe_mask``.

    Raises:
        ShdError: ``graph-unsupported``.
    """
    options, run, inputs, count = work.options, work.run, work.inputs, len(work.inputs)
    attention = describe_attention(work, outputs, masks, spans)
    rows = outputs[work.graph.layers[0].merged].shape[2]
    shapes = [outputs[layer.merged].shape[2:] for layer in work.graph.layers] if attention.form == "maps" else []
    per_sample = sum(attention.blob_sizes(Extent(rows, shapes=tuple((r, k) for r, k in shapes))))
    size = run.samples_per_shard or max(1, min(SHARD_BYTES // per_sample, math.ceil(count / LEAST_SHARDS)))
    return Manifest(
        spec_version=shd_ref.SPEC_VERSION,
        created_by=f"squeezing-heads {shd_ref.__version__}",
        teacher=work.fingerprint(),
        attention=attention,
        compression=options.compression,
        on_error=options.on_error,
        inputs=SampleInputs(
            names=inputs.names,
            mask=inputs.mask,
            seed=inputs.seed_column,
            decoder=inputs.decoder,
            decoder_mask=inputs.decoder_mask,
        ),
        dataset=Dataset(
            fingerprint=dataset_fingerprint(inputs.key(index) for index in range(count)), num_samples=count
        ),
        shards=ShardPlan(samples_per_shard=size, seed=run.seed, num_shards=math.ceil(count / size)),
    )


def describe_attention(
    work: TeacherRun, outputs: Outputs, masks: Masks, spans: Sequence[NDArray[Any]] = ()
) -> Maps | Factors:
    """How attention is stored, see ``make_manifest``."""
    options, same = work.options, len(set(work.plans)) == 1
    shared: dict[str, Any] = {
        "num_student_heads": options.num_student_heads,
        "layers": tuple(
            LayerPair(student, site.layer, site.name, work.num_teacher_heads) for student, site in work.layers
        ),
        "plan": work.plans[0] if same else (),
        "plans": None if same else work.plans,
        "matching": matching_of(options, work.run),
        "strategy": options.strategy,
        "alpha_rule": options.alpha_rule,
        "alpha_per": options.alpha_per,
        "codec": options.stored_codec,
        "num_student_layers": work.num_student_layers,
        "kinds": work.kinds,
    }
    if not options.is_factored:
        shapes = "own" if has_own_shapes(work, outputs) else "length"
        return Maps(
            **shared, support=find_support(work, outputs, masks), temperature=options.temperature, shapes=shapes
        )
    support, windows = describe_mask(spans)
    factors = tuple(
        LayerFactors(each.num_kv_heads, each.d, each.scale, window)
        for each, window in zip(work.factors, windows, strict=True)
    )
    padding = "around" if work.inputs.firsts.any() else "behind"
    return Factors(**shared, support=support, factors=factors, padding=padding)
