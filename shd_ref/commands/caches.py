"""``shd verify``, ``report``, ``ls`` and ``merge``: the commands on a cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.filesize import decimal
from rich.table import Table

from shd_ref.cache import CacheListing, list_cache, merge_caches
from shd_ref.commands.options import PLACE, CacheArgument, CheckProvider, InputOptions, check_both
from shd_ref.commands.program import Document, Failed
from shd_ref.commands.terminal import console, fact_table, marked, messages, print_remarks, show_progress
from shd_ref.errors import need
from shd_ref.report.facts import listing_facts, shard_ranges
from shd_ref.teacher.options import FROM_0, FROM_1, Needs


def verify(
    cache: CacheArgument,
    /,
    *,
    teacher: Path | None = None,
    inputs: InputOptions | None = None,
    with_teachers: Annotated[tuple[Path, ...], Parameter(name="--with-teacher"), Needs("teacher")] = (),
    records: Annotated[int, FROM_1, Needs("teacher")] = 8,
    seed: Annotated[int, FROM_0, Needs("teacher")] = 0,
    provider: CheckProvider = "cpu",
) -> Document:
    """Check every byte of a cache, and optionally run its teacher again on some records.

    shd verify cache/ --teacher teacher.onnx --inputs data.npz

    With exit code 1, it names each file and record that is damaged, missing or different.

    Args:
        teacher: Also run this teacher again on some records.
        with_teachers: The other teachers of averaged logits, in the same order as for precompute: one option each.
        records: Records to run again.
        seed: Seed for choosing records.
    """
    from shd_ref.cache import verify_cache

    check_both(teacher, inputs)
    # Wrong names are refused before every byte is read.
    source = None if inputs is None else inputs.open()
    need(teacher is None or teacher.is_file(), "graph-invalid", "--teacher", "be a file", teacher)
    with show_progress("shards") as (on_progress,):
        report = verify_cache(cache, on_progress=on_progress)
    document: dict[str, Any] = {"cache": cache} | asdict(report) | {"again": None}
    if count := len(report.problems):
        messages.say(marked(f"{count} problem{'s' * (count > 1)}", "bold red", f" in {cache}:"))
        for problem in report.problems:
            messages.say(f"  {problem}")
        if any(problem.path.startswith("receipts/") for problem in report.problems):
            messages.say(f"shd ls {cache} lists the missing shards and the remedy")
        raise Failed(document)
    counts = f"{report.records} records in {report.shards} shards, {decimal(report.bytes)}"
    console.print(marked("intact", "green", f": {counts}, every byte read"))
    if teacher is not None and source is not None:
        from shd_ref.teacher.study.recheck import recheck_records

        with show_progress("records run again") as (on_progress,):
            on_progress(0, 0)
            again = recheck_records(
                cache, teacher, source, with_teachers=with_teachers, num_records=records, seed=seed, provider=provider
            )
        print_remarks(source.remark)
        rows = f"{again.rows} rows, largest total variation {again.tv_max:.2g}" if again.rows else ""
        targets = f"{again.target_rows} rows of other targets" if again.target_rows else ""
        counts = f"{again.records} records run again ({'; '.join(filter(None, (rows, targets)))})"
        console.print(marked("same", "green", f": {counts}"))
        document["again"] = asdict(again)
    return document


def report(
    cache: CacheArgument,
    /,
    *,
    out: str = "report.html",
    teacher: Path | None = None,
    inputs: InputOptions | None = None,
    provider: CheckProvider = "cpu",
) -> Document:
    """Write a self-contained HTML page about a cache: contents, merge weights and maps.

    shd report cache/ --teacher teacher.onnx --inputs data.npz

    A partial cache can be reported too. The page needs no network and contains no script. With the teacher it also
    shows maps before merging; shd plan compares plans and strategies.

    Args:
        out: The page to write.
        teacher: The cache's teacher: adds the maps that were merged.
    """
    from shd_ref.cache import CacheReader
    from shd_ref.cache.storage.drafts import drafting, output_file
    from shd_ref.report.page import read_content, read_evidence, render_page

    check_both(teacher, inputs)
    page_file = output_file(out, cache=cache, argument="--out")
    reader = CacheReader(cache, allow_partial=True)
    evidence = None
    with show_progress("records") as (on_progress,):
        on_progress(0, 0)
        content = read_content(reader)
        if teacher is not None and inputs is not None:
            on_progress(0, 0, says="teacher's own maps")
            source = inputs.open()
            evidence = read_evidence(reader, teacher, source, provider=provider)
            print_remarks(source.remark)
        page = render_page(reader, content, evidence)
    with drafting(page_file) as draft:
        draft.write_text(page, encoding="utf-8")
    console.say(f"{out}: {len(page) // 1024} KiB, open it in any browser")
    return {"path": out, "bytes": len(page.encode())}


def ls(cache: CacheArgument, /) -> Document:
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


def merge(
    caches: Annotated[list[str], PLACE, Parameter(name="CACHE...")], /, *, out: Annotated[str, PLACE]
) -> Document:
    """Merge the shards of one job from several folders, and seal the cache if none is missing.

    shd merge part-0/ part-1/ --out cache/

    Every byte is checked against its receipt. Caches of different jobs, and conflicting shards, are rejected.

    Args:
        caches: Caches of one job, complete or not.
        out: The merged cache; use the same one again to resume.
    """
    with show_progress("shards") as (on_progress,):
        summary = merge_caches(caches, out, on_progress=on_progress)
    console.say(f"{summary.copied} shards copied ({decimal(summary.bytes)}), {summary.present} already existed")
    if summary.sealed:
        console.print(marked("sealed", "green", ": the cache is complete"))
    else:
        remedy = f": missing {shard_ranges(summary.missing)}: write them, then merge again"
        console.say(marked("partial", "yellow", remedy))
    return asdict(summary)


def _listing_table(listing: CacheListing) -> Table:
    table = fact_table(str(listing.folder))
    missing, total = listing.missing, listing.manifest.shards.num_shards
    remedy = "the same shd precompute, or shd merge, marks it as complete"
    if missing:
        parts = "If this is one part of a run (--shards), the other parts have them: merge them with shd merge"
        remedy = f"{len(missing)} of {total} shards are missing ({shard_ranges(missing)}). {parts}. "
        remedy += "If not, the same shd precompute resumes"
    state = marked("sealed", "green", ": complete") if listing.sealed else marked("partial", "yellow", f": {remedy}")
    table.add_row("state", state)
    for name, text in listing_facts(listing):
        table.add_row(name, text)
    return table
