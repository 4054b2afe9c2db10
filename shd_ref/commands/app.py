"""The subcommands of ``shd``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
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
from rich.text import Text

import shd_ref
from shd_ref.commands.options import (
    AlphaPer,
    AlphaPerOption,
    BatchSize,
    BatchTokens,
    CacheArgument,
    CalibrationSamples,
    Codec,
    Compression,
    DecoderMaskOption,
    Engine,
    FactoredCodec,
    Form,
    HeadsOfStudents,
    InputsPath,
    LayerPairs,
    MaskOption,
    MatchedBy,
    MatchedByOption,
    MaxLengthOption,
    OnError,
    Plan,
    PlanOption,
    Provider,
    Shards,
    SitesOption,
    Strategy,
    StrategyOption,
    StudentLayers,
    TeacherPath,
    Temperature,
    TextOption,
    Threads,
    TokenizerOption,
    check_teacher_options,
    parse_heads,
    parse_layer_pairs,
    parse_shards,
    parse_student_layers,
    refuse_nothing,
    words_of_inputs,
)
from shd_ref.commands.terminal import PlainConsole, marked
from shd_ref.errors import ShdError

if TYPE_CHECKING:
    from shd_ref.teacher.sources import Source

app = typer.Typer(
    name="shd",
    help="Squeeze a transformer teacher's attention into fewer heads, offline, and keep it in a cache.\n\n"
    "Typical use:  shd inspect teacher.onnx  ->  shd precompute teacher.onnx --inputs data.npz "
    "--student-heads 4 --out cache/  ->  shd verify cache/",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
console = PlainConsole()
messages = PlainConsole(stderr=True)


@contextmanager
def reported_errors() -> Iterator[None]:
    """A ``ShdError`` becomes one message and exit code 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ShdError as error:
        messages.print(marked("error", "bold red", f" ({error.code}): {error}"), soft_wrap=True)
        raise typer.Exit(1) from None


def print_remark(source: Source) -> None:
    """What is to be said about inputs that were read, on the error stream."""
    if source.remark is not None:
        messages.print(source.remark, highlight=False, soft_wrap=True)


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
def precompute(
    teacher: TeacherPath,
    inputs: InputsPath,
    student_heads: HeadsOfStudents,
    out: Annotated[
        str,
        typer.Option(
            help="Folder or address (s3://...) of the cache; give the same one again to resume.",
            metavar="CACHE",
            callback=refuse_nothing,
        ),
    ],
    student_layers: StudentLayers = None,
    layers: LayerPairs = None,
    sites: SitesOption = None,
    strategy: StrategyOption = Strategy.shd,
    plan: PlanOption = Plan.progressive,
    matched_by: MatchedByOption = MatchedBy.residual,
    calibration_samples: CalibrationSamples = 16,
    alpha_per: AlphaPerOption = AlphaPer.map,
    temperature: Temperature = 1.0,
    form: Annotated[
        Form,
        typer.Option(
            help="What to store: merged maps, or the teacher's queries and keys with the mixing (factored), "
            "smaller for long samples and with the temperature left free; shd plan compares."
        ),
    ] = Form.maps,
    factored_codec: Annotated[
        FactoredCodec, typer.Option(help="Of queries and keys: int8: 1 byte a number; float16: 2.")
    ] = FactoredCodec.int8,
    codec: Annotated[
        Codec,
        typer.Option(help="Of maps: sqrt8-row, sqrt8-abs: 1 byte an entry; u4: half a byte; bf16: 2; float32: 4."),
    ] = Codec.sqrt8_row,
    compression: Annotated[
        Compression, typer.Option(help="zstd: smaller on slow disks; needs the extra 'zstd'.")
    ] = Compression.none,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = None,
    max_length: MaxLengthOption = None,
    mask: MaskOption = None,
    decoder_mask: DecoderMaskOption = None,
    seed_column: Annotated[
        str | None,
        typer.Option(help="Column of augmentation seeds, stored beside the maps and replayed in training."),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(help="A sample on which the teacher gives NaN: stop and name it, or skip and record it."),
    ] = OnError.stop,
    batch_size: BatchSize = 16,
    batch_tokens: BatchTokens = None,
    samples_per_shard: Annotated[
        int | None, typer.Option(help="Samples per shard; default: about 256 MiB, at least 16 shards.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which samples fill the shards.", min=0)] = 0,
    provider: Provider = "cpu",
    threads: Threads = None,
    shards: Shards = None,
    engine: Annotated[
        Engine, typer.Option(help="This process, or actors on a Ray cluster (needs the extra 'ray').")
    ] = Engine.local,
    workers: Annotated[
        int | None,
        typer.Option(help="Ray actors, each with a teacher; default: what the cluster has room for.", min=1),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: measure a few samples and say what it would cost.")
    ] = False,
) -> None:
    """Run the teacher once over the data and store its squeezed attention.

    The merge happens inside the graph. The first batch is compared with the NumPy reference, and a difference above
    tolerance refuses the run. Stop it at any moment (also with kill -9): the same command goes on where it stopped.
    """
    from shd_ref.commands.tables import summary_table
    from shd_ref.teacher.precompute.engine import precompute as precompute_cache
    from shd_ref.teacher.precompute.engine import precompute_shapes, students_of
    from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
    from shd_ref.teacher.sources import open_source
    from shd_ref.teacher.study.forecast import forecast_cache

    with reported_errors():
        heads = parse_heads(student_heads)
        if engine is not Engine.ray and workers is not None:
            raise ShdError("argument-value", f"--workers must go with --engine ray; got {workers} without it")
        options = PrecomputeOptions(
            num_student_heads=heads[0],
            num_student_layers=parse_student_layers(student_layers),
            layer_pairs=parse_layer_pairs(layers),
            sites=sites,
            plan=plan.value,
            matched_by=matched_by.value,
            calibration_samples=calibration_samples,
            strategy=strategy.value,
            alpha_per=alpha_per.value,
            temperature=temperature,
            form=form.value,
            factored_codec=factored_codec.value,
            codec=codec.value,
            compression=compression.value,
            on_error=on_error.value,
            seed_column=seed_column,
        )
        run = RunOptions(
            mask=mask,
            decoder_mask=decoder_mask,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            samples_per_shard=samples_per_shard,
            seed=seed,
            provider=provider,
            num_threads=threads,
            shards=parse_shards(shards),
        )
        source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
        if dry_run:
            for number in heads:
                print_forecast(forecast_cache(teacher, source, replace(options, num_student_heads=number), run))
            print_remark(source)
            return
        with show_progress("samples") as (bar, task):
            reading = bar.add_task("inputs read", total=None)

            def on_progress(done: int, total: int, _: int) -> None:
                bar.update(task, completed=done, total=total)

            def on_read(done: int, total: int) -> None:
                bar.update(reading, completed=done, total=total)

            told: Any = {"on_progress": on_progress, "on_read": on_read}
            if engine is Engine.ray:
                from shd_ref.cache.storage.places import is_address
                from shd_ref.teacher.precompute.ray_engine import precompute_on_ray, precompute_shapes_on_ray

                # The actors open the inputs themselves, under this path.
                reopen = partial(
                    open_source,
                    inputs.absolute(),
                    tokenizer=None if tokenizer is None else tokenizer.absolute(),
                    text_column=text_column,
                    max_length=max_length,
                )
                places = teacher.absolute(), reopen, out if is_address(out) else Path(out).absolute()
                told["workers"] = workers
                if len(heads) == 1:
                    summaries = [precompute_on_ray(*places, options, run, **told)]
                else:
                    summaries = precompute_shapes_on_ray(*places, options, heads, run, **told)
            elif len(heads) == 1:
                summaries = [precompute_cache(teacher, source, out, options, run, **told)]
            else:
                summaries = precompute_shapes(teacher, source, out, options, heads, run, **told)
    for remark in dict.fromkeys(remark for summary in summaries for remark in summary.remarks):
        messages.print(marked("remark", "yellow", f": {remark}"), soft_wrap=True)
    for remark in dict.fromkeys(summary.remark for summary in summaries if summary.remark is not None):
        messages.print(remark, highlight=False, soft_wrap=True)
    for summary in summaries:
        console.print(summary_table(summary))
    if any(summary.missing_shards for summary in summaries):
        console.print("next: the other parts; the last one seals, or shd merge does where each has its folder")
        return
    again = ["--teacher", str(teacher), *words_of_inputs(inputs, tokenizer, text_column, max_length)]
    # As it was said: actors were given whole paths.
    students = [str(folder) for folder, _ in students_of(out, options, heads)]
    for place in [out] if len(heads) == 1 else students:
        console.print(f"next: {shlex.join(['shd', 'verify', place, *again])}", highlight=False, soft_wrap=True)


@app.command()
def verify(
    cache: CacheArgument,
    teacher: Annotated[Path | None, typer.Option(help="Also run this teacher again on some records.")] = None,
    inputs: Annotated[Path | None, typer.Option(help="The model inputs that the cache was made from.")] = None,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = None,
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
        check_teacher_options(teacher, inputs, tokenizer, text_column, max_length)
        with show_progress("shards") as (bar, task):
            report = verify_cache(
                cache, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        if report.problems:
            messages.print(marked(f"{len(report.problems)} problem(s)", "bold red", f" in {cache}:"), soft_wrap=True)
            for problem in report.problems:
                messages.print(f"  {problem}", highlight=False, soft_wrap=True)
            raise typer.Exit(1)
        counts = f"{report.records} records in {report.shards} shards, {decimal(report.bytes)}"
        console.print(marked("intact", "green", f": {counts}, every byte read"))
        if teacher is not None and inputs is not None:
            from shd_ref.teacher.sources import open_source
            from shd_ref.teacher.study.recheck import recheck_records

            source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
            again = recheck_records(cache, teacher, source, num_records=records, seed=seed, provider=provider)
            print_remark(source)
            counts = f"{again.records} records ({again.rows} rows) run again"
            console.print(marked("same", "green", f": {counts}, largest total variation {again.tv_max:.2g}"))


@app.command(
    add_help_option=False,  # the judge has its own, which teaches more
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def conformance(context: typer.Context) -> None:
    """Judge an implementation of the specification, in any language; see shd conformance --help."""
    from shd_ref.conformance.__main__ import main

    raise typer.Exit(main(context.args))


def print_forecast(forecast: Any) -> None:
    """The table of a forecast, and what to do."""
    from shd_ref.commands.tables import forecast_advice, forecast_table

    console.print(forecast_table(forecast))
    console.print(forecast_advice(forecast), highlight=False, soft_wrap=True)


@contextmanager
def show_progress(unit: str) -> Iterator[tuple[Progress, Any]]:
    """A bar on the error stream, and its task."""
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
