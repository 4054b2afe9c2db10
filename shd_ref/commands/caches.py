"""``shd ls``, ``seal``, ``merge`` and ``export``: caches as files, without their teacher."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from shd_ref.cache import (
    NO_ATTENTION,
    CacheListing,
    CacheWriter,
    Manifest,
    export_webdataset,
    list_cache,
    merge_caches,
)
from shd_ref.cache.listing import spans
from shd_ref.commands.derive import Document, Failed
from shd_ref.commands.options import CacheArgument, refuse_nothing
from shd_ref.commands.terminal import console, fact_table, marked, messages, show_progress
from shd_ref.teacher.run.options import Shown

SHOWN_SPANS = 8
"""Runs of missing shards that are printed."""


def ls(cache: CacheArgument) -> Document:
    """Say what a cache holds and which shards are missing, also while it is written.

    shd ls cache/

    Reads the receipts, not the maps; shd verify checks every byte. Exit code 1 where a file is damaged.
    """
    listing = list_cache(cache)
    console.print(_listing_table(listing))
    if listing.damaged:
        for problem in listing.damaged:
            messages.say(f"damaged: {problem}")
        raise Failed(listing.to_json())
    return listing.to_json()


def seal(cache: CacheArgument) -> Document:
    """State that a cache is complete: every shard is there, and the sample keys are the data set's.

    shd seal cache/

    A run that writes the last shard seals by itself; this is for those that stopped just before.
    """
    sealed = CacheWriter(cache, Manifest.read(cache)).seal()
    console.print(marked("sealed", "green", f": {sealed.num_samples} samples in {len(sealed.receipts)} shards"))
    return {"cache": cache, "samples": sealed.num_samples, "shards": len(sealed.receipts)}


def merge(
    caches: Annotated[
        list[str],
        typer.Argument(help="Caches of one job, complete or not.", metavar="CACHE...", callback=refuse_nothing),
    ],
    out: Annotated[
        str,
        typer.Option(
            help="The merged cache; give the same one again to resume.", metavar="CACHE", callback=refuse_nothing
        ),
    ],
    link: Annotated[
        bool, typer.Option("--link", help="Hard links in place of copies, where both lie on one file system.")
    ] = False,
) -> Document:
    """Bring together the shards of one job that lie in several folders, and seal them if none is missing.

    shd merge part-0/ part-1/ --out cache/

    Every byte is checked against its receipt. Caches of different jobs, and shards that differ, are refused.
    """
    with show_progress("shards") as (on_progress,):
        summary = merge_caches(caches, out, link=link, on_progress=on_progress)
    console.say(f"{summary.copied} shards taken over ({decimal(summary.bytes)}), {summary.present} were there")
    if summary.sealed:
        console.print(marked("sealed", "green", ": the cache is complete"))
    else:
        remedy = f": missing {_shard_ranges(summary.missing)}: write them, then merge again"
        console.say(marked("partial", "yellow", remedy))
    return asdict(summary)


def export(
    cache: CacheArgument,
    out: Annotated[
        str, typer.Option(help="Folder of the export; give the same one again to resume.", metavar="FOLDER")
    ],
    format: Annotated[str, Shown("webdataset: tar files.", choices=("webdataset",))] = "webdataset",
) -> Document:
    """Write a sealed cache, decoded, as files that other tools read: a tar per shard, a .npy per layer.

    shd export cache/ --out tars/

    Larger than the cache, as the maps become float32; each sample's .json has its key.
    """
    with show_progress("shards") as (on_progress,):
        summary = export_webdataset(cache, out, on_progress=on_progress)
    console.say(
        f"{format}: {summary.samples} samples in {summary.written} files written ({decimal(summary.bytes)}), "
        f"{summary.present} files were there"
    )
    return {"folder": out, "format": format} | asdict(summary)


def _listing_table(listing: CacheListing) -> Table:
    manifest = listing.manifest
    table = fact_table(str(listing.folder))
    total, missing = manifest.shards.num_shards, listing.missing
    if listing.sealed:
        table.add_row("state", marked("sealed", "green", ": complete"))
    else:
        remedy = "shd seal states that it is complete"
        if missing:
            remedy = (
                f"{len(missing)} of {total} shards are missing ({_shard_ranges(missing)}). If this is one part of a "
                "run (--shards), the other parts have them: shd merge brings parts together. If not, the same shd "
                "precompute goes on"
            )
        table.add_row("state", marked("partial", "yellow", f": {remedy}"))
    teacher = manifest.teacher
    table.add_row("teacher", f"{teacher.name}, {teacher.dtype}, {teacher.provider}, sha256 {teacher.sha256[:16]}...")
    attention = manifest.attention
    if attention is not NO_ATTENTION:
        heads = f"{attention.num_teacher_heads} -> {attention.num_student_heads}"
        table.add_row("heads", f"{heads}, strategy {attention.strategy}")
        pairs = ", ".join(f"{layer.student_layer}:{layer.teacher_layer}" for layer in attention.layers)
        table.add_row("layers", f"{len(attention.layers)} (student:teacher {pairs})")
    for form in manifest.forms:
        for name, text in form.describe():
            table.add_row(name, text)
    table.add_row("compression", manifest.compression)
    several = len(manifest.forms) > 1
    for name, error in listing.errors.measured().items():
        table.add_row(f"{name} error" if several else "error", error.describe())
    skipped = f", {listing.skipped} skipped" if listing.skipped else ""
    mean = listing.positions / max(listing.samples, 1)
    table.add_row(
        "samples", f"{listing.samples} of {manifest.dataset.num_samples}{skipped}, {mean:.0f} positions on average"
    )
    table.add_row(
        "shards", f"{len(listing.written)} of {total}" + (f", missing {_shard_ranges(missing)}" * bool(missing))
    )
    ratio = listing.float32_bytes / max(listing.coded_bytes, 1)
    table.add_row(
        "size",
        f"{decimal(listing.shard_bytes)}, codes {decimal(listing.coded_bytes)}, {ratio:.1f}x smaller than float32",
    )
    for form in manifest.forms if several else ():
        coded, plain = listing.coded_by_form[form.SUBJECT], listing.float32_by_form[form.SUBJECT]
        each = f"{listing.bytes_a_row(form):.1f} bytes a {form.unit}"
        table.add_row(
            f"{form.SUBJECT} size", f"{decimal(coded)}, {each}, {plain / max(coded, 1):.1f}x smaller than float32"
        )
    table.add_row("id", manifest.id)
    return table


def _shard_ranges(shards: tuple[int, ...]) -> str:
    runs = spans(shards)
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:SHOWN_SPANS])
    return shown + ", ..." * (len(runs) > SHOWN_SPANS)
