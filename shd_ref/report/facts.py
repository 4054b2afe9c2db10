"""Names and texts of what a cache holds: the table of ``shd ls``, and the first of the page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from shd_ref.cache import Attention, CacheListing
from shd_ref.cache.audit import spans

SHOWN_SPANS = 8
"""Runs of missing shards that are printed."""


def listing_facts(listing: CacheListing) -> Iterator[tuple[str, str]]:
    """All but whether the cache is complete."""
    manifest, missing = listing.manifest, listing.missing
    teacher, attention = manifest.teacher, manifest.find(Attention)
    several = len(manifest.forms) > 1
    yield "teacher", f"{teacher.name}, {teacher.dtype}, {teacher.provider}, sha256 {teacher.sha256[:16]}..."
    if attention is not None:
        heads = f"{attention.num_teacher_heads} -> {attention.num_student_heads}"
        yield "heads", f"{heads}, strategy {attention.strategy}"
        pairs = ", ".join(f"{layer.student_layer}:{layer.teacher_layer}" for layer in attention.layers)
        yield "layers", f"{len(attention.layers)} (student:teacher {pairs})"
    for form in manifest.forms:
        yield from form.describe()
    for name, error in listing.errors.items():
        yield f"{name} error" if several else "error", error.describe()
    skipped = f", {listing.skipped} skipped" if listing.skipped else ""
    mean = listing.positions / max(listing.samples, 1)
    yield "samples", f"{listing.samples} of {manifest.dataset.num_samples}{skipped}, {mean:.0f} positions on average"
    absent = f", missing {shard_ranges(missing)}" if missing else ""
    yield "shards", f"{len(listing.written)} of {manifest.shards.num_shards}{absent}"
    ratio = _ratio(listing.float32_bytes, listing.coded_bytes)
    yield "size", f"{decimal(listing.shard_bytes)}, codes {decimal(listing.coded_bytes)}, {ratio}"
    for form in manifest.forms if several else ():
        coded, plain = listing.coded_by_form[form.SUBJECT], listing.float32_by_form[form.SUBJECT]
        size = f"{decimal(coded)}, {listing.bytes_a_row(form):.1f} bytes per {form.unit}, {_ratio(plain, coded)}"
        yield f"{form.SUBJECT} size", size
    yield "id", manifest.id


def shard_ranges(shards: tuple[int, ...]) -> str:
    """Numbers of shards as runs: 0, 3-7."""
    runs = spans(shards)
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:SHOWN_SPANS])
    return shown + ", ..." * (len(runs) > SHOWN_SPANS)


def _ratio(plain: int, coded: int) -> str:
    return f"{plain / max(coded, 1):.1f}x smaller than float32"
