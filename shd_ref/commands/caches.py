"""``shd ls``, ``seal``, ``merge`` and ``export``: caches as files, without their teacher."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from shd_ref.cache import CacheListing, CacheWriter, Manifest, export_webdataset, list_cache, merge_caches
from shd_ref.commands.derive import Document, Failed
from shd_ref.commands.options import CacheArgument, refuse_nothing
from shd_ref.commands.terminal import console, fact_table, marked, messages, show_progress
from shd_ref.report.facts import listing_facts, shard_ranges
from shd_ref.teacher.run.options import Shown


def ls(cache: CacheArgument) -> Document:
    """List the contents of a cache and its missing shards, even while it is being written.

    shd ls cache/

    Reads the receipts, not the maps; shd verify checks every byte. Exit code 1 if a file is damaged.
    """
    listing = list_cache(cache)
    console.print(_listing_table(listing))
    if listing.damaged:
        for problem in listing.damaged:
            messages.say(f"damaged: {problem}")
        raise Failed(listing.to_json())
    return listing.to_json()


def seal(cache: CacheArgument) -> Document:
    """Mark a cache as complete: every shard exists, and the sample keys match the data set.

    shd seal cache/

    The run that writes the last shard seals automatically; use this if it stopped just before.
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
            help="The merged cache; use the same one again to resume.", metavar="CACHE", callback=refuse_nothing
        ),
    ],
    link: Annotated[
        bool, typer.Option("--link", help="Use hard links instead of copies on the same file system.")
    ] = False,
) -> Document:
    """Merge the shards of one job from several folders, and seal the cache if none is missing.

    shd merge part-0/ part-1/ --out cache/

    Every byte is checked against its receipt. Caches of different jobs, and conflicting shards, are rejected.
    """
    with show_progress("shards") as (on_progress,):
        summary = merge_caches(caches, out, link=link, on_progress=on_progress)
    console.say(f"{summary.copied} shards taken over ({decimal(summary.bytes)}), {summary.present} were there")
    if summary.sealed:
        console.print(marked("sealed", "green", ": the cache is complete"))
    else:
        remedy = f": missing {shard_ranges(summary.missing)}: write them, then merge again"
        console.say(marked("partial", "yellow", remedy))
    return asdict(summary)


def export(
    cache: CacheArgument,
    out: Annotated[
        str, typer.Option(help="Folder of the export; use the same one again to resume.", metavar="FOLDER")
    ],
    format: Annotated[str, Shown("webdataset: tar files.", choices=("webdataset",))] = "webdataset",
) -> Document:
    """Decode a sealed cache into files for other tools: one tar per shard, one .npy per layer.

    shd export cache/ --out tars/

    The result is larger than the cache, as maps become float32; each sample's .json has its key.
    """
    with show_progress("shards") as (on_progress,):
        summary = export_webdataset(cache, out, on_progress=on_progress)
    console.say(
        f"{format}: {summary.samples} samples in {summary.written} files written ({decimal(summary.bytes)}), "
        f"{summary.present} files were there"
    )
    return {"folder": out, "format": format} | asdict(summary)


def _listing_table(listing: CacheListing) -> Table:
    table = fact_table(str(listing.folder))
    missing, total = listing.missing, listing.manifest.shards.num_shards
    remedy = "shd seal states that it is complete"
    if missing:
        remedy = (
            f"{len(missing)} of {total} shards are missing ({shard_ranges(missing)}). If this is one part of a "
            "run (--shards), the other parts have them: shd merge brings parts together. If not, the same shd "
            "precompute goes on"
        )
    state = marked("sealed", "green", ": complete") if listing.sealed else marked("partial", "yellow", f": {remedy}")
    table.add_row("state", state)
    for name, text in listing_facts(listing):
        table.add_row(name, text)
    return table
