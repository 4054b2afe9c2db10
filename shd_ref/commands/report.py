"""``shd report``: a cache as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shd_ref.commands.derive import Document
from shd_ref.commands.options import CacheArgument, CheckProvider, InputOptions, check_both
from shd_ref.commands.terminal import console, print_remarks, show_progress
from shd_ref.teacher.run.options import Shown


def report(
    cache: CacheArgument,
    out: Annotated[str, Shown("The page to write.")] = "report.html",
    teacher: Annotated[
        Path | None, Shown("The cache's teacher: adds its maps and the loss of every strategy.")
    ] = None,
    inputs: InputOptions | None = None,
    samples: Annotated[int, Shown("Samples to run the teacher on.", least=1, needs="teacher")] = 4,
    records: Annotated[int, Shown("Records to read merge weights from.", least=1)] = 512,
    provider: CheckProvider = "cpu",
) -> Document:
    """Write a self-contained HTML page about a cache: contents, sizes and errors.

    shd report cache/ --teacher teacher.onnx --inputs data.npz

    A partial cache can be reported too. The page needs no network and contains no script. With the teacher it also
    shows maps before and after merging, and compares the cache with every other strategy.
    """
    from shd_ref.cache import CacheReader
    from shd_ref.cache.storage.drafts import drafting
    from shd_ref.cache.storage.outputs import output_file
    from shd_ref.report.content import read_content, read_evidence
    from shd_ref.report.page import render_page

    check_both(teacher, inputs)
    page_file = output_file(out, cache=cache, argument="--out")
    reader = CacheReader(cache, allow_partial=True)
    evidence = None
    with show_progress("records") as (on_progress,):
        on_progress(0, 0)
        content = read_content(reader, max_records=records)
        if teacher is not None and inputs is not None:
            on_progress(0, 0, says="teacher's own maps")
            source = inputs.open()
            evidence = read_evidence(reader, teacher, source, num_samples=samples, provider=provider)
            print_remarks(source.remark)
        page = render_page(reader, content, evidence)
    with drafting(page_file) as draft:
        draft.write_text(page, encoding="utf-8")
    console.say(f"{out}: {len(page) // 1024} KiB, open it in any browser")
    return {"path": out, "bytes": len(page.encode())}
