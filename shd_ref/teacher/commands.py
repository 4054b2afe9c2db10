"""The subcommands of ``shd``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

import shd_ref
from shd_ref.errors import ShdError

app = typer.Typer(
    name="shd",
    help="Squeeze a transformer teacher's attention into fewer heads, offline, and keep it in a cache.\n\n"
    "Typical use:  shd inspect teacher.onnx  ->  shd precompute teacher.onnx --inputs data.npz "
    "--student-heads 4 --out cache/  ->  shd verify cache/",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
console = Console()
messages = Console(stderr=True)


class Strategy(StrEnum):
    """Merging strategies that run inside the graph."""

    shd = "shd"
    constant = "constant"
    hard = "hard"
    mean = "mean"
    simplex = "simplex"


class Codec(StrEnum):
    """How maps are stored."""

    sqrt8_row = "sqrt8-row"
    sqrt8_abs = "sqrt8-abs"
    u4 = "u4"
    bf16 = "bf16"
    float32 = "float32"


class Compression(StrEnum):
    """What is done to stored blobs."""

    none = "none"
    zstd = "zstd"


class OnError(StrEnum):
    """What is done about a sample on which the teacher fails."""

    stop = "stop"
    skip = "skip"


class Plan(StrEnum):
    """Which heads merge."""

    progressive = "progressive"
    balanced = "balanced"


class AlphaPer(StrEnum):
    """How many merge weights."""

    map = "map"
    row = "row"


TeacherPath = Annotated[Path, typer.Argument(help="The teacher as an ONNX graph.", metavar="TEACHER.onnx")]
InputsPath = Annotated[
    Path,
    typer.Option(
        help="Model inputs: .npz, .safetensors, .parquet, .arrow or .jsonl, with one column per graph input; or a "
        "folder of Parquet or Arrow files, such as save_to_disk of Hugging Face datasets writes."
    ),
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Where the inputs are text: tokenizer.json, or the folder that holds it.")
]
TextOption = Annotated[str, typer.Option(help="Column of the text.")]
MaxLengthOption = Annotated[
    int | None, typer.Option(help="Tokens to keep of a text; default: as the tokenizer says.", min=1)
]
Provider = Annotated[str, typer.Option(help="cpu, cuda, or an onnxruntime provider name. Never falls back silently.")]


@contextmanager
def reported_errors() -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ShdError as error:
        messages.print(f"[bold red]error[/] ({error.code}): ", end="")
        messages.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"squeezing-heads {shd_ref.__version__}, specification {shd_ref.SPEC_VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions and leave.")
    ] = False,
) -> None:
    """Squeeze a transformer teacher's attention into fewer heads, offline, and keep it in a cache."""


@app.command()
def inspect(
    teacher: TeacherPath,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List every attention site of a teacher graph, and what can be squeezed.

    The graph is walked along its data flow, so the exporter's naming does not matter. Exit code 1 when no site
    can be squeezed.
    """
    from shd_ref.teacher.find import find_sites
    from shd_ref.teacher.load import load_teacher

    with reported_errors():
        sites = find_sites(load_teacher(teacher))
    fields = ("layer", "name", "op_type", "num_heads", "num_kv_heads", "d_k", "d_v", "d_model", "supported", "reason")
    if as_json:
        print(json.dumps({"teacher": str(teacher), "sites": [{f: getattr(s, f) for f in fields} for s in sites]}))
    else:
        table = Table(
            title=f"{teacher.name}: {len(sites)} attention site{'s' * (len(sites) != 1)}", title_justify="left"
        )
        for title, justify in (("layer", "right"), ("name", "left")):
            table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for title in ("heads", "kv heads", "d_k", "d_v", "D"):
            table.add_column(title, justify="right")
        table.add_column("squeeze", overflow="fold")
        for site in sites:
            sizes = (site.num_heads, site.num_kv_heads, site.d_k, site.d_v, site.d_model)
            verdict = "[green]yes[/]" if site.supported else f"[red]no[/]: {site.reason}"
            table.add_row(str(site.layer), site.name, *("?" if n is None else str(n) for n in sizes), verdict)
        console.print(table)
    if not any(site.supported for site in sites):
        if not sites:
            messages.print("no attention found: export the model with eager attention (shd-torch export does)")
        raise typer.Exit(1)


@app.command()
def precompute(
    teacher: TeacherPath,
    inputs: InputsPath,
    student_heads: Annotated[int, typer.Option(help="Heads of the student, at most the teacher's.", min=1)],
    out: Annotated[Path, typer.Option(help="Folder of the cache; give the same one again to resume.")],
    student_layers: Annotated[
        int | None, typer.Option(help="Layers of the student; default: as many as the teacher has.", min=1)
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Explicit layer pairs student:teacher, zero-based, such as 0:3,1:7. Holes are allowed."),
    ] = None,
    strategy: Annotated[Strategy, typer.Option(help="How maps are merged.")] = Strategy.shd,
    plan: Annotated[Plan, typer.Option(help="Which heads merge with which.")] = Plan.progressive,
    alpha_per: Annotated[
        AlphaPer, typer.Option(help="One merge weight per map (the paper), or per query row.")
    ] = AlphaPer.map,
    temperature: Annotated[float, typer.Option(help="Attention temperature of the stored maps, above 0.")] = 1.0,
    codec: Annotated[
        Codec, typer.Option(help="sqrt8-row, sqrt8-abs: 1 byte an entry; u4: half a byte; bf16: 2; float32: 4.")
    ] = Codec.sqrt8_row,
    compression: Annotated[
        Compression, typer.Option(help="zstd: smaller on slow disks; needs the extra 'zstd'.")
    ] = Compression.none,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = "text",
    max_length: MaxLengthOption = None,
    mask: Annotated[str | None, typer.Option(help="Attention-mask input, if not called attention_mask.")] = None,
    seed_column: Annotated[
        str | None,
        typer.Option(help="Column of augmentation seeds, stored beside the maps and replayed in training."),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(help="A sample on which the teacher gives NaN: stop and name it, or skip and record it."),
    ] = OnError.stop,
    batch_size: Annotated[int, typer.Option(help="Samples per teacher call.", min=1)] = 16,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Positions per teacher call, in place of --batch-size: short samples fill it too.", min=1),
    ] = None,
    samples_per_shard: Annotated[
        int | None, typer.Option(help="Samples per shard; default: about 256 MiB, at least 16 shards.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which samples fill the shards.", min=0)] = 0,
    provider: Provider = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads of onnxruntime.", min=1)] = None,
) -> None:
    """Run the teacher once over the data and store its squeezed attention.

    The merge happens inside the graph. The first batch is compared with the NumPy reference, and a difference above
    tolerance refuses the run. Stop it at any moment (also with kill -9): the same command goes on where it stopped.
    """
    from shd_ref.teacher.precompute import precompute as run_precompute
    from shd_ref.teacher.run import PrecomputeOptions, RunOptions
    from shd_ref.teacher.sources import open_source

    with reported_errors():
        options = PrecomputeOptions(
            num_student_heads=student_heads,
            num_student_layers=student_layers,
            layer_pairs=_layer_pairs(layers),
            plan=plan.value,
            strategy=strategy.value,
            alpha_per=alpha_per.value,
            temperature=temperature,
            codec=codec.value,
            compression=compression.value,
            on_error=on_error.value,
            seed_column=seed_column,
        )
        run = RunOptions(
            mask=mask,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            samples_per_shard=samples_per_shard,
            seed=seed,
            provider=provider,
            num_threads=threads,
        )
        source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
        with _progress("samples") as (bar, task):
            reading = bar.add_task("inputs read", total=None)
            summary = run_precompute(
                teacher,
                source,
                out,
                options,
                run,
                on_progress=lambda done, total, _: bar.update(task, completed=done, total=total),
                on_read=lambda done, total: bar.update(reading, completed=done, total=total),
            )
    console.print(_summary_table(summary))
    more = "" if tokenizer is None else f" --tokenizer {tokenizer} --text-column {text_column}"
    more += "" if max_length is None else f" --max-length {max_length}"
    console.print(
        f"next: shd verify {out} --teacher {teacher} --inputs {inputs}{more}", highlight=False, soft_wrap=True
    )


@app.command()
def verify(
    cache: Annotated[Path, typer.Argument(help="Folder of the cache.", metavar="CACHE")],
    teacher: Annotated[Path | None, typer.Option(help="Also run this teacher again on some records.")] = None,
    inputs: Annotated[Path | None, typer.Option(help="The model inputs that the cache was made from.")] = None,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = "text",
    max_length: MaxLengthOption = None,
    records: Annotated[int, typer.Option(help="How many records to run again.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of their choice.", min=0)] = 0,
    provider: Provider = "cpu",
) -> None:
    """Check every byte of a cache, and on request run its teacher again on a sample of records.

    Exit code 1 names each file and record that is damaged, missing or different.
    """
    from shd_ref.cache import verify_cache

    with reported_errors():
        if (teacher is None) != (inputs is None):
            raise ShdError("argument-value", "--teacher and --inputs must be given together; got one of them")
        with _progress("shards") as (bar, task):
            report = verify_cache(
                cache, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        if report.problems:
            messages.print(f"[bold red]{len(report.problems)} problem(s)[/] in {cache}:")
            for problem in report.problems:
                messages.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1)
        console.print(
            f"[green]intact[/]: {report.records} records in {report.shards} shards, "
            f"{decimal(report.bytes)}, every byte read"
        )
        if teacher is not None and inputs is not None:
            from shd_ref.teacher.recheck import recheck_records
            from shd_ref.teacher.sources import open_source

            source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
            again = recheck_records(cache, teacher, source, num_records=records, seed=seed, provider=provider)
            console.print(
                f"[green]same[/]: {again.records} records ({again.rows} rows) run again, "
                f"largest total variation {again.tv_max:.2g}"
            )


@app.command(
    add_help_option=False,  # the judge has its own, which teaches more
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def conformance(context: typer.Context) -> None:
    """Judge an implementation of the specification, in any language; see shd conformance --help."""
    from shd_ref.conformance.__main__ import main

    raise typer.Exit(main(context.args))


@contextmanager
def _progress(unit: str) -> Iterator[tuple[Progress, Any]]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        _RateColumn(),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=messages) as bar:
        yield bar, bar.add_task(unit, total=None)


class _RateColumn(ProgressColumn):
    """Steps per second, once there is something to divide."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def _layer_pairs(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(student), int(teacher)) for student, teacher in pairs)
    except ValueError:
        raise ShdError(
            "argument-value", f"--layers must be student:teacher pairs such as 0:3,1:7; got {text!r}", "LAYER-4"
        ) from None


def _summary_table(summary: Any) -> Table:
    table = Table(title=f"cache {summary.folder}", title_justify="left", show_header=False)
    rate = (summary.samples - summary.resumed) / max(summary.seconds, 1e-9)
    table.add_row("samples", f"{summary.samples} ({summary.resumed} were there), {rate:.1f} per second")
    if summary.skipped:
        table.add_row("skipped", f"[bold red]{summary.skipped}[/]: the teacher gave NaN; their receipts name them")
    ratio = summary.float32_bytes / max(summary.stored_bytes, 1)
    table.add_row("maps", f"{decimal(summary.stored_bytes)}, {ratio:.1f}x smaller than float32")
    alphas = summary.alphas
    if alphas.size:
        low, middle, high = np.quantile(alphas, [0.05, 0.5, 0.95])
        table.add_row("alpha", f"median {middle:.3f}, 90% in [{low:.3f}, {high:.3f}], of {alphas.size}")
        table.add_row("clipped", f"{summary.num_clipped} outside [0, 1]; {summary.num_degenerate} without preference")
    comparison = summary.comparison
    table.add_row(
        "residual",
        f"{comparison.residual:.4f} of the attention output, constant merge {comparison.constant_residual:.4f} "
        f"(first {summary.compared_samples} samples)",
    )
    error = summary.codec_error
    table.add_row(
        "codec", f"KL {error.kl_mean:.2g} nats a row (max {error.kl_max:.2g}), total variation {error.tv_mean:.2%}"
    )
    table.add_row(
        "graph = reference",
        f"maps within {comparison.map_difference:.1g}, {comparison.code_mismatch:.3%} of codes differ",
    )
    return table
