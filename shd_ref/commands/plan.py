"""``shd plan``: what a cache would cost, before anyone writes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from shd_ref.commands.app import app, print_forecast, print_remark, reported_errors
from shd_ref.commands.options import (
    AlphaPer,
    AlphaPerOption,
    BatchSize,
    BatchTokens,
    DecoderMaskOption,
    InputsPath,
    LayerPairs,
    MaskOption,
    MaxLengthOption,
    Plan,
    PlanOption,
    Provider,
    SitesOption,
    StudentHeads,
    StudentLayers,
    TeacherPath,
    TextOption,
    Threads,
    TokenizerOption,
    parse_layer_pairs,
    parse_student_layers,
)


@app.command(name="plan")
def plan_cache(
    teacher: TeacherPath,
    inputs: InputsPath,
    student_heads: StudentHeads,
    student_layers: StudentLayers = None,
    layers: LayerPairs = None,
    sites: SitesOption = None,
    plan: PlanOption = Plan.progressive,
    alpha_per: AlphaPerOption = AlphaPer.map,
    tokenizer: TokenizerOption = None,
    text_column: TextOption = None,
    max_length: MaxLengthOption = None,
    mask: MaskOption = None,
    decoder_mask: DecoderMaskOption = None,
    batch_size: BatchSize = 16,
    batch_tokens: BatchTokens = None,
    provider: Provider = "cpu",
    threads: Threads = None,
    samples: Annotated[int, typer.Option(help="On how many samples the teacher runs.", min=1)] = 8,
    read_bandwidth: Annotated[
        float, typer.Option(help="MB a second that storage can feed one training device.", min=0.001)
    ] = 500.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a few samples: bytes, time and error of every codec, and whether a cache pays at all.

    Break-even is the read bandwidth per training device below which the teacher, run while training, is faster.
    """
    from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
    from shd_ref.teacher.sources import open_source
    from shd_ref.teacher.study.forecast import forecast_cache

    with reported_errors():
        options = PrecomputeOptions(
            num_student_heads=student_heads,
            num_student_layers=parse_student_layers(student_layers),
            layer_pairs=parse_layer_pairs(layers),
            sites=sites,
            plan=plan.value,
            alpha_per=alpha_per.value,
        )
        run = RunOptions(
            mask=mask,
            decoder_mask=decoder_mask,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            provider=provider,
            num_threads=threads,
        )
        source = open_source(inputs, tokenizer=tokenizer, text_column=text_column, max_length=max_length)
        forecast = forecast_cache(teacher, source, options, run, num_samples=samples, bandwidth=1e6 * read_bandwidth)
        print_remark(source)
    if as_json:
        print(json.dumps(asdict(forecast)))
    else:
        print_forecast(forecast)
