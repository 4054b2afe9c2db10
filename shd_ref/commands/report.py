"""``shd report``: a cache as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shd_ref.commands.app import app, console, print_remark, reported_errors
from shd_ref.commands.options import (
    CacheArgument,
    MaxLengthOption,
    Provider,
    TextOption,
    TokenizerOption,
    check_teacher_options,
)
from shd_ref.errors import ShdError


@app.command()
def report(
    cache: CacheArgument,
    out: Annotated[str, typer.Option(help="The page to write.")] = "report.html",
    teacher: Annotated[
        Path | None, typer.Option(help="The cache's teacher: adds its own maps and what every strategy loses.")
    ] = None,
    inputs: Annotated[Path | None, typer.Option(help="The model inputs that the cache was made from.")] = None,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = None,
    max_length: MaxLengthOption = None,
    samples: Annotated[int, typer.Option(help="How many samples the teacher is run on.", min=1)] = 4,
    records: Annotated[int, typer.Option(help="How many records' merge weights are read.", min=1)] = 512,
    provider: Provider = "cpu",
) -> None:
    """Write what a cache holds, and how well it was squeezed, as one self-contained HTML page.

    A partial cache is reported too. The page needs no network and holds no script. With the teacher it also shows
    maps before and after, and compares the cache with every other strategy.
    """
    from shd_ref.cache import CacheReader
    from shd_ref.cache.storage.outputs import output_file
    from shd_ref.report.content import read_content
    from shd_ref.report.page import render_page

    with reported_errors():
        check_teacher_options(teacher, inputs, tokenizer, text_column, max_length)
        page_file = output_file(out, cache=cache)
        reader = CacheReader(cache, allow_partial=True)
        content = read_content(reader, max_records=records)
        evidence = None
        if teacher is not None and inputs is not None:
            from shd_ref.report.evidence import read_evidence
            from shd_ref.teacher.sources import open_source

            source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
            evidence = read_evidence(reader, teacher, source, num_samples=samples, provider=provider)
            print_remark(source)
        page = render_page(reader, content, evidence)
        try:
            page_file.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ShdError(
                "write-failed", f"{out} could not be written: {error.strerror or error}: name another --out"
            ) from error
    console.print(f"{out}: {len(page) // 1024} KiB, open it in any browser", highlight=False, soft_wrap=True)
