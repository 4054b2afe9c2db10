"""What the page shows: a cache's merge weights and entropy, and what only its teacher can tell."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, CacheListing, CacheReader, Manifest, list_cache
from shd_ref.errors import ShdError
from shd_ref.merging.mixing import squeeze_heads
from shd_ref.merging.plans import MergePlan, merge_plan, merge_pool, plan_groups
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.study.recheck import rerun_teacher

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_ROWS_PER_RECORD: Final = 64
"""Where every row has its own alpha: as many of a record's rows, evenly spaced, tell their distribution."""
_MAPS_READ: Final = 32
"""Records whose maps are decoded for the entropy."""
_EXAMPLE_CANDIDATES: Final = 64
_EXAMPLE_LENGTH: Final = 24
"""Shorter maps show little, longer ones make large pictures."""

CACHED: Final = "this cache"
STRATEGIES: Final[dict[str, str]] = {"hard": "hard", "constant": "constant", "alpha per map": "shd"}
"""Strategies by the names that the page gives them."""


@dataclass(frozen=True)
class MergeAlphas:
    """The alphas of one merge of one layer, before clipping."""

    label: str  # the teacher heads on either side, such as "0 1 + 2 3"; alpha is the weight of the first side
    values: NDArray[np.float32]  # all that are finite

    @property
    def quantiles(self) -> tuple[float, ...]:
        """At ``QUANTILES``; empty without values."""
        return tuple(np.quantile(self.values, QUANTILES).tolist()) if self.values.size else ()

    @property
    def clipped(self) -> int:
        """How many lie outside [0, 1]."""
        return int(((self.values < 0) | (self.values > 1)).sum())

    @property
    def even(self) -> int:
        """How many are exactly 1/2, as of a pair without preference."""
        return int((self.values == 0.5).sum())


@dataclass(frozen=True)
class LayerContent:
    """One student layer."""

    student_layer: int
    teacher_layer: int
    site: str
    groups: tuple[tuple[int, ...], ...]  # the teacher heads behind each student head
    merges: tuple[MergeAlphas, ...]  # in plan order; empty for strategies without alphas
    entropy: tuple[float, ...]  # mean row entropy of every student head's maps, in nats


@dataclass(frozen=True)
class CacheContent:
    """A whole cache."""

    listing: CacheListing
    layers: tuple[LayerContent, ...]  # none without attention
    records_read: int  # for alphas
    maps_read: int  # records whose maps were decoded


@dataclass(frozen=True)
class Evidence:
    """What the teacher told of a few samples."""

    example: str  # key of the sample whose maps are kept
    samples: int  # how many samples the residuals are the mean of
    # by CACHED and the names of STRATEGIES: each layer's mean relative error (MIX-8), along the cache's plan
    residuals: dict[str, list[float]]
    maps: dict[int, NDArray[Any]]  # by student layer the teacher's maps of the example (H_t, n, n)


def read_content(reader: CacheReader, *, max_records: int = 512) -> CacheContent:
    """Summarise a cache, sealed or not; alphas come from the first ``max_records``, whose order is random (CACHE-26).

    Raises ``cache-incomplete`` where nothing is committed, ``plan-invalid``, and the codes of reading.
    """
    keys = list(dict.fromkeys(reader.keys()))[:max_records]
    if not keys:
        message = f"{reader.folder} must hold at least one committed sample to be reported; got none"
        raise ShdError("cache-incomplete", message, "CACHE-56")
    listing, manifest = list_cache(reader.folder), reader.manifest
    attention = manifest.find(Attention)
    if attention is None:
        return CacheContent(listing, (), len(keys), 0)
    alphas = []
    for key in keys:
        weights = attention.alphas(reader.read(key, (), logits=False, hidden=(), embeddings=False, exact=False))
        weights = weights if weights.ndim == 3 else weights[..., None]
        alphas.append(weights[..., :: -(-weights.shape[-1] // _ROWS_PER_RECORD)])
    entropies: list[NDArray[np.float64]] = []
    for key in keys[:_MAPS_READ]:
        record = reader.read(key, logits=False, hidden=(), embeddings=False, exact=False)
        maps = (reader.decode(record, layer) for layer in manifest.attention.student_layers)
        entropies.append(np.stack([mean_entropy(one) for one in maps]))
    layers = tuple(
        _layer_content(manifest, number, np.concatenate([values[number] for values in alphas], axis=-1), entropy)
        for number, entropy in enumerate(np.mean(entropies, axis=0))
    )
    return CacheContent(listing, layers, len(keys), len(entropies))


def read_evidence(
    reader: CacheReader, teacher: str | Path, inputs: Source | Arrays, *, num_samples: int = 4, provider: str = "cpu"
) -> Evidence:
    """Run the cache's teacher on the example and some samples more, in stored order.

    Raises ``cache-mismatch`` for another teacher or other inputs, ``not-finite``, ``not-a-distribution``.
    """
    form = reader.manifest.find(Attention)
    if form is None:
        rule = f"{reader.folder} must hold attention to be shown beside its teacher's; it holds none"
        remedy = "leave --teacher and --inputs out, and let shd verify run the teacher again"
        raise ShdError("argument-value", f"{rule}: {remedy}", "CACHE-160")
    work = rerun_teacher(reader, teacher, inputs, provider=provider)
    index_of = {work.inputs.key(index): index for index in reversed(range(len(work.inputs)))}
    example = choose_example(reader, index_of)
    keys = list(dict.fromkeys([example, *(key for key in reader if key in index_of)]))[:num_samples]
    attention = AttentionReader(work.graph.model, [site for _, site in work.graph.layers], provider=provider)
    kinds = {CACHED: form.strategy} | STRATEGIES
    residuals: dict[str, list[float]] = {name: [] for name in kinds}
    example_maps = {}
    for number, (student_layer, _) in enumerate(work.graph.layers):
        errors = np.zeros((len(keys), len(kinds)))
        # One sample a batch: without padding, so that the example's maps are its own.
        for row, key in enumerate(keys):
            (batch,) = work.inputs.batches([index_of[key]], 1)
            mask = work.row_masks(batch)[student_layer]
            maps, outputs = attention.read(number, batch)
            for column, (name, strategy) in enumerate(kinds.items()):
                errors[row, column] = squeeze_heads(
                    maps,
                    outputs,
                    form.num_student_heads,
                    plan=form.layer_plans[number],
                    strategy=strategy,
                    query_mask=None if mask is None else mask[: len(maps)],
                    alpha_rule=form.alpha_rule if name == CACHED else "least_squares",
                ).residual.mean()
            if key == example:
                record = reader.read(key, (), logits=False, hidden=(), embeddings=False, exact=False)
                rows, columns = form.map_shapes(record.extent)[number]
                example_maps[student_layer] = maps[0, :, :rows, :columns]
        for name, value in zip(kinds, errors.mean(axis=0).tolist(), strict=True):
            residuals[name].append(value)
    return Evidence(example, len(keys), residuals, example_maps)


def choose_example(reader: CacheReader, known: Container[str] | None = None) -> str:
    """The key of a ``known`` sample whose maps can be looked at: of the first, the shortest of some length."""
    keys = [key for key in dict.fromkeys(reader.keys()) if known is None or key in known][:_EXAMPLE_CANDIDATES]
    if not keys:
        message = f"the inputs must hold a sample of {reader.folder}; they hold none: they are others"
        raise ShdError("sample-missing", message)
    lengths = {
        key: reader.read(key, (), logits=False, hidden=(), embeddings=False, exact=False).length for key in keys
    }
    return min(keys, key=lambda key: (lengths[key] < _EXAMPLE_LENGTH, abs(lengths[key] - _EXAMPLE_LENGTH)))


def mean_entropy(maps: NDArray[Any]) -> NDArray[np.float64]:
    """Mean entropy in nats of the rows that have mass, as distributions, for every head of maps ``(H, L, S)``."""
    p = np.clip(np.nan_to_num(maps.astype(np.float64), posinf=1.0), 0.0, 1.0)  # a file may hold anything
    mass = p.sum(axis=-1, keepdims=True)
    p /= np.where(mass > 0, mass, 1.0)
    by_row = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)  # (H, L), 0 without mass
    mean: NDArray[np.float64] = by_row.sum(axis=1) / np.maximum((mass > 0).sum(axis=(1, 2)), 1)
    return mean


def merge_labels(plan: MergePlan, num_teacher_heads: int) -> Iterator[str]:
    """The teacher heads on either side of every merge, in plan order."""
    pool: Sequence[tuple[int, ...]] = [(head,) for head in range(num_teacher_heads)]
    for one_round in plan:
        for p, q in one_round:
            yield " + ".join(" ".join(map(str, pool[side])) for side in (p, q))
        pool = merge_pool(pool, one_round)


def _layer_content(
    manifest: Manifest, number: int, alphas: NDArray[np.float32], entropy: NDArray[np.float64]
) -> LayerContent:
    """Alphas ``(n, values)``, n = 0 for strategies without them."""
    attention, layer = manifest.attention, manifest.attention.layers[number]
    # A manifest's plan is checked for its range alone.
    plan = merge_plan(layer.num_teacher_heads, attention.num_student_heads, attention.layer_plans[number])
    labels = list(merge_labels(plan, layer.num_teacher_heads)) if len(alphas) else []
    merges = tuple(MergeAlphas(label, a[np.isfinite(a)]) for label, a in zip(labels, alphas, strict=True))
    groups = plan_groups(plan, layer.num_teacher_heads)
    return LayerContent(layer.student_layer, layer.teacher_layer, layer.site, groups, merges, tuple(entropy.tolist()))
