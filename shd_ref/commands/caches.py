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
        remedy = f": missing {shard_ranges(summary.missing)}: write them, then merge again"
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
