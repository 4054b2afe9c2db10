"""What a cache holds, counted and summarised from its manifest, its receipts and some of its records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, CacheReader, Errors, Manifest, Receipt
from shd_ref.cache.storage.layout import RECEIPTS_NAME, committed_shards
from shd_ref.cache.storage.places import open_storage
from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, merge_plan, merge_pool, plan_groups

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_ROWS_PER_RECORD: Final = 64
"""Where every row has its own alpha: as many of a record's rows, evenly spaced, tell their distribution."""
_MAPS_READ: Final = 32
"""Records whose maps are decoded for the entropy."""

_EXAMPLE_CANDIDATES: Final = 64
_EXAMPLE_LENGTH: Final = 24
"""Shorter maps show little, longer ones make large pictures."""


@dataclass(frozen=True)
class MergeAlphas:
    """The alphas of one merge of one layer, before clipping.

    Attributes:
        label: the teacher heads on either side, such as ``"0 1 + 2 3"``; alpha is the weight of the first side.
        quantiles: at ``QUANTILES``; empty where no alpha is finite.
        count: how many were read.
        clipped: how many of them lie outside [0, 1].
        even: how many are exactly 1/2, which is what a pair without preference gets.
    """

    label: str
    quantiles: tuple[float, ...]
    count: int
    clipped: int
    even: int


@dataclass(frozen=True)
class LayerContent:
    """One student layer.

    Attributes:
        student_layer, teacher_layer, site: as in the manifest.
        groups: the teacher heads behind each student head.
        merges: in plan order; empty for strategies without alphas.
        entropy: mean row entropy of every student head's maps, in nats.
    """

    student_layer: int
    teacher_layer: int
    site: str
    groups: tuple[tuple[int, ...], ...]
    merges: tuple[MergeAlphas, ...]
    entropy: tuple[float, ...]

    def total(self, field: str) -> int:
        """The sum of ``count``, ``clipped`` or ``even`` over the merges."""
        return sum(getattr(merge, field) for merge in self.merges)


@dataclass(frozen=True)
class ShardError:
    """The codec error that the receipt of one shard states."""

    shard: int
    kl_mean: float
    kl_max: float
    tv_mean: float
    rows: int


@dataclass(frozen=True)
class CacheContent:
    """A whole cache.

    Attributes:
        manifest: as read.
        sealed: whether it is complete.
        samples: held; ``skipped`` are those that the teacher failed on.
        shards: committed; ``shard_bytes`` is the size of their files.
        lengths: of every sample.
        coded_by_form: bytes of codes, by form; ``float32_by_form`` is what they teach, as float32.
        rows_by_form: how many of its ``unit`` each form has.
        errors: of each form, over all rows that were measured.
        layers: by student layer; none without attention.
        records_read, maps_read: how many records their alphas and their maps come from.
        read_bytes_per_second: of codes of attention, checked and decoded, while this was collected.
        shard_errors: of attention, by shard.
    """

    manifest: Manifest
    sealed: bool
    samples: int
    skipped: int
    shards: int
    shard_bytes: int
    lengths: tuple[int, ...]
    coded_by_form: Counter[str]
    float32_by_form: Counter[str]
    rows_by_form: Counter[str]
    errors: Errors
    layers: tuple[LayerContent, ...]
    records_read: int
    maps_read: int
    read_bytes_per_second: float
    shard_errors: tuple[ShardError, ...]

    @property
    def coded_bytes(self) -> int:
        """Of all forms."""
        return self.coded_by_form.total()

    @property
    def float32_bytes(self) -> int:
        """Of all forms."""
        return self.float32_by_form.total()


def read_content(reader: CacheReader, *, max_records: int = 512) -> CacheContent:
    """Summarise a cache.

    Args:
        reader: of the cache, sealed or not.
        max_records: how many records' alphas are read, in stored order, which is a random one (CACHE-26).

    Raises:
        ShdError: ``cache-corrupt`` and other codes of reading; ``cache-incomplete`` where nothing is committed;
            ``plan-invalid`` for a plan that does not lead to the student's heads.
    """
    manifest, storage = reader.manifest, open_storage(reader.folder)
    shards = committed_shards(storage.names(RECEIPTS_NAME))
    receipts = list(storage.map(lambda shard: Receipt.read(storage, shard, manifest), shards))
    if not any(receipt.records for receipt in receipts):
        raise ShdError(
            "cache-incomplete",
            f"{reader.folder} must hold at least one committed sample to be reported; got none",
            "CACHE-56",
        )
    keys = list(dict.fromkeys(reader.keys()))[:max_records]
    has_attention = manifest.attention is not NO_ATTENTION
    alphas = [_by_row(reader.read(key, (), logits=False, hidden=()).alphas) for key in keys]
    started, read_bytes = time.perf_counter(), 0
    entropies: list[NDArray[np.float64]] = []
    for key in keys[: _MAPS_READ if has_attention else 0]:
        record = reader.read(key, logits=False, hidden=())
        read_bytes += sum(blob.nbytes for blob in record.blobs.values())
        entropies.append(
            np.stack([mean_entropy(reader.decode(record, s)) for s in manifest.attention.student_layers])
        )
    seconds = time.perf_counter() - started
    lengths = tuple(record.length for receipt in receipts for record in receipt.records)
    num_layers = len(manifest.attention.layers) if has_attention else 0
    return CacheContent(
        manifest=manifest,
        sealed=reader.sealed,
        samples=len(lengths),
        skipped=sum(len(receipt.skipped) for receipt in receipts),
        shards=len(receipts),
        shard_bytes=sum(receipt.size for receipt in receipts),
        lengths=lengths,
        coded_by_form=sum((receipt.coded_bytes(manifest) for receipt in receipts), Counter()),
        float32_by_form=sum((receipt.plain_bytes(manifest) for receipt in receipts), Counter()),
        rows_by_form=sum((receipt.counted_rows(manifest) for receipt in receipts), Counter()),
        errors=reader.errors,
        layers=tuple(
            _layer_content(manifest, number, [part[number] for part in alphas], np.mean(entropies, axis=0)[number])
            for number in range(num_layers)
        ),
        records_read=len(keys),
        maps_read=len(entropies),
        read_bytes_per_second=read_bytes / max(seconds, 1e-9),
        shard_errors=tuple(
            ShardError(receipt.shard, e.kl_mean, e.kl_max, e.tv_mean, e.rows)
            for receipt in receipts
            if has_attention
            for e in [receipt.errors.attention]
        ),
    )


def choose_example(reader: CacheReader, known: Container[str] | None = None) -> str:
    """The key of a sample whose maps can be looked at: of the first in stored order, the shortest of some length.

    Args:
        reader: of a cache that holds something.
        known: keys to choose from; all by default.

    Raises:
        ShdError: ``sample-missing`` where none of the cache's samples is known.
    """
    keys = [key for key in dict.fromkeys(reader.keys()) if known is None or key in known][:_EXAMPLE_CANDIDATES]
    if not keys:
        raise ShdError(
            "sample-missing", f"the inputs must hold a sample of {reader.folder}; they hold none: they are others"
        )
    lengths = {key: reader.read(key, (), logits=False, hidden=()).length for key in keys}
    return min(keys, key=lambda key: (lengths[key] < _EXAMPLE_LENGTH, abs(lengths[key] - _EXAMPLE_LENGTH)))


def mean_entropy(maps: NDArray[Any]) -> NDArray[np.float64]:
    """Mean entropy in nats of the rows that have mass, as distributions, for every head of maps ``(H, L, S)``."""
    p = np.clip(np.nan_to_num(maps.astype(np.float64), posinf=1.0), 0.0, 1.0)  # a file may hold anything
    mass = p.sum(axis=-1, keepdims=True)
    p /= np.where(mass > 0, mass, 1.0)
    by_row = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)  # (H, L)
    counted = mass[..., 0] > 0
    mean: NDArray[np.float64] = (by_row * counted).sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
    return mean


def merge_labels(plan: MergePlan, num_teacher_heads: int) -> Iterator[str]:
    """The teacher heads on either side of every merge, in plan order."""
    pool: Sequence[tuple[int, ...]] = [(head,) for head in range(num_teacher_heads)]
    for one_round in plan:
        for p, q in one_round:
            yield " + ".join(" ".join(map(str, pool[side])) for side in (p, q))
        pool = merge_pool(pool, one_round)


def _by_row(alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """Alphas ``(layers, n, rows)``, thinned where every row has its own."""
    by_row = alphas if alphas.ndim == 3 else alphas[..., None]
    return by_row[..., :: -(-by_row.shape[-1] // _ROWS_PER_RECORD)]


def _layer_content(
    manifest: Manifest, number: int, alphas: Sequence[NDArray[np.float32]], entropy: NDArray[np.float64]
) -> LayerContent:
    attention, layer = manifest.attention, manifest.attention.layers[number]
    # A manifest's plan is checked for its range alone.
    plan = merge_plan(layer.num_teacher_heads, attention.num_student_heads, attention.layer_plans[number])
    merges = []
    joined = np.concatenate(alphas, axis=-1)  # (n, values), n = 0 for strategies without alphas
    labels = list(merge_labels(plan, layer.num_teacher_heads)) if len(joined) else []
    for label, values in zip(labels, joined, strict=True):
        finite = values[np.isfinite(values)]
        merges.append(
            MergeAlphas(
                label=label,
                quantiles=tuple(float(q) for q in np.quantile(finite, QUANTILES)) if finite.size else (),
                count=int(finite.size),
                clipped=int(((finite < 0) | (finite > 1)).sum()),
                even=int((finite == 0.5).sum()),
            )
        )
    return LayerContent(
        student_layer=layer.student_layer,
        teacher_layer=layer.teacher_layer,
        site=layer.site,
        groups=plan_groups(plan, layer.num_teacher_heads),
        merges=tuple(merges),
        entropy=tuple(float(value) for value in entropy),
    )
